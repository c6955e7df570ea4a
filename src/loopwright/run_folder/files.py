"""Small files that are either old or new, never half written, whatever kills the process or the machine.

A file is written under a temporary name in its own folder, synced, renamed, and the folder is synced. A killed process
leaves `.tmp-...` files behind; `remove_leftovers` removes them at the next start.

An fsync that failed is never retried on the same descriptor: the kernel has dropped the pages by then, and the second
call would report success for data that is nowhere.

Every file of a run folder is opened by `open_regular`, so that a pipe, a device or a folder in its place is refused at
once. `is_sealed` JSON files contain their own sha256, which is checked when they are read.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loopwright.errors import LoopwrightError
from loopwright.failpoints import failpoint
from loopwright.quantities import counted
from loopwright.run_folder.kinds import check_kinds

_PREFIX = ".tmp-"
# Zero on systems without these flags; a run folder cannot be locked there (lease.py), but can be read.
NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW
_MOST_BYTES = 64 * 1024 * 1024
_MOST_LINE_BYTES = 16 * 1024 * 1024
_PIECE_BYTES = 64 * 1024
_SEAL = "sha256"

_logger = logging.getLogger("loopwright")


class DamagedFileError(LoopwrightError, ValueError):
    """A file of the run folder with unexpected content."""

    def __init__(self, what: str, fix: str | None = None) -> None:
        super().__init__(what, code="run.damaged", fix=fix)


def open_regular(path: str | Path, flags: int = os.O_RDONLY, *, follows_links: bool = False) -> int:
    """Open a file of a run folder, and return its descriptor; new ones get the usual mode.

    A link, a pipe, a socket, a device or a folder in its place raises a DamagedFileError, without waiting for a writer.
    """
    links = getattr(os, "O_CLOEXEC", 0) if follows_links else NO_FOLLOW
    try:
        descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | links, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedFileError(
                f"{path} is a link, not a file", f"put the file itself in the place of {path}"
            ) from None
        if error.errno not in (errno.ENXIO, errno.EISDIR, errno.ENODEV):
            raise
        raise DamagedFileError(f"{path} is not a plain file", f"move {path} away") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedFileError(f"{path} is not a plain file", f"move {path} away")
    return descriptor


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
    final, reach = Path(path), failpoint if faults else lambda point: None
    content = memoryview(data.encode() if isinstance(data, str) else data)
    half = len(content) // 2
    aside = final.with_name(f"{_PREFIX}{final.name}-{os.urandom(4).hex()}")
    descriptor = os.open(aside, _NEW_FILE, 0o666)
    try:
        try:
            write_all(descriptor, content[:half])
            reach("mid_write")
            write_all(descriptor, content[half:])
            reach("pre_fsync")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        reach("pre_rename")
        os.replace(aside, final)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    reach("after_rename")
    fsync_folder(final.parent)


def append(path: str | Path, text: str) -> None:
    """Add whole lines to a file in one write, since processes may share it; they begin on a line of their own."""
    descriptor = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # by a process that was killed
        write_all(descriptor, (is_torn * "\n" + text).encode(errors="replace"))
    finally:
        os.close(descriptor)


def write_json(path: str | Path, value: Any, *, faults: bool = False, is_sealed: bool = False) -> None:
    """Replace a JSON file as `write_atomically` does; TypeError or ValueError for values such as nan."""
    value = sealed(value) if is_sealed else value
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False) + "\n", faults=faults)


def sealed(content: Any) -> dict[str, Any]:
    """Return a dict as JSON holds it, with its own sha256, which `read_json` checks."""
    value = json.loads(json.dumps(content))
    return {**value, _SEAL: _digest_of(value)}


def _digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def read_json(path: str | Path, default: Any = None, most_bytes: int = _MOST_BYTES) -> Any:
    """Return the content of a JSON file of the run folder, or the default if there is no such file.

    A DamagedFileError means that it is not valid JSON, too large, not a plain file, not a dict as the default is,
    that a value has another kind than expected, or that its own sha256 does not match.
    """
    try:
        content = json.loads(read_bytes(path, most_bytes).decode(), parse_constant=_refuse_constant)
        if isinstance(default, dict) and not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, expected an object")
        if isinstance(content, dict) and isinstance(content.get(_SEAL), str):
            seal = content.pop(_SEAL)
            if seal != _digest_of(content):
                raise ValueError(f"its own {_SEAL} does not match; if you edited it, remove {_SEAL}")
        check_kinds(content, Path(path).name)
        return content
    except FileNotFoundError:
        return default
    except DamagedFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path} is damaged: {error}", f"restore {path}, or move it away") from None


def read_json_lines(path: str | Path, for_bad: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON lines file, such as metrics.jsonl, even while it grows; none without a file.

    Damaged lines are skipped with one warning, or yielded as `for_bad`. A last line without its end is not there yet.
    """
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return
    bad: list[int] = []
    number, is_inside = 0, False  # of a line that is too long
    with os.fdopen(descriptor, "rb") as file:
        while line := file.readline(_MOST_LINE_BYTES):
            is_end, was_inside = line.endswith(b"\n"), is_inside
            is_inside = not is_end and len(line) == _MOST_LINE_BYTES
            number += not was_inside
            record = None if is_inside or was_inside else parse_line(line)
            if record is not None and is_end:
                yield record
            elif line.strip() and not was_inside and (is_end or is_inside):
                bad.append(number)
                if for_bad is not None:
                    yield for_bad
    if bad and for_bad is None:
        warn_once(f"{path}: {counted(len(bad), 'damaged line', 'is')} skipped, the first is line {bad[0]}")


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None for a damaged one."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


@functools.lru_cache(maxsize=256)
def warn_once(text: str) -> None:
    """Log a warning, unless this process has logged it before."""
    _logger.warning(text)


def remove_leftovers(folder: str | Path) -> list[Path]:
    """Remove the temporary files of killed processes, and return them; called at a start, by the folder's owner."""
    leftovers = [path for path in Path(folder).glob(f"{_PREFIX}*") if path.is_file() and not path.is_symlink()]
    for path in leftovers:
        path.unlink(missing_ok=True)
    return leftovers


def read_bytes(path: str | Path, most_bytes: int = _MOST_BYTES) -> bytes:
    """Return the content of a file of a run folder; a DamagedFileError if it is too large, or `open_regular` raises."""
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        content, size = bytearray(), os.fstat(file.fileno()).st_size
        # In pieces: requesting the limit at once would take that much memory, however small the file is.
        while size <= most_bytes and (piece := file.read(_PIECE_BYTES)):
            content += piece
            size = max(size, len(content))  # it may have grown meanwhile
    if size > most_bytes:
        raise DamagedFileError(f"{path} has {size} bytes, expected at most {most_bytes}", f"move {path} away")
    return bytes(content)


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
