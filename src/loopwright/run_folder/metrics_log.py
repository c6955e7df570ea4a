"""metrics.jsonl: one JSON object per line, appended, truncated at a resume, never torn for long.

A line counts once its newline is there. A process killed while it appends leaves a line without one: opening the log
drops it, and readers skip it. Each append is one write, so it survives the death of the process as soon as it returns;
it survives a power cut once `sync` has returned.

JSON cannot represent a number that is not finite. It is written as null, with its value under the reserved key
`nonfinite`:

    {"update": 7, "loss": null, "lr": 0.1, "nonfinite": {"loss": "nan"}}
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopwright.failpoints import failpoint, is_armed
from loopwright.run_folder.files import DamagedFileError, fsync_folder, open_regular, parse_line, write_all

_BLOCK_BYTES = 64 * 1024
_START_EVENT = "earlier_records_missing"
# A prebuilt encoder is five times cheaper than json.dumps with options. Its output is ASCII, so bytes are characters.
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class MetricsLog:
    """The writer of a run's metrics.jsonl; opened at the start of a run, by the owner of its folder.

    Opening creates a missing file, and drops an incomplete last line. Thread-safe.

    Offsets count the bytes of all records ever kept, and are stored in checkpoints. They equal file positions unless
    the file was missing at a resume: then its first record contains the offset after it, `{"event":
    "earlier_records_missing", "offset": 4711}`.

    The folder of the file must exist. A link is not followed, but raises a DamagedFileError.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._is_torn = False
        self._sync_error: OSError | None = None
        is_new = not self._path.exists()
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._file = os.fdopen(descriptor, "a+b", buffering=0)
        try:
            if is_new:
                fsync_folder(self._path.parent)
            self._start_offset, self._first_line_bytes = _read_start(self._file.fileno(), self._repair())
        except BaseException:
            self._file.close()
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record of JSON values and numbers that are not finite; called at every log, evaluation and save.

        Raises:
            TypeError: the record has another type of value; the message names the key.
            OSError: writing failed. No part of the record stays, and it may be appended again.
        """
        line = to_line(record)
        with self._lock:
            self._write(line)

    def sync(self) -> int:
        """Make all records survive a power cut, and return their end offset; called for every checkpoint.

        After a failure, records since the last good sync may be lost. Every later call fails too: only opening the log
        again shows them.
        """
        with self._lock:
            if self._sync_error is not None:
                cause = self._sync_error
                raise OSError(cause.errno, f"an earlier fsync failed: {cause.strerror}", str(self._path))
            size = self._repair()
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self._sync_error = error
                raise
            return self._start_offset + size

    def cut_back(self, offset: int) -> None:
        """Truncate all records after an offset from `sync`; called once, at a resume.

        If the file is missing or empty, or the offset precedes its content after such a resume, it starts over. An
        offset past its end or inside a line raises a DamagedFileError: this is not the checkpoint's file.
        """
        if offset < 0:
            raise ValueError(f"cannot truncate {self._path} to {offset} bytes; an offset is 0 or more")
        # No fsync: everything before the offset was synced with the checkpoint, the rest is truncated again if needed.
        with self._lock:
            end = self._repair()
            if offset == 0:
                self._start_offset = self._first_line_bytes = size = 0
            elif end == 0:
                line = to_line({"event": _START_EVENT, "offset": offset})
                self._write(line)
                self._start_offset, self._first_line_bytes = offset - len(line), len(line)
                return
            else:
                size = max(offset - self._start_offset, self._first_line_bytes)
            if size > end:
                raise DamagedFileError(
                    f"{self._path} ends at byte {self._start_offset + end}, but the checkpoint recorded {offset} "
                    "bytes. Restore the file, or move it away to continue without the earlier records."
                )
            if size > 0 and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
                raise DamagedFileError(
                    f"{self._path} is not the file of the checkpoint: no line ends at byte {offset}. Restore the right "
                    "one, or move it away to continue without the earlier records."
                )
            os.ftruncate(self._file.fileno(), size)

    def is_in_place(self) -> bool:
        """Return whether the path still refers to the open file; checked for every checkpoint."""
        try:
            return os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Close the file; called at the end of a run, after the last `sync`. Idempotent."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _write(self, line: bytes) -> None:
        descriptor = self._file.fileno()
        if self._is_torn:
            self._repair()
        try:
            half = len(line) // 2 if is_armed("mid_metrics_append") else 0
            write_all(descriptor, line[:half])
            failpoint("mid_metrics_append")
            write_all(descriptor, line[half:])
        except BaseException:
            self._is_torn = True
            with contextlib.suppress(OSError):  # retried before the next line
                self._repair()
            raise

    def _repair(self) -> int:
        """Drop an incomplete last line, and return the size of the file."""
        size = _whole_lines_bytes(self._file.fileno())
        if size < os.fstat(self._file.fileno()).st_size:
            os.ftruncate(self._file.fileno(), size)
        self._is_torn = False
        return size


def to_line(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of metrics.jsonl; raise a TypeError with the key of a value that is not JSON."""
    if not isinstance(record, Mapping):
        raise TypeError(f"a metrics record is a mapping, got {type(record).__name__}")
    try:
        return _encode(record).encode() + b"\n"
    except (TypeError, ValueError):  # a value that is not finite, or not JSON
        nonfinite: dict[str, str] = {}
        plain = {str(key): _to_plain(value, str(key), nonfinite) for key, value in record.items()}
        return _encode({**plain, "nonfinite": nonfinite} if nonfinite else plain).encode() + b"\n"


def _to_plain(value: Any, path: str, nonfinite: dict[str, str]) -> Any:
    """Return the value with null for numbers that are not finite, which are recorded under their paths."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        nonfinite[path] = repr(float(value))
        return None
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item, f"{path}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item, f"{path}.{index}", nonfinite) for index, item in enumerate(value)]
    raise TypeError(
        f"a metrics record has a {type(value).__name__} under {path!r}; expected numbers, strings, lists or mappings. "
        "Convert it first, as in float(value)."
    )


def _whole_lines_bytes(descriptor: int) -> int:
    """Return the end of the last complete line, searching from the end of the file."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _read_start(descriptor: int, size: int) -> tuple[int, int]:
    """Return the offset of the file's first byte, and the length of the record that states it, if any."""
    line, newline, _ = os.pread(descriptor, min(size, 256), 0).partition(b"\n")
    if not newline or _START_EVENT.encode() not in line:
        return 0, 0
    record = parse_line(line) or {}
    if record.get("event") != _START_EVENT or not isinstance(record.get("offset"), int):
        return 0, 0
    return record["offset"] - len(line) - 1, len(line) + 1
