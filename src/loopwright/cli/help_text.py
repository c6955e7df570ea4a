"""Texts of any length in the columns of the terminal: broken between words, below where they begin. Imports nothing."""

from __future__ import annotations

import shutil
import textwrap

_NO_LIMIT = 1 << 10  # columns of a pipe or a file
_FEWEST_COLUMNS = 24
_STEP = 6


def columns() -> int:
    """Return how wide the terminal is, or as wide as it is never where the output is no terminal."""
    return shutil.get_terminal_size((_NO_LIMIT, 24)).columns


def hanging(head: str, text: str) -> str:
    """Return a name and what is said of it, on as many lines as it takes; called for every line of a list.

    Args:
        head: the name, with the blanks around it.
        text: what is said; its further lines begin below its first one, or below the name where there is no room.
    """
    width, indent = columns(), len(head)
    start = head
    if width - indent < _FEWEST_COLUMNS:
        indent = len(head) - len(head.lstrip()) + _STEP
        start = f"{head.rstrip()}\n{' ' * indent}"
    room = max(width - indent, _FEWEST_COLUMNS)
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
    return (start + f"\n{' ' * indent}".join(lines)).rstrip()


def folded(text: str) -> str:
    """Return a text of several lines with each broken between words; further lines are indented as the first, and more.

    Args:
        text: as an error has it: a line, and lines below it that begin with blanks.
    """
    found = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        found.append(hanging(" " * indent, line.lstrip()) if len(line) > columns() else line)
    return "\n".join(found)
