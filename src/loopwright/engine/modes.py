"""Training and evaluation modes of modules, which a user may have set one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def kept_modes(model: Any) -> Iterator[None]:
    """Put each module of a model back into its own mode after the block."""
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, nn.Module) else []
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a model into evaluation mode, and each of its modules back into its own mode afterwards."""
    with kept_modes(model):
        model.eval()
        yield
