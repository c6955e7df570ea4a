"""How an update is run: operation by operation, or at once as a CUDA graph.

Whether an update is a graph follows from its shapes and from nothing that happened before, so a resumed run takes the
same kernels: a window of full micro-batches whose shapes are planned. Planned are the shapes that the collate function
pads to (`PlannedShapes`), or else the shape of the first micro-batch of the data. The first update of a run is never a
graph: the optimizer makes its state in it.

A step that somebody else has to see is run operation by operation: hooks and callbacks from outside loopwright that
take part in a step, unless their class says `graph_safe = True`. So is everything once it turned out that an update
cannot be recorded; the reason is printed once.

Also here: when several processes agree on what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from loopwright.callbacks import TrainerCallback
from loopwright.data import Loader, Window
from loopwright.data.buckets import PlannedShapes
from loopwright.data.cutting import cut_window, with_items
from loopwright.data.prefetch import prefetched
from loopwright.engine.graphs import (
    Capturer,
    CudaCapturer,
    NotCapturableError,
    NotYetCapturableError,
    Step,
    UpdateGraphs,
    signature,
    single_precision_rates,
)
from loopwright.engine.nested import map_tensors
from loopwright.engine.seeding import seed_torch
from loopwright.errors import ConfigError
from loopwright.keys import forward_key
from loopwright.persistence import TrainerPersistence
from loopwright.progress import TRAINED, RunState
from loopwright.tracking.throughput import Throughput, peak_flops

STEP_HOOKS = (
    "calculate_train_batch_loss",
    "backward_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "_perform_forward_and_backward_passes",
    "_apply_gradients",
)
STEP_EVENTS = ("on_train_step_start", "on_train_step_end", "on_before_optimizer_step", "on_optimizer_step_end")
# What is called between the backward pass that shares the gradients and the end of an update.
LATE_HOOKS = ("backward_step", "optimizer_step", "scheduler_step", "optimizer_zero_grad", "_apply_gradients")
LATE_EVENTS = ("on_before_optimizer_step", "on_optimizer_step_end", "on_update_end")
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)  # torch has one CUDA kernel for all of their step
_READ_AFTER_REPLAY = ("loss", "batch_size", "num_items_in_batch")


class TrainerUpdates(TrainerPersistence):
    """The part of `Trainer` that runs an update as a graph where it can.

    Attributes:
        num_graphed_updates: of the current run in this process.
        graph_safe: of a subclass: its step hooks may be recorded once and replayed. They then see the same tensors each
            time, with new values in them, and run on the host only while they are recorded.
        speed: how fast the run was between the last two logs (`tracking.throughput`); empty before the first.
    """

    graph_safe: ClassVar[bool] = False
    speed: Mapping[str, float] = MappingProxyType({})
    _throughput: Throughput
    _run_that_began: RunState | None = None
    _graphs: UpdateGraphs | None = None
    _planned: Any = None
    num_graphed_updates: int = 0
    _num_graphed_logged: int = 0
    _counts_items: bool = False

    # --- may it be a graph? -------------------------------------------------------------------------------------

    def _plan_graphs(self) -> None:
        """Decide whether updates of this run are graphs; called before the first one."""
        self._graphs, self.num_graphed_updates, self._num_graphed_logged = None, 0, 0
        if self._settings.step_mode not in ("auto", "graph"):
            return
        reason = self._why_eager()
        if reason is None:
            self._planned = self._plan_shapes()
            reason = "the shapes of its batches are not known before they are read" if self._planned is None else None
        if reason is None:
            prepare_optimizer(self.optimizer)
            self._graphs = UpdateGraphs(self._graph_step(), self._create_capturer())
        elif self._has_graphs():
            self._run_eagerly(reason)

    def _check_step_mode(self, step_mode: str) -> None:
        """Refuse graphs where there are none; called before anything is touched."""
        if not self._has_graphs():
            check_graphs(step_mode, self.device)

    def _has_graphs(self) -> bool:
        return self.device.type == "cuda"

    def _create_capturer(self) -> Capturer:
        return CudaCapturer(self.device)

    def _why_eager(self) -> str | None:
        """Return why updates of this run are not graphs, or None if they may be."""
        engine, settings = self._engine, self._settings
        if not self._has_graphs():
            return f"{self.device.type} has no graphs"
        if engine.is_distributed:
            return "several processes take part"
        if engine.accelerator.scaler is not None:
            return "the loss scaler of fp16 decides on the host"
        if settings.nan == "skip":
            return 'nan="skip" looks at every update'
        if self._parts.train > 1:
            return "micro-batches are run in parts since memory ran out"
        others = self._watchers()
        if others:
            return f"{', '.join(others)} must see every step (graph_safe = True says that it need not)"
        return why_not_recorded(self.optimizer)

    def _watchers(self) -> list[str]:
        """Return the names of hooks and callbacks that take part in a step and are not declared to be safe."""
        found = []
        if not type(self).graph_safe:
            found += [f"{type(self).__name__}.{name}" for name in STEP_HOOKS if _is_foreign(type(self), name)]
        for callback in self.callback_handler:
            if not getattr(callback, "graph_safe", False):
                found += [f"{type(callback).__name__}.{name}" for name in STEP_EVENTS if _listens(callback, name)]
        return found

    def _plan_shapes(self) -> Any:
        """Return which micro-batches are recorded: those of planned shapes, or of a signature; None if none are."""
        loader = self._train_dataloader
        if not isinstance(loader, Loader):
            return None
        first = loader.first_batch()
        if getattr(loader.collate_fn, "bucket_lengths", None):
            return PlannedShapes(loader.collate_fn, first)
        try:
            return None if first is None else signature(first)
        except NotCapturableError:
            return None

    def _is_planned(self, window: Window) -> bool:
        loader, full = self._train_dataloader, self._settings.gradient_accumulation_steps
        if len(window.pieces) != full or any(piece.rows != loader.batch_size for piece in window.pieces):
            return False
        if isinstance(self._planned, PlannedShapes):
            return all(piece.batch in self._planned for piece in window.pieces)
        return all(signature(piece.batch) == self._planned for piece in window.pieces)

    # --- data and speed -----------------------------------------------------------------------------------------

    def _windows(self, train_dl: Any) -> Iterator[Window]:
        """Return the windows of the epoch from where the run stands: copied ahead to the device, counted and timed."""
        windows = self._as_loader(train_dl).windows(self.progress.epoch, self.progress.samples)
        return self._throughput.watch(prefetched(windows, self.device))

    def _create_throughput(self) -> Throughput:
        peak = peak_flops(self.device, self._engine.accelerator.mixed_precision)
        num_parameters = sum(each.numel() for each in self._engine.parameters) if peak is not None else None
        return Throughput(self.device, num_parameters, peak)

    @property
    def data_wait_seconds(self) -> float:
        """How long this process has waited for data in the current run."""
        return self._throughput.waited_seconds

    def _tell_speed(self) -> None:
        self.speed = self._throughput.take()
        self._write_speed()

    def _write_speed(self) -> None:
        if self.speed:
            epoch = self.run_history.current_epoch
            self._record.write("speed", update=self.progress.update, epoch=epoch, **self.speed)

    # --- agreeing with the other processes ----------------------------------------------------------------------

    def _plan_agreement(self) -> None:
        """Decide when the processes agree on what is asked for; called when an epoch begins.

        What is told before gradients are shared has arrived when they are, and costs no waiting. But then nobody may
        ask later in the update, unless on all processes: otherwise they agree when it is over.
        """
        if not self._engine.is_distributed:
            return
        is_late = self._engine.agreement.largest(bool(self._late_askers()))[0]
        self._engine.before_sharing = None if is_late else self._begin_to_agree
        if not is_late:
            self._engine.agreement.prepare()

    def _begin_to_agree(self) -> None:
        self._heed_signals()
        self._engine.agreement.begin(*self._asked())

    def _late_askers(self) -> list[str]:
        """Return the names of what may ask for something on this process alone after gradients are shared."""
        policy = self._settings.checkpoints
        found = ["every_seconds"] if policy is not None and policy.every_seconds is not None else []
        found += [name for name in LATE_HOOKS if _is_foreign(type(self), name)]
        for callback in self.callback_handler:
            found += [f"{type(callback).__name__}.{name}" for name in LATE_EVENTS if asks_alone(callback, name)]
        return found

    # --- where `_run_training` is overridden ---------------------------------------------------------------------

    def _begin_run(self) -> None:
        """Make ready for the first update."""

    def _begin_once(self) -> None:
        """Make ready for the first update, unless it is done."""
        if self._run_that_began is not self._run:
            self._run_that_began = self._run
            self._begin_run()

    def _catch_up(self) -> None:
        """Do what belongs before an epoch and what calls for it may have left out; called when one begins."""
        self._begin_once()
        if self.progress.stage >= TRAINED:
            self.progress.end_epoch()

    def _loader_of_epoch(self) -> Any:
        """Return the training loader, which yields the batches of the current epoch to whoever iterates it."""
        self._train_dataloader.set_epoch(self.progress.epoch)
        return self._train_dataloader

    # --- an update ---------------------------------------------------------------------------------------------

    def _begin_update(self, window: Window) -> Window:
        """Start an update; return its window as it is run: in parts, once memory has run out."""
        if self._parts.train > 1:
            window = cut_window(window, self._parts.train, self.cut_batch)
        counts = [self.count_batch_items(piece.batch) for piece in window.pieces] if self._counts_items else []
        window, counts = with_items(window, counts)
        self._losses.begin_update(window, counts)
        self._buffers.keep()
        self._run.is_in_window = True
        return window

    def _begin_micro_batch(self, window: Window, index: int) -> None:
        self._run.piece_index = index
        self.current_rows = window.pieces[index].rows
        self._engine.share_gradients(self.model, index == len(window.pieces) - 1)
        seed_torch(forward_key(window.pieces[index].key), self.device)

    def _step_optimizer(self) -> None:
        """Step the optimizer; where graphs are planned, with the learning rates that it would have in one."""
        self._run.update_is_torn = True
        if self._graphs is None:
            self.optimizer_step()
        else:
            with single_precision_rates(self.optimizer):
                self.optimizer_step()

    def _step_scheduler(self) -> None:
        """Step the scheduler, if there is one and the loss scaler has not refused the update."""
        if self.scheduler is not None and not self._engine.step_was_skipped(self.optimizer):
            self.scheduler_step()

    # --- running it ---------------------------------------------------------------------------------------------

    def _replay(self, window: Window) -> bool:
        """Run an update as a graph; return False if it has to be run operation by operation."""
        graphs = self._graphs
        if graphs is None or self.progress.update == 0 or not self._is_planned(window):
            return False
        graphs.forget_if_changed()
        batches = [piece.batch if piece.moved is None else piece.moved for piece in window.pieces]
        inputs = [self._graph_inputs(batch, index) for index, batch in enumerate(batches)]

        def before(index: int) -> None:
            self._begin_micro_batch(window, index)
            self.call_event("on_train_step_start")
            self._run.update_is_torn = True

        def after(index: int, output: Any) -> None:
            self._take_graphed(output, index)
            step = self.progress.batch + index
            self.call_event("on_train_step_end", batch=window.pieces[index].batch, batch_output=output, step=step)

        try:
            graphs.replay(inputs, before, after)
        except NotYetCapturableError:
            return False
        except NotCapturableError as error:
            self._run_eagerly(str(error))
            return False
        self.num_graphed_updates += 1
        self.gradient_norm = graphs.norm
        for event in ("on_before_optimizer_step", "on_optimizer_step_end"):
            self.call_event(event)
        self._step_scheduler()
        return True

    def _release(self) -> None:
        """Give everything back, the graphs and their memory too, and what callbacks hold."""
        super()._release()
        self._graphs = None
        self.callback_handler.release()

    def _run_eagerly(self, reason: str) -> None:
        """Run updates operation by operation from here on, and say why."""
        self._graphs = None
        self.print(f"Updates are run operation by operation, not as CUDA graphs: {reason}")
        self._record.write("step_mode", update=self.progress.update, mode="eager", reason=reason)

    def _step_logs(self) -> dict[str, Any]:
        """Return how many updates since the last log were graphs, where some can be."""
        graphed = self.num_graphed_updates - self._num_graphed_logged
        self._num_graphed_logged = self.num_graphed_updates
        return {} if self._graphs is None and not graphed else {"graphed_updates": graphed}

    # --- what is recorded ---------------------------------------------------------------------------------------

    def _graph_step(self) -> Step:
        return Step(
            micro_batch=self._graphed_micro_batch,
            apply=self._graphed_apply,
            begin=self._settle_saves,
            restore=lambda: self._buffers.restore(),
            parameters=self._engine.parameters,
            optimizer=self.optimizer,
            device=self.device,
        )

    def _settle_saves(self) -> None:
        """Wait for a save in the background, which would use the device while something is recorded."""
        if self._saver is not None:
            self._saver.wait()

    def _graph_inputs(self, batch: Any, index: int) -> Any:
        """Return what changes from update to update for a micro-batch: the batch, and the weight of its loss."""
        return {"batch": batch, "weight": self._losses.weight_of(index)}

    def _graphed_micro_batch(self, inputs: Any) -> Any:
        """Run forward and backward of a micro-batch; return what is read after a replay."""
        output = self.calculate_train_batch_loss(inputs["batch"])
        loss, weight = output["loss"], inputs["weight"]
        if weight is not None and "num_items_in_batch" in output:
            raise NotCapturableError("the items of a micro-batch are counted in its forward pass")
        self.backward_step(loss if weight is None else loss * weight)
        is_watched = any(_listens(callback, "on_train_step_end") for callback in self.callback_handler)
        read = {name: output[name] for name in (output if is_watched else _READ_AFTER_REPLAY) if name in output}
        return map_tensors(read, Tensor.detach)  # or all that led to them would be kept

    def _graphed_apply(self) -> Tensor | None:
        """Clip the gradients and step the optimizer; return the norm, where there is one."""
        if self._settings.clips:
            self._clip_gradients()
        self.optimizer_step()
        norm, self.gradient_norm = self.gradient_norm, None
        return norm

    def _take_graphed(self, output: Any, index: int) -> None:
        """Remember the loss of a replayed micro-batch."""
        self._losses.note(index, output["loss"].clone(), output)


# ------------------------------------------------------------------------------------- devices and optimizers


def check_graphs(step_mode: str, device: torch.device) -> None:
    """Refuse a step mode that a device has not.

    Raises:
        ConfigError: it is "graph", and the device is not CUDA's.
    """
    if step_mode == "graph" and device.type != "cuda":
        raise ConfigError(f'step_mode="graph" needs a CUDA device, and this run is on {device}. Use "auto".')


def why_not_recorded(optimizer: Any) -> str | None:
    """Return why the steps of an optimizer cannot be recorded, or None if they can."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        return f"the optimizer is wrapped in a {name}"
    if getattr(optimizer, "graph_safe", False):
        return None
    if not type(optimizer).__module__.startswith("torch.optim"):
        return f"{name} is not one of torch's optimizers (graph_safe = True says that it can be recorded)"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has step hooks"
    if not isinstance(optimizer, _FUSED) and "capturable" not in optimizer.defaults:
        return f"{name} reads its learning rate on the host"
    return None


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer use its fused kernel, or else count its steps on the device, so that it can be recorded."""
    for group in optimizer.param_groups:
        if isinstance(optimizer, _FUSED) and _may_fuse(group):
            group["fused"] = True
        elif "capturable" in group and not group.get("fused"):
            group["capturable"] = True
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(parameter.device)


def _may_fuse(group: dict[str, Any]) -> bool:
    """Whether a group says nothing about how it is computed, and torch has one kernel for all of it."""
    is_open = "fused" in group and group["fused"] is None and group.get("foreach") is None
    return is_open and not group.get("differentiable") and all(each.is_floating_point() for each in group["params"])


# ------------------------------------------------------------------------------------------------------- looking


def _is_foreign(kind: type, name: str) -> bool:
    """Whether a method was written outside loopwright."""
    owner = next((each for each in kind.__mro__ if name in vars(each)), None)
    return owner is not None and owner.__module__.partition(".")[0] != "loopwright"


def _listens(callback: Any, event: str) -> bool:
    method = getattr(callback, event, None)
    return method is not None and getattr(method, "__func__", method) is not getattr(TrainerCallback, event)


def asks_alone(callback: Any, event: str) -> bool:
    """Whether a callback may ask for something at an event on one process alone: its class does not say otherwise."""
    if event in getattr(callback, "__dict__", ()):
        return True
    owner = next((each for each in type(callback).__mro__ if event in vars(each)), None)
    return owner is not None and owner.__name__ != "TrainerCallback" and not vars(owner).get("asks_alike", False)
