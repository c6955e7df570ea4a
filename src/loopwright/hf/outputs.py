"""The outputs of the trainer, the input of `compute_metrics`, and small helpers."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from loopwright.engine.seeding import use_deterministic_algorithms
from loopwright.run_folder.record import plain


class EvalPrediction:
    """The input of `compute_metrics`; unpacks into predictions and labels.

    Attributes:
        predictions, label_ids: the model's outputs and the labels, as numpy arrays padded with -100.
        inputs: the model's inputs, if `include_for_metrics` names "inputs".
        losses: the loss of each sample's batch, if `include_for_metrics` names "loss".
    """

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions, self.label_ids, self.inputs, self.losses = predictions, label_ids, inputs, losses

    @property
    def elements(self) -> tuple[Any, ...]:
        """Predictions and labels, then inputs and losses if requested."""
        extra = tuple(value for value in (self.inputs, self.losses) if value is not None)
        return (self.predictions, self.label_ids, *extra)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __getitem__(self, index: int) -> Any:
        return self.elements[index]


class EvalLoopOutput(NamedTuple):
    """The outcome of `evaluation_loop`."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, Any] | None
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """The outcome of `predict`."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, Any] | None


class TrainOutput(NamedTuple):
    """The outcome of `train`."""

    global_step: int
    training_loss: float
    metrics: dict[str, Any]


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed python, numpy and torch; `deterministic` also selects torch's deterministic algorithms."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        use_deterministic_algorithms()


def get_last_checkpoint(folder: str | Path) -> str | None:
    """Return the `checkpoint-<step>` folder with the highest step, or None.

    It is not verified; `train(resume_from_checkpoint=True)` takes the newest complete one.
    """
    found = [path for path in Path(folder).glob("checkpoint-*") if path.is_dir() and path.name[11:].isdecimal()]
    return str(max(found, key=lambda path: (int(path.name[11:]), path))) if found else None


def speed_metrics(
    split: str, start_time: float, num_samples: float | None = None, num_steps: float | None = None
) -> dict[str, float]:
    """Return the runtime since `start_time`, and the throughput."""
    runtime = time.time() - start_time
    metrics = {f"{split}_runtime": round(runtime, 4)}
    for name, count in (("samples", num_samples), ("steps", num_steps)):
        if count is not None and runtime > 0:
            metrics[f"{split}_{name}_per_second"] = round(count / runtime, 3)
    return metrics


def plain_metrics(value: Any) -> Any:
    """Return metrics with numpy and torch numbers as plain Python numbers, for logging and saving."""
    if isinstance(value, dict):
        return {str(name): plain_metrics(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain_metrics(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    return value


def stored_metrics(value: Any) -> Any:
    """Return metrics in JSON form: arrays as lists, and anything unsupported as text."""
    return plain(plain_metrics(value))
