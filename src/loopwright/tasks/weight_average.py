"""A moving average of the weights, which is evaluated, and from which the best model is chosen."""

from __future__ import annotations

from typing import Any

import torch

from loopwright.callbacks import TrainerCallback
from loopwright.callbacks.ema import ModelEma
from loopwright.engine.sharding import load_weights, local, whole_state
from loopwright.protocols import TrainerLike


class AverageWeights(TrainerCallback):
    """Averages the weights after each update, and swaps the average in for evaluation; batch norm statistics too."""

    asks_alike = True  # it requests nothing

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._average: Any = None
        self._model: Any = None
        self._kept: list[torch.Tensor] | None = None

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Start from the current weights."""
        self._model = trainer.get_model(keep_torch_compile=False)
        self._average = ModelEma(self._model, self._decay)

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Move the average towards the new weights."""
        update = trainer.progress.update
        # Lower at first, so that a short run's average forgets its start.
        self._average.decay = min(self._decay, (1 + update) / (10 + update))
        self._average.update(self._model)

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Swap the average in."""
        if self._average is not None:
            self._kept = [tensor.detach().clone() for tensor in _tensors(self._model)]
            _copy(_tensors(self._average.module), _tensors(self._model))

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Put the weights back."""
        if self._kept is not None:
            _copy(self._kept, _tensors(self._model))
            self._kept = None

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Put the weights back after an interrupted evaluation."""
        self.on_eval_epoch_end(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the average."""
        return {"average": None if self._average is None else whole_state(self._average.module)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the saved average."""
        if state["average"] is not None and self._average is not None:
            load_weights(self._average.module, state["average"])


def average_in(state: dict[str, Any]) -> dict[str, Any] | None:
    """Return the average in the state of a checkpoint, if there is one."""
    states = (saved["state"] for saved in state["callbacks"] if saved["class"] == AverageWeights.__name__)
    return next((each["average"] for each in states if each), None)


def _tensors(model: Any) -> list[torch.Tensor]:
    return [*map(local, model.parameters()), *model.buffers()]


@torch.no_grad()
def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
