"""Set the problem type of compiled transformers classifiers before their first forward pass."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from loopwright.hf.loss import base_model

_LOSS = "ForSequenceClassificationLoss"


def settle_labels_before(model: nn.Module, inner: Any) -> None:
    """Set a compiled classifier's problem type at its first call with labels, by patching that call.

    A classifier without `config.problem_type` sets it in its first forward pass. A compiled one was already traced
    without it, so torch would compile it a second time. `inner` is the model without its distributed wrapper.
    """
    classifier = base_model(inner)
    config: Any = getattr(classifier, "config", None)
    if getattr(config, "problem_type", "") is not None or not _looks_at_problem_type(classifier):
        return
    compiled: Any = model._compiled_call_impl  # where `nn.Module.compile` keeps it; there is no public name

    def call(*args: Any, **inputs: Any) -> Any:
        labels = inputs.get("labels")
        if config.problem_type is None and isinstance(labels, Tensor):
            config.problem_type = problem_type_of(config.num_labels, labels)
        return compiled(*args, **inputs)

    model._compiled_call_impl = call


def problem_type_of(num_labels: int, labels: Tensor) -> str:
    """Return the problem type that a transformers classifier infers from these labels."""
    if num_labels == 1:
        return "regression"
    is_whole = labels.dtype in (torch.long, torch.int)
    return "single_label_classification" if is_whole else "multi_label_classification"


def _looks_at_problem_type(model: Any) -> bool:
    """Whether a model's forward or loss function reads the problem type; other models keep their config."""
    names = getattr(getattr(inspect.unwrap(type(model).forward), "__code__", None), "co_names", ())
    if "problem_type" in names:
        return True
    has_loss = "loss_function" in names and getattr(model, "loss_type", None) is not None
    return has_loss and getattr(model.loss_function, "__name__", "") == _LOSS
