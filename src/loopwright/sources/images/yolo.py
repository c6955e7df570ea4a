"""Images with one text file of boxes or outlines each, one object per line, in fractions of the image.

A line is `class x_center y_center width height`, or `class x1 y1 x2 y2 x3 y3 ...` for an outline.
"""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Any

from loopwright.errors import InputError
from loopwright.sources.images.folders import list_images, no_images
from loopwright.sources.images.names import NAMES_TEXTS, find_names_file, read_names
from loopwright.sources.images.tables import ListedTable
from loopwright.sources.tables import Row


class YoloTable(ListedTable):
    """A folder of images and one of text files. An image without a file is an empty scene."""

    def __init__(self, path: Path, image_dir: str, annotation_dir: str, names_file: str | None) -> None:
        self.path = str(path)
        self.kind = "yolo"
        self.columns = ("image", "objects", "image_id")
        self.root = os.path.abspath(path)
        self.image_dir, self.annotation_dir = image_dir, annotation_dir
        self.files, self.num_bytes = list_images(Path(self.root), image_dir)
        if not self.files:
            raise no_images(path / image_dir)
        if names_file is None:
            found = find_names_file(Path(self.root), annotation_dir)
            names_file = os.path.relpath(found, self.root) if found is not None else None
        self.names_file = names_file
        self.names = read_names(Path(self.root, names_file)) if names_file is not None else {}
        digest = hashlib.sha256("\n".join([self.kind, *self.names.values()]).encode())
        num_without = 0
        for index in range(len(self.files)):
            data = self._read(index)
            num_without += data is None
            digest.update(f"\n{self.files[index]} {-1 if data is None else len(data)}\n".encode())
            digest.update(data or b"")
            self.num_bytes += len(data or b"")
        self.sha256 = digest.hexdigest()
        if num_without == len(self.files):
            raise InputError(
                "data.annotations",
                f"{path}: no image has a text file of objects",
                saw=[f"looked for {self._labels_of(0)}"],
                fix=f"write the objects of {self.files[0]} to {self._labels_of(0)}",
            )
        self._check_unused()

    def _labels_of(self, index: int) -> str:
        stem = os.path.splitext(os.path.relpath(self.files[index], self.image_dir))[0]
        return os.path.join(self.annotation_dir, stem + ".txt")

    def _read(self, index: int) -> bytes | None:
        try:
            return Path(self.root, self._labels_of(index)).read_bytes()
        except FileNotFoundError:
            return None

    def _check_unused(self) -> None:
        used = {os.path.normpath(self._labels_of(index)) for index in range(len(self.files))}
        folder = Path(self.root, self.annotation_dir)
        there = {os.path.normpath(path.relative_to(self.root)) for path in folder.rglob("*.txt")}
        unused = sorted(name for name in there - used if os.path.basename(name) not in NAMES_TEXTS)
        if unused:
            self.notes = (f"{len(unused):,} text files belong to no image: {', '.join(unused[:5])}",)

    def row(self, index: int) -> Row:
        """Return the image, its objects in fractions of its size, and its name without ending."""
        objects: dict[str, Any] = {"bbox": [], "category": [], "segmentation": [], "is_relative": True}
        text = (self._read(index) or b"").decode("utf-8", "replace")
        for number, line in enumerate(text.splitlines(), 1):
            if not line.split():
                continue
            category, values = self._parse(line, index, number)
            objects["category"].append(category)
            objects["bbox"].append(values if len(values) == 4 else None)
            objects["segmentation"].append([values] if len(values) > 4 else None)
        stem = os.path.splitext(os.path.relpath(self.files[index], self.image_dir))[0]
        return {"image": self.files[index], "objects": objects, "image_id": stem}

    def _parse(self, line: str, index: int, number: int) -> tuple[int, list[float]]:
        try:
            category, *values = map(float, line.split())
        except ValueError:
            category, values = math.nan, []
        is_box = len(values) == 4 or (len(values) >= 6 and len(values) % 2 == 0)
        if not is_box or not category.is_integer() or not all(map(math.isfinite, values)):
            raise InputError(
                "data.boxes",
                f"{self._labels_of(index)}: line {number} is no object",
                saw=[repr(line[:80])],
                fix="write: class x_center y_center width height   or   class x1 y1 x2 y2 x3 y3 ...",
            )
        return int(category), values

    def settings(self) -> dict[str, Any]:
        """Return the kind, the two folders, and the file of names."""
        return {
            "kind": self.kind,
            "image_dir": self.image_dir,
            "annotation_dir": self.annotation_dir,
        } | ({"names_file": self.names_file} if self.names_file is not None else {})
