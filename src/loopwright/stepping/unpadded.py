"""Whether the micro-batches of graphs run without padding, and on how many tokens each.

Decided once per run and kept in its saved state. Before the first micro-batch is recorded, it is run with and without
padding: rows stay padded if the outputs differ by more than rounding, or if anything else goes wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopwright.back_reference import BackReference
from loopwright.data import Window
from loopwright.engine.joined_rows import JoinedRows, token_budget, usual_budget, why_padded
from loopwright.engine.seeding import preserved_generators

if TYPE_CHECKING:
    from loopwright.training.run import TrainingRun


class UnpaddedRows:
    """The rows of a run's graphs without their padding, where that is possible."""

    run = BackReference["TrainingRun"]()

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self._joined: JoinedRows | None = None
        self._is_proven = False
        if not _is_wanted(run) or run.recordings.unpads is False:
            run.recordings.unpads = False
            return
        reason = _why_padded(run)
        if reason is not None:
            self.stop(reason)
            return
        run.recordings.unpads = True
        self._joined = JoinedRows(run.bare_model())

    @property
    def is_on(self) -> bool:
        return self._joined is not None

    def close(self) -> None:
        if self._joined is not None:
            self._joined.close()
            self._joined = None

    def stop(self, reason: str) -> None:
        """Leave rows padded from here on."""
        self.close()
        self.run.recordings.unpads = False
        report_padded(self.run, reason)

    def with_budgets(self, window: Window, inputs: list[Any]) -> list[Any]:
        """Return the inputs of micro-batches, each with the number of its tokens: None where it stays padded."""
        if not self.is_on:
            return inputs
        budgets = [token_budget(piece.batch) for piece in window.pieces]
        first = next((place for place, budget in enumerate(budgets) if budget is not None), None)
        if first is not None and not self._is_proven:
            self._is_proven = self._prove(window.pieces[first].on(self.run.engine.device), budgets[first] or 0)
            if not self._is_proven:
                return inputs
        return [{"inputs": each, "tokens": budget} for each, budget in zip(inputs, budgets, strict=True)]

    def with_usual_budget(self, batch: Any, inputs: Any) -> Any:
        """Return the inputs of a micro-batch with a number of tokens that depends on its size alone."""
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        return {"inputs": inputs, "tokens": None if mask is None else usual_budget(mask)} if self.is_on else inputs

    def graphed(self, inputs: Any) -> Any:
        """Run forward and backward of a micro-batch, given what `with_budgets` returned."""
        step = self.run.micro_batch_step
        if self._joined is None:
            return step.graphed(inputs)
        batch = inputs["inputs"]["batch"]
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        with self._joined.running(mask, inputs["tokens"]):
            return step.graphed(inputs["inputs"])

    def _prove(self, batch: Mapping[str, Any], budget: int) -> bool:
        run = self.run
        assert self._joined is not None

        def forward() -> Tensor:
            return run.micro_batch_step.forward(batch)["loss"]  # type: ignore[no-any-return]

        reason = "its outputs differ without padding"
        try:
            with preserved_generators(run.engine.device):
                if self._joined.is_equal(batch["attention_mask"], budget, forward, _dtype(run)):
                    return True
        except (RuntimeError, TypeError, ValueError) as error:  # a model that does not follow transformers' interface
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        finally:
            run.buffers.restore()
        self.stop(reason)
        return False


def report_padded(run: TrainingRun, reason: str) -> None:
    if run.settings.padding == "free":
        run.trainer.notify("graphs.padding", f"Keeping the padding of batches: {reason}", reason=reason)
    run.logbook.record.write("padding", update=run.progress.update, mode="padded", reason=reason)


def _is_wanted(run: TrainingRun) -> bool:
    """Whether padding is to be left out: by default of compiled runs whose batches come in a few lengths.

    Each shape is up to four graphs then, which takes long to pay back for kernels that are not compiled.
    """
    settings = run.settings
    if settings.padding != "auto":
        return settings.padding == "free"
    has_few = bool(getattr(getattr(run.train_loader, "collate_fn", None), "bucket_lengths", None))
    return has_few and settings.step_mode == "compile" and run.engine.device.type == "cuda"


def _dtype(run: TrainingRun) -> torch.dtype:
    """Return the type in which matrices are multiplied."""
    is_bf16 = run.engine.accelerator.mixed_precision == "bf16"
    return torch.bfloat16 if is_bf16 else next((each.dtype for each in run.engine.parameters), torch.float32)


def _why_padded(run: TrainingRun) -> str | None:
    if run.engine.device.type == "cuda" and _dtype(run) not in (torch.bfloat16, torch.float16):
        return "flash attention needs bf16"
    return why_padded(run.bare_model())
