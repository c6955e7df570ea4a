"""What a terminal or a notebook can show: colours, progress bars, short tracebacks."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from typing import Any

_CODES = {"red": "31", "green": "32", "yellow": "33", "blue": "34", "bold": "1", "dim": "2"}


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal that can move its cursor."""
    try:
        return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # no file, or a closed one
        return False


def is_coloured(stream: Any) -> bool:
    """Whether to colour what is written to a stream: NO_COLOR wins over FORCE_COLOR, which wins over the terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    forced = os.environ.get("FORCE_COLOR")
    return forced != "0" if forced else is_terminal(stream)


def paint(text: str, colour: str, stream: Any) -> str:
    """Return a text in a colour ("red", "green", "yellow", "blue", "bold", "dim") if the stream shows it."""
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if text and is_coloured(stream) else text


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "IPKernelApp" in getattr(shell, "config", ())


def bar_class() -> Any:
    """Return tqdm's class for this place: widgets in a notebook that has them, else a line of text."""
    has_widgets = is_notebook() and importlib.util.find_spec("ipywidgets") is not None
    return importlib.import_module("tqdm.auto" if has_widgets else "tqdm.std").tqdm


def user_traceback(error: BaseException, hidden: tuple[str, ...]) -> list[str]:
    """Return an error for a notebook: its message first, then only the user's own frames.

    Args:
        hidden: folders whose frames are left out, beside those of installed packages and Python's own.
    """
    own = [*hidden, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(tuple(own))]
    head = paint(f"{type(error).__name__}: {error}", "red", sys.stdout)
    return [head, *getattr(error, "__notes__", ()), "", *(line.rstrip("\n") for line in traceback.format_list(frames))]
