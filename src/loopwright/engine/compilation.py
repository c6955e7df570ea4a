"""Models compiled by torch.compile once for all input lengths and batch sizes, not once for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def compile_model(model: nn.Module, collate: Any = None, **options: Any) -> None:
    """Compile the call of a model; `model._compiled_call_impl = None` undoes it.

    Padded lengths and batch sizes are dynamic from the first batch on, since the last batch may be short. Otherwise
    torch compiles for the first shape alone, and again for the second. The collator's `padded_dimensions` maps each
    input to the dimension that is a length; without it nothing is marked. `options` are those of `torch.compile`.
    """
    model.compile(**options)
    padded_dimensions = getattr(collate, "padded_dimensions", None)
    if padded_dimensions is None:
        return
    compiled: Any = model._compiled_call_impl  # where `nn.Module.compile` keeps it; there is no public name

    def call(*args: Any, **inputs: Any) -> Any:
        dimensions = padded_dimensions(inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                differing = {0, dimensions.get(name, 0)}
                # Public in torch's documentation, under a private module.
                torch._dynamo.maybe_mark_dynamic(value, [each for each in differing if each < value.dim()])
        return compiled(*args, **inputs)

    model._compiled_call_impl = call
