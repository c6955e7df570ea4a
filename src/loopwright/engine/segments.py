"""Attention within the segments of a row: packed sequences, or the rows of a batch without their padding.

Models of transformers call their attention by a name. `use_segments` sets that name to this module's `attention`, which
is `sdpa` until the mask says where segments begin: a mask of `segment_bounds` is a (rows, 1, longest, bounds) tensor of
int32, with the bounds of each row's segments in its last dimension, the row's length included. The two in the middle
are there because models pass masks of four dimensions on as they are; `longest` is the length of the longest segment
possible. Half precision on CUDA, by autocast or not, takes the flash kernel for variable lengths, anything else a mask
made of the bounds.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

NAME = "loopwright_segments"
_HALVES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256  # of the flash kernel, in steps of 8


def segment_bounds(bounds: Tensor, longest: int) -> Tensor:
    """Return the attention mask for bounds of shape (rows, number); equal neighbours are segments without a token."""
    return bounds.to(torch.int32)[:, None, None, :].expand(-1, 1, longest, -1)


def why_no_segments(model: Any) -> str | None:
    """Return why a model cannot attend within segments, or None."""
    if "transformers" not in sys.modules or not hasattr(model, "set_attn_implementation"):
        return f"{type(model).__name__} is not a model of transformers 5"
    # transformers has no public names for what a model supports, nor for the attention that it uses.
    if not getattr(model, "_supports_flash_attn", False) or not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} does not take flash attention"
    if model.config.is_encoder_decoder:
        return f"{type(model).__name__} has cross-attention"
    used = model.config._attn_implementation  # also without a public name
    return None if used in ("sdpa", NAME) else f"its attention is set to {used!r}"


def use_segments(model: Any) -> None:
    """Let a model take masks of `segment_bounds`; with other masks it computes what it did before."""
    transformers: Any = sys.modules["transformers"]  # the model comes from there
    functions, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    functions.register(NAME, partial(attention, functions()["sdpa"]))
    masks.register(NAME, masks()["sdpa"])
    model.set_attn_implementation(NAME)


def has_segments(model: Any) -> bool:
    """Whether a model takes masks of `segment_bounds`."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == NAME


def stop_segments(model: Any) -> None:
    model.set_attn_implementation("sdpa")


def attention(
    sdpa: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> Any:
    """Attend as transformers' interface asks: from (rows, heads, tokens, size) to (rows, tokens, heads, size)."""
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return sdpa(module, query, key, value, attention_mask, **options)
    is_causal = options.pop("is_causal", None)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = options.pop("sliding_window", None)
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    if _is_for_flash(query, dtype, options):
        # Norms and positions may give 32 bits; autocast casts for sdpa, but not for this kernel.
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        dropout, scaling = options.get("dropout", 0.0), options.get("scaling")
        return _flash(query, key, value, attention_mask, dropout, scaling, is_causal, window), None
    mask = _mask(attention_mask, query.shape[2], is_causal, window)
    return sdpa(module, query, key, value, mask, **options)


def _is_for_flash(query: Tensor, dtype: torch.dtype, options: dict[str, Any]) -> bool:
    is_head = query.shape[-1] % 8 == 0 and query.shape[-1] <= _LARGEST_HEAD
    return query.is_cuda and dtype in _HALVES and is_head and options.get("softcap") is None


def _flash_kernel() -> Any:
    return torch.ops.aten._flash_attention_forward  # torch's own function for segments takes no dropout


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    dropout: float,
    scaling: float | None,
    is_causal: bool,
    window: int | None,
) -> Tensor:
    rows, heads, tokens, size = query.shape
    joined = bounds[:, 0, 0, :]
    if rows > 1:  # rows follow each other; a row ends where the next one begins
        joined = joined + torch.arange(rows, device=bounds.device, dtype=torch.int32)[:, None] * tokens
    joined = joined.reshape(-1)
    # The kernel takes fewer heads of keys than of queries as they are.
    flat = [each.transpose(1, 2).reshape(rows * tokens, -1, size) for each in (query, key, value)]
    longest = bounds.shape[2]
    before = None if window is None else window - 1
    reach = {"window_size_left": before, "window_size_right": 0 if is_causal and window is not None else before}
    sizes = (joined, joined, longest, longest)
    output = _flash_kernel()(*flat, *sizes, dropout, is_causal, False, scale=scaling, **reach)[0]
    return output.view(rows, tokens, heads, size)  # type: ignore[no-any-return]


def _mask(bounds: Tensor, tokens: int, is_causal: bool, window: int | None) -> Tensor:
    places = torch.arange(tokens, device=bounds.device)
    # How many bounds are at or before a token is the number of its segment.
    numbers = (bounds[:, 0, 0, :, None] <= places).sum(1)
    may_look = numbers[:, None, :, None] == numbers[:, None, None, :]
    distance = places[:, None] - places[None, :]
    if is_causal:
        may_look = may_look & (distance >= 0)
    return may_look if window is None else may_look & (distance.abs() < window)
