"""What transformers' classifiers settle in their first forward pass, settled before it where they are compiled."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from loopwright.hf.loss import base_model

_LOSS = "ForSequenceClassificationLoss"


def settle_labels_before(model: nn.Module, inner: Any) -> None:
    """Let a compiled classifier know what kind its labels are when it is first called with any.

    A classifier that was not told writes `config.problem_type` in its first forward pass. A compiled one has been
    traced for a config without it by then, and torch would compile the whole model a second time.

    Args:
        model: compiled; what it does when it is called is changed in place.
        inner: the same without what is around it for several processes.
    """
    classifier = base_model(inner)
    config: Any = getattr(classifier, "config", None)
    if getattr(config, "problem_type", "") is not None or not _looks_at_problem_type(classifier):
        return
    compiled: Any = model._compiled_call_impl

    def call(*args: Any, **inputs: Any) -> Any:
        labels = inputs.get("labels")
        if config.problem_type is None and isinstance(labels, Tensor):
            config.problem_type = problem_type_of(config.num_labels, labels)
        return compiled(*args, **inputs)

    model._compiled_call_impl = call


def problem_type_of(num_labels: int, labels: Tensor) -> str:
    """Return what kind of labels a classifier of transformers takes these for."""
    if num_labels == 1:
        return "regression"
    is_whole = labels.dtype in (torch.long, torch.int)
    return "single_label_classification" if is_whole else "multi_label_classification"


def _looks_at_problem_type(model: Any) -> bool:
    """Whether a model's forward reads the problem type, itself or in its loss function; others keep their config."""
    names = getattr(getattr(inspect.unwrap(type(model).forward), "__code__", None), "co_names", ())
    if "problem_type" in names:
        return True
    has_loss = "loss_function" in names and getattr(model, "loss_type", None) is not None
    return has_loss and getattr(model.loss_function, "__name__", "") == _LOSS
