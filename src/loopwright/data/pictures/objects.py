"""Boxes and masks drawn on the image they belong to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.data.pictures.canvas import LEAST_SIDE, Color, Image, ImageLike, as_image, enlarge, scale_for
from loopwright.data.pictures.palette import NUM_COLORS, color_of, palette
from loopwright.data.pictures.text import SIZE, line_height, write_label
from loopwright.data.vision_extra import pillow
from loopwright.errors import DataError


def draw_boxes(
    image: ImageLike,
    boxes: npt.ArrayLike,  # x0, y0, x1, y1 of each in pixels of `image`, shape (n, 4)
    names: Sequence[str] | None = None,
    scores: Sequence[float] | npt.NDArray[Any] | None = None,  # with two digits; the highest is drawn last
    colors: Sequence[Color] | None = None,  # one per box; None cycles through the palette
    *,
    scale: int | None = None,  # the whole factor to enlarge by first; None uses `scale_for`
) -> Image:
    """Return the image with boxes, each with its name and score on a label of its color.

    A box goes from the left edge of its first pixel to the right edge of its last one. Lines are inside the box,
    clipped to the image.
    """
    corners = np.asarray(boxes, np.float64).reshape(-1, 4)
    _check_numbers("boxes", len(corners), names=names, scores=scores, colors=colors)
    picture = as_image(image)
    factor = scale_for(*picture.size) if scale is None else scale
    picture = enlarge(picture, factor)
    width, size = max(2, round(max(picture.size) / 250)), max(SIZE - 1, round(max(picture.size) / 45))
    draw = pillow("ImageDraw").Draw(picture)
    order = range(len(corners)) if scores is None else np.argsort(np.asarray(scores, np.float64), kind="stable")
    placed: list[tuple[int, int, str, Color]] = []
    for index in map(int, order):
        color = color_of(index) if colors is None else colors[index]
        left, top, right, bottom = (int(edge) for edge in np.rint(corners[index] * factor))
        # A box thinner than a pixel still shows as a line.
        right, bottom = max(left, right - 1), max(top, bottom - 1)
        draw.rectangle((left, top, right, bottom), outline=color, width=width)
        words = [names[index]] if names is not None and names[index] else []
        words += [f"{scores[index]:.2f}"] if scores is not None else []
        if words:
            placed.append((left, top - line_height(size), " ".join(words), color))
    # Labels are drawn last, so that no line crosses them.
    for x, y, text, color in placed:
        write_label(picture, x, y, text, color, size)
    return picture


def draw_masks(
    image: ImageLike, masks: npt.ArrayLike, colors: Sequence[Color] | None = None, alpha: float = 0.5
) -> Image:
    """Return the image, in its own size, with each object's pixels blended with its color.

    Later masks (bool, shape (n, H, W)) cover earlier ones. In images of 224 pixels and more each mask gets an outline.
    `alpha` is the opacity of the colors; None cycles through the palette.
    """
    picture = as_image(image)
    layers = np.asarray(masks, np.bool_)
    _check_numbers("masks", len(layers), colors=colors)
    pixels = np.asarray(picture)
    if layers.size and layers.shape[1:] != pixels.shape[:2]:
        raise DataError(f"masks of the shape {layers.shape} for an image of {picture.height} x {picture.width} pixels")
    for index, mask in enumerate(layers):
        color = color_of(index) if colors is None else colors[index]
        pixels = _blend(pixels, mask, np.array(color, np.float64), alpha)
        if max(picture.size) >= LEAST_SIDE:
            pixels[_edge(mask)] = color
    return as_image(pixels)


def draw_semantic(
    image: ImageLike,
    semantic: npt.ArrayLike,  # class ids, shape (H, W)
    colors: Sequence[Color] | None = None,  # one per class id; None uses `color_of`
    alpha: float = 0.5,
    *,
    unpainted: Collection[int] = (255,),  # ids whose pixels stay unchanged, as do those of ids below 0
) -> Image:
    """Return the image, in its own size, with each pixel blended with the color of its class."""
    picture = as_image(image)
    ids = np.asarray(semantic)
    pixels = np.asarray(picture)
    if ids.shape != pixels.shape[:2]:
        raise DataError(f"class ids of the shape {ids.shape} for an image of {picture.height} x {picture.width} pixels")
    is_painted = (ids >= 0) & ~np.isin(ids, list(unpainted))
    table = palette() if colors is None else np.array(colors, np.uint8).reshape(-1, 3)
    shown = np.where(is_painted, ids, 0).astype(np.int64)
    if colors is None:
        shown %= NUM_COLORS
    elif shown.max() >= len(table):
        raise DataError(f"class id {int(shown.max())} has no color: there are {len(table)}")
    return as_image(_blend(pixels, is_painted, table[shown][is_painted].astype(np.float64), alpha))


def _blend(
    pixels: npt.NDArray[np.uint8], mask: npt.NDArray[np.bool_], color: npt.NDArray[np.float64], alpha: float
) -> npt.NDArray[np.uint8]:
    blended = pixels.copy()
    blended[mask] = np.rint((1 - alpha) * pixels[mask] + alpha * color).astype(np.uint8)
    return blended


def _edge(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return the pixels of a mask with a neighbour outside it; the image border counts as inside."""
    padded = np.pad(mask, 1, mode="edge")
    inside = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return mask & ~inside


def _check_numbers(things: str, num_things: int, **lists: Any) -> None:
    for what, values in lists.items():
        if values is not None and len(values) != num_things:
            raise DataError(f"{len(values)} {what} for {num_things} {things}; expected one of them for each")
