"""Callbacks that move or convert modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from loopwright.callbacks.base import TrainerCallback
from loopwright.protocols import TrainerLike


class MoveModulesToDeviceCallback(TrainerCallback):
    """Moves every module that is an attribute of the trainer (losses, metrics), except the model, to its device."""

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        for name, value in vars(trainer).items():
            if isinstance(value, nn.Module) and name != "model":
                value.to(trainer.device)

    on_evaluation_run_start = on_training_run_start


class ConvertSyncBatchNormCallback(TrainerCallback):
    """Converts the model's batch norms to SyncBatchNorm at the start of a run on several GPUs."""

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Convert them if the device supports it: SyncBatchNorm has no CPU version."""
        if trainer.run_config.is_distributed and trainer.device.type != "cpu":
            trainer.model = nn.SyncBatchNorm.convert_sync_batchnorm(trainer.model)
