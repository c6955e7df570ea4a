"""config.yaml of a run: marked at both ends, so that a file that was cut off is not taken for a whole one.

YAML cannot tell: half of a file is a file of half of the settings, and the others would be the defaults. A file that
somebody has edited keeps its marks, and one that a program has written anew has none; both are taken as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from loopwright.errors import InputError

_FIRST: Final = "# every setting of the run, and where its value came from; a file without # end was cut off"
_LAST: Final = "# end"


def marked(lines: Iterable[str]) -> str:
    """Return the text of config.yaml for these lines."""
    return "\n".join([_FIRST, *lines, _LAST]) + "\n"


def is_cut_off(path: Path) -> bool:
    """Whether the config.yaml of a run lacks its end, or is missing."""
    text = _text(path)
    # Not even the whole first line is there, or nothing but the zeros that a power cut leaves.
    return text is None or _FIRST.startswith(text.strip("\0\n")) or _lacks_end(text)


def check_end(path: Path) -> None:
    """Refuse a file of settings that has the first mark of a config.yaml and not the last; other files are left alone.

    Raises:
        InputError: it says what to do.
    """
    text = _text(path)
    if text is not None and _lacks_end(text):
        raise InputError(
            "run.config",
            f"{path} was cut off: what is left of it is {len(text.splitlines())} lines, and more settings followed",
            fix=f"put the file back, or start anew as command.txt says; if it is whole, end it with a line {_LAST}",
        )


def _lacks_end(text: str) -> bool:
    lines = text.splitlines()
    return _FIRST in lines and _LAST not in lines


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
