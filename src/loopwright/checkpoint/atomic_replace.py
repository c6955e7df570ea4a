"""How a folder takes the place of another of its name, and what a reader makes of it who comes in between.

A folder cannot be renamed over one that is not empty, so the old one is called `.old-NAME` for a moment. A reader who
comes in that moment, or after a kill in it, puts the old one back: it cannot know which of the two it is. The writer
moves it away once more then, and a reader under whose hands a folder was replaced reads the new one.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from loopwright.failpoints import failpoint
from loopwright.run_folder.files import fsync_folder

OLD = ".old-"  # begins the name of a folder that was moved aside
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
_MOST_TRIES = 20  # each needs another process that comes in between

Value = TypeVar("Value")


def put_in_place(aside: Path, final: Path) -> None:
    """Rename a whole folder to its final name, and remove the one that had it.

    Raises:
        OSError: the disk refuses; the old folder has its name then.
    """
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
    """Put back a folder that was moved aside for a new one which is not there; called by readers and writers."""
    old = final.with_name(f"{OLD}{final.name}")
    if final.exists() or not old.exists():
        return
    try:
        os.rename(old, final)
    except FileNotFoundError:
        return  # another reader did, or the writer was done with it
    except OSError as error:
        if error.errno not in _TAKEN:  # the new one is there by now
            raise


def read_steadily(folder: Path, read: Callable[[], Value]) -> Value:
    """Return what a function reads of a folder; it is called again if the folder was replaced while it failed."""
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


def _stamp(folder: Path) -> tuple[int, int] | None:
    """Return what is another one for another folder of the same name; None while there is none."""
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _is_gone(folder: Path) -> bool:
    """Whether there is no such folder, and none that was moved aside: one look at both, or one could slip through."""
    try:
        names = os.listdir(folder.parent)
    except OSError:
        return True
    return folder.name not in names and f"{OLD}{folder.name}" not in names
