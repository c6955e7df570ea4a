"""SIGTERM outside the training loop: between several runs, and before and after each. No torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from loopwright.errors import Preempted


def _end(number: int, frame: FrameType | None) -> None:
    raise Preempted(f"ended by {signal.Signals(number).name}")


@contextmanager
def ends_early() -> Iterator[None]:
    """Make SIGTERM raise `Preempted` in the main thread while the block runs, unless the user has set a handler."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def left_to_the_loop() -> Iterator[None]:
    """Undo `ends_early` while the block runs: the loop handles signals itself, and saves first."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not _end:
        yield
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, _end)
