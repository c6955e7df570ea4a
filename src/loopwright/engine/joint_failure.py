"""Failing together: when one process of a run fails, all of them stop and name it.

In a single process everything here is a no-op.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from loopwright.engine.processes import Agreement, is_distributed
from loopwright.errors import AnotherProcessError, Preempted, explained
from loopwright.run_folder.parent import end_with_parent

P = ParamSpec("P")
R = TypeVar("R")

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 1.0  # for a process to notice by itself that another one has failed
_HEARD_SECONDS = 2.0  # for the others to receive a failure
_ABORT_SECONDS = 2.0  # for it to leave an aborted collective
_LEFT_SECONDS = 0.3  # for them to leave on their own
_HEAD_START_SECONDS = 5.0  # for the failed process to exit before the others
_PAUSE_SECONDS = 0.02
_LONGEST = 500  # characters of an error sent to the others
_LAUNCHED_VARIABLE = "TORCHELASTIC_RUN_ID"  # set by torchrun and accelerate launch
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # gloo's message


def is_of_another_process(error: BaseException) -> bool:
    """Whether an error says that a collective broke because another process has gone."""
    return isinstance(error, dist.DistError) or any(text in str(error) for text in _LOST)


def fails_together(function: Callable[P, R]) -> Callable[P, R]:
    """Let an exception on one process end the function on all of them, within seconds.

    All processes must call the decorated function. The first failure is printed at once with its rank. The other
    processes raise an AnotherProcessError that names it, or exit if they are unreachable.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if not is_distributed():
                return function(*args, **kwargs)
            with FailureWatch():
                return function(*args, **kwargs)
        except Exception as error:
            if (named := explained(error, function, args, kwargs)) is error:
                raise
            raise named from None

    return wrapper


class FailureWatch:
    """A block that all processes run, and all leave when one fails.

    Failures are posted in the rendezvous store, which a thread of every process polls twice a second. If the main
    thread does not leave by itself after a failure, that thread aborts its collective, and finally exits the process.
    The process also ends when the launcher is gone.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._failure: str | None = None  # of another process
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        # All processes enter such blocks in the same order, so the number is the same everywhere.
        self._key = f"loopwright/failure/{next(self._numbers)}"
        # A separate connection: the main thread may be blocked in the other.
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone()
        self._launcher = os.getppid() if _LAUNCHED_VARIABLE in os.environ else None

    def __enter__(self) -> FailureWatch:
        if self._launcher is not None:
            end_with_parent(self._launcher)
        threading.Thread(target=self._watch, name="loopwright-failures", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._is_over.set()
        if error is None or getattr(error, "is_agreed", False):  # all of them leave with it
            return
        cause = self._heard_of(error)
        if cause is None:
            cause = self._post(error)
        elif self._launcher is not None:
            atexit.register(time.sleep, _HEAD_START_SECONDS)  # the first exit code is the launcher's
        if cause is not None and (type(error) is RuntimeError or isinstance(error, dist.DistError)):
            # Raised by a collective when its peer is gone; the real cause is the peer's error.
            raise AnotherProcessError(f"{cause} (this is rank {self._rank})") from error

    def _heard_of(self, error: BaseException) -> str | None:
        """Return another process's failure, if it was posted; wait for it if this error implies one."""
        seconds = _HEARD_SECONDS if isinstance(error, AnotherProcessError) else 0
        with contextlib.suppress(dist.DistError):
            if _wait_until(self._failure_of_another, seconds):
                self._store.add(f"{self._key}/left", 1)
        return self._failure

    def _post(self, error: BaseException) -> str | None:
        """Post this process's failure; return the original one if this process only lost a peer."""
        me = f"rank {self._rank} of {self._world}"
        is_lost = type(error) is RuntimeError and is_of_another_process(error)
        text = f"{me} lost another process, which was killed or exited without an error message"
        if not is_lost:
            text = f"{me} failed: {_summary(error)}"
        with contextlib.suppress(dist.DistError):
            if self._store.add(f"{self._key}/count", 1) > 1:  # another process was faster
                for count in ("heard", "left"):
                    self._store.add(f"{self._key}/{count}", 1)
                return text if is_lost else None
            if not isinstance(error, (KeyboardInterrupt, Preempted)):
                # Before anyone else knows, so before their output. It may be a file on a full disk.
                with contextlib.suppress(OSError):
                    sys.stderr.write(f"{text[0].upper()}{text[1:]}\n")
                    sys.stderr.flush()
            self._store.set(self._key, text)
            others = self._world - (2 if is_lost else 1)
            # The store may die with this process, so the others must have read it first.
            _wait_until(lambda: self._store.add(f"{self._key}/heard", 0) >= others, _HEARD_SECONDS)
            if not _wait_until(lambda: self._store.add(f"{self._key}/left", 0) >= others, _LEFT_SECONDS):
                Agreement.break_off()
        return text if is_lost else None

    def _failure_of_another(self) -> str | None:
        if self._failure is None and self._store.check([self._key]):
            self._failure = self._store.get(self._key).decode()
            self._store.add(f"{self._key}/heard", 1)
        return self._failure

    def _watch(self) -> None:
        while not self._is_over.wait(_POLL_SECONDS):
            try:
                failure = self._failure_of_another()
            except dist.DistError:
                if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                    return  # rank 0 hosted the store and has exited: successfully, or its peers notice by themselves
                failure = "the launcher of the first machine has ended"
            if failure is None:
                continue
            if not self._is_over.wait(_GRACE_SECONDS):
                Agreement.break_off()
                if not self._is_over.wait(_ABORT_SECONDS):
                    self._leave(failure)
            return

    def _leave(self, cause: str) -> None:
        """Exit from this thread, after dumping where the main thread is stuck."""
        sys.stderr.write(f"Rank {self._rank} of {self._world} exits, since {cause}. It was here:\n")
        sys.stderr.flush()
        faulthandler.dump_traceback()
        os._exit(1)


def _wait_until(condition: Callable[[], Any], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True


def _summary(error: BaseException) -> str:
    """Return the class of an error and its first line; for a loader worker's error, the line with the message."""
    name, (first, *more) = type(error).__name__, str(error).splitlines() or [""]
    if first.startswith("Caught ") and "DataLoader worker process" in first:
        # The worker's traceback follows, with the error below it.
        texts = [text for kind, _, text in (line.partition(": ") for line in more) if kind.endswith(name)]
        first = texts[-1] if texts else first
    return f"{name}: {first[:_LONGEST]}" if first else name
