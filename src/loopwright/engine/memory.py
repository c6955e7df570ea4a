"""Out-of-memory errors: how to recognise them, how much memory is free, how much a forward pass keeps."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from loopwright.errors import MemoryLimitError
from loopwright.quantities import size

# Messages where torch raises no OutOfMemoryError: of devices, drivers, cuBLAS and cuDNN, the CPU allocator, XLA.
_SIGNS = re.compile(
    r"out[ _]?of[ _]?(\w+_)?memory|not enough memory|DefaultCPUAllocator|STATUS_ALLOC_FAILED|MemoryAllocation|"
    r"CUDNN_STATUS_NOT_SUPPORTED|Invalid buffer size|PT_DEVMEM Allocation failed|RESOURCE_EXHAUSTED",
    re.IGNORECASE,
)
_ASKED = re.compile(r"ried to allocate ([\d.]+) ?(bytes|[KMGT]i?B)")
_UNITS = {"b": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_LEFT_ALONE = "is_not_of_a_batch"
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class MemorySaving:
    """The memory that a change would save."""

    name: str  # "half_batch", "bf16", "checkpointing" or "half_length"
    num_bytes: int  # of the activations of one micro-batch


def list_savings(descriptions: Mapping[str, str], savings: list[MemorySaving]) -> str:
    ordered = sorted(savings, key=lambda saving: -saving.num_bytes)
    return "   or   ".join(f"{descriptions[saving.name]} (−{size(saving.num_bytes)})" for saving in ordered)


class TorchMemoryLimitError(MemoryLimitError, torch.OutOfMemoryError):
    """A `MemoryLimitError` that handlers of torch's own error catch as well."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a batch ran out of memory (see `leave_alone`)."""
    if getattr(error, _LEFT_ALONE, False):
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _SIGNS.search(str(error)) is not None


def leave_alone(error: BaseException) -> None:
    """Mark an error from a callback, which a smaller batch would not fix."""
    setattr(error, _LEFT_ALONE, True)


def asked_bytes(error: BaseException) -> int | None:
    found = _ASKED.search(str(error))
    return None if found is None else int(float(found[1]) * _UNITS[found[2][0]])


def forget_frames(error: BaseException) -> None:
    """Release the locals of the failed frames, including activations, before a retry; the traceback lines stay."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__context__


def release_memory(device: torch.device) -> None:
    gc.collect(1)  # young generations only: the oldest is slow to collect, and holds no activations
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU with torch's cache, or of the host within its cgroup's limit and `ulimit -v`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    available = int(psutil.virtual_memory().available)
    for limit, used in _CGROUPS:
        allowed, in_use = _number_in(limit), _number_in(used)
        if allowed is not None and in_use is not None:
            available = min(available, max(allowed - in_use, 0))
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return available
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed == resource.RLIM_INFINITY:
        return available
    return min(available, max(allowed - int(psutil.Process().memory_info().vms), 0))


def _number_in(path: str) -> int | None:
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means no limit


class SavedBytes:
    """Counts the bytes of activations that a forward pass keeps for backward, without the model's parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.num_bytes = 0
        self._seen = {_storage_of(each) for each in parameters}
        self._kept: list[Tensor] = []

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tensors kept in the block; they are held until its end, so that no storage is reused."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda value: value):
            try:
                yield
            finally:
                self._kept = []

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = _storage_of(tensor)
        if storage not in self._seen:
            self._seen.add(storage)
            self._kept.append(tensor)
            self.num_bytes += tensor.untyped_storage().nbytes()
        return tensor


def _storage_of(tensor: Tensor) -> int:
    """Return what tells the storage of a tensor from others, also where tensors have no data and no address."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)
