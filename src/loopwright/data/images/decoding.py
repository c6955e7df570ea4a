"""From files and bytes to pixels.

`decode_image` returns an upright RGB image: EXIF orientation applied, grey and palette images converted to RGB,
transparency blended with white, 16-bit values scaled to 8. `decode_mask` returns the ids in a mask file, grey values or
palette indices. An unreadable file raises a DataError that names it.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from loopwright.data.vision_extra import pillow
from loopwright.errors import DataError
from loopwright.sources.files import open_data
from loopwright.sources.images.image_file import FORMATS, ORIENTATION, BadImageError, inspect_image
from loopwright.sources.images.masks import classes_of, mask_numbers, read_values

Source: TypeAlias = "str | os.PathLike[str] | bytes"
PillowImage: TypeAlias = Any  # a PIL.Image.Image: Pillow is an extra, so its types are not imported

_TRANSPOSITIONS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
_WIDE_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
_ALPHA_MODES = ("RGBA", "RGBa", "LA", "La", "PA")
_PREMULTIPLIED = {"RGBa": "RGBA", "La": "LA"}
_LARGEST_OF_16_BITS = 65535
# Raised by Pillow's readers for corrupt files.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    EOFError,
    struct.error,
    zlib.error,
)


def decode_image(source: Source | PillowImage) -> PillowImage:
    """Return an image (a path, the bytes of a file, or an opened Pillow image) as an upright RGB image."""
    image = _read(source)
    try:
        if image.mode == "RGB" and "transparency" not in image.info:
            return image
        if image.mode in _WIDE_MODES:
            return pillow().fromarray(_narrowed(image)).convert("RGB")
        if image.mode in _ALPHA_MODES or "transparency" in image.info:
            if image.mode in _PREMULTIPLIED:
                image = image.convert(_PREMULTIPLIED[image.mode])
            image = image.convert("RGBA")
            white = pillow().new("RGBA", image.size, (255, 255, 255, 255))
            return pillow().alpha_composite(white, image).convert("RGB")
        return image.convert("RGB")
    except (ValueError, OSError) as error:
        raise _unreadable(source, error) from error


def decode_mask(
    source: Source | PillowImage, mask_values: Sequence[str] = (), ignore_index: int = 255
) -> NDArray[np.int32]:
    """Return the class ids of a mask: int32, (height, width).

    Grey images of 1, 8, 16 or 32 bits give their values, palette images their indices. A colour image must have equal
    channels. With `mask_values`, as of `--mask_values`, a pixel's id is the position of its value or colour among them,
    or of the nearest one. A DataError names the path of a file that is unreadable, or contains colours instead of ids.
    """
    image, values = _read(source), read_values(tuple(mask_values))
    numbers, has_colors = mask_numbers(image, values and values.are_colors)
    if values is not None:
        return classes_of(numbers, values, ignore_index)[0]
    if has_colors:
        raise DataError(
            f"{_named(source)} is a colour image ({image.mode}), where a mask of class ids was expected: one "
            "number for each pixel. Save it as a grey or palette PNG whose values are the ids, or give --mask_values."
        )
    return numbers


def _read(source: Source | PillowImage) -> PillowImage:
    try:
        if isinstance(source, bytes):
            return _upright(pillow().open(io.BytesIO(source), formats=FORMATS))
        if isinstance(source, (str, os.PathLike)):
            with os.fdopen(open_data(source), "rb") as file, pillow().open(file, formats=FORMATS) as image:
                return _upright(image)
        if hasattr(source, "getexif"):
            return _upright(source)
    except FileNotFoundError as error:
        text = f"there is no image {_named(source)}. Correct the path, or remove the row from the data."
        raise DataError(text) from error
    except (*_BROKEN, pillow().DecompressionBombError) as error:
        raise _unreadable(source, error) from error
    raise DataError(f"an image is a path, bytes or an opened Pillow image, got {type(source).__name__}")


def _upright(image: PillowImage) -> PillowImage:
    image.load()
    orientation = image.getexif().get(ORIENTATION, 1)
    name = _TRANSPOSITIONS.get(orientation)
    if name is None:
        return image
    turned = image.transpose(getattr(pillow().Transpose, name))
    turned.format = image.format
    return turned


def _narrowed(image: PillowImage) -> NDArray[np.uint8]:
    """Return values as 8 bits, scaled by the range of a 16-bit format, else by the smallest usual range that fits."""
    values = np.asarray(image).astype(np.float64)
    largest = float(values.max(initial=0.0))
    if image.mode.startswith("I;16") or image.format == "PNG":
        limit = float(_LARGEST_OF_16_BITS)
    else:
        usual = (1.0, 255.0, float(_LARGEST_OF_16_BITS)) if image.mode == "F" else (255.0, float(_LARGEST_OF_16_BITS))
        limit = next((limit for limit in usual if largest <= limit), largest)
    return np.rint(values.clip(0, limit) * (255.0 / limit)).astype(np.uint8)


def _named(source: Source | PillowImage) -> str:
    if isinstance(source, bytes):
        return f"an image of {len(source):,} bytes"
    return str(getattr(source, "filename", None) or source)


def _unreadable(source: Source | PillowImage, error: BaseException) -> DataError:
    reason = f"{type(error).__name__}: {error}"
    if isinstance(source, (str, bytes, os.PathLike)):
        try:
            inspect_image(source if isinstance(source, bytes) else os.fspath(source))
        except BadImageError as found:  # in the words of the preflight
            reason = f"it {found}"
    return DataError(f"{_named(source)} cannot be read as an image: {reason}. Replace it, or remove it from the data.")
