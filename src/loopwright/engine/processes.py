"""Communication between the processes of one run: gather, sum, agree, and functions for one process only.

In a single process everything here is a no-op.
"""

from __future__ import annotations

import atexit
import functools
import mmap
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from loopwright.errors import AnotherProcessError, ConfigError, DataError, LoopwrightError, StopTrainingError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_Gradients = list[torch.Tensor | None]

TIMEOUT_VARIABLE = "LOOPWRIGHT_TIMEOUT_SECONDS"
_TIMEOUT_SECONDS = 300.0
_PATIENT = timedelta(days=7)  # for work that others wait for: reading data, writing a checkpoint
_SCHEME = "loopwright"
_SHARED_MEMORY = Path("/dev/shm")  # memory of this machine alone
_SLOT_BYTES = 8  # written and read atomically
_PAUSE_SECONDS = 1e-4


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def collective_timeout() -> timedelta:
    """Return the timeout of collectives; raise a ConfigError if its environment variable is not a number of seconds."""
    given = os.environ.get(TIMEOUT_VARIABLE, "")
    try:
        seconds = float(given or _TIMEOUT_SECONDS)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(f"{TIMEOUT_VARIABLE} must be a number of seconds above 0, got {given!r}")
    return timedelta(seconds=seconds)


def joining_method() -> str | None:
    """Return the `init_method` for the rendezvous of the processes; None if torch's default works.

    After a restart torchrun may reuse the store, with stale addresses of dead processes. Then each start gets its own
    prefix.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    _offer_restarted_store()
    return f"{_SCHEME}://"


@functools.cache
def _offer_restarted_store() -> None:
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

    def meet(url: str, timeout: timedelta, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        yield PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store), rank, world

    register_rendezvous_handler(_SCHEME, meet)


def gather_rows(tensor: torch.Tensor, device: torch.device, padding_value: float | None = None) -> torch.Tensor:
    """Concatenate the rows of all processes in order of rank; `padding_value` pads later dimensions that differ."""
    if not is_distributed():
        return tensor.detach().to(device).contiguous()
    parts, sizes = _exchanged(tensor, device, 0 if padding_value is None else padding_value)
    if padding_value is None and any(size[1:] != sizes[0][1:] for size in sizes):
        raise DataError(
            f"gather: the processes hold rows of different shapes {[tuple(size[1:]) for size in sizes]}. "
            "Pass padding_value= to pad them to the largest."
        )
    return torch.cat([part[: size[0]] for part, size in zip(parts, sizes, strict=True)])


def gather_parts(tensor: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """Return every process's tensor in its own shape, in order of rank; a 0-dim tensor counts as one row."""
    if not is_distributed():
        return [tensor.detach().to(device)]
    parts, sizes = _exchanged(tensor, device, 0)
    return [part[tuple(map(slice, size))] for part, size in zip(parts, sizes, strict=True)]


def _exchanged(tensor: torch.Tensor, device: torch.device, fill: float) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Return every process's tensor, padded to the largest size of each dimension, and their own sizes."""
    rows = (tensor.unsqueeze(0) if tensor.dim() == 0 else tensor).detach().to(device).contiguous()
    shape = torch.tensor(rows.shape, dtype=torch.int64, device=device)
    shapes = [torch.empty_like(shape) for _ in range(dist.get_world_size())]
    dist.all_gather(shapes, shape)
    sizes: list[list[int]] = torch.stack(shapes).tolist()
    padded = rows.new_full([max(column) for column in zip(*sizes, strict=True)], fill)
    padded[tuple(map(slice, rows.shape))] = rows
    # Not every backend supports bool; all support bytes.
    wire = padded.to(torch.uint8) if padded.dtype == torch.bool else padded
    parts = [torch.empty_like(wire) for _ in sizes]
    dist.all_gather(parts, wire)
    return [part.to(rows.dtype) for part in parts], sizes


def gather_objects(value: Any) -> list[Any]:
    """Return every process's value, in order of rank; for small values other than tensors."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sum_over_processes(values: list[float], device: torch.device) -> list[float]:
    if not is_distributed():
        return values
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return list(map(float, sum_on_device(torch.tensor(values, dtype=dtype, device=device)).tolist()))


def create_page(num_processes: int) -> str | None:
    """Create the file of a board, and return its path; None if there is no shared memory."""
    if not _SHARED_MEMORY.is_dir() or not os.access(_SHARED_MEMORY, os.W_OK):
        return None
    descriptor, path = tempfile.mkstemp(prefix="loopwright-", dir=_SHARED_MEMORY)
    with os.fdopen(descriptor, "wb") as file:
        file.write(bytes(2 * num_processes * _SLOT_BYTES))
    return path


class Board:
    """Flags in memory shared on one machine: in each turn a process posts one, and later reads whether any was set.

    A process may be at most one turn ahead of a reader: the gradients of the next update hold it back. So each has two
    slots, for odd and even turns. A slot holds the turn and the flag. The file from `create_page` may be removed once
    all have opened it; an OSError means that this machine does not have it.
    """

    def __init__(self, path: str, rank: int, num_processes: int, timeout: timedelta) -> None:
        with open(path, "r+b") as file:
            self._slots = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._rank, self._num_processes = rank, num_processes
        self._timeout_seconds = timeout.total_seconds()
        self._turn = 0

    def post(self, is_set: bool) -> None:
        self._turn += 1
        self._slots[self._first_slot + self._rank] = 2 * self._turn + is_set

    def read(self) -> bool:
        """End the turn: return whether any process set its flag, once all have posted."""
        slots, first, turn = self._slots, self._first_slot, self._turn
        is_any = False
        for rank in range(self._num_processes):
            if slots[first + rank] >> 1 != turn:
                self._wait_for(rank)
            is_any = is_any or bool(slots[first + rank] & 1)
        return is_any

    @property
    def _first_slot(self) -> int:
        return self._turn % 2 * self._num_processes

    def _wait_for(self, rank: int) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while self._slots[self._first_slot + rank] >> 1 != self._turn:
            if time.monotonic() > deadline:
                raise LoopwrightError(
                    f"rank {self._rank} timed out: it has waited {self._timeout_seconds:g} s for rank {rank} at the "
                    "end of an update"
                )
            time.sleep(_PAUSE_SECONDS)


class Agreement:
    """Agreement of all processes on a few integers (the largest wins), by gloo: without a device sync."""

    _groups: ClassVar[dict[tuple[int, bool], Any]] = {}

    def __init__(self) -> None:
        self._board: Board | None = None
        self._begun: tuple[torch.Tensor, Any] | None = None

    @classmethod
    def group(cls, is_patient: bool = False) -> Any:
        """Return a gloo group of all processes, cached after its first use by all; `is_patient`: a timeout of days."""
        which = id(dist.group.WORLD), is_patient
        if which not in cls._groups:
            atexit.register(_leave_group)
            timeout = _PATIENT if is_patient else collective_timeout()
            is_default = dist.get_backend() == "gloo" and not is_patient
            cls._groups[which] = None if is_default else dist.new_group(backend="gloo", timeout=timeout)
        return cls._groups[which]

    @classmethod
    def break_off(cls) -> None:
        """Close the connections to the other processes, which aborts their collectives."""
        dist.distributed_c10d._abort_process_group()  # destroy_process_group would wait for the others
        cls._groups.clear()  # gloo closes them when the last reference is gone

    def largest(self, *values: int) -> list[int]:
        """Return the maximum of each value over all processes; every process must call it."""
        if not is_distributed():
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group())
        return list(map(int, tensor.tolist()))

    @property
    def is_begun(self) -> bool:
        return self._begun is not None

    def prepare(self) -> None:
        """Set up `begin`, with a page of shared memory on one machine; every process must call it."""
        if self._board is not None or not is_distributed():
            return
        rank, world = dist.get_rank(), dist.get_world_size()
        path = gather_objects(create_page(world) if rank == 0 else None)[0]
        try:
            board = None if path is None else Board(path, rank, world, collective_timeout())
        except OSError:  # another machine, or no memory shared with rank 0
            board = None
        is_missing = self.largest(board is None)[0]
        self._board = None if is_missing else board
        if rank == 0 and path is not None:
            os.unlink(path)

    def begin(self, *values: int) -> None:
        """Begin to agree without waiting; every process must call it, then `end`. On one machine zeros cost nothing."""
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._board is not None:
            self._board.post(any(values))
            self._begun = tensor, None
        else:
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group(), async_op=True)
            self._begun = tensor, work

    def end(self) -> list[int]:
        assert self._begun is not None
        (tensor, work), self._begun = self._begun, None
        if work is not None:
            work.wait()
        elif self._board is not None and self._board.read():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group())
        return list(map(int, tensor.tolist()))

    def total(self, value: float) -> float:
        """Return the sum of a value over all processes; every process must call it."""
        if not is_distributed():
            return value
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, group=self.group())
        return float(tensor.item())


def _leave_group() -> None:
    # gloo's threads, left to the end of the process, sometimes abort it after a successful run.
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def sum_on_device(value: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over all processes, without a device sync."""
    if not is_distributed():
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


def broadcast_from_first(tensors: Iterable[torch.Tensor]) -> None:
    if is_distributed():
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)


class _PairwiseSum(Generic[T]):
    """Sums values as the leaves of a binary tree, in order."""

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._partial: list[tuple[int, T]] = []  # (height, sum), the highest first

    def push(self, value: T) -> None:
        self._partial.append((0, value))
        while len(self._partial) > 1 and self._partial[-1][0] == self._partial[-2][0]:
            self._merge()

    def total(self) -> T | None:
        while len(self._partial) > 1:
            self._merge()
        return self._partial.pop()[1] if self._partial else None

    def _merge(self) -> None:
        height, right = self._partial.pop()
        below, left = self._partial.pop()
        self._partial.append((max(height, below) + 1, self._add(left, right)))


class TreeSum:
    """Sums the gradients of an update's micro-batches in one fixed order, whichever process ran which.

    The micro-batches are the leaves of a binary tree, in order. Each process sums its own part, and the rest of the
    tree sums the parts. If each process has a power of two of micro-batches, its part is a whole subtree, and the sum
    has the same bits for any number of processes.
    """

    def __init__(self) -> None:
        self._parameters: list[torch.nn.Parameter] = []
        self._is_pad = False
        self._sum = _PairwiseSum(_added)

    def begin(self, parameters: list[torch.nn.Parameter], is_pad: bool) -> None:
        """Start an update of these parameters; `is_pad`: this process's gradients do not count."""
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._is_pad = is_pad
        self._sum = _PairwiseSum(_added)
        for parameter in self._parameters:
            parameter.grad = None

    def add_gradients(self) -> None:
        """Move the current gradients into the sum as one micro-batch; a no-op without gradients."""
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        if not self._is_pad and any(gradient is not None for gradient in gradients):
            self._sum.push(gradients)

    def finish(self) -> None:
        """Sum over the whole tree, and set the result as every process's gradients."""
        sums = self._sum.total() or [None] * len(self._parameters)
        if is_distributed():
            kinds: defaultdict[Any, list[int]] = defaultdict(list)
            for index, parameter in enumerate(self._parameters):
                kinds[parameter.dtype, parameter.device].append(index)
            for indexes in kinds.values():
                self._sum_alike([self._parameters[index] for index in indexes], indexes, sums)
        for parameter, gradient in zip(self._parameters, sums, strict=True):
            parameter.grad = gradient

    @staticmethod
    def _sum_alike(parameters: list[Any], indexes: list[int], sums: _Gradients) -> None:
        """Sum gradients of one dtype and device over the processes, into their places in `sums`."""
        world, like = dist.get_world_size(), parameters[0]
        own = [sums[index] for index in indexes]
        # Adding -0.0 changes nothing, not even the sign of a zero, so it fills in for missing gradients.
        parts = [
            torch.full_like(parameter, -0.0).reshape(-1) if gradient is None else gradient.reshape(-1)
            for parameter, gradient in zip(parameters, own, strict=True)
        ]
        is_used = torch.tensor([gradient is not None for gradient in own], dtype=like.dtype).to(like.device)
        size = sum(part.numel() for part in parts) + len(parts)
        flat = torch.cat([*parts, is_used, like.new_zeros(-size % world)])
        rows = torch.empty_like(flat)
        # Each process sums one slice of all gradients: no more traffic than an ordinary all-reduce.
        dist.all_to_all_single(rows.view(torch.uint8), flat.view(torch.uint8))
        tree: _PairwiseSum[torch.Tensor] = _PairwiseSum(torch.add)
        for row in rows.view(world, -1):
            tree.push(row)
        total_row = tree.total()
        assert total_row is not None
        # torch 2.13 renamed it, and warns about the old name.
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(flat.view(torch.uint8), total_row.view(torch.uint8))
        totals = flat[:size].split([*(part.numel() for part in parts), len(parts)])
        for place, index in enumerate(indexes):
            total, gradient = totals[place].view_as(parameters[place]), own[place]
            if gradient is not None:
                gradient.copy_(total)
            elif bool(totals[-1][place] > 0):  # another process used this parameter
                sums[index] = total.clone()


def _added(left: _Gradients, right: _Gradients) -> _Gradients:
    both = [(one, other) for one, other in zip(left, right, strict=True) if one is not None and other is not None]
    if both:
        torch._foreach_add_([one for one, _ in both], [other for _, other in both])  # one kernel for all tensors
    return [other if one is None else one for one, other in zip(left, right, strict=True)]


def world_process_zero_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Run the function on rank 0 only; all wait for it, the others return None. If it raises, every process raises."""
    return _on_some(function, lambda: dist.get_rank() == 0)


def local_process_zero_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Run the function on one process per node, the others wait and return None. If it raises, every process raises."""
    return _on_some(function, lambda: _local_rank() == 0)


def local_process_zero_first(function: Callable[P, R]) -> Callable[P, R]:
    """Run the function on one process per node first, then on the others; if it raises on any, every process raises."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_distributed():
            return function(*args, **kwargs)
        first = _local_rank() == 0
        results = [_run_on(turn, function, *args, **kwargs) for turn in (first, not first)]
        return results[0] if first else results[1]  # type: ignore[return-value]

    return wrapper


def _on_some(function: Callable[P, R], chosen: Callable[[], bool]) -> Callable[P, R | None]:
    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        if not is_distributed():
            return function(*args, **kwargs)
        return _run_on(chosen(), function, *args, **kwargs)

    return wrapper


def _run_on(run_here: bool, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Run the function if asked; afterwards all processes know whether it failed anywhere."""
    result, failures = share_failures(lambda: function(*args, **kwargs) if run_here else None)
    for rank, failure in enumerate(failures):
        if failure is not None:
            kind, text = failure
            if kind == StopTrainingError.__name__:  # not a failure: all of them stop gracefully
                raise StopTrainingError(text)
            name = getattr(function, "__name__", repr(function))
            raise AnotherProcessError(f"{name} failed on rank {rank}: {kind}: {text}")
    return result


def share_failures(step: Callable[[], R]) -> tuple[R, list[tuple[str, str] | None]]:
    """Run a function on every process; return its result and each process's error, or raise its own once all know."""
    result, error = None, None
    group = Agreement.group(is_patient=True)
    try:
        result = step()
    except BaseException as raised:  # noqa: BLE001 - raised again below, once the others know
        error = raised
    failures: list[tuple[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, None if error is None else (type(error).__name__, str(error)), group=group)
    if error is not None:
        raise error
    return result, failures  # type: ignore[return-value] # set where nothing was raised


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", dist.get_rank()))
