"""Updates as CUDA graphs: which ones may be recorded, and how they are replayed.

Every shape of micro-batches is recorded when it first comes, up to a number (`Recordings`). The first update of a run
is never a graph, because the optimizer creates its state in it.

Updates run eagerly if hooks or callbacks from outside loopwright take part in a step, unless their class says
`graph_safe = True`. So do updates of a shape that turns out not to be recordable, and all updates if that is not due to
the shape: nothing was recorded before it, or the forward pass draws on the host. Reasons are printed once.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from loopwright.back_reference import BackReference
from loopwright.data import Window
from loopwright.engine import graphs
from loopwright.engine.compilation import has_compiled_modules
from loopwright.engine.engine import outputs_as_computed
from loopwright.engine.host_state import HostState
from loopwright.engine.layers import num_idle_draws
from loopwright.errors import ConfigError
from loopwright.hooks import TrainerHooks
from loopwright.settings import is_overridden
from loopwright.stepping.cast_weights import CastWeights
from loopwright.stepping.compiled import CompiledStepper
from loopwright.stepping.eager import EagerStepper, is_foreign
from loopwright.stepping.unpadded import UnpaddedRows, kind_of, report_padded

if TYPE_CHECKING:
    from loopwright.trainer import Trainer
    from loopwright.training.run import TrainingRun

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)  # torch has one CUDA kernel for their whole step


def plan_stepper(run: TrainingRun) -> EagerStepper | GraphStepper:
    """Decide how the updates of a run are run; called before the first one."""
    stepper = _planned_stepper(run)
    if run.settings.padding == "free" and isinstance(stepper, EagerStepper):
        report_padded(run, "updates are not CUDA graphs")
    return stepper


def _planned_stepper(run: TrainingRun) -> EagerStepper | GraphStepper:
    eager = eager_stepper(run)
    if run.settings.step_mode == "eager" or not has_graphs(run.trainer):
        _forget_capturing(run)
        return eager
    compiled = eager if isinstance(eager, CompiledStepper) else None
    reason = _why_eager(run) or run.recordings.ended
    if compiled is not None and compiled.model.records_graphs:
        reason = "this mode of torch.compile records its own"
    if reason is not None:
        report_eager(run, reason)
        return eager
    prepare_optimizer(run.trainer.optimizer)
    return GraphStepper(run, run.trainer.create_capturer(), compiled)


def eager_stepper(run: TrainingRun) -> EagerStepper:
    """Return the stepper of updates that are not graphs."""
    model = run.bare_model()
    if run.settings.step_mode == "compile" and isinstance(model, nn.Module):
        return CompiledStepper(run, run.trainer.create_compiled_model(model))
    return EagerStepper(run)


def has_graphs(trainer: Trainer) -> bool:
    """Whether updates of a trainer can be recorded at all: on CUDA, or with its own `create_capturer`."""
    return trainer.device.type == "cuda" or is_overridden(trainer, TrainerHooks, "create_capturer")


def report_eager(run: TrainingRun, reason: str) -> None:
    text = f"Running updates eagerly, not as CUDA graphs: {reason}"
    run.trainer.notify("graphs.fallback", text, reason=reason)
    run.logbook.record.write("step_mode", update=run.progress.update, mode="eager", reason=reason)


class GraphStepper:
    """Replays updates as CUDA graphs, and runs the others eagerly."""

    run = BackReference["TrainingRun"]()
    rounds_rates = True

    def __init__(self, run: TrainingRun, capturer: graphs.Capturer, compiled: CompiledStepper | None) -> None:
        self.run = run
        self._rows = UnpaddedRows(run)
        self._compiled = compiled
        casts = _cast_weights(run)
        step = graphs.Step(
            micro_batch=partial(_micro_batch, run, self._rows, casts, compiled),
            apply=partial(_apply, run),
            refresh=(lambda: None) if casts is None else casts.refresh,
            begin=run.checkpoints.wait,  # a save in the background would use the device while something is recorded
            restore=lambda: run.buffers.restore(),
            num_idle_draws=num_idle_draws(run.bare_model()),
            parameters=run.engine.parameters,
            optimizer=run.trainer.optimizer,
            device=run.engine.device,
            host_state=lambda: HostState(_owners(run), run.engine.parameters),
        )
        self._graphs = graphs.UpdateGraphs(step, capturer)
        self._parts = _parts(run)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def forget(self) -> None:
        """Free the memory of all graphs."""
        self._graphs.forget()

    def close(self) -> None:
        """Leave the model as it was."""
        self._rows.close()

    def note_changes(self) -> None:
        """Note in the list of recorded shapes, before it is saved, whether its graphs are stale."""
        self.run.recordings.has_moved = self._graphs.has_moved()

    def step(self, window: Window) -> None:
        if self._compiled is not None:
            self._compiled.follow(window)
        # In the first update the optimizer creates its state; only a compiled one is run as it will be recorded.
        may_be_graph = self.run.progress.update > 0 or (self._compiled is not None and self._compiled.is_on)
        if not may_be_graph or not all(piece.rows for piece in window.pieces) or not self._replay(window):
            self.run.trainer._run_update(window)

    def _follow(self) -> str | None:
        """Adopt what a callback has replaced or added since the last update; return why no update is a graph now."""
        parts = _parts(self.run)
        if len(parts) == len(self._parts) and all(map(is_, parts, self._parts)):
            return None
        self._parts, step = parts, self._graphs.step
        self.forget()
        reason = _why_eager(self.run)
        if reason is None:
            step.optimizer, step.parameters = self.run.trainer.optimizer, self.run.engine.parameters
            prepare_optimizer(step.optimizer)
            self._graphs = graphs.UpdateGraphs(step, self.run.trainer.create_capturer())
        return reason

    def _report_shape(self, reason: str) -> None:
        if self.run.is_first(f"graphs: {reason}"):
            text = f"Running updates of some shapes eagerly, not as CUDA graphs: {reason}"
            self.run.trainer.notify("graphs.shapes", text, reason=reason)
            self.run.logbook.write("step_mode", mode="eager for some shapes", reason=reason)

    def _fail(self, error: graphs.NotCapturableError) -> None:
        """Run updates of a shape that cannot be recorded eagerly, or all of them if it is not due to the shape."""
        run, recordings = self.run, self.run.recordings
        if self._rows.is_on and error.key is not None and not error.is_out_of_memory:
            self._rows.stop(str(error))
            return
        is_of_shape = error.is_out_of_memory or bool(recordings.recorded)  # else, it seems, no shape can be recorded
        if error.key is None or not is_of_shape:
            run.run_eagerly(str(error))
            return
        was_graph = recordings.fail(error.key, str(error))
        if error.is_out_of_memory:
            run.checkpoints.lower_tier(run.progress.update, "memory does not run out at the same point everywhere")
        elif was_graph:
            run.checkpoints.lower_tier(run.progress.update, "a shape that was a CUDA graph can no longer be recorded")
        self._report_shape(str(error))

    def _rehearse(self, inputs: Any, batch: Any) -> None:
        self._graphs.rehearse(self._rows.like(inputs, batch))

    def _replay(self, window: Window) -> bool:
        """Replay an update; return False if it has to be run eagerly."""
        run, trainer, step = self.run, self.run.trainer, self.run.micro_batch_step
        reason = self._follow() or run.recordings.follow(*self._graphs.forget_if_changed())
        if reason is not None:
            run.run_eagerly(reason)
            return False
        batches = [piece.for_graph(run.engine.device) for piece in window.pieces]
        inputs = [step.graph_inputs(batch, index) for index, batch in enumerate(batches)]
        inputs = self._rows.with_tokens(window, inputs)

        def before(index: int) -> None:
            run.begin_micro_batch(window, index)
            trainer.call_event("on_train_step_start")
            run.is_torn = True

        def after(index: int, output: Any) -> None:
            step.take_graphed(output, index)
            number = run.progress.batch + index
            trainer.call_event("on_train_step_end", batch=window.pieces[index].batch, batch_output=output, step=number)

        try:
            keys = [graphs.shape_key(value, is_alone=len(inputs) == 1) for value in inputs]
            reason = run.recordings.why_eager(keys)
            if reason is not None:
                self._report_shape(reason)
                return False
            if self._compiled is not None:
                for each in inputs:
                    self._compiled.prepare(window, partial(self._rehearse, each), kind_of(each))
            if run.progress.update == 0:
                self._graphs.run(inputs, before, after)
            else:
                if run.is_first("graphs: recording"):
                    text = "Recording updates as CUDA graphs: each shape of batches takes a moment when it first comes"
                    trainer.notify("graphs.recording", text)
                self._graphs.replay(keys, inputs, before, after)
                run.recordings.add(keys)
                run.logbook.num_graphed_updates += 1
        except graphs.NotYetCapturableError:
            return False
        except graphs.NotCapturableError as error:
            if run.is_torn:  # the first update had begun
                run.is_torn = False
                step.discard()
            self._fail(error)
            return False
        run.gradient_norm = self._graphs.norm
        for event in ("on_before_optimizer_step", "on_optimizer_step_end"):
            trainer.call_event(event)
        run.step_scheduler()
        return True


def _cast_weights(run: TrainingRun) -> CastWeights | None:
    """Return the copies of the weights, if the forward pass of the model is one autocast context to bfloat16."""
    if run.engine.accelerator.mixed_precision != "bf16":
        return None
    model = run.trainer.model
    is_wrapped = hasattr(model, "_original_forward")  # by accelerate
    if not is_wrapped or has_compiled_modules(model):
        return None
    is_joint = not is_foreign(type(run.trainer), "backward_step")  # which may run several backward passes
    return CastWeights(model, is_joint=is_joint, by_attribute=run.settings.step_mode == "compile")


def _micro_batch(
    run: TrainingRun, rows: UnpaddedRows, casts: CastWeights | None, compiled: CompiledStepper | None, inputs: Any
) -> Any:
    with (
        outputs_as_computed(run.trainer.model) if run.micro_batch_step.reads_loss_alone() else nullcontext(),
        nullcontext() if casts is None else casts.substituted(),
        nullcontext() if compiled is None else compiled.active(),
    ):
        return rows.graphed(inputs)


def _owners(run: TrainingRun) -> tuple[Any, ...]:
    return run.trainer.model, run.trainer.loss_func, run.trainer.optimizer


def _parts(run: TrainingRun) -> list[Any]:
    weights = run.engine.parameters, not run.engine.loose_weights()
    return [*_owners(run), *weights, *run.micro_batch_step.participants()]


def _apply(run: TrainingRun) -> Tensor | None:
    if run.settings.clips:
        run.trainer._clip_gradients()
    run.trainer.optimizer_step()
    norm, run.gradient_norm = run.gradient_norm, None
    return norm


def _why_eager(run: TrainingRun) -> str | None:
    if run.engine.is_distributed:
        return "several processes take part"
    if run.engine.accelerator.scaler is not None:
        return "the loss scaler of fp16 decides on the host"
    if run.settings.nan == "skip":
        return 'nan="skip" checks every update'
    if run.memory.parts.train > 1:
        return "micro-batches are run in parts since memory ran out"
    if run.micro_batch_step.keeps_gradients and run.engine.loose_weights():
        return "weights get gradients that the optimizer does not hold (freeze them if they are not trained)"
    others = run.micro_batch_step.watchers()
    if others:
        return f"{', '.join(others)} must see every step (set graph_safe = True if it need not)"
    return why_not_recorded(run.trainer.optimizer)


def check_graphs(step_mode: str, device: torch.device) -> None:
    if step_mode == "graph" and device.type != "cuda":
        raise ConfigError(f'step_mode="graph" needs a CUDA device, and this run is on {device}. Use "auto".')


def why_not_recorded(optimizer: Any) -> str | None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        return f"the optimizer is wrapped in a {name}"
    if getattr(optimizer, "graph_safe", False):
        return None
    if not type(optimizer).__module__.startswith("torch.optim"):
        return f"{name} is not one of torch's optimizers (set graph_safe = True if it can be recorded)"
    # Registered by public methods, but listed only there.
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


def _forget_capturing(run: TrainingRun) -> None:
    """Let an optimizer that was recorded on a GPU step on a device where it would refuse to."""
    for group in getattr(run.trainer.optimizer, "param_groups", ()) if run.engine.device.type in ("cpu", "mps") else ():
        if group.get("capturable"):
            group["capturable"] = False


def _may_fuse(group: dict[str, Any]) -> bool:
    """Whether a group does not choose its implementation, and torch has one kernel for all of it."""
    is_open = "fused" in group and group["fused"] is None and group.get("foreach") is None
    return is_open and not group.get("differentiable") and all(each.is_floating_point() for each in group["params"])
