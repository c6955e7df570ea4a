"""Counting the input tokens and floating-point operations of a run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from loopwright.engine.processes import sum_over_processes
from loopwright.training.run import run_of

if TYPE_CHECKING:
    from loopwright.hf.trainer import Trainer


class Counters:
    """Counts on each process; `store` sums over all of them, at logs, evaluations and saves only."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._tokens: Tensor | int = 0  # since the last `store`; on the batch's device, so that no update waits
        self._flops: dict[Any, int] = {}  # by model and shapes, since counting parameters takes long

    def count(self, batch: Any) -> None:
        """Count a micro-batch once its update is done."""
        trainer = self._trainer
        trainer.current_flos += trainer.floating_point_ops(batch)
        if trainer.args.include_num_input_tokens_seen != "no":
            self._tokens = self._tokens + self._num_tokens(batch)

    def store(self) -> dict[str, float]:
        """Add the counts to the trainer's state; return the tokens per second. Every process must call it."""
        trainer, state = self._trainer, self._trainer.state
        trainer.store_flos()
        if trainer.args.include_num_input_tokens_seen == "no":
            return {}
        state.num_input_tokens_seen += int(sum_over_processes([float(self._tokens)], trainer.core.device)[0])
        self._tokens = 0
        seconds = max(run_of(trainer.core).logbook.record.seconds, 1e-9)
        return {"train_tokens_per_second": round(state.num_input_tokens_seen / seconds, 3)}

    def flops_of(self, batch: Any) -> int:
        """Return the model's own estimate, or 6 per token and parameter outside embeddings; 0 if neither is known."""
        if not isinstance(batch, Mapping):
            return 0
        model, tokens = self._trainer.model, batch.get(self._trainer.main_input_name)
        key = (id(model), *((name, value.shape) for name, value in batch.items() if isinstance(value, Tensor)))
        if key not in self._flops:
            own: Any = getattr(model, "floating_point_ops", None)
            if own is None and hasattr(model, "num_parameters") and isinstance(tokens, Tensor):
                self._flops[key] = 6 * tokens.numel() * model.num_parameters(exclude_embeddings=True)
            else:
                self._flops[key] = 0 if own is None else own(batch)
        return self._flops[key]

    def _num_tokens(self, batch: Any) -> Any:
        trainer, how = self._trainer, self._trainer.args.include_num_input_tokens_seen
        tokens: Any = batch.get(trainer.main_input_name) if isinstance(batch, Mapping) else None
        if not isinstance(tokens, Tensor):
            warnings.warn(f"no tokens are counted: a batch has no {trainer.main_input_name}", stacklevel=2)
            return 0
        padding: Any = getattr(trainer.processing_class, "pad_token_id", None)
        mask: Any = batch.get("attention_mask")
        if how == "non_padding" and mask is None and padding is None:
            warnings.warn("padding is counted too: there is no attention_mask, and no pad_token_id", stacklevel=2)
        if how == "all" or (mask is None and padding is None):
            return tokens.numel()
        return tokens.ne(padding).sum() if mask is None else mask.sum()
