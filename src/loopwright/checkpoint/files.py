"""Checkpoint files: created once, hashed while they are written, synced, and never opened through links."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from loopwright.errors import CheckpointError
from loopwright.failpoints import failpoint
from loopwright.run_folder import files

_READ_BYTES = 4 * 1024 * 1024
# Large, since a thread that writes in the background waits for the interpreter after every piece.
_WRITE_BYTES = 32 * 1024 * 1024


TOO_LARGE = "checkpoint.size"  # the code of an error: reading would refuse a file, so it is not written


class HashedFile:
    """A new file of `size` bytes, hashed while it is written, and synced when the block ends without an error."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o644)
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Write all of the data, however few bytes the system accepts at a time."""
        view = memoryview(data)
        for start in range(0, len(view), _WRITE_BYTES):
            chunk = view[start : start + _WRITE_BYTES]
            self._digest.update(chunk)
            files.write_all(self._descriptor, chunk)
        self.size += len(view)

    def copy(self, path: Path) -> None:
        """Write the content of another file."""
        with os.fdopen(open_regular(path), "rb") as file:
            while chunk := file.read(_WRITE_BYTES):
                self.write(chunk)

    def describe(self) -> dict[str, Any]:
        """Return the size and sha256 of the written bytes."""
        return {"size": self.size, "sha256": self._digest.hexdigest()}

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        try:
            if kind is None:
                failpoint("pre_fsync")
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def within(data: bytes, most_bytes: int, what: str) -> bytes:
    """Return the data if it does not exceed the size that is read back later; raise a CheckpointError otherwise."""
    if len(data) > most_bytes:
        raise CheckpointError(
            f"{what} takes {len(data):,} bytes, and a checkpoint can hold {most_bytes:,} of it", code=TOO_LARGE
        )
    return data


def open_regular(path: Path) -> int:
    """Open a file for reading; raise a CheckpointError if it is missing, or is a link, a device or a folder."""
    try:
        return files.open_regular(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from None
    except files.DamagedFileError as error:
        raise CheckpointError(error.what) from None


def describe(path: Path) -> dict[str, Any]:
    """Return the size and sha256 of a file."""
    digest = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return {"size": size, "sha256": digest.hexdigest()}
