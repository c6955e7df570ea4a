"""Attention without a mask for batches without padding, also in graphs: it takes the flash kernel.

transformers leaves a mask out if every token is real. While something is recorded it cannot ask the device, and builds
one, for which attention has slower kernels, even for images, which have none. The host knows: the model gets ones in
the place of its mask, they are recognized where masks are built, and transformers decides as it does outside recordings
for a batch without a mask.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from loopwright.engine.graphs import as_if_capturing
from loopwright.engine.segments import NAME, why_no_segments


def is_full(batch: Any) -> bool:
    """Whether a batch on the host has an attention mask of ones alone."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_cuda or mask.is_floating_point():
        return False
    return bool(mask.all())


def leaves_masks_out(model: Any) -> bool:
    """Whether `masks_left_out` does something for a model: it is one of transformers, or holds one."""
    return "transformers" in sys.modules and any(hasattr(each, "set_attn_implementation") for each in model.modules())


def recognizes_ones(model: Any) -> bool:
    """Whether `masks_left_out` leaves a mask of ones out, not only one that does not exist."""
    return why_no_segments(model) is None and "attention_mask" in inspect.signature(type(model).forward).parameters


@contextmanager
def masks_left_out(model: Any, mask: Tensor | None) -> Iterator[None]:
    """Run a block in which a model attends without a mask if it is called with this one, of ones, or with None."""
    transformers: Any = sys.modules["transformers"]  # the model comes from there
    masks: Any = transformers.AttentionMaskInterface
    creates = {name: masks()[name] for name in ("sdpa", NAME) if name in masks()}
    ones: list[Tensor] = []  # what the model got last
    names = list(inspect.signature(type(model).forward).parameters)[1:]

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        ids = given.get("input_ids")
        if given.get("attention_mask") is not mask or ids is None or ids.dim() != 2:
            return None
        # Positions may begin again, as in packed rows, and a cache may hold more tokens.
        if mask is None and any(given.get(each) is not None for each in ("position_ids", "past_key_values")):
            return None
        # Of the type that masks are turned into, so it arrives as it is.
        ones[:] = [torch.ones(ids.shape, dtype=torch.bool, device=ids.device)]
        return (), given | {"attention_mask": ones[0]}

    def created(create: Any, *args: Any, attention_mask: Tensor | None = None, **options: Any) -> Any:
        is_of_ones = bool(ones) and attention_mask is not None and attention_mask.is_set_to(ones[0])
        if torch.compiler.is_compiling() or (attention_mask is not None and not is_of_ones):
            return create(*args, attention_mask=attention_mask, **options)
        with as_if_capturing(False):
            return create(*args, attention_mask=None, **options)

    for name, create in creates.items():
        masks.register(name, partial(created, create))
    try:
        with model.register_forward_pre_hook(before, with_kwargs=True) if recognizes_ones(model) else nullcontext():
            yield
    finally:
        for name, create in creates.items():
            masks.register(name, create)
