"""The width of text on a terminal: pad, truncate and wrap by columns instead of characters."""

from __future__ import annotations

import textwrap
import unicodedata
from itertools import accumulate

_JOINER, _EMOJI_STYLE, _SKIN_TONES = "\u200d", "\ufe0f", range(0x1F3FB, 0x1F400)
_FILL = "\uffff"  # stands for the second column of a character; in no text


def display_width(text: str) -> int:
    """Return the number of columns: 2 for wide characters and emoji, 0 for marks and what is joined to an emoji."""
    return len(text) if text.isascii() else sum(_widths(text))


def _widths(text: str) -> list[int]:
    """Return the columns that each character adds to those before it."""
    widths: list[int] = []
    for before, character in zip(("", *text), text, strict=False):
        is_wide = unicodedata.east_asian_width(character) in "WF"
        is_part = before == _JOINER or ord(character) in _SKIN_TONES
        if character == _EMOJI_STYLE and widths and widths[-1] == 1:
            widths.append(1)
        elif unicodedata.category(character) in ("Mn", "Me", "Cf") or "ᅠ" <= character <= "ᇿ" or (is_wide and is_part):
            widths.append(0)
        else:
            widths.append(2 if is_wide else 1)
    return widths


def pad(text: str, columns: int, is_right: bool = False) -> str:
    """Return the text with spaces after it, or before it if `is_right`, up to a number of columns."""
    spaces = " " * (columns - display_width(text))
    return spaces + text if is_right else text + spaces


def truncate(text: str, columns: int, end: str = "…") -> str:
    """Return the text, or as much of it as fits with `end` after it."""
    if display_width(text) <= columns:
        return text
    room = max(columns - display_width(end), 0)
    return text[: sum(width <= room for width in accumulate(_widths(text)))] + end


def wrap(text: str, columns: int) -> list[str]:
    """Return the lines of a text; scripts without spaces are broken anywhere, other words and commands never."""
    head, colon, command = text.partition(" with: ")
    if colon:
        *lines, last = wrap(f"{head}{colon.rstrip()}", columns)
        fits = display_width(f"{last} {command}") <= columns
        return [*lines, f"{last} {command}"] if fits else [*lines, last, command]
    if text.isascii() or display_width(text) == len(text):
        return textwrap.wrap(text, columns, break_long_words=False, break_on_hyphens=False)
    pairs = zip(_widths(text), text, strict=True)
    filled = "".join(_FILL * (width - 1) + character for width, character in pairs)
    has_wide = _FILL in filled  # one column is spare, since a break may part a character from its fill
    lines = textwrap.wrap(filled, columns - has_wide, break_long_words=has_wide, break_on_hyphens=False)
    return [line.replace(_FILL, "") for line in lines]
