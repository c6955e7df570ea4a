"""Making batches of samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate


def collate(samples: list[Any]) -> Any:
    """Equivalent of torch's default_collate, faster for the most frequent kind: tuples of tensors."""
    first = samples[0]
    if type(first) is tuple and set(map(type, first)) == {Tensor}:
        try:
            return [torch.stack(column) for column in zip(*samples, strict=True)]
        except (TypeError, ValueError, RuntimeError):
            pass  # the samples differ: default_collate copes or raises
    return default_collate(samples)
