"""Wrap text to the width of the terminal with a hanging indent."""

from __future__ import annotations

import shutil

from loopwright.config.display_width import display_width, wrap

_NO_LIMIT = 1 << 10  # columns of a pipe or a file
_FEWEST_COLUMNS = 24
_STEP = 6


def columns() -> int:
    """Return the width of the terminal, or a very large one if the output is not a terminal."""
    return shutil.get_terminal_size((_NO_LIMIT, 24)).columns


def hanging(head: str, text: str) -> str:
    """Return a padded name and its description, wrapped with a hanging indent; below the name if space is short."""
    width, indent = columns(), display_width(head)
    start = head
    if width - indent < _FEWEST_COLUMNS:
        indent = len(head) - len(head.lstrip()) + _STEP
        start = f"{head.rstrip()}\n{' ' * indent}"
    room = max(width - indent, _FEWEST_COLUMNS)
    lines = wrap(text, room) or [""]
    return (start + f"\n{' ' * indent}".join(lines)).rstrip()


def folded(text: str) -> str:
    """Wrap each line of an error message, with a deeper indent for continuation lines."""
    found = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        found.append(hanging(" " * indent, line.lstrip()) if display_width(line) > columns() else line)
    return "\n".join(found)
