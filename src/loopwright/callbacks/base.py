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

import warnings
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any

from loopwright.errors import CallbackMethodNotImplementedError, ConfigError, ConfigTypeError, nearest
from loopwright.protocols import TrainerLike


class TrainerCallback(ABC):
    """Base of all callbacks: override the events you need.

    A callback makes requests (`trainer.request_log()`, `request_evaluation()`, `request_save(...)`,
    `request_stop(...)`) and the loop acts at the next update boundary. Raising StopTrainingError ends the run at once.
    Callbacks are called in the order of the trainer's list.

    Attributes:
        custom_events: names of your own events, called by `trainer.callback_handler.call_event`; others count as
            misspelt.
        asks_alike: set it if the requests made between a backward pass and the end of the update are the same on every
            process. Then the processes need not wait to agree.
        name_in_checkpoints: the name of its state; None uses the class name.
    """

    name_in_checkpoints: str | None = None

    custom_events: tuple[str, ...] = ()
    asks_alike: bool = False

    def on_init_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run at the end of the trainer's constructor, before a subclass's own attributes exist."""

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run once before the first epoch; model, optimizer, loaders and run_config are ready."""

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run at the start of a training epoch, including one that resumes in the middle."""

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run before the forward pass of every micro-batch."""

    def on_train_step_end(
        self, trainer: TrainerLike, batch: Any = None, batch_output: Any = None, **kwargs: Any
    ) -> None:
        """Run after the forward pass of every micro-batch, before its backward pass.

        Args:
            batch: the micro-batch on the device.
            batch_output: the result of `calculate_train_batch_loss`; its loss is unscaled and on the device.
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
            logs: update, epoch, loss (mean since the last log), lr if the optimizer has one, and gradient_norm if it is
                clipped.
            kwargs: `first_nonfinite_update`, the first update of the epoch whose loss was not finite, or None; and
                `nonfinite_samples`, the ids of its samples where they are known.
        """

    def on_checkpoint_saved(self, trainer: TrainerLike, path: Any = None, **kwargs: Any) -> None:
        """Run after a training state was written to `path`."""

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run at the end of a training epoch; `train_loss_epoch` is in the history."""

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run at the start of an evaluation epoch; `is_intermediate` is set inside a training epoch."""

    def on_eval_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run before every evaluation batch."""

    def on_eval_step_end(
        self, trainer: TrainerLike, batch: Any = None, batch_output: Any = None, **kwargs: Any
    ) -> None:
        """Run after every evaluation batch.

        Args:
            batch: on the device; a part of it after an out-of-memory error.
            batch_output: the result of `calculate_eval_batch_loss`.
            kwargs: `step`, the index of the batch within the evaluation.
        """

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run at the end of an evaluation epoch, with `is_intermediate` and `has_nonfinite_loss`; its loss is in the
        history.
        """

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run after an epoch and its evaluation; `has_evaluated` is False if `evaluate_every` skipped this one."""

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run once at the end of a training run, even if it was stopped."""

    def on_evaluation_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run at the start of `trainer.evaluate`."""

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run at the end of `trainer.evaluate`."""

    def on_stop_training_error(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Run when a StopTrainingError (`error`) stops a run, before the run-end events."""

    def batch_limit(self, trainer: TrainerLike, training: bool, is_intermediate: bool = False) -> int | None:
        """Return the maximum number of micro-batches per epoch on this process, or None for no limit.

        Called before the loaders' lengths are used, and before every evaluation; the smallest limit wins.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: numbers, strings, tensors, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from `state_dict`; called after `on_training_run_start` of a resumed run."""

    def release(self) -> None:
        """Release resources such as open files; called when a run is over, however it ended.

        A failed run has no `on_training_run_end`. Also called after `evaluate` and `predict`; must be idempotent.
        """


EVENTS: tuple[str, ...] = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


def require_counts(**numbers: Any) -> None:
    """Raise a ConfigError unless each number is None or an integer of at least 1."""
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
            raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")


def has_new_value(metric_name: str, event: Mapping[str, Any]) -> bool:
    """Whether a metric can have a new value at this `on_training_run_epoch_end`, given the event's keywords.

    Training metrics (with "train" in the name) are new in every epoch, all others after an evaluation.
    """
    return "train" in metric_name or bool(event.get("has_evaluated", True))


class CallbackHandler:
    """Holds the callbacks of a trainer and calls their events, in order.

    The callbacks of the handler `limited_by` also limit epochs here, without receiving events.
    """

    def __init__(self, callbacks: Iterable[Any], limited_by: CallbackHandler | None = None) -> None:
        self.callbacks: list[Any] = []
        self._limited_by = limited_by
        self._listeners: dict[str, list[tuple[Any, Callable[..., Any]]]] = {}
        self.unheard: set[str] = set()  # events found to have no listener: the loop need not call them
        self.calling: Any = None  # the callback whose method runs, or has raised
        self.add_callbacks(callbacks)

    def add_callbacks(self, callbacks: Iterable[Any]) -> None:
        """Add callbacks in order; raise a ConfigTypeError for a single callback in place of a list."""
        if callbacks is None:
            raise ConfigTypeError("callbacks is None: leave it out for the default ones, or pass () for none")
        if isinstance(callbacks, TrainerCallback) or not isinstance(callbacks, Iterable):
            name = getattr(callbacks, "__name__", type(callbacks).__name__)
            raise ConfigTypeError(f"callbacks must be a list of callbacks, got {name}. Pass [{name}(...)].")
        for callback in [callbacks] if isinstance(callbacks, str) else callbacks:
            self.add_callback(callback)

    def add_callback(self, callback: Any) -> None:
        """Add a callback; a class is instantiated without arguments. Duplicates of a class are allowed."""
        instance = callback() if isinstance(callback, type) else callback
        if not hasattr(instance, EVENTS[0]) and not any(name.startswith("on_") for name in dir(instance)):
            raise ConfigTypeError(
                f"callbacks has {callback!r:.80}, which has no event method such as on_train_epoch_end. Metrics, by "
                "name or as functions, go to Trainer(..., metrics=[...])."
            )
        _warn_of_unknown_events(instance)
        self.callbacks.append(instance)
        self.refresh()

    def clear_callbacks(self) -> None:
        """Remove all callbacks."""
        self.callbacks = []
        self.refresh()

    def refresh(self) -> None:
        """Look up the callbacks' methods again at their next event (done at the start of every run)."""
        self._listeners = {}
        self.unheard = set()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.callbacks)

    @property
    def callback_list(self) -> list[str]:
        """The class names of the callbacks, in order."""
        return [type(callback).__name__ for callback in self.callbacks]

    def call_event(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the method of this name on every callback that has one, in order, with any arguments."""
        listeners = self._listeners.get(event)
        if listeners is None:
            listeners = self._listeners[event] = self._find_listeners(event)
            if not listeners:
                self.unheard.add(event)
        outer = self.calling
        for self.calling, listener in listeners:
            try:
                listener(*args, **kwargs)
            except CallbackMethodNotImplementedError:
                continue
        self.calling = outer

    def release(self) -> None:
        """Release the resources of every callback."""
        self.calling = None
        for callback in self.callbacks:
            if isinstance(callback, TrainerCallback):
                callback.release()

    def batch_limit(self, trainer: TrainerLike, training: bool, is_intermediate: bool = False) -> int | None:
        """Return the smallest limit of any callback on an epoch's micro-batches, or None."""
        callbacks = [callback for callback in self.callbacks if isinstance(callback, TrainerCallback)]
        limiters = [each for each in (*callbacks, self._limited_by) if each is not None and callable(each.batch_limit)]
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
        """Return the callbacks' names in checkpoints, in order."""
        return [_state_name(callback) for callback in self.callbacks]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Load each callback's state by class: the n-th instance gets the n-th saved state."""
        remaining = list(states)
        for callback in self.callbacks:
            for index, saved in enumerate(remaining):
                if saved["class"] == _state_name(callback):
                    callback.load_state_dict(saved["state"])
                    del remaining[index]
                    break

    def _find_listeners(self, event: str) -> list[tuple[Any, Callable[..., Any]]]:
        methods = ((callback, getattr(callback, event, None)) for callback in self.callbacks)
        # The base's empty methods are skipped, as events are frequent. A method may also be a plain function (static,
        # or set on the instance), which has no __func__.
        nothing = getattr(TrainerCallback, event, None)
        return [
            (callback, method)
            for callback, method in methods
            if method is not None and (nothing is None or getattr(method, "__func__", None) is not nothing)
        ]


def _state_name(callback: Any) -> str:
    return str(getattr(callback, "name_in_checkpoints", None) or type(callback).__name__)


def _warn_of_unknown_events(callback: Any) -> None:
    for name in dir(type(callback)) if isinstance(callback, TrainerCallback) else ():
        if name.startswith("on_") and name not in EVENTS and name not in callback.custom_events:
            near = nearest(name, EVENTS)
            hint = f" Did you mean {near}?" if near else ""
            warnings.warn(
                f"{type(callback).__name__}.{name} is not an event of the training loop, so only your own "
                f"call_event({name!r}, ...) will call it.{hint} List it in custom_events if that is intended.",
                stacklevel=4,
            )
