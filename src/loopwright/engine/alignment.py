"""The vocabulary sizes that matrix products are fast for on CUDA: multiples of 64. Others take three times as long."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

_STEP = 64


def is_slow(vocabulary: int) -> bool:
    return vocabulary % _STEP > 0


def aligned(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return an output layer's weight and bias with rows of zeros added, up to the next fast size."""
    missing = -len(weight) % _STEP
    return functional.pad(weight, (0, 0, 0, missing)), None if bias is None else functional.pad(bias, (0, missing))
