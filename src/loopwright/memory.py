"""When memory runs out: the same update again in smaller parts, or an error that says what would help.

An update that does not fit is given up (gradients, buffers, losses), and run again with each micro-batch cut into two
parts, then four, and so on. Each part is weighed by its items over those of the update, as micro-batches always are, so
loss and gradient are the same up to rounding. What is computed within one forward pass is computed per part: batch
norm's means, and dropout, which is drawn anew. The number of parts holds for the rest of the run, and is saved with it.

Evaluation batches are cut on their own account, whatever is done about training.
"""

from __future__ import annotations

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
from loopwright.engine.nested import iter_tensors, map_tensors
from loopwright.engine.seeding import preserved_generators
from loopwright.errors import DataError, MemoryLimitError
from loopwright.updates import TrainerUpdates

_SECONDS_FOR_MEASURING = 20.0
_ROWS_MEASURED = (2, 4)  # what batches keep grows by the same for each row, and batch norm needs two


@dataclass(frozen=True)
class Saving:
    """What a change would save.

    Attributes:
        name: "half_batch", "bf16", "checkpointing" or "half_length".
        num_bytes: of the activations of one micro-batch.
    """

    name: str
    num_bytes: int


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
        """
        while True:
            try:
                run(window)
                return
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or isinstance(error, MemoryLimitError):
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
        self.print(
            f"Out of memory in update {update} ({self._told_size(window)}{_told_bytes(asked, free)}): "
            f"run again in {self._parts.train} parts of up to {rows}, each weighed by its items, as all updates from "
            "here on"
        )
        self._record.write(
            "oom_split",
            update=update,
            epoch=self.run_history.current_epoch,
            parts=self._parts.train,
            rows=rows,
            **_known(asked_bytes=asked, free_bytes=free),
        )
        self._lower_guarantee()
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
        settings = self._settings
        policy = settings.checkpoints
        if settings.oom == "stop":
            return "that was not asked for"
        if self._engine.is_distributed:
            return "several processes take part, and the others are past the point where they could split too"
        if settings.reduction == "exact":
            return 'reduction="exact" promises the same sums whatever the memory'
        if policy is not None and policy.require_exact:
            return "require_exact promises the same bits whatever the memory"
        largest = max(window.pieces, key=lambda piece: piece.rows)
        if largest.rows < 2:
            return "a single sample does not fit"
        return self.why_not_cut() or self._why_uncut(largest)

    def _why_uncut(self, piece: Piece) -> str | None:
        try:
            self.cut_batch(piece.batch, piece.rows, 0, piece.rows // 2)
        except DataError as error:
            return str(error)
        return None

    def _lower_guarantee(self) -> None:
        """Write down that the bits of this run depend on the memory there was."""
        if self._about["tier"] >= "T2":
            return
        self._about["tier"] = "T2"
        self.print("Resume guarantee T2 from here on: where memory runs out is not the same everywhere")
        self._record.write("tier", update=self.progress.update + 1, tier="T2", reason="out of memory: run in parts")

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
            saw.append(f"the activations of a micro-batch need about {told(needed)}; {told(free)} are free for them")
        fix = self.remedies_of_batch(piece.rows, _length(piece.batch), savings)
        if self._settings.oom == "stop" and not self._engine.is_distributed:
            fix = f"{self.remedy_of_policy()}, which keeps the maths   or   {fix}"
        update, size = self.progress.update + 1, self._told_size(window)
        told_bytes = _told_bytes(asked_bytes(error), None)
        return TorchMemoryLimitError(
            "memory.train", f"out of memory in update {update} ({size}{told_bytes})", saw=saw, fix=fix
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

    def _told_size(self, window: Window) -> str:
        piece = max(window.pieces, key=lambda each: each.rows)
        length = _length(piece.batch)
        return f"batch {piece.rows}" + ("" if length is None else f" × length {length}")

    # --- measuring ----------------------------------------------------------------------------------------------

    def _measure(self, piece: Piece) -> tuple[int | None, list[Saving]]:
        """Return how much the forward pass of a micro-batch keeps, and what changes would save, as far as can be told.

        Measured on a few rows and multiplied, since all of them do not fit.
        """
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

    def _run_forward(self, batch: Any) -> None:
        """Run the forward pass of a micro-batch, to see what it keeps."""
        self.calculate_train_batch_loss(batch)

    # --- evaluation ---------------------------------------------------------------------------------------------

    def _cut_evaluation(self, piece: Piece, error: Exception) -> None:
        """Let evaluation batches be run in smaller parts from here on; called when one does not fit.

        Args:
            piece: the batch, or the part of one, that does not fit.
            error: what was raised.

        Raises:
            MemoryLimitError: it cannot be cut, or may not be.
        """
        release_memory(self.device)
        free, asked = free_bytes(self.device), asked_bytes(error)
        told_bytes, length = _told_bytes(asked, free), _length(piece.batch)
        size = f"batch {piece.rows}" + ("" if length is None else f" × length {length}")
        reason = self._why_not_cut_evaluation(piece)
        if reason is not None:
            raise TorchMemoryLimitError(
                "memory.eval",
                f"out of memory while evaluating ({size}{told_bytes})",
                saw=[_first_line(error), f"not run again in smaller parts: {reason}"],
                fix=self.remedies_of_evaluation(),
            ) from error
        self._parts.evaluation *= 2
        rows = max(stop - start for start, stop in bounds_of(piece.rows, 2))
        self.print(
            f"Out of memory while evaluating ({size}{told_bytes}): evaluated in parts of up to {rows} from here on; "
            "training is not touched"
        )
        self._record.write(
            "oom_eval_split",
            update=self.progress.update,
            epoch=self.run_history.current_epoch,
            parts=self._parts.evaluation,
            rows=rows,
            **_known(asked_bytes=asked, free_bytes=free),
        )

    def _why_not_cut_evaluation(self, piece: Piece) -> str | None:
        if self._engine.is_distributed:
            return "several processes take part, and the others wait for this one's results"
        if piece.rows < 2:
            return "a single sample does not fit"
        return self.why_not_cut() or self._why_uncut(piece)

    def remedies_of_evaluation(self) -> str:
        """Return what needs less memory in an evaluation; called for an error."""
        return 'a smaller batch_size in eval_dataloader_kwargs, shorter samples, or mixed_precision="bf16"'


# -------------------------------------------------------------------------------------------------------- words


def told_savings(words: Mapping[str, str], savings: list[Saving]) -> str:
    """Return changes on one line, each by its word and with what it saves, the largest first."""
    ordered = sorted(savings, key=lambda saving: -saving.num_bytes)
    return "   or   ".join(f"{words[saving.name]} (−{told(saving.num_bytes)})" for saving in ordered)


def told(num_bytes: float) -> str:
    """Return bytes in the unit that reads best."""
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def _told_bytes(asked: int | None, free: int | None) -> str:
    if asked is None:
        return ""
    return f"; {told(asked)} more did not fit" + ("" if free is None else f", {told(free)} are free without it")


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
