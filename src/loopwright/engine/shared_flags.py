"""A page of memory shared by the processes of one machine: flags that cost one read."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from loopwright.errors import LoopwrightError

_FOLDER = Path("/dev/shm")  # memory of this machine alone
_ITEM = 8  # bytes of a slot, written and read atomically
_PAUSE_SECONDS = 1e-4


def create_page(num_processes: int) -> str | None:
    """Create the file of a board, and return its path; None if there is no shared memory."""
    if not _FOLDER.is_dir() or not os.access(_FOLDER, os.W_OK):
        return None
    descriptor, path = tempfile.mkstemp(prefix="loopwright-", dir=_FOLDER)
    with os.fdopen(descriptor, "wb") as file:
        file.write(bytes(2 * num_processes * _ITEM))
    return path


class Board:
    """In each turn every process posts a flag, and later reads whether any was set.

    A process may be at most one turn ahead of a reader: the gradients of the next update hold it back. So each has two
    slots, for odd and even turns. A slot holds the turn and the flag. The file from `create_page` may be removed once
    all have opened it; an OSError means that this machine does not have it.
    """

    def __init__(self, path: str, rank: int, num_processes: int, timeout: timedelta) -> None:
        with open(path, "r+b") as file:
            self._slots = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._rank, self._num_processes = rank, num_processes
        self._timeout_seconds = timeout.total_seconds()
        self._turn = 0

    def post(self, is_set: bool) -> None:
        self._turn += 1
        self._slots[self._first_slot + self._rank] = 2 * self._turn + is_set

    def read(self) -> bool:
        """End the turn: return whether any process set its flag, once all have posted."""
        slots, first, turn = self._slots, self._first_slot, self._turn
        is_any = False
        for rank in range(self._num_processes):
            if slots[first + rank] >> 1 != turn:
                self._wait_for(rank)
            is_any = is_any or bool(slots[first + rank] & 1)
        return is_any

    @property
    def _first_slot(self) -> int:
        return self._turn % 2 * self._num_processes

    def _wait_for(self, rank: int) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while self._slots[self._first_slot + rank] >> 1 != self._turn:
            if time.monotonic() > deadline:
                raise LoopwrightError(
                    f"rank {self._rank} timed out: it has waited {self._timeout_seconds:g} s for rank {rank} at the "
                    "end of an update"
                )
            time.sleep(_PAUSE_SECONDS)
