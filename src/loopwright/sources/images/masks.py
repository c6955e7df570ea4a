"""Masks: pictures of class ids, and objects as pictures of class and instance ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.sources.images.image_file import Source, open_image, read_bytes
from loopwright.sources.values import UnusableValueError

_ID_MODES = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B", "I;16N")

Ids = npt.NDArray[np.int32]


def _decode(source: Source) -> tuple[Any, str, str]:
    with open_image(read_bytes(source)) as image:
        image.load()
        return np.asarray(image), image.mode, image.format


def decode_ids(source: Source) -> Ids:
    """Return a mask's grey values or palette indexes; UnusableValueError for colours and lossy compression."""
    pixels, mode, kind = _decode(source)
    if mode not in _ID_MODES:
        raise UnusableValueError(f"it is a colour picture (mode {mode})")
    if kind in ("JPEG", "MPO"):
        raise UnusableValueError("it is a JPEG, which blurs the ids")
    ids: Ids = pixels.astype(np.int32)
    return ids


def count_ids(ids: Ids) -> dict[int, int]:
    if ids.size and int(ids.min()) >= 0 and int(ids.max()) < 1 << 16:
        counts = np.bincount(ids.ravel())
        return {int(number): int(counts[number]) for number in np.flatnonzero(counts)}
    numbers, found = np.unique(ids, return_counts=True)
    return dict(zip(numbers.tolist(), found.tolist(), strict=True))


def class_of(number: int, ignore_index: int, has_reduced_labels: bool) -> int | None:
    """Return the class of an id in a mask; None for ignored pixels."""
    if number == ignore_index:
        return None
    if has_reduced_labels:
        return number - 1 if number else None
    return number


def count_classes(ids: Ids, num_classes: int, ignore_index: int, has_reduced_labels: bool) -> list[int]:
    counts = [0] * num_classes
    for number, pixels in count_ids(ids).items():
        place = class_of(number, ignore_index, has_reduced_labels)
        if place is not None and 0 <= place < num_classes:
            counts[place] += pixels
    return counts


def objects_of_mask(source: Source, ignore_index: int, has_reduced_labels: bool) -> dict[str, list[Any]]:
    """Return the objects of a picture with class ids in the first channel and instance ids, or 0, in the second."""
    pixels, mode, _ = _decode(source)
    if pixels.ndim != 3 or mode not in ("RGB", "RGBA", "LA"):
        raise UnusableValueError(f"a picture with class ids and instance ids as channels is needed, not mode {mode}")
    keys = pixels[..., 0].astype(np.int64) << 16 | pixels[..., 1]
    found: dict[str, list[Any]] = {"bbox": [], "category": [], "segmentation": [], "size": list(keys.shape[::-1])}
    for key in np.unique(keys[pixels[..., 1] > 0]).tolist():
        number = class_of(key >> 16, ignore_index, has_reduced_labels)
        if number is None:
            continue
        mask = keys == key
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        x, y = int(columns[0]), int(rows[0])
        found["bbox"].append([x, y, int(columns[-1]) + 1 - x, int(rows[-1]) + 1 - y])
        found["category"].append(number)
        found["segmentation"].append(run_lengths(mask))
    return found


def run_lengths(mask: npt.NDArray[np.bool_]) -> dict[str, list[int]]:
    """Return a mask as COCO's run lengths: pixels outside, inside, outside, ... by column."""
    flat = mask.ravel(order="F")
    changes = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    counts = np.diff(np.concatenate([[0], changes, [flat.size]])).tolist()
    return {"size": list(mask.shape), "counts": [0, *counts] if flat[0] else counts}
