"""Callbacks that print."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loopwright.callbacks.base import TrainerCallback
from loopwright.protocols import TrainerLike


class PrintProgressCallback(TrainerCallback):
    """Prints the starts and ends of runs, epochs and evaluations."""

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        trainer.notify("progress", "\nStarting training run")
        report_seed(trainer)

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        trainer.notify("progress", f"\nStarting epoch {trainer.run_history.current_epoch}")

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        trainer.notify("progress", "\nStarting eval epoch")

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        trainer.notify("progress", "Finishing training run")

    def on_evaluation_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        trainer.notify("progress", "\nStarting evaluation run")

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        trainer.notify("progress", "Finishing evaluation run")


def report_seed(trainer: TrainerLike) -> None:
    """Report a seed that nobody has set: torch draws one of 64 bits; `set_seed` takes no more than 32."""
    if isinstance(trainer.seed, int) and trainer.seed >= 2**32 and trainer.progress.update == 0:
        trainer.notify("seed", f"Seed {trainer.seed} (random); pass seed= to repeat the run", seed=trainer.seed)


class LogMetricsCallback(TrainerCallback):
    """Logs every new metric value once; override `log_metrics` to log elsewhere.

    A metric recorded by a callback later in the list is logged at the next event, and only once, so no stale value of
    an earlier epoch is logged.
    """

    # The count and last value of each metric at its last log. Replaced, never mutated, since a subclass may have its
    # own constructor.
    _logged: Mapping[str, tuple[int, Any]] = {}

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Skip values recorded by an earlier run, or before a resume."""
        self._logged = _latest(trainer)

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Log values that later callbacks recorded at the end of the previous epoch."""
        self._log_new(trainer)

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._log_new(trainer, lambda name: "train" in name)

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._log_new(trainer, lambda name: "train" not in name)

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Log values recorded since, such as by later callbacks."""
        self._log_new(trainer)

    on_training_run_end = on_evaluation_run_end = on_training_run_epoch_end

    def log_metrics(self, trainer: TrainerLike, metrics: dict[str, Any]) -> None:
        """Print each new metric on its own line; called after a training or evaluation epoch."""
        for name, value in metrics.items():
            trainer.notify("metric", f"\n{name}: {value}", name=name, value=value)

    def _log_new(self, trainer: TrainerLike, is_due: Callable[[str], bool] = lambda name: True) -> None:
        found = {name: latest for name, latest in _latest(trainer).items() if is_due(name)}
        new = {name: latest for name, latest in found.items() if not _is_same(latest, self._logged.get(name))}
        if new:
            self._logged = {**self._logged, **new}
            self.log_metrics(trainer, {name: value for name, (_, value) in new.items()})


def _latest(trainer: TrainerLike) -> dict[str, tuple[int, Any]]:
    values = {name: list(trainer.run_history.get_metric_values(name)) for name in trainer.run_history.latest()}
    return {name: (len(recorded), recorded[-1]) for name, recorded in values.items()}


def _is_same(latest: tuple[int, Any], logged: tuple[int, Any] | None) -> bool:
    """Whether a value was logged before; by identity, as values may be anything, and a history may restart."""
    return logged is not None and latest[0] == logged[0] and latest[1] is logged[1]


PrintMetricsCallback = LogMetricsCallback
