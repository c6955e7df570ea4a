"""Transforms of scenes: callables `transform(scene, rng) -> Scene`, combined with `Compose`.

All randomness comes from the numpy generator that is passed in, so the same generator gives the same pixels; `draw`
returns what a random transform draws for an image of a size. Geometric ones also move boxes and masks (see `geometry`).
Sizes are one number for a square, or (height, width). A transform is a frozen dataclass: its repr is complete, and it
can be pickled.

Example:
    transform = Compose([RandomResizedCrop(224), HorizontalFlip(), ColorJitter(0.2, 0.2, 0.2)])
    scene = transform(scene, np.random.default_rng(0))
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from loopwright.data.images.geometry import MIDDLE_GREY, Color, cropped, flipped, padded, resized, warped
from loopwright.data.images.scene import IGNORED_CLASS, Scene
from loopwright.data.vision_extra import pillow
from loopwright.errors import ConfigError

Transform: TypeAlias = Callable[[Scene, np.random.Generator], Scene]
Size: TypeAlias = "int | tuple[int, int]"

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)  # what ColorJitter changes
MIN_VISIBLE = 0.1  # the fraction of an object that must remain visible
_MOST_TRIES = 10


@dataclass(frozen=True)
class Compose:
    """A sequence of transforms."""

    transforms: Sequence[Transform]

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        for transform in self.transforms:
            scene = transform(scene, rng)
        return scene


@dataclass(frozen=True)
class Resize:
    """Resizes an image."""

    shorter: int | None = None  # length of the shorter side; the aspect ratio is kept
    longest: int | None = None  # length of the longer side, or with `shorter` its maximum
    exact: Size | None = None  # the exact size; the aspect ratio may change

    def __post_init__(self) -> None:
        sides = [side for side in (self.shorter, self.longest) if side is not None]
        if (self.exact is None) != bool(sides):
            raise ConfigError(f"Resize takes either exact, or shorter, longest or both of these, got {self}")
        for side in sides if self.exact is None else height_and_width(self.exact):
            _check_positive("a side", side)

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        if self.exact is not None:
            return resized(scene, *height_and_width(self.exact))
        height, width = scene.size
        sides = ((self.shorter, min(height, width)), (self.longest, max(height, width)))
        scale = min(wanted / side for wanted, side in sides if wanted is not None)
        return resized(scene, max(1, round(height * scale)), max(1, round(width * scale)))


@dataclass(frozen=True)
class PadTo:
    """Pads at the right and at the bottom up to a size; longer sides are unchanged."""

    size: Size = 1  # the minimum size
    multiple: int = 1  # sides are rounded up to it
    fill: Color = MIDDLE_GREY  # the colour of the padding
    ignore_index: int = IGNORED_CLASS  # its class

    def __post_init__(self) -> None:
        _check_positive("multiple", self.multiple)

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        bottom, right = (
            -(-max(own, least) // self.multiple) * self.multiple - own
            for own, least in zip(scene.size, height_and_width(self.size), strict=True)
        )
        return padded(scene, 0, 0, bottom, right, self.fill, self.ignore_index)


@dataclass(frozen=True)
class _Crop(ABC):
    """Crops a part of a size; a smaller image is padded on all sides first."""

    size: Size  # of the crop
    min_visible: float = MIN_VISIBLE  # the fraction of an object that must remain visible
    fill: Color = MIDDLE_GREY  # the colour of the padding
    ignore_index: int = IGNORED_CLASS  # its class

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        height, width = height_and_width(self.size)
        missing = max(0, height - scene.size[0]), max(0, width - scene.size[1])
        top, left = missing[0] // 2, missing[1] // 2
        scene = padded(scene, top, left, missing[0] - top, missing[1] - left, self.fill, self.ignore_index)
        top, left = (self.place(free, rng) for free in (scene.size[0] - height, scene.size[1] - width))
        return cropped(scene, top, left, height, width, self.min_visible)

    @abstractmethod
    def place(self, free: int, rng: np.random.Generator) -> int:
        """Return the first pixel of the part along a side that is so much longer."""


class CenterCrop(_Crop):
    """Crops the center; takes the size, min_visible, and the fill and ignore_index of the padding."""

    def place(self, free: int, rng: np.random.Generator) -> int:
        return free // 2


class RandomCrop(_Crop):
    """Crops a random part; takes the size, min_visible, and the fill and ignore_index of the padding."""

    def place(self, free: int, rng: np.random.Generator) -> int:
        return int(rng.integers(free + 1))


@dataclass(frozen=True)
class RandomResizedCrop:
    """Crops a part of random size and aspect ratio, and resizes it."""

    size: Size  # the final size
    scale: tuple[float, float] = (0.08, 1.0)  # the smallest and the largest fraction of the area
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # the smallest and the largest width / height
    min_visible: float = MIN_VISIBLE  # the fraction of an object that must remain visible

    def __post_init__(self) -> None:
        _check_range("scale", self.scale)
        _check_range("ratio", self.ratio)

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        part = cropped(scene, *self.draw(scene.size, rng), self.min_visible)
        return resized(part, *height_and_width(self.size))

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Return top, left, height and width; the center in the nearest allowed shape if no draw fits."""
        part = _drawn_part(size, size, self.scale, self.ratio, rng)
        if part is not None:
            return part
        height, width = size
        new_width = max(1, min(width, round(height * self.ratio[1])))
        new_height = max(1, min(height, round(width / self.ratio[0])))
        return (height - new_height) // 2, (width - new_width) // 2, new_height, new_width


@dataclass(frozen=True)
class _Flip:
    probability: float = 0.5

    is_vertical: ClassVar[bool]

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        return flipped(scene, self.is_vertical) if self.draw(scene.size, rng) else scene

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> bool:
        return rng.random() < self.probability


class HorizontalFlip(_Flip):
    """Flips left and right, with a probability."""

    is_vertical = False


class VerticalFlip(_Flip):
    """Flips top and bottom, with a probability."""

    is_vertical = True


@dataclass(frozen=True)
class RandomAffine:
    """Rotates, shifts, scales and shears about the centre; the size of the image stays."""

    degrees: float = 0.0  # the largest rotation, either way
    translate: float = 0.0  # the largest shift, as a fraction of the height and of the width
    scale: tuple[float, float] = (1.0, 1.0)  # the smallest and the largest factor
    shear: float = 0.0  # the largest shear in degrees, either way, along x and along y
    min_visible: float = MIN_VISIBLE  # the fraction of an object that must remain visible
    fill: Color = MIDDLE_GREY  # the colour of new pixels
    ignore_index: int = IGNORED_CLASS  # its class

    def __post_init__(self) -> None:
        _check_range("scale", self.scale)
        if not 0 <= self.shear < 45:
            raise ConfigError(f"shear must be at least 0 and below 45 degrees, got {self.shear}")

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        return warped(scene, self.draw(scene.size, rng), self.fill, self.ignore_index, self.min_visible)

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> NDArray[np.float64]:
        """Return the (3, 3) matrix that moves points."""
        height, width = size
        angle = math.radians(rng.uniform(-self.degrees, self.degrees))
        factor = math.exp(rng.uniform(math.log(self.scale[0]), math.log(self.scale[1])))
        shear_x, shear_y = (math.tan(math.radians(rng.uniform(-self.shear, self.shear))) for _ in range(2))
        shift = rng.uniform(-self.translate, self.translate, 2) * (width, height)
        turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        linear = factor * turn @ np.array([[1.0, shear_x], [shear_y, 1.0]])
        center = np.array([width, height]) / 2
        matrix = np.eye(3)
        matrix[:2, :2] = linear
        matrix[:2, 2] = center + shift - linear @ center
        return matrix


@dataclass(frozen=True)
class ColorJitter:
    """Changes brightness, contrast, saturation and hue, in random order."""

    brightness: float = 0.0  # a factor between 1 - brightness and 1 + brightness; 0 disables it. Likewise the next two.
    contrast: float = 0.0  # about the mean grey of the image
    saturation: float = 0.0  # about its grey
    hue: float = 0.0  # the largest shift either way, as a fraction of the colour circle: at most 0.5

    def __post_init__(self) -> None:
        if min(self.brightness, self.contrast, self.saturation) < 0 or not 0 <= self.hue <= 0.5:
            raise ConfigError(f"ColorJitter takes strengths of at least 0, and a hue of at most 0.5, got {self}")

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        image = pillow().fromarray(np.ascontiguousarray(scene.image))
        enhance = pillow("ImageEnhance")
        kinds = (enhance.Brightness, enhance.Contrast, enhance.Color)
        for kind, amount in self.draw(scene.size, rng):
            image = _turned_hue(image, amount) if kind == HUE else kinds[kind](image).enhance(amount)
        return replace(scene, image=np.asarray(image))

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> list[tuple[int, float]]:
        """Return the changes in their order: `BRIGHTNESS`, `CONTRAST` or `SATURATION` by a factor, `HUE` by a shift."""
        found = []
        for kind in rng.permutation(len(self.strengths)).tolist():
            if strength := self.strengths[kind]:
                change = rng.uniform(-strength, strength)
                found.append((kind, change if kind == HUE else max(0.0, 1 + change)))
        return found

    @property
    def strengths(self) -> tuple[float, float, float, float]:
        """The strengths by kind."""
        return self.brightness, self.contrast, self.saturation, self.hue


@dataclass(frozen=True)
class RandomErasing:
    """Fills a rectangle with noise, with a probability; boxes and masks stay."""

    probability: float = 0.5  # of erasing
    scale: tuple[float, float] = (0.02, 0.33)  # the smallest and the largest fraction of the area
    ratio: tuple[float, float] = (0.3, 3.3)  # the smallest and the largest width / height

    def __post_init__(self) -> None:
        _check_range("scale", self.scale)
        _check_range("ratio", self.ratio)

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        drawn = self.draw(scene.size, rng)
        if drawn is None:
            return scene
        top, left, noise = drawn
        image = scene.image.copy()
        image[top : top + noise.shape[0], left : left + noise.shape[1]] = noise
        return replace(scene, image=image)

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> tuple[int, int, NDArray[np.uint8]] | None:
        """Return the top, the left and the noise of a rectangle; None for an image that stays as it is."""
        if rng.random() >= self.probability:
            return None
        part = _drawn_part(size, (size[0] - 1, size[1] - 1), self.scale, self.ratio, rng)
        if part is None:
            return None
        return part[0], part[1], rng.integers(0, 256, (*part[2:], 3), dtype=np.uint8)


def _drawn_part(
    size: tuple[int, int],
    largest: tuple[int, int],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    rng: np.random.Generator,
) -> tuple[int, int, int, int] | None:
    """Return top, left, height and width of a random part of an image; None if no draw has at most the largest size."""
    for _ in range(_MOST_TRIES):
        area = size[0] * size[1] * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        width, height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < width <= largest[1] and 0 < height <= largest[0]:
            top, left = rng.integers(size[0] - height + 1), rng.integers(size[1] - width + 1)
            return int(top), int(left), height, width
    return None


def _turned_hue(image: Any, share: float) -> Any:
    hue, saturation, value = image.convert("HSV").split()
    shift = round(share * 255)
    turned = hue.point([(level + shift) % 256 for level in range(256)])
    return pillow().merge("HSV", (turned, saturation, value)).convert("RGB")


def height_and_width(size: Size) -> tuple[int, int]:
    """Return a size as (height, width); a single number is a square."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _check_positive(what: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{what} must be at least 1 pixel, got {value}")


def _check_range(what: str, bounds: tuple[float, float]) -> None:
    if not 0 < bounds[0] <= bounds[1]:
        raise ConfigError(f"{what} must be (least, largest), both above 0, got {bounds}")
