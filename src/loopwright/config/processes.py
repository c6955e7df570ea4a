"""The identity of this process, read on demand from torch's process group or the launcher's environment.

torch is imported only if needed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LONGEST_WAIT = timedelta(days=1)
_exchanges = count()  # through the store


def _process_group() -> Any:
    """Return torch.distributed if this process has joined a group, else None; imports nothing."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed
    return None


def world_size() -> int:
    """Return the number of processes of the run."""
    group = _process_group()
    return int(group.get_world_size()) if group else int(os.environ.get("WORLD_SIZE", "1"))


def process_index() -> int:
    """Return the rank of this process among all."""
    group = _process_group()
    return int(group.get_rank()) if group else int(os.environ.get("RANK", "0"))


def local_process_index() -> int:
    """Return the rank of this process on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def device(use_cpu: bool) -> torch.device:
    """Return the device of this process."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if use_cpu or accelerator is None:
        return torch.device("cpu")
    if accelerator.type == "mps":
        return torch.device("mps")
    return torch.device(accelerator.type, local_process_index())


def accelerate_state(use_cpu: bool) -> Any:
    """Return accelerate's state of this process."""
    return importlib.import_module("accelerate").PartialState(cpu=use_cpu)


@contextmanager
def first(is_first: bool) -> Iterator[None]:
    """Run a block on the first process, then on the others; no process group is needed, and an error releases them."""
    if world_size() == 1:
        yield
        return
    group = _process_group()
    meet: Callable[[], Any] = group.barrier if group else _meet_in_store
    if not is_first:
        meet()
    try:
        yield
    finally:
        if is_first:
            meet()


def gather_bytes(value: bytes) -> list[bytes]:
    """Return every process's value by rank; no process group is needed, but all processes must call it."""
    if world_size() == 1:
        return [value]
    if group := _process_group():
        values: list[bytes] = [b""] * world_size()
        group.all_gather_object(values, value)
        return values
    store, number = _store(), next(_exchanges)
    store.set(f"exchange-{number}-{process_index()}", value)
    return [bytes(store.get(f"exchange-{number}-{rank}")) for rank in range(world_size())]


@cache
def _store() -> Any:
    """Return the store that the processes share. It is cached, since rank 0 may be its server."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=_LONGEST_WAIT))
    # After a restart torchrun may reuse the store, with the counts of the previous processes.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"loopwright/first/{attempt}", store)


def _meet_in_store() -> None:
    """Wait until every process has called this as often as this one."""
    store = _store()
    arrived = int(store.add("arrived", 1))
    # Every `world_size()` arrivals complete one barrier.
    meeting = (arrived - 1) // world_size()
    if arrived % world_size() == 0:
        store.set(f"open-{meeting}", "yes")
    store.wait([f"open-{meeting}"], _LONGEST_WAIT)
