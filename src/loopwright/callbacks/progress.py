"""The progress bar."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm

from loopwright.callbacks.base import TrainerCallback
from loopwright.protocols import TrainerLike


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
        self._num_counted = 0
        self._num_evaluated = 0

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Open the training bar, at the position of a resumed epoch."""
        self._num_counted = trainer.progress.batch
        self.pbar = _bar(trainer, trainer.train_loader, initial=self._num_counted)

    def on_train_step_end(
        self, trainer: TrainerLike, batch: Any = None, batch_output: Any = None, step: int | None = None, **kwargs: Any
    ) -> None:
        """Count a micro-batch once, even if it is run in parts."""
        done = self._num_counted + 1 if step is None else step + 1
        if done != self._num_counted:
            self.pbar.update(done - self._num_counted)
            self._num_counted = done

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Close the training bar."""
        self.pbar.close()

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Open the evaluation bar."""
        self._num_evaluated = 0
        self.eval_pbar = _bar(trainer, trainer.eval_loader)

    def on_eval_step_end(
        self, trainer: TrainerLike, batch: Any = None, batch_output: Any = None, step: int | None = None, **kwargs: Any
    ) -> None:
        """Count an evaluation batch once, even if it is run in parts."""
        done = self._num_evaluated + 1 if step is None else step + 1
        if done != self._num_evaluated:
            self.eval_pbar.update(done - self._num_evaluated)
            self._num_evaluated = done

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Close the evaluation bar."""
        self.eval_pbar.close()

    def on_stop_training_error(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Close the bars of a stopped run."""
        self._close()

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Close the bars of an interrupted run."""
        self._close()

    def _close(self) -> None:
        for bar in (self.eval_pbar, self.pbar):
            if bar is not None:
                bar.close()


def _bar(trainer: TrainerLike, loader: Any, initial: int = 0) -> Any:
    try:
        total = len(loader)
    except TypeError:
        total = None
    return tqdm(total=total, initial=initial, disable=not trainer.run_config.is_local_process_zero)
