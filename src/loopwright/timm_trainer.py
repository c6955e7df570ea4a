"""A Trainer for schedulers of timm's shape."""

from __future__ import annotations

from typing import Any

from loopwright.trainer import Trainer


class TrainerWithTimmScheduler(Trainer):
    """A trainer for schedulers of timm's shape: `step_update(num_updates)` per update and `step(epoch)` per epoch.

    Attributes:
        num_updates: updates finished; None before training.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.num_updates: int | None = None
        super().__init__(*args, **kwargs)

    def train_epoch_start(self) -> None:
        """Take the number of updates from the run's progress."""
        super().train_epoch_start()
        self.num_updates = self.progress.update

    def scheduler_step(self) -> None:
        """Step the scheduler with the number of finished updates."""
        self.num_updates = self.progress.update + 1
        self.scheduler.step_update(num_updates=self.num_updates)

    def training_run_epoch_end(self) -> None:
        """Step the scheduler with the number of finished epochs, with or without evaluation."""
        super().training_run_epoch_end()
        if self.scheduler is not None:
            self.scheduler.step(self.progress.epoch + 1)
