"""A confusion matrix as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.data.pictures.canvas import Color, Image, as_image, blank
from loopwright.data.pictures.text import (
    drawable_names,
    line_height,
    readable_on,
    shorten,
    text_width,
    write,
    write_upwards,
)
from loopwright.errors import DataError

# Right answers are blue, wrong ones red; darker for a larger fraction of the row.
_RIGHT = np.array([16.0, 78.0, 139.0])
_WRONG = np.array([178.0, 24.0, 43.0])
# Below 1, so that a few percent of wrong answers still show.
_GAMMA = 0.6
_LINE: Color = (214, 214, 214)
_MOST_SIDE = 800
_CELLS = (4, 38)
_LEAST_CELL_WITH_LINES = 8
_LEAST_CELL_WITH_COUNTS = 22
_MOST_NAME = 120
_GAP = 6
_COUNT_SIZE = 10


def confusion_picture(matrix: npt.ArrayLike, names: Sequence[str]) -> Image:
    """Return the matrix with a square per pair of classes: truth top to bottom, predictions left to right.

    Squares show their counts if there is room. With many classes only some names are shown, and #number for a name that
    no font can draw. A row of the matrix is a true class, a column a predicted one.
    """
    counts = np.asarray(matrix)
    num = len(names)
    if counts.shape != (num, num) or num == 0:
        raise DataError(f"a confusion matrix of the shape {counts.shape} for {num} names; expected ({num}, {num})")
    cell = int(np.clip(_MOST_SIDE // num, *_CELLS))
    shown = [shorten(name, _MOST_NAME) for name in drawable_names(names)]
    room = max(text_width(name) for name in shown)
    colors = _colors(counts)
    squares = as_image(_squares(colors, cell))
    side = squares.width
    # Column names are vertical if one is wider than its column.
    is_upright = room >= cell
    below = room if is_upright else line_height()
    left, top = line_height() + 2 * _GAP + room, _GAP
    picture = blank(left + side + _GAP, top + side + 2 * _GAP + below + line_height())
    picture.paste(squares, (left, top))
    # Overlapping names are left out.
    for index in range(0, num, -(-line_height() // cell)):
        place = index * cell + (cell - line_height()) // 2
        write(picture, left - _GAP // 2 - text_width(shown[index]), top + place, shown[index])
        if is_upright:
            write_upwards(picture, left + place, top + side + _GAP // 2, shown[index])
        else:
            x = left + index * cell + (cell - text_width(shown[index])) // 2
            write(picture, x, top + side + _GAP // 2, shown[index])
    if cell >= _LEAST_CELL_WITH_COUNTS:
        _write_counts(picture, counts, colors, cell, (left, top))
    write_upwards(picture, _GAP // 2, top + max(0, side - text_width("truth")) // 2, "truth")
    x = left + max(0, side - text_width("prediction")) // 2
    write(picture, x, picture.height - line_height() - 1, "prediction")
    return picture


def _write_counts(
    picture: Image, counts: npt.NDArray[Any], colors: npt.NDArray[np.uint8], cell: int, corner: tuple[int, int]
) -> None:
    for row, column in np.argwhere(counts):
        text = str(counts[row, column])
        width = text_width(text, _COUNT_SIZE)
        if width < cell:
            x = corner[0] + int(column) * cell + (cell - width) // 2
            y = corner[1] + int(row) * cell + (cell - line_height(_COUNT_SIZE)) // 2
            red, green, blue = map(int, colors[row, column])
            write(picture, x, y, text, readable_on((red, green, blue)), _COUNT_SIZE)


def _colors(counts: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    strength = (share**_GAMMA)[:, :, None]
    full = np.where(np.eye(len(counts), dtype=np.bool_)[:, :, None], _RIGHT, _WRONG)
    return np.asarray(np.rint(255 + strength * (full - 255)).astype(np.uint8))


def _squares(colors: npt.NDArray[np.uint8], cell: int) -> npt.NDArray[np.uint8]:
    pixels = np.repeat(np.repeat(colors, cell, axis=0), cell, axis=1)
    pixels = np.pad(pixels, ((0, 1), (0, 1), (0, 0)))
    lines = np.arange(0, len(pixels), cell if cell >= _LEAST_CELL_WITH_LINES else len(pixels) - 1)
    pixels[lines] = _LINE
    pixels[:, lines] = _LINE
    return pixels
