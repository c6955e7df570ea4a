"""What a trainer offers beside the loop: asking, preparing a run, evaluating, stopping, gathering, printing."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from loopwright.callbacks import CallbackHandler
from loopwright.checkpoint.saver import Saver
from loopwright.data import Loader, Share, Window, adopt
from loopwright.data.defaults import without_preparation, without_sharing
from loopwright.engine import Engine, create_accelerator, forget_precision
from loopwright.engine.buffers import BufferShadow
from loopwright.engine.compiling import compile_model
from loopwright.engine.engine import check_reduction
from loopwright.engine.memory import leave_alone
from loopwright.engine.nested import iter_tensors, map_tensors
from loopwright.engine.processes import gather_objects, gather_rows
from loopwright.engine.sharding import is_sharded
from loopwright.engine.signals import SignalWatch
from loopwright.errors import ConfigError, StopTrainingError
from loopwright.evaluation import run_eval_epoch, swapped
from loopwright.hooks import TrainerHooks
from loopwright.losses import EpochLosses, prediction
from loopwright.progress import EVALUATED, FINISHED, TRAINED, Parts, Progress, Requests, RunState
from loopwright.resuming import stored_window
from loopwright.run_config import create_run_config
from loopwright.run_folder import RunRecord
from loopwright.settings import RunSettings, check_dataset, check_is_idle, is_overridden
from loopwright.tracking import RunHistory

STOPPED_BY_FILE = "Asked to stop by a file in the run folder: ending the run in order"
_MOST_SKIPPED_IN_A_ROW = 10


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
    _parts: Parts
    _losses: EpochLosses
    _train_dataloader: Any
    _eval_dataloader: Any
    _saver: Saver | None
    _signals: SignalWatch
    _record: RunRecord
    _buffers: BufferShadow

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
        """Ask for a checkpoint file to be loaded at the end of the run, once everything asked for is saved.

        Asked for in `on_training_run_end`, it is loaded at once: callbacks further down the list see it.
        """
        self.requests.load = Path(checkpoint_path)
        if self._run.is_ending:
            self._load_at_end()

    def _load_at_end(self) -> None:
        """Load what was asked for, once the end of the run is saved."""

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
        except (RuntimeError, MemoryError) as error:
            leave_alone(error)
            raise

    def _log(self) -> None:
        """Bring the losses since the last log to the host and hand them to the callbacks."""
        self.requests.log = False
        loss = self._losses.mean_since_last_log()
        if loss is None:
            return
        logs = {"update": self.progress.update, "epoch": self.run_history.current_epoch, "loss": loss}
        if "lr" in self.optimizer.param_groups[0]:  # an optimizer need not have one
            logs["lr"] = float(self.optimizer.param_groups[0]["lr"])
        if self.gradient_norm is not None:
            logs["gradient_norm"] = float(self.gradient_norm)
        logs |= self._step_logs()
        self._record.write("log", **logs)
        self._tell_speed()
        self._record.tell(update=self.progress.update, epoch=self.run_history.current_epoch)
        first, samples = self._find_nonfinite()
        self.call_event("on_log", logs=logs, first_nonfinite_update=first, nonfinite_samples=samples)
        self._stop_if_nonfinite(first, samples)  # also where no callback does it

    def _step_logs(self) -> dict[str, Any]:
        """Return what a log says about how updates were run."""
        return {}

    def _tell_speed(self) -> None:
        """Record how fast the run was since the last log."""

    def _find_nonfinite(self) -> tuple[int | None, list[int] | None]:
        """Return the first update of the epoch with a loss that was not finite, if there is one, and its samples."""
        index = self._losses.first_nonfinite_window(self._settings.gradient_accumulation_steps)
        if index is None:
            return None, None
        first = self._run.first_update_of_epoch + index
        return first, self._report_nonfinite(first, index)

    def _stop_if_nonfinite(self, update: int | None, samples: list[int] | None) -> None:
        if update is not None and self._settings.nan == "stop":
            raise StopTrainingError(f"Stopping training: the loss of update {update} is not finite{_listed(samples)}")

    def _report_nonfinite(self, update: int, index: int) -> list[int] | None:
        """Write down which samples an update had whose loss was not finite; return their ids if they are known.

        Args:
            update: its number.
            index: its place in the epoch, from 0.
        """
        batches = self._train_dataloader.samples_of(self.progress.epoch, index)
        known = [] if batches is None else batches
        listed = [{"position": position, "samples": ids} for position, ids in known]
        epoch = self.run_history.current_epoch
        self._record.keep("nan_batch.json", {"update": update, "epoch": epoch, "micro_batches": listed})
        return None if batches is None else [index for _, ids in batches for index in ids]

    # --- preparing ----------------------------------------------------------------------------------------------

    def _start_anew(self, settings: RunSettings) -> None:
        self._settings = settings
        self.progress, self.requests, self._parts = Progress(), Requests(), Parts()
        self._run = RunState(first_epoch=self.run_history.current_epoch)
        self._saver = None
        self._signals = SignalWatch()
        self._buffers = BufferShadow()
        self._train_dataloader = self._eval_dataloader = None
        self._train_dl_kwargs = self._eval_dl_kwargs = None
        self.scheduler = self.gradient_norm = self.current_rows = None
        self.callback_handler.refresh()

    def _in_stored_windows(self, settings: RunSettings, resume_path: Path | None) -> RunSettings:
        """Return the settings with the accumulation that gives updates of as many micro-batches as the run began with.

        Raises:
            ConfigError: that many cannot be shared out evenly among the processes there are now, or not exactly.
        """
        is_exact = settings.reduction == "exact"
        check_reduction(settings.reduction, self.model)
        processes, given = self._engine.num_processes, settings.gradient_accumulation_steps
        window = (None if resume_path is None else stored_window(resume_path)) or processes * given
        # A part of the tree that is summed exactly has a power of two of leaves, unless it is the whole tree.
        allowed = [
            number
            for number in range(1, window + 1)
            if window % number == 0 and (not is_exact or number == 1 or (window // number).bit_count() == 1)
        ]
        if processes not in allowed:
            why = " so that each has a power of two of them, as an exact sum needs" if is_exact else ""
            raise ConfigError(
                f"an update of this run has {window} micro-batches, which {processes} processes cannot share evenly"
                f"{why}. Start it on another number of processes: {', '.join(map(str, allowed))}."
            )
        if window // processes != given:
            self.print(
                f"gradient_accumulation_steps is {window // processes} on {processes} processes, not {given}: "
                f"an update of this run has {window} micro-batches"
            )
        return replace(settings, gradient_accumulation_steps=window // processes)

    def _recount_batches(self, processes_before: int) -> None:
        """Count the micro-batches of a resumed run as this process would have run them; the first process saved its."""
        progress, loader = self.progress, self._train_dataloader
        share, per_epoch = loader.share, loader.num_batches
        before = share.window // processes_before
        done = -(-progress.batch // before)
        earlier = progress.total_batches - progress.batch
        if before != share.accumulation:
            earlier = earlier * share.accumulation // before if per_epoch is None else progress.epoch * per_epoch
        is_at_end = per_epoch is not None and done >= loader.num_updates
        progress.batch = per_epoch if is_at_end else done * share.accumulation
        progress.total_batches = earlier + progress.batch

    def _create_accelerator(self) -> Any:
        """Return a fresh Accelerator; override it for plugins, trackers or another configuration."""
        return create_accelerator(self._settings.mixed_precision, sharding=self._settings.sharding)

    def remedies_of_unused_parameters(self) -> tuple[str, str]:
        """Return how to train parameters that a loss may not depend on, and how to freeze them; called for an error."""
        handler = "DistributedDataParallelKwargs(find_unused_parameters=True)"
        shared = f"override _create_accelerator to return Accelerator(kwargs_handlers=[{handler}])"
        return shared, "parameter.requires_grad_(False)"

    def _heed_signals(self) -> None:
        if self._run.is_ending:
            return  # it ends already
        if self._signals.received is not None:
            self.request_stop(f"Received {self._signals.received.name}: ending the run in order")
        elif self._record.is_asked_to_stop():
            self.request_stop(STOPPED_BY_FILE)

    def _signal_to_stop(self) -> str | None:
        """Return why to stop if a signal came while requests were served; several processes agree a little later."""
        if self._engine.is_distributed:
            return None
        self._heed_signals()
        reason, self.requests.stop = self.requests.stop, None
        return reason

    def _agree_on_requests(self) -> None:
        """Make the requests of all processes the same: what one asks for, all do."""
        requests, agreement = self.requests, self._engine.agreement
        agreed = agreement.end() if agreement.is_begun else agreement.largest(*self._asked())
        log, evaluate, saves, *stop = agreed[:5]
        # What was asked for since this began to be agreed on, all processes have asked for.
        requests.log, requests.evaluate = requests.log or bool(log), requests.evaluate or bool(evaluate)
        self._stop_with_others(*stop)
        self._take_over(agreed[5:])
        if saves:
            everyone = [save for one in gather_objects(requests.saves) for save in one]
            requests.saves = list({path: (path, metadata) for path, metadata in reversed(everyone)}.values())[::-1]

    def _asked(self) -> tuple[int, ...]:
        """Return what this process asks for, as integers of which the largest over all processes holds."""
        requests = self.requests
        return requests.log, requests.evaluate, len(requests.saves), *self._asked_to_stop()

    def _take_over(self, agreed: list[int]) -> None:
        """Take what was agreed on of what a subclass has added to `_asked`."""

    def _asked_to_stop(self) -> tuple[bool, int]:
        return self.requests.stop is not None, self._signals.received or 0

    def _stop_with_others(self, is_asked: int, number: int) -> None:
        """Take over what any process was asked: to stop, and by which signal."""
        if number and self._signals.received is None:
            self._signals.received = signal.Signals(number)  # raised at the end of the run, on all of them
        if is_asked:
            self.requests.stop = self.requests.stop or "Stopped by another process"

    def _prepare(self) -> None:
        """Prepare everything, and make sure that the loaders are ours, also when the hook below is overridden."""
        loaders = self._train_dataloader, self._eval_dataloader
        forget_precision()
        self._prepare_model_optimizer_and_dataloaders()
        if self._engine.accelerator is not self._accelerator:  # an override has made its own
            self._engine = Engine(self._accelerator, self._settings.reduction)
        self._engine.follow(self.model, self.optimizer)
        self._train_dataloader = without_preparation(self._train_dataloader, loaders[0])
        self._eval_dataloader = without_preparation(self._eval_dataloader, loaders[1])
        self._losses.follow(self._engine)
        if self._train_dataloader is not None:
            self._train_dataloader = self._as_loader(self._train_dataloader)
            self._train_dataloader.limit = self.callback_handler.batch_limit(self, training=True)
            if self.device.type == "cuda" and not self._engine.is_distributed and torch.cuda.device_count() > 1:
                self.print(unused_devices(torch.cuda.device_count()))
        if self._eval_dataloader is not None:
            self._eval_dataloader = self._as_loader(self._eval_dataloader, is_evaluation=True)
            self._eval_dataloader.limit = self.callback_handler.batch_limit(self, training=False)
        if isinstance(self.loss_func, torch.nn.Module):
            self.loss_func.to(self.device)  # before a resume gives the optimizer state for its parameters

    def _start_engine(self) -> None:
        forget_precision()
        self._accelerator = self._create_accelerator()
        self._engine = Engine(self._accelerator, self._settings.reduction)

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        """Make a fresh engine, and prepare the model, the optimizer and the loaders for it."""
        self._release()
        self._start_engine()
        self.model, self.optimizer = self._engine.prepare(self.model, self.optimizer)
        if self._settings.step_mode == "compile":
            compile_model(self.model, getattr(self._train_dataloader, "collate_fn", None))
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
        source = without_sharing(source, self._engine.num_processes)
        # Every forward pass of a sharded model gathers its weights: the processes must run equally many.
        engine, accumulation = self._engine, self._settings.gradient_accumulation_steps
        share = Share(engine.rank, engine.num_processes, accumulation, is_even=is_sharded(self.model))
        return adopt(
            source,
            seed=self.seed,
            share=share,
            device=self.device,
            evaluation=is_evaluation,
            bad_samples=self._settings.bad_samples,
        )

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

    def _set_up_evaluation(
        self, dataset: Any, batch_size: int, kwargs: dict[str, Any] | None, collate_fn: Any, may_be_empty: bool = False
    ) -> None:
        """Prepare everything for an evaluation or a prediction; called before what `_release` has to follow."""
        check_is_idle(self._run.is_running)
        if dataset is None:
            dataset, collate_fn = self.eval_dataset, collate_fn or self.collate_fn
        if dataset is None:
            raise ConfigError("there is nothing to evaluate: pass a dataset (no earlier call had one either)")
        if not may_be_empty:
            self._check_dataset("eval", dataset, kwargs, batch_size, "dataset")
        # A training state may still be saved after it: where the last training run stood is kept.
        kept = self.progress, self.scheduler, self._run.first_epoch, self._parts.train
        self._start_anew(RunSettings(per_device_batch_size=batch_size, mixed_precision=self._settings.mixed_precision))
        self.progress, self.scheduler, self._run.first_epoch, self._parts.train = kept
        self.eval_dataset, self.collate_fn = dataset, collate_fn
        try:
            self._eval_dataloader = self.create_eval_dataloader(batch_size=batch_size, eval_dl_kwargs=kwargs)
            self._prepare()
            self.run_config = self._create_run_config(batch_size, 1, 1, 1, None)
        except BaseException:
            self._release()
            raise

    def _check_dataset(
        self, part: str, dataset: Any, kwargs: dict[str, Any] | None, batch_size: int, name: str | None = None
    ) -> None:
        """Refuse a dataset without a batch, unless the hook that makes its loader is overridden."""
        if not is_overridden(self, TrainerHooks, f"create_{part}_dataloader"):
            check_dataset(dataset, name or f"{part}_dataset", kwargs or {}, batch_size)

    def _count_update(self, window: Window) -> None:
        """Count a finished update: from here on it can be saved."""
        self.progress.advance(window.num_batches, window.samples)
        self._losses.count_update()
        self._run.is_in_window = self._run.update_is_torn = False

    # --- limits -------------------------------------------------------------------------------------------------

    def _has_reached_limit(self) -> bool:
        limit = self._settings.max_num_train_steps
        return limit is not None and self.progress.update >= limit

    def _is_complete(self) -> bool:
        return self._has_reached_limit() or self.progress.epoch >= self._settings.num_epochs

    def _is_over(self) -> bool:
        """Whether nothing is left, not even to report an epoch that a limit cut short before the run was saved."""
        is_reported = self.progress.batch == 0 or self.progress.reported == self.progress.update
        return self.progress.epoch >= self._settings.num_epochs or (self._has_reached_limit() and is_reported)

    def _evaluation_is_due(self) -> bool:
        every, epoch = self._settings.evaluate_every, self.progress.epoch + 1
        is_last = epoch >= self._settings.num_epochs or self._has_reached_limit()
        is_due = every.unit == "update" or every.is_due(epoch, "epoch") or is_last
        return self._eval_dataloader is not None and is_due

    # --- evaluating and stopping --------------------------------------------------------------------------------

    def _run_eval_epoch(self, valid_dl: Any, is_training: bool = True, is_intermediate: bool = False) -> None:
        """Evaluate once; the loss is recorded under a name that says where in the run it was."""
        loader = self._as_loader(valid_dl, is_evaluation=True)
        loader.limit = self.callback_handler.batch_limit(self, training=False, is_intermediate=is_intermediate)
        name = "intermediate_eval_loss" if is_intermediate else "eval_loss_epoch" if is_training else "evaluation_loss"
        self._write_metrics("evaluation" if self.run_history.metric_name_prefix else "training")
        run_eval_epoch(self, self._engine, loader, name, is_intermediate)
        if self._engine.agreement.is_begun:
            self._engine.agreement.end()
        self._write_metrics("evaluation")

    def _evaluate_epoch(self) -> None:
        """Evaluate after an epoch; an evaluation that a callback makes of its own does not stand for this one."""
        self._run_eval_epoch(self._eval_dataloader)
        self._reach(EVALUATED)
        self._serve_stop()

    def _write_metrics(self, event: str) -> None:
        """Append what was recorded in the history since the last time to metrics.jsonl."""
        self._record.write_metrics(
            event, self.run_history, update=self.progress.update, epoch=self.run_history.current_epoch
        )

    def _during_evaluation(self) -> None:
        """Called before every evaluation batch: an evaluation that can be made again later is left for a signal."""
        self._record.beat()
        is_whole_epoch = self._run.is_running and self.progress.stage == TRAINED and self._run.epoch_is_whole
        if not is_whole_epoch or self.run_history.metric_name_prefix:
            return
        agreement, is_asked = self._engine.agreement, self._signals.received is not None
        if self._engine.is_distributed:
            # What was asked for by the batch before is known by now: nobody waits.
            is_agreed = agreement.is_begun and bool(agreement.end()[0])
            agreement.begin(is_asked)
            is_asked = is_agreed
        if is_asked:
            self._serve_stop()

    def _run_evaluation(self) -> None:
        try:
            self.evaluation_run_start()
            self.call_event("on_evaluation_run_start")
            self._run_eval_epoch(self._eval_dataloader, is_training=False)
            self._serve_stop()
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

    def _skips_update(self) -> bool:
        """Whether the gradients of this update are to be left out, by `nan="skip"`; all processes agree on it."""
        if self._settings.nan != "skip":
            return False
        gradients = [] if self._accelerator.scaler is not None else self._engine.gradients()
        is_bad = not self._losses.update_is_finite(gradients)
        if not self._engine.agreement.largest(is_bad)[0]:
            self._run.skipped_in_a_row = 0
            return False
        self._run.skipped_in_a_row += 1
        update = self.progress.update + 1
        samples = self._report_nonfinite(update, update - self._run.first_update_of_epoch)
        self.print(f"Skipping update {update}: its loss or gradient is not finite{_listed(samples)}")
        self._record.write("skipped_update", update=update, epoch=self.run_history.current_epoch, samples=samples)
        self._losses.drop_update()
        self._buffers.restore()
        if self._run.skipped_in_a_row >= _MOST_SKIPPED_IN_A_ROW:
            self.request_stop(f"Stopping training: {_MOST_SKIPPED_IN_A_ROW} updates in a row were not finite")
        return True

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

    def _reach(self, stage: int, **metrics: float) -> None:
        """Write down that a stage of the epoch is over, and what it came to."""
        for name, value in metrics.items():
            self.run_history.update_metric(name, value)
        # An epoch cut short by a limit is trained on when the limit is raised: it stays where it is.
        if self._run.epoch_is_whole:
            self.progress.stage = stage

    def _serve_stop(self) -> None:
        self._heed_signals()
        self._stop_with_others(*self._engine.agreement.largest(*self._asked_to_stop()))
        reason, self.requests.stop = self.requests.stop, None
        if reason is not None:
            raise StopTrainingError(reason)

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


def unused_devices(num_devices: int) -> str:
    """Return a line that says how to train on all GPUs of a machine; printed when a run begins on one of several."""
    return (
        f"Training on 1 of {num_devices} GPUs. All of them: lw launch -n {num_devices} -- train ..., "
        f"or torchrun --nproc-per-node {num_devices} with a script"
    )


def _listed(samples: list[int] | None) -> str:
    if samples is None:
        return ""
    more = "" if len(samples) <= 8 else f" and {len(samples) - 8} more"
    return f" (samples {', '.join(map(str, samples[:8]))}{more})"
