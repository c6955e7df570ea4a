"""Talk between the processes of one run: gather, reduce, agree, and functions for one process only.

In a single process everything here is transparent and costs nothing.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from loopwright.errors import DataError, LoopwrightError

P = ParamSpec("P")
R = TypeVar("R")


def is_distributed() -> bool:
    """Whether this process is one of several in an initialised process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gather_rows(tensor: torch.Tensor, device: torch.device, padding_value: float | None = None) -> torch.Tensor:
    """Concatenate a tensor over processes on dim 0, in order of rank; processes may have different row counts.

    Args:
        tensor: this process's rows; a 0-dim tensor counts as one row.
        device: where the processes communicate.
        padding_value: fills up dimensions after the first where they differ; without it that is an error.
    """
    rows = (tensor.unsqueeze(0) if tensor.dim() == 0 else tensor).detach().to(device).contiguous()
    if not is_distributed():
        return rows if tensor.dim() else tensor
    shape = torch.tensor(rows.shape, dtype=torch.int64, device=device)
    shapes = [torch.empty_like(shape) for _ in range(dist.get_world_size())]
    dist.all_gather(shapes, shape)
    sizes = torch.stack(shapes).tolist()
    largest = [max(column) for column in zip(*sizes, strict=True)]
    if padding_value is None and any(size[1:] != largest[1:] for size in sizes):
        raise DataError(
            f"gather: the processes hold rows of different shapes {[tuple(size[1:]) for size in sizes]}. "
            "Pass padding_value= to fill them up to the largest."
        )
    padded = rows.new_full(largest, 0 if padding_value is None else padding_value)
    padded[tuple(slice(size) for size in rows.shape)] = rows
    # bool is not supported by every backend; bytes are.
    wire = padded.to(torch.uint8) if padded.dtype == torch.bool else padded
    parts = [torch.empty_like(wire) for _ in sizes]
    dist.all_gather(parts, wire)
    return torch.cat([part[: size[0]] for part, size in zip(parts, sizes, strict=True)]).to(rows.dtype)


def gather_objects(value: Any) -> list[Any]:
    """Return every process's value, in order of rank; for small things that are no tensors."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sum_over_processes(values: list[float], device: torch.device) -> list[float]:
    """Return each value's sum over all processes (float64 where the device has it)."""
    if not is_distributed():
        return values
    dtype = torch.float32 if device.type == "mps" else torch.float64
    tensor = torch.tensor(values, dtype=dtype, device=device)
    dist.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]


class Agreement:
    """A few integers on which all processes agree: the largest of each wins.

    It uses a gloo group, so that the host can talk without waiting for the device.
    """

    _groups: ClassVar[dict[int, Any]] = {}

    @property
    def _group(self) -> Any:
        # Made at its first use, by all processes, and kept: making one is itself a collective.
        world = id(dist.group.WORLD)
        if world not in self._groups:
            atexit.register(_leave_group)
            self._groups[world] = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        return self._groups[world]

    def largest(self, *values: int) -> list[int]:
        """Return, for each value, its largest over all processes; every process must call it."""
        if not is_distributed():
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor.tolist()]

    def total(self, value: float) -> float:
        """Return the sum of a value over all processes; every process must call it."""
        if not is_distributed():
            return value
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, group=self._group)
        return float(tensor.item())


def _leave_group() -> None:
    # gloo's threads, left to the end of the process, now and then abort it after everything went well.
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def sum_on_device(value: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over all processes, without waiting for it."""
    if not is_distributed():
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


def world_process_zero_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Run the function on rank 0 only; all wait for it, the others return None.

    If it raises, every process raises.
    """
    return _on_some(function, lambda: dist.get_rank() == 0)


def local_process_zero_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Run the function on one process of each node; all wait for it, the others return None.

    If it raises, every process raises.
    """
    return _on_some(function, lambda: _local_rank() == 0)


def local_process_zero_first(function: Callable[P, R]) -> Callable[P, R]:
    """Run the function on one process of each node first (to download, to fill a cache), then on the others.

    Everyone gets a result. If it raises on a first process, every process raises.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_distributed():
            return function(*args, **kwargs)
        first = _local_rank() == 0
        result = _shared_failure(function, first, *args, **kwargs)
        if not first:
            result = function(*args, **kwargs)
        return result  # type: ignore[return-value]

    return wrapper


def _on_some(function: Callable[P, R], chosen: Callable[[], bool]) -> Callable[P, R | None]:
    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        if not is_distributed():
            return function(*args, **kwargs)
        return _shared_failure(function, chosen(), *args, **kwargs)

    return wrapper


def _shared_failure(function: Callable[..., R], run_here: bool, *args: Any, **kwargs: Any) -> R | None:
    """Run the function where asked; afterwards all processes know whether it failed anywhere."""
    result, failure = None, None
    if run_here:
        try:
            result = function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again below, once the others know
            failure = error
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, text in enumerate(failures):
        if text is not None:
            name = getattr(function, "__name__", repr(function))
            raise LoopwrightError(f"{name} failed on rank {rank}: {text}")
    return result


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", dist.get_rank()))
