"""Host memory for snapshots: reserved once, filled fast, written by another thread."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from loopwright.checkpoint.tensor_file import check_kind

_MOST_THREADS = 4
_WORTH_THREADS_BYTES = 64 * 1024 * 1024


class Staging:
    """Host memory for snapshots, allocated once and reused."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def reserve(self, prefix: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Allocate and touch memory for these tensors: the system hands out pages on the first write."""
        for name, tensor in tensors.items():
            self._buffer(prefix + name, tensor).zero_()

    def copy(self, prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies of the tensors on the host; the next call with the same names overwrites them."""
        pairs = []
        for name, tensor in tensors.items():
            check_kind(name, tensor)
            pairs.append((self._buffer(prefix + name, tensor), tensor))
        num_threads = _num_threads(pairs)
        if num_threads > 1:
            with ThreadPoolExecutor(num_threads) as threads:
                list(threads.map(_copy, pairs))
        else:
            for pair in pairs:
                _copy(pair)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return dict(zip(tensors, (buffer for buffer, _ in pairs), strict=True))

    def _buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer


def _copy(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    buffer, tensor = pair
    with torch.no_grad():  # a setting of the thread
        buffer.copy_(tensor, non_blocking=True)


def _num_threads(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
    """Return the number of copying threads: one if torch has its own, a device copies, or the data is small."""
    num_bytes = sum(tensor.nbytes for _, tensor in pairs if not tensor.is_cuda)
    if num_bytes < _WORTH_THREADS_BYTES or torch.get_num_threads() > 1:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_THREADS)
