"""Compiled updates: for one size of batches, or for all sizes once a second one comes.

Compiled kernels depend on the sizes that they were compiled with. So the sizes are a part of the saved state, and
everything is compiled before its first use with a batch of just these sizes, made of the current one: a resumed run
compiles what the first one did. Short batches of a run with one size, and batches of one row among larger ones, which
torch would compile again, run as the model is written.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopwright.callbacks import ProfileCallback
from loopwright.data import Window
from loopwright.engine.compilation import CompiledModel
from loopwright.engine.memory import is_out_of_memory, release_memory
from loopwright.engine.nested import iter_tensors, map_tensors
from loopwright.engine.seeding import preserved_generators
from loopwright.errors import Preempted, StopTrainingError
from loopwright.stepping.eager import EagerStepper

if TYPE_CHECKING:
    from loopwright.training.run import TrainingRun


class CompiledStepper(EagerStepper):
    """Runs every update operation by operation, with the compiled parts of the model; graphs take them as well.

    `follow` says before each update whether it takes the compiled parts.
    """

    def __init__(self, run: TrainingRun, model: CompiledModel) -> None:
        super().__init__(run)
        self.model = model
        self.is_on = False
        self._ready: set[str] = set()

    @property
    def step(self) -> Callable[[Window], None]:
        return self._step

    def _step(self, window: Window) -> None:
        self.follow(window)
        self.prepare(window, self._rehearse)
        with self.active():
            self.run.trainer._run_update(window)

    def _rehearse(self, batch: Any) -> None:
        run = self.run
        if run.engine.is_distributed:
            return  # gradients would be summed over all processes
        with preserved_generators(run.engine.device), self.active():
            try:
                run.trainer.backward_step(run.micro_batch_step.forward(batch)["loss"])
            finally:
                run.buffers.restore()
                run.drop_gradients()

    def active(self) -> AbstractContextManager[None]:
        """Run a micro-batch of the current update in this context."""
        return self.model.active() if self.is_on else nullcontext()

    def follow(self, window: Window) -> None:
        """Note the sizes of an update's batches, and decide whether it is compiled."""
        recordings, loader = self.run.recordings, self.run.train_loader
        full = getattr(loader, "batch_size", None)
        fewest = 1 if full == 1 else 2
        pieces = [piece for piece in window.pieces if piece.rows >= fewest and full in (None, piece.rows)]
        whole = [piece.for_graph(self.run.engine.device) for piece in pieces]
        sizes = [[list(each.shape) for each in iter_tensors(batch)] for batch in whole]
        if sizes and recordings.compiled_for is None:
            recordings.compiled_for = sizes[0]
            # Collators that pad announce it: their batches come in several lengths, but for packed rows of one width.
            collate = getattr(loader, "collate_fn", None)
            recordings.is_dynamic = hasattr(collate, "bucket_lengths") and getattr(collate, "row_width", None) is None
        other = next((each for each in sizes if each != recordings.compiled_for), None)
        if other is not None and not recordings.is_dynamic:
            recordings.is_dynamic, recordings.compiled_for, self._ready = True, other, set()
            self.run.stepper.forget()
        fits = len(sizes) == len(window.pieces)
        if recordings.is_dynamic:
            fits = all(piece.rows >= fewest for piece in window.pieces)
        self.is_on = fits and recordings.not_compiled is None
        reason = self.model.why_stale() if self.is_on and self._ready else None
        if reason is not None:
            self._give_up(reason)

    def prepare(self, window: Window, rehearse: Callable[[Any], None], kind: str = "") -> None:
        """Compile before the first batch of a kind; `rehearse` runs forward and backward of one on the device."""
        run, recordings = self.run, self.run.recordings
        if kind in self._ready or not self.is_on or recordings.compiled_for is None:
            return
        if not self._ready:
            sizes = "all sizes of batches" if recordings.is_dynamic else "this size of batches"
            run.trainer.notify("compile", f"Compiling {len(self.model)} parts of the model, for {sizes}")
            self.model.compile(is_dynamic=recordings.is_dynamic)
        example = fitted(window.pieces[0].on(run.engine.device), recordings.compiled_for)
        if not self._ready and example is not None:
            self._count_work(lambda: rehearse(map_tensors(example, Tensor.clone)), len(window.pieces))
        if example is None or run.engine.is_distributed:  # the saved sizes are rank 0's
            run.checkpoints.lower_tier(run.progress.update, "kernels are compiled for the sizes that come first")
        try:
            # Twice: what a model sets up in its first forward pass, such as its problem type, compiles it again.
            for _ in range(0 if example is None else 2):
                rehearse(map_tensors(example, Tensor.clone))  # the model may change its inputs
        except Exception as error:  # no C compiler, say; one of the batch comes again in the update
            if getattr(error, "is_out_of_memory", False):
                raise  # updates run without graphs then
            _raise_interruption(error)
            if is_out_of_memory(error):  # the update itself runs out too, and is split or explained
                release_memory(run.engine.device)
                self._ready.add(kind)
                return
            cause = getattr(error, "inner_exception", error)  # torch wraps what a backend raises
            self._give_up((str(cause).strip().splitlines() or [type(cause).__name__])[0])
        self._ready.add(kind)
        self.model.note_hooks()

    def _count_work(self, run_micro_batch: Callable[[], Any], number: int) -> None:
        """Let a profile count operations where the model runs as it is written: compiled ones are not seen."""
        self.is_on = False
        for callback in self.run.trainer.callback_handler:
            if isinstance(callback, ProfileCallback):
                callback.count_work(run_micro_batch, number)
        self.is_on = True

    def _give_up(self, reason: str) -> None:
        self.is_on, self.run.recordings.not_compiled = False, reason
        text = f"Running the model as it is written, not compiled: {reason}"
        self.run.trainer.notify("compile.fallback", text, reason=reason)


def _raise_interruption(error: BaseException) -> None:
    """Raise the signal that ended a compilation, if one did: torch wraps every error in it."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, (Preempted, StopTrainingError)):
            raise inner
        inner = getattr(inner, "inner_exception", None) or inner.__cause__ or inner.__context__


def fitted(batch: Any, sizes: list[list[int]]) -> Any:
    """Return a batch with these sizes, its rows and columns repeated or cut; None for another kind of batch."""
    tensors = list(iter_tensors(batch))
    if [each.dim() for each in tensors] != [len(size) for size in sizes] or any(0 in each.shape for each in tensors):
        return None
    remaining = iter(sizes)

    def fit(value: Tensor) -> Tensor:
        for dimension, size in enumerate(next(remaining)):
            if value.shape[dimension] != size:
                places = torch.arange(size, device=value.device) % value.shape[dimension]
                value = value.index_select(dimension, places)
        return value

    return map_tensors(batch, fit)
