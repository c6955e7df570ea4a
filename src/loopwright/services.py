"""What a trainer offers beside the loop: asking, preparing a run, saving and loading, gathering, printing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from loopwright.callbacks import CallbackHandler
from loopwright.checkpoint import read, write
from loopwright.checkpoint.saver import Saver
from loopwright.data import Loader, Share, adopt
from loopwright.engine import Engine, create_accelerator, forget_precision
from loopwright.engine.nested import iter_tensors, map_tensors
from loopwright.engine.processes import gather_objects, gather_rows, local_process_zero_only, world_process_zero_only
from loopwright.engine.signals import SignalWatch
from loopwright.errors import CheckpointError, ConfigError, StopTrainingError
from loopwright.evaluation import run_eval_epoch, swapped
from loopwright.failpoints import failpoint
from loopwright.hooks import TrainerHooks
from loopwright.losses import EpochLosses, prediction
from loopwright.progress import EVALUATED, FINISHED, Progress, Requests, RunState
from loopwright.run_config import create_run_config
from loopwright.settings import RunSettings, check_dataset, check_is_idle, is_overridden
from loopwright.tracking import RunHistory
from loopwright.training_state import capture, load_model_file, restore, save_model_file


class TrainerServices(TrainerHooks):
    """The part of `Trainer` that serves the loop and its users."""

    callback_handler: CallbackHandler
    run_history: RunHistory
    run_config: Any
    progress: Progress
    requests: Requests
    seed: int
    gradient_norm: torch.Tensor | None
    current_rows: int | None
    _engine: Engine
    _accelerator: Any
    _settings: RunSettings
    _run: RunState
    _losses: EpochLosses
    _train_dataloader: Any
    _eval_dataloader: Any
    _saver: Saver | None
    _signals: SignalWatch

    # --- asking -------------------------------------------------------------------------------------------------

    def request_log(self) -> None:
        """Ask for a log at the next update boundary."""
        self.requests.log = True

    def request_evaluation(self) -> None:
        """Ask for an evaluation at the next update boundary; it is recorded as `intermediate_eval_loss`."""
        # Without an evaluation dataset there is nothing to do, and nothing lost by going on.
        self.requests.evaluate = self._eval_dataloader is not None

    def request_save(self, directory: str | Path, metadata: dict[str, Any] | None = None) -> None:
        """Ask for a saved training state at the next update boundary."""
        self.requests.saves.append((Path(directory), metadata or {}))

    def request_load(self, checkpoint_path: str | Path) -> None:
        """Ask for a checkpoint file to be loaded when the run is over and everything asked for is saved."""
        self.requests.load = Path(checkpoint_path)

    def request_stop(self, reason: str) -> None:
        """Ask for the run to end at the next update boundary; all processes stop together."""
        self.requests.stop = self.requests.stop or reason

    def call_event(self, event: str, **kwargs: Any) -> None:
        """Call an event of every callback, with this trainer as its first argument."""
        try:
            self.callback_handler.call_event(event, self, **kwargs)
        except StopTrainingError as error:
            # Leaving alone would let the other processes wait for this one for ever.
            if not self._engine.is_distributed:
                raise
            self.request_stop(str(error))

    def _log(self) -> None:
        """Bring the losses since the last log to the host and hand them to the callbacks."""
        self.requests.log = False
        loss = self._losses.mean_since_last_log()
        if loss is None:
            return
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        logs = {
            "update": self.progress.update,
            "epoch": self.run_history.current_epoch,
            "loss": loss,
            "lr": learning_rate,
        }
        if self.gradient_norm is not None:
            logs["gradient_norm"] = float(self.gradient_norm)
        finite = self._losses.num_finite_batches()
        accumulation = self._settings.gradient_accumulation_steps
        first = None if finite is None else self._run.first_update_of_epoch + finite // accumulation
        self.call_event("on_log", logs=logs, first_nonfinite_update=first)

    # --- preparing ----------------------------------------------------------------------------------------------

    def _start_anew(self, settings: RunSettings) -> None:
        self._settings = settings
        self.progress, self.requests = Progress(), Requests()
        self._run = RunState(first_epoch=self.run_history.current_epoch)
        self._saver = None
        self._signals = SignalWatch()
        self._train_dataloader = self._eval_dataloader = None
        self._train_dl_kwargs = self._eval_dl_kwargs = None
        self.scheduler = self.gradient_norm = self.current_rows = None
        self.callback_handler.refresh()

    def _create_accelerator(self) -> Any:
        """Return a fresh Accelerator; override it for plugins, trackers or another configuration."""
        return create_accelerator(self._settings.mixed_precision)

    def _heed_signals(self) -> None:
        if self._signals.received is not None:
            self.request_stop(f"Received {self._signals.received.name}: ending the run in order")

    def _agree_on_requests(self) -> None:
        """Make the requests of all processes the same: what one asks for, all do."""
        requests = self.requests
        asked = (requests.log, requests.evaluate, len(requests.saves), requests.stop is not None)
        log, evaluate, saves, stop = self._engine.agreement.largest(*asked)
        requests.log, requests.evaluate = bool(log), bool(evaluate)
        if stop:
            requests.stop = requests.stop or "Stopped by another process"
        if saves:
            everyone = [save for one in gather_objects(requests.saves) for save in one]
            requests.saves = list({path: (path, metadata) for path, metadata in reversed(everyone)}.values())[::-1]

    def _prepare(self) -> None:
        """Prepare everything, and make sure that the loaders are ours, also when the hook below is overridden."""
        self._prepare_model_optimizer_and_dataloaders()
        if self._train_dataloader is not None:
            self._train_dataloader = self._as_loader(self._train_dataloader)
            self._train_dataloader.limit = self.callback_handler.batch_limit(self, training=True)
        if self._eval_dataloader is not None:
            self._eval_dataloader = self._as_loader(self._eval_dataloader, is_evaluation=True)
            self._eval_dataloader.limit = self.callback_handler.batch_limit(self, training=False)
        if isinstance(self.loss_func, torch.nn.Module):
            self.loss_func.to(self.device)  # before a resume gives the optimizer state for its parameters

    def _start_engine(self) -> None:
        forget_precision()
        self._accelerator = self._create_accelerator()
        self._engine = Engine(self._accelerator)

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        """Make a fresh engine, and prepare the model, the optimizer and the loaders for it."""
        self._release()
        self._start_engine()
        self.model, self.optimizer = self._engine.prepare(self.model, self.optimizer)
        if self._settings.step_mode == "compile":
            self.model.compile()
        if self._train_dataloader is not None:
            self._train_dataloader = self._as_loader(self._train_dataloader)
        if self._eval_dataloader is not None:
            self._eval_dataloader = self._as_loader(self._eval_dataloader, is_evaluation=True)

    def _create_run_config(
        self,
        per_device_batch_size: int,
        num_epochs: int,
        gradient_accumulation_steps: int,
        max_num_train_steps: int | None,
        gradient_clip_value: float | None,
    ) -> Any:
        """Return the settled numbers of the run."""
        return create_run_config(
            self._accelerator,
            self._train_dataloader,
            self._eval_dataloader,
            self._train_dl_kwargs,
            self._eval_dl_kwargs,
            per_device_batch_size,
            num_epochs,
            gradient_accumulation_steps,
            max_num_train_steps,
            gradient_clip_value,
        )

    def _as_loader(self, source: Any, is_evaluation: bool = False) -> Loader:
        if isinstance(source, Loader):
            return source
        share = Share(self._engine.rank, self._engine.num_processes, self._settings.gradient_accumulation_steps)
        return adopt(source, seed=self.seed, share=share, device=self.device, evaluation=is_evaluation)

    def _release(self) -> None:
        """Give the model and the optimizer back as the user made them, and let the loaders' workers go."""
        self._run.is_running = False
        for loader in (self._train_dataloader, self._eval_dataloader):
            if isinstance(loader, Loader):
                loader.close()
        if self._settings.step_mode == "compile" and isinstance(self.model, torch.nn.Module):
            self.model._compiled_call_impl = None
        self.model, self.optimizer = self._engine.release(self.model, self.optimizer)

    def _clip_gradients(self) -> None:
        """Clip the gradients of an update, once, when they are complete."""
        settings = self._settings
        self.gradient_norm = self._engine.clip(settings.gradient_clip_value, settings.gradient_clip_norm)

    def _drop_gradients(self) -> None:
        """Forget gradients that belong to no update; `optimizer_zero_grad` is for those of a finished one."""
        for holder in (self.model, self.optimizer):
            if hasattr(holder, "zero_grad"):
                holder.zero_grad()

    def _resume(self, path: Path) -> None:
        self.load_training_state(path)
        assert self._run.loaded is not None
        run = self._run.loaded["run"]
        self._run.resumed_from = path
        schedule = self._run.loaded["scheduler"]
        if hasattr(self.scheduler, "resume_state_dict") and (schedule or {}).get("is_continuation_from_checkpoint"):
            # Such a scheduler starts over when it is given a state, unless it is told that this is the same run.
            self.scheduler.resume_state_dict(schedule)
        for left_out in self._left_out_of(self._run.loaded):
            self.print(left_out)
        self.progress.load_state_dict(run["progress"])
        self._losses.load_process_states(run["losses"])
        self._run.first_epoch, self.seed, self._run.run_id = run["first_epoch"], run["seed"], run["run_id"]
        self.gradient_norm = run["gradient_norm"]  # of the last update: the log of an epoch's end tells it
        for loader in (self._train_dataloader, self._eval_dataloader):
            if loader is not None:
                loader.seed = self.seed
        self.run_history.load_state_dict(self._run.loaded["history"])
        self.run_history._set_epoch(self._run.first_epoch + self.progress.epoch)
        self.print(f"Resumed training state from {path} (epoch {self.run_history.current_epoch})")

    def _left_out_of(self, state: dict[str, Any]) -> Iterator[str]:
        """Yield what a resumed run does not take over from a saved state, a line each."""
        if state["scheduler"] is not None and self.scheduler is None:
            yield f"Resuming without the saved {state['scheduler_class']}: no create_scheduler_fn was given"
        if state["run"]["seed"] != self.seed:
            yield f"Resuming with the saved seed {state['run']['seed']}: the order of samples follows from it"
        here = Counter(type(callback).__name__ for callback in self.callback_handler)
        for name, count in (Counter(saved["class"] for saved in state["callbacks"] if saved["state"]) - here).items():
            yield f"Resuming without the saved state of {count} {name}"

    def _set_up_evaluation(
        self,
        dataset: Any,
        batch_size: int,
        kwargs: dict[str, Any] | None,
        collate_fn: Any,
        may_be_empty: bool = False,
    ) -> None:
        check_is_idle(self._run.is_running)
        dataset = self.eval_dataset if dataset is None else dataset
        if dataset is None:
            raise ConfigError("there is nothing to evaluate: pass a dataset (no earlier call had one either)")
        if not may_be_empty and not is_overridden(self, TrainerHooks, "create_eval_dataloader"):
            check_dataset(dataset, "dataset", kwargs or {}, batch_size)
        # A training state may still be saved after it: where the last training run stood is kept.
        kept = self.progress, self.scheduler, self._run.first_epoch
        self._start_anew(RunSettings(per_device_batch_size=batch_size, mixed_precision=self._settings.mixed_precision))
        self.progress, self.scheduler, self._run.first_epoch = kept
        self.eval_dataset, self.collate_fn = dataset, collate_fn
        self._eval_dataloader = self.create_eval_dataloader(batch_size=batch_size, eval_dl_kwargs=kwargs)
        self._prepare()
        self.run_config = self._create_run_config(batch_size, 1, 1, 1, None)

    # --- evaluating and stopping --------------------------------------------------------------------------------

    def _run_eval_epoch(self, valid_dl: Any, is_training: bool = True, is_intermediate: bool = False) -> None:
        """Evaluate once; the loss is recorded under a name that says where in the run it was."""
        loader = self._as_loader(valid_dl, is_evaluation=True)
        loader.limit = self.callback_handler.batch_limit(self, training=False, is_intermediate=is_intermediate)
        name = "intermediate_eval_loss" if is_intermediate else "eval_loss_epoch" if is_training else "evaluation_loss"
        run_eval_epoch(self, self._engine, loader, name, is_intermediate)
        if is_training and not is_intermediate and not self.run_history.metric_name_prefix:
            self._reach(EVALUATED)
        if not is_intermediate:  # else it is a request itself, and a stop is served after the saves
            self._serve_stop()

    def _run_evaluation(self) -> None:
        try:
            self.evaluation_run_start()
            self.call_event("on_evaluation_run_start")
            self._run_eval_epoch(self._eval_dataloader, is_training=False)
        except StopTrainingError as error:
            self._stop(error)
        try:
            self.evaluation_run_end()
            self.call_event("on_evaluation_run_end")
        except StopTrainingError as error:
            self._stop(error)

    def evaluate_copy(self, model: Any, callbacks: Iterable[Any], metric_prefix: str) -> None:
        """Evaluate another model on the run's evaluation data, with these callbacks alone, under a metric prefix."""
        handler = CallbackHandler(callbacks, limited_by=self.callback_handler)
        with swapped(self, model, handler, metric_prefix), self._accelerator.autocast():
            self._run_eval_epoch(self._eval_dataloader)

    def _stand_in_for(self, batch: Any, error: StopTrainingError) -> dict[str, Any]:
        """Turn a stop raised in a batch-loss hook into a request where other processes wait for this one's gradients.

        They get gradients of zero from here, and all stop together after this update.
        """
        if not self._engine.is_distributed:
            raise error
        self.request_stop(str(error))
        outputs = prediction(self.model, batch)
        zero = sum(tensor.sum() for tensor in iter_tensors(outputs) if tensor.is_floating_point()) * 0.0
        return {"loss": zero, "model_outputs": outputs, "batch_size": 0}

    def _reach(self, stage: int) -> None:
        # An epoch cut short by a limit is trained on when the limit is raised: it stays where it is.
        if self._run.epoch_is_whole:
            self.progress.stage = stage

    def _serve_stop(self) -> None:
        self._heed_signals()
        reason = self.requests.stop
        if self._engine.agreement.largest(reason is not None)[0]:
            self.requests.stop = None
            raise StopTrainingError(reason or "Stopped by another process")

    def _stop(self, error: StopTrainingError) -> None:
        """End the run early: say why, drop what is half done, tell the callbacks."""
        self.print(error)
        self._run.stop_reason = str(error)
        self.requests.stop = None  # what was asked for meanwhile is done
        if self.progress.stage == FINISHED:
            self.progress.end_epoch()
        self._drop_gradients()
        try:
            self.call_event("on_stop_training_error", error=error)
        except StopTrainingError as another:
            self.print(another)

    # --- saving and loading -------------------------------------------------------------------------------------

    def save_training_state(self, output_dir: str | Path, checkpoint_kwargs: dict[str, Any] | None = None) -> None:
        """Write everything needed to continue the run, as of its last finished update, into a folder.

        Args:
            output_dir: the folder; an older state of that name stays whole until the new one is.
            checkpoint_kwargs: further metadata; `load_training_state` returns it.
        """
        if self.run_config is None:
            raise ConfigError("save_training_state needs a trainer that has been prepared by train()")
        if not self._weights_are_finite():
            raise CheckpointError(f"not saving {output_dir}: a weight is not finite, and nothing good could come of it")
        model, state = self._capture(checkpoint_kwargs or {})
        world_process_zero_only(write)(output_dir, model, state, self.progress.update)
        self.call_event("on_checkpoint_saved", path=Path(output_dir))

    def load_training_state(self, input_dir: str | Path) -> dict[str, Any]:
        """Restore model, optimizer, scheduler, scaler and random generators from a saved state; return its metadata.

        The position in the run, the history and the callbacks are restored by `train(resume_from=...)` alone.
        """
        if self.run_config is None:
            raise ConfigError("load_training_state needs a trainer that has been prepared by train()")
        checkpoint = read(input_dir)
        restore(self, self._engine, checkpoint)
        self._run.loaded = checkpoint.state
        metadata: dict[str, Any] = checkpoint.state["metadata"]
        return metadata

    def _capture(self, metadata: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the weights and everything else that the run needs to continue; every process must call it."""
        run = {
            "progress": self.progress.state_dict(),
            "seed": self.seed,
            "run_id": self._run.run_id,
            "first_epoch": self._run.first_epoch,
            "gradient_norm": self.gradient_norm,
            "losses": gather_objects(self._losses.state_dict()),
        }
        return capture(self, self._engine, run, metadata)

    def _weights_are_finite(self) -> bool:
        weights = [weight.detach() for weight in self._engine.parameters if weight.is_floating_point()]
        return not weights or bool(torch.stack([weight.isfinite().all() for weight in weights]).all())

    def _serve_saves(self) -> None:
        """Save what was asked for, as of the last finished update."""
        if self._run.update_is_torn:
            return
        saves, self.requests.saves = self.requests.saves, []
        for directory, metadata in saves:
            if self._losses.has_nonfinite() or not self._weights_are_finite():
                culprit = "a loss of this epoch was" if self._losses.has_nonfinite() else "a weight is"
                self.print(f"Not saving {directory}: {culprit} not finite")
                continue
            if self._saver is None or directory.parent != Path(self._saver.directory):
                self.save_training_state(directory, metadata)
                continue
            if self._run.is_ending:
                failpoint("before_final_save")
            self._saver.save(
                lambda metadata=metadata: self._capture(metadata),  # type: ignore[misc]
                self.progress.update,
                self.run_history.latest(),
                must_happen=self._run.is_ending,
            )
            self._report_saves()

    def _start_saver(self) -> None:
        if self._settings.checkpoints is not None:
            run, engine = self._run, self._engine
            self._saver = Saver(
                self._settings.checkpoints, run.run_id, run.resumed_from, engine.rank, engine.num_processes
            )

    def _report_saves(self) -> None:
        """Tell the callbacks of a checkpoint that was committed since the last time, and of trouble."""
        if self._saver is None:
            return
        earlier = self._saver.last_error
        # Several processes ask only right after a save, and all of them: the writer's trouble is everyone's.
        saved = gather_objects(world_process_zero_only(self._saver.poll)())[0]
        if self._saver.last_error is not None and self._saver.last_error is not earlier:
            self.print(f"Saving failed, trying again at the next save: {self._saver.last_error}")
        if saved is not None:
            self.call_event("on_checkpoint_saved", path=saved)

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
        return load_model_file(checkpoint_path, model, optimizer, self.scheduler, load_optimizer, load_scheduler)

    # --- small tools --------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the model is during a run."""
        return self._engine.device

    @property
    def num_processes(self) -> int:
        """How many processes take part in the run."""
        return self._engine.num_processes

    @property
    def train_loader(self) -> Any:
        """The training loader of the current run, or None."""
        return self._train_dataloader

    @property
    def eval_loader(self) -> Any:
        """The evaluation loader of the current run, or None."""
        return self._eval_dataloader

    def gather(self, tensor: Any, padding_value: float | None = None) -> Any:
        """Concatenate tensors over processes on dim 0: each sample once, in order, also from uneven batches.

        Args:
            tensor: a tensor, or a tuple, list or dict of them.
            padding_value: fills up further dimensions where the processes' differ.
        """
        is_pad = self.current_rows == 0
        return map_tensors(tensor, lambda rows: gather_rows(rows[:0] if is_pad else rows, self.device, padding_value))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per node."""
        if self._accelerator.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201 - what this method is for
