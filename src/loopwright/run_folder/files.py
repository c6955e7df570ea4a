"""Small files that are either old or new, never half written, whatever kills the process or the machine.

A file is written under a temporary name in its own folder, synced, renamed, and the folder is synced. A killed process
leaves `.tmp-...` files behind; `remove_leftovers` removes them at the next start.

An fsync that failed is never retried on the same descriptor: the kernel has dropped the pages by then, and the second
call would report success for data that is nowhere.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import uuid
from pathlib import Path
from typing import Any

from loopwright.errors import LoopwrightError
from loopwright.failpoints import failpoint

_PREFIX = ".tmp-"
# Zero on systems without these flags; a run folder cannot be locked there (lease.py), but can be read.
NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW
# Non-blocking, so that a pipe planted under the name is refused instead of waited for.
_EXISTING_FILE = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | NO_FOLLOW
_MOST_BYTES = 64 * 1024 * 1024
_PIECE_BYTES = 64 * 1024


class DamagedFileError(LoopwrightError, ValueError):
    """A file of the run folder with unexpected content."""


def write_all(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of the data, however few bytes the system accepts at a time; an OSError may leave a part."""
    rest = memoryview(data).cast("B")
    while rest:
        try:
            num_written = os.write(descriptor, rest)
        except InterruptedError:
            continue
        if num_written == 0:
            raise OSError(errno.EIO, f"the system accepts no more bytes, {len(rest)} are left to write")
        rest = rest[num_written:]


def fsync_folder(path: str | Path) -> None:
    """Make the names in a folder survive a power cut; called after a file in it was created, renamed or removed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for folders: nothing more can be done there.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def make_folder(path: str | Path) -> None:
    """Create a folder and its parents, so that their names survive a power cut; a no-op if it exists."""
    folder = Path(path).absolute()
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        with contextlib.suppress(PermissionError):  # writable, but not readable
            fsync_folder(each.parent)


def write_atomically(path: str | Path, data: bytes | str, *, faults: bool = False) -> None:
    """Replace a file, or create it: a reader, now or after a crash, finds the old content or the new, never a part.

    A link under that name is replaced, not followed.

    Args:
        faults: whether to pass the failpoints `mid_write`, `pre_fsync`, `pre_rename` and `after_rename`. Off for files
            written on a timer, which would make the hit count random.

    Raises:
        OSError: it could not be written: the old content is intact, and no temporary file is left. If only the sync of
            the folder failed, the new content is in place, but may not survive a power cut.
    """
    final = Path(path)
    content = memoryview(data.encode() if isinstance(data, str) else data)
    half = len(content) // 2
    aside = final.with_name(f"{_PREFIX}{final.name}-{os.urandom(4).hex()}")
    descriptor = os.open(aside, _NEW_FILE, 0o666)
    try:
        try:
            write_all(descriptor, content[:half])
            _pass("mid_write", faults)
            write_all(descriptor, content[half:])
            _pass("pre_fsync", faults)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _pass("pre_rename", faults)
        os.replace(aside, final)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    _pass("after_rename", faults)
    fsync_folder(final.parent)


def write_json(path: str | Path, value: Any, *, faults: bool = False) -> None:
    """Replace a JSON file as `write_atomically` does; TypeError or ValueError for values such as nan."""
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False) + "\n", faults=faults)


def read_json(path: str | Path, default: Any = None) -> Any:
    """Return the content of a JSON file of the run folder, or the default if there is no such file.

    A DamagedFileError means that it is not valid JSON, too large, not a plain file, or not a dict as the default is.
    """
    try:
        content = json.loads(_read_regular(Path(path)), parse_constant=_refuse_constant)
        if isinstance(default, dict) and not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, expected an object")
        return content
    except FileNotFoundError:
        return default
    except DamagedFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path} is damaged: {error}. Restore it, or move it away.") from None


def remove_leftovers(folder: str | Path) -> list[Path]:
    """Remove the temporary files of killed processes, and return them; called at a start, by the folder's owner."""
    leftovers = [
        Path(entry.path)
        for entry in os.scandir(folder)
        if entry.name.startswith(_PREFIX) and entry.is_file(follow_symlinks=False)
    ]
    for path in leftovers:
        path.unlink(missing_ok=True)
    return leftovers


def _pass(point: str, faults: bool) -> None:
    if faults:
        failpoint(point)


def _read_regular(path: Path) -> str:
    try:
        descriptor = os.open(path, _EXISTING_FILE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedFileError(f"{path} is a link, not a file; put the file itself there") from None
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise DamagedFileError(f"{path} is not a plain file; move it away")
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        content, size = bytearray(), found.st_size
        # In pieces: requesting the limit at once would take that much memory, however small the file is.
        while size <= _MOST_BYTES and (piece := file.read(_PIECE_BYTES)):
            content += piece
            size = max(size, len(content))  # it may have grown meanwhile
    if size > _MOST_BYTES:
        raise DamagedFileError(f"{path} has {size} bytes, expected at most {_MOST_BYTES}; move it away")
    return content.decode()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def give_usual_mode(path: Path) -> None:
    """Give a file, or the safetensors files of a folder, the usual mode; safetensors 0.8 creates private ones."""
    written = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    private = [file for file in written if stat.S_IMODE(file.stat().st_mode) == 0o600]
    if not private:
        return
    # The umask cannot be read without changing it for all threads: a new file shows it.
    probe = private[0].with_name(f"{_PREFIX}{uuid.uuid4().hex}")
    descriptor = os.open(probe, _NEW_FILE, 0o666)
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)
        probe.unlink()
    for file in private:
        file.chmod(mode)
