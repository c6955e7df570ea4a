"""Models compiled by torch.compile: once for all lengths of their inputs and numbers of rows, not once for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def compile_model(model: nn.Module, collate: Any = None, **options: Any) -> None:
    """Compile what a model does when it is called; `model._compiled_call_impl = None` undoes it.

    Lengths that a collator pads to are taken as they come, from the first batch on, and so are rows: the last batch may
    be short. Without that, torch compiles for the first shape alone, and again when it sees another one.

    Args:
        model: is changed in place.
        collate: of the training data. It has to have `padded_dimensions`, which says by name what dimension of an input
            is a length; of any other one nothing is known, and nothing is marked.
        options: of `torch.compile`.
    """
    model.compile(**options)
    padded_dimensions = getattr(collate, "padded_dimensions", None)
    if padded_dimensions is None:
        return
    compiled: Any = model._compiled_call_impl

    def call(*args: Any, **inputs: Any) -> Any:
        mark_sizes(inputs, padded_dimensions(inputs))
        return compiled(*args, **inputs)

    model._compiled_call_impl = call


def mark_sizes(inputs: Mapping[str, Any], dimensions: Mapping[str, int]) -> None:
    """Tell torch.compile which dimensions of inputs are rows and lengths; called before each call of a compiled model.

    Where a model needs a fixed size all the same, it is compiled for it: a mark is no promise.
    """
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            differing = {0, dimensions.get(name, 0)}
            torch._dynamo.maybe_mark_dynamic(value, [each for each in differing if each < value.dim()])
