"""Events, the base of all callbacks, and the handler that calls them.

The events of a run, in order (an event follows the hook of the same name):

    on_init_end                                  the trainer was made
    on_training_run_start
      on_train_epoch_start
        on_train_step_start                      before a micro-batch's forward pass
        on_train_step_end                        after its loss, before its backward pass
        on_before_optimizer_step                 gradients are complete and clipped
        on_optimizer_step_end                    weights are new, the learning rate is not yet
        on_update_end                            the update is counted; ask for things here
        on_log                                   every log_every updates and at the end of an epoch
        on_checkpoint_saved                      a training state was written
      on_train_epoch_end
      on_eval_epoch_start
        on_eval_step_start
        on_eval_step_end
      on_eval_epoch_end
      on_training_run_epoch_end
    on_stop_training_error                       only when the run is stopped
    on_training_run_end
    on_evaluation_run_start, on_evaluation_run_end   around `trainer.evaluate`
"""

from __future__ import annotations

import difflib
import warnings
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any

from loopwright.errors import CallbackMethodNotImplementedError, ConfigError, ConfigTypeError, StopTrainingError
from loopwright.protocols import TrainerLike

__all__ = [
    "EVENTS",
    "CallbackHandler",
    "CallbackMethodNotImplementedError",
    "StopTrainingError",
    "TrainerCallback",
]


class TrainerCallback(ABC):
    """Base of all callbacks: override the events you need.

    A callback asks (`trainer.request_log()`, `request_evaluation()`, `request_save(...)`,
    `request_stop(...)`) and the loop acts at the next update boundary. Raising StopTrainingError ends
    the run at once. Callbacks are called in the order of the trainer's list.

    Attributes:
        custom_events: names of events of your own, called by `trainer.callback_handler.call_event`;
            naming them here tells them apart from a misspelt event.
        asks_alike: of a class with an event between an update's backward pass and its end: what it asks for there, if
            anything, it asks for on every process. Then several processes need not wait for each other to agree.
        name_in_checkpoints: of its state; None takes the name of the class.
    """

    name_in_checkpoints: str | None = None

    custom_events: tuple[str, ...] = ()
    asks_alike: bool = False

    def on_init_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run at the end of the trainer's constructor (what a subclass sets afterwards is not there yet)."""

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run once before the first epoch; model, optimizer, loaders and run_config are ready."""

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run at the start of a training epoch, also of one that is resumed in its middle."""

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run before the forward pass of every micro-batch."""

    def on_train_step_end(
        self, trainer: TrainerLike, batch: Any = None, batch_output: Any = None, **kwargs: Any
    ) -> None:
        """Run after the forward pass of every micro-batch, before its backward pass.

        Args:
            trainer: the trainer.
            batch: the micro-batch on the device.
            batch_output: what `calculate_train_batch_loss` returned; its loss is unscaled and on the device.
            kwargs: `step`, the index of the micro-batch within the epoch.
        """

    def on_before_optimizer_step(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run when an update's gradients are complete and clipped, before the optimizer uses them."""

    def on_optimizer_step_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run after the optimizer step; gradients are still there and the scheduler has not stepped."""

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run when an update is over and counted in `trainer.progress`."""

    def on_log(self, trainer: TrainerLike, logs: Any = None, **kwargs: Any) -> None:
        """Run at every log: every `log_every` updates, at the end of a training epoch, and on request.

        Args:
            trainer: the trainer.
            logs: update, epoch, loss (mean since the last log), lr where the optimizer has one, and gradient_norm where
                it is clipped.
            kwargs: `first_nonfinite_update`, the first update of the epoch whose loss was not finite, or None; and
                `nonfinite_samples`, the ids of its samples where they are known.
        """

    def on_checkpoint_saved(self, trainer: TrainerLike, path: Any = None, **kwargs: Any) -> None:
        """Run after a training state was written to `path`."""

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run at the end of a training epoch; `train_loss_epoch` is in the history."""

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run at the start of an evaluation epoch; `is_intermediate` says whether it is inside a training epoch."""

    def on_eval_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run before every evaluation batch."""

    def on_eval_step_end(
        self, trainer: TrainerLike, batch: Any = None, batch_output: Any = None, **kwargs: Any
    ) -> None:
        """Run after every evaluation batch, with what `calculate_eval_batch_loss` returned.

        Args:
            trainer: the trainer.
            batch: on the device; a part of it where memory had run out.
            batch_output: what the hook returned.
            kwargs: `step`, the index of the batch within the evaluation.
        """

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run at the end of an evaluation epoch; its loss is in the history.

        Args:
            trainer: the trainer.
            kwargs: `is_intermediate`, and `has_nonfinite_loss`: whether any of its losses was nan or infinite.
        """

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run when an epoch is over, evaluation included.

        Args:
            trainer: the trainer.
            kwargs: `has_evaluated`, False if `evaluate_every` left this epoch out.
        """

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run once at the end of a training run, also of one that was stopped."""

    def on_evaluation_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run at the start of `trainer.evaluate`."""

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run at the end of `trainer.evaluate`."""

    def on_stop_training_error(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run when a run is stopped by a StopTrainingError, before the run-end events; `error` is that error."""

    def batch_limit(self, trainer: TrainerLike, training: bool, is_intermediate: bool = False) -> int | None:
        """Return how many micro-batches per epoch this process may run, or None for all.

        Asked before the loaders' lengths are used, and before every evaluation; the smallest answer counts.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know: numbers, strings, tensors, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; called after `on_training_run_start` of a resumed run."""

    def release(self) -> None:
        """Give back what is held beside the run, such as open files; called when a run is over, however it ended.

        A run that fails has no `on_training_run_end`. Also called after `evaluate` and `predict`, and maybe twice.
        """


EVENTS: tuple[str, ...] = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


def require_counts(**numbers: Any) -> None:
    """Refuse a number of a callback that is no whole number of at least 1; None stands for not at all.

    Raises:
        ConfigError: it names the number and what was given.
    """
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
            raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")


def has_new_value(metric_name: str, event: Mapping[str, Any]) -> bool:
    """Whether a metric can be new at this `on_training_run_epoch_end`, given the event's keywords.

    Metrics of training (their names contain "train") are new in every epoch, all others in those that were evaluated.
    """
    return "train" in metric_name or bool(event.get("has_evaluated", True))


def require_evaluation(callback: Any, metric_name: str, trainer: TrainerLike) -> None:
    """Refuse to watch the loss of an evaluation in a run that has none; called when a run starts.

    Raises:
        ConfigError: it names the callback, and what to watch or to pass.
    """
    if metric_name == "eval_loss_epoch" and trainer.eval_loader is None:
        name = type(callback).__name__
        raise ConfigError(
            f"{name} watches eval_loss_epoch, and the run has no evaluation. Pass an eval_dataset to train, or "
            f'{name}(..., watch_metric="train_loss_epoch").'
        )


class CallbackHandler:
    """Holds the callbacks of a trainer and calls their events, in order.

    Args:
        callbacks: instances, or classes to be made without arguments.
        limited_by: a handler whose callbacks limit epochs here too, although they get no events.
    """

    def __init__(self, callbacks: Iterable[Any], limited_by: CallbackHandler | None = None) -> None:
        self.callbacks: list[Any] = []
        self._limited_by = limited_by
        self._listeners: dict[str, list[Callable[..., Any]]] = {}
        self.add_callbacks(callbacks)

    def add_callbacks(self, callbacks: Iterable[Any]) -> None:
        """Add several callbacks, in order.

        Raises:
            ConfigTypeError: a callback was given in place of a list of them.
        """
        if isinstance(callbacks, TrainerCallback) or not isinstance(callbacks, Iterable):
            name = getattr(callbacks, "__name__", type(callbacks).__name__)
            raise ConfigTypeError(f"callbacks must be a list of callbacks, got {name}. Pass [{name}(...)].")
        for callback in callbacks:
            self.add_callback(callback)

    def add_callback(self, callback: Any) -> None:
        """Add a callback; a class is instantiated without arguments. Two of one class are fine."""
        instance = callback() if isinstance(callback, type) else callback
        _warn_of_unknown_events(instance)
        self.callbacks.append(instance)
        self.refresh()

    def clear_callbacks(self) -> None:
        """Remove all callbacks."""
        self.callbacks = []
        self.refresh()

    def refresh(self) -> None:
        """Look the callbacks' methods up again at their next event (done at every run's start)."""
        self._listeners = {}

    def __iter__(self) -> Iterator[Any]:
        return iter(self.callbacks)

    @property
    def callback_list(self) -> list[str]:
        """The class names of the callbacks, in order."""
        return [type(callback).__name__ for callback in self.callbacks]

    def call_event(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the method of this name on every callback that has one, in order; any name and arguments."""
        listeners = self._listeners.get(event)
        if listeners is None:
            listeners = self._listeners[event] = self._find_listeners(event)
        for listener in listeners:
            try:
                listener(*args, **kwargs)
            except CallbackMethodNotImplementedError:
                continue

    def release(self) -> None:
        """Let every callback give back what it holds."""
        for callback in self.callbacks:
            if isinstance(callback, TrainerCallback):
                callback.release()

    def batch_limit(self, trainer: TrainerLike, training: bool, is_intermediate: bool = False) -> int | None:
        """Return the smallest limit that any callback sets on an epoch's micro-batches, or None."""
        callbacks = [callback for callback in self.callbacks if isinstance(callback, TrainerCallback)]
        limiters: list[Any] = [callback for callback in callbacks if callable(callback.batch_limit)]
        if self._limited_by is not None:
            limiters.append(self._limited_by)
        limits = [limiter.batch_limit(trainer, training, is_intermediate) for limiter in limiters]
        return min((limit for limit in limits if limit is not None), default=None)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the class name and state of every callback, in order."""
        return [
            {"class": _state_name(callback), "state": callback.state_dict()}
            for callback in self.callbacks
            if isinstance(callback, TrainerCallback)
        ]

    def state_names(self) -> list[str]:
        """Return the names under which checkpoints hold the callbacks' states, in order."""
        return [_state_name(callback) for callback in self.callbacks]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Give each callback the state saved by its counterpart: the n-th of a class gets the n-th state of it."""
        remaining = list(states)
        for callback in self.callbacks:
            for index, saved in enumerate(remaining):
                if saved["class"] == _state_name(callback):
                    callback.load_state_dict(saved["state"])
                    del remaining[index]
                    break

    def _find_listeners(self, event: str) -> list[Callable[..., Any]]:
        methods = (getattr(callback, event, None) for callback in self.callbacks)
        # The base's empty methods are left out: they are the most frequent calls of a run. A method may also be
        # a plain function (static, or set on the instance), which has no __func__.
        nothing = getattr(TrainerCallback, event, None)
        return [
            method
            for method in methods
            if method is not None and (nothing is None or getattr(method, "__func__", None) is not nothing)
        ]


def _state_name(callback: Any) -> str:
    return str(getattr(callback, "name_in_checkpoints", None) or type(callback).__name__)


def _warn_of_unknown_events(callback: Any) -> None:
    if not isinstance(callback, TrainerCallback):
        return
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in EVENTS and name not in callback.custom_events:
            nearest = difflib.get_close_matches(name, EVENTS, n=1)
            hint = f" Did you mean {nearest[0]}?" if nearest else ""
            warnings.warn(
                f"{type(callback).__name__}.{name} is not an event of the training loop, so only your own "
                f"call_event({name!r}, ...) will call it.{hint} Name it in custom_events to say that it is meant.",
                stacklevel=4,
            )
