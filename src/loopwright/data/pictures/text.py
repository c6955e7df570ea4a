"""Text on images, in Pillow's built-in font. It supports Latin alphabets; other letters appear as empty frames."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from loopwright.data.pictures.canvas import BLACK, WHITE, Color, Image, blank
from loopwright.data.vision_extra import pillow

SIZE = 12
_PADDING = 2
_LUMINANCE = (0.2126, 0.7152, 0.0722)  # of linear red, green and blue (IEC 61966-2-1)


@cache
def font(size: int) -> Any:
    """Return Pillow's built-in font in this size, in pixels."""
    return pillow("ImageFont").load_default(size)


def line_height(size: int = SIZE) -> int:
    """Return the height of a line of text in pixels, with its margins."""
    return size + 2 * _PADDING


def text_width(text: str, size: int = SIZE) -> int:
    """Return the width of a text in pixels."""
    return int(font(size).getlength(text) + 0.5)


def shorten(text: str, width: int, size: int = SIZE) -> str:
    """Return the text, truncated with three dots if it is wider than this."""
    if text_width(text, size) <= width:
        return text
    end = len(text)
    while end and text_width(text[:end].rstrip() + "...", size) > width:
        end -= 1
    return text[:end].rstrip() + "..." if end else ""


def readable_on(color: Color) -> Color:
    """Return black or white, whichever is more readable on this color."""
    share = np.array(color) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    is_light = float(linear @ _LUMINANCE) > ((50 + 16) / 116) ** 3  # a lightness above 50 in CIELAB
    return BLACK if is_light else WHITE


def write(image: Image, x: int, y: int, text: str, color: Color = BLACK, size: int = SIZE) -> None:
    """Write one line of text into an image, in place, with its top left corner at x, y."""
    pillow("ImageDraw").Draw(image).text(
        (x, y + line_height(size) // 2), text, fill=color, font=font(size), anchor="lm"
    )


def write_upwards(image: Image, x: int, y: int, text: str, color: Color = BLACK, size: int = SIZE) -> None:
    """Write one line of vertical text upwards, in place, on white, ending at y."""
    line = blank(max(1, text_width(text, size)), line_height(size))
    write(line, 0, 0, text, color, size)
    image.paste(line.transpose(pillow().Transpose.ROTATE_90), (x, y))


def write_label(image: Image, x: int, y: int, text: str, color: Color, size: int = SIZE) -> None:
    """Write one line of text on a filled box, in place, moved to stay inside the image."""
    text = shorten(text, image.width - 2 * _PADDING, size)
    width, height = text_width(text, size) + 2 * _PADDING, line_height(size)
    left = max(0, min(x, image.width - width))
    top = max(0, min(y, image.height - height))
    pillow("ImageDraw").Draw(image).rectangle((left, top, left + width - 1, top + height - 1), fill=color)
    write(image, left + _PADDING, top, text, readable_on(color), size)
