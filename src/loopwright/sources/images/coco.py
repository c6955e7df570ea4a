"""COCO's json: images, annotations and categories in one file, which is loaded whole.

Category ids are numbered 0, 1, ... by ascending id. The annotations of an image stay in memory as one JSON text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from loopwright.errors import InputError
from loopwright.quantities import agreeing, counted
from loopwright.sources.files import FileBytes, Say
from loopwright.sources.images.tables import ROWS_TRIED, ListedTable, find_folder
from loopwright.sources.json_files import encodable, load_json
from loopwright.sources.tables import Row

LISTS = ("images", "annotations", "categories")
_MOST_NAMED = 5
_HEAD_BYTES = 1 << 16
_DROP = "--bad_annotations drop"
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

    def __init__(
        self, source: FileBytes, image_dir: str | None, say: Say | None, bad_annotations: str | None = None
    ) -> None:
        super().__init__(source.path, "coco", ("image", "objects", "image_id"))
        self.bad_annotations = bad_annotations
        self.num_bytes = source.num_bytes
        self._encoding = source.settings()
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
        self.image_dir = find_folder(folder, self.name, self.files[:ROWS_TRIED]) if image_dir is None else image_dir
        self.root = os.path.normpath(os.path.join(folder, self.image_dir))

    def settings(self) -> dict[str, Any]:
        return super().settings() | self._encoding

    def _list(self, content: Row, name: str) -> list[Row]:
        found = content.get(name, [])
        if not isinstance(found, list) or (found and not any(isinstance(item, dict) for item in found)):
            what = f'{self.path}: "{name}" is not a list of objects'
            raise InputError("data.annotations", what, saw=[repr(found)[:80]], fix=f'write "{name}": [{{...}}, ...]')
        return [item if isinstance(item, dict) else {} for item in found]

    def _leave_out(self, error: InputError | None, name: str, places: Iterable[int], why: str, number: int = 0) -> None:
        """Raise the error, with the option to drop unless all would go, or note that these entries are left out."""
        found = list(places)
        if error is not None and self.bad_annotations != "drop":
            error.fix = f"{_DROP}   or   {error.fix}" if len(found) < number else error.fix
            raise error
        first = ", ".join(f"{name}[{place}]" for place in found[:_MOST_NAMED])
        self.num_left_out += len(found)
        noun = "category" if name == "categories" else name[:-1]
        self.notes += (f"left out: {counted(len(found), noun)} of {self.name} {why}: {first}",)

    def _read_images(self, images: list[Row]) -> None:
        ids = [image.get("id") for image in images]
        lacking = [
            place
            for place, image in enumerate(images)
            if not isinstance(ids[place], str | int | float) or not isinstance(image.get("file_name"), str)
        ]
        if lacking:
            self._incomplete("images", lacking, "an id and a file_name", images)
        rows: dict[Any, int] = {}
        for place in sorted(set(range(len(images))) - set(lacking)):
            rows.setdefault(ids[place], place)
        again = sorted(set(range(len(images))) - set(lacking) - set(rows.values()))
        if again:
            number = ids[again[0]]
            saw = [image["file_name"] for image in images if image.get("id") == number]
            what = f"{self.path}: two images have the id {number!r}"
            error = InputError("data.annotations", what, saw=saw, fix="give each image its own id")
            self._leave_out(error, "images", again, "with the id of another one", len(images))
        images = [images[place] for place in rows.values()]
        self.files = [image["file_name"] for image in images]
        self._ids = [image["id"] for image in images]
        sizes = [(image.get("width"), image.get("height")) for image in images]
        self._sizes = [size if all(isinstance(side, int) for side in size) else None for size in sizes]

    def _read_categories(self, categories: list[Row]) -> None:
        names: dict[int, str] = {}
        taken: set[str] = set()
        lacking: list[int] = []
        for place, category in enumerate(categories):
            number, name = category.get("id"), encodable(category.get("name"))
            if not isinstance(number, int) or not isinstance(name, str) or not name.strip():
                lacking.append(place)
            elif name in taken or number in names:
                what = f"{self.path}: two categories have the same {'name' if name in taken else 'id'}"
                saw, fix = (
                    [f"categories[{place}]: {json.dumps(category)[:80]}"],
                    "give each category its own id and name",
                )
                error = InputError("data.classes", what, saw=saw, fix=fix)
                self._leave_out(error, "categories", [place], "with the id or name of another one", len(categories))
            else:
                names[number] = name
                taken.add(name)
        if lacking:
            self._incomplete("categories", lacking, "an id (a whole number) and a name", categories)
        self.names = dict(sorted(names.items()))

    def _incomplete(self, name: str, places: list[int], needed: str, values: list[Row]) -> None:
        what, saw = f"{self.path}: {name}[{places[0]}] lacks {needed}", [json.dumps(values[places[0]])[:100]]
        error = InputError("data.annotations", what, saw=saw, fix=f"give each of the {name} {needed}")
        self._leave_out(error, name, places, f"without {needed}", len(values))

    def _read_annotations(self, annotations: list[Row]) -> None:
        left_out: set[int] = set()
        rows = {number: row for row, number in enumerate(self._ids)}
        unlisted = _unknown_ids(annotations, "image_id", rows)
        if unlisted:
            of_all = f"{len(unlisted):,} of {counted(len(annotations), 'annotation')}"
            what = f"{of_all} {agreeing(len(unlisted), 'is')} of an image that is not listed"
            saw = [f"annotations[{place}]: image_id {found!r}" for place, found in unlisted[:_MOST_NAMED]]
            fix = 'list the images under "images" with these ids'
            fix = f"write each image_id {_UNQUOTED}" if _are_quoted(unlisted, rows) else fix
            error = InputError("data.annotations", f"{self.path}: {what}", saw=saw, fix=fix)
            left_out = {place for place, _ in unlisted}
            self._leave_out(error, "annotations", left_out, "of an image that is not listed", len(annotations))
        nameless = [each for each in _unknown_ids(annotations, "category_id", self.names) if each[0] not in left_out]
        if nameless:
            ids = ", ".join(sorted({str(found) for _, found in nameless})[:8])
            images = [self.files[rows[annotations[place]["image_id"]]] for place, _ in nameless[:_MOST_NAMED]]
            saw = [f"category_id {found!r} in {image}" for (_, found), image in zip(nameless, images, strict=False)]
            fix = 'give each annotation its "category_id": the id of one of the categories'
            if _are_quoted(nameless, self.names):
                fix = f"write each category_id {_UNQUOTED}"
            elif isinstance(nameless[0][1], int):
                fix = f'add {{"id": {nameless[0][1]}, "name": "..."}} to "categories"'
            what = f"{self.path}: {counted(len(nameless), 'annotation', 'has')} a category without a name: {ids}"
            places = [place for place, _ in nameless]
            error = InputError("data.classes", what, saw=saw, fix=fix)
            why, number = f"with a category without a name ({ids})", len(annotations) - len(left_out)
            self._leave_out(error, "annotations", places, why, number)
            left_out.update(places)
        self._leave_out_copies(annotations, left_out)
        objects: list[list[Row]] = [[] for _ in self.files]
        for place, annotation in enumerate(annotations):
            if place not in left_out:
                objects[rows[annotation["image_id"]]].append({key: annotation.get(key) for key in _KEYS})
        self._objects = [json.dumps(found).encode() for found in objects]

    def _leave_out_copies(self, annotations: list[Row], left_out: set[int]) -> None:
        if self.bad_annotations != "drop":
            return
        texts = [json.dumps([each.get(key) for key in ("image_id", *_KEYS)]) for each in annotations]
        first = {text: place for place, text in reversed([*enumerate(texts)])}
        copies = [place for place, text in enumerate(texts) if first[text] != place and place not in left_out]
        if copies:
            self._leave_out(None, "annotations", copies, "equal to another one")
            left_out.update(copies)

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
