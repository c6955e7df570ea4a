"""What a trainer keeps on disk: its state, to continue exactly, and its record, to be looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from loopwright.callbacks import SaveTrainingStateCallback
from loopwright.callbacks.keeping import warn_of_unsaved
from loopwright.checkpoint import Checkpoint, Checkpointing, read, write
from loopwright.checkpoint.fingerprint import EXACT, TIERS, differences, fingerprint, tier
from loopwright.checkpoint.named import parameter_names
from loopwright.checkpoint.saver import Captured, Saver
from loopwright.checkpoint.sharded import read_for
from loopwright.checkpoint.sharded import write as write_shards
from loopwright.checkpoint.store import check_savable
from loopwright.checkpoint.whole import Held, SplitModel, SplitOptimizer, gathered, write_gathered
from loopwright.data.loader import REPLAYED
from loopwright.engine.processes import (
    gather_objects,
    local_process_zero_first,
    local_process_zero_only,
    world_process_zero_only,
)
from loopwright.engine.sharding import is_sharded, local, mesh_of, reshard, whole_model
from loopwright.errors import CheckpointError, ConfigError, Preempted
from loopwright.failpoints import failpoint
from loopwright.progress import Parts
from loopwright.results import TrainResult
from loopwright.resuming import (
    apply_changes,
    as_json,
    begin_schedule,
    changed_types,
    check_sizes,
    find_resume_path,
    hyper_parameters,
    leave_newer_behind,
    settings_of,
    sizes_of,
)
from loopwright.run_folder import LeaseError, RunRecord
from loopwright.services import TrainerServices
from loopwright.training_state import capture, load_model_file, restore, save_model_file

_SETTLED = "gradient_accumulation_steps:"  # follows from the number of processes, and was told when it was settled
_TOTALS = ("num_epochs:", "max_num_train_steps:")  # a run that goes on for longer is still the same run


class TrainerPersistence(TrainerServices):
    """The part of `Trainer` that saves, resumes and records."""

    _made: dict[str, Any] | None = None
    _about: dict[str, Any] = {}  # replaced as a whole by every training run

    # --- the record of a run ------------------------------------------------------------------------------------

    @contextmanager
    def _recorded(self, checkpoints: Checkpointing | None) -> Iterator[RunRecord]:
        """Own the run folder while the block runs, and say in it how the run ended."""
        is_here = checkpoints is not None and self._engine.rank == 0
        record = RunRecord(checkpoints.record_folder if checkpoints is not None and is_here else None)
        previous = world_process_zero_only(record.open)()
        if previous is not None:
            self.print(f"Taking over from {previous}, which has ended without saying so")
        state, message, error = "failed", None, None
        try:
            yield record
            message = self._run.stop_reason
            state = "done" if message is None else "stopped"
        except (Preempted, KeyboardInterrupt) as interruption:
            state, message = "preempted", str(interruption) or type(interruption).__name__
            self._tell_last_saves(record)
            raise
        except BaseException as failure:
            error, message = failure, f"{type(failure).__name__}: {failure}"
            if self._saver is not None:
                self._saver.wait()  # it is good, and the process may end with the error
            self._tell_last_saves(record)
            raise
        finally:
            record.close(state, message, error, update=self.progress.update, epoch=self.run_history.current_epoch)

    def _tell_last_saves(self, record: RunRecord) -> None:
        """Write down the checkpoints that were committed since the loop looked last; called when a run breaks off."""
        if self._saver is None:
            return
        with suppress(CheckpointError, LeaseError):  # the run ends of something else, which is told
            while (saved := self._saver.poll()) is not None:
                record.write("checkpoint", update=self._saver.update_of(saved), checkpoint=saved.name)
                record.tell(last_checkpoint=saved.name)

    def write_record(self, event: str, **fields: Any) -> None:
        """Append an event of yours to metrics.jsonl, with the update and the epoch; called by callbacks and hooks.

        Without `checkpoints` there is no such file, and on all processes but the first nothing is written.
        """
        self._record.write(event, update=self.progress.update, epoch=self.run_history.current_epoch, **fields)

    def _start_run(self, resume_path: Path | None) -> None:
        """Continue a saved run or begin one, and make ready to save it; called once everything is prepared."""
        self._engine.follow_scheduler(self.optimizer)
        self._describe_run()
        if resume_path is not None:
            self._resume(resume_path)
        self._start_record()
        self._start_saver()
        self._run.is_running = True

    def _train_result(self) -> TrainResult:
        return TrainResult(
            metrics=self.run_history.latest(),
            epochs=self.progress.epoch,
            updates=self.progress.update,
            stop_reason=self._run.stop_reason,
            seed=self.seed,
            seconds=self._record.seconds,
        )

    def _start_record(self) -> None:
        """Begin metrics.jsonl, or go on with it where the checkpoint was, and say which guarantee holds."""
        settings, loaded = self._settings, self._run.loaded
        local_process_zero_first(self._record.begin)(None if loaded is None else loaded["record"])
        holds = self._about["tier"]
        if settings.checkpoints is not None or loaded is not None:
            but = ", but for the changes above" if self._run.is_changed else ""
            self.print(f"Resume guarantee {holds}, {TIERS[holds]}{but}")
        source = None if self._run.resumed_from is None else self._run.resumed_from.name
        self._record.write(
            "start",
            update=self.progress.update,
            epoch=self.run_history.current_epoch,
            run_id=self._run.run_id,
            resumed_from=source,
            tier=holds,
            seed=self.seed,
        )
        self._record.tell(
            state="running", update=self.progress.update, epoch=self.run_history.current_epoch, last_checkpoint=source
        )

    def _describe_run(self) -> None:
        """Note what the run is about; called once everything is prepared and nothing is restored yet."""
        settings, engine, loader = self._settings, self._engine, self._train_dataloader
        mark = fingerprint(
            engine.device,
            processes=engine.num_processes,
            precision=str(self._accelerator.mixed_precision),
            step_mode=settings.step_mode,
            # Named only where they are not the usual, which older checkpoints do not name.
            **({"reduction": settings.reduction} if settings.reduction != "fast" else {}),
            **({"sharding": "fsdp2"} if is_sharded(self.model) else {}),
        )
        self._about = as_json(
            {
                "tier": tier(mark, mark, is_counted=loader.guarantee is REPLAYED),
                "fingerprint": mark,
                "settings": settings_of(settings, loader),
                "data": sizes_of(train_dataset=loader, eval_dataset=self._eval_dataloader),
            }
        )
        self._made = hyper_parameters(self._unwrapped_optimizer(), self.scheduler, self._parameter_names())

    # --- resuming -----------------------------------------------------------------------------------------------

    def _find_resume_path(self, resume_from: str | Path | None, checkpoints: Checkpointing | None) -> Path | None:
        # The first process decides for all: looking may move bad checkpoints out of the way.
        found: Path | None = gather_objects(
            world_process_zero_only(find_resume_path)(resume_from, checkpoints, self.print)
        )[0]
        return found

    def _resume(self, path: Path) -> None:
        """Go on with a saved run: check that it is this one, restore it, and say what has changed since."""
        checkpoint = self._read(path)
        if "run" not in checkpoint.state:
            raise CheckpointError(f"{path} was not written by a Trainer: it does not say where the run stood")
        self._check_continuity(path, checkpoint.about)
        model = self._engine.unwrap(self.model, keep_torch_compile=False)
        types = changed_types(checkpoint.model, model.state_dict())
        self._announce(path, types, types)
        groups = [dict(group) for group in getattr(self._unwrapped_optimizer(), "param_groups", ())]
        self._restore(checkpoint)
        state, run = checkpoint.state, checkpoint.state["run"]
        self._run.resumed_from = path
        schedule = state["scheduler"]
        if hasattr(self.scheduler, "resume_state_dict") and (schedule or {}).get("is_continuation_from_checkpoint"):
            # Such a scheduler starts over when it is given a state, unless it is told that this is the same run.
            self.scheduler.resume_state_dict(schedule)
        for line in self._left_out_of(state):
            self.print(line)
        self._apply_settings(path, state)
        if self.scheduler is not None and state["scheduler_class"] == type(None).__name__:
            self.print(f"Starting a {type(self.scheduler).__name__}: the saved run had no scheduler")
            begin_schedule(self._unwrapped_optimizer(), groups)
        self.progress.load_state_dict(run["progress"])
        self._losses.load_process_states(run["losses"])
        self._run.first_epoch, self.seed, self._run.run_id = run["first_epoch"], run["seed"], run["run_id"]
        self._run.skipped_in_a_row = run["skipped_in_a_row"]
        self._parts = self._restored_parts(run.get("parts", {}))  # older states have none
        self.gradient_norm = run["gradient_norm"]  # of the last update: the log of an epoch's end tells it
        for loader in (self._train_dataloader, self._eval_dataloader):
            if loader is not None:
                loader.seed = self.seed
        self._train_dataloader.skipped = dict(run["skipped_samples"])
        self.run_history.load_state_dict(state["history"])
        self.run_history._set_epoch(self._run.first_epoch + self.progress.epoch)
        world_process_zero_only(leave_newer_behind)(path, self._settings.checkpoints, self.print)
        self.print(f"Resumed training state from {path} (epoch {self.run_history.current_epoch})")

    def _restored_parts(self, saved: dict[str, int]) -> Parts:
        """Return the parts that a saved run was run in; whole batches where parts would be refused."""
        parts = Parts(**saved)
        is_exact = self._settings.reduction == "exact"
        if parts == Parts() or not (is_exact or self._engine.is_distributed):
            return parts
        reason = 'reduction="exact" does not allow them' if is_exact else "several processes take part now"
        self.print(f"Resuming with whole batches, not in parts as since memory ran out: {reason}")
        self._about["tier"] = max(self._about["tier"], "T2")
        return Parts()

    def _check_continuity(self, path: Path, saved: dict[str, Any]) -> None:
        """Refuse other data; say what else differs, and which guarantee is left."""
        policy, about = self._settings.checkpoints, self._about
        if policy is None or not policy.allow_changed_data:
            check_sizes(saved["data"], about["data"])
        now = tier(saved["fingerprint"], about["fingerprint"], is_counted=about["tier"] == "T3")
        about["tier"] = max(now, saved["tier"])  # what was lost once does not come back
        differing = differences(saved["fingerprint"], about["fingerprint"])
        if policy is not None and policy.require_exact and about["tier"] not in EXACT:
            raise CheckpointError(
                f"{path} cannot be continued bit for bit ({about['tier']}, {TIERS[about['tier']]}), and require_exact "
                f"is set. What differs: {'; '.join(differing) or 'nothing; the data source has no random access'}."
            )
        for line in differing:
            self.print(f"Differs from when it was saved: {line}")
        changes = differences(saved["settings"], about["settings"]) + differences(saved["data"], about["data"])
        changes = [change for change in changes if not change.startswith(_SETTLED)]
        self._announce(path, changes, [change for change in changes if not change.startswith(_TOTALS)])

    def _announce(self, path: Path, changes: list[str], that_matter: list[str]) -> None:
        """Say what was changed on purpose; refuse it where the run has to be exact."""
        policy = self._settings.checkpoints
        if that_matter and policy is not None and policy.require_exact:
            raise CheckpointError(
                f"{path} cannot be continued bit for bit with other settings, and require_exact is set. "
                f"What differs: {'; '.join(that_matter)}."
            )
        self._run.is_changed = self._run.is_changed or bool(that_matter)
        for change in changes:
            self.print(f"Changed, the new value holds: {change}")

    def _apply_settings(self, path: Path, state: dict[str, Any]) -> None:
        """Let the optimizer's and scheduler's current settings win over the saved ones, and say what changed."""
        made, optimizer = state["run"]["made"], self._unwrapped_optimizer()
        if made is None or self._made is None:
            self._made = self._made or made
            return
        rates = {group["params"][0]: group.get("lr") for group in state["optimizer"]["param_groups"] if group["params"]}
        names = self._parameter_names()
        changes = apply_changes(optimizer, self.scheduler, made, self._made, names, rates)
        self._announce(path, changes, changes)

    def _left_out_of(self, state: dict[str, Any]) -> Iterator[str]:
        """Yield what a resumed run does not take over from a saved state, a line each."""
        if state["scheduler"] is not None and self.scheduler is None:
            yield f"Resuming without the saved {state['scheduler_class']}: no create_scheduler_fn was given"
        if state["run"]["seed"] != self.seed:
            yield f"Resuming with the saved seed {state['run']['seed']}: the order of samples follows from it"
        here = Counter(type(callback).__name__ for callback in self.callback_handler)
        for name, count in (Counter(saved["class"] for saved in state["callbacks"] if saved["state"]) - here).items():
            yield f"Resuming without the saved state of {count} {name}"

    # --- saving -------------------------------------------------------------------------------------------------

    def save_training_state(self, output_dir: str | Path, checkpoint_kwargs: dict[str, Any] | None = None) -> None:
        """Write everything needed to continue the run, as of its last finished update, into a folder.

        Args:
            output_dir: the folder; an older state of that name stays whole until the new one is.
            checkpoint_kwargs: further metadata; `load_training_state` returns it.
        """
        if self.run_config is None or not self._about:
            raise ConfigError("save_training_state needs a trainer that has been prepared by train()")
        if not self._weights_are_finite():
            raise CheckpointError(f"not saving {output_dir}: a weight is not finite, and nothing good could come of it")
        try:
            model, state, files = self._capture(checkpoint_kwargs or {})
        except OSError as error:
            raise CheckpointError(f"cannot save {output_dir}: the metrics of the run are not safe: {error}") from error
        policy = self._settings.checkpoints
        write_here = write_shards if is_sharded(self.model) else world_process_zero_only(write)
        write_here(
            output_dir,
            model,
            state,
            self.progress.update,
            run_id=self._run.run_id,
            about=self._about,
            files=files,
            is_open=policy is not None and policy.is_open,
        )
        self.call_event("on_checkpoint_saved", path=Path(output_dir))

    def load_training_state(self, input_dir: str | Path) -> dict[str, Any]:
        """Restore model, optimizer, scheduler, scaler and random generators from a saved state; return its metadata.

        The position in the run, the history and the callbacks are restored by `train(resume_from=...)` alone.
        """
        if self.run_config is None:
            raise ConfigError("load_training_state needs a trainer that has been prepared by train()")
        checkpoint = self._read(input_dir)
        self._restore(checkpoint)
        metadata: dict[str, Any] = checkpoint.state["metadata"]
        return metadata

    def _read(self, path: str | Path) -> Checkpoint:
        """Return what a checkpoint holds; of a sharded model this process's part of it."""
        model = self._engine.unwrap(self.model, keep_torch_compile=False)
        if not is_sharded(model):
            return read(path)
        reshard(model)
        return read_for(model.state_dict(), mesh_of(model), path)

    def _restore(self, checkpoint: Checkpoint) -> None:
        restore(self, self._engine, checkpoint)
        self._run.loaded = checkpoint.state

    def checkpoint_files(self) -> dict[str, bytes]:
        """Return further files of a checkpoint by name, such as a config.json; called for every checkpoint.

        They lie beside the weights, are listed and hashed in the manifest, and are not read when a run is resumed.
        """
        return {}

    def _capture(self, metadata: dict[str, Any]) -> Captured:
        """Return the weights, everything else that the run needs to continue, and further files.

        Every process must call it.
        """
        reshard(self.model)
        skips = self._settings.bad_samples == "skip" and self._train_dataloader is not None
        run = {
            "progress": self.progress.state_dict(),
            "seed": self.seed,
            "run_id": self._run.run_id,
            "first_epoch": self._run.first_epoch,
            "gradient_norm": self.gradient_norm,
            "losses": gather_objects(self._losses.state_dict()),
            "made": self._made,
            "skipped_in_a_row": self._run.skipped_in_a_row,
            "parts": asdict(self._parts),
            "skipped_samples": dict(self._train_dataloader.agree_on_skipped()) if skips else {},
        }
        model, state = capture(self, self._engine, run, metadata)
        state["record"] = self._record.state_dict()
        return model, state, self.checkpoint_files()

    def _weights_are_finite(self) -> bool:
        # What is not trained is as it was: a mask of -inf is no sign of trouble.
        trained = [weight for weight in self._engine.parameters if weight.is_floating_point() and weight.requires_grad]
        weights = [local(weight.detach()) for weight in trained]
        is_bad = bool(weights) and not bool(torch.stack([weight.isfinite().all() for weight in weights]).all())
        return not self._engine.agreement.largest(is_bad)[0]

    def _ask_for_final_save(self) -> None:
        """Ask for the end of the run to be saved, unless it was saved already, by its last epoch."""
        saver = self._saver
        if saver is None:
            return
        failpoint("before_final_save")
        position = self._position()
        if not gather_objects(world_process_zero_only(lambda: saver.holds(position))())[0]:
            self.request_save(saver.path(self.progress.update))

    def _position(self) -> dict[str, Any]:
        """Return where the run stands: two states that are saved at the same position are the same."""
        return {**self.progress.state_dict(), "stop_reason": self._run.stop_reason}

    def _serve_saves(self) -> None:
        """Save what was asked for, as of the last finished update."""
        if self._run.update_is_torn:
            return
        if self._run.is_in_window:
            self._buffers.restore()  # a stop in the middle of an update has moved them already
            self._run.is_in_window = False
        saves, self.requests.saves = self.requests.saves, []
        for directory, metadata in saves:
            if self._run.has_loaded:
                self.print(
                    f"Not saving {directory}: the model is no longer that of the run's end, but one loaded since"
                )
                continue
            saver = self._saver if self._saver is not None and directory.parent == self._saver.directory else None
            is_checked_later = saver is not None and saver.is_asynchronous  # by the writer, on its copy
            has_bad_loss = self._losses.has_nonfinite()
            if has_bad_loss or not (is_checked_later or self._weights_are_finite()):
                culprit = "a loss of this epoch was" if has_bad_loss else "a weight is"
                self.print(f"Not saving {directory}: {culprit} not finite")
                if has_bad_loss and not self._run.is_ending:
                    self._log()  # which ends the run: whatever it does from here on is lost
                continue
            if saver is None:
                self.save_training_state(directory, metadata)
                continue
            saver.save(
                lambda metadata=metadata: self._capture(metadata),  # type: ignore[misc]
                self.progress.update,
                self.run_history.latest(),
                about=self._about,
                position=None if metadata else self._position(),
                must_happen=self._run.is_ending,
            )
            self._report_saves()

    def _load_at_end(self) -> None:
        """Load what was asked for, once the end of the run is saved; what is asked for later would not be of it."""
        for callback in self.callback_handler:
            if isinstance(callback, SaveTrainingStateCallback):
                callback.ask_for_final(self)
        self._serve_saves()
        if self._saver is not None:
            self._saver.wait()
        if self.requests.load is None:
            return
        try:
            self.load_checkpoint(self.requests.load)
        except CheckpointError:
            return  # it is tried again, and told, when all is over
        self.requests.load, self._run.has_loaded = None, True

    def _start_saver(self) -> None:
        """Make ready to save, and make sure that everything can be saved before any work is done."""
        if self._settings.checkpoints is not None:
            run, engine = self._run, self._engine
            self._saver = Saver(
                self._settings.checkpoints,
                run.run_id,
                run.resumed_from,
                engine.rank,
                engine.num_processes,
                self._record.is_ours,
                is_sharded(self.model),
            )

    def _rehearse_saving(self) -> None:
        """Encode the state once before the first update: what cannot be saved is refused now, not at the first save."""
        saves_itself = any(isinstance(callback, SaveTrainingStateCallback) for callback in self.callback_handler)
        if self._saver is None and not saves_itself:
            return
        warn_of_unsaved(self, self._engine.unwrap_optimizer(self.optimizer), self.callback_handler)
        model, state, files = self._capture({})
        num_bytes = world_process_zero_only(check_savable)(model, state, files)
        if self._saver is not None and num_bytes is not None:
            self._saver.check_space(num_bytes, self.print)
            self._saver.expect(model)

    def _report_saves(self) -> None:
        """Tell the callbacks of a checkpoint that was committed since the last time, and of trouble."""
        if self._saver is None:
            return
        saver, earlier = self._saver, self._saver.last_error
        saver.warm_up(lambda: self._capture({}))
        # Several processes ask only right after a save, and all of them: the writer's trouble is everyone's.
        while (saved := gather_objects(world_process_zero_only(saver.poll)())[0]) is not None:
            self._record.write("checkpoint", update=saver.update_of(saved), checkpoint=saved.name)
            self._record.tell(last_checkpoint=saved.name, last_error=None)
            self.call_event("on_checkpoint_saved", path=saved)
        while saver.refusals:
            self.print(saver.refusals.pop(0))
        if saver.last_error is not None and saver.last_error is not earlier:
            self.print(f"Saving failed, trying again at the next save: {saver.last_error}")
            self._record.tell(last_error=saver.last_error)

    # --- model files --------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_path: str | Path,
        checkpoint_kwargs: dict[str, Any] | None = None,
        save_optimizer: bool = True,
        save_scheduler: bool = True,
        save_per_node: bool = True,
        *,
        model: Any = None,
    ) -> None:
        """Write the model, and optionally optimizer and scheduler, into one file.

        Args:
            save_path: a ".safetensors" file gets the weights alone, any other a dict as `torch.save` writes it.
            checkpoint_kwargs: further entries at the dict's top level.
            save_optimizer: include the optimizer's state.
            save_scheduler: include the scheduler's state, if there is a scheduler.
            save_per_node: write on one process of each node, not only of the first.
            model: another model than the trainer's own.
        """
        weights = self._engine.unwrap(self.model if model is None else model, keep_torch_compile=False)
        optimizer = self._engine.unwrap_optimizer(self.optimizer) if save_optimizer else None
        on_one = local_process_zero_only if save_per_node else world_process_zero_only
        if is_sharded(weights):
            reshard(weights)
            is_writer = bool(on_one(lambda: True)())
            if Path(save_path).suffix == ".safetensors":
                texts = {name: str(value) for name, value in (checkpoint_kwargs or {}).items()}
                write_gathered(save_path, weights.state_dict(), texts, is_writer)
                return
            weights = Held(gathered(weights.state_dict(), is_writer))
            optimizer = None if optimizer is None else Held(gathered(optimizer.state_dict(), is_writer))
        on_one(save_model_file)(
            save_path, weights, optimizer, self.scheduler if save_scheduler else None, checkpoint_kwargs or {}
        )

    def load_checkpoint(
        self, checkpoint_path: str | Path, load_optimizer: bool = True, load_scheduler: bool = True
    ) -> dict[str, Any]:
        """Read what `save_checkpoint` wrote, into the model and, where the file has them, optimizer and scheduler.

        A scheduler's state is left alone while the trainer has no scheduler: one exists only during `train`.
        """
        model = self._engine.unwrap(self.model, keep_torch_compile=False)
        optimizer = self._engine.unwrap_optimizer(self.optimizer)
        if is_sharded(model):
            reshard(model)
            model = SplitModel(model)
            optimizer = None if optimizer is None else SplitOptimizer(optimizer)
        return load_model_file(checkpoint_path, model, optimizer, self.scheduler, load_optimizer, load_scheduler)

    def whole_model(self) -> Any:
        """Return the model as an ordinary one, also where it is split over processes.

        Every process must call it. Of a split model the first one gets a copy on the host, the others get the model
        as it is.
        """
        return whole_model(self._engine.unwrap(self.model, keep_torch_compile=False))

    def whole_weights(self) -> dict[str, Any]:
        """Return the model's weights by name, on the host, also where the model is split over processes.

        Every process must call it, and all but the first get none: {}.
        """
        model = self._engine.unwrap(self.model, keep_torch_compile=False)
        reshard(model)
        is_first = self._engine.rank == 0
        weights: dict[str, Any] = gathered(dict(model.state_dict()), is_first)
        return weights if is_first else {}

    def _unwrapped_optimizer(self) -> Any:
        return self._engine.unwrap_optimizer(self.optimizer)

    def _parameter_names(self) -> dict[int, str]:
        model = self._engine.unwrap(self.model, keep_torch_compile=False)
        return parameter_names(model=model, loss_func=self.loss_func)
