"""Callbacks that cut epochs short."""

from __future__ import annotations

from typing import Any

from loopwright.callbacks.base import TrainerCallback, require_counts
from loopwright.protocols import TrainerLike


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
        return self._steps_per_process(trainer)

    def on_eval_epoch_start(self, trainer: TrainerLike, is_intermediate: bool = False, **kwargs: Any) -> None:
        if is_intermediate or not self.limit_intermediate_only:
            steps = self._steps_per_process(trainer)
            trainer.notify("limit.evaluation", f"Limiting evaluation to {steps} steps per process", steps=steps)

    def _steps_per_process(self, trainer: TrainerLike) -> int:
        return max(self.num_eval_steps // trainer.num_processes, 1)
