"""What the host reads while an update is recorded, and its replays do not: attributes, hooks, where weights lie.

A replay runs no Python. So if any of this changes between two updates, graphs have to be recorded again; and a forward
pass that changes what the next one reads cannot be recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from operator import getitem, is_
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from loopwright.engine.buffers import STATES
from loopwright.engine.nested import iter_leaves

_MOST_ENTRIES = 1000  # of a dict or list of a module; larger ones are data
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_ABSENT = object()
HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
_OF_TORCH = vars(nn.Module()).keys() - HOOKS - {"training", "_parameters", "_buffers", "_modules"}


class HostState:
    """What models, loss functions and optimizers hold at one time, and where their weights lie."""

    def __init__(self, owners: Iterable[Any], weights: Iterable[Tensor]) -> None:
        places = list(_places(owners))
        self._empty = [held for _, held in places if not held]
        self._kept = [(place, held, len(held), _entries(held)) for place, held in places if held]
        # All of them in one go: this is asked before every replay.
        entries = [(held, name, value) for _, held, _, before in self._kept for name, value in before.items()]
        self._flat = [*zip(*(each for each in entries if each[0][each[1]] is each[2]), strict=True)]
        self._content = [each for each in entries if each[0][each[1]] is not each[2]]
        self._weights = list(weights)
        self._pointers = _pointers(self._weights)

    def _is_untouched(self) -> bool:
        """Whether everything is certain to be the same object as then."""
        if not self._flat or any(self._empty) or any(len(held) != length for _, held, length, _ in self._kept):
            return False
        helds, names, values = self._flat
        with suppress(LookupError):
            is_same = all(map(is_, map(getitem, helds, names), values))
            return is_same and all(_is_equal(_value(held[name]), value) for held, name, value in self._content)
        return False

    def changes(self) -> Iterator[tuple[str, Any]]:
        """Yield the place of everything that is another object than then, "" if it is new, and its value of now."""
        for place, held, length, before in () if self._is_untouched() else self._kept:
            get = held.get if isinstance(held, dict) else held.__getitem__
            if len(held) == length and all(map(is_, map(get, before), before.values())):
                continue
            now = _entries(held)
            for name in {**before, **now}:
                if not _is_equal(now.get(name), before.get(name, _ABSENT)):
                    yield (f"{place}.{name}" if name in before else ""), now.get(name)
        for held in filter(None, self._empty):
            yield from (("", value) for value in _entries(held).values())

    def has_changed(self, ignored: set[str]) -> bool:
        """Whether something has changed but for these places; tensors that are new, in a cache, do not count."""
        if _pointers(self._weights) != self._pointers:
            return True
        return any(
            place not in ignored if place else not any(isinstance(leaf, Tensor) for leaf in iter_leaves(value))
            for place, value in self.changes()
        )

    def restore(self) -> None:
        """Put back the numbers and texts inside of attributes; those of modules themselves are in a `BufferShadow`."""
        for place, held, length, before in self._kept:
            if "." in place and len(held) == length:
                for name, value in before.items():
                    if isinstance(value, _PLAIN):
                        held[name] = value

    def why_not_repeated(self) -> str | None:
        """Return why a pass that has been run since cannot be repeated without the host, or None."""
        for place, value in self.changes():
            # A tensor with a gradient is of this pass alone: the next one could not run backward through it.
            if any(not isinstance(leaf, Tensor) or leaf.grad_fn is None for leaf in iter_leaves(value)):
                return f"the forward pass changes {place or 'attributes'} on the host, and a graph would not"
        return None


def _places(owners: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield every dict and list to compare: those of modules and of what they hold, and an optimizer's state."""
    seen: set[int] = set()
    for owner in owners:
        if isinstance(owner, torch.optim.Optimizer):
            yield from (("the optimizer's state", each) for each in (owner.state, *owner.state.values()))
        elif hasattr(owner, "__dict__"):
            for part in owner.modules() if isinstance(owner, nn.Module) else [owner]:
                kind = type(part).__name__
                yield kind, vars(part)
                for name, value in vars(part).items():
                    if name not in _OF_TORCH:
                        yield from _inner(f"{kind}.{name}", value, seen)


def _inner(place: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    held = _held(value)
    if held is not None and id(held) not in seen:
        seen.add(id(held))
        yield place, held
        for name, each in held.items() if isinstance(held, dict) else enumerate(held):
            if isinstance(each, (dict, list)):
                yield from _inner(f"{place}.{name}", each, seen)


def _held(value: Any) -> Any:
    """Return the entries of an attribute, or None if it has none, or too many."""
    held = value if isinstance(value, (dict, list)) else None if callable(value) else getattr(value, "__dict__", None)
    return None if held is None or isinstance(value, Tensor) or len(held) > _MOST_ENTRIES else held


def _entries(held: Any) -> dict[Any, Any]:
    entries = dict(enumerate(held)) if isinstance(held, list) else held
    return {name: _value(value) for name, value in entries.items() if name not in _OF_TORCH}


def _value(value: Any) -> Any:
    """Return what is compared: of a random generator its state, of other objects that change in place their content."""
    if isinstance(value, np.ndarray):
        return value.tolist() if value.size <= _MOST_ENTRIES else value
    if isinstance(value, (set, deque)) and len(value) <= _MOST_ENTRIES:
        return list(value) if all(isinstance(each, _PLAIN) for each in value) else value
    if type(value) not in STATES or type(value) is SimpleNamespace:
        return value
    state = STATES[type(value)][0](value)
    return state.tolist() if isinstance(state, Tensor) else state


def _pointers(weights: list[Tensor]) -> list[Any]:
    """Return where weights lie, and what is called for their gradients."""
    return [(each.data_ptr(), *hooks_of(each)) for each in weights]


def hooks_of(weight: Tensor) -> tuple[int, ...]:
    """Return the numbers of the hooks of a weight's gradient."""
    # Registered by public methods, but listed only there.
    return (*(weight._backward_hooks or ()), *(getattr(weight, "_post_accumulate_grad_hooks", None) or ()))


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two values are one object, or alike and plain."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    return all(isinstance(leaf, _PLAIN) for leaf in (*iter_leaves(one), *iter_leaves(other))) and bool(one == other)
