"""The loss of a micro-batch and how many items it is a mean of.

`compute_loss` always returns a mean over the items of its own micro-batch; the core weighs the means of an update by
their items. Whether a model divides its loss already is never guessed from a signature: `num_items_in_batch` is the
micro-batch's own count, so that a plain mean and `sum / num_items_in_batch` are the same number, and it is never
passed to the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from loopwright.errors import BatchLossError, ConfigError, DataError

IGNORED = -100
_CAUSAL_LOSS = "ForCausalLMLoss"


def base_model(model: Any) -> Any:
    """Return the model inside an adapter (peft) or a compiled wrapper: the one whose forward says what it takes."""
    model = getattr(model, "_orig_mod", model)
    get_base = getattr(model, "get_base_model", None)
    return get_base() if callable(get_base) else model


def forward_parameters(model: Any) -> list[str]:
    """Return the names of the parameters of the model's forward; empty if it takes anything."""
    parameters = inspect.signature(base_model(model).forward).parameters
    return [
        name
        for name, parameter in parameters.items()
        if parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]


def find_label_names(model: Any) -> list[str]:
    """Return the parameters of the model's forward that are labels, by their names."""
    names = forward_parameters(model)
    found = [name for name in names if "label" in name]
    if {"start_positions", "end_positions"} <= set(names):
        found += ["start_positions", "end_positions"]
    return found


def can_return_loss(model: Any) -> bool:
    """Whether the model returns a loss without being given labels (contrastive models do by `return_loss=True`)."""
    parameter = inspect.signature(base_model(model).forward).parameters.get("return_loss")
    return parameter is not None and parameter.default is True


class ItemCounter:
    """Counts the items that the loss of a batch is a mean of: the labels that it really uses.

    Labels are integers of which those with -100 are ignored; where the loss predicts the next token the first of every
    row is not used either. Labels of another kind are counted by rows (None). Whether a loss shifts is known from the
    loss function of a transformers model; where that is not sure, the first batch tells, by its loss and logits.

    Args:
        model: the bare model.
        can_ask_model: the loss is the model's own, so the first batch can tell.
    """

    def __init__(self, model: nn.Module, can_ask_model: bool) -> None:
        self._model = model
        self._can_ask_model = can_ask_model
        config = getattr(base_model(model), "config", None)
        self._ignored_pixel = getattr(config, "semantic_loss_ignore_index", IGNORED)
        self._shifts: bool | None = self._known_shift()

    def count(self, batch: Any) -> Tensor | None:
        """Return the items of a batch, on its own device, or None if they are its rows."""
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
        """Whether labels are tokens to be predicted from those before them, as far as is known."""
        return bool(self._shifts)

    def _known_shift(self) -> bool | None:
        model = base_model(self._model)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            return False
        if getattr(model, "loss_type", None) is None:
            return None  # transformers' fallback is the causal loss, but few such models use it
        function = model.loss_function
        return bool(getattr(function, "__name__", "") == _CAUSAL_LOSS)

    def _loss_shifts(self, batch: Mapping[str, Any]) -> bool:
        if self._shifts is None:
            told = self._ask_model(batch) if self._can_ask_model else None
            self._shifts = self._has_causal_name() if told is None else told
        return self._shifts

    def _has_causal_name(self) -> bool:
        name = type(base_model(self._model)).__name__
        return name.endswith(("ForCausalLM", "LMHeadModel", "DoubleHeadsModel"))

    def _ask_model(self, batch: Mapping[str, Any]) -> bool | None:
        """Compare the loss of a batch with those of its logits, with and without a shift; None if that is no help."""
        modes = [(module, module.training) for module in self._model.modules()]
        parameter = next(self._model.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        try:
            self._model.eval()
            with torch.no_grad():
                outputs = self._model(**inputs)
        finally:
            for module, mode in modes:
                module.training = mode
        loss, logits = found_loss(outputs), found_logits(outputs)
        labels = inputs["labels"]
        if loss is None or not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
            return None
        plain = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        shifted = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return bool((loss - shifted).abs() < (loss - plain).abs())


def found_loss(outputs: Any) -> Any:
    """Return the loss in a model's outputs: its key or attribute, or the first of a tuple; None if there is none."""
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
    """The cross entropy with smoothed labels: a mean over the labels that are not -100.

    Attributes:
        epsilon: how much of each label is spread evenly over all classes.
    """

    epsilon: float

    def __call__(self, model_output: Any, labels: Tensor, shift_labels: bool = False) -> Tensor:
        """Return the loss of a model's outputs, with logits (..., classes).

        Args:
            model_output: what the model returned.
            labels: the classes.
            shift_labels: each position predicts the label after it.
        """
        logits = found_logits(model_output)
        if logits is None:
            raise BatchLossError("label_smoothing_factor needs logits, and the model's outputs have none")
        if shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        return functional.cross_entropy(
            logits.float().reshape(-1, logits.shape[-1]),
            labels.reshape(-1),
            ignore_index=IGNORED,
            label_smoothing=self.epsilon,
        )


def create_label_smoother(model: Any, factor: float) -> LabelSmoother | None:
    """Return the loss with this much label smoothing, or None for none; refuse it where labels are no classes.

    Raises:
        ConfigError: for multi-label classification.
    """
    problem = getattr(getattr(base_model(model), "config", None), "problem_type", None)
    if factor and problem == "multi_label_classification":
        raise ConfigError(
            f"label_smoothing_factor={factor} cannot be used with multi-label classification, whose labels are no "
            "classes. Set it to 0."
        )
    return LabelSmoother(factor) if factor else None


class LossCall:
    """Calls a `compute_loss` with the arguments that it takes: old ones take two, or no `num_items_in_batch`.

    Attributes:
        function: the `compute_loss`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        parameters = inspect.signature(function).parameters
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        self._takes_outputs = takes_all or "return_outputs" in parameters
        self._takes_items = takes_all or "num_items_in_batch" in parameters

    def __call__(self, model: Any, inputs: Any, items: Any, wants_outputs: bool = False) -> tuple[Tensor, Any]:
        """Return the loss and, where they were asked for and the function returns them, the outputs."""
        kwargs: dict[str, Any] = {}
        if self._takes_items:
            kwargs["num_items_in_batch"] = items
        if wants_outputs and self._takes_outputs:
            kwargs["return_outputs"] = True
        result = self.function(model, inputs, **kwargs)
        if isinstance(result, (tuple, list)):
            return result[0], result[1] if len(result) > 1 else None
        return result, None


def missing_loss(outputs: Any, inputs: Mapping[str, Any], label_names: list[str], dataset: Any) -> BatchLossError:
    """Return the error for a model that gave no loss: what went in, what came out, what was left out of the data.

    Args:
        outputs: what the model returned.
        inputs: what it was given.
        label_names: the parameters of its forward that are labels.
        dataset: the training data.
    """
    given = ", ".join(map(str, outputs)) if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
    text = (
        f"the model returned no loss: it was given {', '.join(inputs) or 'nothing'} and returned {given or 'nothing'}. "
    )
    sample = _first_sample(dataset)
    unused = [name for name in sample if name not in inputs and name not in ("label", "label_ids")]
    words = [name for name in ("label", "labels", "label_ids") if isinstance(sample.get(name), str)]
    if words:
        return BatchLossError(
            f"{text}The column {words[0]} holds text ({sample[words[0]]!r}), which is no label for a loss: make whole "
            f"numbers of it, for example with dataset.class_encode_column({words[0]!r})."
        )
    if not label_names:
        return BatchLossError(f"{text}Its forward takes no labels: override compute_loss, or pass compute_loss_func.")
    others = f" (the data also has {', '.join(map(str, unused))})" if unused else ""
    return BatchLossError(
        f"{text}It computes one when it is given {' and '.join(label_names)}: rename the column that holds them"
        f"{others}; or override compute_loss, or pass compute_loss_func."
    )


def unexpected_inputs(model: Any, inputs: Any) -> DataError | None:
    """Return the error for a batch with names that the model's forward does not take; None if there is no such name."""
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


def _first_sample(dataset: Any) -> Mapping[str, Any]:
    """Return the first sample of a dataset with random access, to tell what is in it; empty if it is no mapping."""
    if not hasattr(dataset, "__getitem__") or not isinstance(dataset, Sized) or len(dataset) == 0:
        return {}
    samples: Any = dataset
    sample = samples[0]
    return sample if isinstance(sample, Mapping) else {}
