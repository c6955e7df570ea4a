"""Defaults for DataLoaders, and the small tools around them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sized
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

LIMIT_BATCHES_ENV_VAR = "PT_ACC_LIMIT_BATCHES"
_MOST_WORKERS = 8  # more rarely help one process, and each costs memory


def default_num_workers(dataset: Any) -> int:
    """Return how many workers a loader over this dataset gets unless told otherwise.

    None for datasets that are tensors or lists in memory (fetching is cheaper than sending) and for
    iterable ones (each worker would read the whole stream); else the CPUs this process may use,
    shared among the processes of the node.
    """
    inner = dataset
    while isinstance(inner, Subset):
        inner = inner.dataset
    if isinstance(inner, (TensorDataset, IterableDataset, list, tuple)):
        return 0
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(cpus // processes, _MOST_WORKERS))


def default_loader_kwargs(dataset: Any, batch_size: int, shuffle: bool) -> dict[str, Any]:
    """Return the keyword arguments of a default DataLoader over this dataset."""
    num_workers = default_num_workers(dataset)
    return {
        "shuffle": shuffle,
        "pin_memory": torch.cuda.is_available(),
        "batch_size": batch_size,
        "num_workers": num_workers,
        "worker_init_fn": worker_init_fn,
        "persistent_workers": num_workers > 0,
    }


def create_loader(dataset: Any, defaults: dict[str, Any], given: dict[str, Any] | None, collate_fn: Any) -> Any:
    """Make the DataLoader of a dataset from the defaults and what the caller gave.

    A dataset that is itself a DataLoader is returned as it is. `sampler`, `batch_sampler` and
    iterable datasets remove the defaults that torch would refuse beside them.
    """
    if isinstance(dataset, DataLoader):
        return dataset
    given = dict(given or {})
    kwargs = {**defaults, **given}
    has_own_order = given.get("sampler") is not None or isinstance(dataset, IterableDataset)
    if has_own_order and "shuffle" not in given:
        kwargs.pop("shuffle", None)
    if given.get("batch_sampler") is not None:
        for name in ("shuffle", "batch_size"):
            if name not in given:
                kwargs.pop(name, None)
    if not kwargs.get("num_workers"):
        # torch refuses both without workers.
        kwargs.pop("persistent_workers", None)
        kwargs.pop("prefetch_factor", None)
    elif isinstance(dataset, IterableDataset) and "persistent_workers" not in given:
        kwargs["persistent_workers"] = False  # a living worker would not learn of the next epoch
    kwargs.setdefault("collate_fn", collate_fn)
    return DataLoader(dataset=dataset, **kwargs)


def worker_init_fn(worker_id: int) -> None:
    """Prepare a loader worker: python's and numpy's generators follow from its torch seed."""
    seed = torch.initial_seed()
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


class DataLoaderSlice:
    """The first batches of a loader.

    Attributes:
        dl: the loader.
        slice_size: how many batches at most.
    """

    def __init__(self, dl: Any, slice_size: int) -> None:
        self.dl = dl
        self.slice_size = slice_size

    def __iter__(self) -> Iterator[Any]:
        for _, batch in zip(range(self.slice_size), self.dl, strict=False):
            yield batch

    def __len__(self) -> int:
        return min(self.slice_size, len(self.dl)) if isinstance(self.dl, Sized) else self.slice_size

    def __getattr__(self, name: str) -> Any:
        if name == "dl":
            raise AttributeError(name)
        return getattr(self.dl, name)


class LimitBatches:
    """Limit every trainer that is made inside the block to a few batches per epoch, for its life.

    Blocks may be nested; the innermost counts.

    Example:
        with LimitBatches(2):
            trainer = Trainer(model, loss_func, optimizer)
    """

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches
        self._outer: list[str | None] = []

    def __enter__(self) -> LimitBatches:
        self._outer.append(os.environ.get(LIMIT_BATCHES_ENV_VAR))
        os.environ[LIMIT_BATCHES_ENV_VAR] = str(self.num_batches)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outer = self._outer.pop()
        if outer is None:
            del os.environ[LIMIT_BATCHES_ENV_VAR]
        else:
            os.environ[LIMIT_BATCHES_ENV_VAR] = outer
