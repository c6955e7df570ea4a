"""The cross-entropy of logits and its gradient as one Triton kernel: they are read twice and written once, in place."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_AT_ONCE = 2**15  # logits of a row


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    logits, targets, losses, stride, ignored, vocabulary: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    logits += row * stride
    if target == ignored:
        tl.store(losses + row, 0.0)
        for start in range(0, vocabulary, block):
            places = start + tl.arange(0, block)
            tl.store(logits + places, 0.0, mask=places < vocabulary)
    else:
        own = tl.load(logits + target).to(tl.float32)
        largest = float("-inf")
        total = 0.0
        for start in range(0, vocabulary, block):
            places = start + tl.arange(0, block)
            values = tl.load(logits + places, mask=places < vocabulary, other=float("-inf")).to(tl.float32)
            new = tl.maximum(largest, tl.max(values))
            total = total * tl.exp(largest - new) + tl.sum(tl.exp(values - new))
            largest = new
        tl.store(losses + row, largest + tl.log(total) - own)
        for start in range(0, vocabulary, block):
            places = start + tl.arange(0, block)
            values = tl.load(logits + places, mask=places < vocabulary, other=float("-inf")).to(tl.float32)
            slope = tl.exp(values - largest) / total
            slope = tl.where(places == target, slope - 1.0, slope)
            tl.store(logits + places, slope, mask=places < vocabulary)


def losses_and_slope(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Return the loss of each token in 32 bits, and the logits overwritten with their gradient."""
    num_tokens, vocabulary = logits.shape
    losses = torch.empty(num_tokens, dtype=torch.float32, device=logits.device)
    block = min(_MOST_AT_ONCE, triton.next_power_of_2(vocabulary))
    kernel: Any = _kernel[(num_tokens,)]
    kernel(logits, targets, losses, logits.stride(0), ignored, vocabulary, block, num_warps=32)
    return losses, logits
