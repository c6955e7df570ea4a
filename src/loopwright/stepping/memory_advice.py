"""Advice for a run that is out of memory, measured on a few rows of the batch that did not fit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loopwright.data import MicroBatch, Window
from loopwright.data.batch_parts import bounds_of
from loopwright.engine.memory import MemorySaving, SavedBytes, forget_frames, release_memory
from loopwright.engine.modes import evaluating
from loopwright.engine.nested import map_tensors, to_device
from loopwright.engine.seeding import preserved_generators
from loopwright.hooks import TrainerHooks
from loopwright.settings import is_overridden

if TYPE_CHECKING:
    from loopwright.training.run import TrainingRun

_SECONDS_FOR_MEASURING = 20.0
_ROWS_MEASURED = (2, 4)  # activations grow by the same amount per row, and batch norm needs two
_MOST_ROWS_COMPARED = 8
_ROUNDING, _COARSE_ROUNDING = 2e-3, 5e-2  # relative to the loss; coarse if anything has 16 bits or fewer

Compute = Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """The loss of some rows at once, and in parts of one row, which show best what a loss is a mean of."""

    weighed_by: str | None = None  # how a part is weighted, "its items" or "its samples"; None if unknown
    rows: int = 0  # rows compared; 0 if none were, because items are counted or it could not be done
    whole: float = 0.0  # their loss at once; nan if it differs each time
    parts: float = 0.0

    def is_same(self, rounding: float) -> bool:
        """Whether both losses agree up to this much relative rounding, or cannot be compared."""
        return not math.isfinite(self.whole) or _is_close(self.whole, self.parts, rounding)

    def keeps_maths(self, rounding: float) -> bool:
        """Whether the loss in parts is known to equal the loss of the whole batch."""
        return self.weighed_by == "its items" or (self.rows > 0 and _is_close(self.whole, self.parts, rounding))


def measure(run: TrainingRun, piece: MicroBatch) -> tuple[int | None, list[MemorySaving]]:
    """Return how many bytes the forward pass of a micro-batch keeps, and what changes would save, as far as known.

    Measured on a few rows and extrapolated, since all of them do not fit. Nothing is measured where other processes
    would have to take part in each forward pass.
    """
    if run.engine.is_distributed:
        return None, []
    ends_at = time.monotonic() + _SECONDS_FOR_MEASURING
    try:
        with preserved_generators(run.engine.device):
            needed = _kept_bytes(run, piece)
            if needed is None:
                return None, []
            savings = []
            for name, context, change in _changes(run, piece):
                changed = _kept_bytes(run, piece, context, change) if time.monotonic() < ends_at else None
                if changed is not None and changed < needed:
                    savings.append(MemorySaving(name, needed - changed))
            if piece.rows > 1:
                savings.insert(0, MemorySaving("half_batch", needed - needed * (piece.rows // 2) // piece.rows))
            return needed, savings
    finally:
        run.buffers.restore()
        release_memory(run.engine.device)


def _changes(
    run: TrainingRun, piece: MicroBatch
) -> Iterator[tuple[str, AbstractContextManager[Any], Callable[[Any], Any] | None]]:
    """Yield the changes worth measuring: a name, a context to run in, and a function that changes the batch."""
    if run.engine.accelerator.mixed_precision == "no":
        yield "bf16", torch.autocast(run.engine.device.type, torch.bfloat16), None
    model = run.bare_model()
    if callable(getattr(model, "gradient_checkpointing_enable", None)) and not getattr(
        model, "is_gradient_checkpointing", False
    ):
        yield "checkpointing", _checkpointing(model), None
    length = length_of(piece.batch)
    if length is not None and length > 1:

        def half(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[..., : length // 2] if tensor.dim() > 1 and tensor.shape[-1] == length else tensor

        yield "half_length", nullcontext(), lambda batch: map_tensors(batch, half)


def _kept_bytes(
    run: TrainingRun,
    piece: MicroBatch,
    context: AbstractContextManager[Any] | None = None,
    change: Callable[[Any], Any] | None = None,
) -> int | None:
    """Return the bytes that the forward pass of a micro-batch keeps, extrapolated from a few rows; None if it fails."""
    sizes = sorted({min(piece.rows, rows) for rows in _ROWS_MEASURED})
    found = []
    try:
        with context or nullcontext():
            for rows in sizes:
                batch = piece.batch if rows == piece.rows else run.trainer.cut_batch(piece.batch, piece.rows, 0, rows)
                moved = piece._replace(batch=batch, moved=None).on(run.engine.device)
                saved = SavedBytes(run.engine.parameters)
                run.current_rows = rows
                with saved.counting():
                    run.micro_batch_step.forward(moved if change is None else change(moved))
                found.append(saved.num_bytes)
    except Exception as error:  # noqa: BLE001 - a model that cannot run this way is not measured this way
        forget_frames(error)
        return None
    if len(sizes) == 1:
        return found[0] * piece.rows // sizes[0]
    return found[0] + (found[1] - found[0]) * (piece.rows - sizes[0]) // (sizes[1] - sizes[0])


def compare(run: TrainingRun, window: Window) -> Comparison:
    if run.losses.counts_items:
        return Comparison("its items")
    whole = window.pieces if window.whole is None else window.whole
    try:
        return _compare_rows(run, max(whole, key=lambda piece: piece.rows), run.micro_batch_step.forward)
    finally:
        run.buffers.restore()


def compare_evaluation(run: TrainingRun, piece: MicroBatch) -> Comparison:
    if run.trainer.count_batch_items(piece.batch) is not None:
        return Comparison("its items")
    if is_overridden(run.trainer, TrainerHooks, "calculate_eval_batch_loss"):
        return Comparison()  # it may count the rows that it sees
    return _compare_rows(run, piece, run.trainer.calculate_eval_batch_loss)


def _compare_rows(run: TrainingRun, piece: MicroBatch, compute: Compute) -> Comparison:
    """Compare some rows in evaluation mode, without dropout, and put everything back.

    Without gradients more rows fit than can be trained on, but not always: then half as many are tried.
    """
    before = run.current_rows
    try:
        with preserved_generators(run.engine.device), torch.no_grad(), evaluating(run.trainer.model):
            for most in (piece.rows, piece.rows // 2):
                found = _try_to_compare(run, piece, max(2, min(most, _MOST_ROWS_COMPARED)), compute)
                if found is not None:
                    return found
        return Comparison()
    finally:
        run.current_rows = before
        release_memory(run.engine.device)


def _try_to_compare(run: TrainingRun, piece: MicroBatch, rows: int, compute: Compute) -> Comparison | None:
    """Compute the loss of some rows at once, twice, and one by one; None if that fails."""
    bounds, losses = [(0, rows), (0, rows), *bounds_of(rows, rows)], []
    try:
        for start, stop in bounds:
            run.current_rows = stop - start
            part = run.trainer.cut_batch(piece.batch, piece.rows, start, stop)
            output = compute(to_device(part, run.engine.device))
            if "num_items_in_batch" in output:
                return Comparison("its items")
            losses.append(float(output["loss"].detach().mean()))
    except Exception as error:  # noqa: BLE001 - what cannot be run this way is not compared
        forget_frames(error)
        return None
    first, second, *others = losses
    is_drawn = not _is_close(first, second, rounding(run) / 100)  # such as a loss that masks at random
    return Comparison("its samples", rows, math.nan if is_drawn else first, sum(others) / rows)


def rounding(run: TrainingRun) -> float:
    """Return how much of a loss may be rounding, relative to it."""
    is_coarse = run.engine.accelerator.mixed_precision != "no"
    is_coarse = is_coarse or any(each.is_floating_point() and each.itemsize < 4 for each in run.engine.parameters)
    return _COARSE_ROUNDING if is_coarse else _ROUNDING


def _is_close(one: float, other: float, tolerance: float) -> bool:
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-6)


def length_of(batch: Any) -> int | None:
    """Return the number of tokens per row of a text batch; None for any other batch."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return int(ids.shape[-1]) if isinstance(ids, torch.Tensor) and ids.dim() > 1 else None


@contextmanager
def _checkpointing(model: Any) -> Iterator[None]:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
