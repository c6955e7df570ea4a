"""When memory runs out: the same update again in smaller parts, or an error that says what would help.

An update that does not fit is given up (gradients, buffers, losses), and run again with each micro-batch cut into two
parts, then four, and so on. Each part is weighed by its items over those of the update, as micro-batches always are, so
loss and gradient are the same up to rounding. Where nobody counts items it is weighed by its samples; a loss that is a
mean over something else is another one then, which is looked for on a few rows, and told. What is computed within one
forward pass is computed per part: batch norm's means, and dropout, which is drawn anew. The number of parts holds for
the rest of the run, and is saved with it.

Evaluation batches are cut on their own account, whatever is done about training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from loopwright.data import Piece, Window
from loopwright.data.cutting import bounds_of
from loopwright.engine.memory import (
    SavedBytes,
    TorchMemoryLimitError,
    asked_bytes,
    forget_frames,
    free_bytes,
    is_out_of_memory,
    release_memory,
)
from loopwright.engine.nested import iter_tensors, map_tensors, to_device
from loopwright.engine.seeding import preserved_generators
from loopwright.errors import DataError, MemoryLimitError
from loopwright.evaluation import training_modes
from loopwright.hooks import TrainerHooks
from loopwright.losses import unused_parameters
from loopwright.quantities import size
from loopwright.settings import is_overridden
from loopwright.updates import TrainerUpdates

_SECONDS_FOR_MEASURING = 20.0
_ROWS_MEASURED = (2, 4)  # what batches keep grows by the same for each row, and batch norm needs two
_MOST_ROWS_COMPARED = 8
_ROUNDING, _COARSE_ROUNDING = 2e-3, 5e-2  # of a loss, relative to it; coarse where something has 16 bits or fewer


@dataclass(frozen=True)
class Saving:
    """What a change would save.

    Attributes:
        name: "half_batch", "bf16", "checkpointing" or "half_length".
        num_bytes: of the activations of one micro-batch.
    """

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Comparison:
    """The loss of some rows at once and in parts of one row, which show best what a loss is a mean of.

    Attributes:
        weighed_by: "its items" or "its samples", of a part; None if that is not known.
        rows: how many were looked at; 0 if none were, since items are counted or it could not be done.
        whole: their loss at once; nan if it is another one each time.
        parts: the mean of their losses one by one.
    """

    weighed_by: str | None = None
    rows: int = 0
    whole: float = 0.0
    parts: float = 0.0

    def is_same(self, rounding: float) -> bool:
        """Whether both losses are the same up to this much rounding, relative to them, or cannot be compared."""
        return not math.isfinite(self.whole) or _is_close(self.whole, self.parts, rounding)

    def keeps_maths(self, rounding: float) -> bool:
        """Whether it is known that the loss in parts is that of the whole."""
        return self.weighed_by == "its items" or (self.rows > 0 and _is_close(self.whole, self.parts, rounding))


class TrainerMemory(TrainerUpdates):
    """The part of `Trainer` that deals with too little memory."""

    @property
    def num_parts(self) -> int:
        """Into how many parts a micro-batch of the current run is cut; 1 as long as memory suffices."""
        return self._parts.train

    # --- training -----------------------------------------------------------------------------------------------

    def _within_memory(self, run: Callable[[Window], None], window: Window) -> None:
        """Run the micro-batches of an update, and again in smaller parts for as long as memory runs out.

        Raises:
            MemoryLimitError: it cannot be cut, or may not be.
            ConfigError: the loss does not depend on all parameters that several processes share.
        """
        while True:
            try:
                run(window)
                return
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or isinstance(error, MemoryLimitError):
                    named = unused_parameters(self.model, error, self.remedies_of_unused_parameters)
                    if named is not None:
                        raise named from error
                    raise
                forget_frames(error)
                failure = error
            window = self._begin_again(window, failure)

    def _begin_again(self, window: Window, error: Exception) -> Window:
        """Give up an update that does not fit, and return its window in smaller parts."""
        free = self._give_up_update()
        reason = self._why_not_split(window)
        if reason is not None:
            raise self._training_error(window, error, reason, free) from error
        if self._graphs is not None:
            self._run_eagerly("memory ran out, and graphs are recorded for whole micro-batches")
        self._parts.train *= 2
        smaller = self._begin_update(window)
        rows = max(piece.rows for piece in smaller.pieces)
        asked, update = asked_bytes(error), self.progress.update + 1
        told = _told_size(max(window.pieces, key=lambda piece: piece.rows))
        is_first = self._parts.train == 2
        comparison = self._compare(smaller) if is_first else None
        self.print(
            f"Out of memory in update {update} ({told}{_told_bytes(asked, free)}): "
            f"run again in {self._parts.train} parts of up to {rows}{_told_weighing(comparison)}, "
            "as all updates from here on"
        )
        self._warn_of_another_loss("training", comparison)
        self._record.write(
            "oom_split",
            update=update,
            epoch=self.run_history.current_epoch,
            parts=self._parts.train,
            rows=rows,
            **_known(asked_bytes=asked, free_bytes=free),
        )
        self._lower_guarantee(update)
        return smaller

    def _give_up_update(self) -> int:
        """Drop what the micro-batches of an update left so far; return the bytes that can be had then."""
        self._losses.drop_update()
        self._drop_gradients()
        self._buffers.restore()
        release_memory(self.device)
        return free_bytes(self.device)

    def _why_not_split(self, window: Window) -> str | None:
        """Return why an update is not run again in parts, or None if it is."""
        if self._settings.oom == "stop":
            return "that was not asked for"
        if self._engine.is_distributed:
            return "several processes take part, and the others are past the point where they could split too"
        largest = max(window.pieces, key=lambda piece: piece.rows)
        return self._why_exact() or self._why_uncut(largest)

    def _why_exact(self) -> str | None:
        """Return what forbids parts, since it promises that the bits of a run do not depend on its memory, or None."""
        policy = self._settings.checkpoints
        if self._settings.reduction == "exact":
            return 'reduction="exact" promises the same sums whatever the memory'
        if policy is not None and policy.require_exact:
            return "require_exact promises the same bits whatever the memory"
        return None

    def _why_uncut(self, piece: Piece) -> str | None:
        """Return why a batch cannot be cut, or None if it can."""
        if piece.rows < 2:
            return "a single sample does not fit"
        reason = self.why_not_cut()
        if reason is not None:
            return reason
        try:
            self.cut_batch(piece.batch, piece.rows, 0, piece.rows // 2)
        except DataError as error:
            return str(error)
        return None

    def _lower_guarantee(self, update: int) -> None:
        """Write down that from an update on the bits of this run depend on the memory there was."""
        if self._about["tier"] >= "T2":
            return
        self._about["tier"] = "T2"
        self.print("Resume guarantee T2 from here on: where memory runs out is not the same everywhere")
        self._record.write("tier", update=update, tier="T2", reason="out of memory: run in parts")

    def _step_optimizer(self) -> None:
        """Step the optimizer; memory that runs out there is not helped by smaller batches.

        Raises:
            MemoryLimitError: it ran out.
        """
        try:
            super()._step_optimizer()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            forget_frames(error)
            raise TorchMemoryLimitError(
                "memory.train",
                f"out of memory in the optimizer's step of update {self.progress.update + 1}, where it makes its state "
                "or changes the weights: smaller batches would not help",
                saw=[_first_line(error)],
                fix=self.remedies_of_step(),
            ) from error

    # --- the error of training ----------------------------------------------------------------------------------

    def _training_error(self, window: Window, error: Exception, reason: str, free: int) -> MemoryLimitError:
        """Return the error that ends the run, with what would have helped, measured."""
        piece = max(window.pieces, key=lambda each: each.rows)
        saw = [_first_line(error), f"not run again in smaller parts: {reason}"]
        needed, savings = self._measure(piece)
        if needed is not None:
            saw.append(f"the activations of a micro-batch need about {size(needed)}; {size(free)} are free for them")
        fix = self.remedies_of_batch(piece.rows, _length(piece.batch), savings)
        if self._settings.oom == "stop" and not self._engine.is_distributed:
            keeps = ", which keeps the maths" if self._compare(window).keeps_maths(self._rounding()) else ""
            fix = f"{self.remedy_of_policy()}{keeps}   or   {fix}"
        update, told = self.progress.update + 1, _told_size(piece)
        told_bytes = _told_bytes(asked_bytes(error), None)
        return TorchMemoryLimitError(
            "memory.train", f"out of memory in update {update} ({told}{told_bytes})", saw=saw, fix=fix
        )

    def remedy_of_policy(self) -> str:
        """Return how to ask for updates in parts; called for the error of a run that has run out of memory."""
        return 'oom="split"'

    def remedies_of_step(self) -> str:
        """Return what needs less memory in the optimizer's step; called for an error."""
        return "an optimizer with less state (SGD, Adafactor), fewer trained weights, or a smaller model"

    def remedies_of_batch(self, rows: int, length: int | None, savings: list[Saving]) -> str:
        """Return what needs less memory in the forward and backward pass, with what it saves; called for an error.

        Args:
            rows: of the micro-batch that does not fit.
            length: of its rows, where they are texts.
            savings: as measured on some of its rows; empty if nothing could be measured.
        """
        words = {
            "half_batch": f"per_device_batch_size={rows // 2} with twice the gradient_accumulation_steps",
            "bf16": 'mixed_precision="bf16"',
            "checkpointing": "model.gradient_checkpointing_enable()",
            "half_length": f"rows of {(length or 0) // 2} tokens",
        }
        return told_savings(words, savings) or 'a smaller per_device_batch_size, or mixed_precision="bf16"'

    # --- measuring ----------------------------------------------------------------------------------------------

    def _measure(self, piece: Piece) -> tuple[int | None, list[Saving]]:
        """Return how much the forward pass of a micro-batch keeps, and what changes would save, as far as can be told.

        Measured on a few rows and multiplied, since all of them do not fit. Nothing is measured where other processes
        would have to take part in each forward pass.
        """
        if self._engine.is_distributed:
            return None, []
        ends_at = time.monotonic() + _SECONDS_FOR_MEASURING
        try:
            with preserved_generators(self.device):
                needed = self._kept_bytes(piece)
                if needed is None:
                    return None, []
                savings = []
                for name, context, change in self._changes(piece):
                    changed = self._kept_bytes(piece, context, change) if time.monotonic() < ends_at else None
                    if changed is not None and changed < needed:
                        savings.append(Saving(name, needed - changed))
                if piece.rows > 1:
                    savings.insert(0, Saving("half_batch", needed - needed * (piece.rows // 2) // piece.rows))
                return needed, savings
        finally:
            self._buffers.restore()
            release_memory(self.device)

    def _changes(self, piece: Piece) -> Iterator[tuple[str, AbstractContextManager[Any], Callable[[Any], Any]]]:
        """Yield what may be changed: a name, a context to run in, and what it makes of a batch."""
        if self._accelerator.mixed_precision == "no":
            yield "bf16", torch.autocast(self.device.type, torch.bfloat16), _same
        model = self._engine.unwrap(self.model, keep_torch_compile=False)
        if callable(getattr(model, "gradient_checkpointing_enable", None)) and not getattr(
            model, "is_gradient_checkpointing", False
        ):
            yield "checkpointing", _checkpointing(model), _same
        length = _length(piece.batch)
        if length is not None and length > 1:
            yield "half_length", nullcontext(), lambda batch: _shortened(batch, length)

    def _kept_bytes(
        self,
        piece: Piece,
        context: AbstractContextManager[Any] | None = None,
        change: Callable[[Any], Any] | None = None,
    ) -> int | None:
        """Return how many bytes the forward pass of a micro-batch keeps, by those of a few rows; None if it fails."""
        sizes = sorted({min(piece.rows, rows) for rows in _ROWS_MEASURED})
        found = []
        try:
            with context or nullcontext():
                for rows in sizes:
                    batch = piece.batch if rows == piece.rows else self.cut_batch(piece.batch, piece.rows, 0, rows)
                    moved = piece._replace(batch=batch, moved=None).on(self.device)
                    saved = SavedBytes(self._engine.parameters)
                    self.current_rows = rows
                    with saved.counting():
                        self._run_forward(moved if change is None else change(moved))
                    found.append(saved.num_bytes)
        except Exception as error:  # noqa: BLE001 - a model that cannot run this way is not measured this way
            forget_frames(error)
            return None
        if len(sizes) == 1:
            return found[0] * piece.rows // sizes[0]
        return found[0] + (found[1] - found[0]) * (piece.rows - sizes[0]) // (sizes[1] - sizes[0])

    def _run_forward(self, batch: Any) -> Mapping[str, Any]:
        """Run the forward pass of a micro-batch to see what it keeps, or how large its `loss` is, which is returned."""
        return self.calculate_train_batch_loss(batch)

    # --- comparing ----------------------------------------------------------------------------------------------

    def _compare(self, window: Window) -> Comparison:
        """Return what the parts of an update are weighed by, and the losses of some rows, whole and in parts.

        Called when a run is first split, once the update in parts has begun, and for the error of one that is not.
        """
        if self._losses.counts_items:
            return Comparison("its items")
        whole = window.pieces if window.whole is None else window.whole
        try:
            return self._compare_rows(max(whole, key=lambda piece: piece.rows), self._run_forward)
        finally:
            self._buffers.restore()

    def _compare_evaluation(self, piece: Piece) -> Comparison:
        """Return the same of an evaluation batch."""
        if self.count_batch_items(piece.batch) is not None:
            return Comparison("its items")
        if is_overridden(self, TrainerHooks, "calculate_eval_batch_loss"):
            return Comparison()  # it may count what it sees
        return self._compare_rows(piece, self.calculate_eval_batch_loss)

    def _compare_rows(self, piece: Piece, compute: Callable[[Any], Mapping[str, Any]]) -> Comparison:
        """Compare some rows, without dropout and the like, and put everything back.

        Without gradients more rows fit than are trained on, but not always: then half as many are looked at.
        """
        before, modes = self.current_rows, training_modes(self.model)
        try:
            with preserved_generators(self.device), torch.no_grad():
                self.model.eval()
                for most in (piece.rows, piece.rows // 2):
                    found = self._try_to_compare(piece, max(2, min(most, _MOST_ROWS_COMPARED)), compute)
                    if found is not None:
                        return found
            return Comparison()
        finally:
            for module, mode in modes:
                module.training = mode
            self.current_rows = before
            release_memory(self.device)

    def _try_to_compare(
        self, piece: Piece, rows: int, compute: Callable[[Any], Mapping[str, Any]]
    ) -> Comparison | None:
        """Compute the loss of some rows at once, twice, and one by one; None if that fails."""
        bounds, losses = [(0, rows), (0, rows), *bounds_of(rows, rows)], []
        try:
            for start, stop in bounds:
                self.current_rows = stop - start
                output = compute(to_device(self.cut_batch(piece.batch, piece.rows, start, stop), self.device))
                if "num_items_in_batch" in output:
                    return Comparison("its items")
                losses.append(float(output["loss"].detach().mean()))
        except Exception as error:  # noqa: BLE001 - what cannot be run this way is not compared
            forget_frames(error)
            return None
        first, second, *others = losses
        is_drawn = not _is_close(first, second, self._rounding() / 100)  # such as one that masks at random
        return Comparison("its samples", rows, math.nan if is_drawn else first, sum(others) / rows)

    def _rounding(self) -> float:
        """Return how much of a loss may be rounding."""
        is_coarse = self._accelerator.mixed_precision != "no"
        is_coarse = is_coarse or any(each.is_floating_point() and each.itemsize < 4 for each in self._engine.parameters)
        return _COARSE_ROUNDING if is_coarse else _ROUNDING

    def _warn_of_another_loss(self, name: str, comparison: Comparison | None) -> None:
        """Say it if a loss is another one in parts."""
        if comparison is None or comparison.is_same(self._rounding()):
            return
        self.print(
            f"Warning: in parts the {name} loss is another loss: {comparison.whole:.6g} for {comparison.rows} rows at "
            f"once, {comparison.parts:.6g} as the mean of theirs one by one. Is it a mean over something else? "
            "Then say over how many, by count_batch_items or num_items_in_batch. Does it compare samples with each "
            "other? Then say so by why_not_cut."
        )

    # --- evaluation ---------------------------------------------------------------------------------------------

    def _cut_evaluation(self, piece: Piece, error: Exception, has_loss: bool) -> None:
        """Let evaluation batches be run in smaller parts from here on; called when one does not fit.

        Args:
            piece: the batch, or the part of one, that does not fit.
            error: what was raised.
            has_loss: a loss is computed; not of predictions.

        Raises:
            MemoryLimitError: it cannot be cut, or may not be.
        """
        release_memory(self.device)
        free, asked = free_bytes(self.device), asked_bytes(error)
        told, told_bytes = _told_size(piece), _told_bytes(asked, free)
        reason = self._why_not_cut_evaluation(piece)
        if reason is not None:
            raise TorchMemoryLimitError(
                "memory.eval",
                f"out of memory while evaluating ({told}{told_bytes})",
                saw=[_first_line(error), f"not run again in smaller parts: {reason}"],
                fix=self.remedies_of_evaluation(),
            ) from error
        self._parts.evaluation *= 2
        rows = max(stop - start for start, stop in bounds_of(piece.rows, 2))
        comparison = self._compare_evaluation(piece) if has_loss and self._parts.evaluation == 2 else None
        self.print(
            f"Out of memory while evaluating ({told}{told_bytes}): evaluated in parts of up to {rows} from here on"
            f"{_told_weighing(comparison)}; training is not touched"
        )
        self._warn_of_another_loss("evaluation", comparison)
        self._record.write(
            "oom_eval_split",
            update=self.progress.update,
            epoch=self.run_history.current_epoch,
            parts=self._parts.evaluation,
            rows=rows,
            **_known(asked_bytes=asked, free_bytes=free),
        )
        if self._run.is_running:
            self._lower_guarantee(self.progress.update)

    def _why_not_cut_evaluation(self, piece: Piece) -> str | None:
        if self._engine.is_distributed:
            return "several processes take part, and the others wait for this one's results"
        return self._why_exact() or self._why_uncut(piece)

    def remedies_of_evaluation(self) -> str:
        """Return what needs less memory in an evaluation; called for an error."""
        return 'a smaller batch_size in eval_dataloader_kwargs, shorter samples, or mixed_precision="bf16"'


# -------------------------------------------------------------------------------------------------------- words


def told_savings(words: Mapping[str, str], savings: list[Saving]) -> str:
    """Return changes on one line, each by its word and with what it saves, the largest first."""
    ordered = sorted(savings, key=lambda saving: -saving.num_bytes)
    return "   or   ".join(f"{words[saving.name]} (−{size(saving.num_bytes)})" for saving in ordered)


def _told_bytes(asked: int | None, free: int | None) -> str:
    if asked is None:
        return ""
    return f"; {size(asked)} more did not fit" + ("" if free is None else f", {size(free)} are free without it")


def _is_close(one: float, other: float, rounding: float) -> bool:
    return math.isclose(one, other, rel_tol=rounding, abs_tol=1e-6)


def _told_size(piece: Piece) -> str:
    length = _length(piece.batch)
    return f"batch {piece.rows}" + ("" if length is None else f" × length {length}")


def _told_weighing(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    return f", each weighed by {comparison.weighed_by or 'its items where they are counted, else by its samples'}"


def _known(**values: int | None) -> dict[str, int]:
    return {name: value for name, value in values.items() if value is not None}


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


# ------------------------------------------------------------------------------------------------------ batches


def _length(batch: Any) -> int | None:
    """Return how many tokens the rows of a batch of texts have; None for another batch."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return int(ids.shape[-1]) if isinstance(ids, torch.Tensor) and ids.dim() > 1 else None


def _shortened(batch: Any, length: int) -> Any:
    """Return a batch of texts with half of the tokens of each row."""

    def half(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[..., : length // 2] if tensor.dim() > 1 and tensor.shape[-1] == length else tensor

    return map_tensors(batch, half) if any(True for _ in iter_tensors(batch)) else batch


def _same(batch: Any) -> Any:
    return batch


@contextmanager
def _checkpointing(model: Any) -> Iterator[None]:
    """Run a block in which a model computes activations again in its backward pass."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
