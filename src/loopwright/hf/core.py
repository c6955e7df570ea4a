"""The core trainer that an `hf.Trainer` owns: the one loop, whose hooks call HF's override points.

Nothing here loops. A micro-batch is handed to `training_step`, an evaluation batch to `prediction_step`; what HF's
callbacks ask for through the control becomes requests to the core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from loopwright.checkpoint import Checkpoint, Checkpointing
from loopwright.checkpoint.saver import Captured
from loopwright.checkpoint.store import check_savable
from loopwright.data import Share, Window, adopt
from loopwright.engine import create_accelerator
from loopwright.engine.compiling import compile_model
from loopwright.engine.nested import num_rows
from loopwright.engine.processes import sum_over_processes, world_process_zero_only
from loopwright.engine.sharding import Sharding
from loopwright.errors import BatchLossError, StopTrainingError
from loopwright.evaluation import run_eval_epoch
from loopwright.hf.adapters import base_digest, changing, completed, is_adapter
from loopwright.hf.classifiers import settle_labels_before
from loopwright.hf.loss import LossCall
from loopwright.hf.resuming import prepare_folder
from loopwright.losses import check_batch_output
from loopwright.memory import Saving, told_savings
from loopwright.settings import RunSettings
from loopwright.tracking import LossTracker
from loopwright.trainer import Trainer as CoreTrainer
from loopwright.updates import asks_alone

if TYPE_CHECKING:
    from loopwright.hf.trainer import Trainer

STEPS = ("training_step", "compute_loss", "_prepare_inputs")
ASKING_EVENTS = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")
STEP_EVENTS = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")

EvaluationStep = Callable[[Any], tuple[Tensor, Any]]


class Core(CoreTrainer):
    """The loop, as an `hf.Trainer` uses it.

    Attributes:
        owner: that trainer.
        losses: of the whole run, each a mean with its number of items.
        samples_seen: over all processes.
        logged: total loss, items and updates as of the last log.
        last_saved: the update of the newest checkpoint, or None.
    """

    def __init__(self, owner: Trainer, bridge: Any) -> None:
        self.owner = owner
        self.losses = LossTracker()
        self.samples_seen = 0
        self.logged = (0.0, 0.0, 0)
        self.last_saved: int | None = None
        self._items: list[Tensor | None] = []
        self._counted: list[Any] = []
        self._entries: list[tuple[Tensor, float]] = []
        self._weight: Tensor | None = None
        self._backward_loss: Tensor | None = None
        self._returned_share: int | None = None
        self._base: str | None = None
        self._begun: int | None = None
        self._evaluation_step: EvaluationStep | None = None
        super().__init__(owner.model, None, None, callbacks=[bridge])
        self.seed = owner.args.seed

    # --- what the owner calls -----------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether `train` is on its way."""
        return self._run.is_running

    @property
    def accelerator(self) -> Any:
        """accelerate's object of the current run."""
        return self._accelerator

    @property
    def seconds(self) -> float:
        """How long the run has lasted, with what came before a resume."""
        return self._record.seconds

    def num_updates_per_epoch(self, dataloader: Any, accumulation: int) -> int | None:
        """Return the updates of an epoch over this loader, if that is known."""
        share = Share(self._engine.rank, self._engine.num_processes, accumulation)
        return adopt(dataloader, seed=0, share=share, device=self.device).num_updates

    def num_batches_per_epoch(self) -> int | None:
        """Return the micro-batches that this process runs in an epoch of the current run, if that is known."""
        batches: int | None = self._train_dataloader.num_batches
        return batches

    def forget(self) -> None:
        """Start counting anew; called before a run."""
        self.losses = LossTracker()
        self.samples_seen = 0
        self.logged = (0.0, 0.0, 0)
        self.last_saved = None
        self._returned_share = self._base = self._begun = None

    def mean_loss(self) -> float:
        """Return the mean loss of the whole run, over all processes."""
        loss, items = sum_over_processes([self.losses.total_loss, self.losses.running_count], self.device)
        return loss / items if items else 0.0

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Prepare the model for an evaluation, unless a run or an outer evaluation has done so already.

        Outside of a run it is left in evaluation mode, as by transformers: people go on using it.
        """
        if self._run.is_running or self._evaluation_step is not None or self._engine_is_in_use:
            yield
            return
        self._settings = RunSettings(mixed_precision=self.owner.args.mixed_precision)
        self._release()
        self._start_engine()
        optimizer, self.optimizer = self.optimizer, None
        self.model, _ = self._engine.prepare(self.owner.model, None)
        self._engine_is_in_use = True
        try:
            yield
        finally:
            self._engine_is_in_use = False
            self.model, _ = self._engine.release(self.model, None)
            self.optimizer = optimizer
            self.owner.model.eval()

    def run_evaluation(self, dataloader: Any, step: EvaluationStep) -> float:
        """Run a step over every batch of a loader, and return the mean loss over all items; nan without any.

        Args:
            dataloader: a DataLoader, or any iterable of batches.
            step: called with a batch on the device; returns its loss and the number of items it is a mean of.
        """
        loader = self._as_loader(dataloader, is_evaluation=True)
        self.switch_optimizer("eval")
        outer, self._evaluation_step = self._evaluation_step, step
        try:
            run_eval_epoch(self, self._engine, loader, "evaluation_loss", is_intermediate=True)
        finally:
            self._evaluation_step = outer
            loader.close()
        return float(self.run_history.get_latest_metric("evaluation_loss"))

    @property
    def eval_batch(self) -> int:
        """The index of the current batch within its evaluation, however many parts it is run in."""
        return self._run.eval_batch

    def switch_optimizer(self, mode: str) -> None:
        """Let the weights be those to "train" on, or those to "eval" and save, where an optimizer keeps both.

        Schedule-free optimizers do, and have a method for each; others have only one kind of weights.
        """
        switch = getattr(self.owner.optimizer, mode, None)
        if callable(switch):
            switch()

    def backward(self, loss: Tensor) -> None:
        """Run backward on a micro-batch's mean loss, weighted by its items over those of the update."""
        if self._run.is_first_batch:
            check_batch_output({"loss": loss, "batch_size": 1}, "compute_loss", is_training=True)
            self._run.is_first_batch = False
        self._backward_loss = loss.detach()
        if self._weight is not None:
            loss = loss * self._weight.to(torch.promote_types(loss.dtype, torch.float32))
        self.backward_step(loss)

    def record(self, event: str, values: dict[str, Any]) -> None:
        """Append what was logged during the run to metrics.jsonl."""
        position = {"update": self.progress.update, "epoch": self.run_history.current_epoch}
        self._record.write(event, **{**values, **position})

    def take_requests(self) -> None:
        """Turn the flags of the owner's control into requests; called after every event that may set them."""
        control = self.owner.control
        if control.should_log and self.progress.update > self.logged[2]:
            self.request_log()
        if control.should_evaluate:
            self.request_evaluation()
        if control.should_save:
            self.request_save(self.owner.flow.checkpoint_path(self.progress.update))

    # --- the core's hooks ---------------------------------------------------------------------------------------

    _engine_is_in_use = False

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: dict[str, Any] | None = None) -> Any:
        """Return the loader that the owner's `get_train_dataloader` made."""
        return self.owner.callback_handler.train_dataloader

    def create_scheduler(self) -> Any:
        """Return the schedule that the owner's `create_scheduler` made."""
        return self.owner.flow.schedule(self.optimizer)

    def count_batch_items(self, batch: Any) -> float | None:
        """Count the labels that the loss uses; None where they are rows, and in evaluations, which count there."""
        if self._evaluation_step is not None:
            return None
        count = self.owner.item_counter.count(batch)
        self._items.append(count)
        self._counted.append(batch)
        return None if count is None else float(count)

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        """Run the current evaluation's step."""
        assert self._evaluation_step is not None
        with torch.no_grad():
            loss, items = self._evaluation_step(batch)
        return {"loss": loss, "batch_size": num_rows(batch), "num_items_in_batch": items}

    def checkpoint_files(self) -> dict[str, bytes]:
        """Return the files that belong to a checkpoint folder beside the state: configuration, tokenizer, state."""
        return self.owner.flow.checkpoint_files()

    def request_evaluation(self) -> None:
        """Ask for an evaluation at the next boundary; the owner knows the data."""
        self.requests.evaluate = True

    def request_save(self, directory: str | Path, metadata: dict[str, Any] | None = None) -> None:
        """Ask for a checkpoint, once; the one that ends every run only if the run is cut short."""
        if self._run.is_ending:
            is_cut_short = self._signals.received is not None or self._run.stop_reason is not None
            if not is_cut_short or self.last_saved == self.progress.update:
                return
        if all(path != Path(directory) for path, _ in self.requests.saves):
            super().request_save(directory, metadata)

    # --- too little memory --------------------------------------------------------------------------------------

    def remedy_of_policy(self) -> str:
        """Return the argument."""
        return "auto_find_batch_size=True"

    def remedies_of_unused_parameters(self) -> tuple[str, str]:
        """Return the argument, and how the core freezes parameters."""
        return "set ddp_find_unused_parameters=True", super().remedies_of_unused_parameters()[1]

    def remedies_of_batch(self, rows: int, length: int | None, savings: list[Saving]) -> str:
        """Return the arguments that make activations smaller, each with what it saves."""
        words = {
            "half_batch": f"per_device_train_batch_size={rows // 2} with twice the gradient_accumulation_steps",
            "bf16": "bf16=True",
            "checkpointing": "gradient_checkpointing=True",
            "half_length": f"rows of {(length or 0) // 2} tokens",
        }
        return told_savings(words, savings) or "a smaller per_device_train_batch_size, or bf16=True"

    def remedies_of_evaluation(self) -> str:
        """Return the arguments that make evaluation batches smaller."""
        return "a smaller per_device_eval_batch_size, shorter samples, or bf16=True"

    def _run_forward(self, batch: Any) -> dict[str, Any]:
        items = self.owner.item_counter.count(batch)
        given = torch.tensor(num_rows(batch)) if items is None else items
        return {"loss": LossCall(self.owner.compute_loss)(self.model, batch, given)}

    # --- the loop's steps ---------------------------------------------------------------------------------------

    def _create_accelerator(self) -> Any:
        args = self.owner.args
        sharding = Sharding.parse(args.fsdp, args.fsdp_config)
        return create_accelerator(self._settings.mixed_precision, args.use_cpu, sharding, args.ddp_options)

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        super()._prepare_model_optimizer_and_dataloaders()
        args = self.owner.args
        if self._settings.step_mode == "compile":
            collate = getattr(self._train_dataloader, "collate_fn", None)
            backend = args.torch_compile_backend or "inductor"
            compile_model(self.model, collate, backend=backend, mode=args.torch_compile_mode)
            settle_labels_before(self.model, self._engine.unwrap(self.model))

    def _find_resume_path(self, resume_from: str | Path | None, checkpoints: Checkpointing | None) -> Path | None:
        if resume_from is None and checkpoints is not None:  # the folder is this run's own by now
            world_process_zero_only(prepare_folder)(Path(checkpoints.directory))
        return super()._find_resume_path(resume_from, checkpoints)

    def _asked(self) -> tuple[int, ...]:
        control = self.owner.control
        return *super()._asked(), control.should_training_stop, control.should_epoch_stop

    def _take_over(self, agreed: list[int]) -> None:
        control, (stop, stop_epoch) = self.owner.control, agreed
        control.should_training_stop = control.should_training_stop or bool(stop)
        control.should_epoch_stop = control.should_epoch_stop or bool(stop_epoch)

    def _late_askers(self) -> list[str]:
        """Return what else may ask on one process alone: an own `training_step`, and callbacks between two updates."""
        owner = self.owner
        found = [] if owner.uses_default("training_step") else ["training_step"]
        for callback in owner.callback_handler.callbacks:
            found += [f"{type(callback).__name__}.{name}" for name in ASKING_EVENTS if asks_alone(callback, name)]
        return [*super()._late_askers(), *found]

    def _begin_run(self) -> None:
        super()._begin_run()
        self.owner.flow.begin()

    def _begin_update(self, window: Window) -> Window:
        self._items, self._counted, self._entries = [], [], []
        self.switch_optimizer("train")
        window = super()._begin_update(window)
        if window.numbers is not None and self._items:  # parts without items may have been left out
            kept = {id(piece.batch) for piece in window.pieces}
            self._items = [items for batch, items in zip(self._counted, self._items, strict=True) if id(batch) in kept]
        return window

    def _begin_micro_batch(self, window: Window, index: int) -> None:
        super()._begin_micro_batch(window, index)
        if index == 0 and self._begun != self.progress.update:  # not again where memory ran out
            self._begun = self.progress.update
            self.owner.call_event("on_step_begin")

    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        index, rows = self._run.piece_index, self.current_rows or 0
        items = self._items[index]
        # The core weighs a place for the loss, which is written once it is known: `training_step` runs backward.
        loss = torch.ones((), device=self.device)
        weighted = self._losses.weighted({"loss": loss, "batch_size": rows}, index)
        self._weight = None if weighted is loss else weighted
        self._backward_loss = None
        try:
            loss.copy_(self._training_step(batch, torch.tensor(num_rows(batch)) if items is None else items))
        except StopTrainingError as error:
            self.backward_step(self._stand_in_for(batch, error)["loss"])
        if rows:
            self._entries.append((loss, float(rows if items is None else items)))
        if index < len(self._items) - 1:
            self.owner.call_event("on_substep_end")

    def _watchers(self) -> list[str]:
        """Return the overridden steps of the owner, and its callbacks that look at gradients."""
        owner = self.owner
        found = [] if owner.graph_safe else [name for name in STEPS if not owner.uses_default(name)]
        for callback in owner.callback_handler.callbacks:
            if not getattr(callback, "graph_safe", False):
                found += [f"{type(callback).__name__}.{name}" for name in STEP_EVENTS if _listens(callback, name)]
        return found

    def _graph_inputs(self, batch: Any, index: int) -> Any:
        items = self._items[index]
        rows = num_rows(batch)
        return {**super()._graph_inputs(batch, index), "items": float(rows if items is None else items)}

    def _graphed_micro_batch(self, inputs: Any) -> Any:
        self._weight, self._backward_loss = inputs["weight"], None
        return {"loss": self._training_step(inputs["batch"], inputs["items"])}

    def _take_graphed(self, output: Any, index: int) -> None:
        loss, rows, items = output["loss"].clone(), self.current_rows or 0, self._items[index]
        self._losses.note(index, loss, {"batch_size": rows})
        self._entries.append((loss, float(rows if items is None else items)))
        if index < len(self._items) - 1:
            self.owner.call_event("on_substep_end")

    def _training_step(self, batch: Any, items: Tensor) -> Tensor:
        loss = self.owner.flow.training_step(self.model, batch, items)
        if not isinstance(loss, Tensor):
            raise BatchLossError(f"training_step returned a {type(loss).__name__}; it must return the loss, detached")
        if loss.numel() != 1:
            raise BatchLossError(
                f"training_step returned a loss of shape {tuple(loss.shape)}; it must return the mean loss, one number"
            )
        loss = loss.detach().reshape(())
        if self._backward_loss is None and self._weight is not None:
            raise BatchLossError(
                "training_step did not run its backward pass through self.accelerator.backward(loss), which weighs "
                "the loss for its update of several micro-batches. Call that instead of loss.backward()."
            )
        share = self._share_of_returned(loss)
        return loss if share == 1 else loss * share

    def _share_of_returned(self, loss: Tensor) -> int:
        """Return what the losses of `training_step` are to be multiplied by to be means over their micro-batches.

        Steps of transformers 4 return their loss divided by `gradient_accumulation_steps`; the first one tells.
        """
        if self._returned_share is None:
            parts, given = self._settings.gradient_accumulation_steps, self._backward_loss
            code = getattr(self.owner.training_step, "__code__", None)
            may_divide = parts > 1 and code is not None and "gradient_accumulation_steps" in code.co_names
            is_share = may_divide and given is not None and bool(torch.isclose(loss * parts, given))
            self._returned_share = parts if is_share else 1
        return self._returned_share

    def _skips_update(self) -> bool:
        is_skipped = super()._skips_update()
        if is_skipped:
            self._entries = []
        return is_skipped

    def _count_update(self, window: Window) -> None:
        super()._count_update(window)
        self.samples_seen += window.samples
        for loss, items in self._entries:
            self.losses.update(loss, items, is_ours=True)

    def _end_training_of_epoch(self, windows: Iterator[Window]) -> None:
        super()._end_training_of_epoch(windows)
        if self.owner.control.should_epoch_stop:
            self._run.epoch_is_whole = True
        if self.progress.batch == 0:
            self.print(
                f"There is not a single batch in epoch {self.progress.epoch}: stopping at update {self.progress.update}"
            )
            self.owner.control.should_training_stop = True

    def _is_complete(self) -> bool:
        control = self.owner.control
        return control.should_epoch_stop or control.should_training_stop or super()._is_complete()

    def _is_over(self) -> bool:
        return self.owner.control.should_training_stop or super()._is_over()

    def _run_eval_epoch(self, valid_dl: Any, is_training: bool = True, is_intermediate: bool = False) -> None:
        self.owner.flow.evaluate()
        self.take_requests()

    def _log(self) -> None:
        """Hand the mean loss since the last log to the owner if that was asked for; look for losses not finite."""
        is_wanted, self.requests.log = self.requests.log, False
        update = self.progress.update
        if is_wanted and update > self.logged[2]:
            total, count = self.losses.total_loss, self.losses.running_count
            loss, items = sum_over_processes([total - self.logged[0], count - self.logged[1]], self.device)
            self.logged = (total, count, update)
            self._record.tell(update=update, epoch=self.run_history.current_epoch)
            self.speed = self._throughput.take()  # before the owner logs: what it shows has a figure of it
            self.record("log", {**self.owner.flow.log_update(loss / items if items else 0.0), **self._step_logs()})
            self._write_speed()
            self.take_requests()
        self._stop_if_nonfinite(*self._find_nonfinite())

    def shown(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Return what callbacks are given to show: logs, and of a loss the share of pad tokens since the last one.

        Where there is no padding there is no such share.

        The history has no such figure: a resumed run, which begins to count in between, would have another one.
        """
        if "loss" not in logs or not self.speed.get("padding_waste"):
            return logs
        return {**logs, "padding_waste": self.speed["padding_waste"]}

    def _rehearse_saving(self) -> None:
        if self.owner.args.save_total_limit is not None:
            super()._rehearse_saving()
        elif self._saver is not None:  # without a limit there is no number of checkpoints to find space for
            world_process_zero_only(check_savable)(*self._capture({}))

    def _capture(self, metadata: dict[str, Any]) -> Captured:
        self.switch_optimizer("eval")
        model, state, files = super()._capture(metadata)
        if is_adapter(self.owner.model):
            self._base = base_digest(self.owner.model) if self._base is None else self._base
            model, state["adapter_base"] = changing(self.owner.model, model), self._base
        return model, state, files

    def _restore(self, checkpoint: Checkpoint) -> None:
        super()._restore(completed(self.owner.model, checkpoint))


def _listens(callback: Any, event: str) -> bool:
    """Whether a callback does something at an event; the bases of both libraries, of one name, do nothing."""
    owner = next((each for each in type(callback).__mro__ if event in vars(each)), None)
    return event in getattr(callback, "__dict__", ()) or (owner is not None and owner.__name__ != "TrainerCallback")


class AcceleratorView:
    """`trainer.accelerator`: accelerate's object, which has no say in the loss of an update and in the data."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward on the mean loss of a micro-batch; called by `training_step`, yours or ours."""
        self._core.backward(loss)

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Return loaders as they are, since the loop shares out their data; what else there is, accelerate prepares."""
        others = [each for each in objects if not isinstance(each, DataLoader)]
        prepared = self._core.accelerator.prepare(*others, **options) if others else ()
        rest = iter(prepared if len(others) > 1 else (prepared,))
        result = tuple(each if isinstance(each, DataLoader) else next(rest) for each in objects)
        return result[0] if len(result) == 1 else result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core.accelerator, name)
