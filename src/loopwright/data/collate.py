"""Making batches of samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate


def collate(samples: list[Any]) -> Any:
    """Return what torch's default_collate returns, sooner for the most frequent kind: tuples of tensors."""
    first = samples[0]
    if type(first) is tuple and all(type(item) is Tensor for item in first):
        try:
            return [torch.stack(column) for column in zip(*samples, strict=True)]
        except (TypeError, ValueError, RuntimeError):
            pass  # the samples differ: what follows either copes or says what is wrong
    return default_collate(samples)
