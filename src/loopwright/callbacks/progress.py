"""The progress bar."""

from __future__ import annotations

from typing import Any

from loopwright.callbacks.base import TrainerCallback
from loopwright.protocols import TrainerLike
from loopwright.terminal import bar_class

tqdm = bar_class()


class ProgressBarCallback(TrainerCallback):
    """A tqdm bar for each training and evaluation epoch, on one process per node.

    Attributes:
        pbar: the bar of the current training epoch.
        eval_pbar: the bar of the current evaluation epoch.
    """

    graph_safe = True  # it only counts

    def __init__(self) -> None:
        self.pbar: Any = None
        self.eval_pbar: Any = None

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.pbar = _bar(trainer, trainer.train_loader, initial=trainer.progress.batch)

    def on_train_step_end(self, trainer: TrainerLike, *args: Any, step: int | None = None, **kwargs: Any) -> None:
        _advance(self.pbar, step)

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.pbar.close()

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.eval_pbar = _bar(trainer, trainer.eval_loader)

    def on_eval_step_end(self, trainer: TrainerLike, *args: Any, step: int | None = None, **kwargs: Any) -> None:
        _advance(self.eval_pbar, step)

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.eval_pbar.close()

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Close the bars of a stopped or interrupted run."""
        for bar in (self.eval_pbar, self.pbar):
            if bar is not None:
                bar.close()

    on_stop_training_error = on_training_run_end


def num_batches(loader: Any) -> int | None:
    """Return the length of a loader, or None if it is not known."""
    try:
        return len(loader)
    except TypeError:
        return None


def _bar(trainer: TrainerLike, loader: Any, initial: int = 0) -> Any:
    initial = initial if isinstance(initial, int) else 0  # not of a test's mock
    return tqdm(total=num_batches(loader), initial=initial, disable=not trainer.run_config.is_local_process_zero)


def _advance(bar: Any, step: int | None) -> None:
    """Count a batch once, even if it is run in parts."""
    done = bar.n + 1 if step is None else step + 1
    if done > bar.n:
        bar.update(done - bar.n)
