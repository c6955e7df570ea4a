"""One pass over the images of a file and their annotations."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loopwright.errors import InputError
from loopwright.sources.files import Progress, Say
from loopwright.sources.images.masks import class_of, count_ids, decode_ids, objects_of_mask
from loopwright.sources.images.objects import Objects, read_objects, stated_size
from loopwright.sources.images.reading import BadImageError, Source, as_source, look_at, read_bytes, shown_source
from loopwright.sources.images.tables import ImageTable
from loopwright.sources.schema import Role
from loopwright.sources.values import UnusableValueError

MOST_MASKS_SCANNED = 5_000
MOST_NAMED = 5
SAY_EVERY = 200


class SceneOptions(NamedTuple):
    """The meaning of masks: the ignored id, and whether 0 means no class and all others are one too high."""

    ignore_index: int = 255
    reduce_labels: bool = False


@dataclass
class Findings:
    """The count of a finding, and its first occurrences in words."""

    number: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, what: str) -> None:
        """Count one more."""
        self.number += 1
        if len(self.first) < MOST_NAMED:
            self.first.append(what)


def picture_of(value: Any, folder: str) -> Source | None:
    """Return the picture of class and instance ids, if objects are given as one; None for lists."""
    is_path = isinstance(value, str) and bool(value.strip()) and not value.lstrip().startswith(("{", "["))
    is_stored = isinstance(value, dict) and ("bytes" in value or "path" in value)
    return as_source(value, folder) if is_path or is_stored or isinstance(value, bytes) else None


def read_scene(value: Any, folder: str, size: tuple[int, int], is_turned: bool, options: SceneOptions) -> Objects:
    """Return the objects of an image from lists, JSON, or a picture of class and instance ids.

    Raises:
        UnusableValueError: It is neither.
        BadImageError: It is a picture that cannot be decoded.
    """
    picture = picture_of(value, folder)
    if picture is not None:
        value = objects_of_mask(picture, options.ignore_index, options.reduce_labels)
    return read_objects(value, size, is_turned)


class SceneScan:
    """Collects the properties of the images of one file, block by block; `finish` refuses unusable ones.

    Attributes:
        is_bad: Which rows have an image or mask that is missing, truncated or invalid.
        bad: The same in words.
        sizes: Width and height of each upright image; 0 for a bad one.
        num_turned: The number of images that EXIF rotates by 90 degrees.
        counts: The frequency of each class, by name or id, by scanned row.
        num_objects: By row, for files with objects.
        dropped: Dropped boxes, by reason.
        clipped: Boxes clipped at the edge of their image.
        first_with: The first row with each class, and the frequency.
        num_masks_scanned: The number of masks read completely.
    """

    def __init__(self, table: ImageTable, options: SceneOptions, say: Say | None) -> None:
        self.table = table
        self.options = options
        self.is_bad = np.zeros(len(table), np.bool_)
        self.bad = Findings()
        self.sizes: npt.NDArray[np.int32] = np.zeros((len(table), 2), np.int32)
        self.num_turned = 0
        self.counts: dict[int, dict[Any, int]] = {}
        self.first_with: dict[Any, tuple[int, int]] = {}
        self.num_objects: npt.NDArray[np.int32] = np.zeros(len(table), np.int32)
        self.dropped: dict[str, Findings] = {}
        self.clipped = Findings()
        self.num_masks_scanned = 0
        self._is_turned = np.zeros(len(table), np.bool_)
        self._digest = hashlib.sha256()
        self._has_files = False
        self._wrong_size = Findings()
        self._wrong_mask = Findings()
        self._no_outline = Findings()
        self._turned_boxes = 0
        self._num_shares = 0
        self._say = say

    @property
    def sha256(self) -> str:
        """The sha256 of all images and masks in separate files; "" if all are inside the table."""
        return self._digest.hexdigest() if self._has_files else ""

    @property
    def warnings(self) -> list[str]:
        """The warnings about the findings, in sentences."""
        found = []
        if self._turned_boxes:
            found.append(
                f"{self._turned_boxes:,} images of {self.table.name} are turned by their EXIF orientation, and their "
                "annotations state the size before that: boxes are taken to be in the upright image"
            )
        return found

    def add(self, role: Role, column: str, start: int, values: list[Any]) -> list[Any]:
        """Add the values of some rows; return the part of each in its row's content hash."""
        add_one = {"image": self._add_image, "mask": self._add_mask, "objects": self._add_objects}[role.kind]
        taken = []
        for row, value in enumerate(values, start):
            try:
                taken.append(add_one(row, value, role, column))
            except UnusableValueError as error:
                raise self._unusable(role, row, error) from error
            if self._say is not None and role.kind != "objects" and (row + 1) % SAY_EVERY == 0:
                self._say(Progress(self.table.path, f"checking {role.kind}s", row + 1, len(self.table)))
        return taken

    def _unusable(self, role: Role, row: int, error: UnusableValueError) -> InputError:
        what = f"{self.table.name}: the {role.name} in {self.table.place(row)} cannot be used"
        fix = f"correct it, or {role.flag} with another column"
        if role.kind == "objects":
            return InputError("data.boxes", what, saw=[str(error)], fix=fix)
        return InputError("data.value", what, saw=[str(error)], fix=fix)

    def _add_image(self, row: int, value: Any, role: Role, column: str) -> str:
        source = as_source(value, self.table.root)
        if source is None:
            return ""
        try:
            facts = look_at(source)
        except BadImageError as error:
            self._note_file(source, value, *error.fingerprint)
            self._note_bad(row, source, error)
            return f"bad image {row}"
        self._note_file(source, value, facts.sha256, facts.num_bytes)
        self.sizes[row] = facts.width, facts.height
        self._is_turned[row] = facts.is_turned
        self.num_turned += facts.is_turned
        return facts.sha256

    def _note_bad(self, row: int, source: Source, error: BadImageError) -> None:
        if not self.is_bad[row]:
            where = f" ({self.table.place(row)})" if not self.table.has_fixed_columns else ""
            self.bad.add(f"{shown_source(source)} {error}{where}")
        self.is_bad[row] = True

    def _note_file(self, source: Source, value: Any, sha256: str, num_bytes: int) -> None:
        if isinstance(source, str):
            self._has_files = True
            self._digest.update(file_line(value, sha256, num_bytes))

    # ------------------------------------------------------------------------------------------------------- masks

    def _add_mask(self, row: int, value: Any, role: Role, column: str) -> Any:
        source = as_source(value, self.table.root)
        if source is None:
            return None
        try:
            facts = look_at(source)
        except BadImageError as error:
            self._note_file(source, value, *error.fingerprint)
            self._note_bad(row, source, error)
            return value
        self._note_file(source, value, facts.sha256, facts.num_bytes)
        if not self.is_bad[row] and (facts.width, facts.height) != tuple(self.sizes[row]):
            width, height = self.sizes[row]
            self._wrong_size.add(f"{_short(source)} is {facts.width} x {facts.height}, its image is {width} x {height}")
        elif self._is_scanned(row):
            self._count_mask(row, source)
        return value

    def _is_scanned(self, row: int) -> bool:
        """Whether a mask is read completely: all, or some at equal distances."""
        number = len(self.table)
        if number <= MOST_MASKS_SCANNED:
            return True
        return row * MOST_MASKS_SCANNED // number != (row - 1) * MOST_MASKS_SCANNED // number

    def _count_mask(self, row: int, source: Source) -> None:
        try:
            found = count_ids(decode_ids(source))
        except BadImageError as error:
            self._note_bad(row, source, error)
            return
        except UnusableValueError as error:
            self._wrong_mask.add(f"{_short(source)}: {error}")
            return
        self.num_masks_scanned += 1
        for number, pixels in found.items():
            if class_of(number, *self.options) is not None:
                self.first_with.setdefault(number, (row, pixels))
        self.counts[row] = found

    # ----------------------------------------------------------------------------------------------------- objects

    def _add_objects(self, row: int, value: Any, role: Role, column: str) -> Any:
        picture = picture_of(value, self.table.root)
        if isinstance(picture, str):
            self._note_file(picture, value, *content_of(picture))
        if self.is_bad[row] or not self.sizes[row].any():
            return value
        size = int(self.sizes[row, 0]), int(self.sizes[row, 1])
        is_turned = bool(self._is_turned[row])
        try:
            found = read_scene(value, self.table.root, size, is_turned, self.options)
        except BadImageError as error:
            assert picture is not None, "lists are no images"
            self._note_bad(row, picture, error)
            return value
        place = self.table.place(row)
        if found.problem is not None:
            self._wrong_size.add(f"{place}: {found.problem}")
        self._turned_boxes += is_turned and stated_size(value) == size[::-1] != size
        for reason, what in found.dropped:
            self.dropped.setdefault(reason, Findings()).add(f"{place}: {what}")
        for _ in range(found.num_clipped):
            self.clipped.add(place)
        if role.has_outlines:
            for segment in found.segments:
                if segment is None:
                    self._no_outline.add(place)
        self.num_objects[row] = len(found.boxes)
        self._num_shares += sum(max(box) <= 1 < min(size) for box in found.boxes)
        self.counts[row] = dict(Counter(self._named(category, column, row) for category in found.categories))
        for name, number in self.counts[row].items():
            self.first_with.setdefault(name, (row, number))
        return value

    def _named(self, category: Any, column: str, row: int) -> str:
        name = self.table.category_name(category, column)
        if name is not None:
            return name
        names = self.table.id_names(column)
        shown = f"there are {len(names)} names, for {min(names)} to {max(names)}" if names else "no names are given"
        raise InputError(
            "data.classes",
            f"{self.table.name}: an object of {self.table.place(row)} has the category {category!r}, which has no name",
            saw=[shown],
            fix=f"add a name for it to {self.table.names_file or 'id2label.json'}, or --id2label FILE",
        )

    # ------------------------------------------------------------------------------------------------------- end

    def finish(self) -> None:
        """Raise an InputError for problems that no option drops: data.size, data.masks, data.boxes, data.outlines."""
        if self._wrong_size.number:
            raise InputError(
                "data.size",
                f"{self.table.name}: {self._wrong_size.number:,} annotations are for an image of another size",
                saw=self._wrong_size.first,
                fix="scale the annotations with their images, or put the right images there",
            )
        if self._wrong_mask.number:
            raise InputError(
                "data.masks",
                f"{self.table.name}: {self._wrong_mask.number:,} masks hold no class ids",
                saw=self._wrong_mask.first,
                fix="write masks as PNG with one channel, or a palette, whose pixels are class ids",
            )
        if self._num_shares and self._num_shares == self.num_objects.sum():
            raise InputError(
                "data.boxes",
                f"{self.table.name}: all {self._num_shares:,} boxes lie in the first pixel of their image",
                saw=["they look like shares of its width and height"],
                fix="write boxes in pixels: x and width times the width of the image, y and height times its height",
            )
        if self._no_outline.number:
            raise InputError(
                "data.outlines",
                f"{self.table.name}: {self._no_outline.number:,} objects have a box and no outline",
                saw=self._no_outline.first,
                fix="give each a segmentation (polygons or run lengths), or train object-detection",
            )


def file_line(value: Any, sha256: str, num_bytes: int) -> bytes:
    """Return a file's entry in the sha256 of all: its name in the row, its size and its content."""
    name = value.get("path") if isinstance(value, dict) else value
    return f"{name}\t{num_bytes}\t{sha256}\n".encode("utf-8", "surrogateescape")


def hash_files(table: ImageTable, columns: Mapping[str, str], say: Say | None) -> str:
    """Return the current sha256 of all images and masks of a table, as in `SceneScan.sha256`.

    `columns` maps each kind of role to its column, in the order of the roles.
    """
    digest, has_files, done = hashlib.sha256(), False, 0
    for block in table.blocks(list(columns.values())):
        for kind, column in columns.items():
            source_of = picture_of if kind == "objects" else as_source
            for value in block.values[column]:
                source = source_of(value, table.root)
                if isinstance(source, str):
                    has_files = True
                    digest.update(file_line(value, *content_of(source)))
        done += len(next(iter(block.values.values())))
        if say is not None:
            say(Progress(table.path, "checking images", done, len(table)))
    return digest.hexdigest() if has_files else ""


def content_of(path: str) -> tuple[str, int]:
    """Return the sha256 and the size of a file; ("", 0) if it cannot be read."""
    try:
        data = read_bytes(path)
    except BadImageError as error:
        return error.fingerprint
    return hashlib.sha256(data).hexdigest(), len(data)


def joined(sha256: str, of_files: str) -> str:
    """Return the combined sha256 of a table and its images."""
    return hashlib.sha256(f"{sha256} {of_files}".encode()).hexdigest() if of_files else sha256


def _short(source: Source) -> str:
    return os.path.basename(source) if isinstance(source, str) else shown_source(source)
