"""Text on images: in Pillow's built-in font, which has few letters, or in a font of the system that has them all."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from loopwright.data.pictures.canvas import BLACK, WHITE, Color, Image, blank
from loopwright.data.vision_extra import pillow

SIZE = 12
_PADDING = 2
_LUMINANCE = (0.2126, 0.7152, 0.0722)  # of linear red, green and blue (IEC 61966-2-1)
# Fonts of many letters are tried first, then others, plain ones before bold ones.
_LARGE_FONTS = re.compile(r"dejavusans\.|noto|cjk|unicode|wqy|pingfang|hiragino|msyh|gothic|arial|sans")
_ODD_FONTS = re.compile("bold|italic|oblique|mono|light|thin|black|condensed|serif")
_MOST_FONTS = 400
_MISSING = "\U0010ffff"  # a character that no font has
_CHECKED_SIZE = 32


@cache
def font(size: int, path: Path | None = None) -> Any:
    """Return Pillow's built-in font in this size, in pixels, or the font of a file."""
    module = pillow("ImageFont")
    return module.load_default(size) if path is None else module.truetype(str(path), size)


@lru_cache(1 << 12)
def font_for(text: str, size: int = SIZE) -> Any:
    """Return a font with all letters of a text; None if the system has none."""
    seen = {each for each in text if unicodedata.category(each)[0] not in "CMZ"}
    found = (path for path in (None, *font_files()) if all(_has(path, each) for each in seen))
    return next((font(size, path) for path in found), None)


@cache
def font_files() -> list[Path]:
    """Return the font files of the system and of the user."""
    home, windows = Path.home(), (os.environ.get("WINDIR"), os.environ.get("LOCALAPPDATA"))
    folders = [home / ".fonts", Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share") / "fonts"]
    folders += [Path("/usr/share/fonts"), Path("/usr/local/share/fonts")]
    if sys.platform == "darwin":
        folders = [home / "Library/Fonts", Path("/Library/Fonts"), Path("/System/Library/Fonts")]
    elif sys.platform == "win32":
        ends = ("Fonts", "Microsoft/Windows/Fonts")
        folders = [Path(each, end) for each, end in zip(windows, ends, strict=True) if each]
    files = (path for folder in folders for path in folder.rglob("*"))
    found = [path for path in files if path.suffix.lower() in (".ttf", ".otf", ".ttc")]

    def rank(path: Path) -> tuple[bool, bool, str]:
        name = path.name.lower()
        return _LARGE_FONTS.search(name) is None, _ODD_FONTS.search(name) is not None, name

    return sorted(found, key=rank)[:_MOST_FONTS]


def drawable_names(names: Sequence[str]) -> list[str]:
    """Return the names of classes, with #number for those that no font can draw."""
    return [f"#{number}" if font_for(name) is None else name for number, name in enumerate(names)]


@cache
def _has(path: Path | None, character: str) -> bool:
    try:
        glyphs = [font(_CHECKED_SIZE, path).getmask(each) for each in (character, _MISSING)]
    except OSError:  # not a font, or one of pictures
        return False
    return glyphs[0].size != glyphs[1].size or bytes(glyphs[0]) != bytes(glyphs[1])


def line_height(size: int = SIZE) -> int:
    """Return the height of a line of text in pixels, with its margins."""
    return size + 2 * _PADDING


def text_width(text: str, size: int = SIZE) -> int:
    """Return the width of a text in pixels."""
    return int((font_for(text, size) or font(size)).getlength(text) + 0.5)


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
    pen, chosen = pillow("ImageDraw").Draw(image), font_for(text, size) or font(size)
    pen.text((x, y + line_height(size) // 2), text, fill=color, font=chosen, anchor="lm")


def write_upwards(image: Image, x: int, y: int, text: str) -> None:
    """Write one line of vertical text upwards, in place, on white, ending at y."""
    line = blank(max(1, text_width(text)), line_height())
    write(line, 0, 0, text)
    image.paste(line.transpose(pillow().Transpose.ROTATE_90), (x, y))


def write_label(image: Image, x: int, y: int, text: str, color: Color, size: int = SIZE) -> None:
    """Write one line of text on a filled box, in place, moved to stay inside the image."""
    text = shorten(text, image.width - 2 * _PADDING, size)
    width, height = text_width(text, size) + 2 * _PADDING, line_height(size)
    left = max(0, min(x, image.width - width))
    top = max(0, min(y, image.height - height))
    pillow("ImageDraw").Draw(image).rectangle((left, top, left + width - 1, top + height - 1), fill=color)
    write(image, left + _PADDING, top, text, readable_on(color), size)
