"""Read a YAML or JSON configuration file into a dict, and convert values to plain ones for such files."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from loopwright.errors import ConfigError


def read_mapping(path: str | os.PathLike[str], form: str | None = None) -> dict[str, Any]:
    """Return the contents of a file: JSON if its name ends in .json, else YAML, unless `form` names one of them."""
    import yaml

    path = Path(path)
    form = form or ("JSON" if path.suffix == ".json" else "YAML")
    try:
        text = path.read_text(encoding="utf-8")
        read = json.loads(text) if form == "JSON" else yaml.load(text, Loader=_yaml_loader())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the configuration file {path} is not {form}: {error}") from error
    if read is None:
        return {}
    if not isinstance(read, dict):
        raise ConfigError(f"the configuration file {path} must hold names and values, not a {type(read).__name__}")
    return {str(name): value for name, value in read.items()}


def _yaml_loader() -> Any:
    """Return PyYAML's safe loader, but with 1:30:00 as a text, not a base-60 number, as in YAML 1.2."""
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C takes a tenth of the time

    class Loader(base):  # type: ignore[misc]
        """Reads a number with colons as it is written."""

        def construct_yaml_int(self, node: Any) -> Any:
            return node.value if ":" in node.value else super().construct_yaml_int(node)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    return Loader


def plain(value: Any) -> Any:
    """Return a value as JSON and YAML can hold it; unsupported values become their text."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    return str(value)
