"""One color for each class id, the same in every picture of every run."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from loopwright.data.pictures.canvas import Color

NUM_COLORS = 200
# For ids below 0, which belong to no class.
NO_CLASS: Color = (128, 128, 128)

# The first color is a red; each later one is the farthest from all before it.
_FIRST = (230, 25, 25)
_STEP = 15
_LIGHTNESS = (38.0, 88.0)
_LEAST_CHROMA = 22.0
# From linear RGB to XYZ, and the white point of D65 (IEC 61966-2-1).
_TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
_WHITE_POINT = np.array([0.9505, 1.0, 1.089])


def color_of(class_id: int) -> Color:
    """Return the color of a class. After 200 classes they repeat; an id below 0 is grey."""
    if class_id < 0:
        return NO_CLASS
    red, green, blue = palette()[class_id % NUM_COLORS]
    return int(red), int(green), int(blue)


@cache
def palette() -> npt.NDArray[np.uint8]:
    """Return the 200 colors by class id, shape (200, 3). The first ones differ most; none is near grey, black or white.

    They are chosen by distance in CIELAB, so the color of an id does not depend on the number of classes.
    """
    levels = np.arange(0, 256, _STEP)
    grid = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).reshape(-1, 3)
    lab = to_lab(grid)
    lightness, chroma = lab[:, 0], np.hypot(lab[:, 1], lab[:, 2])
    is_usable = (lightness >= _LIGHTNESS[0]) & (lightness <= _LIGHTNESS[1]) & (chroma >= _LEAST_CHROMA)
    grid, lab = grid[is_usable], lab[is_usable]
    chosen = np.zeros((NUM_COLORS, 3), np.uint8)
    chosen[0] = _FIRST
    distance = np.linalg.norm(lab - to_lab(np.array([_FIRST])), axis=1)
    for index in range(1, NUM_COLORS):
        # Rounded, so that the last bit of a machine's arithmetic does not matter.
        farthest = int(np.argmax(distance.round(6)))
        chosen[index] = grid[farthest]
        distance = np.minimum(distance, np.linalg.norm(lab - lab[farthest], axis=1))
    chosen.setflags(write=False)
    return chosen


def to_lab(colors: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Return sRGB colors of shape (n, 3) as CIELAB, where distances are perceptually uniform."""
    share = colors / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    ratio = linear @ _TO_XYZ.T / _WHITE_POINT
    curved = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = curved[:, 0], curved[:, 1], curved[:, 2]
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)
