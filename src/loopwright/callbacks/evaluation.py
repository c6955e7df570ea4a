"""Evaluation inside an epoch, and epochs cut short."""

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

    def on_train_step_end(self, trainer: TrainerLike, *args: Any, **kwargs: Any) -> None:
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


class LimitBatchesCallback(TrainerCallback):
    """Limits training and evaluation epochs to the first batches, for a smoke test.

    The run config, the placeholders and the progress bar all respect the limit.
    """

    def __init__(self, num_batches: int) -> None:
        require_counts(num_batches=num_batches)
        self.num_batches = num_batches

    def batch_limit(self, trainer: TrainerLike, training: bool, is_intermediate: bool = False) -> int | None:
        return self.num_batches

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        text = f"Limiting epochs to {self.num_batches} batches"
        trainer.notify("limit.batches", text, num_batches=self.num_batches)


class LimitEvalStepsCallback(TrainerCallback):
    """Limits evaluation during training to `num_eval_steps` batches over all processes.

    Args:
        num_eval_steps: batches in all; each process runs its part, at least one.
        limit_intermediate_only: do not limit the evaluation after each epoch.
    """

    def __init__(self, num_eval_steps: int, limit_intermediate_only: bool = True) -> None:
        require_counts(num_eval_steps=num_eval_steps)
        self.num_eval_steps = num_eval_steps
        self.limit_intermediate_only = limit_intermediate_only

    def batch_limit(self, trainer: TrainerLike, training: bool, is_intermediate: bool = False) -> int | None:
        if training or (self.limit_intermediate_only and not is_intermediate):
            return None
        return max(self.num_eval_steps // trainer.num_processes, 1)

    def on_eval_epoch_start(self, trainer: TrainerLike, is_intermediate: bool = False, **kwargs: Any) -> None:
        steps = self.batch_limit(trainer, training=False, is_intermediate=is_intermediate)
        if steps is not None:
            trainer.notify("limit.evaluation", f"Limiting evaluation to {steps} steps per process", steps=steps)
