"""Walk batches and outputs: tensors inside tuples, lists, mappings, dataclasses and named tuples."""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


class UnfinishedBatch(dict[str, Any], ABC):
    """A batch as loader workers send it, whose last step runs on the device.

    Where batches are moved to the device, be it the CPU, `finish` is called on the moved one. Subclasses may have
    attributes.
    """

    @abstractmethod
    def finish(self) -> dict[str, Any]:
        """Return the finished batch, without a device sync."""

    def with_values(self, values: dict[str, Any]) -> UnfinishedBatch:
        """Return the batch with other values."""
        changed = copy.copy(self)
        changed.clear()
        changed.update(values)
        return changed


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return the same structure with the function applied to every tensor; other leaves are kept."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return map_children(value, lambda item: map_tensors(item, function))


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Tensor) or not is_container(value):
        return function(value)
    return map_children(value, lambda item: map_leaves(item, function))


def is_container(value: Any) -> bool:
    """Whether `map_children` goes into a value."""
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_record or isinstance(value, (list, tuple, Mapping))


def iter_tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in iter_leaves(value) if isinstance(leaf, torch.Tensor))


def iter_leaves(value: Any) -> Iterator[Any]:
    """Yield everything in a structure that is no container, in order; nothing is built, which containers may refuse."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from iter_leaves(item)
    elif isinstance(value, (dict, Mapping)):  # whether it is a dict is answered sooner
        for item in value.values():
            yield from iter_leaves(item)
    elif is_container(value):
        for field in dataclasses.fields(value):
            yield from iter_leaves(getattr(value, field.name))
    else:
        yield value


def to_device(value: Any, device: torch.device) -> Any:
    """Return the structure with its tensors on the device, objects through their own `.to`; the same one for the CPU.

    An unfinished batch is finished.
    """
    if isinstance(value, UnfinishedBatch):
        return value.with_values({name: to_device(item, device) for name, item in value.items()}).finish()
    if device.type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if callable(getattr(value, "to", None)):
        return value.to(device)
    return map_children(value, lambda item: to_device(item, device))


def num_rows(batch: Any) -> int:
    """Return the number of samples of a batch: dim 0 of its first tensor, else its length, else 1."""
    for tensor in iter_tensors(batch):
        if tensor.dim():
            return tensor.shape[0]
    if isinstance(batch, (list, tuple)) and batch:
        return len(batch[0]) if isinstance(batch[0], (list, tuple)) else len(batch)
    return 1


def map_children(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a container with the function applied to its children; anything else unchanged."""
    if type(value) is dict:
        return {name: function(item) for name, item in value.items()}
    if isinstance(value, UnfinishedBatch):
        return value.with_values({name: function(item) for name, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(function(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(function(item) for item in value)
    if isinstance(value, Mapping):
        items = {name: function(item) for name, item in value.items()}
        try:
            # Mapping types with their own constructors (transformers' ModelOutput, BatchEncoding) take a dict.
            return type(value)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: function(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value


def remove_padding(padded_tensor: torch.Tensor, pad_value: float) -> torch.Tensor:
    """Return the tensor without the rows (dim 0) all of whose elements equal the value."""
    is_padding = padded_tensor == pad_value
    while is_padding.dim() > 1:
        is_padding = is_padding.all(dim=-1)
    return padded_tensor[~is_padding]
