"""The loss of a micro-batch, and its number of items.

`compute_loss` always returns a mean over the items of its own micro-batch; the core weights the means of an update by
their items. No signature is used to guess whether a model already divides its loss. `num_items_in_batch` counts this
micro-batch alone, so a plain mean equals `sum / num_items_in_batch`. It is never passed to the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from loopwright.engine.modes import evaluating
from loopwright.errors import BatchLossError, DataError

IGNORED = -100
_CAUSAL_LOSS = "ForCausalLMLoss"
_CAUSAL_NAMES = ("ForCausalLM", "LMHeadModel", "DoubleHeadsModel")


def base_model(model: Any) -> Any:
    """Return the model inside an adapter (peft) or a compiled wrapper, whose forward has the real signature."""
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    get_base = getattr(model, "get_base_model", None)
    return get_base() if callable(get_base) else model


def forward_parameters(model: Any) -> list[str]:
    """Return the names of the parameters of the model's forward; empty if it takes anything."""
    parameters = inspect.signature(base_model(model).forward).parameters.values()
    return [each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]


def find_label_names(model: Any) -> list[str]:
    """Return the parameters of the model's forward that are labels, by their names."""
    names, span = forward_parameters(model), ["start_positions", "end_positions"]
    return [name for name in names if "label" in name] + (span if set(span) <= set(names) else [])


def can_return_loss(model: Any) -> bool:
    """Whether the model returns a loss without labels (contrastive models do with `return_loss=True`)."""
    parameter = inspect.signature(base_model(model).forward).parameters.get("return_loss")
    return parameter is not None and parameter.default is True


class ItemCounter:
    """Counts the items of a batch's mean loss: the labels that the loss uses.

    Labels are integers, and -100 is ignored. A next-token loss also skips the first label of every row. Labels of
    another kind are counted by rows (None). The loss function of a transformers model usually reveals whether it
    shifts; otherwise the loss and logits of the first batch decide, if the loss is the model's own.
    """

    def __init__(self, model: nn.Module, uses_model_loss: bool) -> None:
        self._model, self._uses_model_loss = model, uses_model_loss
        base = base_model(model)
        config = getattr(base, "config", None)
        self._ignored_pixel = getattr(config, "semantic_loss_ignore_index", IGNORED)
        self._shifts: bool | None = None
        if getattr(config, "is_encoder_decoder", False):
            self._shifts = False
        elif getattr(base, "loss_type", None) is not None:  # the fallback is the causal loss, but few models use it
            self._shifts = getattr(base.loss_function, "__name__", "") == _CAUSAL_LOSS

    def count(self, batch: Any) -> Tensor | None:
        """Return the number of items of a batch, on its device; None if they are its rows."""
        if not isinstance(batch, Mapping):
            return None
        labels = batch.get("shift_labels", batch.get("labels"))
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
            return None
        if labels.dim() == 2 and "shift_labels" not in batch and self._loss_shifts(batch):
            labels = labels[..., 1:]
        is_used: Tensor = labels != (self._ignored_pixel if labels.dim() == 3 else IGNORED)
        return is_used.sum()

    def shifts_labels(self) -> bool:
        """Whether labels are next tokens, as far as is known."""
        return bool(self._shifts)

    def _loss_shifts(self, batch: Mapping[str, Any]) -> bool:
        if self._shifts is None and self._uses_model_loss:
            self._shifts = self._compare_losses(batch)
        if self._shifts is None:
            self._shifts = type(base_model(self._model)).__name__.endswith(_CAUSAL_NAMES)
        return self._shifts

    def _compare_losses(self, batch: Mapping[str, Any]) -> bool | None:
        """Compare a batch's loss with its logits' loss, shifted and unshifted; None if inconclusive."""
        parameter = next(self._model.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        with evaluating(self._model), torch.no_grad():
            outputs = self._model(**inputs)
        loss, logits = found_loss(outputs), found_logits(outputs)
        labels = inputs["labels"]
        if loss is None or not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
            return None
        plain = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        shifted = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return bool((loss - shifted).abs() < (loss - plain).abs())


def found_loss(outputs: Any) -> Any:
    """Return the loss in a model's outputs: its key or attribute, or the first of a tuple; None without one."""
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    if isinstance(outputs, (tuple, list)):
        return outputs[0] if outputs and isinstance(outputs[0], Tensor) and outputs[0].dim() == 0 else None
    return getattr(outputs, "loss", None)


def found_logits(outputs: Any) -> Any:
    """Return the logits in a model's outputs, or None."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits")
    if isinstance(outputs, (tuple, list)):
        rest = outputs[1:] if found_loss(outputs) is not None else outputs
        return rest[0] if rest else None
    return outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)


@dataclass(frozen=True)
class LabelSmoother:
    """Cross entropy that spreads a share `epsilon` of each label evenly over all classes; -100 is ignored.

    With several labels per sample, each is a choice of two classes: yes and no.
    """

    epsilon: float

    def __call__(self, model_output: Any, labels: Tensor, shift_labels: bool = False) -> Tensor:
        """Return the loss of a model's outputs; with `shift_labels` each position predicts the next label."""
        logits = found_logits(model_output)
        if logits is None:
            raise BatchLossError("label_smoothing_factor needs logits, and the model's outputs have none")
        if labels.is_floating_point() and labels.shape == logits.shape:  # several labels, each yes or no
            targets = labels * (1 - self.epsilon) + self.epsilon / 2
            return functional.binary_cross_entropy_with_logits(logits.float(), targets.float())
        if shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        scores = logits.float().reshape(-1, logits.shape[-1])
        return functional.cross_entropy(scores, labels.reshape(-1), ignore_index=IGNORED, label_smoothing=self.epsilon)


def names_in(function: Any) -> tuple[str, ...]:
    """Return the names of attributes and globals that a function's code reads."""
    return getattr(getattr(inspect.unwrap(function), "__code__", None), "co_names", ())


class LossCall:
    """Calls a `compute_loss` with the arguments it takes: old ones take two, or no `num_items_in_batch`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        parameters = inspect.signature(function).parameters
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        self._takes_outputs = takes_all or "return_outputs" in parameters
        self._takes_items = takes_all or "num_items_in_batch" in parameters

    def __call__(self, model: Any, inputs: Any, items: Any, wants_outputs: bool = False) -> tuple[Tensor, Any]:
        """Return the loss, and the outputs if they were requested and the function returns them."""
        kwargs: dict[str, Any] = {"num_items_in_batch": items} if self._takes_items else {}
        if wants_outputs and self._takes_outputs:
            kwargs["return_outputs"] = True
        result = self.function(model, inputs, **kwargs)
        if isinstance(result, (tuple, list)):
            return result[0], result[1] if len(result) > 1 else None
        return result, None


def missing_loss(outputs: Any, inputs: Mapping[str, Any], label_names: list[str], dataset: Any) -> BatchLossError:
    """Return the error for a model without a loss: its inputs, its outputs, and the unused columns of the data."""
    given = ", ".join(map(str, outputs)) if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
    has_samples = hasattr(dataset, "__getitem__") and isinstance(dataset, Sized) and len(dataset) > 0
    sample = dataset[0] if has_samples else {}
    if not isinstance(sample, Mapping):
        sample = {}
    unused = [str(name) for name in sample if name not in inputs and name not in ("label", "label_ids")]
    texts = [name for name in ("label", "labels", "label_ids") if isinstance(sample.get(name), str)]
    if texts:
        advice = (
            f"The column {texts[0]} holds text ({sample[texts[0]]!r}), which cannot be a label: encode it as whole "
            f"numbers, for example with dataset.class_encode_column({texts[0]!r})."
        )
    elif not label_names:
        advice = "Its forward takes no labels: override compute_loss, or pass compute_loss_func."
    else:
        others = f" (the data also has {', '.join(unused)})" if unused else ""
        advice = (
            f"It computes one when it is given {' and '.join(label_names)}: rename the column that holds them{others}; "
            "or override compute_loss, or pass compute_loss_func."
        )
    inputs_given = ", ".join(inputs) or "nothing"
    return BatchLossError(
        f"the model returned no loss: it was given {inputs_given} and returned {given or 'nothing'}. {advice}"
    )


def unexpected_inputs(model: Any, inputs: Any) -> DataError | None:
    """Return the error for batch keys that the model's forward does not take; None if it takes all."""
    parameters = inspect.signature(base_model(model).forward).parameters.values()
    if not isinstance(inputs, Mapping) or any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    names = [each.name for each in parameters]
    unexpected = [str(name) for name in inputs if name not in names]
    if not unexpected:
        return None
    return DataError(
        f"the batch has {', '.join(unexpected)}, which {type(base_model(model)).__name__}.forward does not take; it "
        f"takes {', '.join(names) or 'nothing'}. Add it to the forward (one that is given labels returns a loss), or "
        "pass compute_loss_func(outputs, labels), or override compute_loss."
    )
