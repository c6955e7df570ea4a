"""When to save, and how much to keep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loopwright.errors import ConfigError


@dataclass(frozen=True)
class Checkpointing:
    """Where and when a run saves itself; passed to `train(checkpoints=...)`.

    A state is also saved when the run ends. `resume_from="auto"` continues from the newest one.

    Args:
        directory: the folder; each checkpoint is a folder `step-<update>` in it.
        every_updates: save every so many updates.
        every_epochs: save after every so many epochs.
        keep_last: how many to keep; the one resumed from is kept as well.
    """

    directory: str | Path
    every_updates: int | None = None
    every_epochs: int | None = None
    keep_last: int = 3

    def __post_init__(self) -> None:
        for name in ("every_updates", "every_epochs", "keep_last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"Checkpointing: {name} must be at least 1, got {value}")

    def path(self, update: int) -> Path:
        """Return the folder of the checkpoint written after an update."""
        return Path(self.directory) / f"step-{update:010d}"

    def is_due_after_update(self, update: int) -> bool:
        """Whether to save after this update."""
        return self.every_updates is not None and update % self.every_updates == 0

    def is_due_after_epoch(self, epoch: int) -> bool:
        """Whether to save after this epoch."""
        return self.every_epochs is not None and epoch % self.every_epochs == 0
