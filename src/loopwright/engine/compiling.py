"""Models compiled by torch.compile once for all input lengths and batch sizes, not once for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def compile_model(model: nn.Module, collate: Any = None, **options: Any) -> None:
    """Compile the call of a model; `model._compiled_call_impl = None` undoes it.

    Padded lengths and batch sizes are dynamic from the first batch on, since the last batch may be short. Otherwise
    torch compiles for the first shape alone, and again for the second.

    Args:
        model: changed in place.
        collate: of the training data. Its `padded_dimensions` maps each input to the dimension that is a length;
            without it nothing is marked.
        options: of `torch.compile`.
    """
    model.compile(**options)
    padded_dimensions = getattr(collate, "padded_dimensions", None)
    if padded_dimensions is None:
        return
    compiled: Any = model._compiled_call_impl  # where `nn.Module.compile` keeps it; there is no public name

    def call(*args: Any, **inputs: Any) -> Any:
        mark_sizes(inputs, padded_dimensions(inputs))
        return compiled(*args, **inputs)

    model._compiled_call_impl = call


def mark_sizes(inputs: Mapping[str, Any], dimensions: Mapping[str, int]) -> None:
    """Mark the rows and lengths of inputs as dynamic for torch.compile; called before each call of the model."""
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            differing = {0, dimensions.get(name, 0)}
            # Public in torch's documentation, under a private module.
            torch._dynamo.maybe_mark_dynamic(value, [each for each in differing if each < value.dim()])
