"""Copies of linear weights in bfloat16, which graphs read instead of casting each weight in every forward pass.

Autocast casts a weight at its first use in a forward pass, shares the result among its uses, and casts the sum of their
gradients back to float32. With copies an update does the same with the same bits, but fills all copies in one go before
its first micro-batch, and casts their gradients in groups during the backward pass: a few kernels instead of two for
each weight. Copies are filled in every update, whether a weight has changed or not: a replayed graph, a fused optimizer
and `weight.data` change weights without a new `_version`.

Autocast stays in charge wherever this would not be the same: outside the model's own forward pass, in an autocast
context inside another one, without autocast's cache, in compiled models, and for everything but `nn.functional.linear`
with the parameters of an `nn.Linear` in float32. A gradient that does not come through the copy alone is cast where
autograd would cast it (`_Cast`): of a weight that something else than linear layers holds or that has hooks, and in
further forward passes of the same micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loopwright.engine.host_state import hooks_of
from loopwright.engine.temporary import replaced

_GROUP_BYTES = 32 * 1024 * 1024  # of gradients that are cast by one kernel; until then they take memory twice


class CastWeights:
    """The copies of a model's linear weights and biases; `substituted` makes a micro-batch read them.

    Args:
        model: whose weights are copied.
        is_joint: the gradients of copies are cast in groups, because one backward pass of a micro-batch makes them all.
        by_attribute: linear layers hold the copies during the micro-batch, so that compiled layers find them.
    """

    def __init__(self, model: nn.Module, *, is_joint: bool = True, by_attribute: bool = False) -> None:
        linear = [part for part in model.modules() if isinstance(part, nn.Linear)]
        others = [part for part in model.modules() if not isinstance(part, nn.Linear)]
        weights = {id(each): each for part in linear for each in part.parameters(recurse=False)}
        elsewhere = {id(each) for part in others for each in part.parameters(recurse=False)}
        self._weights = {key: each for key, each in weights.items() if each.dtype == torch.float32}
        self._copies: dict[int, Tensor] = {}
        self._joint = self._weights.keys() - elsewhere if is_joint else set()
        self._model = model
        self._linear = linear if by_attribute else []
        self._held = ExitStack()  # holds the copies in the linear layers
        self._shared: dict[int, Tensor] | None = None  # of the current forward pass
        self._is_first = True
        self._waiting: list[int] = []  # whose gradients are to be cast

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
        """Run forward and backward of a micro-batch with the copies."""
        joint = [key for key in self._joint if self._weights[key].requires_grad and not hooks_of(self._weights[key])]
        for key in joint:
            self._copies[key].requires_grad_()  # a leaf: backward leaves its gradient there
        # Gradients of earlier micro-batches: what this one adds to them is one number per element, as in autograd.
        earlier = {key: self._weights[key].grad for key in joint}
        for key in joint:
            self._weights[key].grad = None
        hooks = [
            self._model.register_forward_pre_hook(lambda *_: self._begin()),
            self._model.register_forward_hook(lambda *_: self._end(), always_call=True),
            *(self._copies[key].register_post_accumulate_grad_hook(partial(self._collect, key)) for key in joint),
        ]
        self._is_first = True
        try:
            with nullcontext() if self._linear else _LinearMode(self.of):
                yield
            self._cast_gradients()
        finally:
            self._end()
            self._waiting = []
            for hook in hooks:
                hook.remove()
            self._add_to(earlier)
            for key in joint:
                self._copies[key].grad = None
                self._copies[key].requires_grad_(False)

    def _begin(self) -> None:
        self._shared = {}
        for part in self._linear:
            weights = part.named_parameters(recurse=False)
            copies = {name: self._copy_of(weight) for name, weight in weights if id(weight) in self._weights}
            self._held.enter_context(replaced(vars(part), copies))  # found before the parameters, which stay registered

    def _end(self) -> None:
        if self._shared is not None:
            self._held.close()
            self._shared, self._is_first = None, False

    def of(self, weight: Any) -> Any:
        """Return the copy of a weight, through which gradients reach it; anything else unchanged."""
        if id(weight) not in self._copies or self._shared is None or not _is_cast(weight.device.type):
            return weight
        return self._copy_of(weight)

    def _copy_of(self, weight: Tensor) -> Tensor:
        copy = self._copies[id(weight)]
        if self._is_first and copy.requires_grad:
            return copy
        assert self._shared is not None
        if id(weight) not in self._shared:
            self._shared[id(weight)] = _Cast.apply(weight, copy.detach())  # type: ignore[no-untyped-call]
        return self._shared[id(weight)]

    def _collect(self, key: int, copy: Tensor) -> None:
        """Note that a copy has its gradient; cast those that wait once they are a group."""
        self._waiting.append(key)
        if sum(self._copies[each].nbytes for each in self._waiting) >= _GROUP_BYTES:
            self._cast_gradients()

    @torch.no_grad()
    def _cast_gradients(self) -> None:
        targets, sources = [], []
        for key in self._waiting:
            weight, copy = self._weights[key], self._copies[key]
            gradient, copy.grad = copy.grad, None
            assert gradient is not None
            if weight.grad is not None:  # the loss uses the weight itself too
                weight.grad += gradient
            else:
                weight.grad = torch.empty_like(weight)
                targets.append(weight.grad)
                sources.append(gradient)
        self._waiting = []
        if targets:
            torch._foreach_copy_(targets, sources)  # one kernel, as above

    @torch.no_grad()
    def _add_to(self, earlier: dict[int, Tensor | None]) -> None:
        sums = []
        for key, before in earlier.items():
            weight = self._weights[key]
            if before is not None:
                if weight.grad is not None:
                    sums.append((before, weight.grad))
                weight.grad = before
        if sums:
            # Also in bfloat16 and float32 at once.
            torch._foreach_add_([before for before, _ in sums], [added for _, added in sums])


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
