"""The repeated layers of a model, found by its structure."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def layer_stacks(model: nn.Module) -> list[list[nn.Module]]:
    """Return the lists of two or more layers of one class, outermost first; lists within layers are left out."""
    return list(_stacks(model))


def _stacks(module: nn.Module) -> Iterator[list[nn.Module]]:
    for child in module.children():
        layers = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        is_stack = len(layers) > 1 and len({type(each) for each in layers}) == 1 and any(layers[0].children())
        if is_stack:
            yield layers
        else:
            yield from _stacks(child)
