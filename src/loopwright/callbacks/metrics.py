"""The metrics of `Trainer(metrics=...)`, and in which direction a metric improves."""

# ruff: noqa: D102 - methods that override events

from __future__ import annotations

import copy
import operator
import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from loopwright.callbacks.base import TrainerCallback
from loopwright.engine.processes import gather_objects, is_distributed
from loopwright.errors import BatchLossError, ConfigError, nearest
from loopwright.progress import TRAINED
from loopwright.protocols import TrainerLike

_PHASES = re.compile(r"^(ema_model_)?(train|intermediate_eval|evaluation|eval)_")
_LOWER = re.compile(r"(^|_)(loss|error|mse|mae|rmse|mape|perplexity|ece|wer|cer|nll|brier)(_|$)")
_GREATER = re.compile(
    r"(^|_)(accuracy|acc|f1|precision|recall|auroc|auc|roc|r2|iou|dice|jaccard|bleu|rouge\w*|chrf|map|mrr|ndcg|psnr|ssim"
    r"|specificity|sensitivity|kappa|mcc|matthews|correlation|pearsonr?|spearmanr?)(_|$)"
)


def direction_of(name: str, trainer: TrainerLike | None = None) -> bool | None:
    """Return whether a greater value of a metric is better; None if that is not known."""
    for callback in getattr(trainer, "callback_handler", None) or ():
        if isinstance(callback, MetricsCallback):
            for metric in callback.train:
                if metric.name == _PHASES.sub("", name) and metric.greater_is_better is not None:
                    return metric.greater_is_better
    return False if _LOWER.search(name.lower()) else True if _GREATER.search(name.lower()) else None


def set_direction(callback: Any, trainer: TrainerLike | None = None) -> None:
    """Set the direction of a callback's watched metric, unless it was given: the known one, or lower is better.

    Called when the callback is created, and with the trainer when a run starts; then a note names the default.
    """
    if trainer is None:
        callback.has_direction = callback.greater_is_better is not None
    if not callback.has_direction:
        known = direction_of(callback.watch_metric, trainer)
        callback.greater_is_better = bool(known)
        if known is None and trainer is not None:
            text = (
                f"{callback.watch_metric}: lower is better (default of {type(callback).__name__}); pass "
                "greater_is_better=True if higher is, or greater_is_better=False to leave out this note"
            )
            trainer.notify("metric.direction", text, metric=callback.watch_metric)
    callback.operator = operator.gt if callback.greater_is_better else operator.lt


def direction_text(callback: Any) -> str:
    """Return the direction in which a callback's watched metric improves, as text."""
    return "higher is better" if callback.greater_is_better else "lower is better"


def check_watched(callback: Any, trainer: TrainerLike) -> None:
    """Raise a ConfigError at the start of a run where it is known that a callback's metric will not be recorded."""
    name, kind = callback.watch_metric, type(callback).__name__
    metrics = [each for each in trainer.callback_handler if isinstance(each, MetricsCallback)]
    given = [metric.name for each in metrics for metric in each.train if metric.name is not None]
    if trainer.eval_loader is None and name in ("eval_loss_epoch", *given, *(f"eval_{each}" for each in given)):
        raise ConfigError(
            f"{kind} watches {name}, and the run has no evaluation. Pass an eval_dataset to train, or "
            f'{kind}(..., watch_metric="train_{_PHASES.sub("", name)}").'
        )
    known = [f"{phase}{each}" for each in given if len(each) > 5 for phase in ("", "train_", "eval_")]
    # A longer or a short name may be one that a hook records.
    near = nearest(name, [each for each in known if not name.startswith(each)])
    if near is not None and name not in known:
        raise ConfigError(f"{kind} watches {name!r}, which is not in metrics", given=name, choices=known, nearest=near)


def watched_value(callback: Any, trainer: TrainerLike) -> float:
    """Return the latest value of a callback's watched metric; "accuracy" also finds "eval_accuracy"."""
    name, history = callback.watch_metric, trainer.run_history
    names = history.get_metric_names()
    found = next((each for each in (name, f"eval_{name}") if each in names), name)
    try:
        return float(history.get_latest_metric(found))
    except ValueError as error:
        raise ConfigError(str(error).strip("."), given=name, choices=names, nearest=nearest(name, names)) from None


class MetricsCallback(TrainerCallback):
    """Computes metrics of the outputs and targets of training and evaluation, and records them in the history.

    `Trainer(metrics=...)` adds it before all other callbacks. The names are train_NAME, eval_NAME, and
    intermediate_eval_NAME and evaluation_NAME like those of the loss. Sums go over batches and processes, never over
    means; a resumed epoch continues them.

    Args:
        metrics: a name, a function of (outputs, targets), an object of torchmetrics or `loopwright.metrics`, or a list
            or a dict of them.
    """

    graph_safe = True  # it reads the outputs of every replay
    asks_alike = True

    def __init__(self, metrics: Any) -> None:
        from loopwright.metrics.batches import NamedMetric, parse_metrics

        self.train = parse_metrics(metrics)
        shared = [metric.seen for metric in self.train if isinstance(metric, NamedMetric)]
        self.eval = copy.deepcopy(self.train, {id(seen): seen for seen in shared})
        self._read: list[tuple[Any, Any]] = []  # of an update that is not finished
        self._num_parts = 1
        self._prefix = "eval_"
        self._rank, self._num_processes = 0, 1

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._prefix = "eval_"
        self._rank, self._num_processes = dist.get_rank() if is_distributed() else 0, trainer.num_processes
        for metric in self.train:
            metric.reset(trainer.device)

    def on_evaluation_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._prefix = "evaluation_"

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._read = []
        if trainer.progress.batch == 0:
            for metric in self.train:
                metric.reset(trainer.device)

    def on_train_step_end(
        self, trainer: TrainerLike, batch: Any = None, batch_output: Any = None, **kwargs: Any
    ) -> None:
        if trainer.num_parts != self._num_parts:  # memory ran out, and the update is run again
            self._read, self._num_parts = [], trainer.num_parts
        self._read += _read(trainer, self.train, batch, batch_output)

    def on_optimizer_step_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        for metric, rows in self._read:
            metric.add(rows)
        self._read = []

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._read = []  # of an update that was skipped

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        _record(trainer, self.train, "train_")
        for metric in self.train if trainer.progress.stage >= TRAINED else ():  # else it may be continued
            metric.reset(trainer.device)

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        for metric in self.eval:
            metric.reset(trainer.device)

    def on_eval_step_end(
        self, trainer: TrainerLike, batch: Any = None, batch_output: Any = None, **kwargs: Any
    ) -> None:
        for metric, rows in _read(trainer, self.eval, batch, batch_output):
            metric.add(rows)

    def on_eval_epoch_end(self, trainer: TrainerLike, is_intermediate: bool = False, **kwargs: Any) -> None:
        _record(trainer, self.eval, "intermediate_eval_" if is_intermediate else self._prefix)
        for metric in self.eval:
            metric.reset(trainer.device)

    def running(self) -> dict[str, float]:
        """Return the values of the epoch so far on this process, of metrics that keep sums; waits for the device."""
        cheap: list[Any] = [metric for metric in self.train if metric.is_cheap]
        return {name: value for metric in cheap for name, value in metric.running().items()}

    def state_dict(self) -> dict[str, Any]:
        return {"processes": gather_objects({str(metric.name): metric.state() for metric in self.train})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the sums of the epoch: each process its own, or rank 0 all of them."""
        states = state["processes"]
        if len(states) == self._num_processes:
            states = [states[self._rank]]
        for metric in self.train if len(states) == 1 or self._rank == 0 else ():
            if str(metric.name) in states[0]:
                metric.load([each[str(metric.name)] for each in states])
            else:
                warnings.warn(f"the metric {metric.name} is new: it starts where the run is resumed", stacklevel=2)


def _read(trainer: TrainerLike, metrics: list[Any], batch: Any, output: Any) -> list[tuple[Any, Any]]:
    if trainer.current_rows == 0:  # a batch that only keeps this process in step with the others
        return []
    if output.get("model_outputs") is None:
        raise BatchLossError("metrics need the model's outputs: return model_outputs from the batch-loss method")
    if isinstance(batch, Mapping):
        targets = output.get("targets", batch.get("labels"))
    else:
        targets = output.get("targets", batch[1] if isinstance(batch, (list, tuple)) and len(batch) > 1 else None)
    if targets is None:
        raise BatchLossError(
            "metrics need targets: the second entry of a batch, its labels if it is a mapping, or targets in what "
            "the batch-loss method returns"
        )
    return [(metric, metric.read(output["model_outputs"], targets, trainer.loss_func)) for metric in metrics]


def _record(trainer: TrainerLike, metrics: list[Any], prefix: str) -> None:
    for metric in metrics:
        for name, value in metric.compute(gather_objects).items():
            trainer.run_history.update_metric(f"{prefix}{name}", value)
