"""Digit scenes: one to four digits on a crop of a photo, with exact boxes, masks and classes.

Training takes the left half of each photo and the digits for training, validation the right half and the other digits.
A scene is determined by its split and number only, so 800 scenes are the first 800 of 1,000.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module

import numpy as np
import numpy.typing as npt

from loopwright.data.vision_extra import pillow
from loopwright.demos.images.digits import LabelledImages, has_scikit_learn, load_digits
from loopwright.keys import key

SIDE = 64
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PHOTO_LICENCE = (
    "photos: Creative Commons Attribution 2.0 (china.jpg by danielbuechele, flower.jpg by vultilion, flickr)"
)

_MOST_DIGITS = 4
_SIZES = (14, 28)
_CROPS = (64, 160)
_MOST_DEGREES = 12
# How much lighter or darker than its surroundings a digit is, out of 255.
_LEAST_CONTRAST = 80
_NUM_TRIES = 40
_NUM_GRADIENTS = 8
_LUMA = np.array([0.299, 0.587, 0.114])

Pixels = npt.NDArray[np.uint8]
Shares = npt.NDArray[np.float64]
# Top, left, bottom, right; the end is exclusive.
Rectangle = tuple[int, int, int, int]


@dataclass(frozen=True)
class DigitScene:
    """An image and its digits. No two overlap, so every mask is complete."""

    image: Pixels  # (64, 64, 3)
    masks: npt.NDArray[np.bool_]  # (n, 64, 64): the pixels of each digit
    classes: tuple[int, ...]  # the digits, from 0 to 9

    @cached_property
    def boxes(self) -> list[tuple[int, int, int, int]]:
        """Return x0, y0, x1, y1 around each mask; x1 and y1 are exclusive."""
        corners = []
        for mask in self.masks:
            rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
            corners.append((int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1))
        return corners

    @cached_property
    def semantic(self) -> Pixels:
        """Return the class of each pixel, shape (64, 64): 0 for the background, the digit plus one for a digit."""
        ids = np.zeros((SIDE, SIDE), np.uint8)
        for mask, digit in zip(self.masks, self.classes, strict=True):
            ids[mask] = digit + 1
        return ids


@dataclass(frozen=True)
class SceneParts:
    """The components of scenes, and their sources."""

    digits: LabelledImages
    backgrounds: dict[str, list[Pixels]]  # by split: photos, or their halves
    source: str
    licence: str


def load_parts() -> SceneParts:
    """Return the digits and the backgrounds: scikit-learn's photos, or gradients without scikit-learn."""
    found = load_digits()
    if not has_scikit_learn():
        gradients = {split: _gradients(split) for split in ("train", "validation")}
        return SceneParts(found, gradients, f"{found.source} on color gradients", found.licence)
    photos = import_module("sklearn.datasets").load_sample_images().images
    halves = {
        "train": [photo[:, : photo.shape[1] // 2] for photo in photos],
        "validation": [photo[:, photo.shape[1] // 2 :] for photo in photos],
    }
    source = f"{found.source} on crops of scikit-learn's sample photos china.jpg and flower.jpg"
    return SceneParts(found, halves, source, f"digits: {found.licence}; {PHOTO_LICENCE}")


def digit_scenes(parts: SceneParts, split: str, num_scenes: int) -> Iterator[DigitScene]:
    for index in range(num_scenes):
        yield make_scene(parts, split, np.random.default_rng(key(0, f"scene {split}", index)))


def make_scene(parts: SceneParts, split: str, rng: np.random.Generator) -> DigitScene:
    """Return one scene. A digit without room is left out, except the first one."""
    image, digits, positions = _crop(parts.backgrounds[split], rng), parts.digits, parts.digits.positions(split)
    taken: list[Rectangle] = []
    masks: list[npt.NDArray[np.bool_]] = []
    classes: list[int] = []
    for _ in range(int(rng.integers(1, _MOST_DIGITS + 1))):
        position = positions[int(rng.integers(len(positions)))]
        size, degrees = int(rng.integers(_SIZES[0], _SIZES[1] + 1)), float(rng.uniform(-_MOST_DEGREES, _MOST_DEGREES))
        ink = _ink(digits.images[position], size, degrees)
        place = _free_place(ink.shape, taken, rng)
        if place is None:
            continue
        top, left, bottom, right = place
        below = image[top:bottom, left:right]
        below += ink[:, :, None] * (_contrasting_color(below[ink >= 0.5], rng) - below)
        mask = np.zeros((SIDE, SIDE), np.bool_)
        mask[top:bottom, left:right] = ink >= 0.5
        taken.append(place)
        masks.append(mask)
        classes.append(int(digits.labels[position]))
    return DigitScene(np.rint(image).astype(np.uint8), np.stack(masks), tuple(classes))


def _crop(backgrounds: list[Pixels], rng: np.random.Generator) -> Shares:
    images = pillow()
    background = backgrounds[int(rng.integers(len(backgrounds)))]
    side = int(rng.integers(_CROPS[0], _CROPS[1] + 1))
    top, left = (int(rng.integers(length - side + 1)) for length in background.shape[:2])
    part = images.fromarray(np.ascontiguousarray(background[top : top + side, left : left + side]))
    return np.array(part.resize((SIDE, SIDE), images.Resampling.BILINEAR), np.float64)


def _free_place(shape: tuple[int, ...], taken: list[Rectangle], rng: np.random.Generator) -> Rectangle | None:
    height, width = shape
    for top, left in rng.integers((SIDE - height + 1, SIDE - width + 1), size=(_NUM_TRIES, 2)).tolist():
        bottom, right = top + height, left + width
        if all(bottom < up or down < top or right < near or far < left for up, near, down, far in taken):
            return top, left, bottom, right
    return None


def _ink(digit: Pixels, size: int, degrees: float) -> Shares:
    """Return a digit enlarged and rotated, with soft edges, cropped to its ink."""
    images = pillow()
    large = images.fromarray(digit).resize((size, size), images.Resampling.BICUBIC)
    turned = large.rotate(degrees, images.Resampling.BICUBIC, expand=True)
    # Enlarged handwriting of 8 x 8 pixels is blurred: this restores the strokes.
    ink = ((np.asarray(turned, np.float64) / 255 - 0.25) / 0.4).clip(0, 1)
    rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _contrasting_color(below: Shares, rng: np.random.Generator) -> Shares:
    lightness = below @ _LUMA
    for _ in range(_NUM_TRIES):
        hue, saturation, value = rng.uniform((0, 0, 0.1), (1, 1, 1))
        color = np.array(colorsys.hsv_to_rgb(hue, saturation, value)) * 255
        if np.abs(lightness - color @ _LUMA).mean() >= _LEAST_CONTRAST:
            return color
    return np.full(3, 0.0 if lightness.mean() > 127 else 255.0)


def _gradients(split: str) -> list[Pixels]:
    """Return backgrounds without photos: four corner colors, blended, with a little noise."""
    backgrounds = []
    for index in range(_NUM_GRADIENTS):
        rng = np.random.default_rng(key(0, f"gradient {split[:5]}", index))
        across = np.linspace(0, 1, 2 * _CROPS[1])
        x, y = across[None, :, None], across[:, None, None]
        corners = rng.uniform(0, 255, (4, 3))
        blended = (1 - y) * ((1 - x) * corners[0] + x * corners[1]) + y * ((1 - x) * corners[2] + x * corners[3])
        noisy = blended + rng.normal(0, 12, blended.shape)
        backgrounds.append(np.rint(noisy.clip(0, 255)).astype(np.uint8))
    return backgrounds
