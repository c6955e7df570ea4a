"""When memory runs out: the same update again in smaller parts, or an error that says what would help.

An update that does not fit is given up (gradients, buffers, losses) and run again with each micro-batch cut into two
parts, then four, and so on. Each part is weighted by its items over the update's items, as micro-batches always are, so
loss and gradient stay the same up to rounding. Without an item count it is weighted by its samples; a loss that is a
mean over something else then changes, which is checked on a few rows and reported. Anything computed within one
forward pass is computed per part: batch norm's means, and dropout. The number of parts holds for the rest of the run
and is saved with it.

Evaluation batches are cut independently of training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

from loopwright.back_reference import BackReference
from loopwright.data import MicroBatch, Window
from loopwright.data.batch_parts import bounds_of
from loopwright.engine import memory
from loopwright.engine.graphs import single_precision_rates
from loopwright.errors import DataError, MemoryLimitError
from loopwright.progress import Parts
from loopwright.quantities import size
from loopwright.stepping import memory_advice
from loopwright.stepping.memory_advice import Comparison
from loopwright.training.losses import unused_parameters

if TYPE_CHECKING:
    from loopwright.training.run import TrainingRun

_DIFFERS = "memory does not run out at the same point everywhere"


class MemoryGuard:
    """Runs an update again in smaller parts as long as memory runs out; `parts` says how many a batch is cut into."""

    run = BackReference["TrainingRun"]()

    def __init__(self, run: TrainingRun) -> None:
        self.parts = Parts()
        self.window: Any = None
        self.run = run
        self._failure: Any = None  # the error of the last attempt, or None

    def attempts(self, window: Window) -> Iterator[MemoryGuard]:
        """Yield a context for every attempt at an update: one, and one more each time its parts do not fit."""
        self.window, self._failure = window, None
        yield self
        while self._failure is not None:
            self.window, self._failure = self._begin_again(self.window, self._failure), None
            yield self

    def __enter__(self) -> MemoryGuard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, (RuntimeError, MemoryError)):
            return False
        if not memory.is_out_of_memory(error) or isinstance(error, MemoryLimitError):
            trainer = self.run.trainer
            named = unused_parameters(trainer.model, error, trainer.remedies_of_unused_parameters)
            if named is not None:
                raise named from error
            return False
        memory.forget_frames(error)
        self._failure = error
        return True

    def _begin_again(self, window: Window, error: Exception) -> Window:
        """Give up an update that does not fit, and return its window in smaller parts."""
        run = self.run
        run.micro_batch_step.discard()
        run.drop_gradients()
        run.buffers.restore()
        has_graphs = run.stepper.num_graphs > 0
        if has_graphs:
            run.run_eagerly("memory ran out, and graphs keep some of it")
        memory.release_memory(run.engine.device)
        if has_graphs:  # without them a whole micro-batch may fit
            run.checkpoints.lower_tier(run.progress.update + 1, _DIFFERS)
            return run.begin_update(window)
        free = memory.free_bytes(run.engine.device)
        reason = self._why_not_split(window)
        if reason is not None:
            raise self._training_error(window, error, reason, free) from error
        run.run_eagerly("memory ran out, and graphs are recorded for whole micro-batches")
        self.parts.train *= 2
        smaller = run.begin_update(window)
        rows = max(piece.rows for piece in smaller.pieces)
        asked, update = memory.asked_bytes(error), run.progress.update + 1
        told = _told_size(max(window.pieces, key=lambda piece: piece.rows))
        comparison = memory_advice.compare(run, smaller) if self.parts.train == 2 else None
        text = (
            f"Out of memory in update {update} ({told}{_told_bytes(asked, free)}): "
            f"run again in {self.parts.train} parts of up to {rows}{_told_weighing(comparison)}, "
            "like all later updates"
        )
        found = {"update": update, "parts": self.parts.train, "rows": rows, "asked_bytes": asked, "free_bytes": free}
        self._report_split("training", text, comparison, found)
        return smaller

    def _why_not_split(self, window: Window) -> str | None:
        if self.run.settings.oom == "stop":
            return "that was not asked for"
        if self.run.engine.is_distributed:
            return "several processes take part, and the others are past the point where they could split too"
        largest = max(window.pieces, key=lambda piece: piece.rows)
        return self._why_exact() or self._why_uncut(largest)

    def _why_exact(self) -> str | None:
        """Return the setting that guarantees the same bits regardless of memory, and so forbids parts, or None."""
        policy = self.run.settings.checkpoints
        if self.run.settings.reduction == "exact":
            return 'reduction="exact" guarantees the same sums regardless of memory'
        if policy is not None and policy.require_exact:
            return "require_exact guarantees the same bits regardless of memory"
        return None

    def _why_uncut(self, piece: MicroBatch) -> str | None:
        if piece.rows < 2:
            return "a single sample does not fit"
        reason = self.run.trainer.why_not_cut()
        if reason is not None:
            return reason
        try:
            self.run.trainer.cut_batch(piece.batch, piece.rows, 0, piece.rows // 2)
        except DataError as error:
            return str(error)
        return None

    def _report_split(self, phase: str, text: str, comparison: Comparison | None, found: dict[str, int | None]) -> None:
        """Report and record a split; from here on the bits of the run depend on the available memory."""
        run, known = self.run, {name: value for name, value in found.items() if value is not None}
        run.trainer.notify("memory.split", text, phase=phase, **known)
        self._warn_of_another_loss(phase, comparison)
        event = "oom_split" if phase == "training" else "oom_eval_split"
        run.logbook.record.write(event, epoch=run.epoch, **known)
        run.checkpoints.lower_tier(found["update"], _DIFFERS)

    def _training_error(self, window: Window, error: Exception, reason: str, free: int) -> MemoryLimitError:
        run, trainer = self.run, self.run.trainer
        piece = max(window.pieces, key=lambda each: each.rows)
        saw = [_first_line(error), f"not run again in smaller parts: {reason}"]
        needed, savings = memory_advice.measure(run, piece)
        if needed is not None:
            saw.append(f"the activations of a micro-batch need about {size(needed)}; {size(free)} are free for them")
        fix = trainer.remedies_of_batch(piece.rows, memory_advice.length_of(piece.batch), savings)
        if run.settings.oom == "stop" and not run.engine.is_distributed:
            if memory_advice.compare(run, window).keeps_maths(memory_advice.rounding(run)):
                saw.append(f"{trainer.remedy_of_policy()} keeps the maths")
            fix = f"{trainer.remedy_of_policy()}   or   {fix}"
        update, told = run.progress.update + 1, _told_size(piece)
        told_bytes = _told_bytes(memory.asked_bytes(error), None)
        return memory.TorchMemoryLimitError(
            "memory.train", f"out of memory in update {update} ({told}{told_bytes})", saw=saw, fix=fix
        )

    def _warn_of_another_loss(self, name: str, comparison: Comparison | None) -> None:
        if comparison is None or comparison.is_same(memory_advice.rounding(self.run)):
            return
        text = (
            f"Warning: in parts the {name} loss is another loss: {comparison.whole:.6g} for {comparison.rows} rows at "
            f"once, {comparison.parts:.6g} as the mean over single rows. If it is a mean over something else than "
            "samples, return their number from count_batch_items or as num_items_in_batch. If it compares samples "
            "with each other, return a reason from why_not_cut."
        )
        self.run.trainer.notify("memory.loss_changed", text, whole=comparison.whole, parts=comparison.parts)

    def cut_evaluation(self, piece: MicroBatch, error: Exception, has_loss: bool) -> None:
        """Run evaluation batches in smaller parts from here on, after a batch or a part of one did not fit.

        A MemoryLimitError is raised if it cannot or must not be cut. Predictions have no loss to compare (`has_loss`).
        """
        run, trainer = self.run, self.run.trainer
        memory.release_memory(run.engine.device)
        free, asked = memory.free_bytes(run.engine.device), memory.asked_bytes(error)
        told, told_bytes = _told_size(piece), _told_bytes(asked, free)
        others = "several processes take part, and the others wait for this one's results"
        reason = others if run.engine.is_distributed else self._why_exact() or self._why_uncut(piece)
        if reason is not None:
            raise memory.TorchMemoryLimitError(
                "memory.eval",
                f"out of memory while evaluating ({told}{told_bytes})",
                saw=[_first_line(error), f"not run again in smaller parts: {reason}"],
                fix=trainer.remedies_of_evaluation(),
            ) from error
        self.parts.evaluation *= 2
        rows = max(stop - start for start, stop in bounds_of(piece.rows, 2))
        comparison = memory_advice.compare_evaluation(run, piece) if has_loss and self.parts.evaluation == 2 else None
        text = (
            f"Out of memory while evaluating ({told}{told_bytes}): evaluated in parts of up to {rows} from here on"
            f"{_told_weighing(comparison)}; training is unaffected"
        )
        position = {"update": run.progress.update, "parts": self.parts.evaluation, "rows": rows}
        self._report_split("evaluation", text, comparison, {**position, "asked_bytes": asked, "free_bytes": free})

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Run the optimizer's step: an error from here on means a torn update.

        Memory that runs out inside raises a MemoryLimitError, since smaller batches would not help. Where updates may
        be CUDA graphs, the eager ones use learning rates rounded as a graph's buffer rounds them.
        """
        run = self.run
        run.is_torn = True
        try:
            with single_precision_rates(run.trainer.optimizer) if run.stepper.rounds_rates else nullcontext():
                yield
        except (RuntimeError, MemoryError) as error:
            if not memory.is_out_of_memory(error):
                raise
            memory.forget_frames(error)
            raise memory.TorchMemoryLimitError(
                "memory.train",
                f"out of memory in the optimizer's step of update {self.run.progress.update + 1}, where it creates "
                "its state or changes the weights: smaller batches would not help",
                saw=[_first_line(error)],
                fix=run.trainer.remedies_of_step(),
            ) from error


def _told_bytes(asked: int | None, free: int | None) -> str:
    if asked is None:
        return ""
    return f"; {size(asked)} more did not fit" + ("" if free is None else f", {size(free)} are free without it")


def _told_size(piece: MicroBatch) -> str:
    length = memory_advice.length_of(piece.batch)
    return f"batch {piece.rows}" + ("" if length is None else f" × length {length}")


def _told_weighing(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    return f", each weighted by {comparison.weighed_by or 'its items where they are counted, else by its samples'}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
