"""Transforms of scenes: callables `transform(scene, rng) -> Scene`, combined with `Compose`.

All randomness comes from the numpy generator that is passed in, so the same generator gives the same pixels. Geometric
ones also move boxes and masks (see `geometry`). Sizes are one number for a square, or (height, width). A transform is a
frozen dataclass: its repr is complete, and it can be pickled.

Example:
    transform = Compose([RandomResizedCrop(224), HorizontalFlip(), ColorJitter(0.2, 0.2, 0.2)])
    scene = transform(scene, np.random.default_rng(0))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from loopwright.data.images.geometry import MIDDLE_GREY, Color, cropped, flipped, padded, resized, warped
from loopwright.data.images.scene import IGNORED_CLASS, Scene
from loopwright.data.vision_extra import pillow
from loopwright.errors import ConfigError

Transform: TypeAlias = Callable[[Scene, np.random.Generator], Scene]
Size: TypeAlias = "int | tuple[int, int]"

MIN_VISIBLE = 0.1  # the fraction of an object that must remain visible
_MOST_TRIES = 10


@dataclass(frozen=True)
class Compose:
    """A sequence of transforms."""

    transforms: Sequence[Transform]

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        """Return the scene after all transforms, in the order of the list."""
        for transform in self.transforms:
            scene = transform(scene, rng)
        return scene


# ------------------------------------------------------------------------------------------------------- sizes


@dataclass(frozen=True)
class Resize:
    """Resizes an image.

    Attributes:
        shorter: length of the shorter side; the aspect ratio is kept.
        longest: length of the longer side, or with `shorter` its maximum.
        exact: the exact size; the aspect ratio may change.
    """

    shorter: int | None = None
    longest: int | None = None
    exact: Size | None = None

    def __post_init__(self) -> None:
        sides = [side for side in (self.shorter, self.longest) if side is not None]
        if (self.exact is None) != bool(sides):
            raise ConfigError(f"Resize takes either exact, or shorter, longest or both of these, got {self}")
        for side in sides if self.exact is None else height_and_width(self.exact):
            _check_positive("a side", side)

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        """Return the resized scene, without random draws."""
        return resized(scene, *self.size_for(*scene.size))

    def size_for(self, height: int, width: int) -> tuple[int, int]:
        """Return the new height and width of an image of this size."""
        if self.exact is not None:
            return height_and_width(self.exact)
        scales = []
        if self.shorter is not None:
            scales.append(self.shorter / min(height, width))
        if self.longest is not None:
            scales.append(self.longest / max(height, width))
        return max(1, round(height * min(scales))), max(1, round(width * min(scales)))


@dataclass(frozen=True)
class PadTo:
    """Pads at the right and at the bottom up to a size; longer sides are unchanged.

    Attributes:
        size: the minimum size.
        multiple: sides are rounded up to it.
        fill: the colour of the padding.
        ignore_index: its class.
    """

    size: Size = 1
    multiple: int = 1
    fill: Color = MIDDLE_GREY
    ignore_index: int = IGNORED_CLASS

    def __post_init__(self) -> None:
        _check_positive("multiple", self.multiple)

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        """Return the padded scene, without random draws."""
        bottom, right = (
            -(-max(own, least) // self.multiple) * self.multiple - own
            for own, least in zip(scene.size, height_and_width(self.size), strict=True)
        )
        return padded(scene, 0, 0, bottom, right, self.fill, self.ignore_index)


# ------------------------------------------------------------------------------------------------------- crops


@dataclass(frozen=True)
class _Crop:
    """Crops a part of a size; a smaller image is padded on all sides first.

    Attributes:
        size: of the crop.
        min_visible: the fraction of an object that must remain visible.
        fill: the colour of the padding.
        ignore_index: its class.
    """

    size: Size
    min_visible: float = MIN_VISIBLE
    fill: Color = MIDDLE_GREY
    ignore_index: int = IGNORED_CLASS


class CenterCrop(_Crop):
    """Crops the center; takes the size, min_visible, and the fill and ignore_index of the padding."""

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        """Return the center of the scene, without random draws."""
        scene, free_height, free_width = _at_least(scene, self.size, self.fill, self.ignore_index)
        height, width = height_and_width(self.size)
        return cropped(scene, free_height // 2, free_width // 2, height, width, self.min_visible)


class RandomCrop(_Crop):
    """Crops a random part; takes the size, min_visible, and the fill and ignore_index of the padding."""

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        """Return a part of the scene."""
        scene, free_height, free_width = _at_least(scene, self.size, self.fill, self.ignore_index)
        top, left = int(rng.integers(free_height + 1)), int(rng.integers(free_width + 1))
        return cropped(scene, top, left, *height_and_width(self.size), self.min_visible)


@dataclass(frozen=True)
class RandomResizedCrop:
    """Crops a part of random size and aspect ratio, and resizes it.

    Attributes:
        size: the final size.
        scale: the smallest and the largest fraction of the area.
        ratio: the smallest and the largest width / height.
        min_visible: the fraction of an object that must remain visible.
    """

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    min_visible: float = MIN_VISIBLE

    def __post_init__(self) -> None:
        _check_range("scale", self.scale)
        _check_range("ratio", self.ratio)

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        """Return a part of the scene, resized."""
        part = cropped(scene, *self._draw(*scene.size, rng), self.min_visible)
        return resized(part, *height_and_width(self.size))

    def _draw(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Return top, left, height and width; the center in the nearest allowed shape if no draw fits."""
        for _ in range(_MOST_TRIES):
            area = height * width * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            new_width, new_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < new_width <= width and 0 < new_height <= height:
                top, left = rng.integers(height - new_height + 1), rng.integers(width - new_width + 1)
                return int(top), int(left), new_height, new_width
        new_width = max(1, min(width, round(height * self.ratio[1])))
        new_height = max(1, min(height, round(width / self.ratio[0])))
        return (height - new_height) // 2, (width - new_width) // 2, new_height, new_width


# ------------------------------------------------------------------------------------------ flips and the affine


@dataclass(frozen=True)
class HorizontalFlip:
    """Flips left and right, with a probability."""

    probability: float = 0.5

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        """Return the scene or its mirror image."""
        return flipped(scene) if rng.random() < self.probability else scene


@dataclass(frozen=True)
class VerticalFlip:
    """Flips top and bottom, with a probability."""

    probability: float = 0.5

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        """Return the scene or its mirror image."""
        return flipped(scene, is_vertical=True) if rng.random() < self.probability else scene


@dataclass(frozen=True)
class RandomAffine:
    """Rotates, shifts, scales and shears about the centre; the size of the image stays.

    Attributes:
        degrees: the largest rotation, either way.
        translate: the largest shift, as a fraction of the height and of the width.
        scale: the smallest and the largest factor.
        shear: the largest shear in degrees, either way, along x and along y.
        min_visible: the fraction of an object that must remain visible.
        fill: the colour of new pixels.
        ignore_index: its class.
    """

    degrees: float = 0.0
    translate: float = 0.0
    scale: tuple[float, float] = (1.0, 1.0)
    shear: float = 0.0
    min_visible: float = MIN_VISIBLE
    fill: Color = MIDDLE_GREY
    ignore_index: int = IGNORED_CLASS

    def __post_init__(self) -> None:
        _check_range("scale", self.scale)
        if not 0 <= self.shear < 45:
            raise ConfigError(f"shear must be at least 0 and below 45 degrees, got {self.shear}")

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        """Return the moved scene."""
        return warped(scene, self._draw(*scene.size, rng), self.fill, self.ignore_index, self.min_visible)

    def _draw(self, height: int, width: int, rng: np.random.Generator) -> NDArray[np.float64]:
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


# ------------------------------------------------------------------------------------------------------ colours


@dataclass(frozen=True)
class ColorJitter:
    """Changes brightness, contrast, saturation and hue, in random order.

    Attributes:
        brightness: a factor between 1 - brightness and 1 + brightness; 0 disables it. Likewise the next two.
        contrast: about the mean grey of the image.
        saturation: about its grey.
        hue: the largest shift either way, as a fraction of the colour circle: at most 0.5.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self) -> None:
        if min(self.brightness, self.contrast, self.saturation) < 0 or not 0 <= self.hue <= 0.5:
            raise ConfigError(f"the strengths of ColorJitter are not negative, and hue is at most 0.5, got {self}")

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        """Return the scene in other colours."""
        image = pillow().fromarray(np.ascontiguousarray(scene.image))
        enhance = pillow("ImageEnhance")
        kinds = [
            (self.brightness, enhance.Brightness),
            (self.contrast, enhance.Contrast),
            (self.saturation, enhance.Color),
            (self.hue, None),
        ]
        for index in rng.permutation(len(kinds)):
            strength, kind = kinds[index]
            if not strength:
                continue
            change = rng.uniform(-strength, strength)
            image = _turned_hue(image, change) if kind is None else kind(image).enhance(max(0.0, 1 + change))
        return replace(scene, image=np.asarray(image))


@dataclass(frozen=True)
class RandomErasing:
    """Fills a rectangle with noise, with a probability; boxes and masks stay.

    Attributes:
        probability: of erasing.
        scale: the smallest and the largest fraction of the area.
        ratio: the smallest and the largest width / height.
    """

    probability: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)

    def __post_init__(self) -> None:
        _check_range("scale", self.scale)
        _check_range("ratio", self.ratio)

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        """Return the scene, or one with a rectangle of noise."""
        if rng.random() >= self.probability:
            return scene
        height, width = scene.size
        for _ in range(_MOST_TRIES):
            area = height * width * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            own_width, own_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < own_width < width and 0 < own_height < height:
                top, left = rng.integers(height - own_height + 1), rng.integers(width - own_width + 1)
                image = scene.image.copy()
                noise = rng.integers(0, 256, (own_height, own_width, 3), dtype=np.uint8)
                image[top : top + own_height, left : left + own_width] = noise
                return replace(scene, image=image)
        return scene


def _turned_hue(image: Any, share: float) -> Any:
    hue, saturation, value = image.convert("HSV").split()
    shift = round(share * 255)
    turned = hue.point([(level + shift) % 256 for level in range(256)])
    return pillow().merge("HSV", (turned, saturation, value)).convert("RGB")


# ------------------------------------------------------------------------------------------------ what they share


def height_and_width(size: Size) -> tuple[int, int]:
    """Return a size as (height, width); a single number is a square."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _at_least(scene: Scene, size: Size, fill: Color, ignore_index: int) -> tuple[Scene, int, int]:
    """Return the scene, padded on all sides to at least a size, and by how much it exceeds that size."""
    missing = [max(0, least - own) for least, own in zip(height_and_width(size), scene.size, strict=True)]
    top, left = missing[0] // 2, missing[1] // 2
    scene = padded(scene, top, left, missing[0] - top, missing[1] - left, fill, ignore_index)
    height, width = height_and_width(size)
    return scene, scene.size[0] - height, scene.size[1] - width


def _check_positive(what: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{what} must be at least 1 pixel, got {value}")


def _check_range(what: str, bounds: tuple[float, float]) -> None:
    if not 0 < bounds[0] <= bounds[1]:
        raise ConfigError(f"{what} must be (least, largest), both above 0, got {bounds}")
