"""The one callback of the core through which all of HF's callbacks run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopwright.callbacks import TrainerCallback
from loopwright.engine.processes import gather_objects, sum_over_processes
from loopwright.hf.state import TrainerState
from loopwright.tracking.loss import combined

if TYPE_CHECKING:
    from loopwright.hf.trainer import Trainer

# Told by the core, which keeps the micro-batches of an update and the order of the samples as they were.
_TOLD_BY_CORE = ("gradient_accumulation_steps", "seed")

# What a resumed run takes from its own arguments, not from the checkpoint.
_OF_THIS_RUN = (
    "max_steps",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "num_train_epochs",
    "train_batch_size",
    "is_local_process_zero",
    "is_world_process_zero",
)


class Bridge(TrainerCallback):
    """Turns the core's events into HF's, and keeps HF's state in the core's checkpoints.

    Args:
        owner: the `hf.Trainer`.
    """

    graph_safe = asks_alike = True  # for which of HF's callbacks that does not hold, the core asks itself

    def __init__(self, owner: Trainer) -> None:
        self._owner = owner

    def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        """Begin an epoch."""
        self._owner.call_event("on_epoch_begin")

    def on_before_optimizer_step(self, trainer: Any, **kwargs: Any) -> None:
        """Tell that the gradients are ready, and note the learning rate that they are used with."""
        self._owner.call_event("on_pre_optimizer_step")
        self._owner.flow.learning_rate = trainer.optimizer.param_groups[0]["lr"]

    def on_optimizer_step_end(self, trainer: Any, **kwargs: Any) -> None:
        """Tell that the weights are new."""
        self._owner.call_event("on_optimizer_step")

    def on_update_end(self, trainer: Any, **kwargs: Any) -> None:
        """Count the update in HF's state and hand on what the callbacks ask for."""
        self._owner.flow.count_update()
        self._owner.call_event("on_step_end")
        trainer.take_requests()

    def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        """End an epoch and hand on what the callbacks ask for."""
        self._owner.call_event("on_epoch_end")
        trainer.take_requests()

    def on_checkpoint_saved(self, trainer: Any, path: Any = None, **kwargs: Any) -> None:
        """Tell of a checkpoint."""
        trainer.last_saved = trainer.progress.update
        self._owner.flow.note_checkpoint(Path(path))
        self._owner.call_event("on_save")

    def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
        """Report the run, load the best model and end."""
        self._owner.flow.end()

    def state_dict(self) -> dict[str, Any]:
        """Return HF's state, the losses of the run, and the arguments; every process must call it."""
        owner, core = self._owner, self._owner.core
        logged_loss, logged_items = sum_over_processes(list(core.logged[:2]), core.device)
        owner.state.collect([*owner.callback_handler.callbacks, owner.control])
        return {
            "state": dataclasses.asdict(owner.state),
            "losses": combined(gather_objects(core.losses.state_dict())),
            "logged": [logged_loss, logged_items, core.logged[2]],
            "samples_seen": core.samples_seen,
            "arguments": owner.flow.saved_arguments(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a saved run; the current arguments hold, and what differs is told."""
        owner, core = self._owner, self._owner.core
        current = {name: getattr(owner.state, name) for name in _OF_THIS_RUN}
        owner.state = TrainerState(**{**state["state"], **current})
        owner.state.hand_out(owner.callback_handler.callbacks)
        if owner.is_world_process_zero():
            core.losses.load_state_dict(state["losses"])
        logged_loss, logged_items, update = state["logged"]
        is_first = owner.is_world_process_zero()
        core.logged = (logged_loss if is_first else 0.0, logged_items if is_first else 0.0, update)
        core.samples_seen = state["samples_seen"]
        now = owner.flow.saved_arguments()
        for name, before in state["arguments"].items():
            if now.get(name) != before and name not in _TOLD_BY_CORE:
                core.print(f"Changed, the new value holds: {name}: {before!r} -> {now.get(name)!r}")
