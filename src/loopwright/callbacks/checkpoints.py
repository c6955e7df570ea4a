"""Callbacks that save: the best model, training states, and a warmup-stable-decay schedule's checkpoints."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from loopwright.callbacks.base import TrainerCallback, has_new_value, require_counts
from loopwright.callbacks.metrics import check_watched, direction_text, set_direction, watched_value
from loopwright.errors import ConfigError, explains_arguments
from loopwright.protocols import TrainerLike


@dataclass(eq=False, repr=False)
class SaveBestModelCallback(TrainerCallback):
    """Saves the model whenever a metric improves, and loads the best one at the end of the run.

    Args:
        save_path: the file; ".safetensors" writes weights only, anything else the documented dict.
        watch_metric: its name in the run history; "accuracy" also finds "eval_accuracy".
        greater_is_better: None knows the direction of common metrics, and takes lower for others, with a note.
        reset_on_train: forget the best value at the start of a run.
        save_optimizer, save_scheduler: also save their state.

    Attributes:
        best_metric: the best value so far, or None.
        best_metric_epoch: its epoch, or None.
        operator: compares a new value with the best.
    """

    save_path: str | Path = "best_model.pt"
    watch_metric: str = "eval_loss_epoch"
    greater_is_better: bool | None = None
    reset_on_train: bool = True
    save_optimizer: bool = True
    save_scheduler: bool = True
    load_saved_checkpoint: bool = True
    best_metric: float | None = field(default=None, init=False)
    operator: Callable[[Any, Any], bool] = field(init=False)
    best_metric_epoch: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        set_direction(self)

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        check_watched(self, trainer)
        set_direction(self, trainer)
        if self.reset_on_train:
            self.best_metric = None
            self.best_metric_epoch = None

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if not has_new_value(self.watch_metric, kwargs):
            return
        value = watched_value(self, trainer)
        if math.isnan(value) or (self.best_metric is not None and not self.operator(value, self.best_metric)):
            return
        best, fields = self.best_metric, {"metric": self.watch_metric, "value": value, "path": self.save_path}
        previous = "" if best is None else f" from {best:.4g}"
        change = f"{previous} to {value:.4g} ({direction_text(self)})"
        text = f"\n{self.watch_metric} improved{change}. Saving to {self.save_path}"
        trainer.notify("best.saved", text, best=best, greater_is_better=self.greater_is_better, **fields)
        self.best_metric = value
        self.best_metric_epoch = trainer.run_history.current_epoch
        self._save(trainer, {self.watch_metric: value})

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Load the best model, if one was saved, after the final state is saved."""
        if not self.load_saved_checkpoint or self.best_metric is None:
            return
        value = float(f"{self.best_metric:.4g}")
        text = f"Loading checkpoint with {self.watch_metric}: {value} from epoch {self.best_metric_epoch}"
        trainer.notify("best.loaded", text, metric=self.watch_metric, value=self.best_metric, path=self.save_path)
        trainer.request_load(self.save_path)

    def state_dict(self) -> dict[str, Any]:
        return {"best_metric": self.best_metric, "best_metric_epoch": self.best_metric_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_metric = state["best_metric"]
        self.best_metric_epoch = state["best_metric_epoch"]

    def _save(self, trainer: TrainerLike, metadata: dict[str, Any], **options: Any) -> None:
        options |= {"save_optimizer": self.save_optimizer, "save_scheduler": self.save_scheduler}
        trainer.save_checkpoint(self.save_path, metadata, **options)


SaveBestModelCallback.__init__ = explains_arguments(SaveBestModelCallback.__init__)  # type: ignore[method-assign]


class SaveTrainingStateCallback(TrainerCallback):
    """Saves everything needed to resume the run, every N epochs or micro-batches and at the end.

    States go to `save_dir/epoch_{e}`, `save_dir/step_{n}` (n = micro-batches seen) and `save_dir/final`. They are
    written at update boundaries. `final` holds the last weights, even with a SaveBestModelCallback.

    Args:
        save_every_n_steps: with accumulation, the first boundary after N micro-batches.
        save_at_end: also write `final`, even after a stopped run.
        max_checkpoints: keep only this many of the newest states; None keeps all.
    """

    def __init__(
        self,
        save_dir: str | Path = "training_states",
        save_every_n_epochs: int | None = None,
        save_every_n_steps: int | None = None,
        save_at_end: bool = True,
        max_checkpoints: int | None = None,
    ) -> None:
        require_counts(
            save_every_n_epochs=save_every_n_epochs,
            save_every_n_steps=save_every_n_steps,
            max_checkpoints=max_checkpoints,
        )
        self.save_dir = Path(save_dir)
        self.save_every_n_epochs = save_every_n_epochs
        self.save_every_n_steps = save_every_n_steps
        self.save_at_end = save_at_end
        self.max_checkpoints = max_checkpoints
        self._batches_before = 0
        self._asked: list[Path] = []
        self._written: list[Path] = []
        self._ended: Any = None  # the progress at the end of the last run

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.save_dir.mkdir(parents=True, exist_ok=True)
        self._batches_before = trainer.progress.total_batches

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self.save_every_n_steps is None:
            return
        batches = trainer.progress.total_batches
        if batches // self.save_every_n_steps > self._batches_before // self.save_every_n_steps:
            self._ask(trainer, f"step_{batches}")
        self._batches_before = batches

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Request a state of this epoch; it is written after its evaluation."""
        epoch = trainer.run_history.current_epoch
        if self.save_every_n_epochs is not None and epoch % self.save_every_n_epochs == 0:
            self._ask(trainer, f"epoch_{epoch}")

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.ask_for_final(trainer)

    def ask_for_final(self, trainer: TrainerLike) -> None:
        """Request the final state once per run; called at its end, before another model is loaded."""
        if self.save_at_end and self._ended is not trainer.progress:
            self._ended = trainer.progress
            self._ask(trainer, "final")

    def on_checkpoint_saved(self, trainer: TrainerLike, path: Any = None, **kwargs: Any) -> None:
        saved = Path(path)
        if saved not in self._asked:
            return
        self._asked.remove(saved)
        trainer.notify("checkpoint.saved", f"\nSaved training state to {saved}", path=saved)
        self._written = [other for other in self._written if other != saved] + [saved]
        while self.max_checkpoints is not None and len(self._written) > self.max_checkpoints:
            oldest = self._written.pop(0)
            if trainer.run_config.is_world_process_zero:
                shutil.rmtree(oldest, ignore_errors=True)

    def state_dict(self) -> dict[str, Any]:
        """The states written so far, oldest first, and those being written, including the current one."""
        earlier = [path for path in self._written if path not in self._asked]
        return {"written": [str(path) for path in (*earlier, *self._asked)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._written = [Path(path) for path in state["written"] if Path(path).is_dir()]

    def _ask(self, trainer: TrainerLike, name: str) -> None:
        path = self.save_dir / name
        if path not in self._asked:
            self._asked.append(path)
        trainer.request_save(path, {"global_step": trainer.progress.total_batches})


class WSDCheckpointCallback(TrainerCallback):
    """Saves around each decay phase of a warmup-stable-decay schedule.

    Before a decay phase it saves a full training state (`checkpoint_{n}_wsd_pre_decay`), from which the stable phase
    can resume; at its end the decayed model (`checkpoint_{n}_wsd_post_decay.pt`).

    Args:
        save_dir: the folder; created at once.
        save_optimizer, save_scheduler: whether the post-decay file holds their state.
        initial_checkpoint: a state (folder) or file to start from.

    Attributes:
        last_checkpoint_step: the last update saved at, or None.
        checkpoint_steps: the updates that end a decay phase.
        decay_fraction: the fraction of a period that decays.
        decay_info: the schedule's periods.
    """

    asks_alike = True  # determined by the schedule

    def __init__(
        self,
        save_dir: str | Path = "checkpoints",
        save_optimizer: bool = True,
        save_scheduler: bool = True,
        initial_checkpoint: str | Path | None = None,
    ) -> None:
        self.save_dir = Path(save_dir)
        self.save_dir.mkdir(parents=True, exist_ok=True)
        self.save_optimizer = save_optimizer
        self.save_scheduler = save_scheduler
        self.initial_checkpoint = None if initial_checkpoint is None else Path(initial_checkpoint)
        self.last_checkpoint_step: int | None = None
        self.checkpoint_steps: set[int] = set()
        self.decay_fraction: float | None = None
        self.decay_info: list[dict[str, Any]] | None = None

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Load the initial checkpoint, unless a resumed run is already past it, and read the schedule."""
        scheduler = trainer.scheduler
        if not hasattr(scheduler, "get_checkpoint_steps"):
            raise ConfigError(
                "Scheduler must implement get_checkpoint_steps() for WSDCheckpointCallback, got "
                f"{type(scheduler).__name__}. Pass create_scheduler_fn=WSDLrScheduler.create_scheduler_fn()."
            )
        start = self.initial_checkpoint
        if trainer.progress.update == 0 and start is not None and start.exists():
            load = trainer.load_training_state if start.is_dir() else trainer.load_checkpoint
            self.last_checkpoint_step = load(start).get("step")
        self.checkpoint_steps = set(scheduler.get_checkpoint_steps())
        self.decay_info = scheduler.get_decay_info()
        self.decay_fraction = scheduler.decay_phase_ratio

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        step = trainer.scheduler.get_current_step()
        if step == self.last_checkpoint_step:
            return
        phase = trainer.scheduler.get_phase_info(step)
        if step == phase["pre_decay_step"]:
            self.last_checkpoint_step = step
            metadata = self._metadata(trainer, step, "wsd_pre_decay")
            trainer.request_save(self.save_dir / f"checkpoint_{step}_wsd_pre_decay", metadata)
        if step == phase["period_end"]:
            self.last_checkpoint_step = step
            trainer.save_checkpoint(
                self.save_dir / f"checkpoint_{step}_wsd_post_decay.pt",
                self._metadata(trainer, step, "wsd_post_decay"),
                save_optimizer=self.save_optimizer,
                save_scheduler=self.save_scheduler,
            )

    def state_dict(self) -> dict[str, Any]:
        return {"last_checkpoint_step": self.last_checkpoint_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_checkpoint_step = state["last_checkpoint_step"]

    def _metadata(self, trainer: TrainerLike, step: int, kind: str) -> dict[str, Any]:
        return {
            "step": step,
            "checkpoint_type": kind,
            "total_steps": trainer.run_config.max_num_train_steps,
            "decay_fraction": self.decay_fraction,
            "timestamp": datetime.now(timezone.utc).isoformat(),
        }
