"""Memory that has run out: how it is told from other errors, how much there is, how much a forward pass keeps."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loopwright.errors import MemoryLimitError
from loopwright.quantities import size

# What torch says where it raises no OutOfMemoryError: the CPU's allocator, cuBLAS, Apple's GPUs.
_SIGNS = ("DefaultCPUAllocator", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED", "MPS backend out of memory")
_ASKED = re.compile(r"ried to allocate ([\d.]+) ?(bytes|[KMGT]i?B)")
_UNITS = {"bytes": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_LEFT_ALONE = "is_not_of_a_batch"
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class MemorySaving:
    """How much memory a change would save.

    Attributes:
        name: "half_batch", "bf16", "checkpointing" or "half_length".
        num_bytes: of the activations of one micro-batch.
    """

    name: str
    num_bytes: int


def list_savings(descriptions: Mapping[str, str], savings: list[MemorySaving]) -> str:
    """Return the changes on one line, each with its description and what it saves, the largest first."""
    ordered = sorted(savings, key=lambda saving: -saving.num_bytes)
    return "   or   ".join(f"{descriptions[saving.name]} (−{size(saving.num_bytes)})" for saving in ordered)


class TorchMemoryLimitError(MemoryLimitError, torch.OutOfMemoryError):
    """A `MemoryLimitError` that code which catches torch's own error catches as well."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, for what is computed of a batch (see `leave_alone`)."""
    if getattr(error, _LEFT_ALONE, False):
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def leave_alone(error: BaseException) -> None:
    """Mark an error that comes from a callback: whatever it says, a smaller batch is no answer to it."""
    setattr(error, _LEFT_ALONE, True)


def asked_bytes(error: BaseException) -> int | None:
    """Return how many bytes were asked for in vain; None if the error does not say it."""
    found = _ASKED.search(str(error))
    if found is None:
        return None
    unit = found[2] if found[2] == "bytes" else found[2][0]
    return int(float(found[1]) * _UNITS[unit])


def forget_frames(error: BaseException) -> None:
    """Let go of what the functions held that an error has ended: the activations of the forward pass among it.

    Called before anything is tried again. The lines of the traceback stay.
    """
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__context__


def release_memory(device: torch.device) -> None:
    """Give back what nothing uses any more; called after an error for want of memory."""
    gc.collect(1)  # what was made lately: the oldest generation takes long, and holds no activations
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Return how many bytes can still be had on a device: of a GPU with torch's cache, of the host within its limits.

    The host's limits are what the machine has available, what its control group allows this process, and `ulimit -v`.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    available = int(psutil.virtual_memory().available)
    for limit, used in _CGROUPS:
        allowed, in_use = _number_in(limit), _number_in(used)
        if allowed is not None and in_use is not None:
            available = min(available, max(allowed - in_use, 0))
    address_space = _address_space_limit()
    return available if address_space is None else min(available, max(address_space - _own_bytes(), 0))


def _address_space_limit() -> int | None:
    """Return what `ulimit -v` allows this process, if it does."""
    try:
        import resource
    except ImportError:  # there is no such limit on Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _own_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().vms)


def _number_in(path: str) -> int | None:
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit


class SavedBytes:
    """Counts the bytes of the tensors that a forward pass keeps for its backward pass: its activations.

    Args:
        parameters: of the model: what is theirs is there anyway, and not counted.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.num_bytes = 0
        self._seen = {_place(each) for each in parameters}
        self._kept: list[Tensor] = []

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what the block keeps; all of it is held until the block is over, so that no place is used twice."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unchanged):
            try:
                yield
            finally:
                self._kept = []

    def _pack(self, tensor: Tensor) -> Tensor:
        place = _place(tensor)
        if place not in self._seen:
            self._seen.add(place)
            self._kept.append(tensor)
            self.num_bytes += tensor.untyped_storage().nbytes()
        return tensor


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _unchanged(value: Any) -> Any:
    return value
