"""What `train`, `evaluate`, `predict` and `find_lr` return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from loopwright.progress import StopReason


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a training run.

    Attributes:
        metrics: the latest value of every metric in the run history.
        epochs: epochs finished.
        updates: optimizer updates finished.
        stop_reason: why the run was stopped early, or None.
        seed: the seed that gives this run again.
        seconds: how long the run lasted, with what came before a resume; two results are equal whatever it is.
    """

    metrics: dict[str, Any]
    epochs: int
    updates: int
    stop_reason: StopReason | None
    seed: int
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class EvaluationResult:
    """The outcome of an evaluation run.

    Attributes:
        metrics: `evaluation_loss`, and whatever the hooks recorded.
        stop_reason: why it was stopped early, or None.
    """

    metrics: dict[str, Any]
    stop_reason: StopReason | None = None


@dataclass(frozen=True)
class PredictionResult:
    """The outcome of a prediction run.

    Attributes:
        outputs: the model's outputs for every sample, in the dataset's order, on the CPU: joined on dim 0,
            or a list with one entry per sample where their shapes differ.
        metrics: `num_samples`.
    """

    outputs: Any
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LearningRateCurve:
    """What `find_lr` saw: the loss of each update while the learning rate rose."""

    rates: tuple[float, ...]  # the learning rate of each update, of the first parameter group
    losses: tuple[float, ...]  # the loss of each update, before its step
    smoothed: tuple[float, ...]  # the same as a mean over the last few updates
    steepest: float | None  # the rate at which the smoothed loss falls fastest; None where it never falls
    lowest: float | None  # the rate of the lowest smoothed loss; None where no loss is finite
    suggestion: float | None  # the steepest, or a tenth of the lowest if that is less; None where the loss never falls
    stop_reason: str | None = None  # why it ended before the last rate, or None
