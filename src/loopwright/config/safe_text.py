"""Text from data, made safe for those who obey it: terminals, and renderers of Markdown."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

# Data may contain control characters that a terminal obeys: escape all but tab and newline.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}
_CONTROLS |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_COLOURS = re.compile(r"(\x1b\[\d+m)")
# How a progress bar moves the cursor and clears its line; and a colour, if nothing else is written with it.
_MOVES = re.compile(r"(?:[\r\n ]|\x1b\[[AK])*|\x1b\[\d+m")
# HTML, links, images, mentions, emphasis, code, mathematics and table cells.
_MARKUP = re.compile(r"[&<>\[\]|`*~@$]|(?<![^\W_])_|_(?![^\W_])|\\(?!\w)|:(?=//)|(?<=www)\.")


def visible(text: str) -> str:
    """Return a text that is safe for a terminal, with control and bidirectional characters escaped."""
    return text.translate(_CONTROLS)


def write_painted(write: Callable[[str], Any], text: str) -> None:
    """Write a visible text with colours of ours, which a `SafeStream` passes on their own only."""
    for part in filter(None, _COLOURS.split(text)):
        write(part)


def inert(text: Any) -> str:
    """Return data as text that neither a Markdown renderer nor a terminal obeys."""
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", visible(" ".join(str(text).split())))


class SafeStream:
    """A standard stream that escapes control characters, in tracebacks too, except the moves of a progress bar.

    Attributes:
        inner: the stream itself.
    """

    def __init__(self, stream: Any) -> None:
        self.inner = getattr(stream, "inner", stream)

    def write(self, text: str) -> int:
        """Write a text with its control characters escaped."""
        start = text[:1] if text.startswith("\r") else ""
        self.inner.write(text if _MOVES.fullmatch(text) else start + visible(text[len(start) :]))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _escape(record: logging.LogRecord) -> bool:
    record.msg, record.args = visible(record.getMessage()), ()
    return True


logging.getLogger("loopwright").addFilter(_escape)
