"""Own a run folder outside the training loop, which owns it by itself, and heed `lw stop` there. No torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from typing import Any

from loopwright.run_folder import Lease, RunFolder
from loopwright.run_folder.layout import STOP
from loopwright.run_folder.parent import BEGUN_VARIABLE

_HEED_SECONDS = 0.5
TRIALS = ".trial-"  # the start of the folders of rehearsal and timing


class StopAskedError(Exception):
    """`lw stop` was called before the first update, or after the last one."""


class Ownership:
    """Owns the folder of a run on rank 0; elsewhere it does nothing."""

    def __init__(self) -> None:
        self._folder: RunFolder | None = None
        self._lease: Lease | None = None
        self._heeded_at = 0.0

    def __enter__(self) -> Ownership:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Release the folder; if a file is missing because the folder was moved, raise that instead."""
        try:
            if isinstance(error, FileNotFoundError):
                self.check_folder()
        finally:
            self.release()

    def take(self, folder: RunFolder, phase: str) -> None:
        """Own the folder until the loop does, or until `release`; remove what killed processes left in it."""
        if os.environ.get("RANK", "0") not in ("", "0"):
            return
        lease = Lease(folder.path, yields=True, phase=phase)
        lease.acquire()
        if self._folder is None:  # the first phase
            # Forget a request to stop an earlier run; one made since a supervisor or launcher began holds.
            with contextlib.suppress(FileNotFoundError):
                if (folder.path / STOP).stat().st_mtime < float(os.environ.get(BEGUN_VARIABLE, "inf")):
                    (folder.path / STOP).unlink()
            for leftover in (*folder.path.glob(".new-*"), *folder.path.glob(f"{TRIALS}*")):
                shutil.rmtree(leftover, ignore_errors=True)
        self._folder, self._lease = folder, lease

    def is_asked_to_stop(self) -> bool:
        return self._folder is not None and (self._folder.path / STOP).exists()

    def heed(self) -> None:
        """Raise a StopAskedError once `lw stop` was called, and a LeaseError once the folder is gone."""
        now = time.monotonic()
        if self._lease is None or now - self._heeded_at < _HEED_SECONDS:
            return
        self._heeded_at = now
        self.check_folder()
        if self.is_asked_to_stop():
            raise StopAskedError

    def hand_over(self, next_run: RunFolder) -> None:
        """Pass a request to stop on to another run, and release the folder."""
        if self._folder is not None and self.is_asked_to_stop():
            next_run.ask_to_stop()
            (self._folder.path / STOP).unlink(missing_ok=True)
        self.release()

    def check_folder(self) -> None:
        """Raise a LeaseError if the folder was moved, deleted or replaced."""
        if self._lease is not None:
            self._lease.still_ours()

    def release(self) -> None:
        if self._lease is not None:
            self._lease.release()
