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
from loopwright.quantities import counted
from loopwright.sources.encodings import encoding_by_mark
from loopwright.sources.files import read_data
from loopwright.sources.images.folders import images_of, stem_of
from loopwright.sources.images.names import NAMES_TEXTS, names_of_folder
from loopwright.sources.images.tables import ListedTable
from loopwright.sources.tables import Row
from loopwright.sources.values import UnusableValueError


class YoloTable(ListedTable):
    """A folder of images and one of text files. An image without a file is an empty scene."""

    def __init__(self, path: Path, image_dir: str, annotation_dir: str, names_file: str | None) -> None:
        super().__init__(path, "yolo", ("image", "objects", "image_id"))
        self.image_dir, self.annotation_dir = image_dir, annotation_dir
        self.files, self.num_bytes, _ = images_of(path, image_dir)
        self._stems = [stem_of(file, image_dir) for file in self.files]
        self._texts = [os.path.join(annotation_dir, stem + ".txt") for stem in self._stems]
        self.names_file, self.names = names_of_folder(Path(self.root), names_file, annotation_dir)
        self._ids = {name: number for number, name in self.names.items()}
        digest = hashlib.sha256("\n".join([self.kind, *self.names.values()]).encode())
        contents = [self._read(index) for index in range(len(self.files))]
        for file, data in zip(self.files, contents, strict=True):
            digest.update(f"\n{file} {-1 if data is None else len(data)}\n".encode() + (data or b""))
        self.num_bytes += sum(len(data or b"") for data in contents)
        self.sha256 = digest.hexdigest()
        if all(data is None for data in contents):
            first = self._texts[0]
            what, saw = f"{path}: no image has a text file of objects", [f"looked for {first}"]
            raise InputError("data.annotations", what, saw=saw, fix=f"write the objects of {self.files[0]} to {first}")
        self._note_forms(b"\n".join(filter(None, contents)))
        texts = Path(self.root, annotation_dir).rglob("*.txt")
        there = {os.path.normpath(file.relative_to(self.root)) for file in texts if file.name not in NAMES_TEXTS}
        unused = sorted(there - set(map(os.path.normpath, self._texts)))
        if unused:
            self.notes += (f"{counted(len(unused), 'text file', 'belongs')} to no image: {', '.join(unused[:5])}",)

    def _note_forms(self, data: bytes) -> None:
        """Note lines that are read though they are not as they should be."""
        if b"," in data:
            self.notes += (f"text files of {self.name} have commas between numbers, which are read as blanks",)
        number = sum(len(line.replace(b",", b" ").split()) == 6 for line in data.splitlines())
        if number:
            what = f"{counted(number, 'line')} of text files of {self.name}"
            self.notes += (f"the last of six numbers in {what} is taken for a confidence and left out",)

    def _read(self, index: int) -> bytes | None:
        try:
            return read_data(Path(self.root, self._texts[index]))
        except FileNotFoundError:
            return None

    def row(self, index: int) -> Row:
        objects: dict[str, Any] = {"bbox": [], "category": [], "segmentation": [], "is_relative": True}
        data = self._read(index) or b""
        text = data.decode(encoding_by_mark(data) or "utf-8", "replace")
        for number, line in enumerate(text.splitlines(), 1):
            if not line.split():
                continue
            category, values = self._parse(line, index, number)
            objects["category"].append(category)
            is_outline = isinstance(values, list) and len(values) > 4
            objects["bbox"].append(None if is_outline else values)
            objects["segmentation"].append([values] if is_outline else None)
        return {"image": self.files[index], "objects": objects, "image_id": self._stems[index]}

    def _parse(self, line: str, index: int, number: int) -> tuple[int, list[float] | UnusableValueError]:
        """Return the class and the box or outline of a line; the error in their place if it has none."""
        try:
            first, *rest = line.split("," if "," in line else None)
            category, *values = map(float, (self._ids.get(first.strip(), first), *rest))
        except ValueError:
            category, values = math.nan, []
        if len(values) == 5 and 0 <= values[4] <= 1:
            del values[4]  # the confidence of a prediction
        is_object = len(values) == 4 or (len(values) >= 6 and len(values) % 2 == 0)
        if not is_object or not category.is_integer() or not all(map(math.isfinite, values)):
            expected = "class x_center y_center width height   or   class x1 y1 x2 y2 x3 y3 ..."
            what = f"{self._texts[index]}: line {number} is not an object: {line[:60]!r}"
            return 0, UnusableValueError(f"{what}; expected: {expected}")
        return int(category), values
