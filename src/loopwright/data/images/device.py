"""Training images augmented in batches on the device.

Loader workers draw what the transforms draw, from the same generators, and send the part of each image that is used, as
bytes. `ImageBatch.finish` resizes and changes the parts on the device, as Pillow does it: pixels differ from those of
the CPU by rounding, and where a part is more than four times as large as its result, since workers shrink it first.

Nothing mixes images: the pixels of one do not depend on the others of its batch. Levels are whole numbers from 0 to
255, in float32 between the steps. Nothing waits for the device, so there is no `torch.where` with a number: its copy to
the device would be waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from loopwright.data.images.transforms import (
    BRIGHTNESS,
    CONTRAST,
    HUE,
    ColorJitter,
    Compose,
    HorizontalFlip,
    RandomAffine,
    RandomErasing,
    RandomResizedCrop,
    VerticalFlip,
    height_and_width,
)
from loopwright.data.vision_extra import pillow
from loopwright.engine.nested import UnfinishedBatch

_GAP = 2  # a part that workers shrink stays at least so many times as large as its result
_MOST_LEVELS = 2**25  # of the parts that are finished at once
_DRAWN = "augmentation"  # the key of the drawn numbers in a batch, a row per image


class DrawnImage(NamedTuple):
    """The part of an image that is used, and what was drawn for it: the "pixel_values" of a sample."""

    augmentation: DeviceAugmentation
    pixels: NDArray[np.uint8]
    numbers: list[float]  # the exact height and width of the part in `pixels`, then the numbers of each step
    noise: NDArray[np.uint8] | None


class ImageBatch(UnfinishedBatch):
    """A batch of parts of images of any size, padded; finished, its "pixel_values" are uint8 images of one size."""

    augmentation: DeviceAugmentation

    def finish(self) -> dict[str, Any]:
        """Return the batch with the augmented images, and without what was drawn for them."""
        values = dict(self)
        drawn = (values.pop(_DRAWN), values.pop("noise", None), values.pop("num_taps"))
        return {**values, "pixel_values": self.augmentation.finished(values["pixel_values"], *drawn)}


@dataclass(frozen=True)
class DeviceAugmentation:
    """A crop that is resized, and further steps, in the form that runs on a device."""

    crop: RandomResizedCrop
    steps: tuple[Any, ...]

    def draw(self, image: NDArray[np.uint8], rng: np.random.Generator) -> DrawnImage:
        """Draw for an image; called in loader workers."""
        size, noise = height_and_width(self.crop.size), None
        top, left, height, width = self.crop.draw(image.shape[:2], rng)
        pixels = image[top : top + height, left : left + width]
        factors = [max(1, int(side / wanted / _GAP)) for side, wanted in zip((height, width), size, strict=True)]
        if max(factors) > 1:
            pixels = np.asarray(pillow().fromarray(np.ascontiguousarray(pixels)).reduce((factors[1], factors[0])))
        numbers = [height / factors[0], width / factors[1]]
        for step in self.steps:
            drawn = step.draw(size, rng)
            if isinstance(step, RandomErasing) and drawn is not None:
                noise = drawn[2]
            numbers += _FORMS[type(step)].numbers(step, drawn)
        return DrawnImage(self, pixels, numbers, noise)

    def batch(self, images: Sequence[DrawnImage]) -> ImageBatch:
        """Return the values of a batch that stand for its "pixel_values"; called in loader workers."""
        batch = ImageBatch(pixel_values=_padded([image.pixels for image in images]))
        batch.augmentation = self
        numbers = np.array([image.numbers for image in images])
        batch[_DRAWN] = torch.from_numpy(numbers.astype(np.float32))
        size = height_and_width(self.crop.size)
        batch["num_taps"] = tuple(
            2 * ceil(max(1.0, most / wanted)) + 1 for most, wanted in zip(numbers[:, :2].max(0), size, strict=True)
        )
        if any(image.noise is not None for image in images):
            nothing = np.zeros((1, 1, 3), np.uint8)
            batch["noise"] = _padded([nothing if image.noise is None else image.noise for image in images])
        return batch

    def finished(self, parts: Tensor, numbers: Tensor, noise: Tensor | None, num_taps: tuple[int, int]) -> Tensor:
        """Return uint8 images (images, height, width, 3), on the device of the parts; a few at a time."""
        height, width = height_and_width(self.crop.size)
        number = max(1, _MOST_LEVELS // (3 * max(parts.shape[1], height) * max(parts.shape[2], width)))
        each_noise = [None] * len(parts) if noise is None else noise.split(number)
        pieces = zip(parts.split(number), numbers.split(number), each_noise, strict=False)
        found = [self._finished(*piece, num_taps) for piece in pieces]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _finished(self, parts: Tensor, numbers: Tensor, noise: Tensor | None, num_taps: tuple[int, int]) -> Tensor:
        height, width = height_and_width(self.crop.size)
        images = _resampled(parts.transpose(1, 2), numbers[:, 1], width, num_taps[1])  # the width first, as Pillow does
        images = _resampled(images.to(torch.uint8).transpose(1, 2), numbers[:, 0], height, num_taps[0])
        first = 2
        for step in self.steps:
            form = _FORMS[type(step)]
            last = first + form.count(step)
            images = form.apply(step, images, numbers[:, first:last], noise)
            first = last
        return images.to(torch.uint8)


def device_augmentation(transform: Any) -> DeviceAugmentation | str:
    """Return the form of a training transform that runs on a device, or why there is none."""
    first, *steps = transform.transforms if isinstance(transform, Compose) else (transform,)
    if type(first) is not RandomResizedCrop:
        return f"it begins with {_name(first)}, and a batch is made of parts of a RandomResizedCrop"
    if missing := [step for step in steps if type(step) not in _FORMS]:
        return f"{_name(missing[0])} has no form for a batch"
    if sum(type(step) is RandomErasing for step in steps) > 1:
        return "it erases more than once"
    return DeviceAugmentation(first, tuple(steps))


def _name(transform: Any) -> str:
    function = getattr(transform, "function", transform)
    return str(getattr(function, "__name__", type(function).__name__))


def _padded(images: list[NDArray[np.uint8]]) -> Tensor:
    """Return images in one tensor, the upper left part of each; the rest is zero, and never read."""
    shape = (len(images), *(max(image.shape[axis] for image in images) for axis in (0, 1)), 3)
    padded = torch.zeros(shape, dtype=torch.uint8) if get_worker_info() is None else _zeros_to_send(shape)
    for own, image in zip(padded.numpy(), images, strict=True):
        own[: image.shape[0], : image.shape[1]] = image
    return padded


def _zeros_to_send(shape: tuple[int, ...]) -> Tensor:
    """Return zeros in the shared memory in which a loader worker sends them, as torch's default_collate does."""
    # There is no public function for shared memory without a tensor that is copied into it.
    storage = torch.UntypedStorage._new_shared(prod(shape))
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


def _resampled(images: Tensor, lengths: Tensor, size: int, num_taps: int) -> Tensor:
    """Resize the first `lengths` (images,) of dimension 1 of images (images, n, m, 3): bilinear, with antialiasing.

    It follows Pillow's `precompute_coeffs`. Taps are summed in their order, so that the rest of a batch, which decides
    their number, changes no bit.
    """
    scale = (lengths / size)[:, None]
    support = scale.clamp(min=1)
    centers = (torch.arange(size, device=images.device) + 0.5) * scale
    places = (centers - support + 0.5).floor().clamp(min=0)[..., None] + torch.arange(num_taps, device=images.device)
    weights = (1 - ((places + 0.5 - centers[..., None]) / support[..., None]).abs()).clamp(min=0)
    weights = weights * (places < lengths.ceil()[:, None, None])
    total = weights[..., 0].clone()
    for tap in range(1, num_taps):
        total += weights[..., tap]
    weights = (weights / total[..., None]).flatten(0, 1).T[..., None].contiguous()
    starts = torch.arange(len(images), device=images.device)[:, None, None] * images.shape[1]
    rows = (starts + places.long().clamp(max=images.shape[1] - 1)).flatten(0, 1).T.contiguous()
    source = images.flatten(0, 1).flatten(1)
    found = source.index_select(0, rows[0]) * weights[0]
    for tap in range(1, num_taps):
        found += source.index_select(0, rows[tap]) * weights[tap]
    return found.add_(0.5).floor_().clamp_(0, 255).view(len(images), size, *images.shape[2:])


def _mirrored(step: Any, images: Tensor, numbers: Tensor, noise: Tensor | None) -> Tensor:
    axis = 1 if type(step) is VerticalFlip else 2
    return torch.where(_per_image(numbers[:, 0] > 0), images.flip(axis), images)


def _jittered(step: ColorJitter, images: Tensor, numbers: Tensor, noise: Tensor | None) -> Tensor:
    """Change colours, in each image in its own order: `numbers` has pairs of a kind and an amount."""
    for kinds, amounts in zip(numbers[:, ::2].unbind(1), numbers[:, 1::2].unbind(1), strict=True):
        kind, amount = _per_image(kinds), _per_image(amounts)
        red, green, blue = images.split(1, -1)
        grey = ((red * 19595 + green * 38470 + blue * 7471 + 32768) / 65536).floor()  # below 2**24: exact
        mean = grey.sum((1, 2, 3), dtype=torch.int64) / (grey.shape[1] * grey.shape[2])
        base = torch.where(kind == CONTRAST, _per_image((mean + 0.5).floor()), grey)
        base = base.masked_fill(kind == BRIGHTNESS, 0)
        changed = (base + amount * (images - base)).clamp(0, 255).floor()
        images = torch.where(kind == HUE, _turned(images, amount), changed) if step.hue else changed
    return images


def _turned(images: Tensor, amount: Tensor) -> Tensor:
    """Shift the hue by a share of the circle; hue and saturation have 256 levels, as Pillow's HSV."""
    red, green, blue = images.split(1, -1)
    value = images.amax(-1, keepdim=True)
    span = value - images.amin(-1, keepdim=True)
    reds, greens, blues = ((value - each) / span.clamp(min=1) for each in (red, green, blue))
    hue = torch.where(green == value, 2 + reds - blues, 4 + greens - reds)
    hue = torch.where(red == value, blues - greens, hue)
    hue = (torch.where(hue < 0, hue / 6 + 1, hue / 6) * 255).floor()
    hue = (hue.masked_fill(span == 0, 0) + (amount * 255).round()) % 256
    saturation = (span / value.clamp(min=1) * 255).floor() / 255
    sector = (hue * 6 / 255).floor()
    fraction = hue * 6 / 255 - sector
    low, falling, rising = ((value * (1 - saturation * share) + 0.5).floor() for share in (1.0, fraction, 1 - fraction))
    sector = sector % 6
    channels = []
    for order in ((1, 4, 0, 5), (3, 0, 1, 2), (5, 2, 3, 4)):  # sectors in which it falls, rises, and is the value
        channel = torch.where(sector == order[0], falling, low)
        channel = torch.where(sector == order[1], rising, channel)
        channels.append(torch.where((sector == order[2]) | (sector == order[3]), value, channel))
    return torch.cat(channels, -1)


def _warped(step: RandomAffine, images: Tensor, numbers: Tensor, noise: Tensor | None) -> Tensor:
    """Move images by the inverses of their matrices: bilinear; outside they have the fill."""
    height, width = images.shape[1:3]
    rows = torch.arange(height, device=images.device)[:, None] + 0.5
    columns = torch.arange(width, device=images.device) + 0.5
    a, b, c, d, e, f = (each[:, None, None] for each in numbers[:, :6].unbind(1))
    x, y = a * columns + b * rows + c, d * columns + e * rows + f
    is_inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    x, y = x - 0.5, y - 0.5
    left, top = x.floor(), y.floor()
    right_share, lower_share = (x - left)[..., None], (y - top)[..., None]
    lefts, rights = (each.clamp(0, width - 1).long() for each in (left, left + 1))
    tops, bottoms = (each.clamp(0, height - 1).long() for each in (top, top + 1))
    upper = _mixed(_taken(images, tops, lefts), _taken(images, tops, rights), right_share)
    lower = _mixed(_taken(images, bottoms, lefts), _taken(images, bottoms, rights), right_share)
    return torch.where(is_inside[..., None], _mixed(upper, lower, lower_share).floor(), numbers[:, None, None, 6:])


def _mixed(one: Tensor, other: Tensor, share: Tensor) -> Tensor:
    return one + (other - one) * share


def _taken(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return pixels of each image: (images, height, width, 3) for rows and columns of (images, height, width)."""
    number, height, width, _ = images.shape
    starts = torch.arange(number, device=images.device)[:, None, None] * (height * width)
    found = images.reshape(-1, 3).index_select(0, (starts + rows * width + columns).flatten())
    return found.view(*rows.shape, 3)


def _erased(step: RandomErasing, images: Tensor, numbers: Tensor, noise: Tensor | None) -> Tensor:
    if noise is None:
        return images
    top, left, height, width = (each[:, None, None] for each in numbers.unbind(1))
    rows = torch.arange(images.shape[1], device=images.device)[:, None] - top
    columns = torch.arange(images.shape[2], device=images.device) - left
    is_erased = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    rows, columns = rows.clamp(0, noise.shape[1] - 1).long(), columns.clamp(0, noise.shape[2] - 1).long()
    return torch.where(is_erased[..., None], _taken(noise, *torch.broadcast_tensors(rows, columns)).float(), images)


def _per_image(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


def _erasing(step: RandomErasing, drawn: Any) -> list[float]:
    return [0, 0, 0, 0] if drawn is None else [drawn[0], drawn[1], *drawn[2].shape[:2]]


def _warping(step: RandomAffine, matrix: NDArray[np.float64]) -> list[float]:
    return [*np.linalg.inv(matrix)[:2].ravel().tolist(), *step.fill]


class _Form(NamedTuple):
    """A step for batches: its numbers from what it drew for an image, how many these are, and what they change."""

    numbers: Callable[[Any, Any], list[float]]
    count: Callable[[Any], int]
    apply: Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]


_FLIP = _Form(lambda step, drawn: [float(drawn)], lambda step: 1, _mirrored)
_FORMS: dict[type, _Form] = {
    HorizontalFlip: _FLIP,
    VerticalFlip: _FLIP,
    ColorJitter: _Form(
        lambda step, drawn: [float(number) for change in drawn for number in change],
        lambda step: 2 * sum(strength != 0 for strength in step.strengths),
        _jittered,
    ),
    RandomAffine: _Form(_warping, lambda step: 9, _warped),
    RandomErasing: _Form(_erasing, lambda step: 4, _erased),
}
