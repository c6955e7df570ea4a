"""config.yaml of a run: marked at both ends, so that a truncated file is noticed.

Half of a YAML file is still valid YAML, and the missing settings would silently become defaults. An edited file keeps
its marks, one rewritten by a program has none; both are accepted.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from loopwright.errors import InputError
from loopwright.run_folder.files import DamagedFileError, read_bytes

_FIRST: Final = "# every setting of the run, and where its value came from; a file without # end was cut off"
_LAST: Final = "# end"


def marked(lines: Iterable[str]) -> str:
    """Return the text of config.yaml for these lines."""
    return "\n".join([_FIRST, *lines, _LAST]) + "\n"


def is_cut_off(path: Path) -> bool:
    """Whether the config.yaml of a run is truncated or missing."""
    text = _text(path)
    # The first line is incomplete, or nothing but the zeros that a power cut leaves.
    return text is None or _FIRST.startswith(text.strip("\0\n")) or _lacks_end(text)


def check_end(path: Path) -> None:
    """Raise an InputError for a config.yaml with the first mark but not the last; other files are ignored."""
    text = _text(path)
    if text is not None and _lacks_end(text):
        raise InputError(
            "run.config",
            f"{path} is truncated after {len(text.splitlines())} lines: more settings followed",
            fix=f"if it is complete, add the line {_LAST}; else restore it",
        )


def _lacks_end(text: str) -> bool:
    lines = text.splitlines()
    return _FIRST in lines and _LAST not in lines


def _text(path: Path) -> str | None:
    try:
        return read_bytes(path).decode(errors="replace")
    except (OSError, DamagedFileError):
        return None
