"""Signals as requests: the handler only records them, the loop acts at the next boundary."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from loopwright.errors import Preempted

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
)


class SignalWatch:
    """Records the first signal to stop a run in `received`; a second one ends it at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    @contextmanager
    def installed(self) -> Iterator[SignalWatch]:
        """Watch during the block, in the main thread only; earlier handlers are restored afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        earlier: dict[signal.Signals, Any] = {}
        try:
            for number in STOP_SIGNALS:
                # The user's own handler, or a shell's nohup, is left alone.
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    earlier[number] = signal.signal(number, self._note)
            yield self
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def raise_for(self, interruption: BaseException | None) -> None:
        """Raise the interruption, now that the run has stopped gracefully: an exception, or one made from a signal."""
        if interruption is not None:
            raise interruption
        if self.received is None:
            return
        ended: Any = KeyboardInterrupt()
        if self.received is not signal.SIGINT:
            name = self.received.name
            ended = Preempted(f"the run was ended by {name}; it can be resumed from its last checkpoint")
            ended.signal_name = name
        ended.is_agreed = True  # every process raises it, since they agreed on the signal
        raise ended from None  # the stop that it caused is no news

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt if number == signal.SIGINT else Preempted(signal.Signals(number).name)
        self.received = signal.Signals(number)
