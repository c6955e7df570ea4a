"""Call a function for every position of a dataset, in several processes if there are many positions."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from loopwright.data.defaults import default_num_workers
from loopwright.data.workers import WorkerWatch

T = TypeVar("T")

_FEWEST = 2_000  # positions of a process; with fewer, starting it and sending the results takes longer than it saves
_AT_ONCE = 64


def results_of(function: Callable[[int], T], number: int) -> Iterator[T]:
    """Yield function(position) for every position below a number.

    The first error is raised at its turn, and lost processes are replaced. The processes are forked, so the function
    need not be picklable, but changes that it makes to objects are lost.
    """
    may_fork = sys.platform == "linux" and not multiprocessing.current_process().daemon  # as workers of a loader are
    num_workers = min(default_num_workers(None), number // _FEWEST) if may_fork else 0
    if num_workers < 2:
        yield from map(function, range(number))
        return
    loader: DataLoader[Any] = DataLoader(
        _Positions(function, number),  # type: ignore[arg-type]
        batch_size=_AT_ONCE,
        collate_fn=list,
        num_workers=num_workers,
        multiprocessing_context="fork",
        generator=torch.Generator(),  # so that nothing is drawn from the global one
    )
    workers = WorkerWatch(loader)

    def batches_after(done: int) -> Iterator[Any]:
        with workers.reading():
            batches = iter(loader)
        try:
            yield from itertools.islice(batches, done, None)
        finally:
            workers.leave(batches)

    for result, error in itertools.chain.from_iterable(workers.persevere(batches_after)):
        if error is not None:
            raise error
        yield result


class _Positions:
    def __init__(self, function: Callable[[int], Any], number: int) -> None:
        self._function, self._number = function, number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, position: int) -> tuple[Any, Exception | None]:
        try:
            return self._function(position), None
        except Exception as error:  # noqa: BLE001 - raised again where results are taken
            return None, error
