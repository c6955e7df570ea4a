"""COCO's json: images, annotations and categories in one file, which is loaded whole.

Category ids are numbered 0, 1, ... by ascending id. The annotations of an image stay in memory as one JSON text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopwright.errors import InputError
from loopwright.sources.files import FileBytes, Say
from loopwright.sources.images.tables import ListedTable, find_folder
from loopwright.sources.json_files import encodable, load_json
from loopwright.sources.tables import Row

LISTS = ("images", "annotations", "categories")
_MOST_NAMED = 5
_HEAD_BYTES = 1 << 16
_KEYS = ("bbox", "category_id", "segmentation", "iscrowd")
_UNQUOTED = "without quotes, as the number that it refers to"
_FORMAT = '{"images": [...], "annotations": [...], "categories": [...]}'
_FIX_IF_LARGE = (
    'split it by images, or give a .jsonl file with a line per image: {"image": "a.jpg", "objects": '
    '{"bbox": [[x, y, width, height], ...], "category": ["cat", ...], "segmentation": [...], "iscrowd": [...]}}'
)


def is_coco(path: Path) -> bool:
    """Whether a json file has COCO's format, an object with a list of images, by its first and last bytes."""
    source = FileBytes(path)
    head = source.read(source.start, _HEAD_BYTES)
    if not head.lstrip().startswith(b"{"):
        return False
    tail = source.read(max(0, source.num_bytes - _HEAD_BYTES), _HEAD_BYTES)
    return sum(f'"{name}"'.encode() in head + tail for name in LISTS) >= 2 or b'"file_name"' in head


class CocoTable(ListedTable):
    """The images of a COCO json, each with its objects. `image_dir` is relative to the folder of the file."""

    def __init__(self, source: FileBytes, image_dir: str | None, say: Say | None) -> None:
        super().__init__(source.path, "coco", ("image", "objects", "image_id"))
        self.num_bytes = source.num_bytes
        content = load_json(source, say, _FIX_IF_LARGE)
        self.sha256 = source.sha256
        if not isinstance(content, dict):
            what = f"{self.path} is not an object in COCO's format"
            raise InputError("data.json", what, saw=[repr(content)[:60]], fix=f"write {_FORMAT}")
        images, annotations, categories = (self._list(content, name) for name in LISTS)
        if not images:
            saw = [f"it holds: {', '.join(sorted(content))}"]
            raise InputError("data.annotations", f"{self.path} lists no images", saw=saw, fix=f"write {_FORMAT}")
        if "annotations" not in content:
            self.columns = ("image", "image_id")
        self._read_images(images)
        self._read_categories(categories)
        self._read_annotations(annotations)
        folder = os.path.dirname(self.root)
        self.image_dir = image_dir if image_dir is not None else self._find_images(folder)
        self.root = os.path.normpath(os.path.join(folder, self.image_dir))

    def _list(self, content: Row, name: str) -> list[Row]:
        found = content.get(name, [])
        if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
            what = f'{self.path}: "{name}" is not a list of objects'
            raise InputError("data.annotations", what, saw=[repr(found)[:80]], fix=f'write "{name}": [{{...}}, ...]')
        return found

    def _read_images(self, images: list[Row]) -> None:
        for place, image in enumerate(images):
            if not isinstance(image.get("id"), str | int | float) or not isinstance(image.get("file_name"), str):
                raise self._incomplete("images", place, "an id and a file_name", image)
        self.files = [image["file_name"] for image in images]
        self._ids = [image["id"] for image in images]
        sizes = [(image.get("width"), image.get("height")) for image in images]
        self._sizes = [size if all(isinstance(side, int) for side in size) else None for size in sizes]
        rows = {number: row for row, number in enumerate(self._ids)}
        twice = next((number for row, number in enumerate(self._ids) if rows[number] != row), None)
        if twice is not None:
            saw = [name for name, number in zip(self.files, self._ids, strict=True) if number == twice]
            what = f"{self.path}: two images have the id {twice!r}"
            raise InputError("data.annotations", what, saw=saw, fix="give each image its own id")

    def _read_categories(self, categories: list[Row]) -> None:
        names: dict[int, str] = {}
        taken: set[str] = set()
        for place, category in enumerate(categories):
            number, name = category.get("id"), encodable(category.get("name"))
            if not isinstance(number, int) or not isinstance(name, str) or not name.strip():
                raise self._incomplete("categories", place, "an id (a whole number) and a name", category)
            if name in taken or number in names:
                what = f"{self.path}: two categories have the same {'name' if name in taken else 'id'}"
                saw = [f"categories[{place}]: {json.dumps(category)[:80]}"]
                raise InputError("data.classes", what, saw=saw, fix="give each category its own id and name")
            names[number] = name
            taken.add(name)
        self.names = dict(sorted(names.items()))

    def _incomplete(self, name: str, place: int, needed: str, value: Row) -> InputError:
        what, saw = f"{self.path}: {name}[{place}] lacks {needed}", [json.dumps(value)[:100]]
        return InputError("data.annotations", what, saw=saw, fix=f"give each of the {name} {needed}")

    def _read_annotations(self, annotations: list[Row]) -> None:
        rows = {number: row for row, number in enumerate(self._ids)}
        unlisted = _unknown_ids(annotations, "image_id", rows)
        if unlisted:
            what = f"{len(unlisted):,} of {len(annotations):,} annotations are of an image that is not listed"
            saw = [f"annotations[{place}]: image_id {found!r}" for place, found in unlisted[:_MOST_NAMED]]
            fix = 'list the images under "images" with these ids, or delete the annotations'
            fix = f"write each image_id {_UNQUOTED}" if _are_quoted(unlisted, rows) else fix
            raise InputError("data.annotations", f"{self.path}: {what}", saw=saw, fix=fix)
        nameless = _unknown_ids(annotations, "category_id", self.names)
        if nameless:
            ids = ", ".join(sorted({str(found) for _, found in nameless})[:8])
            images = [self.files[rows[annotations[place]["image_id"]]] for place, _ in nameless[:_MOST_NAMED]]
            saw = [f"category_id {found!r} in {image}" for (_, found), image in zip(nameless, images, strict=False)]
            fix = 'give each annotation its "category_id": the id of one of the categories'
            if _are_quoted(nameless, self.names):
                fix = f"write each category_id {_UNQUOTED}"
            elif isinstance(nameless[0][1], int):
                fix = f'add {{"id": {nameless[0][1]}, "name": "..."}} to "categories"'
            what = f"{self.path}: {len(nameless):,} annotations have a category without a name: {ids}"
            raise InputError("data.classes", what, saw=saw, fix=fix)
        objects: list[list[Row]] = [[] for _ in self.files]
        for annotation in annotations:
            objects[rows[annotation["image_id"]]].append({key: annotation.get(key) for key in _KEYS})
        self._objects = [json.dumps(found).encode() for found in objects]

    def _find_images(self, folder: str) -> str:
        stem = self.name.partition(".")[0]
        split = stem.rpartition("_")[2]
        candidates = [".", "images", split, stem, f"images/{split}", f"{split}/images"]
        candidates += ["..", "../images", f"../{split}", f"../images/{split}", f"../{split}/images"]
        return find_folder(folder, candidates, self.files[:_MOST_NAMED])

    def row(self, index: int) -> Row:
        row: Row = {"image": self.files[index], "image_id": self._ids[index]}
        if "objects" in self.columns:
            found = json.loads(self._objects[index])
            row["objects"] = {
                "bbox": [each["bbox"] for each in found],
                "category": [each["category_id"] for each in found],
                "segmentation": [each["segmentation"] for each in found],
                "iscrowd": [each["iscrowd"] or 0 for each in found],
                "size": self._sizes[index],
            }
        return row


def _unknown_ids(annotations: list[Row], key: str, known: Mapping[Any, Any]) -> list[tuple[int, Any]]:
    """Return (place, id) of each annotation whose id is not known; a list or an object never is."""
    ids = [(place, annotation.get(key)) for place, annotation in enumerate(annotations)]
    return [(place, found) for place, found in ids if not isinstance(found, str | int | float) or found not in known]


def _are_quoted(unknown: list[tuple[int, Any]], known: Mapping[Any, Any]) -> bool:
    """Whether ids are unknown because they are texts of numbers."""
    texts = [found for _, found in unknown if isinstance(found, str) and found.strip().isdecimal()]
    return any(int(text) in known for text in texts)
