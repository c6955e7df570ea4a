"""Worker processes of loaders: start them, detect dead or hung ones, and replace them.

torch reports a dead worker by an exception from a signal handler, anywhere in the main process. Here nothing is raised
until a batch is waited for: `WatchedWorkers` polls its workers once a second while it waits, and `WorkerWatch` replaces
lost ones. Undelivered batches are read again.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import queue
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, queues
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

# DataLoader has no public way to replace a dead worker, or to keep its own SIGCHLD handler out.
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from loopwright.engine.signals import STOP_SIGNALS
from loopwright.errors import DataError
from loopwright.run_folder.parent import end_with_parent

T = TypeVar("T")

_logger = logging.getLogger("loopwright")

_POLL_SECONDS = 1.0
_GRACE_SECONDS = 2.0  # for workers to exit once nobody wants their batches
_PATIENCE_SECONDS = 600.0  # without a batch, unless the loader has its own timeout
_MOST_REPLACEMENTS = 3
_REPLACEMENTS_SECONDS = 3600.0


class WorkersLost(DataError):
    """The workers of a loader died, or hung (`is_hang`); its `WorkerWatch` replaces them."""

    def __init__(self, cause: str, is_hang: bool = False) -> None:
        super().__init__(cause)
        self.is_hang = is_hang


def init_worker(worker_init_fn: Callable[[int], None] | None, is_of_main_thread: bool, worker_id: int) -> None:
    """Set up a worker: leave signals to the main process, exit when it exits, then call the user's own function.

    A job scheduler signals whole process groups. If workers exited on the signal, the main process could not finish its
    update and save.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    # The kernel sends it when the parent's *thread* ends, and a fork server's child has another parent.
    if parent is not None and sys.platform == "linux" and is_of_main_thread and os.getppid() == parent.pid:
        end_with_parent(parent.pid)
    elif parent is not None and sys.platform != "win32":
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    # For a batch that cannot be sent: multiprocessing would drop it, or try again for ever.
    queues.Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]
    sys.excepthook = lambda kind, error, trace: _end_worker(error)
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


class WatchedWorkers(_MultiProcessingDataLoaderIter):
    """torch's iterator over workers, which raises WorkersLost when a batch cannot arrive any more."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._owner = os.getpid()
        self._inbox: _Inbox | None = None
        given = loader.worker_init_fn
        is_of_main_thread = threading.current_thread() is threading.main_thread()
        loader.worker_init_fn = functools.partial(init_worker, given, is_of_main_thread)
        try:
            with _no_death_handler():
                super().__init__(loader)
        except BaseException:  # too many open files, say: torch cannot end what it has half started
            self._shutdown = True
            for worker in getattr(self, "_workers", []):
                worker.kill()
                worker.join()
            raise
        finally:
            loader.worker_init_fn = given
        # Hidden from torch's handler, in case another loader has installed it.
        _remove_worker_pids(id(self))
        self._worker_pids_set = False
        self._patience = self._timeout or _PATIENCE_SECONDS
        workers: list[Any] = self._workers
        for worker in workers:
            # They ignore SIGTERM, which torch and multiprocessing send to unresponsive workers.
            popen = weakref.proxy(worker._popen)  # a cycle would keep its pipes open until the garbage collector runs
            worker._popen.terminate = functools.partial(type(worker._popen).kill, popen)
        self._inbox = _Inbox(self._worker_result_queue, workers, self._patience)

    def _process_data(self, data: Any, *rest: Any) -> Any:
        """Return a batch, or raise the worker's error with its own message; torch puts the traceback into it."""
        try:
            return super()._process_data(data, *rest)  # type: ignore[no-untyped-call]
        except Exception as error:
            *_, message = re.split(rf"\n(?:[\w.]+\.)?{type(error).__name__}: ", str(error))
            raise type(error)(message.strip()) from error

    def _get_data(self) -> Any:
        """Return the next result of any worker; torch calls it when it has none ready."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return self._data_queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if lost := self._loss(is_overdue=time.monotonic() > deadline):
                    self._abandon()
                    raise lost from None
            except Exception as error:
                raise DataError(
                    f"a worker's batch could not be received: {type(error).__name__}: {error}. If the limit of open "
                    "files is reached, raise it (ulimit -n), or call "
                    "torch.multiprocessing.set_sharing_strategy('file_system') before training."
                ) from error

    def _loss(self, is_overdue: bool) -> WorkersLost | None:
        pids = ", ".join(str(worker.pid) for worker in self._workers)
        if is_overdue or (self._inbox is not None and self._inbox.has_timed_out):
            return WorkersLost(f"no batch came from the workers {pids} for {self._patience:g} s", is_hang=True)
        needed = zip(self._workers, self._workers_status, strict=True)
        dead = [worker for worker, is_needed in needed if is_needed and not worker.is_alive()]
        if dead:
            return WorkersLost(", ".join(f"worker {worker.pid} {_end_of(worker)}" for worker in dead))
        if self._pin_memory and not self._pin_memory_thread.is_alive():
            return WorkersLost(f"the thread that pins the batches of the workers {pids} has ended")
        return None

    def _abandon(self) -> None:
        """Kill the workers, without touching anything they may have locked."""
        self._shutdown = True
        if self._pin_memory:
            self._pin_memory_thread_done_event.set()
        _kill(self._workers)
        deadline = time.monotonic() + _GRACE_SECONDS
        for worker in self._workers:
            worker.join(timeout=max(deadline - time.monotonic(), 0))
        self._let_go()

    def _shutdown_workers(self) -> None:
        """Stop the workers gracefully, or kill one that does not respond; called by torch and `WorkerWatch.close`."""
        if getattr(self, "_shutdown", True) or os.getpid() != self._owner or _utils.python_exit_status is not False:
            return
        done = threading.Thread(target=self._workers_done_event.set, daemon=True)
        last_resort = threading.Timer(_GRACE_SECONDS, _kill, args=(self._workers,))
        last_resort.daemon = True
        with suppress(RuntimeError):  # no thread can start while the interpreter exits
            done.start()
            done.join(_GRACE_SECONDS)
            if done.is_alive():  # a worker hangs with the lock of that event
                self._abandon()
                return
            last_resort.start()
        try:
            super()._shutdown_workers()
        finally:
            last_resort.cancel()
            self._let_go()

    def _let_go(self) -> None:
        if self._inbox is not None:
            self._inbox.close()


class WorkerWatch:
    """Watches the workers of a DataLoader, and replaces those that die or hang.

    The DataLoader is patched only during reads. One without workers or with its own iterators, and any other iterable,
    is left alone.
    """

    def __init__(self, loader: Any) -> None:
        self._loader: DataLoader[Any] | None = loader if isinstance(loader, DataLoader) else None
        self._is_watched = (
            self._loader is not None
            and self._loader.num_workers > 0
            and type(self._loader)._get_iterator is DataLoader._get_iterator  # the one place that makes iterators
        )
        self._newest: weakref.ref[WatchedWorkers] | None = None
        self._losses: list[float] = []

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Run a block that starts or advances an iteration of the DataLoader; its workers are watched."""
        loader = self._loader
        if loader is None or not self._is_watched:
            yield
            return
        loader._get_iterator = self._start  # type: ignore[method-assign]
        try:
            yield
        finally:
            del loader._get_iterator

    def persevere(self, start: Callable[[int], Iterator[T]]) -> Iterator[T]:
        """Yield from `start(0)`; after losing workers, from `start(number yielded)`; DataError if too often."""
        done = 0
        while True:
            try:
                for item in start(done):
                    done += 1
                    yield item
                return
            except WorkersLost as lost:
                self._note(lost)

    def leave(self, iterator: Any) -> None:
        """Stop the workers of a finished or aborted iteration, unless they are persistent."""
        # If left to the garbage collector, their queues may go first, and with them the message to exit.
        if isinstance(iterator, WatchedWorkers) and self._loader is not None and self._loader._iterator is not iterator:
            iterator._shutdown_workers()

    def close(self) -> None:
        """Stop the workers; the next iteration starts new ones."""
        if self._loader is None:
            return
        kept, self._loader._iterator = self._loader._iterator, None  # the persistent workers
        running = self._newest() if self._newest is not None else None
        for iterator in (kept, running):
            if isinstance(iterator, _MultiProcessingDataLoaderIter):
                iterator._shutdown_workers()

    def _start(self) -> WatchedWorkers:
        assert self._loader is not None
        workers = WatchedWorkers(self._loader)
        self._newest = weakref.ref(workers)
        return workers

    def _note(self, lost: WorkersLost) -> None:
        assert self._loader is not None
        self._loader._iterator = None
        now = time.monotonic()
        self._losses = [before for before in self._losses if now - before < _REPLACEMENTS_SECONDS] + [now]
        if len(self._losses) > _MOST_REPLACEMENTS:
            advice = (
                "If a batch may take that long, give the loader a longer timeout; else look for a read or a lock in "
                "the dataset that blocks forever."
                if lost.is_hang
                else "If they ran out of memory, use fewer workers or smaller batches; else check whether the dataset "
                "or a library it uses crashes (num_workers=0 shows it in the main process)."
            )
            raise DataError(
                f"the workers of a data loader were lost {len(self._losses)} times within an hour and are not "
                f"replaced again. The last time {lost}. {advice}"
            ) from lost
        _logger.warning("%s: the workers of a data loader are replaced, and what they held is read again", lost)


class _Inbox:
    """Receives messages from workers, and gives up on one whose sender dies or hangs midway.

    It replaces a queue's `get`, in the calling thread. Tensors arrive as a message plus a request to their sender, so
    even a received message may never complete.
    """

    def __init__(self, results: Any, workers: list[Any], patience: float) -> None:
        self.has_timed_out = False  # whether workers were killed because one hung while sending
        self._results = results
        self._workers = workers
        self._patience = patience
        self._is_broken = False
        self._receiving_since: float | None = None
        self._is_closed = threading.Event()
        # multiprocessing's queue blocks for ever on half a message: read its pipe without blocking instead.
        self._pipe: Any = getattr(results._reader, "conn", results._reader)
        if sys.platform != "win32":
            os.set_blocking(self._pipe.fileno(), False)
            self._pipe._recv = functools.partial(type(self._pipe)._recv, self._pipe, read=self._read)
        results.get = self.get
        threading.Thread(target=self._watch, name="loopwright-workers", daemon=True).start()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next message; queue.Empty if there is none, or a worker was lost while sending."""
        if not self._results._poll(timeout if block else 0):  # as the queue's own `get`, and then below
            raise queue.Empty
        if self._is_broken:  # the rest of the pipe is not a message any more
            time.sleep(_POLL_SECONDS)
            raise queue.Empty
        self._receiving_since = time.monotonic()
        try:
            message = self._results._recv_bytes()  # waits in `_read`
            self._results._sem.release()  # counts the free places of the queue
            return ForkingPickler.loads(message)
        except queue.Empty:
            raise
        except Exception:
            if self._is_loss_near():
                raise queue.Empty from None
            raise
        finally:
            self._receiving_since = None

    def close(self) -> None:
        self._is_closed.set()
        # Both refer to the object they are set on, which would keep it alive.
        vars(self._results).pop("get", None)
        vars(self._pipe).pop("_recv", None)

    def _read(self, handle: int, size: int) -> bytes:
        """Return up to `size` bytes from the pipe; wait for them while workers are alive."""
        while True:
            try:
                return os.read(handle, size)
            except BlockingIOError:
                if not connection.wait([handle], _POLL_SECONDS) and _has_loss(self._workers):
                    self._is_broken = True
                    raise queue.Empty from None

    def _is_loss_near(self) -> bool:
        """Whether a worker was lost; one that is exiting disappears slightly before it is gone."""
        ended = connection.wait([worker.sentinel for worker in self._workers], _POLL_SECONDS)
        for worker in self._workers:
            if worker.sentinel in ended:
                worker.join()
        return _has_loss(self._workers)

    def _watch(self) -> None:
        while not self._is_closed.wait(_POLL_SECONDS):
            since = self._receiving_since
            if since is not None and time.monotonic() - since > self._patience:
                self.has_timed_out = True
                _kill(self._workers)  # which ends the wait


def _has_loss(workers: list[Any]) -> bool:
    """Whether a worker did not exit cleanly, or none is left."""
    codes = [worker.exitcode for worker in workers]
    return None not in codes or any(codes)


def _end_of(worker: Any) -> str:
    code: int = worker.exitcode
    if code >= 0:
        return f"ended with exit code {code}"
    names = {each.value: each.name for each in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def _kill(workers: list[Any]) -> None:
    for worker in workers:
        worker.kill()


def _end_worker(error: BaseException, *_: Any) -> None:
    sys.stderr.write(f"a worker of a data loader cannot send a batch: {error!r}\n")
    os._exit(1)


def _end_after(parent: Any) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _no_death_handler() -> Iterator[None]:
    """Run a block in which torch believes that its SIGCHLD handler is installed, and so installs none."""
    handling = _utils.signal_handling
    # It would raise in the main thread for a worker that is replaced.
    if handling._SIGCHLD_handler_set or threading.current_thread() is not threading.main_thread():
        yield
        return
    handling._SIGCHLD_handler_set = True
    try:
        yield
    finally:
        handling._SIGCHLD_handler_set = False
