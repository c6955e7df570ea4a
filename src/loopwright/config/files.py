"""Read a YAML or JSON configuration file into a dict, and convert values to plain ones for such files."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from loopwright.errors import ConfigError

MOST_CHARACTERS = 1 << 20
MOST_VALUES = 50_000
MOST_DEPTH = 100
_MOST_DIGITS = 1000  # of a number, which takes quadratic time to read or to print
# Raised by the parsers and constructors of JSON and YAML, besides yaml.YAMLError.
UNREADABLE_YAML = (ValueError, LookupError, TypeError, AttributeError, RecursionError, ArithmeticError)


def read_mapping(path: str | os.PathLike[str], form: str | None = None) -> dict[str, Any]:
    """Return the contents of a file: JSON if its name ends in .json, else YAML, unless `form` names one of them."""
    import yaml

    path = Path(path)
    form = form or ("JSON" if path.suffix == ".json" else "YAML")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
        check_length(text)
        read = json.loads(text) if form == "JSON" else load_yaml(text)
        check_depth(read)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror or error}") from error
    except (*UNREADABLE_YAML, yaml.YAMLError) as error:
        raise ConfigError(f"the configuration file {path} is not {form}: {error}") from error
    if read is None:
        return {}
    if not isinstance(read, dict):
        raise ConfigError(f"the configuration file {path} must hold names and values, not a {type(read).__name__}")
    return {str(name): value for name, value in read.items()}


def load_yaml(text: str) -> Any:
    """Return a YAML document; raise a ValueError with the limit that it exceeds before anything is built from it."""
    import yaml

    check_length(text)
    loader = _yaml_loader()
    sizes: dict[str, int] = {}  # the values under each anchor, with its aliases expanded
    opened: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(text, Loader=loader):
        anchor, size = getattr(event, "anchor", None), 1
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((anchor, 1))
            if len(opened) > MOST_DEPTH:
                raise ValueError(f"it is nested more than {MOST_DEPTH} levels deep, which is the limit")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = opened.pop()
        elif isinstance(event, yaml.AliasEvent):
            size = sizes.get(str(anchor), MOST_VALUES + 1)  # an alias inside its own anchor never ends
        elif not isinstance(event, yaml.ScalarEvent):
            continue
        if anchor is not None and not isinstance(event, yaml.AliasEvent):
            sizes[anchor] = size
        opened[-1] = (opened[-1][0], opened[-1][1] + size)
        if opened[-1][1] > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES:,} values with its aliases expanded, which is the limit")
    return yaml.load(text, Loader=loader)


def check_length(text: str) -> None:
    """Raise a ValueError for a text that would take long to parse."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS:,} characters, which is the limit")


def check_depth(value: Any) -> None:
    """Raise a ValueError for lists and dicts that are nested too deeply for the code that walks over them."""
    level = [value]
    for _ in range(MOST_DEPTH):
        inside = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (list, dict))]
        level = [child for each in inside for child in each]
        if not level:
            return
    raise ValueError(f"it is nested more than {MOST_DEPTH} levels deep, which is the limit")


@functools.cache
def _yaml_loader() -> Any:
    """Return PyYAML's safe loader, but with 1:30:00 as a text, not a base-60 number, as in YAML 1.2."""
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C takes a tenth of the time

    class Loader(base):  # type: ignore[misc]
        """Reads a number with colons as it is written."""

        def construct_number(self, node: Any) -> Any:
            if ":" in node.value:
                return node.value
            if len(node.value) > _MOST_DIGITS:
                raise ValueError(f"it has a number of {len(node.value):,} digits, the limit is {_MOST_DIGITS:,}")
            is_int = node.tag.endswith(":int")
            return super().construct_yaml_int(node) if is_int else super().construct_yaml_float(node)

    for kind in ("int", "float"):
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", Loader.construct_number)
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
    return str(value).removeprefix("torch.")  # a dtype by its name alone
