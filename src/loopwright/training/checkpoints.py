"""The checkpoints of a run: captured, written and reported, and the best model loaded at the end."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loopwright.back_reference import BackReference
from loopwright.callbacks import SaveTrainingStateCallback
from loopwright.callbacks.extra_state import warn_of_unsaved
from loopwright.checkpoint import Checkpoint, read
from loopwright.checkpoint import sharded_checkpoint as sharded
from loopwright.checkpoint.fingerprint import Change, fingerprint, tier
from loopwright.checkpoint.hidden_state import HiddenState, SamplerState, changed_modules, describe_modules
from loopwright.checkpoint.saver import Captured, Saver
from loopwright.checkpoint.state_by_name import fitted_state, optimizer_state, parameter_names
from loopwright.checkpoint.store import Label, check_savable, commit, set_aside_newer, take_snapshot
from loopwright.data.loader import REPLAYED
from loopwright.engine.processes import gather_objects, world_process_zero_only
from loopwright.engine.seeding import generator_states, restore_generator_states
from loopwright.engine.sharding import buffer_shapes, is_sharded, load_weights, local, mesh_of, reshard
from loopwright.errors import CheckpointError, ConfigError
from loopwright.failpoints import failpoint
from loopwright.progress import TRAINED, StopReason, rule_of
from loopwright.run_folder import LeaseError
from loopwright.stepping.graphs import has_graphs
from loopwright.training.hyper_parameters import as_json, hyper_parameters
from loopwright.training.model_files import check_class, check_shapes
from loopwright.training.resume import find_resume_path, settings_of, sizes_of

if TYPE_CHECKING:
    from loopwright.training.run import TrainingRun


class RunCheckpoints:
    """Saves the state of a run, and knows the checkpoint that it continues."""

    run = BackReference["TrainingRun"]()

    def __init__(self, run: TrainingRun) -> None:
        self.saver: Saver | None = None
        self.metadata: dict[str, Any] = {}  # the run's part of every manifest: guarantee, fingerprint, settings, data
        # The hyper-parameters as the user created them; None if the optimizer was used before.
        self.initial: dict[str, Any] | None = None
        self.resumed_from: Path | None = None
        self.loaded: dict[str, Any] | None = None  # the resumed state, until the callbacks have taken theirs
        self.is_changed = False  # the run continues with other settings or other data
        self.changes: list[Change] = []  # what the user has changed since the resumed checkpoint
        self.modules: dict[str, list[str]] = {}  # how model and loss function are built; see `describe_modules`
        self.buffers: dict[str, list[int] | None] = {}  # the shapes of the model's buffers as it is built
        self.hidden = HiddenState()  # of model and loss function, outside `state_dict`
        self.samplers = SamplerState()  # of the user's own samplers
        self.epoch_samplers: tuple[int, dict[str, Any]] = (-1, {})  # an epoch, and their state at its start
        self.ended: StopReason | None = None  # why the resumed run had ended, if it stays so
        self._has_loaded_model = False
        self.run = run

    # --- before the first update --------------------------------------------------------------------------------

    def find(self, resume_from: str | Path | None) -> Path | None:
        """Return the checkpoint to continue from, or None; rank 0 decides, since it may move bad ones away."""
        policy, notify = self.run.settings.checkpoints, self.run.trainer.notify
        found: Path | None = gather_objects(world_process_zero_only(find_resume_path)(resume_from, policy, notify))[0]
        return found

    def describe(self) -> None:
        """Collect the metadata of the run; called once everything is prepared and nothing is restored yet."""
        run, engine, dataset = self.run, self.run.engine, self.run.train_loader.dataset
        may_record = run.settings.step_mode != "eager" and has_graphs(run.trainer)
        mark = fingerprint(
            engine.device,
            processes=engine.num_processes,
            precision=str(engine.accelerator.mixed_precision),
            step_mode=run.settings.step_mode,
            # Only if they are not the default, which older checkpoints do not name.
            **({"reduction": run.settings.reduction} if run.settings.reduction != "fast" else {}),
            **({"sharding": "fsdp2"} if is_sharded(run.trainer.model) else {}),
            **({"augmentation": "device"} if getattr(dataset, "augments_on_device", False) is True else {}),
            **({"graphs": "of any shape"} if may_record else {}),
        )
        self.metadata = as_json(
            {
                "tier": tier(mark, mark, is_counted=run.train_loader.guarantee is REPLAYED),
                "fingerprint": mark,
                "settings": settings_of(run.settings, run.train_loader),
                "data": sizes_of(train_dataset=run.train_loader, eval_dataset=run.eval_loader),
            }
        )
        run.boundary.rules = {id(each): rule_of(each) for each in run.boundary.deciders()}
        modules = {"model": run.bare_model(), "loss_func": run.trainer.loss_func}
        self.modules, self.hidden = describe_modules(**modules), HiddenState(**modules, **self.state_holders())
        self.samplers = SamplerState(data=dataset, **run.train_loader.own_samplers)
        self.buffers, names = buffer_shapes(run.bare_model()), parameter_names(**modules)
        self.initial = hyper_parameters(run.bare_optimizer(), run.trainer.scheduler, names)

    def state_holders(self) -> dict[str, Any]:
        """Return further objects whose attributes are state of the run, as `Attributes` by name."""
        return {}

    def start(self) -> None:
        run, engine, policy = self.run, self.run.engine, self.run.settings.checkpoints
        if policy is not None:
            self.saver = Saver(
                policy,
                run.run_id,
                self.resumed_from,
                engine.rank,
                engine.num_processes,
                run.logbook.record.is_ours,
                is_sharded(run.trainer.model),
            )

    def rehearse(self) -> None:
        """Encode the state once before the first update: refuse now what could not be saved later."""
        trainer = self.run.trainer
        saves_itself = any(isinstance(callback, SaveTrainingStateCallback) for callback in trainer.callback_handler)
        if self.saver is None and not saves_itself:
            return
        warn_of_unsaved(trainer, self.run.bare_optimizer(), trainer.callback_handler)
        model, state, files = self.capture({})
        num_bytes = world_process_zero_only(check_savable)(model, state, files)
        if self.saver is not None and num_bytes is not None:
            self.saver.check_space(num_bytes, partial(trainer.notify, "disk.space"))
            self.saver.expect(model)

    def own_changes(self) -> list[Change]:
        """Return what the owner of this run has changed since the checkpoint, beside the trainer's settings."""
        return []

    def announce(self, path: Path, changes: list[Change], that_matter: list[Change], are_settings: bool = True) -> None:
        """Report the settings that changed since the checkpoint; refuse them where the run has to be exact."""
        policy = self.run.settings.checkpoints
        if that_matter and policy is not None and policy.require_exact:
            raise CheckpointError(
                f"{path} cannot be resumed bit-exactly with changed settings, and require_exact is set. "
                f"What differs: {'; '.join(map(str, that_matter))}."
            )
        self.is_changed = self.is_changed or bool(that_matter)
        self.changes += changes if are_settings else []
        for change in changes:
            text = f"Changed since the checkpoint (new value used): {change}"
            self.run.trainer.notify("resume.changes", text, change=change)

    def set_aside_newer(self, directory: str | Path, update: int) -> list[Path]:
        """Set aside the checkpoints of a folder that are newer than an update; return their old names."""
        return set_aside_newer(directory, update)

    # --- the state ----------------------------------------------------------------------------------------------

    def capture(self, metadata: dict[str, Any]) -> Captured:
        """Return the weights, everything else needed to continue, and further files; every process must call it."""
        run, trainer, engine = self.run, self.run.trainer, self.run.engine
        weights, extra = self.weights()
        model, optimizer, scaler = run.bare_model(), run.bare_optimizer(), engine.accelerator.scaler
        names, hidden = parameter_names(model=model, loss_func=trainer.loss_func), self.hidden.changed_anywhere()
        if hidden["lost"]:
            self.lower_tier(run.progress.update, f"{_listed(hidden['lost'])} has changed, and cannot be saved")
        loose = engine.loose_weights() if run.settings.gradient_clip_norm is not None else []
        if any(each.grad is not None for each in loose):
            self.lower_tier(
                run.progress.update, "gradients of weights outside the optimizer are clipped, and not saved"
            )
        state = {
            "run": self._run_state(),
            "metadata": {"current_epoch": trainer.run_history.current_epoch, **metadata},
            "history": trainer.run_history.state_dict(),
            "callbacks": trainer.callback_handler.state_dict(),
            "optimizer_class": type(optimizer).__name__,
            "optimizer": optimizer_state(optimizer, names),
            "scheduler_class": type(trainer.scheduler).__name__,
            "scheduler": trainer.scheduler.state_dict() if hasattr(trainer.scheduler, "state_dict") else None,
            "scaler": None if scaler is None else scaler.state_dict(),
            "loss_func": dict(trainer.loss_func.state_dict()) if isinstance(trainer.loss_func, nn.Module) else {},
            "generators": generator_states(engine.device),
            "num_processes": engine.num_processes,
            "modules": self.modules,
            "buffers": self.buffers,
            "hidden": hidden,
            "model_extra": extra,
            "record": {**run.logbook.record.state_dict(), "spent": run.logbook.seconds_spent()},
        }
        return weights, state, trainer.checkpoint_files()

    def weights(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the tensors of the model's state, and its other entries."""
        reshard(self.run.trainer.model)
        entries = self.run.bare_model().state_dict()
        tensors = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
        return tensors, {name: value for name, value in entries.items() if name not in tensors}

    def _run_state(self) -> dict[str, Any]:
        run, loader = self.run, self.run.train_loader
        why = run.boundary.decision()
        skips = run.settings.bad_samples == "skip" and loader is not None
        run.stepper.note_changes()
        return {
            "progress": run.progress.state_dict(),
            "seed": run.seed,
            "run_id": run.run_id,
            "first_epoch": run.first_epoch,
            "gradient_norm": run.gradient_norm,
            "losses": gather_objects(run.losses.state_dict()),
            "made": self.initial,
            "stop": None if why is None else [str(why), why.kind.value, why.rule],
            "skipped_in_a_row": run.logbook.skipped_in_a_row,
            "parts": asdict(run.memory.parts),
            "graphs": run.recordings.state_dict(),
            "skipped_samples": dict(loader.agree_on_skipped()) if skips else {},
            "samplers": self.sampler_state(),
        }

    def sampler_state(self, begins_epoch: bool = False) -> dict[str, Any]:
        """Return the state of the samplers; within an epoch that of its start, since a resume draws its ids again."""
        progress = self.run.progress
        is_between = self.epoch_samplers[0] != progress.epoch or progress.stage >= TRAINED
        if begins_epoch or (is_between and self.run.train_loader is not None):
            saved, lost, _ = self.samplers.changed()
            if lost:
                reason = f"{_listed(lost)} has changed and cannot be saved. Give the sampler a state_dict"
                self.lower_tier(progress.update, reason, "T3")
            self.epoch_samplers = progress.epoch, copy.deepcopy(saved)
        return self.epoch_samplers[1]

    def read(self, path: str | Path) -> Checkpoint:
        """Return the contents of a checkpoint; of a sharded model this process's part."""
        model = self.run.bare_model()
        if not is_sharded(model):
            return read(path)
        reshard(model)
        return sharded.read_for(model.state_dict(), mesh_of(model), path)

    def restore(self, checkpoint: Checkpoint, path: Path | None = None) -> None:
        """Put a checkpoint's model, optimizer, scheduler, scaler and generators back into the trainer.

        History and callbacks are not touched: they belong to the run, which may be another one. A CheckpointError names
        what differs if the checkpoint is of another model or optimizer; nothing is changed then. A run that
        resumes from `path` must have its modules built alike as well.
        """
        trainer, engine, state = self.run.trainer, self.run.engine, checkpoint.state
        model, optimizer = self.run.bare_model(), self.run.bare_optimizer()
        weights, built = {**checkpoint.model, **state["model_extra"]}, state.get("buffers", {})
        # By the saved run, and not by the user; a model that was used before may have any shapes.
        resized = [
            name for name, shape in self.buffers.items() if self.initial is None or built.get(name, ...) == shape
        ]
        check_shapes("the checkpoint", model.state_dict(), weights, resized)
        if path is not None:
            self._check_modules(path, state)
        check_class("optimizer", state["optimizer_class"], optimizer, "pass an optimizer of the same class")
        if state["scheduler"] is not None and trainer.scheduler is not None:
            check_class("scheduler", state["scheduler_class"], trainer.scheduler, "pass the same create_scheduler_fn")
        names = parameter_names(model=model, loss_func=trainer.loss_func)
        fitted = fitted_state(optimizer, state["optimizer"], names)
        load_weights(model, weights)
        self._restore_hidden(state, path)
        if state["loss_func"] and isinstance(trainer.loss_func, nn.Module):
            load_weights(trainer.loss_func, state["loss_func"])
        optimizer.load_state_dict(fitted)
        if state["scheduler"] is not None and trainer.scheduler is not None:
            trainer.scheduler.load_state_dict(state["scheduler"])
        if state["scaler"] is not None and engine.accelerator.scaler is not None:
            engine.accelerator.scaler.load_state_dict(state["scaler"])
        if state["num_processes"] == engine.num_processes == 1:
            restore_generator_states(state["generators"], engine.device)
        self.loaded = state

    def _restore_hidden(self, state: dict[str, Any], path: Path | None) -> None:
        """Restore the state outside `state_dict`, that of this process if there are as many as then."""
        hidden = state.get("hidden") or {}  # older states have none
        by_rank = hidden.get("by_rank") or [{}]
        is_same = len(by_rank) in (1, self.run.engine.num_processes)
        own = by_rank[self.run.engine.rank if is_same and len(by_rank) > 1 else 0]
        missing = self.hidden.restore({**hidden.get("common", {}), **own}, self.run.engine.device)
        missing += [*hidden.get("lost", ()), *([] if is_same else own)]
        samplers = {} if path is None else state["run"].get("samplers", {})
        of_samplers = self.samplers.restore(samplers, self.run.engine.device)
        missing += of_samplers
        missing = sorted({name for names in gather_objects(missing) for name in names})
        if not missing:
            return
        text = f"Resuming without the state of {_listed(missing)}: it was not saved, or does not fit this model"
        policy = self.run.settings.checkpoints
        if path is not None and policy is not None and policy.require_exact:
            raise CheckpointError(f"{path} cannot be resumed bit-exactly, and require_exact is set. {text}.")
        self.run.trainer.notify("resume.left_out", text)
        if path is not None:
            tier = "T3" if of_samplers else "T2"
            self.metadata["tier"], self.is_changed = max(self.metadata["tier"], tier), True

    def lower_tier(self, update: int | None, reason: str, tier: str = "T2") -> None:
        """Report once that the run is no longer exact, and record it; what is saved from here on says so too."""
        if not self.run.is_running or self.metadata["tier"] >= tier:
            return
        self.metadata |= {"tier": tier, "tier_reason": reason}
        guarantee = f"{tier} from here on: {reason}"
        self.run.trainer.notify("resume.guarantee", f"Resume guarantee {guarantee}", tier=tier, guarantee=guarantee)
        self.run.logbook.record.write("tier", update=update, tier=tier, reason=reason)

    def _check_modules(self, path: Path, state: dict[str, Any]) -> None:
        """Raise a CheckpointError if the model is built differently, unless that is allowed; report the differences."""
        if self.initial is None:
            return  # used before in this process: what it holds is not what it was built with
        policy, hidden = self.run.settings.checkpoints, state.get("hidden") or {}
        moved = {**hidden.get("common", {}), **(hidden.get("by_rank") or [{}])[0]}
        # Rank 0 has saved them, and decides.
        found = gather_objects(changed_modules(state.get("modules") or self.modules, self.modules, moved))
        changes, of_own_classes = found[0]
        of_model = [change for change in changes if change.name.split(".")[0] == "model"]
        if of_model and (policy is None or not policy.allow_changed_model):
            more = f" ({len(of_model) - 1} more differences)" if len(of_model) > 1 else ""
            raise CheckpointError(
                f"the model is not built like the one in {path}: {of_model[0]}{more}",
                code="resume.model",
                saw=["in Python: Checkpointing(..., allow_changed_model=True)"],
                fix="--allow_changed_model   or   build it as before",
            )
        self.announce(path, changes, changes)
        self.announce(path, of_own_classes, of_own_classes, are_settings=False)

    # --- saving -------------------------------------------------------------------------------------------------

    def request(self, directory: str | Path, metadata: dict[str, Any] | None = None) -> None:
        self.run.requests.saves.append((Path(directory), metadata or {}))

    def request_due(self, update: int) -> None:
        """Request a checkpoint if one is due after this update, and report the ones in flight."""
        if self.saver is None:
            return
        if not self.run.engine.is_distributed:
            self.report()
        if self.saver.is_due_after_update(update):
            self.run.trainer.request_save(self.saver.path(update))

    def request_due_after_epoch(self) -> None:
        progress, trainer = self.run.progress, self.run.trainer
        if self.saver is not None and self.saver.is_due_after_epoch(progress.epoch, trainer.run_history.latest()):
            trainer.request_save(self.saver.path(progress.update))

    def request_final(self) -> None:
        """Request the end of the run to be saved, unless its last epoch saved it already."""
        saver = self.saver
        if saver is None:
            return
        failpoint("before_final_save")
        position = self._position()
        if not gather_objects(world_process_zero_only(lambda: saver.holds(position))())[0]:
            self.run.trainer.request_save(saver.path(self.run.progress.update))

    def _position(self) -> dict[str, Any]:
        """Return where the run is: two states that are saved at the same position are the same."""
        return {**self.run.progress.state_dict(), "stop_reason": self.run.stop_reason}

    def serve(self) -> None:
        """Save everything that was requested, as of the last finished update."""
        run = self.run
        if run.is_torn:
            return
        if run.is_in_window:
            run.buffers.restore()  # a stop in the middle of an update has moved them already
            run.is_in_window = False
        saves, run.requests.saves = run.requests.saves, []
        if saves:
            with run.logbook.spending("save"):
                self._save(saves)

    def _save(self, saves: list[tuple[Path, dict[str, Any]]]) -> None:
        run, trainer = self.run, self.run.trainer
        for directory, metadata in saves:
            if self._has_loaded_model:
                self._report_unsaved(directory, "another model was loaded after the end of the run")
                continue
            saver = self.saver if self.saver is not None and directory.parent == self.saver.directory else None
            is_checked_later = saver is not None and saver.is_asynchronous  # by the writer, on its copy
            has_bad_loss = run.losses.has_nonfinite()
            if has_bad_loss or not (is_checked_later or self._weights_are_finite()):
                culprit = "a loss of this epoch was" if has_bad_loss else "a weight is"
                self._report_unsaved(directory, f"{culprit} not finite")
                if has_bad_loss and not run.is_ending:
                    run.logbook.log()  # which ends the run: everything from here on would be lost
                continue
            if saver is None:
                trainer.save_training_state(directory, metadata)
                continue
            saver.save(
                lambda metadata=metadata: self.capture(metadata),  # type: ignore[misc]
                run.progress.update,
                trainer.run_history.latest(),
                metadata=self.metadata,
                position=None if metadata else self._position(),
                must_happen=run.is_ending,
            )
            self.report()

    def _report_unsaved(self, directory: Path, reason: str) -> None:
        text = f"Not saving {directory}: {reason}"
        self.run.trainer.notify("checkpoint.unsaved", text, path=directory, reason=reason)

    def save_to(self, output_dir: str | Path, metadata: dict[str, Any]) -> None:
        """Write a training state into a folder at once; called by `Trainer.save_training_state`."""
        run, trainer, policy = self.run, self.run.trainer, self.run.settings.checkpoints
        if trainer.run_config is None or not self.metadata:
            raise ConfigError("save_training_state needs a trainer that has been prepared by train()")
        with run.logbook.spending("save"):
            if not self._weights_are_finite():
                raise CheckpointError(f"not saving {output_dir}: a weight is not finite")
            try:
                model, state, files = self.capture(metadata)
            except OSError as error:
                raise CheckpointError(f"cannot save {output_dir}: its metrics could not be written: {error}") from error
            label = Label(run.run_id, self.metadata, policy is not None and policy.is_open)
            given = (model, state, run.progress.update)
            if is_sharded(trainer.model):
                sharded.commit(sharded.take_snapshot(*given, files), output_dir, label)
            else:
                world_process_zero_only(lambda: commit(take_snapshot(*given, files=files), output_dir, label))()
            trainer.call_event("on_checkpoint_saved", path=Path(output_dir))

    def _weights_are_finite(self) -> bool:
        # Only trained weights: a frozen mask of -inf is not a sign of trouble.
        engine = self.run.engine
        trained = [weight for weight in engine.parameters if weight.is_floating_point() and weight.requires_grad]
        weights = [local(weight.detach()) for weight in trained]
        is_bad = bool(weights) and not bool(torch.stack([weight.isfinite().all() for weight in weights]).all())
        return not engine.agreement.largest(is_bad)[0]

    def wait(self) -> None:
        if self.saver is not None:
            self.saver.wait()

    def report(self) -> None:
        """Report the checkpoints committed since the last call to the callbacks, and report failures."""
        saver, run, record = self.saver, self.run, self.run.logbook.record
        if saver is None:
            return
        earlier = saver.last_error
        saver.warm_up(lambda: self.capture({}))
        # Several processes get here only right after a save, and all of them: a writer's failure is everyone's.
        while (saved := gather_objects(world_process_zero_only(saver.poll)())[0]) is not None:
            record.write("checkpoint", update=saver.update_of(saved), checkpoint=saved.name)
            record.set_status(last_checkpoint=saved.name, last_error=None)
            run.trainer.call_event("on_checkpoint_saved", path=saved)
        while saver.refusals:
            run.trainer.notify("checkpoint.refused", saver.refusals.pop(0))
        if saver.last_error is not None and saver.last_error is not earlier:
            text = f"Saving failed, trying again at the next save: {saver.last_error}"
            run.trainer.notify("checkpoint.failed", text, error=saver.last_error)
            record.set_status(last_error=saver.last_error)

    def report_last(self) -> None:
        """Record the checkpoints committed since the last report; called when a run fails."""
        saver, record = self.saver, self.run.logbook.record
        if saver is None:
            return
        with suppress(CheckpointError, LeaseError):  # the run ends because of another error, which is reported
            while (saved := saver.poll()) is not None:
                record.write("checkpoint", update=saver.update_of(saved), checkpoint=saved.name)
                record.set_status(last_checkpoint=saved.name)

    # --- the end of the run -------------------------------------------------------------------------------------

    def finish(self, interruption: KeyboardInterrupt | None) -> None:
        """Wait for the last checkpoint, and load the model that was requested for the end of the run."""
        run, saver = self.run, self.saver
        if saver is not None:
            with run.logbook.spending("save"):
                world_process_zero_only(saver.finish)()
            self.report()
            if saver.newest is not None and (interruption is not None or run.signals.received is not None):
                text = f"Saved {saver.newest}; resume the run from there"
                run.trainer.notify("checkpoint.saved", text, path=saver.newest)
        if run.requests.load is not None:
            run.trainer.load_checkpoint(run.requests.load)

    def load_at_end(self) -> None:
        """Load the requested model once the end of the run is saved: later saves would not be of the run."""
        run = self.run
        for callback in run.trainer.callback_handler:
            if isinstance(callback, SaveTrainingStateCallback):
                callback.ask_for_final(run.trainer)
        self.serve()
        self.wait()
        if run.requests.load is None:
            return
        try:
            run.trainer.load_checkpoint(run.requests.load)
        except CheckpointError:
            return  # `finish` tries again, and reports it
        run.requests.load, self._has_loaded_model = None, True


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
