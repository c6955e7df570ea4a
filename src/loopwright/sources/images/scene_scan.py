"""One pass over the images of a file and their annotations."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loopwright.errors import InputError
from loopwright.quantities import counted
from loopwright.sources.files import Progress, Say
from loopwright.sources.images import image_file, masks
from loopwright.sources.images.folders import list_images
from loopwright.sources.images.image_file import BadImageError, ImageFacts, Source, as_source
from loopwright.sources.images.masks import AUTO, MaskValues, class_of, count_ids, objects_of_mask
from loopwright.sources.images.objects import Objects, read_objects, stated_size
from loopwright.sources.images.tables import ImageTable
from loopwright.sources.schema import Role
from loopwright.sources.values import UnusableValueError

MOST_MASKS_SCANNED = 5_000
MOST_NAMED = 5
SAY_EVERY = 200
DROP = "--bad_annotations drop"
_NO_IDS = {"F": "it holds decimal numbers", "A": "its classes are in the alpha channel"}  # by mode
_MOST_UNCLEAR = 4_096  # values of a mask that are counted
_RARE = 0.1  # share of masks without ids that are worth leaving out


class SceneOptions(NamedTuple):
    """The meaning of masks: the ignored id, whether 0 means no class and all others are one too high, the values of
    the classes; and which objects to leave out: those that cannot be used, or also those without an outline."""

    ignore_index: int = 255
    reduce_labels: bool = False
    mask_values: Sequence[str] = ()
    bad_annotations: str = "refuse"
    has_outlines: bool = False

    @property
    def values(self) -> MaskValues | None:
        return masks.read_values(tuple(self.mask_values))

    def class_of(self, number: int) -> int | None:
        return class_of(number, self.ignore_index, self.reduce_labels)


@dataclass
class Findings:
    """The count of a finding in a table, and the first ones."""

    table: ImageTable
    number: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, what: str = "", row: int | None = None) -> None:
        """Count one more. The place of a row is looked up for the first ones only, as it may take a while."""
        self.number += 1
        if len(self.first) < MOST_NAMED:
            place = self.table.place(row) if row is not None else ""
            self.first.append(": ".join(filter(None, (place, what))))


def picture_of(value: Any, folder: str) -> Source | None:
    """Return the picture of class and instance ids, if objects are given as one; None for lists."""
    is_path = isinstance(value, str) and bool(value.strip()) and not value.lstrip().startswith(("{", "["))
    is_stored = isinstance(value, dict) and ("bytes" in value or "path" in value)
    return as_source(value, folder) if is_path or is_stored or isinstance(value, bytes) else None


def read_scene(value: Any, folder: str, size: tuple[int, int], is_turned: bool, options: SceneOptions) -> Objects:
    """Return the objects of an image from lists, JSON, or a picture of class and instance ids."""
    picture = picture_of(value, folder)
    if picture is not None:
        value = objects_of_mask(picture, options.ignore_index, options.reduce_labels)
    return read_objects(value, size, is_turned, options.bad_annotations == "drop", options.has_outlines)


class SceneScan:
    """Collects the properties of the images of one file, block by block."""

    def __init__(self, table: ImageTable, options: SceneOptions, say: Say | None) -> None:
        self.table = table
        values = options.values
        self.options = options if values is None else options._replace(mask_values=values.words())
        self.is_bad = np.zeros(len(table), np.bool_)  # an image or a mask is missing, truncated or invalid
        self.bad = Findings(table)  # with the reasons
        self.sizes: npt.NDArray[np.int32] = np.zeros((len(table), 2), np.int32)  # upright; 0 for a bad image
        self.num_turned = 0
        self.counts: dict[int, dict[Any, int]] = {}  # of each class, by name or id, by scanned row
        self.first_with: dict[Any, tuple[int, int]] = {}  # by class: the first row with it, and how often it has it
        self.num_objects: npt.NDArray[np.int32] = np.zeros(len(table), np.int32)  # by row, without dropped boxes
        self.dropped: dict[str, Findings] = {}
        self.clipped = Findings(table)
        self.are_corners = True  # width and height of all boxes are above x and y
        self.num_masks_scanned = 0
        self.num_pixels = self.num_other_pixels = 0  # of scanned masks; those that are far from all --mask_values
        self.is_unusable = np.zeros(len(table), np.bool_)  # the annotations are for another size, or of another kind
        self.colored: set[int] = set()  # rows whose mask has colours
        self.palettes = Findings(table)
        self.scaled = Findings(table)
        self._is_lossy = False
        self._too_large: list[str] = []
        self._missing: list[str] = []
        self._moved = Findings(table)  # found by the end of their path
        self._unclear: Counter[int] = Counter()  # the values in masks without ids
        self._is_turned = np.zeros(len(table), np.bool_)
        self._digest = hashlib.sha256()
        self._wrong_size = Findings(table)
        self._wrong_mask = Findings(table)
        self._wrong_objects = Findings(table)
        self._no_outline = Findings(table)
        self._num_turned_annotations = 0
        self._num_fractional_boxes = 0
        self._say = say

    @property
    def sha256(self) -> str:
        """The sha256 of all images and masks in separate files; "" if all are inside the table."""
        return _hexdigest(self._digest)

    @property
    def bad_fix(self) -> str:
        """The fix for bad images: to leave them out unless all are bad, and to find them or make them smaller."""
        fix = "put them back"
        if len(self._too_large) == self.bad.number:
            fix = f"{image_file.SHRINK}{shlex.join(self._too_large[:MOST_NAMED])}"
        if self.bad.number < len(self.table):
            return f"--bad_images drop   or   {fix}"
        folder = os.path.dirname(os.path.abspath(self.table.path))
        near = {os.path.basename(file): file for file in list_images(Path(folder))[0]} if self._missing else {}
        found = [near.get(os.path.basename(path), "") for path in self._missing]
        places = {*map(os.path.dirname, found)}
        if not found or not all(os.path.isfile(os.path.join(folder, file)) for file in found):
            return fix
        if len(places) == 1:
            return f"--image_dir {shlex.quote(os.path.join(folder, *places))}"
        return f"write their paths into {self.table.name}, such as {found[0]}"

    @property
    def warnings(self) -> list[str]:
        images = f"{self._num_turned_annotations:,} images of {self.table.name}"
        note = "are turned by their EXIF orientation, and their annotations state the size before that"
        known = [f"{images} {note}: boxes are taken to be in the upright image"] if self._num_turned_annotations else []
        if self._moved.number:
            what = f"{counted(self._moved.number, 'image')} of {self.table.name} found by the end of the path"
            known.append(f"{what}: {self._moved.first[0]}")
        return known

    def add(self, role: Role, column: str, start: int, values: list[Any]) -> list[Any]:
        """Add the values of some rows; return the part of each in its row's content hash."""
        taken = []
        for row, value in enumerate(values, start):
            try:
                taken.append(self._add(role, column, row, value))
            except UnusableValueError as error:
                if role.kind == "objects":
                    self._wrong_objects.add(str(error), row)
                    self.is_unusable[row] = True
                    taken.append(value)
                    continue
                what = f"{self.table.name}: the {role.name} in {self.table.place(row)} cannot be used"
                raise InputError("data.value", what, saw=[str(error)], fix=f"correct the {role.name} there") from error
            if self._say is not None and role.kind != "objects" and (row + 1) % SAY_EVERY == 0:
                self._say(Progress(self.table.path, f"checking {role.kind}s", row + 1, len(self.table)))
        return taken

    def _add(self, role: Role, column: str, row: int, value: Any) -> Any:
        if role.kind == "objects":
            self._add_objects(row, value, role, column)
            return value
        source = as_source(value, self.table.root)
        facts = self._inspect(row, source, value) if source is not None else None
        if role.kind == "mask":
            if source is not None and facts is not None:
                self._add_mask(row, source, facts)
            return value if source is not None else None
        if facts is None:
            return f"bad image {row}" if source is not None else ""
        self.sizes[row] = facts.width, facts.height
        self._is_turned[row] = facts.is_turned
        self.num_turned += facts.is_turned
        return facts.sha256

    def _inspect(self, row: int, source: Source, value: Any) -> ImageFacts | None:
        try:
            facts = image_file.inspect_image(source)
        except BadImageError as error:
            self._digest.update(_file_line(source, value, *error.fingerprint))
            self._note_bad(row, source, error)
            return None
        self._digest.update(_file_line(source, value, facts.sha256, facts.num_bytes))
        name = os.path.join(self.table.root, os.path.expanduser(_name(value).strip())).replace("\\", "/")
        if isinstance(source, str) and os.path.normpath(name) != source.replace("\\", "/"):
            self._moved.add(f"{_name(value)} is {source}")
        return facts

    def _note_bad(self, row: int, source: Source, error: BadImageError) -> None:
        if not self.is_bad[row]:
            self.bad.add(f"{image_file.shown_source(source)} {error}", None if self.table.has_fixed_columns else row)
        self.is_bad[row] = True
        if image_file.TOO_LARGE in str(error):
            self._too_large.append(source if isinstance(source, str) else "IMAGE")
        if isinstance(source, str) and not os.path.exists(source) and "://" not in source:
            self._missing.append(source)

    def _add_mask(self, row: int, source: Source, facts: ImageFacts) -> None:
        name = os.path.basename(source) if isinstance(source, str) else image_file.shown_source(source)
        width, height = self.sizes[row]
        if not self.is_bad[row] and (facts.width, facts.height) != (width, height):
            sizes = f"{name} is {facts.width} x {facts.height}, its image is {width} x {height}"
            if not masks.has_same_shape((facts.width, facts.height), (int(width), int(height))):
                self._wrong_size.add(sizes)
                self.is_unusable[row] = True
                return
            self.scaled.add(sizes)
        num_rows = max(len(self.table), MOST_MASKS_SCANNED)
        if row * MOST_MASKS_SCANNED // num_rows == (row - 1) * MOST_MASKS_SCANNED // num_rows:
            return  # of more masks only some, evenly spaced, are counted
        values = self.options.values
        try:
            ids, has_colors, mode, kind = masks.decode_numbers(source, values and values.are_colors)
        except BadImageError as error:
            self._note_bad(row, source, error)
            return
        if values is not None:
            ids, is_other = masks.classes_of(ids, values, self.options.ignore_index)
            self.num_pixels, self.num_other_pixels = self.num_pixels + ids.size, self.num_other_pixels + is_other.sum()
        is_lossy, is_auto = kind in ("JPEG", "MPO"), tuple(self.options.mask_values) == (AUTO,)
        reason = _NO_IDS.get(mode) or (f"it is a colour picture (mode {mode})" if has_colors and not is_auto else "")
        if values is None and (is_lossy or reason):
            reason = "it is a JPEG, which blurs the ids" if is_lossy else reason
            self._wrong_mask.add(f"{name}: {reason}")
            self.is_unusable[row] = True
            self._is_lossy |= is_lossy
            self._unclear.update(count_ids(ids if has_colors else ids * masks.GREY))
            self._unclear = Counter(dict(self._unclear.most_common(_MOST_UNCLEAR)))
            return
        found = count_ids(ids)
        self.num_masks_scanned += 1
        if is_auto:
            self.colored |= {row} if has_colors else set()
            self.counts[row] = dict(Counter(found).most_common(_MOST_UNCLEAR))
            if mode == "P":
                self.palettes.add(name)
            return
        self._count(row, found, [number for number in found if self.options.class_of(number) is not None])

    def apply(self, values: MaskValues) -> None:
        """Count classes in place of the values that `--mask_values auto` has found."""
        self.options = self.options._replace(mask_values=values.words())
        places = {number: place for place, number in enumerate(values.numbers)}
        for row, found in self.counts.items():
            scale = masks.GREY if values.are_colors and row not in self.colored else 1
            classes = {places[number * scale]: pixels for number, pixels in found.items()}
            self._count(row, classes, list(classes))

    def _count(self, row: int, found: dict[Any, int], classes: list[Any]) -> None:
        self.counts[row] = found
        for name in classes:
            self.first_with.setdefault(name, (row, found[name]))

    def _add_objects(self, row: int, value: Any, role: Role, column: str) -> None:
        picture = picture_of(value, self.table.root)
        if isinstance(picture, str):
            self._digest.update(_file_line(picture, value, *_content(picture)))
        if self.is_bad[row] or not self.sizes[row].any():
            return
        size = int(self.sizes[row, 0]), int(self.sizes[row, 1])
        is_turned = bool(self._is_turned[row])
        try:
            found = read_scene(value, self.table.root, size, is_turned, self.options)
        except BadImageError as error:
            assert picture is not None, "lists are not images"
            self._note_bad(row, picture, error)
            return
        if found.problem is not None:
            self._wrong_size.add(found.problem, row)
            self.is_unusable[row] = True
        self._num_turned_annotations += is_turned and stated_size(value) == size[::-1] != size
        for reason, what in found.dropped:
            self.dropped.setdefault(reason, Findings(self.table)).add(what, row)
        self.are_corners &= found.are_corners
        for _ in range(found.num_clipped):
            self.clipped.add(row=row)
        for _ in range(found.segments.count(None) if role.has_outlines else 0):
            self._no_outline.add(row=row)
        self.num_objects[row] = len(found.boxes)
        self._num_fractional_boxes += sum(max(box) <= 1 < min(size) for box in found.boxes)
        names = Counter(self._name(category, column, row) for category in found.categories)
        names.pop("", None)
        self._count(row, dict(names), list(names))

    def _name(self, category: Any, column: str, row: int) -> str:
        name = self.table.category_name(category, column)
        if name is not None:
            return name
        if self.options.bad_annotations == "drop":
            self.dropped.setdefault("nameless", Findings(self.table)).add(f"category {category!r} has no name", row)
            self.num_objects[row] -= 1
            return ""
        names = self.table.id_names(column)
        what = f"an object of {self.table.place(row)} has the category {category!r}, which has no name"
        saw = "no names are given"
        if names:
            saw = f"{counted(len(names), 'name', 'is')} given, for {min(names)} to {max(names)}"
        fix = f"{DROP}   or   add a name for it to {self.table.names_file or 'id2label.json'}"
        if names and category == max(names) + 1 and names[min(names)] not in self.first_with:
            saw += f", and no object before it is of the first, {names[min(names)]!r}: are classes counted from 1?"
            fix = f"subtract 1 from each class   or   add a name for {category} to {self.table.names_file}"
        raise InputError("data.classes", f"{self.table.name}: {what}", saw=[saw], fix=fix)

    def problem(self) -> InputError | None:
        """Return the first problem of the annotations: data.size, data.masks, data.boxes or data.outlines."""
        name, found = self.table.name, self._wrong_size
        drop = "" if self.is_unusable.all() else f"{DROP}   or   "  # it would leave nothing
        if found.number:
            what, fix = "for an image of another size", f"{drop}scale them with their images"
            if not drop and not self.clipped.number and "outside" not in self.dropped and self.num_objects.any():
                fix = f"correct the sizes of the images in {name}: its boxes fit the images"
            what = f"{name}: {counted(found.number, 'annotation', 'is')} {what}"
            return InputError("data.size", what, saw=found.first, fix=fix)
        found = self._wrong_mask
        if found.number:
            what = f"{name}: {counted(found.number, 'mask', 'holds')} no class ids"
            is_rare = found.number <= len(self.table) * _RARE
            fix = DROP if is_rare else masks.proposed_values(self._unclear, self._is_lossy)
            return InputError("data.masks", what, saw=found.first, fix=fix)
        found = self._wrong_objects
        if found.number:
            what = f"{name}: the objects of {found.number:,} of {len(self.table):,} images cannot be used"
            return InputError("data.boxes", what, saw=found.first, fix=f"{drop}correct them")
        number = self._num_fractional_boxes
        if number and number == self.num_objects.sum():
            what, saw = "boxes are within the first pixel of their image", "they look like fractions of its size"
            fix = "write boxes in pixels: x and width times the width of the image, y and height times its height"
            return InputError("data.boxes", f"{name}: all {number:,} {what}", saw=[saw], fix=fix)
        found = self._no_outline
        if found.number:
            drop = f"{DROP}   or   " if found.number < self.num_objects.sum() else ""
            fix = f"{drop}object-detection instead of instance-segmentation"
            what = f"{name}: {counted(found.number, 'object', 'has')} a box and no outline"
            return InputError("data.outlines", what, saw=found.first, fix=fix)
        return None


def hash_files(table: ImageTable, columns: Mapping[str, str], say: Say | None) -> str:
    """Return the current sha256 of all images and masks, as in `SceneScan.sha256`; `columns` are by kind of role."""
    digest = hashlib.sha256()
    for block in table.blocks(list(columns.values())):
        for kind, column in columns.items():
            for value in block.values[column]:
                source = (picture_of if kind == "objects" else as_source)(value, table.root)
                if isinstance(source, str):
                    digest.update(_file_line(source, value, *_content(source)))
        if say is not None:
            num_rows = len(next(iter(block.values.values())))
            say(Progress(table.path, "checking images", block.start + num_rows, len(table)))
    return _hexdigest(digest)


def _file_line(source: Source, value: Any, sha256: str, num_bytes: int) -> bytes:
    """Return an image's line in the sha256 of all: its name in the row, size and content; none inside a table."""
    if isinstance(source, bytes):
        return b""
    return f"{_name(value)}\t{num_bytes}\t{sha256}\n".encode("utf-8", "surrogateescape")


def _name(value: Any) -> str:
    return str(value.get("path") if isinstance(value, dict) else value)


def _hexdigest(digest: Any) -> str:
    return "" if digest.digest() == hashlib.sha256().digest() else str(digest.hexdigest())


def _content(path: str) -> tuple[str, int]:
    """Return the sha256 and the size of a file; ("", 0) if it cannot be read."""
    try:
        data = image_file.read_bytes(path)
    except BadImageError as error:
        return error.fingerprint
    return hashlib.sha256(data).hexdigest(), len(data)


def joined(sha256: str, of_files: str) -> str:
    return hashlib.sha256(f"{sha256} {of_files}".encode()).hexdigest() if of_files else sha256
