"""Create the folder of a run in one step, and remove what a killed process left of one. No torch."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from loopwright.errors import InputError
from loopwright.run_folder import Lease, RunFolder, fsync_folder, live_owner, runs_root, write_json
from loopwright.run_folder.files import make_folder
from loopwright.run_folder.layout import RUN_FILE, free_path, new_run_id
from loopwright.run_folder.lease import LEASE, LOCK

_NEW: Final = ".new-"
_FIRST_FILES: Final = frozenset((RUN_FILE, "config.yaml", "command.txt", "data.json"))
_YOUNG_SECONDS: Final = 60.0  # a folder this young may get its lease yet

_logger = logging.getLogger("loopwright")


def create_run(
    label: str,
    metadata: Mapping[str, Any],
    folder: str | Path | None = None,
    now: datetime | None = None,
    word: str | None = None,
    fill: Callable[[RunFolder], None] | None = None,
) -> RunFolder:
    """Create the folder of a new run, by default under `runs_root()`, with its run.json: the id and the metadata.

    It is created aside, where `fill` writes its other files, and then renamed: a killed process leaves a whole run or
    none. In a folder that exists, which may be a mount point, the files are moved one by one, run.json last.
    """
    run_id = new_run_id(label, now, word)
    path = runs_root() / run_id if folder is None else Path(folder)
    check_new_folder(path)
    is_there = path.is_dir()
    aside = (path if is_there else path.absolute().parent) / f"{_NEW}{run_id}"
    try:
        make_folder(aside)
        with removed_on_error(aside), Lease(aside):  # a lease, so that it is not taken for a leftover
            write_json(aside / RUN_FILE, {"id": run_id, **metadata}, is_sealed=True)
            if fill is not None:
                fill(RunFolder(aside))
        (aside / LOCK).unlink()
        for entry in sorted(aside.iterdir(), key=lambda entry: entry.name == RUN_FILE) if is_there else ():
            entry.replace(path / entry.name)
        (aside.rmdir if is_there else lambda: aside.replace(path))()
        fsync_folder(path if is_there else aside.parent)
    except (PermissionError, FileNotFoundError) as error:
        raise _cannot_be_created(path, str(error), "--output_dir ") from error
    return RunFolder(path)


@contextlib.contextmanager
def removed_on_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def remove_stale(parent: Path, *prefixes: str) -> None:
    """Remove the hidden folders that killed processes left: those with such a name and no live owner."""
    for folder in parent.glob(".*"):
        if not (_is_aside(folder) or (prefixes and folder.name.startswith(prefixes))):
            continue
        with contextlib.suppress(OSError):  # another process was faster
            is_young = not (folder / LEASE).exists() and time.time() - folder.stat().st_mtime < _YOUNG_SECONDS
            if not is_young and live_owner(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)


def _is_aside(folder: Path) -> bool:
    """Whether this is a folder in which `create_run` made a run, and not one that happens to have such a name."""
    is_named = folder.name.startswith(_NEW) and folder.is_dir()
    return is_named and all(
        entry.name in {*_FIRST_FILES, LEASE, LOCK} or entry.name.startswith(".tmp-") for entry in folder.iterdir()
    )


def is_half_made(path: Path) -> bool:
    """Whether a process was killed while it created a run in this folder, which has nothing else."""
    entries = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    aside = {name for name in entries if _is_aside(path / name)}
    names = {name for name in entries - aside if not name.startswith(".tmp-")}
    is_half = (RUN_FILE in names or bool(aside)) and not _FIRST_FILES - {"command.txt"} <= names
    return is_half and names <= _FIRST_FILES and not any(live_owner(path / name) for name in ("", *aside))


def option_of_folder(command: Sequence[str] | None) -> str:
    """Return how the folder of a run was given, up to its value; no command means in Python."""
    if command is None:
        return "output_dir="
    return "--out " if any(word.partition("=")[0] == "--out" for word in command) else "--output_dir "


def check_new_folder(folder: str | Path, option: str = "--output_dir ") -> None:
    """Raise an InputError for a folder, given by `option`, that has a run or other files, or cannot be created."""
    path = Path(folder)
    nearest = next((place for place in (path, *path.absolute().parents) if place.exists()), path)
    if not nearest.is_dir():
        raise _cannot_be_created(path, f"{nearest} is a file", option)
    if not os.access(nearest, os.W_OK):
        raise _cannot_be_created(path, f"{nearest} is not writable", option)
    remove_stale(path.absolute().parent)
    if is_half_made(path):
        _logger.warning("%s has half a run, whose creation was interrupted: removing it", path)
        # Folders and run.json go last: they show that it is half a run.
        for entry in sorted(path.iterdir(), key=lambda entry: (entry.is_dir(), entry.name == RUN_FILE)):
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
    if (path / RUN_FILE).exists():
        again = (
            f"lw resume {shlex.quote(str(path))}" if option.startswith("--") else f"loopwright.resume({str(path)!r})"
        )
        fix = f"{again}   or   {option}{_as_given(free_path(path), option)}"
        raise InputError("run.exists", f"{path} already contains a run", fix=fix)
    if path.is_dir() and any(path.iterdir()):
        names = ", ".join(sorted(entry.name for entry in path.iterdir())[:5])
        what = f"{option}{_as_given(path, option)} is not empty, and a run needs its own folder"
        fix = f"{option}{_as_given(free_path(path / 'run'), option)}"
        raise InputError("run.exists", what, saw=[f"it contains {names}"], fix=fix)


def _cannot_be_created(path: Path, why: str, option: str) -> InputError:
    places = (place for place in (Path(), Path.home(), Path(tempfile.gettempdir())) if os.access(place, os.W_OK))
    fix = f"{option}{_as_given(free_path(next(places, Path()) / path.name), option)}"
    return InputError("disk.write", f"cannot create the folder of the run: {path}", saw=[why], fix=fix)


def _as_given(path: Path, option: str) -> str:
    return shlex.quote(str(path)) if option.startswith("--") else repr(str(path))
