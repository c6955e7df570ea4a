"""Batches without padding: the layers of a transformer see the tokens of all rows in one, each row on its own.

The model is called with padded rows as ever, and embeddings, heads and losses see them padded. In front of its first
layer the tokens of all rows are put behind each other, attention stays within each row (`segments`), and after the last
layer they go back to their places. So rows per update, labels and outputs stay as they are. Tokens are filled up with
padding to one of a few numbers, so that there are few shapes: three for each shape of batches.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from loopwright.engine.layers import layer_stacks
from loopwright.engine.modes import evaluating
from loopwright.engine.nested import map_tensors
from loopwright.engine.segments import segment_bounds, stop_segments, use_segments, why_no_segments

_EIGHTHS = (5, 6, 7)  # of a padded batch; with more tokens than that, padding costs less than moving them
# Of the largest output: the padded kernels of half precision and these differ by rounding, a wrong layout by far more.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 2e-2}


def why_padded(model: nn.Module) -> str | None:
    """Return why the rows of a model cannot be unpadded, or None."""
    reason = why_no_segments(model)
    if reason is not None:
        return reason
    stacks = layer_stacks(model)
    if len(stacks) != 1:
        return f"{type(model).__name__} has {len(stacks)} stacks of layers"
    if "attention_mask" not in inspect.signature(type(stacks[0][0]).forward).parameters:
        return f"{type(stacks[0][0]).__name__} takes no attention mask"
    config: Any = model.config
    if getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False):
        return "the model returns hidden states or attentions of all layers"
    return None


def token_budget(batch: Any) -> int | None:
    """Return the number of tokens to run a batch with; None if it stays padded. The batch is still on the host."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_cuda or len(mask) < 2 or mask.is_floating_point():
        return None
    num_tokens = int(mask.count_nonzero())
    return next((budget for budget in _budgets(mask) if num_tokens <= budget < mask.numel()), None)


def usual_budget(mask: Tensor) -> int:
    """Return the middle one of the numbers of tokens that batches with a mask of this size run with."""
    return _budgets(mask)[1]


def _budgets(mask: Tensor) -> list[int]:
    return [-(-mask.numel() * eighths // 64) * 8 for eighths in _EIGHTHS]  # multiples of 8


class JoinedRows:
    """Runs the layers of a model on the tokens of all rows in one, while `running` says so."""

    def __init__(self, model: nn.Module) -> None:
        use_segments(model)
        (layers,) = layer_stacks(model)
        self._layers = layers
        self._signature = inspect.signature(type(layers[0]).forward)
        self._model = model
        self._budget: int | None = None
        self._mask: Tensor | None = None
        self._layout: _Layout | None = None
        self._hooks = [
            model.register_forward_pre_hook(self._before_model, with_kwargs=True),
            *(each.register_forward_pre_hook(self._before_layer, with_kwargs=True) for each in layers),
            layers[-1].register_forward_hook(self._after_layers),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        stop_segments(self._model)

    @contextlib.contextmanager
    def running(self, mask: Tensor | None, budget: int | None) -> Iterator[None]:
        """Run forward and backward of the batch with this mask on so many tokens; None leaves it padded."""
        self._mask, self._budget = mask, budget
        try:
            yield
        finally:
            self._mask = self._budget = self._layout = None

    def is_equal(self, mask: Tensor, budget: int, forward: Callable[[], Tensor], dtype: torch.dtype) -> bool:
        """Whether tokens and the loss, which `forward` returns, are the same without padding, but for rounding.

        `dtype` is that of matrix products: under autocast, layers may return another one.
        """
        found = []
        returned: list[Any] = []  # by the last layer, of which there may be several forward passes
        with self._layers[-1].register_forward_hook(lambda layer, args, output: returned.append(output)):
            for each in (None, budget):
                returned.clear()
                with evaluating(self._model), self.running(mask, each):
                    loss = forward().detach()
                    if not returned or (each is not None and self._layout is None):
                        return False
                    hidden = returned[-1][0] if isinstance(returned[-1], tuple) else returned[-1]
                    found.append((hidden.detach()[mask.bool()], loss))
        tolerance = _TOLERANCES.get(dtype, 1e-4)
        return all(_is_close(padded, own, tolerance) for padded, own in zip(*found, strict=True))

    def _before_model(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._layout = None
        # Of another mask it is not known whether its tokens fit.
        if self._budget is not None and kwargs.get("attention_mask") is self._mask and self._mask is not None:
            self._layout = _Layout(self._mask, self._budget)

    def _before_layer(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        layout = self._layout
        if layout is None:
            return None
        given = self._signature.bind_partial(layer, *args, **kwargs)
        for name, value in given.arguments.items():
            is_first = layer is self._layers[0]
            if name == "self" or (not is_first and value is (args[0] if args else kwargs.get("hidden_states"))):
                continue  # the next layers get what the one before returned
            given.arguments[name] = map_tensors(value, layout.joined)
        given.arguments["attention_mask"] = layout.mask
        if "past_key_values" in given.arguments:
            given.arguments["past_key_values"] = None
        return given.args[1:], given.kwargs

    def _after_layers(self, layer: nn.Module, args: Any, output: Any) -> Any:
        if self._layout is None:
            return None
        is_tuple = isinstance(output, tuple)
        return (self._layout.apart(output[0]), *output[1:]) if is_tuple else self._layout.apart(output)


def _is_close(padded: Tensor, own: Tensor, tolerance: float) -> bool:
    difference, size = (padded - own).float().abs().max(), padded.float().abs().max()
    return bool(difference <= tolerance * size)


class _Layout:
    """Where the tokens of a padded batch are, computed on the device and without a sync."""

    def __init__(self, mask: Tensor, budget: int) -> None:
        rows, self._width = mask.shape
        self._rows = rows
        is_token = mask.bool()
        # All tokens in their order, then as much padding as there is room for.
        self._places = torch.argsort((~is_token).view(-1).to(torch.int8), stable=True)[:budget]
        ends = is_token.sum(1).cumsum(0)
        # Padding has its own segments, none longer than a row: what no segment holds would not be computed at all.
        fillers = torch.arange(1, -(-budget // self._width) + 1, device=mask.device) * self._width + ends[-1]
        bounds = torch.cat([ends.new_zeros(1), ends, fillers.clamp(max=budget)])
        self.mask = segment_bounds(bounds[None], self._width)
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def joined(self, value: Tensor) -> Tensor:
        """Return the tokens of a (rows, width, ...) or (1, width, ...) tensor in one row, and others as they are."""
        if value.dim() < 2 or value.shape[1] != self._width or value.shape[0] not in (1, self._rows):
            return value
        if id(value) not in self._known:
            flat = value.expand(self._rows, *value.shape[1:]).reshape(1, -1, *value.shape[2:])
            # No view of another tensor: the first layer would be compiled apart from those that get no views.
            self._known[id(value)] = (value, flat.index_select(1, self._places))
        return self._known[id(value)][1]

    def apart(self, value: Tensor) -> Tensor:
        """Return the rows again, with zeros where padding was left out."""
        rows = value.new_zeros(self._rows * self._width, *value.shape[2:])
        return rows.index_copy(0, self._places, value[0]).view(self._rows, self._width, *value.shape[2:])
