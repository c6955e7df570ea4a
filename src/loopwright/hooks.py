"""Every method of a trainer that you may override, with what it does by default.

The loop that calls them is in `trainer.py`; `callbacks/base.py` lists the event that follows each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from loopwright.data.batch_parts import cut_rows
from loopwright.data.defaults import create_loader, default_loader_kwargs, loader_kwargs
from loopwright.engine.compilation import CompiledModel
from loopwright.engine.graphs import Capturer, CudaCapturer
from loopwright.engine.memory import MemorySaving, list_savings
from loopwright.optimizers import apply_gradients, drop_gradients
from loopwright.schedulers import replace_trainer_placeholder_values
from loopwright.terminal import paint
from loopwright.training.losses import batch_loss, prediction

# Kinds that are printed in yellow.
_NOTES = ("batch.extra", "data.nonfinite", "loader.ready", "loss.shapes", "metric.direction", "seed", "stop")


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
    _current_run: Any

    # --- data ---------------------------------------------------------------------------------------------------

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: dict[str, Any] | None = None) -> Any:
        """Return the training loader: a DataLoader, or any iterable of batches.

        Called by keyword at the start of `train`. A plain DataLoader over a map-style dataset keeps its
        dataset, sampler, collate function and workers, while its order becomes resumable (docs/concepts/data_order.md).

        Args:
            batch_size: `per_device_batch_size`; a `batch_size` in the kwargs overrides it.
            train_dl_kwargs: the caller's `train_dataloader_kwargs`, which override the defaults.
        """
        defaults = self.get_default_train_dl_kwargs(batch_size)
        self._current_run.train_loader_kwargs = loader_kwargs(self.train_dataset, defaults, train_dl_kwargs)
        return create_loader(self.train_dataset, defaults, train_dl_kwargs, self.collate_fn)

    def create_eval_dataloader(self, batch_size: int, eval_dl_kwargs: dict[str, Any] | None = None) -> Any:
        """Return the evaluation loader; called by keyword when there is an evaluation dataset."""
        defaults = self.get_default_eval_dl_kwargs(batch_size)
        self._current_run.eval_loader_kwargs = loader_kwargs(self.eval_dataset, defaults, eval_dl_kwargs)
        return create_loader(self.eval_dataset, defaults, eval_dl_kwargs, self.collate_fn)

    def get_default_train_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """Return the training loader's default arguments."""
        return default_loader_kwargs(self.train_dataset, batch_size, shuffle=True)

    def get_default_eval_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """Return the evaluation loader's default arguments."""
        return default_loader_kwargs(self.eval_dataset, batch_size, shuffle=False)

    def count_batch_items(self, batch: Any) -> float | None:
        """Return how many items a micro-batch's loss is a mean of, or None if they are its samples.

        Called on the host before the batch is copied to the device. Override it where the loss is per token: `return
        (batch["labels"] != -100).sum().item()`. Accumulation, short tails and processes then never change the mean.
        """
        return None

    def cut_batch(self, batch: Any, rows: int, start: int, stop: int) -> Any:
        """Return the rows of a batch from `start` to before `stop`; called where a batch does not fit into memory.

        Override it for batches whose tensors are not cut along their first dimension, such as graphs. A DataError says
        that the rows cannot be told apart.
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
        return batch_loss(self.model, self.loss_func, batch, self._current_run)

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        """Return an evaluation batch's `loss`, `model_outputs` and `batch_size`; without gradients."""
        with torch.no_grad():
            return batch_loss(self.model, self.loss_func, batch, self._current_run)

    def calculate_prediction(self, batch: Any) -> Any:
        """Return the outputs for a batch of `predict`: a tensor, or a tuple or dict of tensors, one row per sample."""
        return prediction(self.model, batch)

    def backward_step(self, loss: torch.Tensor) -> None:
        """Run backward on a micro-batch's loss, already weighted for its update."""
        self._current_run.engine.backward(loss)

    # --- the update ---------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        """Apply an update's gradients."""
        apply_gradients(self.optimizer)

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

    def create_capturer(self) -> Capturer:
        """Return the object that records updates as graphs; called once for a run whose updates may be graphs.

        By default only runs on a CUDA device have graphs; overriding it enables them elsewhere.
        """
        return CudaCapturer(self._current_run.engine.device)

    def create_compiled_model(self, model: torch.nn.Module) -> CompiledModel:
        """Return the compiled parts of the model, with options of torch.compile; called for step_mode="compile"."""
        return CompiledModel(model)

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
        """Run after the last epoch: removes the distributed wrapper from the model."""
        self.model = self.get_model()

    def evaluation_run_start(self) -> None:
        """Run at the start of `evaluate`."""

    def evaluation_run_end(self) -> None:
        """Run at the end of `evaluate`: removes the distributed wrapper from the model."""
        self.model = self.get_model()

    def get_model(self, keep_torch_compile: bool = True) -> Any:
        """Return the model without its distributed wrapper, and if asked without torch.compile's."""
        return self._current_run.engine.unwrap(self.model, keep_torch_compile=keep_torch_compile)

    def checkpoint_files(self) -> Mapping[str, bytes | Path]:
        """Return further files of a checkpoint by name, such as a config.json; called for every checkpoint.

        A value is the content, or the path of a file to copy. They are stored next to the weights, listed and hashed in
        the manifest, and not read when a run is resumed.
        """
        return {}

    # --- messages -----------------------------------------------------------------------------------------------

    def notify(self, kind: str, text: str, **fields: Any) -> None:
        """Report something about the run to a person: print the text once per node.

        Override it to send messages elsewhere, or to leave some out.

        Args:
            kind: a stable name, such as "resume.guarantee", "checkpoint.saved", "memory.split" or "stop".
            text: the message.
            fields: the values in the message.
        """
        self.print(paint(text, "yellow", sys.stdout) if kind in _NOTES else text)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per node."""
        if self._current_run.accelerator.is_local_main_process:
            with tqdm.external_write_mode():  # above a progress bar
                print(*args, **kwargs)  # noqa: T201 - what this method is for

    # --- advice in errors ---------------------------------------------------------------------------------------

    def remedy_of_policy(self) -> str:
        """Return the setting that splits updates; for the error of a run that is out of memory."""
        return 'oom="split"'

    def remedies_of_step(self) -> str:
        """Return changes that need less memory in the optimizer's step; for its out-of-memory error."""
        return "an optimizer with less state (SGD, Adafactor), fewer trained weights, or a smaller model"

    def remedies_of_batch(self, rows: int, length: int | None, savings: list[MemorySaving]) -> str:
        """Return changes that need less memory in forward and backward, with what each saves; for an error.

        Args:
            rows: of the micro-batch that does not fit.
            length: of its rows, where they are texts.
            savings: as measured on some of its rows; empty if nothing could be measured.
        """
        changes = {
            "half_batch": f"per_device_batch_size={rows // 2} with twice the gradient_accumulation_steps",
            "bf16": 'mixed_precision="bf16"',
            "checkpointing": "model.gradient_checkpointing_enable()",
            "half_length": f"rows of {(length or 0) // 2} tokens",
        }
        return list_savings(changes, savings) or 'a smaller per_device_batch_size, or mixed_precision="bf16"'

    def remedies_of_evaluation(self) -> str:
        """Return changes that need less memory in an evaluation; for its out-of-memory error."""
        return 'a smaller batch_size in eval_dataloader_kwargs, shorter samples, or mixed_precision="bf16"'

    def remedies_of_unused_parameters(self) -> tuple[str, str]:
        """Return how to train parameters that a loss may not depend on, and how to freeze them; for an error."""
        handler = "DistributedDataParallelKwargs(find_unused_parameters=True)"
        shared = f"override _create_accelerator to return Accelerator(kwargs_handlers=[{handler}])"
        return shared, "parameter.requires_grad_(False)"
