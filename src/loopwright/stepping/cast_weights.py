"""Copies of linear weights in bfloat16, which graphs read instead of casting each weight in every forward pass.

Autocast casts a weight at its first use in a forward pass, shares the result among its uses, and casts the sum of their
gradients back to float32. With copies an update does the same with the same bits, but fills all copies in one go before
its first micro-batch. It fills them in every update, whether a weight has changed or not: a replayed graph, a fused
optimizer and `weight.data` change weights without a new `_version`.

Autocast stays in charge wherever this would not be the same: outside the model's own forward pass, in an autocast
context inside another one, without autocast's cache, in compiled models, and for everything but `nn.functional.linear`
with the parameters of an `nn.Linear` in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class CastWeights:
    """The copies of a model's linear weights and biases; `substituted` makes its forward pass read them."""

    def __init__(self, model: nn.Module) -> None:
        linear = [part for part in model.modules() if isinstance(part, nn.Linear)]
        weights = {id(each): each for part in linear for each in part.parameters(recurse=False)}
        self._weights = {key: each for key, each in weights.items() if each.dtype == torch.float32}
        self._copies: dict[int, Tensor] = {}
        self._model = model
        self._shared: dict[int, Tensor] | None = None  # of the current forward pass

    @torch.no_grad()
    def refresh(self) -> None:
        """Fill the copies, which are created at the first call."""
        if not self._copies:
            self._copies = {key: torch.empty_like(each, dtype=torch.bfloat16) for key, each in self._weights.items()}
        if self._copies:
            # One kernel for all tensors.
            torch._foreach_copy_(list(self._copies.values()), list(self._weights.values()))

    @contextmanager
    def substituted(self) -> Iterator[None]:
        hooks = [
            self._model.register_forward_pre_hook(lambda *_: self._begin()),
            self._model.register_forward_hook(lambda *_: self._end(), always_call=True),
        ]
        try:
            with _LinearMode(self.of):
                yield
        finally:
            self._end()
            for hook in hooks:
                hook.remove()

    def _begin(self) -> None:
        self._shared = {}

    def _end(self) -> None:
        self._shared = None

    def of(self, weight: Any) -> Any:
        """Return the copy of a weight, through which gradients reach it; anything else unchanged."""
        copy = self._copies.get(id(weight))
        if copy is None or self._shared is None or not _is_cast(weight.device.type):
            return weight
        if id(weight) not in self._shared:
            self._shared[id(weight)] = _Cast.apply(weight, copy)  # type: ignore[no-untyped-call]
        return self._shared[id(weight)]


def _is_cast(kind: str) -> bool:
    """Whether autocast would cast a weight to bfloat16 now, and share the result until the forward pass is over."""
    is_outermost = torch.autocast_increment_nesting() == 2
    torch.autocast_decrement_nesting()
    is_shared = is_outermost and torch.is_autocast_cache_enabled()
    return is_shared and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16


class _LinearMode(TorchFunctionMode):
    def __init__(self, of: Callable[[Any], Any]) -> None:
        super().__init__()
        self._of = of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            args = tuple(map(self._of, args))
            kwargs = {name: self._of(value) for name, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


class _Cast(torch.autograd.Function):
    """The cast of a weight whose result is known; its gradient is that of the cast."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(torch.float32), None
