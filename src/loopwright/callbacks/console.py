"""Callbacks that print."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """Logs every value of a metric once, when it is new; override `log_metrics` to log elsewhere.

    A metric that is recorded by a callback later in the list is logged at the next event, and never again: what is
    logged after an epoch is never a value of the epoch before.
    """

    # What was logged last of each metric: how many values there were, and the last one. A subclass may have a
    # constructor of its own, so this is replaced and not changed.
    _logged: Mapping[str, tuple[int, Any]] = {}

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Leave out what an earlier run, or the part of the run before a resume, has recorded."""
        self._logged = _latest(trainer)

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Log what callbacks later in the list recorded at the very end of the epoch before."""
        self._log_new(trainer)

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Log the metrics whose names contain "train"."""
        self._log_new(trainer, lambda name: "train" in name)

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Log all other metrics."""
        self._log_new(trainer, lambda name: "train" not in name)

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Log what was recorded since, such as by callbacks later in the list."""
        self._log_new(trainer)

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Log what was recorded at the very end of the last epoch."""
        self._log_new(trainer)

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Log what callbacks later in the list recorded of an evaluation."""
        self._log_new(trainer)

    def log_metrics(self, trainer: TrainerLike, metrics: dict[str, Any]) -> None:
        """Print each metric on a line of its own; called with those that are new, after an epoch of either kind."""
        for name, value in metrics.items():
            trainer.print(f"\n{name}: {value}")

    def _log_new(self, trainer: TrainerLike, is_due: Callable[[str], bool] = lambda name: True) -> None:
        found = {name: latest for name, latest in _latest(trainer).items() if is_due(name)}
        new = {name: latest for name, latest in found.items() if not _is_same(latest, self._logged.get(name))}
        if new:
            self._logged = {**self._logged, **new}
            self.log_metrics(trainer, {name: value for name, (_, value) in new.items()})


def _latest(trainer: TrainerLike) -> dict[str, tuple[int, Any]]:
    """Return how many values there are of each metric, and the last one, by name in alphabetical order."""
    values = {name: list(trainer.run_history.get_metric_values(name)) for name in trainer.run_history.latest()}
    return {name: (len(recorded), recorded[-1]) for name, recorded in values.items()}


def _is_same(latest: tuple[int, Any], logged: tuple[int, Any] | None) -> bool:
    """Whether a value was logged before; by identity, as values may be anything, and a history may begin anew."""
    return logged is not None and latest[0] == logged[0] and latest[1] is logged[1]


PrintMetricsCallback = LogMetricsCallback
