"""COCO's json: images, annotations and categories in one file. Only the offsets of annotations are kept.

Category ids are numbered 0, 1, ... by ascending id. Annotations are read with their image.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from loopwright.errors import InputError
from loopwright.sources.files import FileBytes, Offsets, Say
from loopwright.sources.images.reading import path_of
from loopwright.sources.images.tables import ListedTable
from loopwright.sources.json_files import ListReader, mended
from loopwright.sources.tables import Row

LISTS = ("images", "annotations", "categories")
_MOST_NAMED = 5
_HEAD_BYTES = 1 << 16


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
        self.source = source
        self.path = str(source.path)
        self.kind = "coco"
        self.num_bytes = source.num_bytes
        self.files: list[str] = []
        self._ids: list[Any] = []
        self._sizes: list[tuple[int, int] | None] = []
        self.names = {}
        images_of: list[Any] = []
        categories_of: list[Any] = []
        starts, ends = array("Q"), array("Q")
        found = set()
        for name, start, end, value in ListReader(source, say).parts(LISTS):
            found.add(name)
            if value is None:
                continue
            if name in LISTS and not isinstance(value, dict):
                raise InputError(
                    "data.annotations",
                    f'{self.path}: "{name}" in line {source.line_at(start):,} is no list of objects',
                    saw=[repr(value)[:80]],
                    fix=f'write "{name}": [{{...}}, ...]',
                )
            if name == "images":
                self._add_image(value, start)
            elif name == "categories":
                self._add_category(value, start)
            elif name == "annotations":
                images_of.append(value.get("image_id"))
                categories_of.append(value.get("category_id"))
                starts.append(start)
                ends.append(end)
        self.sha256 = source.sha256
        if not self.files:
            raise InputError(
                "data.annotations",
                f"{self.path} lists no images",
                saw=[f"it holds: {', '.join(sorted(found))}"],
                fix='give COCO\'s form: {"images": [...], "annotations": [...], "categories": [...]}',
            )
        self.names = {number: self.names[number] for number in sorted(self.names)}
        rows = self._rows_of(images_of, starts)
        self._check_categories(categories_of, rows, starts)
        order = np.argsort(rows, kind="stable")
        self._starts: Offsets = np.array(starts, np.uint64)[order]
        self._ends: Offsets = np.array(ends, np.uint64)[order]
        self._firsts = np.searchsorted(rows[order], np.arange(len(self.files) + 1))
        self.columns = ("image", "objects", "image_id") if "annotations" in found else ("image", "image_id")
        folder = os.path.dirname(os.path.abspath(self.path))
        self.image_dir = image_dir if image_dir is not None else self._find_images(Path(folder))
        self.root = os.path.normpath(os.path.join(folder, self.image_dir))

    # ----------------------------------------------------------------------------------------------------- reading

    def _add_image(self, value: Row, start: int) -> None:
        if not isinstance(value.get("id"), str | int | float) or not isinstance(value.get("file_name"), str):
            raise self._damaged("an image", "id and file_name", value, start)
        width, height = value.get("width"), value.get("height")
        self.files.append(value["file_name"])
        self._ids.append(value["id"])
        self._sizes.append((width, height) if isinstance(width, int) and isinstance(height, int) else None)

    def _add_category(self, value: Row, start: int) -> None:
        number, name = value.get("id"), mended(value.get("name"))
        if not isinstance(number, int) or not isinstance(name, str) or not name.strip():
            raise self._damaged("a category", "id (a whole number) and name", value, start)
        if name in self.names.values() or number in self.names:
            raise InputError(
                "data.classes",
                f"{self.path}: two categories have the same {'name' if name in self.names.values() else 'id'}",
                saw=[f"line {self.source.line_at(start):,}: {json.dumps(value)[:80]}"],
                fix="give each category its own id and name",
            )
        self.names[number] = name

    def _damaged(self, what: str, needed: str, value: Row, start: int) -> InputError:
        return InputError(
            "data.annotations",
            f"{self.path}: {what} in line {self.source.line_at(start):,} lacks its {needed}",
            saw=[json.dumps(value)[:100]],
            fix=f"give {what} {needed}",
        )

    def _rows_of(self, images_of: list[Any], starts: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the row of each annotation; refuse duplicate or unknown image ids."""
        rows = {number: row for row, number in enumerate(self._ids)}
        if len(rows) != len(self._ids):
            twice = next(number for row, number in enumerate(self._ids) if rows[number] != row)
            raise InputError(
                "data.annotations",
                f"{self.path}: two images have the id {twice!r}",
                saw=[f"{name} " for name, number in zip(self.files, self._ids, strict=True) if number == twice],
                fix="give each image its own id",
            )
        unknown = [place for place, number in enumerate(images_of) if not _is_in(number, rows)]
        if unknown:
            fix = 'list the images under "images" with these ids, or take the annotations out'
            if any(_is_in(_as_number(images_of[place]), rows) for place in unknown):
                fix = "write the image_id as the id of the image is written: a number without quotes"
            raise InputError(
                "data.annotations",
                f"{self.path}: {len(unknown):,} of {len(images_of):,} annotations are of an image that is not listed",
                saw=[
                    f"image_id {images_of[place]!r} in line {self.source.line_at(int(starts[place])):,}"
                    for place in unknown[:_MOST_NAMED]
                ],
                fix=fix,
            )
        return np.array([rows[number] for number in images_of], np.int64)

    def _check_categories(self, categories_of: list[Any], rows: Any, starts: Any) -> None:
        nameless = [place for place, number in enumerate(categories_of) if not _is_in(number, self.names)]
        if not nameless:
            return
        first = categories_of[nameless[0]]
        fix = f'add {{"id": {first}, "name": "..."}} to "categories"'
        if _is_in(_as_number(first), self.names):
            fix = "write the category_id as the id of the category is written: a number without quotes"
        elif not isinstance(first, int):
            fix = 'give each annotation its "category_id": the id of one of the categories'
        missing = sorted({str(categories_of[place]) for place in nameless})
        raise InputError(
            "data.classes",
            f"{self.path}: {len(nameless):,} annotations have a category without a name: {', '.join(missing[:8])}",
            saw=[
                f"category_id {categories_of[place]!r} in {self.files[int(rows[place])]}, "
                f"line {self.source.line_at(int(starts[place])):,}"
                for place in nameless[:_MOST_NAMED]
            ],
            fix=fix,
        )

    def _find_images(self, folder: Path) -> str:
        """Return the folder of the first images, relative to the file; "." if none is found."""
        stem = os.path.basename(self.path).partition(".")[0]
        split = stem.rpartition("_")[2]
        candidates = [".", "images", split, stem, f"images/{split}", f"{split}/images"]
        candidates += ["..", "../images", f"../{split}", f"../images/{split}", f"../{split}/images"]
        for candidate in candidates:
            if any(os.path.isfile(path_of(str(folder / candidate), name)) for name in self.files[:_MOST_NAMED]):
                return os.path.normpath(candidate)
        return "."

    # -------------------------------------------------------------------------------------------------------- rows

    def row(self, index: int) -> Row:
        """Return the image, its id, and its objects in the format of the file."""
        row: Row = {"image": self.files[index], "image_id": self._ids[index]}
        if "objects" in self.columns:
            places = range(int(self._firsts[index]), int(self._firsts[index + 1]))
            found = [json.loads(self.source.read_row(int(self._starts[k]), int(self._ends[k]))) for k in places]
            row["objects"] = {
                "bbox": [annotation.get("bbox") for annotation in found],
                "category": [annotation["category_id"] for annotation in found],
                "segmentation": [annotation.get("segmentation") for annotation in found],
                "iscrowd": [annotation.get("iscrowd", 0) for annotation in found],
                "size": self._sizes[index],
            }
        return row

    def settings(self) -> dict[str, Any]:
        """Return the kind, and the location of the images."""
        return {"kind": self.kind, "image_dir": self.image_dir}


def _is_in(number: Any, known: Mapping[Any, Any]) -> bool:
    """Whether an id is known; a list or an object never is."""
    return isinstance(number, str | int | float) and number in known


def _as_number(value: Any) -> Any:
    """Return a text as a number; None for anything else."""
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else None
