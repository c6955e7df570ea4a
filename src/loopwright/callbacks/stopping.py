"""Callbacks that end a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from loopwright.callbacks.base import TrainerCallback, has_new_value
from loopwright.callbacks.metrics import check_watched, direction_text, set_direction, watched_value
from loopwright.errors import StopTrainingError, explains_arguments
from loopwright.progress import StopKind, StopReason
from loopwright.protocols import TrainerLike


@dataclass(eq=False, repr=False)
class EarlyStoppingCallback(TrainerCallback):
    """Stops the run when a metric has not improved for some epochs.

    Args:
        early_stopping_patience: epochs without improvement before the run stops.
        early_stopping_threshold: the metric must change by more than this to count as improved.
        watch_metric: its name in the run history; "accuracy" also finds "eval_accuracy".
        greater_is_better: None knows the direction of common metrics, and takes lower for others, with a note.
        reset_on_train: forget best value and counter at the start of a run.

    Attributes:
        best_metric: the best value so far, or None.
        early_stopping_patience_counter: epochs since it improved.
    """

    early_stopping_patience: int = 1
    early_stopping_threshold: float = 0.01
    watch_metric: str = "eval_loss_epoch"
    greater_is_better: bool | None = None
    reset_on_train: bool = True
    best_metric: float | None = field(default=None, init=False)
    operator: Callable[[Any, Any], bool] = field(init=False)
    early_stopping_patience_counter: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        set_direction(self)

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        check_watched(self, trainer)
        set_direction(self, trainer)
        if self.reset_on_train:
            self.best_metric = None
            self.early_stopping_patience_counter = 0

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Compare and count, and stop the run when patience runs out; epochs without evaluation do not count."""
        if not has_new_value(self.watch_metric, kwargs):
            return
        value, best = watched_value(self, trainer), self.best_metric
        if best is None and not math.isnan(value):
            self.best_metric = value
            self.early_stopping_patience_counter = 0
            return
        gain = math.nan if best is None else value - best if self.greater_is_better else best - value
        to_beat = "nothing" if best is None else f"{best:.4g} by more than {self.early_stopping_threshold:g}"
        state = f"{self.watch_metric}: {value:.4g}, to beat: {to_beat} ({direction_text(self)})"
        fields = {
            "metric": self.watch_metric,
            "value": value,
            "best": best,
            "greater_is_better": self.greater_is_better,
        }
        # A nan compares false with everything, so it is never an improvement.
        if gain > max(self.early_stopping_threshold, 0):
            text = f"\nImprovement of {gain:.4g} observed, resetting counter. {state}"
            trainer.notify("early_stopping", text, gain=gain, **fields)
            self.best_metric = value
            self.early_stopping_patience_counter = 0
        else:
            seen = f"Improvement of {gain:.4g} is too small" if gain > 0 else "No improvement observed"
            text = f"\n{seen}, incrementing counter. {state}"
            trainer.notify("early_stopping", text, **fields)
            self.early_stopping_patience_counter += 1
        counter, patience = self.early_stopping_patience_counter, self.early_stopping_patience
        text = f"Early stopping counter: {counter}/{patience}"
        trainer.notify("early_stopping", text, counter=counter, patience=patience)
        if counter >= patience:
            raise StopTrainingError(f"Stopping training due to no improvement after {patience} epochs")

    def state_dict(self) -> dict[str, Any]:
        return {"best_metric": self.best_metric, "counter": self.early_stopping_patience_counter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_metric = state["best_metric"]
        self.early_stopping_patience_counter = state["counter"]


EarlyStoppingCallback.__init__ = explains_arguments(EarlyStoppingCallback.__init__)  # type: ignore[method-assign]


class TerminateOnNaNCallback(TrainerCallback):
    """Stops the run when a loss is nan or infinite, and names the update.

    The check uses the log, where losses reach the host anyway, so it costs nothing per update.

    Attributes:
        triggered: whether it stopped the current run.
    """

    def __init__(self) -> None:
        self.triggered = False

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.triggered = False

    def on_log(self, trainer: TrainerLike, logs: Any = None, **kwargs: Any) -> None:
        update, samples = kwargs.get("first_nonfinite_update"), kwargs.get("nonfinite_samples")
        if update is not None:
            named = "" if samples is None else f", samples {', '.join(map(str, samples[:8]))}"
            more = "..." if samples is not None and len(samples) > 8 else ""
            self._stop("training", f" (first at update {update}{named}{more})")

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if kwargs.get("has_nonfinite_loss", False):
            self._stop("validation", "")

    def check_for_nan_after_batch(self, batch_output: dict[str, Any], step: str | None = None) -> None:
        """Check one batch's loss now, with a device sync. For your own loops and callbacks."""
        if not torch.isfinite(torch.as_tensor(batch_output["loss"])).all():
            self._stop(step or "training", "")

    def _stop(self, phase: str, where: str) -> None:
        self.triggered = True
        text = f"Stopping training due to NaN loss in {phase} step{where}"
        raise StopTrainingError(StopReason(text, StopKind.NOT_FINITE))
