"""Replace a folder atomically, and let readers survive the race.

A folder cannot be renamed over a non-empty one, so the old one is briefly called `.old-NAME`. A reader that finds it in
that window cannot tell a race from a killed writer, so it puts the old one back. The writer then moves it away again,
and a reader whose folder was replaced retries on the new one.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from loopwright.failpoints import failpoint
from loopwright.run_folder.files import fsync_folder

OLD = ".old-"  # name prefix of a folder moved aside
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
_MOST_TRIES = 20  # retries; each needs another racing process

P = ParamSpec("P")
Value = TypeVar("Value")


def put_in_place(aside: Path, final: Path) -> None:
    """Rename a complete folder to its final name, and remove the one it replaces; on an OSError the old one is back."""
    old = final.with_name(f"{OLD}{final.name}")
    restore_moved(final)
    for tries_left in reversed(range(_MOST_TRIES)):
        try:
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.rename(final, old)
                failpoint("mid_replace")
            os.rename(aside, final)
            break
        except BaseException as error:
            is_put_back = isinstance(error, OSError) and error.errno in _TAKEN and not old.exists()
            if not is_put_back or not tries_left:
                restore_moved(final)
                raise
    failpoint("after_rename")
    fsync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore_moved(final: Path) -> None:
    """Put back a folder moved aside for a new one that never arrived; called by readers and writers."""
    old = final.with_name(f"{OLD}{final.name}")
    if final.exists() or not old.exists():
        return
    try:
        os.rename(old, final)
    except FileNotFoundError:
        return  # another reader put it back, or the writer has finished
    except OSError as error:
        if error.errno not in _TAKEN:  # the new one is in place by now
            raise


def read_steadily(folder: Path, read: Callable[[], Value]) -> Value:
    """Return the result of reading a folder; retry if the folder was replaced while reading failed."""
    for _ in range(_MOST_TRIES):
        restore_moved(folder)
        before = _stamp(folder)
        try:
            return read()
        except Exception:
            after = _stamp(folder)
            if after == before and (after is not None or _is_gone(folder)):
                raise
    return read()


def steady(function: Callable[P, Value]) -> Callable[P, Value]:
    """Make a function that reads a folder, its first argument `directory`, use `read_steadily`."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Value:
        folder = args[0] if args else kwargs["directory"]
        return read_steadily(Path(str(folder)), lambda: function(*args, **kwargs))

    return wrapper


def _stamp(folder: Path) -> tuple[int, int] | None:
    """Return the inode and time that identify a folder among others of its name; None if it is missing."""
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _is_gone(folder: Path) -> bool:
    """Whether neither the folder nor a moved-aside copy exists; checked in one listing, to avoid a race."""
    try:
        names = os.listdir(folder.parent)
    except OSError:
        return True
    return folder.name not in names and f"{OLD}{folder.name}" not in names
