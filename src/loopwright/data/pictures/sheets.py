"""Several pictures on one: contact sheets, truth next to prediction, and reconstructions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loopwright.data.pictures.canvas import LEAST_SIDE, Color, Image, ImageLike, as_image, blank, fit
from loopwright.data.pictures.text import line_height, shorten, text_width, write
from loopwright.errors import DataError

GAP = 8
_MOST_COLUMNS = 8
_LEAST_COLUMN = 64
_HIDDEN: Color = (96, 125, 169)


def sheet(
    images: Sequence[ImageLike], captions: Sequence[str] | None = None, columns: int | None = None, size: int = 160
) -> Image:
    """Return all images on one white sheet, row by row, each with its caption below.

    Args:
        images: at least one; they may differ in size.
        captions: one per image, of one or more lines; truncated to the column width.
        columns: images per row; None for up to 8.
        size: the longer side of an image on the sheet. Smaller ones are enlarged by a whole factor, larger ones shrunk.
    """
    if not images:
        raise DataError("a sheet of no images; expected at least one")
    if captions is not None and len(captions) != len(images):
        raise DataError(f"{len(captions)} captions for {len(images)} images; expected one for each")
    pictures = [fit(image, size) for image in images]
    lines = [caption.split("\n") if caption else [] for caption in captions or [""] * len(images)]
    num_columns = min(len(pictures), columns or _MOST_COLUMNS)
    num_rows = -(-len(pictures) // num_columns)
    width = max(_LEAST_COLUMN if captions else 1, *(picture.width for picture in pictures))
    height = max(picture.height for picture in pictures)
    below = line_height() * max(map(len, lines))
    page = blank(GAP + num_columns * (width + GAP), GAP + num_rows * (height + below + GAP))
    for index, picture in enumerate(pictures):
        row, column = divmod(index, num_columns)
        x, y = GAP + column * (width + GAP), GAP + row * (height + below + GAP)
        page.paste(picture, (x + (width - picture.width) // 2, y + (height - picture.height) // 2))
        for number, line in enumerate(lines[index]):
            text = shorten(line, width)
            write(page, x + (width - text_width(text)) // 2, y + height + number * line_height(), text)
    return page


def side_by_side(truth: ImageLike, prediction: ImageLike) -> Image:
    """Return two pictures of one image side by side, in the size of the larger one, enlarged if tiny."""
    pair, captions = [as_image(truth), as_image(prediction)], ("truth", "prediction")
    return sheet(pair, captions, columns=2, size=max(LEAST_SIDE, *(max(picture.size) for picture in pair)))


def reconstruction_row(
    image: ImageLike,
    masked: npt.ArrayLike,
    rebuilt: ImageLike,
    captions: tuple[str, str, str] = ("image", "seen", "rebuilt"),
    size: int = 160,
) -> Image:
    """Return an image, the part that a model saw, and its reconstruction, in one row.

    The pixels hidden from the model (`masked`: bool, shape (H, W)) are blue. `size` is the longer side of each image.
    """
    whole = as_image(image)
    hidden = np.asarray(masked, np.bool_)
    if hidden.shape != (whole.height, whole.width):
        raise DataError(f"masked has the shape {hidden.shape}; expected {(whole.height, whole.width)} as the image")
    seen = np.array(whole)
    seen[hidden] = _HIDDEN
    return sheet([whole, seen, rebuilt], captions, columns=3, size=size)
