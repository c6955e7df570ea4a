"""The parts of an update: a stepper runs it, a `MicroBatchStep` knows its micro-batches.

`MicroBatchStep` says how items are counted, what a CUDA graph of a micro-batch reads and returns, and whose hooks have
to see it. `Trainer.create_step` returns one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from loopwright.back_reference import BackReference
from loopwright.callbacks import TrainerCallback
from loopwright.data import Window
from loopwright.data.batch_parts import with_items
from loopwright.engine.graphs import NotCapturableError
from loopwright.engine.nested import map_tensors
from loopwright.hooks import TrainerHooks
from loopwright.settings import is_overridden

if TYPE_CHECKING:
    from loopwright.training.run import TrainingRun

STEP_HOOKS = (
    "calculate_train_batch_loss",
    "backward_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "_perform_forward_and_backward_passes",
)
STEP_EVENTS = ("on_train_step_start", "on_train_step_end", "on_before_optimizer_step", "on_optimizer_step_end")
_READ_AFTER_REPLAY = ("loss", "batch_size", "num_items_in_batch")


class EagerStepper:
    """Runs every update operation by operation; `rounds_rates`: with learning rates rounded as in a graph's buffer."""

    run = BackReference["TrainingRun"]()
    num_graphs = 0
    rounds_rates = False

    def __init__(self, run: TrainingRun) -> None:
        self.run = run

    def forget(self) -> None:
        """Free the memory of graphs: there are none."""

    def close(self) -> None:
        """Leave the model as it was: nothing to do."""

    def note_changes(self) -> None:
        """Note what the list of recorded shapes says of the time since the last update: nothing."""

    @property
    def step(self) -> Callable[[Window], None]:
        """The trainer's own update, without another frame around it."""
        return self.run.trainer._run_update


class MicroBatchStep:
    """The loop's view of a micro-batch: `calculate_train_batch_loss`, then `backward_step`."""

    run = BackReference["TrainingRun"]()
    keeps_gradients = True  # of weights that the optimizer does not hold: a callback may step another one

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self._counts_items = is_overridden(run.trainer, TrainerHooks, "count_batch_items")

    def collect(self, window: Window) -> Window:
        """Return the window of an update as it was read; called once, even if the update is run again in parts."""
        return window

    def begin(self, window: Window) -> Window:
        """Start an update: count its items for `run.losses`; return the window without empty parts."""
        run, counts = self.run, []
        if self._counts_items:
            counts = [run.trainer.count_batch_items(piece.batch) for piece in window.pieces]
            window, counts = with_items(window, counts)
        run.losses.begin_update(window, counts)
        return window

    def forward(self, batch: Any) -> Mapping[str, Any]:
        """Run the forward pass alone, to measure what it keeps; return at least its `loss`."""
        return self.run.trainer.calculate_train_batch_loss(batch)

    def discard(self) -> None:
        """Forget the losses of the current update, which is skipped or run again."""
        self.run.losses.drop_update()

    def commit(self, window: Window) -> None:
        """Count the losses of an update whose weights are in the model."""
        self.run.losses.count_update()

    def graph_inputs(self, batch: Any, index: int) -> Any:
        """Return everything that changes from one replay of this micro-batch to the next."""
        return {"batch": batch, "weight": self.run.losses.weight_of(index)}

    def graphed(self, inputs: Any) -> Any:
        """Run forward and backward while they are recorded; return the values to read after a replay."""
        trainer = self.run.trainer
        output = trainer.calculate_train_batch_loss(inputs["batch"])
        loss, weight = output["loss"], inputs["weight"]
        if weight is not None and "num_items_in_batch" in output:
            raise NotCapturableError("the items of a micro-batch are counted in its forward pass")
        read = {name: output[name] for name in (output if self._is_watched() else _READ_AFTER_REPLAY) if name in output}
        del output  # backward takes the memory of outputs that nobody reads
        read = map_tensors(read, Tensor.detach)  # or the whole backward graph would be kept alive
        trainer.backward_step(loss if weight is None else loss * weight)
        return read

    def reads_loss_alone(self) -> bool:
        """Whether nothing but the loss is read of a model's outputs while they are recorded."""
        trainer = self.run.trainer
        is_default = trainer.loss_func is None and not is_overridden(
            trainer, TrainerHooks, "calculate_train_batch_loss"
        )
        return is_default and not self._is_watched()

    def _is_watched(self) -> bool:
        return any(listens(callback, "on_train_step_end") for callback in self.run.trainer.callback_handler)

    def take_graphed(self, output: Any, index: int) -> None:
        self.run.losses.note(index, output["loss"].clone(), output)

    def participants(self) -> list[Any]:
        """Return everything that a run may get meanwhile and that takes part in a step: own hooks, and callbacks."""
        trainer = self.run.trainer
        return [*(vars(trainer).get(name) for name in STEP_HOOKS), *trainer.callback_handler]

    def watchers(self) -> list[str]:
        """Return the step hooks and step events from outside loopwright, unless their class is `graph_safe`."""
        trainer = self.run.trainer
        found = []
        if not getattr(type(trainer), "graph_safe", False):
            own = [name for name in STEP_HOOKS if name in vars(trainer) or is_foreign(type(trainer), name)]
            found += [f"{type(trainer).__name__}.{name}" for name in own]
        for callback in trainer.callback_handler:
            if not getattr(callback, "graph_safe", False):
                found += [f"{type(callback).__name__}.{name}" for name in STEP_EVENTS if listens(callback, name)]
        return found


def is_foreign(kind: type, name: str, own: Sequence[str] = ("loopwright",)) -> bool:
    """Whether a method was written outside loopwright, or these packages."""
    owner = next((each for each in kind.__mro__ if name in vars(each)), None)
    return owner is not None and owner.__module__.partition(".")[0] not in own


def listens(callback: Any, event: str) -> bool:
    """Whether a callback overrides an event of the core."""
    method = getattr(callback, event, None)
    return method is not None and getattr(method, "__func__", method) is not getattr(TrainerCallback, event)
