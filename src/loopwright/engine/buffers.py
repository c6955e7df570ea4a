"""Copies of a model's buffers at the last update boundary, for a rollback."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# Batch norm changes its buffers without a new `_version`, so small buffers are always copied. Larger ones are masks and
# tables, which rarely change, and would be expensive to copy at every update.
_ALWAYS_COPIED_NUMBERS = 65536


class BufferShadow:
    """Copies of the buffers of modules (such as running means), so that an abandoned update leaves no trace."""

    def __init__(self, *modules: Any) -> None:
        # The dicts that hold them: searching for buffers at every update would cost more than copying them.
        holders = [part._buffers for module in modules if isinstance(module, nn.Module) for part in module.modules()]
        self._kept = [
            _Kept(holder, name) for holder in holders for name, buffer in holder.items() if buffer is not None
        ]

    def keep(self) -> None:
        pairs = []
        for one in self._kept:
            buffer = one.holder.get(one.name)
            if buffer is None or one.is_current(buffer):
                continue
            if not _are_alike(one.copy, buffer):
                one.copy = torch.empty_like(buffer)
            pairs.append((one.copy, buffer))
            one.seen, one.version = buffer, buffer._version  # autograd's counter of in-place changes
        _copy(pairs)

    def restore(self) -> None:
        pairs = []
        for one in self._kept:
            buffer = one.holder.get(one.name)
            if buffer is None or one.seen is None or one.is_current(buffer):
                continue
            if not _are_alike(one.copy, buffer):
                buffer = one.holder[one.name] = torch.empty_like(one.copy)
            pairs.append((buffer, one.copy))
        _copy(pairs)


@dataclass
class _Kept:
    holder: dict[str, Tensor | None]  # the module's buffers by name
    name: str
    copy: Tensor = field(default_factory=lambda: torch.empty(0))
    seen: Tensor | None = None  # the copied tensor, kept alive so that its id is not reused
    version: int = 0  # its `_version` at that time

    def is_current(self, buffer: Tensor) -> bool:
        """Whether the buffer is certain to be unchanged."""
        is_large = buffer.numel() > _ALWAYS_COPIED_NUMBERS
        return is_large and buffer is self.seen and buffer._version == self.version


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first, with as few kernels as possible."""
    kinds: defaultdict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for target, source in pairs:
        kinds[target.dtype, target.device].append((target, source))
    with torch.no_grad():
        for alike in kinds.values():
            # One kernel for all tensors of a kind.
            torch._foreach_copy_(
                [target for target, _ in alike], [source for _, source in alike]
            )  # one kernel for all tensors
