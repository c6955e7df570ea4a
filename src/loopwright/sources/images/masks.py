"""Masks: pictures of class ids, grey values or colours; and objects as pictures of class and instance ids."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loopwright.errors import InputError
from loopwright.sources.files import read_data
from loopwright.sources.images.image_file import Source, open_image, read_bytes
from loopwright.sources.values import UnusableValueError

AUTO = "auto"
MOST_VALUES = 64  # of classes that `--mask_values auto` finds; more are blurred edges, or photos
_LEAST_SHARE, _LEAST_DISTANCE, _MOST_TRIED = 0.03, 32, 256  # of values that are proposed as classes
_NEXT_VALUE = re.compile(r",\s*(?=(?:[0-9]{1,5}|#?[0-9a-fA-F]{6})\s*(?:[=,]|$))")
GREY = 0x010101  # times a grey value: its colour

Ids = npt.NDArray[np.int32]


class MaskValues(NamedTuple):
    """The value of each class in masks, by class: a grey value or palette index, or a colour as 0xRRGGBB."""

    numbers: tuple[int, ...]
    names: tuple[str, ...]
    are_colors: bool

    def words(self) -> tuple[str, ...]:
        texts = value_texts(self.numbers, self.are_colors)
        return tuple(t if t == name else f"{t}={name}" for t, name in zip(texts, self.names, strict=True))


def value_texts(numbers: Iterable[int], are_colors: bool) -> list[str]:
    return [f"{number:06x}" if are_colors else str(number) for number in numbers]


def read_values(words: tuple[str, ...]) -> MaskValues | None:
    """Return the values of `--mask_values`: VALUE or VALUE=NAME, or a json file of them; None for none or auto."""
    if not words or words == (AUTO,):
        return None
    return _parsed(_of_file(Path(words[0]).expanduser()) if words[0].endswith(".json") else words)


@lru_cache(maxsize=8)
def _parsed(words: tuple[str, ...]) -> MaskValues:
    parts = [part.partition("=") for word in words for part in _NEXT_VALUE.split(word.strip().strip(","))]
    pairs = [(text.strip().removeprefix("#").lower(), name.strip()) for text, _, name in parts]
    texts = [text for text, _ in pairs]
    are_colors = all(re.fullmatch("[0-9a-f]{6}", text) for text in texts)
    names = tuple(name or text for text, name in pairs)
    are_numbers = all(re.fullmatch("[0-9]{1,5}", text) for text in texts)
    if not (are_colors or are_numbers) or min(len(set(texts)), len(set(names))) != len(texts) or len(texts) < 2:
        what = f"--mask_values {' '.join(words)}: two different values or more are needed, grey values or colours"
        raise InputError("args.value", what, saw=[f"values: {', '.join(texts[:8])}"], fix="--mask_values auto")
    return MaskValues(tuple(int(text, 16 if are_colors else 10) for text in texts), names, are_colors)


def _of_file(path: Path) -> tuple[str, ...]:
    """Return VALUE=NAME from {"road": [128, 64, 128]}, {"0": "sky"}, {"#804080": "road"} or a list of values."""
    try:
        content = json.loads(read_data(path).decode("utf-8-sig"))
        pairs = content.items() if isinstance(content, dict) else [("", value) for value in content]
        found = []
        for name, value in pairs:
            if isinstance(value, list):
                value = "".join(f"{channel:02x}" for channel in value)
            is_name = isinstance(value, str) and not re.fullmatch("#?[0-9a-f]{6}", value.lower())
            value, name = (name, value) if is_name else (value, name)
            found.append(f"{value}={name}")
    except (OSError, ValueError, TypeError) as error:
        fix = '--mask_values auto   or   write {"road": [128, 64, 128], "car": [0, 0, 142]} into it'
        what = f"--mask_values {path} cannot be read as values of classes"
        raise InputError("args.value", what, saw=[str(error)], fix=fix) from error
    return tuple(found)


def mask_numbers(image: Any, as_colors: bool | None) -> tuple[Ids, bool]:
    """Return the number of each pixel, and whether it is a colour (0xRRGGBB); None: colours if channels differ."""
    if not as_colors:
        pixels = np.asarray(image.getchannel(0) if image.mode in ("LA", "La", "PA") else image)
        if pixels.ndim == 3 and image.mode in ("RGB", "RGBA", "RGBX", "RGBa") and not np.ptp(pixels[..., :3], 2).any():
            pixels = pixels[..., 0]
        elif pixels.ndim == 3 and as_colors is False:
            pixels = np.asarray(image.convert("L"))
        if pixels.ndim == 2:
            return pixels.astype(np.int32), False
    channels = np.asarray(image.convert("RGB")).astype(np.int32)
    return channels[..., 0] << 16 | channels[..., 1] << 8 | channels[..., 2], True


def classes_of(numbers: Ids, values: MaskValues, ignore_index: int) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Return the class of each number, which is that of the nearest value, and which ones are far from it.

    Pixels of a grey value `ignore_index` that is not a class keep it.
    """
    known = np.array(values.numbers)
    order = np.argsort(known)
    places = np.searchsorted(known, numbers, sorter=order).clip(max=len(known) - 1)
    classes = order[places].astype(np.int32)
    is_other = known[classes] != numbers
    if not is_other.any():
        return classes, is_other
    others, inverse = np.unique(numbers[is_other], return_inverse=True)
    ours, theirs = (_channels(each, values.are_colors) for each in (known, others))
    nearest = np.array([np.abs(ours - each).sum(1).argmin() for each in theirs], np.int32)
    is_far = np.abs(ours[nearest] - theirs).sum(1) > _LEAST_DISTANCE // 2
    is_ignored = (others == ignore_index) & (not values.are_colors)
    classes[is_other] = np.where(is_ignored, ignore_index, nearest)[inverse.ravel()]
    is_other[is_other] = (is_far & ~is_ignored)[inverse.ravel()]
    return classes, is_other


def _channels(numbers: Sequence[int] | Ids, are_colors: bool) -> Ids:
    each = np.array(numbers, np.int32)
    return np.stack([each >> 16, each >> 8 & 255, each & 255] if are_colors else [each], 1)


def likely_values(counts: Counter[int], are_colors: bool) -> list[int]:
    """Return the values of classes in blurred masks: those with most pixels near them, apart from each other."""
    numbers, pixels = np.array([*counts], np.int32), np.array([*counts.values()])
    channels, apart = _channels(numbers, are_colors), _LEAST_DISTANCE * (2 if are_colors else 1)
    found: list[int] = []
    for place in np.argsort(-pixels)[:_MOST_TRIED].tolist():
        distances = np.abs(channels - channels[place]).sum(1)
        share = pixels[distances < apart // 2].sum() / pixels.sum()
        if share >= _LEAST_SHARE and all(distances[other] >= apart for other in found):
            found.append(place)
    return sorted(numbers[found].tolist())


def _snapped(number: int) -> int:
    """Return a blurred value with channels near 0 or 255 made 0 or 255."""
    channels = [number >> shift & 255 for shift in (16, 8, 0)]
    return sum((0 if c < 8 else 255 if c > 247 else c) << s for c, s in zip(channels, (16, 8, 0), strict=True))


def proposed_values(counts: Counter[int], is_lossy: bool) -> str:
    """Return the option that makes classes of these colours, if there is one."""
    are_grey = all(number % GREY == 0 for number in counts)
    counts = Counter({number // GREY: pixels for number, pixels in counts.items()}) if are_grey else counts
    if 2 <= len(counts) <= MOST_VALUES and not is_lossy:
        return f"--mask_values {AUTO}"
    values = [_snapped(number) for number in likely_values(counts, not are_grey)]
    if len(values) < 2:
        return "write masks as PNG with one channel, or a palette, whose pixels are class ids"
    return f"--mask_values {','.join(value_texts(values, not are_grey))}"


def has_same_shape(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether a mask of a size is its image, scaled: its sides have the same ratio, up to half a pixel."""
    return abs(one[0] * other[1] - one[1] * other[0]) * 2 <= max(*one, *other)


def decode_numbers(source: Source, as_colors: bool | None) -> tuple[Ids, bool, str, str]:
    """Return `mask_numbers` of a file, its Pillow mode ("A" if only alpha differs, "F" for decimals), and format."""
    with open_image(read_bytes(source)) as image:
        image.load()
        numbers, are_colors = mask_numbers(image, as_colors)
        has_alpha = image.mode in ("RGBA", "LA") and not np.ptp(numbers) and np.ptp(np.asarray(image.getchannel("A")))
        has_decimals = image.mode == "F" and bool((np.asarray(image) % 1).any())
        mode = "A" if has_alpha else image.mode if has_decimals or image.mode != "F" else "I"
        return numbers, are_colors, mode, image.format


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
    with open_image(read_bytes(source)) as image:
        pixels, mode = np.asarray(image), image.mode
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
