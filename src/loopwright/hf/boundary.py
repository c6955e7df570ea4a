"""The boundary between two updates in transformers' terms: control flags stop a run, logs go through `log`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from loopwright.engine.processes import sum_over_processes
from loopwright.progress import StopReason
from loopwright.training.boundary import Boundary, requests_alone
from loopwright.training.logbook import Logbook
from loopwright.training.run import TrainingRun

if TYPE_CHECKING:
    from loopwright.hf.trainer import Trainer

_BY_CONTROL = "should_training_stop was set"
EPOCH_EVENTS = ("on_epoch_begin", "on_epoch_end", "on_evaluate", "on_prediction_step")
REQUESTING_EVENTS = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")


def owner_of(run: TrainingRun) -> Trainer:
    """Return the `hf.Trainer` whose core runs this run."""
    return run.trainer.owner  # type: ignore[attr-defined,no-any-return] # a Core


class HfBoundary(Boundary):
    """Obeys the flags of the owner's control."""

    def begin(self) -> None:
        owner_of(self.run).core.hf_run.begin()

    def decision(self) -> StopReason | None:
        control = owner_of(self.run).control
        if not control.should_training_stop or self.run.signals.received is not None:
            return super().decision()
        return self.run.checkpoints.ended or self.run.reason_of(_BY_CONTROL)

    def deciders(self) -> list[Any]:
        owner = owner_of(self.run)
        handler = owner.callback_handler
        return [handler.stopped_by or owner, *super().deciders(), *handler.callbacks, owner]

    def stay_ended(self, reason: StopReason) -> None:
        if reason != _BY_CONTROL:
            super().stay_ended(reason)
        owner_of(self.run).control.should_training_stop = True

    def own_requests(self) -> tuple[int, ...]:
        control = owner_of(self.run).control
        return *super().own_requests(), control.should_training_stop, control.should_epoch_stop

    def take_over(self, agreed: list[int]) -> None:
        control, (stop, stop_epoch) = owner_of(self.run).control, agreed
        control.should_training_stop = control.should_training_stop or bool(stop)
        control.should_epoch_stop = control.should_epoch_stop or bool(stop_epoch)

    def between_epochs(self) -> list[tuple[Any, str]]:
        owner = owner_of(self.run)
        called = [(each, event) for each in owner.callback_handler.callbacks for event in EPOCH_EVENTS]
        return [*super().between_epochs(), (owner, "evaluate"), *called]

    def late_requesters(self) -> list[str]:
        owner = owner_of(self.run)
        found = [] if owner.uses_default("training_step") else ["training_step"]
        for callback in owner.callback_handler.callbacks:
            name = type(callback).__name__
            found += [f"{name}.{event}" for event in REQUESTING_EVENTS if requests_alone(callback, event)]
        return [*super().late_requesters(), *found]

    def is_complete(self) -> bool:
        control = owner_of(self.run).control
        return control.should_epoch_stop or control.should_training_stop or super().is_complete()

    def is_over(self) -> bool:
        return owner_of(self.run).control.should_training_stop or super().is_over()

    def ends_epoch(self, is_at_end: bool) -> bool:
        return is_at_end or owner_of(self.run).control.should_epoch_stop


class HfLogbook(Logbook):
    """Logs through the owner's `log`, only when the control requests it."""

    def log(self) -> None:
        run, owner = self.run, owner_of(self.run)
        hf_run = owner.core.hf_run
        is_wanted, run.requests.log = run.requests.log, False
        if is_wanted and run.progress.update > hf_run.logged[2]:
            owner._globalstep_last_logged = hf_run.logged[2]
            loss, items = sum_over_processes(hf_run.take_logged(run.progress.update), run.engine.device)
            self.update_status()
            self.measure_speed()  # before the owner logs: progress bars show one of its values
            logs: dict[str, Any] = {"loss": loss / items if items else 0.0}
            if run.gradient_norm is not None:
                logs["grad_norm"] = float(run.gradient_norm)
            logs["learning_rate"] = float(hf_run.learning_rate)
            logs |= hf_run.counters.store()
            owner.log(logs) if owner.uses_default("_maybe_log_save_evaluate") else self._log_by_owner(logs)
            self.write_logs("log", {**logs, **self.graph_counts()})
            self.write_speed()
            hf_run.take_requests()
        self.stop_if_nonfinite(*self.find_nonfinite())

    def _log_by_owner(self, logs: dict[str, Any]) -> None:
        """Log through an overridden `_maybe_log_save_evaluate`; the loop serves the other requests itself."""
        owner, hf_run = owner_of(self.run), owner_of(self.run).core.hf_run
        owner.control.should_log, owner.control.should_evaluate, owner.control.should_save = True, False, False
        hf_run.logs = logs  # for a call of super
        loss = torch.tensor(logs["loss"] * (self.run.progress.update - owner._globalstep_last_logged))
        given = (loss, logs.get("grad_norm"), owner.model, hf_run.trial, owner.state.epoch, None, None)
        owner._maybe_log_save_evaluate(*given, learning_rate=logs["learning_rate"])

    def write_logs(self, event: str, values: dict[str, Any]) -> None:
        """Append logged values to metrics.jsonl; the core's update and epoch override values of the same name."""
        position = {"update": self.run.progress.update, "epoch": self.run.epoch}
        self.record.write(event, **{**values, **position})
