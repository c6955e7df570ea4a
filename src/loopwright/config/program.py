"""The name under which the command line can be called again, for commands that are printed to be copied. No torch."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path

_COMMAND = re.compile(r"(^|   or   |with: |fix: )(lw|pip|python)(?= )")


@cache
def program() -> str:
    """Return `lw` if a shell finds it, else its path beside this Python, else `python -m loopwright`."""
    if shutil.which("lw") is not None:
        return "lw"
    script = Path(sys.executable).with_name("lw")
    return _short(script) if script.is_file() else f"{_short(Path(sys.executable))} -m loopwright"


def as_called(text: str) -> str:
    """Return a command, or a fix that has some, as it works in this environment, also if that is not activated."""
    name = program()
    python = _short(Path(sys.executable))
    own = {"lw": name, "pip": "pip" if name == "lw" else f"{python} -m pip", "python": python}
    return _COMMAND.sub(lambda found: found[1] + own[found[2]], text)


def _short(path: Path) -> str:
    """Return a path as one would type it: relative if it is below the current folder."""
    relative = os.path.relpath(path)
    return shlex.quote(str(path) if relative.startswith("..") else relative)
