"""When to save, and how much to keep."""

from __future__ import annotations

import re
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from loopwright.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*-\{update(:0?\d*d)?\}")

_NUMBERS: tuple[tuple[str, Any, int, str], ...] = (
    ("every_updates", Integral, 1, "a whole number"),
    ("every_epochs", Integral, 1, "a whole number"),
    ("keep_last", Integral, 1, "a whole number"),
    ("every_seconds", Real, 0, "a number"),
    ("max_stall_seconds", Real, 0, "a number"),
    ("spare_seconds", Real, 0, "a number"),
)


@dataclass(frozen=True)
class Checkpointing:
    """Where and when a run saves itself; passed to `train(checkpoints=...)`.

    A state is also saved when the run ends. `resume_from="auto"` continues from the newest one.

    Args:
        directory: the folder; each checkpoint is a folder `step-<update>` in it.
        every_updates: save every N updates.
        every_epochs: save after every N epochs.
        every_seconds: save when N seconds have passed since the last save.
        keep_last: how many to keep; the best one and the one resumed from are kept as well.
        keep_best: the metric that decides which checkpoint is best, and "min" or "max"; None keeps no best one.
        asynchronous: write in the background, so that training waits only for a copy in host memory.
        max_stall_seconds: how long training waits for the save before this one; then this one is skipped.
        run_folder: where metrics.jsonl, status.json and the lease are; None is the directory itself.
        allow_changed_data: resume even if the length of the dataset has changed.
        allow_changed_model: resume even if the model is built differently, with other modules or other dropout.
        name: of a checkpoint's folder; `{update}` is replaced by the number of the update.
        is_open: others may add files to a checkpoint's folder; they are never read. Otherwise an unknown file
            invalidates it.
        require_exact: refuse to resume if the result might differ from an uninterrupted run.
        spare_seconds: also save when N seconds have passed since the last save, or five times as long as a save takes.
            Of these checkpoints only the newest two are kept; they do not count as `keep_last`.
    """

    directory: str | Path
    every_updates: int | None = None
    every_epochs: int | None = None
    every_seconds: float | None = None
    keep_last: int = 3
    keep_best: tuple[str, str] | None = ("eval_loss_epoch", "min")
    asynchronous: bool = True
    max_stall_seconds: float = 30.0
    run_folder: str | Path | None = None
    allow_changed_data: bool = False
    allow_changed_model: bool = False
    name: str = "step-{update:010d}"
    is_open: bool = False
    require_exact: bool = False
    spare_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, kind, least, what in _NUMBERS:
            value = getattr(self, name)
            is_number = isinstance(value, kind) and not isinstance(value, bool) and value >= least
            if not is_number and not (value is None and name.startswith(("every_", "spare_"))):
                raise ConfigError(f"Checkpointing: {name} must be {what} of at least {least}, got {value!r}")
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                "Checkpointing: name must be letters and digits, a hyphen and the update, such as 'step-{update}' or "
                f"'step-{{update:010d}}', got {self.name!r}"
            )
        if self.keep_best is not None and (len(self.keep_best) != 2 or self.keep_best[1] not in ("min", "max")):
            raise ConfigError(
                'Checkpointing: keep_best must be a metric and "min" or "max", such as ("eval_loss_epoch", "min"), '
                f"got {self.keep_best!r}"
            )

    @property
    def record_folder(self) -> Path:
        """The folder of metrics.jsonl, status.json and the lease."""
        return Path(self.directory if self.run_folder is None else self.run_folder)

    def path(self, update: int) -> Path:
        """Return the folder of the checkpoint written after an update."""
        return Path(self.directory) / self.name.format(update=update)

    @property
    def pattern(self) -> str:
        """The glob pattern that the names of all checkpoints match."""
        return self.name.partition("{")[0] + "*"

    def is_due_after_update(self, update: int) -> bool:
        """Whether to save after this update."""
        return self.every_updates is not None and update % self.every_updates == 0

    def is_due_after_epoch(self, epoch: int) -> bool:
        """Whether to save after this epoch."""
        return self.every_epochs is not None and epoch % self.every_epochs == 0
