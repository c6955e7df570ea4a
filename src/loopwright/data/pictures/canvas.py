"""Images to draw on: from arrays, resized, and as bytes."""

from __future__ import annotations

import io
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from loopwright.data.vision_extra import pillow
from loopwright.errors import DataError

Color: TypeAlias = tuple[int, int, int]
# A PIL.Image.Image: Pillow is an extra, so its types are not imported.
Image: TypeAlias = Any
ImageLike: TypeAlias = Image | npt.NDArray[Any]
Kind: TypeAlias = Literal["png", "jpeg", "webp"]

WHITE: Color = (255, 255, 255)
BLACK: Color = (0, 0, 0)
# Smaller images are enlarged before drawing, to leave room for a label of 11 pixels.
LEAST_SIDE = 224


def as_image(image: ImageLike) -> Image:
    """Return the image in RGB, as a copy that may be drawn on; floats are clipped to 0 to 1, and nan is 0."""
    images = pillow()
    if isinstance(image, images.Image):
        return image.convert("RGB") if image.mode != "RGB" else image.copy()
    array = np.asarray(image)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)) or array.size == 0:
        raise DataError(f"an image has the shape {array.shape}; expected (H, W), (H, W, 1) or (H, W, 3)")
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * np.uint8(255)
    elif np.issubdtype(array.dtype, np.floating):
        array = np.rint(np.nan_to_num(array, nan=0.0).clip(0, 1) * 255).astype(np.uint8)
    elif array.dtype != np.uint8:
        raise DataError(f"an image has the dtype {array.dtype}; expected uint8, bool, or floats from 0 to 1")
    return images.fromarray(np.ascontiguousarray(array)).convert("RGB")


def blank(width: int, height: int) -> Image:
    """Return a white image."""
    return pillow().new("RGB", (width, height), WHITE)


def scale_for(width: int, height: int) -> int:
    """Return the whole factor that enlarges the longer side to about `LEAST_SIDE`."""
    return max(1, round(LEAST_SIDE / max(width, height)))


def enlarge(image: Image, factor: int) -> Image:
    """Return the image with each pixel as a square of this side."""
    return image.resize((image.width * factor, image.height * factor), pillow().Resampling.NEAREST)


def fit(image: ImageLike, size: int) -> Image:
    """Return the image as large as fits into a square: enlarged by a whole factor, or smoothly shrunk."""
    picture = as_image(image)
    longer = max(picture.size)
    if longer <= size:
        return enlarge(picture, size // longer)
    width, height = (max(1, round(side * size / longer)) for side in picture.size)
    return picture.resize((width, height), pillow().Resampling.LANCZOS)


def encode(image: ImageLike, kind: Kind = "png", quality: int = 85) -> bytes:
    """Return the image as file content without a timestamp or name; "png" ignores the quality (1 to 100)."""
    if kind not in ("png", "jpeg", "webp"):
        raise DataError(f"an image cannot be encoded as {kind!r}; expected 'png', 'jpeg' or 'webp'")
    options: dict[str, Any] = {"optimize": True} if kind == "png" else {"quality": quality}
    content = io.BytesIO()
    as_image(image).save(content, kind.upper(), **options)
    return content.getvalue()
