"""A run's state and control flags for HF's callbacks: `TrainerState` and `TrainerControl`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopwright.errors import ConfigError

STATE_FILE = "trainer_state.json"


class ExportableState:
    """Mixin for a callback whose state belongs in checkpoints.

    A resumed run sets the saved attributes on the given callback, and keeps its constructor arguments. With
    `restore_callback_states_from_checkpoint=True` it creates the callback again, from the saved arguments.
    """

    def state(self) -> dict[str, Any]:
        """Return the constructor arguments and the attributes to save, as plain values; called at every checkpoint."""
        return {"args": {}, "attributes": {}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Any:
        """Return a new object from a saved state."""
        instance = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(instance, name, value)
        return instance


@dataclass
class TrainerState:
    """The progress of a run, as callbacks read it; saved as trainer_state.json in every checkpoint.

    A step is an update: with gradient accumulation it takes several forward passes.

    Attributes:
        epoch, global_step: epochs and updates done, with the fraction of the current epoch.
        max_steps, num_train_epochs: updates and epochs of the whole run, rounded up.
        logging_steps, eval_steps, save_steps: the intervals in updates, ratios resolved.
        train_batch_size: samples of a micro-batch.
        num_input_tokens_seen, total_flos: over all processes, as of the last log, evaluation or save.
        log_history: all logged entries, each with its `step`.
        stateful_callbacks: callback states by class name; may be given as a list of callbacks.
    """

    epoch: float | None = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given: Any = self.stateful_callbacks
        if not isinstance(given, Mapping):
            self.collect(given or ())

    def to_json_string(self) -> str:
        """Return the whole state as JSON text."""
        # Indented JSON takes ten times as long: a long log is one line.
        logs = json.dumps(self.log_history, sort_keys=True)
        text = json.dumps({**shallow(self), "log_history": []}, indent=2, sort_keys=True)
        return text.replace('\n  "log_history": []', f'\n  "log_history": {logs}', 1) + "\n"

    def save_to_json(self, json_path: str | Path) -> None:
        """Write the state to a file."""
        Path(json_path).write_text(self.to_json_string(), encoding="utf-8")

    @classmethod
    def load_from_json(cls, json_path: str | Path) -> TrainerState:
        """Read a state that `save_to_json`, or transformers, wrote."""
        values = json.loads(Path(json_path).read_text(encoding="utf-8"))
        known = {each.name for each in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def compute_steps(self, args: Any, max_steps: int) -> None:
        """Resolve the intervals of the arguments: below 1 they are a ratio of all updates."""
        for kind in ("logging", "eval", "save"):
            steps = getattr(args, f"{kind}_steps")
            if steps is not None:
                setattr(self, f"{kind}_steps", math.ceil(max_steps * steps) if 0 < steps < 1 else int(steps))

    def init_training_references(self, trainer: Any, max_steps: int, num_train_epochs: int, trial: Any) -> None:
        """Record the length of a run, and which process this is; called by `train`."""
        self.max_steps, self.num_train_epochs = max_steps, num_train_epochs
        self.is_local_process_zero = trainer.is_local_process_zero()
        self.is_world_process_zero = trainer.is_world_process_zero()

    def collect(self, callbacks: Iterable[Any]) -> None:
        """Collect the states of stateful callbacks; several of one class become a list."""
        states: dict[str, list[Any]] = {}
        for callback in callbacks:
            if callable(getattr(callback, "state", None)):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        self.stateful_callbacks = {name: each if len(each) > 1 else each[0] for name, each in states.items()}

    def hand_out(self, callbacks: list[Any], replaces: bool = False) -> list[str]:
        """Restore the callbacks of a list: the n-th of a class gets the n-th state. Return the classes not found."""
        saved_states = self.stateful_callbacks.items()
        remaining = {name: [*states] if isinstance(states, list) else [states] for name, states in saved_states}
        for index, callback in enumerate(callbacks):
            states = remaining.get(type(callback).__name__)
            if states and callable(getattr(callback, "state", None)):
                saved = states.pop(0)
                if replaces:
                    callbacks[index] = type(callback)(**saved.get("args", {}))
                for name, value in saved.get("attributes", {}).items():
                    setattr(callbacks[index], name, value)
        return sorted(remaining.keys() - {type(callback).__name__ for callback in callbacks})


@dataclass
class TrainerControl(ExportableState):
    """The requests of callbacks; served right after the event, in the order log, evaluate, save.

    Attributes:
        should_training_stop, should_epoch_stop: end the run or the epoch after this update.
        should_save, should_evaluate, should_log: do so now; back to False at the next update.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def state(self) -> dict[str, Any]:
        """Return the flags."""
        return {"args": {name: getattr(self, name) for name in _FLAGS}, "attributes": {}}

    def _new_training(self) -> None:
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        self.should_save = self.should_evaluate = self.should_log = False


def shallow(state: TrainerState) -> dict[str, Any]:
    """Return the fields of a state; a deep copy takes seconds for a long log."""
    return {each.name: getattr(state, each.name) for each in dataclasses.fields(state)}


_FLAGS = tuple(each.name for each in dataclasses.fields(TrainerControl))


def checked_control(control: Any, event: str, callback: Any) -> Any:
    """Return a callback's return value, which must be a control."""
    if all(hasattr(control, name) for name in _FLAGS):
        return control
    place, kind = f"{type(callback).__name__}.{event}", type(control).__name__
    raise ConfigError(f"{place} returned a {kind}: an event must return the control object, or nothing")
