"""Failing together: when one process of a run fails, all of them leave, and say which one it was.

In a single process everything here is transparent and costs nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from loopwright.engine.processes import Agreement, is_distributed
from loopwright.errors import AnotherProcessError, Preempted

P = ParamSpec("P")
R = TypeVar("R")

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 1.0  # for a process to see by itself that another one has failed
_HEARD_SECONDS = 2.0  # for the others to hear of a failure
_ABORT_SECONDS = 2.0  # for it to leave a collective that was broken off
_LEFT_SECONDS = 0.3  # for them to leave by themselves
_HEAD_START_SECONDS = 5.0  # for the process that failed to end before those that end with it
_PAUSE_SECONDS = 0.02
_LONGEST = 500  # characters of an error that are told to the others
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_LAUNCHED_VARIABLE = "TORCHELASTIC_RUN_ID"  # set by torchrun and accelerate launch
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # gloo's words


def fails_together(function: Callable[P, R]) -> Callable[P, R]:
    """Let an exception that one process raises in a function end the function on all of them, within seconds.

    All processes must call the decorated function. The first failure is printed at once, with its rank; the other
    processes then raise an AnotherProcessError that names it, or end if they cannot be reached.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_distributed():
            return function(*args, **kwargs)
        with FailureWatch():
            return function(*args, **kwargs)

    return wrapper


class FailureWatch:
    """A block that all processes run, and that all of them leave when one fails in it.

    A failure is noted in the store by which the processes found each other. A thread of every process looks there
    twice a second. If it finds one, and the process does not leave the block by itself, it breaks off the collective
    that the process waits in, and in the end ends the process. It also ends it when the launcher is gone.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._failure: str | None = None  # of another process
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        # The processes enter such blocks in the same order, so that the number is the same on all of them.
        self._key = f"loopwright/failure/{next(self._numbers)}"
        # A connection of its own: the main thread may be waiting in the other.
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone()
        self._launcher = os.getppid() if _LAUNCHED_VARIABLE in os.environ else None

    def __enter__(self) -> FailureWatch:
        if self._launcher is not None and sys.platform == "linux":
            ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        threading.Thread(target=self._watch, name="loopwright-failures", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        if error is None or getattr(error, "is_agreed", False):  # all of them leave by it
            return
        told = self._heard_of(error)
        if told is None:
            told = self._tell(error)
        elif self._launcher is not None:
            atexit.register(time.sleep, _HEAD_START_SECONDS)  # the launcher returns the exit code of the first to end
        if told is not None and (type(error) is RuntimeError or isinstance(error, dist.DistError)):
            # What a collective raises when its peer is gone; the cause is what the peer told.
            raise AnotherProcessError(f"{told} (this is rank {self._rank})") from error

    def _heard_of(self, error: BaseException) -> str | None:
        """Return what another process told before; where the error says that one has failed, once it has told it."""
        deadline = time.monotonic() + (_HEARD_SECONDS if isinstance(error, AnotherProcessError) else 0)
        with contextlib.suppress(dist.DistError):
            while (told := self._failure_of_another()) is None and time.monotonic() < deadline:
                time.sleep(_PAUSE_SECONDS)
            if told is not None:
                self._store.add(f"{self._key}/left", 1)
            return told
        return self._failure

    def _tell(self, error: BaseException) -> str | None:
        """Let everybody know that this process has failed; return what was told if it only lost another one."""
        me, is_lost = f"rank {self._rank} of {self._world}", _is_lost_connection(error)
        text = f"{me} lost another process, which was killed or ended without saying why"
        if not is_lost:
            text = f"{me} failed: {_summary(error)}"
        with contextlib.suppress(dist.DistError):
            if self._store.add(f"{self._key}/count", 1) > 1:  # another one was a moment earlier
                for count in ("heard", "left"):
                    self._store.add(f"{self._key}/{count}", 1)
                return text if is_lost else None
            if not isinstance(error, (KeyboardInterrupt, Preempted)):
                # Before anyone else knows, so before what they print. It may be a file on a disk that is full.
                with contextlib.suppress(OSError):
                    sys.stderr.write(f"{text[0].upper()}{text[1:]}\n")
                    sys.stderr.flush()
            self._store.set(self._key, text)
            others = self._world - (2 if is_lost else 1)
            # The store may go with this process, so the others that are left have to have heard.
            self._wait_for(f"{self._key}/heard", others, _HEARD_SECONDS)
            if not self._wait_for(f"{self._key}/left", others, _LEFT_SECONDS):
                Agreement.break_off()
        return text if is_lost else None

    def _wait_for(self, count: str, number: int, seconds: float) -> bool:
        """Wait until a count in the store has come to a number; return whether it has."""
        deadline = time.monotonic() + seconds
        while self._store.add(count, 0) < number:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_SECONDS)
        return True

    def _failure_of_another(self) -> str | None:
        if self._failure is None and self._store.check([self._key]):
            self._failure = self._store.get(self._key).decode()
            self._store.add(f"{self._key}/heard", 1)
        return self._failure

    def _watch(self) -> None:
        while not self._is_over.wait(_POLL_SECONDS):
            if self._launcher is not None and os.getppid() != self._launcher:
                self._leave("the launcher has ended")
            try:
                failure = self._failure_of_another()
            except dist.DistError:
                if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                    return  # the first process kept the store, and has ended: well, or its peers see it by themselves
                failure = "the launcher of the first machine has ended"
            if failure is None:
                continue
            if not self._is_over.wait(_GRACE_SECONDS):
                Agreement.break_off()
                if not self._is_over.wait(_ABORT_SECONDS):
                    self._leave(failure)
            return

    def _leave(self, cause: str) -> None:
        """End the process from this thread: the main thread is stuck, and where is worth knowing."""
        sys.stderr.write(f"Rank {self._rank} of {self._world} ends, since {cause}. It was here:\n")
        sys.stderr.flush()
        faulthandler.dump_traceback()
        os._exit(1)


def _is_lost_connection(error: BaseException) -> bool:
    return type(error) is RuntimeError and any(words in str(error) for words in _LOST)


def _summary(error: BaseException) -> str:
    """Return the class of an error and its first line; of one that a loader's worker raised, the line that says it."""
    name, (first, *more) = type(error).__name__, str(error).splitlines() or [""]
    if first.startswith("Caught ") and "DataLoader worker process" in first:
        # The worker's traceback follows, and the error below it.
        said = [text for kind, _, text in (line.partition(": ") for line in more) if kind.endswith(name)]
        first = said[-1] if said else first
    return f"{name}: {first[:_LONGEST]}" if first else name
