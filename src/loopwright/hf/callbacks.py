"""Callbacks in HF's shape: sixteen events `(args, state, control, **kwargs)`, and the built-in callbacks.

Callbacks written against `transformers.TrainerCallback` work too: events are looked up by name.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

from tqdm.auto import tqdm

from loopwright.engine.memory import leave_alone
from loopwright.errors import ConfigError
from loopwright.hf.state import ExportableState, TrainerControl, TrainerState, checked_control

_logger = logging.getLogger("loopwright.hf")


class TrainerCallback:
    """Base of callbacks: override the events you need.

    Every event is called with the arguments, the state and the control of the trainer, and by keyword `model`,
    `processing_class` (also as `tokenizer`), `optimizer`, `lr_scheduler`, `train_dataloader` and `eval_dataloader`.
    It may set flags of the control, and return it or nothing.
    """

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Run at the end of the trainer's constructor."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Run before the first epoch, once everything is prepared and a resumed state is restored."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Run at the end of the run, even if it was stopped; the best model is already loaded."""

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Run at the start of an epoch, also when it is resumed in the middle."""

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Run at the end of an epoch; requests made here are served next."""

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Run before the first forward pass of an update."""

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Run after every micro-batch of an update but its last."""

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Run when an update's gradients are complete and clipped."""

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Run after the optimizer's step, before the gradients are cleared."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Run when an update is complete and counted; requests made here are served next."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Run after an evaluation, with its `metrics`."""

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Run after a prediction, with its `metrics`."""

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Run after a checkpoint is written; the callback may add files to its folder."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Run when something is logged, with `logs`."""

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Run after every batch of an evaluation or prediction."""

    def on_push_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Run before an upload to the Hub."""


EVENTS: tuple[str, ...] = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))

# The flags that each event resets before the callbacks run.
_RESETS = {
    "on_train_begin": ("should_training_stop",),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",),
    "on_log": ("should_log",),
}
_PASSED = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")


class CallbackHandler:
    """Calls the events of all callbacks, in list order.

    Each event is a method as well: `handler.on_log(args, state, control, logs)` returns the control. The attributes
    `model`, `processing_class`, `optimizer`, `lr_scheduler`, `train_dataloader` and `eval_dataloader` are passed to
    callbacks.
    """

    def __init__(
        self,
        callbacks: Iterable[Any],
        model: Any = None,
        processing_class: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
    ) -> None:
        self.callbacks: list[Any] = []
        self.stopped_by: Any = None  # the callback whose event has set should_training_stop
        for callback in callbacks:
            self.add_callback(callback)
        self.model, self.processing_class = model, processing_class
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        if not any(type(callback).__name__ == "DefaultFlowCallback" for callback in self.callbacks):
            _logger.warning("there is no DefaultFlowCallback: nothing requests logs, evaluations and checkpoints")

    @property
    def callback_list(self) -> str:
        """The class names of the callbacks, one per line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def add_callback(self, callback: Any) -> None:
        """Add a callback; a class is instantiated without arguments."""
        instance = callback() if isinstance(callback, type) else callback
        if not any(hasattr(instance, event) for event in EVENTS):
            raise ConfigError(f"{type(instance).__name__} is not a callback: it has none of {', '.join(EVENTS)}")
        if any(type(each) is type(instance) for each in self.callbacks):
            _logger.warning("there already is a callback of class %s: each runs its events", type(instance).__name__)
        self.callbacks.append(instance)

    def pop_callback(self, callback: Any) -> Any:
        """Remove the first callback of this class, or this instance, and return it; None if there is none.

        A class of transformers also matches our class of the same name.
        """
        is_class = isinstance(callback, type)
        is_theirs = is_class and callback.__module__.partition(".")[0] == "transformers"
        for found in self.callbacks:
            is_namesake = is_theirs and type(found).__name__ == callback.__name__
            if is_namesake or (isinstance(found, callback) if is_class else found == callback):
                self.callbacks.remove(found)
                return found
        return None

    def remove_callback(self, callback: Any) -> None:
        """Remove the first callback of this class, or this instance."""
        self.pop_callback(callback)

    def __getattr__(self, event: str) -> Callable[..., Any]:
        if event not in EVENTS:
            raise AttributeError(f"{type(self).__name__} has no {event}")
        # on_evaluate, on_predict and on_log also take their values by position.
        name = "logs" if event == "on_log" else "metrics"

        def call(args: Any, state: Any, control: Any, *values: Any, **kwargs: Any) -> Any:
            for flag in _RESETS.get(event, ()):
                setattr(control, flag, False)
            return self.call_event(event, args, state, control, **dict(zip([name], values, strict=False)), **kwargs)

        return call

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Call an event on every callback that has it, and return the control; the event's own method resets flags."""
        nothing = getattr(TrainerCallback, event, None)
        for callback in self.callbacks:
            self.stopped_by = self.stopped_by if control.should_training_stop else None
            method = getattr(callback, event, None)
            if method is None or getattr(method, "__func__", None) is nothing:
                continue
            passed = {name: getattr(self, name) for name in _PASSED}
            try:
                result = method(args, state, control, **passed, tokenizer=self.processing_class, **kwargs)
            except (RuntimeError, MemoryError) as error:
                leave_alone(error)
                raise
            if result is not None:
                control = checked_control(result, event, callback)
            if control.should_training_stop:
                self.stopped_by = self.stopped_by or callback
        return control


class DefaultFlowCallback(TrainerCallback):
    """Requests logs, evaluations and checkpoints as the arguments specify, and ends the run; always the first."""

    asks_alike = True

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        step = state.global_step
        is_last = step >= state.max_steps

        def is_due(kind: str, is_forced: bool) -> bool:
            interval = getattr(state, f"{kind}_steps")
            is_interval = interval > 0 and step % interval == 0
            return getattr(args, f"{kind}_strategy") == "steps" and (is_forced or is_interval)

        is_first = step == 1 and args.logging_first_step
        control.should_log = control.should_log or is_first or is_due("logging", False)
        control.should_evaluate = control.should_evaluate or (args.eval_delay <= step and is_due("eval", is_last))
        control.should_save = control.should_save or is_due("save", is_last)
        control.should_training_stop = control.should_training_stop or is_last
        return control

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        is_evaluated = args.eval_strategy == "epoch" and args.eval_delay <= (state.epoch or 0)
        control.should_log = control.should_log or args.logging_strategy == "epoch"
        control.should_evaluate = control.should_evaluate or is_evaluated
        control.should_save = control.should_save or args.save_strategy == "epoch"
        return control


class ProgressCallback(TrainerCallback):
    """A tqdm bar over all updates, and one over each evaluation; logs with strings up to `max_str_len` above it."""

    asks_alike = True

    def __init__(self, max_str_len: int = 100) -> None:
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self._predicted: Any = None
        self.max_str_len = max_str_len

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close()  # left open by a run that raised
        if state.is_world_process_zero:
            self.training_bar = tqdm(total=state.max_steps, initial=state.global_step, dynamic_ncols=True)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.training_bar.n)

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        if self._predicted is not eval_dataloader:
            self._close_prediction_bar()  # left open by an evaluation that raised
            self._predicted = eval_dataloader
        if self.prediction_bar is None:
            try:
                total = math.ceil(len(eval_dataloader) / args.world_size)  # of this process
            except TypeError:
                total = None
            self.prediction_bar = tqdm(total=total, leave=self.training_bar is None, dynamic_ncols=True)
        self.prediction_bar.update(1)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close_prediction_bar()

    on_predict = on_evaluate

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.write(str(_readable(logs or {}, self.max_str_len)))

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close()

    def _close(self) -> None:
        self._close_prediction_bar()
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    def _close_prediction_bar(self) -> None:
        self._predicted = None
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None


class PrinterCallback(TrainerCallback):
    """Prints the logs; used instead of the bar with `disable_tqdm=True`."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if state.is_local_process_zero:
            print(_readable(logs or {}))  # noqa: T201 - its purpose


def _readable(logs: dict[str, Any], longest: int | None = None) -> dict[str, Any]:
    shown = {}
    for name, value in logs.items():
        if name == "total_flos":  # for trackers
            continue
        if isinstance(value, float):
            shown[name] = f"{value:.4g}"
        else:
            is_long = longest is not None and isinstance(value, str) and len(value) > longest
            shown[name] = f"{value[:longest]}..." if is_long else value
    return shown


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Ends the run when `metric_for_best_model` has not improved for some evaluations.

    Args:
        early_stopping_patience: evaluations without improvement before the run ends.
        early_stopping_threshold: how much the metric must change to count as improved.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.metric_for_best_model is None:
            raise ConfigError("EarlyStoppingCallback needs metric_for_best_model: the metric that has to improve")
        if args.eval_strategy == "no":
            raise ConfigError('EarlyStoppingCallback needs evaluations: set eval_strategy to "steps" or "epoch"')
        if not args.load_best_model_at_end:
            _logger.warning(
                "EarlyStoppingCallback without load_best_model_at_end=True: the run ends with the weights of its last "
                "update, not with the best ones"
            )

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        name = metric_key(args.metric_for_best_model)
        value = (metrics or {}).get(name)
        if value is None:
            _logger.warning("EarlyStoppingCallback: this evaluation has no %s, so it does not count", name)
            return
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def check_metric_value(self, args: Any, state: TrainerState, control: TrainerControl, metric_value: Any) -> None:
        """Count an evaluation without improvement, or reset the count; called by `on_evaluate`."""
        best = state.best_metric
        change = 0 if best is None else (metric_value - best if args.greater_is_better else best - metric_value)
        is_better = best is None or (change > 0 and change > (self.early_stopping_threshold or 0.0))
        self.early_stopping_patience_counter = 0 if is_better else self.early_stopping_patience_counter + 1

    def state(self) -> dict[str, Any]:
        names = ("early_stopping_patience", "early_stopping_threshold")
        counter = {"early_stopping_patience_counter": self.early_stopping_patience_counter}
        return {"args": {name: getattr(self, name) for name in names}, "attributes": counter}


def metric_key(name: str) -> str:
    """Return a metric's name as evaluations report it, with the `eval_` prefix."""
    return name if name.startswith("eval_") else f"eval_{name}"


def metric_value(metrics: dict[str, Any], name: str) -> float:
    """Return the metric that selects the best model."""
    found = metrics.get(metric_key(name))
    if found is None:
        raise ConfigError(
            f"metric_for_best_model is {name!r}, but the evaluation has no {metric_key(name)}. It has "
            f"{', '.join(metrics)}: choose one of these, or return {name!r} from compute_metrics."
        )
    return float(found)


def follows_metric(schedule: Any) -> bool:
    """Whether a schedule is stepped with a metric, such as ReduceLROnPlateau and any GreedyLR."""
    step = getattr(schedule, "step", None)
    return callable(step) and "metrics" in inspect.signature(step).parameters
