"""Whether the micro-batches of graphs run without padding, on how many tokens each, and which need no mask.

Whether padding is left out is decided once per run and kept in its saved state. Before the first micro-batch is
recorded, it is run with and without padding: rows stay padded if the outputs differ by more than rounding, or if
anything else goes wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopwright.back_reference import BackReference
from loopwright.data import Window
from loopwright.engine.attention_masks import is_full, leaves_masks_out, masks_left_out, recognizes_ones
from loopwright.engine.joined_rows import JoinedRows, token_budget, usual_budget, why_padded
from loopwright.engine.nested import map_tensors
from loopwright.engine.seeding import preserved_generators

if TYPE_CHECKING:
    from loopwright.training.run import TrainingRun


ALL = "all"


class UnpaddedRows:
    """The rows of a run's graphs without their padding, where that is possible."""

    run = BackReference["TrainingRun"]()

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self._joined: JoinedRows | None = None
        self._is_proven = False
        self._leaves_masks_out = leaves_masks_out(run.bare_model())
        self._recognizes_ones = recognizes_ones(run.bare_model())
        if not _is_wanted(run) or run.recordings.unpads is False:
            run.recordings.unpads = False
            return
        is_other = run.engine.device.type == "cuda" and _dtype(run) not in (torch.bfloat16, torch.float16)
        reason = "flash attention needs bf16" if is_other else why_padded(run.bare_model())
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

    def with_tokens(self, window: Window, inputs: list[Any]) -> list[Any]:
        """Return the inputs of micro-batches, each with the number of its tokens: ALL if it has no padding.

        None where it stays padded.
        """
        tokens: list[Any] = [self._tokens_of(piece.batch) for piece in window.pieces]
        first = next((place for place, number in enumerate(tokens) if number not in (None, ALL)), None)
        if first is not None and not self._is_proven:
            self._is_proven = self._prove(window.pieces[first].on(self.run.engine.device), tokens[first])
            if not self._is_proven:
                tokens = [ALL if number == ALL else None for number in tokens]
        return [_with_tokens(each, number) for each, number in zip(inputs, tokens, strict=True)]

    def like(self, inputs: Any, batch: Any) -> Any:
        """Return the inputs of a micro-batch of another size, with tokens of the same kind as these inputs have."""
        tokens, mask = inputs.get("tokens"), _mask_of(batch)
        own = self.run.micro_batch_step.graph_inputs(batch, 0)
        return _with_tokens(own, tokens if mask is None or tokens in (None, ALL) else usual_budget(mask))

    def graphed(self, inputs: Any) -> Any:
        """Run forward and backward of a micro-batch, given what `with_tokens` returned."""
        tokens, inputs = inputs.get("tokens"), inputs.get("inputs", inputs)
        mask = _mask_of(inputs["batch"])
        needs_none = self._leaves_masks_out and (mask is None or tokens == ALL)
        with (
            masks_left_out(self.run.bare_model(), mask) if needs_none else nullcontext(),
            nullcontext() if self._joined is None else self._joined.running(mask, None if tokens == ALL else tokens),
        ):
            return self.run.micro_batch_step.graphed(inputs)

    def _tokens_of(self, batch: Any) -> int | str | None:
        # Compiled for all sizes, layers without a mask would be compiled once more.
        if self._recognizes_ones and not self.run.recordings.is_dynamic and is_full(batch):
            return ALL
        return token_budget(batch) if self.is_on else None

    def _prove(self, batch: Mapping[str, Any], budget: int) -> bool:
        run, batch = self.run, map_tensors(batch, Tensor.clone)  # the model may change its inputs
        assert self._joined is not None

        def forward() -> Tensor:
            return run.micro_batch_step.forward(map_tensors(batch, lambda each: each))["loss"]  # type: ignore[no-any-return]

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


def kind_of(inputs: Any) -> str:
    """Return a name for what is compiled on its own: padded rows, rows without padding, or all tokens."""
    tokens = inputs.get("tokens")
    return tokens if isinstance(tokens, str) else "padded" if tokens is None else "unpadded"


def _with_tokens(inputs: Any, tokens: int | str | None) -> Any:
    return inputs if tokens is None else {"inputs": inputs, "tokens": tokens}


def _mask_of(batch: Any) -> Any:
    return batch.get("attention_mask") if isinstance(batch, Mapping) else None


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
