"""SIGTERM outside the training loop: between several runs, and before and after each. No torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

from loopwright.errors import Preempted


def _end(number: int, frame: FrameType | None) -> None:
    raise Preempted(f"ended by {signal.Signals(number).name}")


@contextmanager
def _replaced(old: Any, new: Any) -> Iterator[None]:
    """Replace the handler of SIGTERM in the main thread while the block runs; a no-op if it is another one."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not old:
        yield
        return
    signal.signal(signal.SIGTERM, new)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def ends_early() -> AbstractContextManager[None]:
    """Make SIGTERM raise `Preempted` in the main thread while the block runs, unless the user has set a handler."""
    return _replaced(signal.SIG_DFL, _end)


def left_to_the_loop() -> AbstractContextManager[None]:
    """Undo `ends_early` while the block runs: the loop handles signals itself, and saves first."""
    return _replaced(_end, signal.SIG_DFL)
