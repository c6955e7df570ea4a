"""Evaluation inside an epoch."""

from __future__ import annotations

from typing import Any

from loopwright.callbacks.base import TrainerCallback, require_counts
from loopwright.protocols import TrainerLike


class StepBasedEvaluationCallback(TrainerCallback):
    """Requests an evaluation every n micro-batches of an epoch.

    It runs at the next update boundary, preserves the model's mode, and records `intermediate_eval_loss` and the
    metrics of the evaluation hooks.
    """

    graph_safe = True  # it only counts

    def __init__(self, eval_every_n_steps: int) -> None:
        require_counts(eval_every_n_steps=eval_every_n_steps)
        self.eval_every_n_steps = eval_every_n_steps
        self._asked_at: int | None = None

    def on_train_step_end(
        self, trainer: TrainerLike, batch: Any = None, batch_output: Any = None, **kwargs: Any
    ) -> None:
        """Request one at every n-th micro-batch but the first of the epoch."""
        step = kwargs["step"]
        if step != 0 and step % self.eval_every_n_steps == 0:
            self._asked_at = step
            trainer.request_evaluation()

    def on_eval_epoch_start(self, trainer: TrainerLike, is_intermediate: bool = False, **kwargs: Any) -> None:
        if is_intermediate and self._asked_at is not None:
            text = f"\nRunning evaluation after {self._asked_at} training steps"
            trainer.notify("evaluation.start", text, step=self._asked_at)

    def on_eval_epoch_end(self, trainer: TrainerLike, is_intermediate: bool = False, **kwargs: Any) -> None:
        if is_intermediate and self._asked_at is not None:
            trainer.notify("evaluation.end", "\nResuming training...")
            self._asked_at = None
