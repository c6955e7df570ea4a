"""Objects of an image: from file formats to boxes inside the image, with classes, outlines and crowds."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.errors import InputError
from loopwright.sources.values import UnusableValueError, written_value

_KEYS = {
    "bbox": ("bbox", "boxes", "bboxes"),
    "category": ("category", "categories", "category_id", "label", "labels", "class", "classes"),
    "segmentation": ("segmentation", "segmentations", "segments", "polygons"),
    "iscrowd": ("iscrowd", "is_crowd", "crowd"),
}
_MOST_DIGITS = 7  # of five bits each: more pixels than an image can have
_NEAR = 1.0  # pixels over the edge that count as rounding


@dataclass
class Objects:
    """The objects of one image, clipped to it."""

    boxes: list[list[float]] = field(default_factory=list)  # [x0, y0, x1, y1] in pixels of the upright image
    categories: list[Any] = field(default_factory=list)  # the class of each in the file: a number or a name
    segments: list[Any] = field(default_factory=list)  # each is None, a list of polygons, or COCO's run lengths
    crowd: list[bool] = field(default_factory=list)  # whether each represents a group
    dropped: list[tuple[str, str]] = field(default_factory=list)  # ("zero_size" or "outside", what) of each
    num_clipped: int = 0  # boxes clipped by more than a pixel
    are_corners: bool = True  # width and height of all boxes are above x and y, as those of corners are
    problem: str | None = None


def by_column(value: Any) -> dict[str, Any]:
    """Return {"bbox": [...], ...} from a dict of lists, a list of dicts, or JSON; UnusableValueError otherwise."""
    if isinstance(value, str):
        written = written_value(value) if value.strip() else []
        if not isinstance(written, dict | list):
            raise UnusableValueError(f"the objects are not JSON: {value[:60]!r}")
        value = written
    if value is None or value == []:
        value = {}
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        value = {key: [part.get(key) for part in value] for key in dict.fromkeys(key for part in value for key in part)}
    if not isinstance(value, dict):
        raise UnusableValueError(f'{{"bbox": [...], "category": [...]}} is needed, not {repr(value)[:60]}')
    found: dict[str, Any] = {
        name: next((value[key] for key in keys if key in value), None) for name, keys in _KEYS.items()
    }
    if value and found["category"] is None and (found["bbox"] or found["segmentation"]):
        raise UnusableValueError(f"the objects have no category; they have {', '.join(map(str, value))}")
    if found["category"] is None:
        found["category"] = []
    if not isinstance(found["category"], list):
        raise UnusableValueError(f"a list of categories is needed, not {repr(found['category'])[:60]}")
    number = len(found["category"])
    for name, column in found.items():
        if column is None:
            found[name] = [None] * number
        elif not isinstance(column, list) or len(column) != number:
            raise UnusableValueError(f"{number} objects have {name} {repr(column)[:60]}")
    return found | {key: value[key] for key in ("size", "is_relative") if key in value}


def stated_size(value: Any) -> tuple[int, int] | None:
    size = value.get("size") if isinstance(value, dict) else None
    is_pair = isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(side, int) for side in size)
    return (size[0], size[1]) if size is not None and is_pair else None


def read_objects(
    value: Any, size: tuple[int, int], is_turned: bool = False, drops_bad: bool = False, has_outlines: bool = False
) -> Objects:
    """Return the objects of an image of this upright size (width, height).

    An invalid object raises an UnusableValueError; with `drops_bad` it is left out, and one without an outline too if
    they have to have one.
    """
    columns = by_column(value)
    found = Objects()
    stated = stated_size(columns)
    if stated is not None and stated != size and not (is_turned and stated == size[::-1]):
        found.problem = f"stated as {stated[0]} x {stated[1]}, but the image is {size[0]} x {size[1]}"
    relative_to = size if columns.get("is_relative") else None
    where = f"outside the image of {size[0]} x {size[1]}"
    for bbox, category, segmentation, is_crowd in zip(*(columns[name] for name in _KEYS), strict=True):
        try:
            segment = _as_segment(segmentation, relative_to)
            box = _as_box(bbox, segment, relative_to)
        except UnusableValueError as error:
            if not drops_bad:
                raise
            found.dropped.append(("unusable", str(error)))
            continue
        if drops_bad and has_outlines and segment is None:
            found.dropped.append(("no_outline", f"box {_shown(box)} has no outline"))
            continue
        if isinstance(segment, dict) and segment["size"] != [size[1], size[0]]:
            height, width = segment["size"]
            found.problem = f"a mask of {width} x {height}, but the image is {size[0]} x {size[1]}"
        found.are_corners &= box[2] > 2 * box[0] and box[3] > 2 * box[1]
        clipped = [min(max(edge, 0.0), float(size[place % 2])) for place, edge in enumerate(box)]
        outline = _box_of(segment) if isinstance(segment, list) else []
        if box[2] <= box[0] or box[3] <= box[1]:
            found.dropped.append(("zero_size", f"box {_shown(box)} has no size"))
        elif clipped[2] <= clipped[0] or clipped[3] <= clipped[1]:
            found.dropped.append(("outside", f"box {_shown(box)} lies {where}"))
        elif outline and (min(outline[2:]) <= 0 or outline[0] >= size[0] or outline[1] >= size[1]):
            found.dropped.append(("outside", f"the outline in {_shown(outline)} lies {where}"))
        else:
            found.num_clipped += any(abs(a - b) > _NEAR for a, b in zip(box, clipped, strict=True))
            found.boxes.append(clipped)
            found.categories.append(category)
            found.segments.append(segment)
            found.crowd.append(bool(is_crowd))
    return found


def _shown(box: list[float]) -> str:
    return "[" + ", ".join(f"{edge:g}" for edge in box) + "]"


def _as_box(bbox: Any, segment: Any, relative_to: tuple[int, int] | None) -> list[float]:
    """Return [x0, y0, x1, y1], from x, y, width, height, from fractions of the image, or from the outline."""
    if bbox is None and segment is not None:
        return _box_of(segment)
    if isinstance(bbox, UnusableValueError):  # of a text file
        raise bbox
    is_box = isinstance(bbox, list | tuple) and len(bbox) == 4
    if not is_box or not all(isinstance(edge, int | float) and math.isfinite(edge) for edge in bbox):
        raise UnusableValueError(f"a box needs the four numbers x, y, width, height, not {repr(bbox)[:60]}")
    x, y, width, height = map(float, bbox)
    if relative_to is not None:
        x, y = (x - width / 2) * relative_to[0], (y - height / 2) * relative_to[1]
        width, height = width * relative_to[0], height * relative_to[1]
    return [x, y, x + width, y + height]


def _as_segment(value: Any, relative_to: tuple[int, int] | None) -> Any:
    """Return None, a list of polygons with at least three corners each, or run lengths with their size."""
    if value is None or value == [] or value == {}:
        return None
    if isinstance(value, dict):
        size, counts = value.get("size"), value.get("counts")
        if isinstance(counts, bytes):
            counts = counts.decode("ascii", "replace")
        is_size = isinstance(size, list | tuple) and len(size) == 2 and all(map(_is_length, size))
        if not isinstance(size, list | tuple) or not is_size or not isinstance(counts, str | list):
            raise UnusableValueError(f'run lengths need {{"size": [h, w], "counts": ...}}, not {repr(value)[:60]}')
        if isinstance(counts, list) and not all(map(_is_length, counts)):
            raise UnusableValueError(f"run lengths are whole numbers from 0 on, not {repr(counts)[:60]}")
        num_pixels = sum(counts) if isinstance(counts, list) else int(unpacked_run_lengths(counts).sum())
        if num_pixels != size[0] * size[1]:
            raise UnusableValueError(f"run lengths of {num_pixels:,} pixels for a size of {size[0]} x {size[1]}")
        return {"size": [int(size[0]), int(size[1])], "counts": counts}
    if isinstance(value, list) and value and isinstance(value[0], int | float):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(polygon, list) for polygon in value):
        raise UnusableValueError(f"an outline needs polygons or run lengths, not {repr(value)[:60]}")
    polygons = []
    for polygon in value:
        if len(polygon) % 2 or not all(isinstance(edge, int | float) and math.isfinite(edge) for edge in polygon):
            raise UnusableValueError(f"a polygon needs x and y of each corner, not {repr(polygon)[:60]}")
        if len(polygon) >= 6:
            scale = relative_to or (1, 1)
            polygons.append([float(edge) * scale[place % 2] for place, edge in enumerate(polygon)])
    return polygons or None


def _is_length(value: Any) -> bool:
    return isinstance(value, int | float) and value >= 0 and float(value).is_integer()


def unpacked_run_lengths(packed: str) -> npt.NDArray[np.int64]:
    """Return the run lengths of COCO's packed text: five bits per character, differences from the third on."""
    digits = np.frombuffer(packed.encode("ascii", "replace"), np.uint8).astype(np.int64) - 48
    damaged = UnusableValueError(f"run lengths in {packed[:40]!r} are damaged")
    if not len(digits) or digits.min() < 0 or digits.max() > 63 or digits[-1] & 32:
        raise damaged
    ends = np.flatnonzero(digits & 32 == 0)  # the sixth bit marks that a number continues
    starts = np.concatenate([[0], ends[:-1] + 1])
    if int((ends - starts).max()) > _MOST_DIGITS:
        raise damaged
    places = np.arange(len(digits)) - np.repeat(starts, ends - starts + 1)
    numbers = np.add.reduceat((digits & 31) << (5 * places), starts)
    is_negative = digits[ends] & 16 != 0
    numbers = np.where(is_negative, numbers - (np.int64(1) << (5 * (ends - starts + 1))), numbers)
    for first in (1, 2):  # each is the difference to the second last
        numbers[first::2] = np.cumsum(numbers[first::2])
    if numbers.min() < 0:
        raise damaged
    return numbers


def _box_of(segment: Any) -> list[float]:
    if isinstance(segment, list):
        xs = [x for polygon in segment for x in polygon[::2]]
        ys = [y for polygon in segment for y in polygon[1::2]]
        return [min(xs), min(ys), max(xs), max(ys)]
    try:
        mask = importlib.import_module("faster_coco_eval.core.mask")
    except ImportError as error:
        what = "objects with run lengths and no box need the package faster-coco-eval"
        fix = "pip install 'loopwright[vision]'   or   give each object its bbox"
        raise InputError("install.extra", what, saw=[str(error)], fix=fix) from error
    packed = mask.frPyObjects(segment, *segment["size"]) if isinstance(segment["counts"], list) else segment
    x, y, width, height = map(float, mask.toBbox(packed))
    return [x, y, x + width, y + height]
