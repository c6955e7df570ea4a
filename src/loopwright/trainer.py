"""The Trainer, and THE LOOP: four methods from `_run_training` on, to be read in order.

An epoch is a sequence of updates; an update is a window of micro-batches. For each micro-batch: loss, backward. Then
clip, optimizer step, scheduler step, zero grad, and at the boundary: log, evaluate, save, stop, if requested. The hooks
to override are in `hooks.py`; the state of a run and its parts are in `training/run.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from loopwright import lr_finder
from loopwright.callbacks import (
    CONSOLE_CALLBACKS,
    DEFAULT_CALLBACKS,
    CallbackHandler,
    LimitBatchesCallback,
    MetricsCallback,
)
from loopwright.checkpoint import Checkpointing
from loopwright.collisions import CORE_CONTRACT, warn_of_collisions
from loopwright.data import Window
from loopwright.data.defaults import LIMIT_BATCHES_ENV_VAR, limit_of_environment
from loopwright.engine import create_accelerator
from loopwright.engine.joint_failure import fails_together
from loopwright.engine.memory import leave_alone
from loopwright.engine.nested import map_tensors
from loopwright.engine.processes import gather_objects, gather_rows
from loopwright.errors import ConfigError, StopTrainingError, explains_arguments
from loopwright.hooks import TrainerHooks
from loopwright.progress import EVALUATED, TRAINED, Progress, Requests
from loopwright.results import EvaluationResult, PredictionResult, TrainResult
from loopwright.run_config import create_run_config
from loopwright.schedulers import TrainerPlaceholderValues, replace_trainer_placeholder_values
from loopwright.settings import RunSettings, check_is_idle, check_order, check_parameters, check_scheduler_factory
from loopwright.stepping.eager import MicroBatchStep
from loopwright.tracking import InMemoryRunHistory, RunHistory
from loopwright.training import model_files
from loopwright.training.boundary import Boundary
from loopwright.training.checkpoints import RunCheckpoints
from loopwright.training.evaluation import evaluate_epoch, run_evaluation, run_prediction, swapped
from loopwright.training.logbook import Logbook
from loopwright.training.prepare import check_data, check_step_mode, prepare, start_evaluation
from loopwright.training.resume import in_stored_windows
from loopwright.training.run import TrainingRun, of_run

__all__ = [
    "DEFAULT_CALLBACKS",
    "LIMIT_BATCHES_ENV_VAR",
    "Trainer",
    "TrainerPlaceholderValues",
    "TrainerWithTimmScheduler",  # noqa: F822 - see __getattr__
    "replace_trainer_placeholder_values",
]


class Trainer(TrainerHooks):
    """Trains, evaluates and runs a model; override its hooks, add callbacks, or both.

    Attributes:
        model, loss_func, optimizer, scheduler: as given, and during a run as prepared for it.
        callback_handler: holds the callbacks.
        run_history: every metric of the run.
        run_config: the resolved numbers of the current run.
        graph_safe: of a subclass: its step hooks may be recorded once and replayed. They then see the same tensors each
            time, with new values in them, and run on the host only while they are recorded.
    """

    graph_safe: ClassVar[bool] = False

    @explains_arguments
    def __init__(
        self,
        model: Any,
        loss_func: Any,
        optimizer: Any,
        callbacks: Iterable[Any] = CONSOLE_CALLBACKS,
        run_history: RunHistory | None = None,
        *,
        metrics: Any = None,
    ) -> None:
        """Store everything; nothing but the order is checked or moved before `train` or `evaluate`.

        Args:
            model: the module to train.
            loss_func: called with (outputs, targets); None if the model or an overridden hook computes the loss.
            optimizer: over the model's parameters.
            callbacks: instances, or classes to instantiate without arguments; called in this order.
            run_history: keeps the metrics; in memory by default.
            metrics: what to compute on training and evaluation data (docs/guides/metrics.md): names such as
                "accuracy", functions of (outputs, targets), objects of torchmetrics, or a list or a dict of them.
        """
        check_order(model, loss_func, optimizer)
        self.model = model
        self.loss_func = loss_func
        self.optimizer = optimizer
        limit = limit_of_environment()
        self.callback_handler = CallbackHandler([] if limit is None else [LimitBatchesCallback(limit)])
        self.callback_handler.add_callbacks([] if metrics is None else [MetricsCallback(metrics)])
        self.callback_handler.add_callbacks(callbacks)
        self.run_history: RunHistory = InMemoryRunHistory() if run_history is None else run_history
        self.create_scheduler_fn: Callable[..., Any] | None = None
        self.scheduler: Any = None
        self.collate_fn: Callable[..., Any] | None = None
        self.train_dataset: Any = None
        self.eval_dataset: Any = None
        self.run_config: Any = None
        _start_idle_run(self)
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
        padding: str = "auto",
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
            num_epochs: total epochs, including those before a resume.
            eval_dataset: evaluated after each epoch.
            per_device_batch_size: samples per micro-batch.
            max_num_train_steps: maximum number of updates, if fewer than the epochs give.
            gradient_accumulation_steps: micro-batches per update and process.
            gradient_clip_value: clip each gradient element to [-v, v].
            create_scheduler_fn: called with the optimizer; a functools.partial may hold placeholders.
            train_dataloader_kwargs, eval_dataloader_kwargs: override the loaders' defaults.
            reset_run_history: discard the metrics of earlier runs; False continues their count of epochs.
            collate_fn: builds a batch from samples.
            resume_from: a saved training state to resume; "auto" takes the newest of `checkpoints`, if any.
            seed: fixes order, augmentation and dropout; None takes torch's current seed.
            mixed_precision: "no", "bf16", "fp16" or "fp8"; None follows accelerate's configuration.
            gradient_clip_norm: clip the gradient's norm.
            step_mode: "eager", "compile" (torch.compile) or "graph" (CUDA graphs); "auto" takes graphs where they work.
            padding: "free" lets CUDA graphs leave out the padding of a batch, "keep" does not; "auto" leaves it out of
                compiled graphs if batches have few lengths.
            checkpoints: where and when to save.
            log_every: updates between logs.
            evaluate_every: updates between evaluations within an epoch, or "2 epochs"; None is after each epoch.
            nan: "stop" at a loss that is not finite, or "skip" such updates, which syncs with the device each time.
            bad_samples: "raise" when the dataset raises for a sample, or "skip" such samples.
            reduction: "exact" sums gradients the same way for every number of processes; "fast" the fastest way.
            sharding: "full_shard" splits weights, gradients and optimizer over the processes (FSDP2); None replicates.
            oom: "stop" when memory runs out, or "split": rerun the update in smaller micro-batches.

        Raises:
            ConfigError, DataError: before anything is changed.
            LeaseError: another process trains in the folder of `checkpoints`.
            MemoryLimitError: memory ran out.
        """
        settings = RunSettings.of(locals())
        if not isinstance(vars(self).get("_current_run"), TrainingRun):  # a subclass has taken the name
            _start_idle_run(self)
        check_scheduler_factory(create_scheduler_fn)
        check_parameters(self.model, self.optimizer, self.loss_func)
        batches = per_device_batch_size, collate_fn
        check_data(self, "train", train_dataset, train_dataloader_kwargs, *batches, "train_dataset")
        check_data(self, "eval", eval_dataset, eval_dataloader_kwargs, *batches, "eval_dataset")
        check_is_idle(self._current_run.is_running)
        check_step_mode(self, step_mode)
        warn_of_collisions(self, Trainer, CORE_CONTRACT, state={"_current_run": TrainingRun})
        run = TrainingRun(self, settings, previous=self._current_run)
        with run.logbook.recording():
            resume_path = run.checkpoints.find(resume_from)
            if resume_path is None and reset_run_history:
                self.run_history.reset()
            run.settings = in_stored_windows(run, resume_path)
            run.install()
            self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
            self.create_scheduler_fn, self.collate_fn = create_scheduler_fn, collate_fn
            run.seed = gather_objects(torch.initial_seed() if seed is None else seed)[0]
            run.train_loader = self.create_train_dataloader(
                batch_size=per_device_batch_size, train_dl_kwargs=train_dataloader_kwargs
            )
            if eval_dataset is not None:
                run.eval_loader = self.create_eval_dataloader(
                    batch_size=per_device_batch_size, eval_dl_kwargs=eval_dataloader_kwargs
                )
            try:
                prepare(run)
                accumulation = run.settings.gradient_accumulation_steps
                self.run_config = self._create_run_config(
                    per_device_batch_size, num_epochs, accumulation, max_num_train_steps, gradient_clip_value
                )
                if create_scheduler_fn is not None:
                    self.scheduler = self.create_scheduler()
                run.start(resume_path)
                with run.signals.installed():
                    self._run_training()
            finally:
                run.close()
        return run.result()

    @fails_together
    def evaluate(
        self,
        dataset: Any = None,
        per_device_batch_size: int = 8,
        dataloader_kwargs: dict[str, Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
    ) -> EvaluationResult:
        """Evaluate the model once and record `evaluation_loss` in a fresh run history.

        Args:
            dataset: None uses the evaluation dataset of the last call, and its collate_fn unless one is given.
            per_device_batch_size: samples per batch.
            dataloader_kwargs: override the loader's defaults.
            collate_fn: builds a batch from samples.
        """
        run = start_evaluation(self, dataset, per_device_batch_size, dataloader_kwargs, collate_fn)
        try:
            self.run_history.reset()
            run_evaluation(run)
        finally:
            run.close()
        return EvaluationResult(self.run_history.latest(), run.stop_reason)

    @fails_together
    def predict(
        self,
        dataset: Any,
        per_device_batch_size: int = 8,
        dataloader_kwargs: dict[str, Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
    ) -> PredictionResult:
        """Run the model over a dataset and return its outputs in the dataset's order; no events, no history."""
        run = start_evaluation(self, dataset, per_device_batch_size, dataloader_kwargs, collate_fn, may_be_empty=True)
        try:
            self.model.eval()
            outputs, num_samples = run_prediction(run)
        finally:
            run.close()
        return PredictionResult(outputs, {"num_samples": num_samples})

    find_lr = lr_finder.find_lr

    # --- THE LOOP -----------------------------------------------------------------------------------------------

    def _run_training(self) -> None:
        """Run epochs until the run is over; whatever ends it, `ending` saves it and runs the end events."""
        run = self._current_run
        with run.ending():
            self.training_run_start()
            self.call_event("on_training_run_start")
            run.begin()
            while not run.boundary.is_over():
                if run.progress.stage < TRAINED:
                    self._run_train_epoch(run.train_batches())
                if run.progress.stage < EVALUATED and run.boundary.evaluation_is_due():
                    self._run_eval_epoch(run.eval_loader)
                    run.end_evaluation()
                run.finish_epoch()

    def _run_train_epoch(self, train_dl: Any) -> None:
        """Train one epoch, from wherever the run is in it."""
        run = self._current_run
        self.train_epoch_start()
        run.begin_epoch()
        self.call_event("on_train_epoch_start")
        for window in run.windows(train_dl):  # the micro-batches of one update
            run.stepper.step(window)  # _run_update, or its replay as a CUDA graph
            run.boundary.after_update(window)  # count it; log, evaluate, save or stop if requested
            if run.boundary.is_complete():
                break
        run.end_training()
        self.train_epoch_end()
        run.reach(TRAINED, train_loss_epoch=run.losses.mean())
        self.call_event("on_train_epoch_end")
        run.boundary.serve_stop()

    def _run_update(self, window: Window) -> None:
        """Run forward and backward of each micro-batch of a window, and apply the gradients."""
        run = self._current_run
        for attempt in run.memory.attempts(window):  # again in smaller parts if memory runs out
            with attempt:
                for batch, step in run.micro_batches(attempt.window):  # seeded, on the device
                    self.call_event("on_train_step_start")
                    self._perform_forward_and_backward_passes(batch, step)
        if run.finish_gradients():  # False for an update that nan="skip" leaves out
            if run.settings.clips:
                self._clip_gradients()
            self.call_event("on_before_optimizer_step")
            with run.applying:  # an error from here on means a torn update
                self.optimizer_step()
            self.call_event("on_optimizer_step_end")
            run.step_scheduler()
        self.optimizer_zero_grad()

    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        """Compute a micro-batch's loss and its gradients."""
        loss = self._current_run.batch_loss(batch, step)  # calculate_train_batch_loss, weighted for the update
        if loss is not None:
            self.backward_step(loss)

    # --- the contract's underscore methods ----------------------------------------------------------------------

    def _create_accelerator(self) -> Any:
        """Return a fresh Accelerator; override it for plugins, trackers or another configuration."""
        settings = self._current_run.settings
        return create_accelerator(settings.mixed_precision, sharding=settings.sharding)

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        """Create a fresh engine, and prepare the model, the optimizer and the loaders for it."""
        run = self._current_run
        run.close()
        run.start_engine()
        self.model, self.optimizer = run.engine.prepare(self.model, self.optimizer)
        run.adopt_loaders()

    def _create_run_config(
        self,
        per_device_batch_size: int,
        num_epochs: int,
        gradient_accumulation_steps: int,
        max_num_train_steps: int | None,
        gradient_clip_value: float | None,
    ) -> Any:
        """Return the resolved numbers of the run."""
        limits = (num_epochs, gradient_accumulation_steps, max_num_train_steps, gradient_clip_value)
        return create_run_config(self._current_run, per_device_batch_size, *limits)

    def _run_eval_epoch(self, valid_dl: Any, is_training: bool = True, is_intermediate: bool = False) -> None:
        """Evaluate once; the loss is recorded under a name that says where in the run it was."""
        evaluate_epoch(self._current_run, valid_dl, is_training, is_intermediate)

    def _clip_gradients(self) -> None:
        """Clip the gradients of an update, once, when they are complete."""
        run, settings = self._current_run, self._current_run.settings
        run.gradient_norm = run.engine.clip(settings.gradient_clip_value, settings.gradient_clip_norm)

    # --- the run and its parts ----------------------------------------------------------------------------------

    @cached_property
    def _current_run(self) -> TrainingRun:
        """The only private state: the current run, or the last one, or from the constructor on an idle one."""
        # Made here only for a subclass that assigns a name of the contract before it calls `super().__init__()`.
        return TrainingRun(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, which get their own run."""
        return {**vars(self), "_current_run": self._current_run.carried()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({name: value for name, value in state.items() if name != "_current_run"})
        vars(self)["_current_run"] = TrainingRun(self)
        self._current_run.carry(state["_current_run"])

    def create_step(self, run: TrainingRun) -> MicroBatchStep:
        """Return the loop's view of a micro-batch; called for every run, like the three below."""
        return MicroBatchStep(run)

    def create_boundary(self, run: TrainingRun) -> Boundary:
        """Return the object that serves requests between updates and knows the limits of a run."""
        return Boundary(run)

    def create_logbook(self, run: TrainingRun) -> Logbook:
        """Return the object that logs and records a run."""
        return Logbook(run)

    def create_checkpoints(self, run: TrainingRun) -> RunCheckpoints:
        """Return the object that saves a run."""
        return RunCheckpoints(run)

    # --- requests and events ------------------------------------------------------------------------------------

    def request_log(self) -> None:
        """Request a log at the next update boundary."""
        self._current_run.requests.log = True

    def request_evaluation(self) -> None:
        """Request an evaluation at the next update boundary; it is recorded as `intermediate_eval_loss`."""
        # A no-op without an evaluation dataset.
        self._current_run.requests.evaluate = self._current_run.eval_loader is not None

    def request_save(self, directory: str | Path, metadata: dict[str, Any] | None = None) -> None:
        """Request a saved training state at the next update boundary."""
        self._current_run.checkpoints.request(directory, metadata)

    def request_load(self, checkpoint_path: str | Path) -> None:
        """Request a checkpoint file to be loaded at the end of the run, after all requested saves.

        Requested in `on_training_run_end`, it is loaded at once: callbacks later in the list see it.
        """
        run = self._current_run
        run.requests.load = Path(checkpoint_path)
        if run.is_ending:
            run.checkpoints.load_at_end()

    def request_stop(self, reason: str) -> None:
        """Request the end of the run at the next update boundary; all processes stop together."""
        requests = self._current_run.requests
        requests.stop = requests.stop or self._current_run.reason_of(reason)

    def call_event(self, event: str, **kwargs: Any) -> None:
        """Call an event of every callback, with this trainer as its first argument."""
        handler = self.callback_handler
        if type(handler) is CallbackHandler and event in handler.unheard:  # not one with its own `call_event`
            return
        try:
            handler.call_event(event, self, **kwargs)
        except StopTrainingError as error:
            # If this process left alone, the others would wait for it forever.
            if not self._current_run.engine.is_distributed:
                raise
            self.request_stop(self._current_run.reason_of(error))
        except (RuntimeError, MemoryError) as error:
            leave_alone(error)
            raise

    def write_record(self, event: str, **fields: Any) -> None:
        """Append your own event to metrics.jsonl, with the update and the epoch; for callbacks and hooks.

        A no-op without `checkpoints`; only rank 0 writes.
        """
        self._current_run.logbook.write(event, **fields)

    def evaluate_copy(self, model: Any, callbacks: Iterable[Any], metric_prefix: str) -> None:
        """Evaluate another model on the run's evaluation data, with these callbacks only, under a metric prefix."""
        own = [callback for callback in self.callback_handler if isinstance(callback, MetricsCallback)]
        handler = CallbackHandler([*own, *callbacks], limited_by=self.callback_handler)
        with swapped(self, model, handler, metric_prefix), self._accelerator.autocast():
            self._run_eval_epoch(self._current_run.eval_loader)

    # --- saving and loading -------------------------------------------------------------------------------------

    def save_training_state(self, output_dir: str | Path, checkpoint_kwargs: dict[str, Any] | None = None) -> None:
        """Write everything needed to continue the run, as of its last finished update, into a folder.

        An older state of that name stays whole until the new one is. `load_training_state` returns the metadata in
        `checkpoint_kwargs`.
        """
        self._current_run.checkpoints.save_to(output_dir, checkpoint_kwargs or {})

    def load_training_state(self, input_dir: str | Path) -> dict[str, Any]:
        """Restore model, optimizer, scheduler, scaler and random generators from a saved state; return its metadata.

        The position in the run, the history and the callbacks are restored by `train(resume_from=...)` alone.
        """
        if self.run_config is None:
            raise ConfigError("load_training_state needs a trainer that has been prepared by train()")
        checkpoints = self._current_run.checkpoints
        checkpoint = checkpoints.read(input_dir)
        checkpoints.restore(checkpoint)
        return dict(checkpoint.state["metadata"])

    save_checkpoint = model_files.save_checkpoint
    load_checkpoint = model_files.load_checkpoint
    whole_model = model_files.whole_model
    whole_weights = model_files.whole_weights

    # --- where the run is ---------------------------------------------------------------------------------------

    progress: Progress = of_run("progress", "Where the run is.")
    requests: Requests = of_run("requests", "Requests that the loop serves at the next update boundary.")
    seed: int = of_run("seed", "The seed of the current run: the same seed gives the same run.")
    gradient_norm: torch.Tensor | None = of_run("gradient_norm", "Of the last update before clipping by norm, or None.")
    current_rows: int | None = of_run("current_rows", "The samples of the current micro-batch; None between batches.")
    num_graphed_updates: int = of_run("logbook.num_graphed_updates", "Updates of this process that were CUDA graphs.")
    running_loss: float = of_run("losses.running", "The epoch's mean loss on this process; waits.", settable=False)
    speed: Mapping[str, float] = of_run("logbook.speed", "The speed between the last two logs; empty before them.")
    _train_dataloader: Any = of_run("train_loader", "The contract's name of `train_loader`.")
    _eval_dataloader: Any = of_run("eval_loader", "The contract's name of `eval_loader`.")
    # One that is assigned while a run is prepared becomes its engine's.
    _accelerator: Any = of_run("accelerator", "accelerate's object.")
    device: torch.device = of_run("engine.device", "Where the model is during a run.", settable=False)
    num_processes: int = of_run("engine.num_processes", "How many processes take part in the run.", settable=False)
    train_loader: Any = of_run("train_loader", "The training loader of the current run, or None.", settable=False)
    eval_loader: Any = of_run("eval_loader", "The evaluation loader of the current run, or None.", settable=False)
    num_parts: int = of_run("memory.parts.train", "Parts that a micro-batch is split into.", settable=False)
    spending: Any = of_run(
        "logbook.spending", 'A context whose time is "evaluation" or "save", or with None nothing.', settable=False
    )
    data_wait_seconds: float = of_run("logbook.data_wait_seconds", "Seconds spent waiting for data.", settable=False)

    # --- tools --------------------------------------------------------------------------------------------------

    def gather(self, tensor: Any, padding_value: float | None = None) -> Any:
        """Concatenate tensors over processes on dim 0: each sample once, in order, also from uneven batches.

        Args:
            tensor: a tensor, or a tuple, list or dict of them.
            padding_value: fills up further dimensions where the processes' differ.
        """
        is_pad = self.current_rows == 0
        return map_tensors(tensor, lambda rows: gather_rows(rows[:0] if is_pad else rows, self.device, padding_value))


def _start_idle_run(trainer: Trainer) -> None:
    warn_of_collisions(trainer, Trainer, CORE_CONTRACT, state={"_current_run": TrainingRun})
    early = vars(trainer).get("_current_run")  # holds an accelerator that was assigned before `super().__init__()`
    trainer._current_run = TrainingRun(trainer, previous=early if isinstance(early, TrainingRun) else None)
    trainer._current_run.start_engine()


def __getattr__(name: str) -> Any:
    # A subclass of Trainer, so it is in a module above this one; people import it from here.
    if name == "TrainerWithTimmScheduler":
        return importlib.import_module("loopwright.timm_trainer").TrainerWithTimmScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
