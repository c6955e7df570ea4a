"""The repeated layers of a model, found by its structure, and whether a model ever skips some."""

from __future__ import annotations

from torch import nn


def layer_stacks(model: nn.Module) -> list[list[nn.Module]]:
    """Return the lists of two or more layers of one class, outermost first; lists within layers are left out."""
    stacks: list[list[nn.Module]] = []
    for child in model.children():
        layers = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        is_stack = len(layers) > 1 and len({type(each) for each in layers}) == 1 and any(layers[0].children())
        stacks += [layers] if is_stack else layer_stacks(child)
    return stacks


def num_idle_draws(model: nn.Module) -> int:
    """Return how many random numbers a forward pass draws for nothing, as models of transformers with LayerDrop do.

    They draw one for each layer in training, also if `layerdrop` is 0, as it mostly is, and no layer is ever skipped.
    """
    droppers = [each for each in model.modules() if hasattr(each, "layerdrop")]
    if any(each.layerdrop for each in droppers):
        return 0
    stacks = [getattr(each, "layers", None) for each in droppers]
    return sum(len(each) for each in stacks if isinstance(each, nn.ModuleList))
