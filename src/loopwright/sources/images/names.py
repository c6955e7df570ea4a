"""Class names by number, from files next to the data: id2label.json, classes.txt, data.yaml."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections import Counter
from pathlib import Path
from shlex import quote
from typing import Any

from loopwright.config.files import UNREADABLE_YAML, load_yaml
from loopwright.errors import InputError
from loopwright.sources.encodings import decode
from loopwright.sources.files import read_data

NAMES_FILES = ("id2label.json", "label2id.json", "classes.json", "labels.json", "data.yaml", "data.yml", "dataset.yaml")
NAMES_TEXTS = ("classes.txt", "obj.names", "labels.txt")

_FORMAT = '{"0": "background", "1": "cat"}, or a list of names'
_SPLIT = re.compile(r"(train|training|validation|valid|val|dev|eval|test)[\d_-]*")

Names = dict[int, str]


def find_names_file(root: Path, annotation_dir: str = ".") -> Path | None:
    """Return the first file with class names in a folder; for a folder `train` also in its parent."""
    above = [root.parent] if _SPLIT.fullmatch(root.name.lower()) else []
    folders = (root, *above, root / annotation_dir)
    paths = (folder / name for folder in folders for name in (*NAMES_FILES, *NAMES_TEXTS))
    found = (path for path in paths if path.is_file())
    return next((each for each in found if each.suffix not in (".yaml", ".yml") or "names" in read_yaml(each)), None)


def names_of_folder(root: Path, names_file: str | None, annotation_dir: str = ".") -> tuple[str | None, Names]:
    """Return the file of class names of a folder, relative to it, and the names; it is looked for if not given."""
    if names_file is None:
        found = find_names_file(root, annotation_dir)
        names_file = os.path.relpath(found, root) if found is not None else None
    return names_file, read_names(root / names_file) if names_file is not None else {}


def read_names(path: Path) -> Names:
    """Return the names by ascending number; raise an InputError (data.file, data.json, data.classes)."""
    text = _text_of(path)
    if path.suffix in (".txt", ".names"):
        names: Any = [line.strip() for line in text.splitlines() if line.strip()]
    elif path.suffix in (".yaml", ".yml"):
        names = read_yaml(path).get("names", [])
    else:
        try:
            names = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError("data.json", f"{path} is not JSON: {error}", fix=f"write {_FORMAT}") from error
    found = _as_names(names)
    twice = sorted(name for name, number in Counter(found.values()).items() if number > 1)
    if not found or twice:
        what = f"{path} gives two classes the name {twice[0]!r}" if twice else f"{path} holds no class names"
        form = "names: [cat, dog]" if path.suffix in (".yaml", ".yml") else _FORMAT
        saw, fix = [f"it starts with {text[:60]!r}"], f"give each class its own name: {form}"
        raise InputError("data.classes", what, saw=saw, fix=fix)
    return found


def read_yaml(path: Path) -> dict[str, Any]:
    yaml, text = importlib.import_module("yaml"), _text_of(path)
    try:
        content = load_yaml(text)
    except (*UNREADABLE_YAML, yaml.YAMLError) as error:
        what, saw = f"{path} cannot be read", str(error).splitlines()[:3]
        raise InputError("data.file", what, saw=saw, fix="write it as YAML: names: [cat, dog]") from error
    return content if isinstance(content, dict) else {}


def _text_of(path: Path) -> str:
    try:
        return decode(read_data(path), None, str(path))[0]
    except OSError as error:
        what, fix = f"{path} cannot be read", f"chmod u+r {quote(str(path))}"
        raise InputError("data.file", what, saw=[str(error)], fix=fix) from error
    except InputError as error:  # --encoding is that of the data
        fix = f"open {path} in an editor and save it as UTF-8"
        raise InputError("data.encoding", error.what, saw=error.saw, fix=fix) from error


def _as_names(value: Any) -> Names:
    """Return names by number from {"0": "sky"}, {"sky": 0}, ["sky"] or [{"id": 0, "name": "sky"}]; else empty."""
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        value = {part.get("id"): part.get("name") for part in value}
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {}
    if all(_is_id(number) for number in value):
        pairs = [(int(number), name) for number, name in value.items()]
    elif all(_is_id(number) for number in value.values()):
        pairs = [(int(number), name) for name, number in value.items()]
    else:
        return {}
    return {number: str(name) for number, name in sorted(pairs, key=lambda pair: pair[0])}


def _is_id(value: Any) -> bool:
    if isinstance(value, str):
        return value.isdecimal() and len(value) < 20
    return isinstance(value, int) and not isinstance(value, bool)
