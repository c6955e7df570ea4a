"""Defaults for DataLoaders, and helpers around them."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

from loopwright.data.streams import parts_of, whole_of
from loopwright.errors import ConfigError

LIMIT_BATCHES_ENV_VAR = "PT_ACC_LIMIT_BATCHES"
_MOST_WORKERS = 8  # more rarely help one process, and each costs memory
_OF_A_READY_LOADER = ("batch_size", "num_workers", "pin_memory", "worker_init_fn", "persistent_workers", "drop_last")


def default_num_workers(dataset: Any) -> int:
    """Return the default number of workers of a loader over this dataset.

    0 for tensors or lists in memory (fetching is cheaper than sending) and for iterable datasets (each worker would
    read the whole stream); else the available CPUs, shared among the processes of the node.
    """
    if isinstance(whole_of(dataset), (TensorDataset, IterableDataset, list, tuple)):
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


def loader_kwargs(dataset: Any, defaults: dict[str, Any], given: dict[str, Any] | None) -> dict[str, Any]:
    """Return the DataLoader arguments of a dataset; samplers and iterable datasets remove conflicting defaults."""
    if isinstance(dataset, DataLoader):
        return {name: getattr(dataset, name) for name in _OF_A_READY_LOADER}
    given, kwargs = given or {}, dict(defaults)
    has_batches = given.get("batch_sampler") is not None
    if has_batches or given.get("sampler") is not None or isinstance(dataset, IterableDataset):
        kwargs.pop("shuffle", None)
    if has_batches:
        kwargs.pop("batch_size", None)
    kwargs |= given
    if not kwargs.get("num_workers"):
        # torch refuses both without workers.
        kwargs.pop("persistent_workers", None)
        kwargs.pop("prefetch_factor", None)
    elif isinstance(dataset, IterableDataset) and "persistent_workers" not in given:
        kwargs["persistent_workers"] = False  # a persistent worker would not learn of the next epoch
    return kwargs


def create_loader(dataset: Any, defaults: dict[str, Any], given: dict[str, Any] | None, collate_fn: Any) -> Any:
    """Create the DataLoader of a dataset from `loader_kwargs`; an existing loader is returned unchanged."""
    if isinstance(dataset, DataLoader):
        return dataset
    return DataLoader(dataset=dataset, **{"collate_fn": collate_fn, **loader_kwargs(dataset, defaults, given)})


def without_preparation(loader: Any, given: Any) -> Any:
    """Return a loader, or the `given` one if accelerate has prepared it: it would shard samples too."""
    return given if type(loader).__module__.partition(".")[0] == "accelerate" else loader


def without_sharing(source: Any, num_processes: int) -> Any:
    """Return a DataLoader without its own sharding by process; raise a ConfigError if its sampler cannot be undone."""
    is_plain = num_processes > 1 and type(source) is DataLoader
    sharing = [one for one in parts_of(source)[1:] if getattr(one, "num_replicas", 1) > 1] if is_plain else []
    if not sharing:
        return source
    sampler: Any = sharing[0]
    batch_sampler: Any = source.batch_sampler
    if type(sampler) is not DistributedSampler or type(batch_sampler) is not BatchSampler:
        raise ConfigError(
            f"{type(sampler).__name__} splits samples over {sampler.num_replicas} processes, and loopwright would "
            "split them again. Create it with num_replicas=1 and rank=0: loopwright gives every process its part."
        )
    whole: Any = DistributedSampler(
        sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed, drop_last=sampler.drop_last
    )
    loader = copy.copy(source)
    batches = BatchSampler(whole, batch_sampler.batch_size, batch_sampler.drop_last)
    # A loader refuses another sampler once it exists; this is a copy that was never iterated.
    loader.__dict__.update(sampler=whole, batch_sampler=batches)
    return loader


def worker_init_fn(worker_id: int) -> None:
    """Prepare a loader worker: seed python's and numpy's generators from its torch seed."""
    seed = torch.initial_seed()
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def limit_of_environment() -> int | None:
    """Return the environment's limit of batches per epoch, None for no limit; ConfigError for an invalid value."""
    given = os.environ.get(LIMIT_BATCHES_ENV_VAR, "").strip()
    if given.lower() in ("", "none"):
        return None
    try:
        return int(given)
    except ValueError:
        text = f'{LIMIT_BATCHES_ENV_VAR} must be a whole number of batches, or "none", got {given!r}'
        raise ConfigError(text) from None


class DataLoaderSlice:
    """The first `slice_size` batches of a loader `dl`."""

    def __init__(self, dl: Any, slice_size: int) -> None:
        self.dl = dl
        self.slice_size = slice_size

    def __iter__(self) -> Iterator[Any]:
        for _, batch in zip(range(self.slice_size), self.dl, strict=False):
            yield batch

    def __len__(self) -> int:
        try:
            return min(self.slice_size, len(self.dl))
        except TypeError:  # a stream has no length; a loader over one raises when asked
            return self.slice_size

    def __getattr__(self, name: str) -> Any:
        if name == "dl":
            raise AttributeError(name)
        return getattr(self.dl, name)


class LimitBatches:
    """Limit every trainer created inside the (innermost) block to a few batches per epoch, for its lifetime.

    Example:
        with LimitBatches(2): trainer = Trainer(model, loss_func, optimizer)
    """

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches
        self._outer: list[str | None] = []

    def __enter__(self) -> LimitBatches:
        self._outer.append(os.environ.get(LIMIT_BATCHES_ENV_VAR))
        os.environ[LIMIT_BATCHES_ENV_VAR] = str(self.num_batches)
        return self

    def __exit__(self, *exc_info: object) -> None:
        outer = self._outer.pop()
        if outer is None:
            del os.environ[LIMIT_BATCHES_ENV_VAR]
        else:
            os.environ[LIMIT_BATCHES_ENV_VAR] = outer
