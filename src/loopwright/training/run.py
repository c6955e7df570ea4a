"""The run: one call of `train`, `evaluate` or `predict`, with its parts and where it is.

run.stepper          runs an update, eagerly or as a CUDA graph        (stepping/eager, stepping/graphs)
run.micro_batch_step what a micro-batch is to the loop                 (stepping/eager)
run.memory           runs an update again in smaller parts             (stepping/memory)
run.losses           weighs batch losses into updates, and sums them   (losses)
run.boundary         serves requests, knows the limits                 (boundary)
run.logbook          logs, metrics.jsonl, status.json                  (logbook)
run.checkpoints      saves, and knows what was resumed                 (checkpoints, resume)
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopwright.back_reference import BackReference
from loopwright.checkpoint import store
from loopwright.data import Loader, Share, Window, adopt
from loopwright.data.batch_parts import cut_window
from loopwright.data.defaults import without_sharing
from loopwright.data.prefetch import prefetched
from loopwright.engine import Engine, forget_precision
from loopwright.engine.buffers import BufferShadow
from loopwright.engine.nested import iter_tensors
from loopwright.engine.seeding import seed_torch
from loopwright.engine.sharding import is_sharded
from loopwright.engine.signals import SignalWatch
from loopwright.errors import StopTrainingError
from loopwright.failpoints import failpoint
from loopwright.keys import forward_key
from loopwright.progress import EVALUATED, FINISHED, TRAINED, TRAINING, Progress, Requests, StopReason, rule_of
from loopwright.results import TrainResult
from loopwright.schedulers import StatefulSchedulerBase
from loopwright.settings import RunSettings
from loopwright.stepping.eager import EagerStepper, MicroBatchStep
from loopwright.stepping.graphs import GraphStepper, eager_stepper, plan_stepper, report_eager
from loopwright.stepping.memory import MemoryGuard
from loopwright.stepping.recordings import Recordings
from loopwright.training.losses import EpochLosses, check_batch_output, describe_batch, prediction
from loopwright.training.resume import recount_batches, resume

if TYPE_CHECKING:
    from loopwright.trainer import Trainer
    from loopwright.training.boundary import Boundary
    from loopwright.training.checkpoints import RunCheckpoints
    from loopwright.training.logbook import Logbook


# What outlives a run: an evaluation after it, and copies and pickles of its trainer, have it too.
_CARRIED = (
    *("settings", "engine", "accelerator", "progress", "losses", "seed", "first_epoch", "run_id"),
    *("memory.parts.train", "recordings", "checkpoints.metadata", "checkpoints.initial"),
    *("checkpoints.modules", "checkpoints.buffers", "checkpoints.hidden", "checkpoints.epoch_samplers"),
    *("logbook.record", "logbook.speed", "logbook.stopwatch", "logbook.num_graphed_updates"),
)


class TrainingRun:
    """The parts and the state of one run, with the engine of the previous one until it is prepared."""

    trainer = BackReference["Trainer"]()

    def __init__(
        self, trainer: Trainer, settings: RunSettings | None = None, previous: TrainingRun | None = None
    ) -> None:
        self.trainer = trainer
        self.settings = RunSettings() if settings is None else settings
        self.engine: Engine = None if previous is None else previous.engine  # type: ignore[assignment] # before __init__
        # accelerate's object; an overridden preparation may assign its own.
        self.accelerator: Any = None if previous is None else previous.accelerator
        self.progress = Progress()
        self.requests = Requests()  # what callbacks asked for, served at the next boundary
        self.train_loader: Any = None
        self.eval_loader: Any = None
        self.train_loader_kwargs: dict[str, Any] | None = None
        self.eval_loader_kwargs: dict[str, Any] | None = None
        self.signals = SignalWatch()
        self.buffers = BufferShadow()  # the model's, as of the last boundary
        self.recordings = Recordings()
        self.seed = 0
        self.gradient_norm: Tensor | None = None  # of the last update before clipping by norm, on the device
        self.current_rows: int | None = None  # samples of the current micro-batch; None between batches
        self.eval_batch = 0  # index of the current evaluation batch, even if it is run in parts
        self.first_epoch = 1  # the history's epoch when the run began, before any resume
        self.run_id = uuid.uuid4().hex[:12]  # its name in its checkpoints, over all processes that continue it
        self.stop_reason: StopReason | None = None
        # None of the flags decides a number.
        self.is_running = False
        self.is_ending = False  # the next save is the last one, and is waited for
        self.is_in_window = False  # some micro-batches of an update have run, and it is not finished
        self.is_torn = False  # the weights are ahead of the progress; nothing may be saved now
        self.epoch_is_whole = False  # every update of the current epoch is done
        self.losses = EpochLosses(self.engine)
        self.memory = MemoryGuard(self)
        self.stepper: EagerStepper | GraphStepper = EagerStepper(self)
        self.micro_batch_step: MicroBatchStep = trainer.create_step(self)
        self.boundary: Boundary = trainer.create_boundary(self)
        self.logbook: Logbook = trainer.create_logbook(self)
        self.checkpoints: RunCheckpoints = trainer.create_checkpoints(self)
        self._has_begun = False
        self._noted: set[str] = set()
        self._output_is_checked = False
        self._windows: Iterator[Window] = iter(())

    def install(self, training: TrainingRun | None = None) -> None:
        """Make this the trainer's current run, before its first hook; an evaluation carries over the training run."""
        trainer = self.trainer
        trainer._current_run = self
        trainer.callback_handler.refresh()
        if training is None:
            self.first_epoch, trainer.scheduler = trainer.run_history.current_epoch, None
            return
        self.carry({**training.carried(), "settings": self.settings})

    def carried(self) -> dict[str, Any]:
        """Return the state that outlives the run, by name."""
        return {name: attrgetter(name)(self) for name in _CARRIED}

    def carry(self, carried: dict[str, Any]) -> None:
        for name, value in carried.items():
            owner, _, attribute = name.rpartition(".")
            setattr(attrgetter(owner)(self) if owner else self, attribute, value)

    @property
    def epoch(self) -> int:
        """The current epoch, from 1: the one in progress, or between epochs and at the end the last finished one."""
        is_in_progress = self.progress.batch > 0 or self.progress.stage > TRAINING
        is_in_progress |= self._has_begun and not self.epoch_is_whole
        return self.first_epoch - 1 + max(self.progress.epoch + is_in_progress, 1)

    def result(self) -> TrainResult:
        return TrainResult(
            metrics=self.trainer.run_history.latest(),
            epochs=self.progress.epoch,
            updates=self.progress.update,
            stop_reason=self.stop_reason,
            seed=self.seed,
            seconds=self.logbook.record.seconds,
        )

    # --- preparing ----------------------------------------------------------------------------------------------

    def start_engine(self) -> None:
        forget_precision()
        self.accelerator = self.trainer._create_accelerator()
        self.engine = Engine(self.accelerator, self.settings.reduction)
        self.losses.follow(self.engine)

    def as_loader(self, source: Any, is_evaluation: bool = False) -> Loader:
        """Wrap a DataLoader or any iterable of batches in one of our loaders."""
        if isinstance(source, Loader):
            return source
        engine, accumulation = self.engine, self.settings.gradient_accumulation_steps
        source = without_sharing(source, engine.num_processes)
        # Every forward pass of a sharded model gathers its weights: the processes must run equally many.
        share = Share(engine.rank, engine.num_processes, accumulation, is_even=is_sharded(self.trainer.model))
        return adopt(
            source,
            seed=self.seed,
            share=share,
            device=engine.device,
            evaluation=is_evaluation,
            bad_samples=self.settings.bad_samples,
        )

    def adopt_loaders(self) -> None:
        if self.train_loader is not None:
            self.train_loader = self.as_loader(self.train_loader)
        if self.eval_loader is not None:
            self.eval_loader = self.as_loader(self.eval_loader, is_evaluation=True)

    def close(self) -> None:
        """Unwrap the model and the optimizer; drop workers, graphs and buffers."""
        self.is_running = False
        self._windows = iter(())
        for loader in (self.train_loader, self.eval_loader):
            if isinstance(loader, Loader):
                loader.close()
        trainer = self.trainer
        trainer.model, trainer.optimizer = self.engine.release(trainer.model, trainer.optimizer)
        self.stepper.close()
        self.stepper, self.buffers = EagerStepper(self), BufferShadow()
        trainer.callback_handler.release()

    def bare_model(self) -> Any:
        """Return the model without its distributed wrapper and torch.compile."""
        return self.engine.unwrap(self.trainer.model, keep_torch_compile=False)

    def bare_optimizer(self) -> Any:
        return self.engine.unwrap_optimizer(self.trainer.optimizer)

    # --- the run ------------------------------------------------------------------------------------------------

    def start(self, resume_path: Path | None) -> None:
        """Continue a saved run or begin one, and get ready to save it; called once everything is prepared."""
        self.engine.follow_scheduler(self.trainer.optimizer)
        self.checkpoints.describe()
        if resume_path is not None:
            resume(self, resume_path)
        self.logbook.begin()
        self.checkpoints.start()
        self.is_running = True

    def begin(self) -> None:
        """Prepare for the first update. Idempotent, since an overridden `_run_training` may not call it."""
        if self._has_begun:
            return
        self._has_begun = True
        trainer, checkpoints = self.trainer, self.checkpoints
        if checkpoints.resumed_from is not None and checkpoints.loaded is not None:
            with store.refusing_damage(checkpoints.resumed_from):
                trainer.callback_handler.load_state_dict(checkpoints.loaded["callbacks"])
                recount_batches(self, checkpoints.loaded["num_processes"])
        checkpoints.loaded = None
        # Such a scheduler gives the value of update 0 at its first step; torch's give it when they are made.
        if isinstance(trainer.scheduler, StatefulSchedulerBase) and trainer.scheduler._num_updates == -1:
            trainer.scheduler.step()
        self.epoch_is_whole = True  # until an epoch begins: `_run_train_epoch` may be the user's own
        failpoint("before_first_update")
        self.drop_gradients()
        self.buffers = BufferShadow(trainer.get_model(keep_torch_compile=False), trainer.loss_func)
        checkpoints.rehearse()
        self.stepper = plan_stepper(self)
        self.logbook.start_clock()
        self.boundary.begin()
        if checkpoints.ended is not None:
            self.boundary.stay_ended(checkpoints.ended)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """End the run after the block, whatever stops it: save it, then run the end hook and events."""
        interruption: KeyboardInterrupt | None = None
        try:
            yield
        except StopTrainingError as error:
            self.stop(error)
        except KeyboardInterrupt as error:
            # After an earlier signal, or while other processes wait for this one, it cannot stop gracefully.
            if self.signals.received is not None or self.engine.is_distributed:
                raise
            interruption = error
        self.logbook.pause()
        self.is_ending = True
        self.checkpoints.request_final()
        for phase in (self.checkpoints.serve, self._end, self.checkpoints.serve):
            try:
                phase()
            except StopTrainingError as error:
                self.stop(error)
        self.checkpoints.finish(interruption)
        self.signals.raise_for(interruption)

    def _end(self) -> None:
        failpoint("run_end")
        self.trainer.training_run_end()
        self.trainer.call_event("on_training_run_end")
        self.boundary.serve_stop()
        self.checkpoints.sampler_state()

    def stop(self, error: StopTrainingError) -> None:
        """Stop the run early: report why, drop the unfinished update, call the event."""
        trainer = self.trainer
        self.stop_reason = self.reason_of(error)
        trainer.notify("stop", str(error), reason=self.stop_reason)
        self.requests.stop = None  # a stop requested meanwhile is done
        if self.progress.stage == FINISHED:
            self.progress.end_epoch()
        self.drop_gradients()
        try:
            trainer.call_event("on_stop_training_error", error=error)
        except StopTrainingError as another:
            trainer.notify("stop", str(another), reason=StopReason.of(another))

    def reason_of(self, cause: BaseException | str) -> StopReason:
        """Return why to stop, with the rule that decided it."""
        reason = StopReason.of(cause)
        if reason.rule is None:
            decider = self.boundary.deciders()[0]
            now = rule_of(decider)  # too: the same object may continue the run
            begun = self.boundary.rules.get(id(decider), now)
            reason.rule = {name: [value, now.get(name)] for name, value in begun.items()}
        return reason

    # --- the epoch ----------------------------------------------------------------------------------------------

    def train_batches(self) -> Any:
        """Return the training loader; iterated directly, it yields the batches of the current epoch."""
        self.train_loader.set_epoch(self.progress.epoch)
        return self.train_loader

    def begin_epoch(self) -> None:
        """Begin or continue the training of an epoch; also begin the run if that has not happened."""
        self.begin()
        if self.progress.stage >= TRAINED:
            self.progress.end_epoch()
        done = -(-self.progress.batch // self.settings.gradient_accumulation_steps)
        self.logbook.first_update_of_epoch = self.progress.update - done + 1
        self.epoch_is_whole = False
        self.checkpoints.sampler_state(begins_epoch=True)
        self.boundary.plan_agreement()
        if self.progress.batch == 0:
            self.losses = EpochLosses(self.engine)

    def windows(self, train_dl: Any) -> Iterator[Window]:
        """Yield the windows of the epoch from where the run is, copied ahead to the device: one per update."""
        loader = self.as_loader(train_dl)
        if loader is self.train_loader:  # any other is used for this epoch only
            loader.num_epochs = self.boundary.num_epochs(loader.num_updates)
        windows = loader.windows(self.progress.epoch, self.progress.samples)
        self._windows = prefetched(windows, self.engine.device)
        if not self.boundary.has_reached_limit():
            for window in self.logbook.timed(self._windows):
                yield self.begin_update(self.micro_batch_step.collect(window))

    def end_training(self) -> None:
        self.logbook.pause()
        self.current_rows = None
        num_batches = self.train_loader.num_batches if isinstance(self.train_loader, Loader) else None
        is_at_end = self.progress.batch == num_batches if num_batches is not None else False
        # If the length is unknown, only the next window tells.
        self.epoch_is_whole = self.boundary.ends_epoch(is_at_end or next(self._windows, None) is None)
        self._windows = iter(())
        self.logbook.log()

    def reach(self, stage: int, **metrics: float) -> None:
        """Record that a stage of the epoch is over, with its metrics."""
        for name, value in metrics.items():
            self.trainer.run_history.update_metric(name, value)
        # An epoch that a limit cut short is continued when the limit is raised: it stays where it is.
        if self.epoch_is_whole:
            self.progress.stage = stage

    def end_evaluation(self) -> None:
        """Record that the epoch is evaluated; an evaluation by a callback does not count."""
        self.reach(EVALUATED)
        self.boundary.serve_stop()

    def finish_epoch(self) -> None:
        """Run the epoch's end hook and events, count it, and serve the requests."""
        trainer, history = self.trainer, self.trainer.run_history
        if self.progress.stage < FINISHED:
            has_evaluated = self.eval_loader is None or self.boundary.evaluation_is_due()
            if self.boundary.has_reached_limit():
                limit = self.settings.max_num_train_steps
                text = f"Reached max number of training steps {limit} in epoch {history.current_epoch}"
                trainer.notify("limit.updates", text, limit=limit, epoch=history.current_epoch)
            if isinstance(trainer.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                use_eval = has_evaluated and self.eval_loader is not None
                trainer.scheduler.step(history.latest()["eval_loss_epoch" if use_eval else "train_loss_epoch"])
            trainer.training_run_epoch_end()
            self.reach(FINISHED)
            trainer.call_event("on_training_run_epoch_end", has_evaluated=has_evaluated)
            self.logbook.write_metrics("epoch")
        history._increment_epoch()
        if self.epoch_is_whole:
            self.progress.end_epoch()
        self.progress.reported = self.progress.update
        self.logbook.update_status()
        self.checkpoints.request_due_after_epoch()
        self.boundary.serve()

    # --- the update ---------------------------------------------------------------------------------------------

    def begin_update(self, window: Window) -> Window:
        """Start an update; return its window, split into parts if memory ran out before."""
        if self.memory.parts.train > 1:
            window = cut_window(window, self.memory.parts.train, self.trainer.cut_batch)
        self.engine.follow_parameters(self.trainer.model, self.trainer.optimizer)
        window = self.micro_batch_step.begin(window)
        self.buffers.keep()
        self.is_in_window = True
        return window

    def micro_batches(self, window: Window) -> Iterator[tuple[Any, int]]:
        """Yield every micro-batch of an update on the device, seeded, with its number in the epoch."""
        first, device = self.progress.batch, self.engine.device
        for index, piece in enumerate(window.pieces):
            self.begin_micro_batch(window, index)
            yield piece.on(device), first + window.number_of(index)

    def begin_micro_batch(self, window: Window, index: int) -> None:
        """Start a micro-batch: seed its forward pass, and share gradients only after the update's last one."""
        piece, engine = window.pieces[index], self.engine
        self.losses.index = index
        self.current_rows = piece.rows
        engine.share_gradients(self.trainer.model, index == len(window.pieces) - 1)
        seed_torch(forward_key(piece.key), engine.device)

    def batch_loss(self, batch: Any, step: int) -> Tensor | None:
        """Return the loss of a micro-batch for backward, weighted by its items; its outputs live no longer than this.

        A stop raised in the hook becomes a request where other processes wait for this one's gradients: they get
        gradients of zero, and all stop together after this update.
        """
        trainer = self.trainer
        try:
            output = trainer.calculate_train_batch_loss(batch)
        except StopTrainingError as error:
            output = self.stand_in(batch, error)
        except Exception as error:
            if not self._output_is_checked:
                describe_batch(error, batch, trainer.model)
            raise
        self.check_first_output(output, "calculate_train_batch_loss")
        trainer.call_event("on_train_step_end", batch=batch, batch_output=output, step=step)
        return self.losses.weighted(output)

    def is_first(self, note: str) -> bool:
        """Whether the run asks for the first time about a note that is printed once."""
        is_first = note not in self._noted
        self._noted.add(note)
        return is_first

    def check_first_output(self, output: Any, method: str) -> None:
        if not self._output_is_checked:
            check_batch_output(output, method, is_training=True)
            self._output_is_checked = True

    def stand_in(self, batch: Any, error: StopTrainingError) -> dict[str, Any]:
        """Return an output with gradients of zero for a batch whose hook stopped the run; raise it on one process."""
        if not self.engine.is_distributed:
            raise error
        self.trainer.request_stop(StopReason.of(error))
        outputs = prediction(self.trainer.model, batch)
        zero = sum(tensor.sum() for tensor in iter_tensors(outputs) if tensor.is_floating_point()) * 0.0
        return {"loss": zero, "model_outputs": outputs, "batch_size": 0}

    def finish_gradients(self) -> bool:
        """Reduce the gradients of an update; return False if `nan="skip"` leaves it out."""
        self.losses.finish_update()
        return self.settings.nan != "skip" or not self.logbook.skips_update()

    @property
    def applying(self) -> AbstractContextManager[None]:
        """A new context for the optimizer's step."""
        return self.memory.optimizer_step()

    def step_scheduler(self) -> None:
        """Step the scheduler, if there is one and the loss scaler has not refused the update."""
        trainer = self.trainer
        if trainer.scheduler is not None and not getattr(trainer.optimizer, "step_was_skipped", False):
            trainer.scheduler_step()

    def drop_gradients(self) -> None:
        """Drop gradients that belong to no update; `optimizer_zero_grad` is for those of a finished one."""
        for holder in (self.trainer.model, self.trainer.optimizer):
            if hasattr(holder, "zero_grad"):
                holder.zero_grad()

    def run_eagerly(self, reason: str) -> None:
        """Run updates eagerly from here on, and report why, unless they already are."""
        if isinstance(self.stepper, GraphStepper):
            self.stepper.forget()  # it is still on the stack
            self.stepper.close()
            self.stepper, self.recordings.ended = eager_stepper(self), reason
            report_eager(self, reason)


def run_of(trainer: Trainer) -> TrainingRun:
    """Return a trainer's current run, its last one, or the idle one that it has from the constructor on.

    For packages that build on the Trainer. It is a function, so that a subclass has one name less to avoid.
    """
    return trainer._current_run


def of_run(name: str, doc: str, *, settable: bool = True) -> Any:
    """Return a property of a trainer that stands for an attribute of its current run, dotted below it."""
    owner, _, attribute = f"_current_run.{name}".rpartition(".")
    owner_of = attrgetter(owner)

    def assign(trainer: Trainer, value: Any) -> None:
        setattr(owner_of(trainer), attribute, value)

    return property(attrgetter(f"_current_run.{name}"), assign if settable else None, doc=doc)
