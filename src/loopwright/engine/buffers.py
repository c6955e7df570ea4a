"""Copies of a model's buffers and attributes at the last update boundary, for a rollback."""

from __future__ import annotations

import copy
import random
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Batch norm changes its buffers without a new `_version`, so small buffers are always copied. Larger ones are masks and
# tables, which rarely change, and would be expensive to copy at every update.
_ALWAYS_COPIED_NUMBERS = 65536
# Attributes of every module, and those with which accelerate and transformers mark what they have done to one.
OF_TORCH = frozenset(vars(nn.Module())) | {"forward", "gradient_checkpointing", "_gradient_checkpointing_func"}
OF_TORCH |= {"_original_forward", "_is_accelerate_prepared", "_output_capturing_hooks_installed"}
_LIBRARIES = frozenset(("torch", "torchvision", "transformers", "peft", "timm", "accelerate", "loopwright"))
# Objects whose state is read and set in place; a checkpoint never creates one.
STATES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    SimpleNamespace: (lambda each: dict(vars(each)), lambda each, state: vars(each).update(state)),
    random.Random: (random.Random.getstate, random.Random.setstate),
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    np.random.Generator: (
        lambda each: each.bit_generator.state,
        lambda each, state: setattr(each.bit_generator, "state", state),
    ),
}
TAG = "kept by loopwright"  # key of a dict that stands for an object
_MUTABLE = frozenset((Tensor, np.ndarray, list, dict, set, deque, *STATES))


def is_of_library(value: Any) -> bool:
    """Whether the class of an object is torch's, ours, or of a library that builds models."""
    return type(value).__module__.partition(".")[0] in _LIBRARIES


class BufferShadow:
    """Copies of the buffers of modules (such as running means), so that an abandoned update leaves no trace.

    It also copies attributes of the user's own modules, and of a loss function that is another object. Modules of
    libraries keep theirs during an update.
    """

    def __init__(self, *modules: Any) -> None:
        parts = [part for module in modules if isinstance(module, nn.Module) for part in module.modules()]
        others = [each for each in modules if hasattr(each, "__dict__") and not isinstance(each, nn.Module)]
        # The dicts that hold them: searching for buffers at every update would cost more than copying them.
        self._held = [vars(part) for part in (*parts, *others) if not is_of_library(part)]
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        places = [(part._buffers, name) for part in parts for name in part._buffers]
        places += [(held, name) for held in self._held for name in held if _is_large(held[name])]
        self._kept = [_Kept(holder, name) for holder, name in places if holder[name] is not None]

    def keep(self) -> None:
        self._attributes = []
        for held in self._held:
            mutable = [name for name in held if type(held[name]) in _MUTABLE and name not in OF_TORCH]
            self._attributes.append((dict(held), {name: _copied(held[name]) for name in mutable}))
        pairs = []
        for one in self._kept:
            buffer = one.holder.get(one.name)
            if buffer is None or one.is_current(buffer):
                continue
            if not _are_alike(one.copy, buffer):
                one.copy = torch.empty_like(buffer)
            pairs.append((one.copy, buffer))
            one.seen, one.version = buffer, buffer._version  # autograd's counter of in-place changes
        _copy(pairs)

    def restore(self) -> None:
        for held, (before, copies) in zip(self._held, self._attributes, strict=False):
            for name in held.keys() - before.keys() - OF_TORCH:
                del held[name]
            held.update({name: before[name] for name in before.keys() - OF_TORCH})
            for name, copied in copies.items():
                held[name] = put(before[name], copied)
        pairs = []
        for one in self._kept:
            buffer = one.holder.get(one.name)
            if buffer is None or one.seen is None or one.is_current(buffer):
                continue
            if not _are_alike(one.copy, buffer):
                buffer = one.holder[one.name] = torch.empty_like(one.copy)
            pairs.append((buffer, one.copy))
        _copy(pairs)


def _copied(value: Any) -> Any:
    """Return a copy of an attribute, without what its items hold; a large tensor itself, which is among the buffers."""
    if isinstance(value, Tensor):
        return value if _is_large(value) else value.detach().clone()
    return state_of(value) if type(value) in STATES else copy.copy(value)


def state_of(value: Any) -> dict[str, Any]:
    """Return the state of an object of `STATES`, for `put`."""
    return {TAG: type(value).__name__, "state": STATES[type(value)][0](value)}


@torch.no_grad()
def put(now: Any, saved: Any) -> Any:
    """Return a saved value, in the object that is there if it is of the same kind, since others may hold it too."""
    if type(saved) is dict and TAG in saved:
        if type(now).__name__ != saved[TAG]:
            raise TypeError("the state is of another object")
        STATES[type(now)][1](now, saved["state"])
        return now
    if isinstance(now, dict) and type(saved) is dict and type(now) in (dict, defaultdict):
        entries = {name: put(now.get(name), value) for name, value in saved.items()}
        now.clear()
        now.update(entries)
        return now
    if now is saved or type(now) is not type(saved):
        return saved
    if isinstance(saved, (Tensor, np.ndarray)) and (now.shape, now.dtype) == (saved.shape, saved.dtype):
        with suppress(RuntimeError, ValueError):  # expanded, or read-only
            now[...] = saved
            return now
    if hasattr(now, "clear"):
        now.clear()
        (now.update if hasattr(now, "update") else now.extend)(saved)
        return now
    return saved


@dataclass
class _Kept:
    holder: dict[str, Any]  # the module's buffers, or attributes, by name
    name: str
    copy: Tensor = field(default_factory=lambda: torch.empty(0))
    seen: Tensor | None = None  # the copied tensor, kept alive so that its id is not reused
    version: int = 0  # its `_version` at that time

    def is_current(self, buffer: Tensor) -> bool:
        """Whether the buffer is certain to be unchanged."""
        return _is_large(buffer) and buffer is self.seen and buffer._version == self.version


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > _ALWAYS_COPIED_NUMBERS


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first, with as few kernels as possible."""
    if not pairs:
        return
    kinds: defaultdict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for target, source in pairs:
        kinds[target.dtype, target.device].append((target, source))
    with torch.no_grad():
        for alike in kinds.values():
            # One kernel for all tensors of a kind.
            torch._foreach_copy_([target for target, _ in alike], [source for _, source in alike])
