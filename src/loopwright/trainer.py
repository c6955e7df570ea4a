"""The Trainer, and THE LOOP: `_run_training`, `_run_train_epoch` and `_finish_update`, to be read in this order.

An epoch is a sequence of updates; an update is a window of micro-batches. For each micro-batch: loss,
backward. Then clip, optimizer step, scheduler step, zero grad; and what was asked for is served: log,
evaluate, save, stop. The hooks are in `hooks.py`, preparing and asking in `services.py`, saving in `persistence.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from loopwright.callbacks import DEFAULT_CALLBACKS, CallbackHandler, LimitBatchesCallback
from loopwright.checkpoint import Checkpointing
from loopwright.checkpoint.saver import Saver
from loopwright.data import Loader, Window
from loopwright.data.defaults import LIMIT_BATCHES_ENV_VAR, limit_of_environment
from loopwright.engine.buffers import BufferShadow
from loopwright.engine.failing import fails_together
from loopwright.engine.processes import gather_objects, world_process_zero_only
from loopwright.engine.signals import SignalWatch
from loopwright.errors import StopTrainingError
from loopwright.evaluation import run_prediction
from loopwright.failpoints import failpoint
from loopwright.losses import EpochLosses, check_batch_output
from loopwright.progress import EVALUATED, FINISHED, TRAINED, Parts, Progress, Requests, RunState
from loopwright.results import EvaluationResult, PredictionResult, TrainResult
from loopwright.run_folder import RunRecord
from loopwright.schedulers import StatefulSchedulerBase, TrainerPlaceholderValues, replace_trainer_placeholder_values
from loopwright.settings import (
    Interval,
    RunSettings,
    check_is_idle,
    check_parameters,
    check_scheduler_factory,
    is_overridden,
)
from loopwright.tracking import InMemoryRunHistory, RunHistory
from loopwright.tuning import TrainerTuning

__all__ = [
    "DEFAULT_CALLBACKS",
    "LIMIT_BATCHES_ENV_VAR",
    "Trainer",
    "TrainerPlaceholderValues",
    "TrainerWithTimmScheduler",
    "replace_trainer_placeholder_values",
]


class Trainer(TrainerTuning):
    """Trains, evaluates and runs a model; override its hooks, add callbacks, or both.

    Attributes:
        model, loss_func, optimizer, scheduler: as given, and during a run as prepared for it.
        callback_handler: holds the callbacks.
        run_history: every metric of the run.
        run_config: the settled numbers of the current run.
        progress: where the run stands.
        seed: of the current run: the same seed gives the same run.
        gradient_norm: of the last update, before clipping, on the device; None unless clipped by norm.
    """

    def __init__(
        self,
        model: Any,
        loss_func: Any,
        optimizer: Any,
        callbacks: Iterable[Any] = DEFAULT_CALLBACKS,
        run_history: RunHistory | None = None,
    ) -> None:
        """Store everything; nothing is checked or moved before `train` or `evaluate`.

        Args:
            model: the module to train.
            loss_func: called with (outputs, targets); None if the model or an overridden hook computes the loss.
            optimizer: over the model's parameters.
            callbacks: instances, or classes to be made without arguments; called in this order.
            run_history: keeps the metrics; in memory by default.
        """
        self.model = model
        self.loss_func = loss_func
        self.optimizer = optimizer
        limit = limit_of_environment()
        self.callback_handler = CallbackHandler([] if limit is None else [LimitBatchesCallback(limit)])
        self.callback_handler.add_callbacks(callbacks)
        self.run_history: RunHistory = InMemoryRunHistory() if run_history is None else run_history
        self.create_scheduler_fn: Callable[..., Any] | None = None
        self.scheduler: Any = None
        self.collate_fn: Callable[..., Any] | None = None
        self.train_dataset: Any = None
        self.eval_dataset: Any = None
        self.run_config: Any = None
        self.progress, self._parts = Progress(), Parts()
        self.seed, self.requests = 0, Requests()
        self.gradient_norm: torch.Tensor | None = None
        self.current_rows: int | None = None
        self._train_dataloader: Any = None
        self._eval_dataloader: Any = None
        self._train_dl_kwargs: dict[str, Any] | None = None
        self._eval_dl_kwargs: dict[str, Any] | None = None
        self._settings = RunSettings()
        self._run = RunState()
        self._saver: Saver | None = None
        self._signals = SignalWatch()
        self._record = RunRecord()
        self._start_engine()
        self._losses = EpochLosses(self._engine)
        self.call_event("on_init_end")

    # --- what you call ------------------------------------------------------------------------------------------

    @fails_together
    def train(
        self,
        train_dataset: Any,
        num_epochs: int,
        eval_dataset: Any = None,
        per_device_batch_size: int = 8,
        max_num_train_steps: int | None = None,
        gradient_accumulation_steps: int = 1,
        gradient_clip_value: float | None = None,
        create_scheduler_fn: Callable[..., Any] | None = None,
        train_dataloader_kwargs: dict[str, Any] | None = None,
        eval_dataloader_kwargs: dict[str, Any] | None = None,
        reset_run_history: bool = True,
        collate_fn: Callable[..., Any] | None = None,
        resume_from: str | Path | None = None,
        *,
        seed: int | None = None,
        mixed_precision: str | None = None,
        gradient_clip_norm: float | None = None,
        step_mode: str = "auto",
        checkpoints: Checkpointing | None = None,
        log_every: int = 50,
        evaluate_every: int | str | None = None,
        nan: str = "stop",
        bad_samples: str = "raise",
        reduction: str = "fast",
        sharding: Any = None,
        oom: str = "stop",
    ) -> TrainResult:
        """Train the model.

        Args:
            train_dataset: map-style or iterable dataset, or a ready DataLoader.
            num_epochs: epochs in all, those before a resume included.
            eval_dataset: evaluated after each epoch.
            per_device_batch_size: samples of a micro-batch.
            max_num_train_steps: updates in all, if that is less than the epochs give.
            gradient_accumulation_steps: micro-batches per update and process.
            gradient_clip_value: clip each gradient element to [-v, v].
            create_scheduler_fn: called with the optimizer; a functools.partial may hold placeholders.
            train_dataloader_kwargs, eval_dataloader_kwargs: win over the loaders' defaults.
            reset_run_history: forget earlier runs' metrics; False counts epochs on from them.
            collate_fn: makes a batch of samples.
            resume_from: a saved training state to continue; "auto" takes the newest of `checkpoints`, if any.
            seed: fixes order, augmentation and dropout; None takes torch's current seed.
            mixed_precision: "no", "bf16", "fp16" or "fp8"; None follows accelerate's configuration.
            gradient_clip_norm: clip the gradient's norm.
            step_mode: "eager", "compile" (torch.compile) or "graph" (CUDA graphs); "auto" takes graphs where they work.
            checkpoints: where and when to save.
            log_every: updates between logs.
            evaluate_every: updates between evaluations within an epoch, or "2 epochs"; None is after each epoch.
            nan: "stop" at a loss that is not finite, or "skip" such updates, which waits for the device each time.
            bad_samples: "raise" when the dataset raises for a sample, or "skip" such samples.
            reduction: "exact" sums gradients the same way for every number of processes; "fast" as is quickest.
            sharding: "full_shard" to split weights, gradients and optimizer over the processes (FSDP2); None copies.
            oom: "stop" when memory runs out, or "split": run the update again in smaller micro-batches.

        Raises:
            ConfigError, DataError: before anything is touched.
            LeaseError: another process trains in the folder of `checkpoints`.
            MemoryLimitError: memory ran out.
        """
        settings = RunSettings(
            num_epochs=num_epochs,
            per_device_batch_size=per_device_batch_size,
            max_num_train_steps=max_num_train_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_clip_value=gradient_clip_value,
            gradient_clip_norm=gradient_clip_norm,
            mixed_precision=mixed_precision,
            step_mode=step_mode,
            checkpoints=checkpoints,
            log_every=log_every,
            evaluate_every=Interval.parse(evaluate_every),
            nan=nan,
            bad_samples=bad_samples,
            reduction=reduction,
            sharding=sharding,
            oom=oom,
        )
        check_scheduler_factory(create_scheduler_fn)
        check_parameters(self.model, self.optimizer, self.loss_func)
        self._check_dataset("train", train_dataset, train_dataloader_kwargs, per_device_batch_size)
        self._check_dataset("eval", eval_dataset, eval_dataloader_kwargs, per_device_batch_size)
        check_is_idle(self._run.is_running)
        self._check_step_mode(step_mode)
        with self._recorded(checkpoints) as record:
            resume_path = self._find_resume_path(resume_from, checkpoints)
            self._record = record
            if resume_path is None and reset_run_history:
                self.run_history.reset()
            self._start_anew(self._in_stored_windows(settings, resume_path))
            self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
            self.create_scheduler_fn, self.collate_fn = create_scheduler_fn, collate_fn
            self.seed = gather_objects(torch.initial_seed() if seed is None else seed)[0]
            self._train_dataloader = self.create_train_dataloader(
                batch_size=per_device_batch_size, train_dl_kwargs=train_dataloader_kwargs
            )
            if eval_dataset is not None:
                self._eval_dataloader = self.create_eval_dataloader(
                    batch_size=per_device_batch_size, eval_dl_kwargs=eval_dataloader_kwargs
                )
            try:
                self._prepare()
                accumulation = self._settings.gradient_accumulation_steps
                self.run_config = self._create_run_config(
                    per_device_batch_size, num_epochs, accumulation, max_num_train_steps, gradient_clip_value
                )
                if create_scheduler_fn is not None:
                    self.scheduler = self.create_scheduler()
                self._start_run(resume_path)
                with self._signals.installed():
                    self._run_training()
            finally:
                self._release()
        return self._train_result()

    @fails_together
    def evaluate(
        self,
        dataset: Any = None,
        per_device_batch_size: int = 8,
        dataloader_kwargs: dict[str, Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
    ) -> EvaluationResult:
        """Evaluate the model once and record `evaluation_loss`; the run history starts anew.

        Args:
            dataset: None takes the evaluation dataset of the last call, and its collate_fn unless one is given.
            per_device_batch_size: samples of a batch.
            dataloader_kwargs: win over the loader's defaults.
            collate_fn: makes a batch of samples.
        """
        self._set_up_evaluation(dataset, per_device_batch_size, dataloader_kwargs, collate_fn)
        try:
            self.run_history.reset()
            self._run_evaluation()
        finally:
            self._release()
        return EvaluationResult(self.run_history.latest(), self._run.stop_reason)

    @fails_together
    def predict(
        self,
        dataset: Any,
        per_device_batch_size: int = 8,
        dataloader_kwargs: dict[str, Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
    ) -> PredictionResult:
        """Run the model over a dataset and return its outputs in the dataset's order; no events, no history."""
        self._set_up_evaluation(dataset, per_device_batch_size, dataloader_kwargs, collate_fn, may_be_empty=True)
        try:
            self.model.eval()
            outputs, num_samples = run_prediction(self, self._engine, self._eval_dataloader)
        finally:
            self._release()
        return PredictionResult(outputs, {"num_samples": num_samples})

    # --- THE LOOP -----------------------------------------------------------------------------------------------

    def _run_training(self) -> None:
        """Run epochs until the run is complete; whatever ended it, the run-end hook and events follow."""
        interruption: KeyboardInterrupt | None = None
        try:
            self.training_run_start()
            self.call_event("on_training_run_start")
            self._begin_once()
            while not self._is_over():
                if self.progress.stage < TRAINED:
                    self._run_train_epoch(self._loader_of_epoch())
                if self.progress.stage < EVALUATED and self._evaluation_is_due():
                    self._evaluate_epoch()
                self._finish_epoch()
        except StopTrainingError as error:
            self._stop(error)
        except KeyboardInterrupt as error:
            interruption = self._signals.first(error, self._engine.is_distributed)
        self._finish_run(interruption)

    def _run_train_epoch(self, train_dl: Any) -> None:
        """Train one epoch, from wherever the run stands in it."""
        self.train_epoch_start()
        self._begin_epoch()
        self.call_event("on_train_epoch_start")
        windows = self._windows(train_dl)
        for window in windows if not self._has_reached_limit() else ():
            window = self._begin_update(window)
            if not self._replay(window):
                self._run_update(window)
            self._finish_update(window)
            if self._is_complete():
                break
        self._end_training_of_epoch(windows)
        self.train_epoch_end()
        self._reach(TRAINED, train_loss_epoch=self._losses.mean())
        self.call_event("on_train_epoch_end")
        self._serve_stop()

    def _run_update(self, window: Window) -> None:
        """Run forward and backward of each micro-batch of a window, and apply the gradients."""
        self._within_memory(self._run_micro_batches, window)
        self._losses.finish_update()
        if not self._skips_update():
            self._apply_gradients()
        self.optimizer_zero_grad()

    def _run_micro_batches(self, window: Window) -> None:
        """Run forward and backward of each micro-batch of a window."""
        for index, piece in enumerate(window.pieces):
            self._begin_micro_batch(window, index)
            self.call_event("on_train_step_start")
            step = self.progress.batch + window.number_of(index)
            self._perform_forward_and_backward_passes(piece.on(self.device), step)

    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        """Compute a micro-batch's loss and its gradients."""
        try:
            output = self.calculate_train_batch_loss(batch)
        except StopTrainingError as error:
            output = self._stand_in_for(batch, error)
        if self._run.is_first_batch:
            check_batch_output(output, "calculate_train_batch_loss", is_training=True)
            self._run.is_first_batch = False
        self.call_event("on_train_step_end", batch=batch, batch_output=output, step=step)
        loss = self._losses.weighted(output, self._run.piece_index)
        if loss is not None:
            self.backward_step(loss)

    def _finish_update(self, window: Window) -> None:
        """Count an update, and serve what was asked for."""
        self._count_update(window)
        self.call_event("on_update_end")
        self._ask_for_what_is_due()
        self._serve_requests()

    def _apply_gradients(self) -> None:
        """Clip, step the optimizer, step the scheduler."""
        if self._settings.clips:
            self._clip_gradients()
        self.call_event("on_before_optimizer_step")
        self._step_optimizer()
        self.call_event("on_optimizer_step_end")
        self._step_scheduler()

    # --- asking and serving -------------------------------------------------------------------------------------

    def _ask_for_what_is_due(self) -> None:
        settings, update = self._settings, self.progress.update
        if update % settings.log_every == 0:
            self.requests.log = True
        if self._eval_dataloader is not None and settings.evaluate_every.is_due(update, "update"):
            self.requests.evaluate = True
        self._record.beat()
        if self._saver is not None:
            if not self._engine.is_distributed:
                self._report_saves()
            if self._saver.is_due_after_update(update):
                self.request_save(self._saver.path(update))
        if not self._engine.agreement.is_begun:
            self._heed_signals()

    def _serve_requests(self) -> None:
        """Do what was asked for: log, evaluate, save, stop."""
        if self._engine.is_distributed:
            self._agree_on_requests()
        elif not self.requests.any():
            return
        stop, self.requests.stop = self.requests.stop, None
        if self.requests.log:
            self._log()
        if self.requests.evaluate:
            self.requests.evaluate = False
            self._run_eval_epoch(self._eval_dataloader, is_intermediate=True)
            stop = stop or self._signal_to_stop()
        self._serve_saves()
        if stop is not None:
            raise StopTrainingError(stop)

    # --- phases of the loop -------------------------------------------------------------------------------------

    def _begin_run(self) -> None:
        if self._run.resumed_from is not None and self._run.loaded is not None:
            self.callback_handler.load_state_dict(self._run.loaded["callbacks"])
            self._recount_batches(self._run.loaded["num_processes"])
        self._run.loaded = None
        # Such a scheduler gives the value of update 0 at its first step; torch's give it when they are made.
        if isinstance(self.scheduler, StatefulSchedulerBase) and self.scheduler._num_updates == -1:
            self.scheduler.step()
        self._run.epoch_is_whole = True  # unless `_begin_epoch` says otherwise: `_run_train_epoch` may be overridden
        failpoint("before_first_update")
        self._drop_gradients()
        self._buffers = BufferShadow(self.get_model(keep_torch_compile=False), self.loss_func)
        self._rehearse_saving()
        self._counts_items = is_overridden(self, Trainer, "count_batch_items")
        self._plan_graphs()
        self._throughput = self._create_throughput()

    def _begin_epoch(self) -> None:
        self._catch_up()
        done = -(-self.progress.batch // self._settings.gradient_accumulation_steps)
        self._run.first_update_of_epoch = self.progress.update - done + 1
        self._run.epoch_is_whole = False
        self._plan_agreement()
        if self.progress.batch == 0:
            self._losses = EpochLosses(self._engine)

    def _end_training_of_epoch(self, windows: Iterator[Window]) -> None:
        self.current_rows = None
        num_batches = self._train_dataloader.num_batches if isinstance(self._train_dataloader, Loader) else None
        # Where the length is not known, only asking for more tells.
        is_at_end = self.progress.batch == num_batches if num_batches is not None else False
        self._run.epoch_is_whole = is_at_end or next(windows, None) is None
        self._log()

    def _finish_epoch(self) -> None:
        if self.progress.stage < FINISHED:
            has_evaluated = self._eval_dataloader is None or self._evaluation_is_due()
            if self._has_reached_limit():
                limit, epoch = self._settings.max_num_train_steps, self.run_history.current_epoch
                self.print(f"Reached max number of training steps {limit} in epoch {epoch}")
            if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                use_eval = has_evaluated and self._eval_dataloader is not None
                self.scheduler.step(self.run_history.latest()["eval_loss_epoch" if use_eval else "train_loss_epoch"])
            self.training_run_epoch_end()
            self._reach(FINISHED)
            self.call_event("on_training_run_epoch_end", has_evaluated=has_evaluated)
            self._write_metrics("epoch")
        self.run_history._increment_epoch()
        if self._run.epoch_is_whole:
            self.progress.end_epoch()
        self.progress.reported = self.progress.update
        if self._saver is not None and self._saver.is_due_after_epoch(self.progress.epoch, self.run_history.latest()):
            self.request_save(self._saver.path(self.progress.update))
        self._serve_requests()

    def _end_run(self) -> None:
        failpoint("run_end")
        self.training_run_end()
        self.call_event("on_training_run_end")
        self._serve_stop()

    def _finish_run(self, interruption: KeyboardInterrupt | None) -> None:
        self._run.is_ending = True
        self._ask_for_final_save()
        for phase in (self._serve_saves, self._end_run, self._serve_saves):
            try:
                phase()
            except StopTrainingError as error:
                self._stop(error)
        if self._saver is not None:
            world_process_zero_only(self._saver.finish)()
            self._report_saves()
            self._signals.say_saved(interruption, self._saver.newest, self.print)
        if self.requests.load is not None:
            self.load_checkpoint(self.requests.load)
        self._signals.raise_for(interruption)


class TrainerWithTimmScheduler(Trainer):
    """A trainer for schedulers of timm's shape: `step_update(num_updates)` per update and `step(epoch)` per epoch.

    Attributes:
        num_updates: updates finished; None before training.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.num_updates: int | None = None
        super().__init__(*args, **kwargs)

    def train_epoch_start(self) -> None:
        """Take the number of updates from the run's progress."""
        super().train_epoch_start()
        self.num_updates = self.progress.update

    def scheduler_step(self) -> None:
        """Tell the scheduler how many updates are finished."""
        self.num_updates = self.progress.update + 1
        self.scheduler.step_update(num_updates=self.num_updates)

    def training_run_epoch_end(self) -> None:
        """Tell the scheduler how many epochs are finished, with or without evaluation."""
        super().training_run_epoch_end()
        if self.scheduler is not None:
            self.scheduler.step(self.progress.epoch + 1)
