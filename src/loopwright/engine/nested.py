"""Walk batches and outputs: tensors inside tuples, lists, mappings, dataclasses and named tuples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return the same structure with the function applied to every tensor; other leaves are kept."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function) for item in value)
    if isinstance(value, Mapping):
        return _rebuilt(value, {name: map_tensors(item, function) for name, item in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_tensors(getattr(value, f.name), function) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value


def iter_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a structure, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from iter_tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from iter_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from iter_tensors(getattr(value, field.name))


def to_device(value: Any, device: torch.device) -> Any:
    """Return the structure with its tensors on the device; objects with a `.to` of their own are asked.

    Batches are made on the host, so for a CPU device there is nothing to do.
    """
    if device.type == "cpu":
        return value
    if not isinstance(value, (torch.Tensor, list, tuple, dict)) and hasattr(value, "to"):
        return value.to(device)
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))


def num_rows(batch: Any) -> int:
    """Return how many samples a batch holds: dim 0 of its first tensor, else its length, else 1."""
    for tensor in iter_tensors(batch):
        if tensor.dim():
            return tensor.shape[0]
    if isinstance(batch, (list, tuple)) and batch:
        return len(batch[0]) if isinstance(batch[0], (list, tuple)) else len(batch)
    return 1


def _rebuilt(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    # Mapping types with constructors of their own (transformers' ModelOutput, BatchEncoding) take a dict.
    if type(original) is dict:
        return items
    try:
        return type(original)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def remove_padding(padded_tensor: torch.Tensor, pad_value: float) -> torch.Tensor:
    """Return the tensor without the rows (dim 0) all of whose elements equal the value."""
    is_padding = (padded_tensor == pad_value).reshape(padded_tensor.shape[0], -1).all(dim=1)
    return padded_tensor[~is_padding]
