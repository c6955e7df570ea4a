"""An exponential moving average of the model, maintained, evaluated and saved alongside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loopwright.callbacks.base import TrainerCallback, require_counts
from loopwright.callbacks.checkpoints import SaveBestModelCallback
from loopwright.engine.sharding import copy_model, load_weights, local, whole_state
from loopwright.protocols import TrainerLike


class ModelEma(nn.Module):
    """A moving average of a model's weights and buffers: average = decay * average + (1 - decay) * new.

    Attributes:
        module: the average, a copy of the model in eval mode without gradients.
        decay: how much of the old average stays.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999) -> None:
        super().__init__()
        self.module = copy_model(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards the model's current weights; called after each update."""
        if type(self).update_fn is not ModelEma.update_fn:
            self._assign(model, self.update_fn)
            return
        averages: list[Tensor] = []
        news: list[Tensor] = []
        for average, new in self._pairs(model):
            if average.is_floating_point():
                averages.append(average)
                news.append(new.to(average.device, average.dtype))
            else:
                average.copy_(new)
        if averages:
            # Two kernel launches for all weights instead of two per tensor.
            torch._foreach_mul_(averages, self.decay)
            torch._foreach_add_(averages, news, alpha=1 - self.decay)

    @torch.no_grad()
    def set(self, model: nn.Module) -> None:
        """Reset the average to a copy of the model."""
        self._assign(model, lambda average, new: new)

    def update_fn(self, ema_model_weights: Tensor, updated_model_weights: Tensor) -> Tensor:
        """Return the new average of one tensor; override it for another rule."""
        return self.decay * ema_model_weights + (1 - self.decay) * updated_model_weights

    def _assign(self, model: nn.Module, rule: Callable[[Tensor, Tensor], Tensor]) -> None:
        for average, new in self._pairs(model):
            average.copy_(rule(average, new.to(average.device)))

    def _pairs(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the averaged weights and buffers with the new ones; a buffer that the average lacks is copied."""
        averages, buffers = dict(self.module.named_parameters()), dict(self.module.named_buffers())
        for name, weight in model.named_parameters():
            yield local(averages[name]), local(weight)
        for name, buffer in model.named_buffers():
            average = buffers.get(name)
            if average is None or average.shape != buffer.shape:
                path, _, last = name.rpartition(".")
                self.module.get_submodule(path).register_buffer(last, buffer.detach().clone(), persistent=False)
            else:
                yield average, buffer


class ModelEmaCallback(SaveBestModelCallback):
    """Maintains a moving average of the model after every update, and saves the best one.

    Args:
        decay: how much of the old average stays at each update.
        evaluate_during_training: evaluate the average after each epoch's evaluation, under the metric prefix
            `ema_model_`; without it the average is saved after every epoch.
        watch_metric: the metric that decides which average is best.
        model_ema: creates the average; called with the model and `decay=`.
        callbacks: active while the average is evaluated.
        update_every: updates between two steps of the average.

    Attributes:
        ema_model: the average; None before the first run.
    """

    asks_alike = True

    def __init__(
        self,
        decay: float = 0.99,
        evaluate_during_training: bool = True,
        save_path: str | Path = "ema_model.pt",
        watch_metric: str = "ema_model_eval_loss_epoch",
        greater_is_better: bool | None = None,
        model_ema: Callable[..., Any] = ModelEma,
        callbacks: Iterable[TrainerCallback | type[TrainerCallback]] = (),
        update_every: int = 1,
    ) -> None:
        require_counts(update_every=update_every)
        never = {"reset_on_train": False, "save_optimizer": False, "load_saved_checkpoint": False}
        super().__init__(save_path, watch_metric, greater_is_better, **never)
        self.decay = decay
        self.evaluate_during_training = evaluate_during_training
        self.model_ema = model_ema
        self.callbacks = tuple(callbacks)
        self.update_every = update_every
        self.ema_model: Any = None
        self._model: Any = None
        self._in_training_run = False

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        super().on_training_run_start(trainer, **kwargs)
        self._model = trainer.get_model(keep_torch_compile=False)
        self.ema_model = self.model_ema(self._model, decay=self.decay)
        averaged = self.ema_model.module.__dict__
        # accelerate puts the run's precision around forward, and has no public way to take it off a copy.
        if averaged.pop("_original_forward", None) is not None:
            averaged.pop("forward", None)  # the average does not inherit the run's precision: its evaluation applies it
        if self.evaluate_during_training:
            self.ema_model.to(trainer.device)
        self._in_training_run = True

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if trainer.progress.update % self.update_every == 0:
            self.ema_model.update(self._model)

    def on_eval_epoch_end(self, trainer: TrainerLike, is_intermediate: bool = False, **kwargs: Any) -> None:
        if self._in_training_run and self.evaluate_during_training and not is_intermediate:
            trainer.evaluate_copy(self.ema_model.module, self.callbacks, metric_prefix="ema_model_")

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self.evaluate_during_training:
            super().on_training_run_epoch_end(trainer, **kwargs)
        else:
            self._save(trainer, {})

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Leave the trained model unchanged: the average is never loaded into it."""
        self._in_training_run = False
        self._model = None

    def state_dict(self) -> dict[str, Any]:
        weights = None if self.ema_model is None else whole_state(self.ema_model.module)
        return {**super().state_dict(), "ema_model": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["ema_model"] is not None and self.ema_model is not None:
            load_weights(self.ema_model.module, state["ema_model"])

    def _save(self, trainer: TrainerLike, metadata: dict[str, Any], **options: Any) -> None:
        super()._save(trainer, metadata, model=self.ema_model.module)
