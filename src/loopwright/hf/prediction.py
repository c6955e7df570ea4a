"""Collecting predictions batch by batch: to the CPU once, joined once, padded with -100."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from loopwright.engine.memory import leave_alone
from loopwright.engine.nested import map_tensors, num_rows
from loopwright.engine.processes import gather_objects, sum_over_processes
from loopwright.errors import ConfigError, DataError
from loopwright.hf.loss import IGNORED, found_loss
from loopwright.hf.outputs import EvalLoopOutput, EvalPrediction, plain_metrics
from loopwright.training.run import run_of

if TYPE_CHECKING:
    from loopwright.hf.trainer import Trainer


def as_array(tensor: Tensor) -> Any:
    """Return a tensor as a numpy array; bfloat16, which numpy lacks, as float32."""
    values = tensor.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def joined(batches: list[Any], padding: int = IGNORED) -> Any:
    """Join batches of arrays (or of tuples, lists or mappings of them) along rows; pad if lengths differ."""
    first = batches[0]
    if isinstance(first, np.ndarray):
        return _joined_arrays(batches, padding)
    if isinstance(first, Mapping):
        return {name: joined([batch[name] for batch in batches], padding) for name in first}
    if isinstance(first, (tuple, list)):
        columns = [joined(list(column), padding) for column in zip(*batches, strict=True)]
        return tuple(columns) if isinstance(first, tuple) else columns
    return batches


def _joined_arrays(batches: list[np.ndarray[Any, Any]], padding: int) -> np.ndarray[Any, Any]:
    batches = [np.atleast_1d(batch) for batch in batches]
    shapes = {batch.shape[1:] for batch in batches}
    if len(shapes) == 1:
        return np.concatenate(batches)
    if len({len(shape) for shape in shapes}) > 1:
        raise DataError(
            f"predictions of different numbers of dimensions cannot be joined: rows of shapes {sorted(shapes)}. "
            "Set eval_do_concat_batches=False to get a list of batches."
        )
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    rows = sum(len(batch) for batch in batches)
    result = np.full((rows, *largest), padding, dtype=np.result_type(*batches))
    start = 0
    for batch in batches:
        result[(slice(start, start + len(batch)), *(slice(size) for size in batch.shape[1:]))] = batch
        start += len(batch)
    return result


class EvaluationPass:
    """One pass over a loader: calls `prediction_step`, collects the inputs of `compute_metrics`, and calls that.

    Its description is "Evaluation" or "Prediction"; only a prediction may lack labels.
    """

    def __init__(self, trainer: Trainer, description: str, loss_only: bool, ignore_keys: list[str] | None) -> None:
        self._trainer = trainer
        self._is_prediction = description == "Prediction"
        self._loss_only = loss_only
        self._ignore_keys = ignore_keys
        self._has_loss = False
        self._num_samples = 0
        self._padding = IGNORED if trainer.prediction_padding is None else trainer.prediction_padding
        self._collected: tuple[list[Any], ...] = ([], [], [], [])  # batches of predictions, labels, inputs, losses
        self._by_batch = trainer.args.batch_eval_metrics and trainer.compute_metrics is not None
        self._last_batch: EvalPrediction | None = None
        self._gathers_objects = trainer.args.eval_use_gather_object
        self._num_reported = 0

    def run(self, dataloader: Any, prefix: str) -> EvalLoopOutput:
        """Run over the loader, and return predictions, labels, metrics and the number of samples."""
        trainer = self._trainer
        trainer.callback_handler.eval_dataloader = dataloader
        loss = trainer.core.run_evaluation(dataloader, self._step)
        predictions, labels = self._result(0), self._result(1)
        metrics: dict[str, Any] = {f"{prefix}_loss": loss} if self._has_loss else {}
        for name, value in plain_metrics(self._metrics(predictions, labels)).items():
            if name.startswith(f"{prefix}_"):
                metrics.setdefault(name, value)
            else:
                metrics[f"{prefix}_{name}"] = value
        num_samples = int(sum_over_processes([self._num_samples], trainer.core.device)[0])
        return EvalLoopOutput(predictions, labels, metrics, num_samples)

    def _step(self, inputs: Any) -> tuple[Tensor, Any]:
        trainer, core = self._trainer, self._trainer.core
        self._compute_by_batch(is_last=False)  # of the batch before: it was not the last, and ends here
        rows = num_rows(inputs) if core.current_rows is None else core.current_rows
        count = trainer.item_counter.count(inputs)
        extra = self._main_input(inputs) if "inputs" in trainer.args.include_for_metrics else None
        predicted: tuple[Any, Any, Any] = trainer.prediction_step(
            core.model, inputs, self._loss_only, ignore_keys=self._ignore_keys
        )
        loss, logits, labels = predicted
        if isinstance(loss, (int, float)):
            loss = torch.tensor(float(loss), device=core.device)
        self._check(inputs, logits, labels)
        gathered = self._gathered(loss, logits, labels, extra, rows)
        arrays = map_tensors(gathered, as_array) if self._is_prediction or not self._comes_by_batch(gathered) else None
        mean = torch.zeros((), device=core.device) if loss is None else loss.detach().mean()
        # Until here an out-of-memory error retries the batch in parts. From here on the batch counts.
        self._num_samples += rows
        self._has_loss |= loss is not None
        if self._comes_by_batch(gathered):
            self._last_batch = EvalPrediction(*gathered)
        for batches, value in zip(self._collected, arrays or (), strict=False):
            if value is not None:
                batches.append(value)
        if run_of(core).eval_batch >= self._num_reported:  # once per batch, even if it is run in parts
            self._num_reported = run_of(core).eval_batch + 1
            trainer.call_event("on_prediction_step")
        return mean, 0 if loss is None else rows if count is None else count

    def _result(self, index: int) -> Any:
        """Return one kind of collected output, joined into arrays or as a list of batches; None if there is none."""
        batches, joins = self._collected[index], self._trainer.args.eval_do_concat_batches
        if batches and joins and self._gathers_objects and isinstance(batches[0], list):
            return [item for batch in batches for item in batch]
        return joined(batches, IGNORED if index else self._padding) if batches and joins else batches or None

    def _main_input(self, inputs: Any) -> Any:
        name = self._trainer.main_input_name
        if name not in inputs:
            raise ConfigError(
                f"include_for_metrics needs the inputs, but a batch has no {name}: it has "
                f"{', '.join(map(str, inputs)) or 'nothing'}. Set main_input_name of the model to one of these."
            )
        return inputs[name]

    def _gathered(self, loss: Any, logits: Any, labels: Any, inputs: Any, rows: int) -> tuple[Any, ...]:
        """Return logits, labels, inputs and losses of a batch from all processes; None for missing ones."""
        trainer = self._trainer
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        logits, labels, inputs = (
            None if value is None else self._from_all(value, padding)
            for value, padding in ((logits, self._padding), (labels, IGNORED), (inputs, IGNORED))
        )
        losses = None
        if loss is not None and "loss" in trainer.args.include_for_metrics:
            losses = trainer.core.gather(loss.detach().mean().repeat(rows))
        return logits, labels, inputs, losses

    def _from_all(self, value: Any, padding: int) -> Any:
        core = self._trainer.core
        if not (self._gathers_objects and isinstance(value, list)):
            return core.gather(value, padding)
        own = [] if core.current_rows == 0 else map_tensors(value, Tensor.cpu)
        return [item for items in gather_objects(own) for item in items]

    def _comes_by_batch(self, gathered: tuple[Any, ...]) -> bool:
        return self._by_batch and gathered[0] is not None and gathered[1] is not None

    def _check(self, inputs: Any, logits: Any, labels: Any) -> None:
        """Raise at the first batch if `compute_metrics` could not be called at the end."""
        trainer = self._trainer
        if trainer.compute_metrics is None or self._loss_only or self._is_prediction:
            return
        if labels is None:
            raise DataError(
                "compute_metrics was given, but the evaluation data has no labels: a batch has "
                f"{', '.join(map(str, inputs)) or 'nothing'}; labels are called "
                f"{', '.join(trainer.label_names) or 'labels'}. Rename the column, or set label_names."
            )
        if logits is None:
            raise ConfigError(
                "compute_metrics was given, but there are no predictions for it: compute_loss must return "
                "(loss, outputs) when it is called with return_outputs=True"
            )

    def _compute_by_batch(self, is_last: bool) -> Any:
        batch, self._last_batch = self._last_batch, None
        if batch is None:
            return None
        compute_metrics = self._trainer.compute_metrics
        assert compute_metrics is not None
        try:
            return compute_metrics(batch, compute_result=is_last)
        except (RuntimeError, MemoryError) as error:
            leave_alone(error)
            raise

    def _metrics(self, predictions: Any, labels: Any) -> dict[str, Any]:
        compute_metrics = self._trainer.compute_metrics
        has_both = predictions is not None and labels is not None
        has_batches = self._last_batch is not None if self._by_batch else has_both
        if compute_metrics is None or self._loss_only or not has_batches:
            return {}
        metrics: Any
        if self._by_batch:
            metrics = self._compute_by_batch(is_last=True)
        else:
            metrics = compute_metrics(EvalPrediction(predictions, labels, self._result(2), self._result(3)))
        if not isinstance(metrics, Mapping):
            raise ConfigError(
                f"compute_metrics must return a dict of metrics by name, it returned a {type(metrics).__name__}: "
                'write return {"accuracy": ...}'
            )
        return dict(metrics)


def model_predictions(outputs: Any, ignored: list[str], has_loss: bool) -> Any:
    """Return the predictions among a model's outputs: one tensor, or a tuple of all that are not ignored."""
    if isinstance(outputs, Mapping):
        found = tuple(value for name, value in outputs.items() if name not in ignored)
    elif isinstance(outputs, (tuple, list)):
        # The model's own loss comes first.
        found = tuple(outputs[1:] if has_loss and found_loss(outputs) is not None else outputs)
    else:
        return map_tensors(outputs, Tensor.detach)
    found = map_tensors(found, Tensor.detach)
    return found[0] if len(found) == 1 else found
