"""Every method of a trainer that you may override, with what it does by default.

The loop that calls them is in `trainer.py`; `callbacks/base.py` lists the event that follows each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from loopwright.data.cutting import cut_rows
from loopwright.data.defaults import create_loader, default_loader_kwargs, loader_kwargs
from loopwright.losses import batch_loss, prediction
from loopwright.optimizers import drop_gradients
from loopwright.schedulers import replace_trainer_placeholder_values


class TrainerHooks:
    """The overridable part of `Trainer`."""

    model: Any
    loss_func: Any
    optimizer: Any
    scheduler: Any
    create_scheduler_fn: Callable[..., Any] | None
    collate_fn: Callable[..., Any] | None
    train_dataset: Any
    eval_dataset: Any
    _train_dl_kwargs: dict[str, Any] | None
    _eval_dl_kwargs: dict[str, Any] | None
    _engine: Any

    # --- data ---------------------------------------------------------------------------------------------------

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: dict[str, Any] | None = None) -> Any:
        """Return the training loader: a DataLoader, or any iterable of batches.

        Called by keyword at the start of `train`. A plain DataLoader over a map-style dataset keeps its
        dataset, sampler, collate function and workers, while its order becomes resumable (docs/data_order.md).

        Args:
            batch_size: `per_device_batch_size`; a `batch_size` in the kwargs wins over it.
            train_dl_kwargs: the caller's `train_dataloader_kwargs`, which win over the defaults.
        """
        defaults = self.get_default_train_dl_kwargs(batch_size)
        self._train_dl_kwargs = loader_kwargs(self.train_dataset, defaults, train_dl_kwargs)
        return create_loader(self.train_dataset, defaults, train_dl_kwargs, self.collate_fn)

    def create_eval_dataloader(self, batch_size: int, eval_dl_kwargs: dict[str, Any] | None = None) -> Any:
        """Return the evaluation loader; called by keyword when there is an evaluation dataset."""
        defaults = self.get_default_eval_dl_kwargs(batch_size)
        self._eval_dl_kwargs = loader_kwargs(self.eval_dataset, defaults, eval_dl_kwargs)
        return create_loader(self.eval_dataset, defaults, eval_dl_kwargs, self.collate_fn)

    def get_default_train_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """Return the training loader's default arguments."""
        return default_loader_kwargs(self.train_dataset, batch_size, shuffle=True)

    def get_default_eval_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """Return the evaluation loader's default arguments."""
        return default_loader_kwargs(self.eval_dataset, batch_size, shuffle=False)

    def count_batch_items(self, batch: Any) -> float | None:
        """Return how many items a micro-batch's loss is a mean of, or None if they are its samples.

        Called on the host before the batch is copied to the device. Override it where the loss is per token:
        `return (batch["labels"] != -100).sum().item()`. Accumulation, short tails and processes then never
        change the mean.
        """
        return None

    def cut_batch(self, batch: Any, rows: int, start: int, stop: int) -> Any:
        """Return the rows of a batch from one to before another; called where a batch does not fit into memory.

        Override it for batches of which tensors are not cut along their first dimension, such as graphs.

        Args:
            batch: on the host or on the device, of training or of evaluation.
            rows: its samples.
            start: the first row of the part.
            stop: the row after its last.

        Raises:
            DataError: it cannot be told what belongs to which row.
        """
        return cut_rows(batch, rows, start, stop)

    def why_not_cut(self) -> str | None:
        """Return why a batch may not be run in parts, or None if it may; called where one does not fit into memory.

        Override it where a loss compares the samples of a batch with each other: in parts it is another loss.
        """
        return None

    # --- the micro-batch ----------------------------------------------------------------------------------------

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        """Return a micro-batch's `loss` (a scalar with a gradient), `model_outputs` and `batch_size`.

        Called for every micro-batch, on the device. Further keys reach the callbacks; `num_items_in_batch`
        says how many items the loss is a mean of. A mapping goes to the model as keywords.
        """
        return batch_loss(self.model, self.loss_func, batch)

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        """Return an evaluation batch's `loss`, `model_outputs` and `batch_size`; without gradients."""
        with torch.no_grad():
            return batch_loss(self.model, self.loss_func, batch)

    def calculate_prediction(self, batch: Any) -> Any:
        """Return the outputs for a batch of `predict`: a tensor, or a tuple or dict of tensors, one row per sample."""
        return prediction(self.model, batch)

    def backward_step(self, loss: torch.Tensor) -> None:
        """Run backward on a micro-batch's loss, already weighted for its update."""
        self._engine.backward(loss)

    # --- the update ---------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        """Apply an update's gradients."""
        self.optimizer.step()

    def scheduler_step(self) -> None:
        """Step the scheduler; called after every update that was not skipped, if there is a scheduler."""
        # A plateau scheduler needs a metric: the loop steps it after each epoch instead.
        if not isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step()

    def optimizer_zero_grad(self) -> None:
        """Drop the gradients of the finished update."""
        drop_gradients(self.optimizer)

    def create_scheduler(self) -> Any:
        """Return the scheduler: `create_scheduler_fn`, its placeholders filled in, called with the optimizer."""
        return replace_trainer_placeholder_values(self, self.create_scheduler_fn)(self.optimizer)  # type: ignore[arg-type]

    # --- the run ------------------------------------------------------------------------------------------------

    def training_run_start(self) -> None:
        """Run before the first epoch."""

    def train_epoch_start(self) -> None:
        """Run at the start of each training epoch: puts the model into training mode."""
        self.model.train()

    def train_epoch_end(self) -> None:
        """Run at the end of each training epoch, before its loss is in the history."""

    def eval_epoch_start(self) -> None:
        """Run at the start of each evaluation epoch: puts the model into evaluation mode."""
        self.model.eval()

    def eval_epoch_end(self) -> None:
        """Run at the end of each evaluation epoch, before its loss is in the history."""

    def training_run_epoch_end(self) -> None:
        """Run when an epoch is over, evaluation included."""

    def training_run_end(self) -> None:
        """Run after the last epoch: takes the distributed wrapper off the model."""
        self.model = self.get_model()

    def evaluation_run_start(self) -> None:
        """Run at the start of `evaluate`."""

    def evaluation_run_end(self) -> None:
        """Run at the end of `evaluate`: takes the distributed wrapper off the model."""
        self.model = self.get_model()

    def get_model(self, keep_torch_compile: bool = True) -> Any:
        """Return the model without its distributed wrapper.

        Args:
            keep_torch_compile: whether a compiled model stays compiled.
        """
        return self._engine.unwrap(self.model, keep_torch_compile=keep_torch_compile)
