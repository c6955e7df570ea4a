"""Callbacks that print."""

from __future__ import annotations

from typing import Any

from loopwright.callbacks.base import TrainerCallback
from loopwright.protocols import TrainerLike


class PrintProgressCallback(TrainerCallback):
    """Prints where the run is: run, epoch and evaluation starts and ends."""

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Say that training starts."""
        trainer.print("\nStarting training run")

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Say which epoch starts."""
        trainer.print(f"\nStarting epoch {trainer.run_history.current_epoch}")

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Say that an evaluation starts."""
        trainer.print("\nStarting eval epoch")

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Say that training ends."""
        trainer.print("Finishing training run")

    def on_evaluation_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Say that an evaluation run starts."""
        trainer.print("\nStarting evaluation run")

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Say that an evaluation run ends."""
        trainer.print("Finishing evaluation run")


class LogMetricsCallback(TrainerCallback):
    """Logs the latest metrics after each training and evaluation epoch; override `log_metrics` to log elsewhere."""

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Log the metrics whose names contain "train"."""
        latest = trainer.run_history.latest()
        self.log_metrics(trainer, {name: value for name, value in latest.items() if "train" in name})

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Log all other metrics."""
        latest = trainer.run_history.latest()
        self.log_metrics(trainer, {name: value for name, value in latest.items() if "train" not in name})

    def log_metrics(self, trainer: TrainerLike, metrics: dict[str, Any]) -> None:
        """Print each metric on a line of its own; called after each training and evaluation epoch."""
        for name, value in metrics.items():
            trainer.print(f"\n{name}: {value}")


PrintMetricsCallback = LogMetricsCallback
