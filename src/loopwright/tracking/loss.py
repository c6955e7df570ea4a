"""The loss tracker: a mean loss as a sum and a count, without a host sync.

`update` only buffers a loss, on its own device. Reading moves the buffer to the host and adds it up there,
one by one in order of arrival, in Python floats (64 bit). So the sum has the same bits however often, and
whenever, it is read, saved or restored.

    tracker = LossTracker()
    tracker.update(loss, batch_size=32)   # a tensor or a float; no host sync
    tracker.average                       # a float; one host sync
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

# Buffered small tensors before they are packed into one: a CUDA scalar takes a block of 512 bytes.
_FOLD_EVERY = 64


class LossTracker:
    """Keeps the mean of mean losses, each weighted by its number of items. Reading anything waits for the device."""

    def __init__(self) -> None:
        self.reset()

    def update(
        self, loss_batch_value: float | Tensor, batch_size: float | Tensor = 1, *, is_ours: bool = False
    ) -> None:
        """Count one micro-batch; never waits for the device.

        Args:
            loss_batch_value: the micro-batch's mean loss. A tensor with dimensions is averaged.
                A tensor is copied at once, so writing to it later changes nothing.
            batch_size: its number of items, possibly counted on the device.
            is_ours: the loss is detached, and not written to again, so it need not be copied.
        """
        if isinstance(loss_batch_value, Tensor):
            loss = loss_batch_value if is_ours else loss_batch_value.detach()
            # A CUDA graph writes every loss to the same memory, and a hook may scale its loss in place.
            loss_batch_value = loss.mean() if loss.dim() else loss if is_ours else loss.clone()
        elif not isinstance(batch_size, Tensor) and not self._pending and not self._folded:
            self._sums.add(float(loss_batch_value), batch_size)
            return
        if isinstance(batch_size, Tensor):
            count = batch_size.detach()
            batch_size = count.sum() if count.dim() else count.clone()
        self._pending.append((loss_batch_value, batch_size))
        if len(self._pending) >= _FOLD_EVERY:
            self._fold()

    def reset(self) -> None:
        """Discard everything."""
        self._sums = _Sums()
        self._pending: list[tuple[float | Tensor, float | Tensor]] = []
        self._folded: list[tuple[Sequence[float | Tensor] | Tensor, Sequence[float | Tensor] | Tensor]] = []

    @property
    def loss_value(self) -> float:
        """The loss of the last micro-batch; 0 before the first."""
        return self._read().loss_value

    @property
    def total_loss(self) -> float:
        """The sum of the losses, each times its number of items."""
        return self._read().total_loss

    @property
    def running_count(self) -> float:
        """The number of items."""
        return self._read().running_count

    @property
    def average(self) -> float:
        """The mean loss per item: 0 before any update, nan after updates without items."""
        sums = self._read()
        if sums.running_count == 0:
            return math.nan if sums.num_updates else 0.0
        return sums.total_loss / sums.running_count

    def first_nonfinite(self) -> int | None:
        """Return the number of updates since the reset before the first nan or infinite loss, if any."""
        return self._read().first_nonfinite

    def device_totals(self, device: torch.device | str) -> Tensor:
        """Return [total loss, number of items] on a device: float64, or float32 on MPS, which has no float64."""
        sums = self._read()
        dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64
        return torch.tensor([sums.total_loss, sums.running_count], dtype=dtype, device=device)

    def state_dict(self) -> dict[str, Any]:
        """Return everything as Python numbers."""
        return asdict(self._read())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; the sums continue with the same bits."""
        sums = _Sums(**{field.name: state[field.name] for field in fields(_Sums)})
        self.reset()
        self._sums = sums

    def _fold(self) -> None:
        losses, counts = zip(*self._pending, strict=True)
        self._folded.append((_packed(losses), _packed(counts)))
        self._pending = []

    def _read(self) -> _Sums:
        if self._pending:
            self._fold()
        if self._folded:
            entries = [
                (float(loss), count)
                for losses, counts in self._folded
                for loss, count in zip(_on_host(losses), _on_host(counts), strict=True)
            ]
            self._folded = []
            for loss, count in entries:
                self._sums.add(loss, count)
        return self._sums


def combined(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the combined state of several trackers: sums and counts added up."""
    firsts = [state["first_nonfinite"] for state in states if state["first_nonfinite"] is not None]
    return {
        "loss_value": states[0]["loss_value"],
        "total_loss": math.fsum(state["total_loss"] for state in states),
        "running_count": sum(state["running_count"] for state in states),
        "num_updates": max(state["num_updates"] for state in states),
        "first_nonfinite": min(firsts, default=None),
    }


@dataclass(slots=True)
class _Sums:
    loss_value: float = 0.0
    total_loss: float = 0.0
    running_count: float = 0
    num_updates: int = 0
    first_nonfinite: int | None = None

    def add(self, loss: float, count: float) -> None:
        if count:  # a mean of nothing, usually nan, is ignored
            if self.first_nonfinite is None and not math.isfinite(loss):
                self.first_nonfinite = self.num_updates
            self.total_loss += loss * count
            self.running_count += count
        self.loss_value = loss
        self.num_updates += 1


def _packed(values: tuple[float | Tensor, ...]) -> tuple[float | Tensor, ...] | Tensor:
    # Packing must not change a value, so tensors of different dtypes stay separate; the host does the sums.
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) == len(values) and len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1:
        return torch.stack(tensors)
    return values


def _on_host(values: Sequence[float | Tensor] | Tensor) -> list[float]:
    if isinstance(values, Tensor):
        return values.tolist()
    return [value.item() if isinstance(value, Tensor) else value for value in values]
