"""Finding a learning rate: a short run whose rate rises from update to update, and then everything put back.

    curve = trainer.find_lr(dataset, per_device_batch_size=32)
    curve.suggestion    # 0.003

The run is one of `train`: the same data order, losses, precision and clipping. Nothing of it stays.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import linear_regression
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from loopwright.callbacks import CallbackHandler, MoveModulesToDeviceCallback, StopTrainingError, TrainerCallback
from loopwright.checkpoint.hidden_state import HiddenState
from loopwright.engine.buffers import put
from loopwright.engine.seeding import preserved_generators
from loopwright.engine.sharding import local, split_like
from loopwright.errors import ConfigError
from loopwright.protocols import TrainerLike
from loopwright.results import LearningRateCurve
from loopwright.settings import check_is_idle, check_parameters
from loopwright.tracking import InMemoryRunHistory
from loopwright.training.hyper_parameters import set_learning_rate

if TYPE_CHECKING:
    from loopwright.trainer import Trainer

SMOOTHING = 0.8  # of the mean that the curve is judged by: it looks back about five updates
_DIVERGED = 4.0  # times the best loss
# What a run of `train` leaves in a trainer for the next one; the rest is put back.
_RENEWED = frozenset({"model", "optimizer"})
_OF_SEARCH = ("trainer", "train_dataset", "start", "end", "num_updates", "on_update")  # not passed on by name


def find_lr(
    trainer: Trainer,
    train_dataset: Any,
    per_device_batch_size: int = 8,
    *,
    start: float = 1e-7,
    end: float = 10.0,
    num_updates: int = 100,
    gradient_accumulation_steps: int = 1,
    gradient_clip_value: float | None = None,
    gradient_clip_norm: float | None = None,
    train_dataloader_kwargs: dict[str, Any] | None = None,
    collate_fn: Callable[..., Any] | None = None,
    seed: int | None = None,
    mixed_precision: str | None = None,
    bad_samples: str = "raise",
    reduction: str = "fast",
    sharding: Any = None,
    oom: str = "stop",
    on_update: Callable[[int], None] | None = None,
) -> LearningRateCurve:
    """Find a learning rate: train a few updates with a rate that rises, put everything back, return the curve.

    Call it before `train`, or after it, never inside. Weights, buffers, modes, the optimizer, the generators, the
    run history and the progress are bit for bit as before, also if it is broken off; gradients are None. The
    trainer's callbacks are left out of it; the hooks of a subclass run as in `train`. The loss of an update is that
    before its step, as everywhere.

    Args:
        trainer: the trainer; its model and optimizer.
        train_dataset: as `train` takes it, and so are the arguments that have the same names there.
        per_device_batch_size: samples of a micro-batch.
        start: the first update's learning rate, for the first parameter group; the others keep their ratio to it.
        end: the last update's learning rate.
        num_updates: how many; it ends earlier once the smoothed loss is four times the best, or not finite.
        gradient_accumulation_steps, gradient_clip_value, gradient_clip_norm: of the run that is to come.
        train_dataloader_kwargs, collate_fn, seed, mixed_precision, bad_samples, reduction, sharding, oom: likewise.
        on_update: called after each update with how many are done.

    Raises:
        ConfigError, DataError: before anything is touched.
    """
    of_run = {name: value for name, value in locals().items() if name not in _OF_SEARCH}
    check_is_idle(trainer._current_run.is_running)
    check_parameters(trainer.model, trainer.optimizer)
    ramp = _Ramp(rising_rates(start, end, num_updates), relative_rates(trainer.optimizer), on_update)
    with preserved_generators(trainer.device), _undone(trainer):
        callbacks = [MoveModulesToDeviceCallback, ramp]
        trainer.callback_handler = CallbackHandler(callbacks, limited_by=trainer.callback_handler)
        trainer.run_history = InMemoryRunHistory()
        vars(trainer)["print"] = vars(trainer)["notify"] = print_nothing
        length: dict[str, Any] = {"num_epochs": num_updates, "max_num_train_steps": num_updates}
        trainer.train(train_dataset, **length, **of_run, step_mode="eager", log_every=1)
    return create_curve(ramp.tried, ramp.losses, ramp.stop_reason)


@contextmanager
def _undone(trainer: Trainer) -> Iterator[None]:
    """Put weights, buffers, modes, the optimizer and the trainer's own attributes back after a block.

    The engine stays the block's: the model and the optimizer are wrapped and released by it.
    """
    attributes, before = dict(vars(trainer)), trainer._current_run
    modules = {name: value for name, value in attributes.items() if isinstance(value, nn.Module)}
    kept = [_kept_module(part) for module in modules.values() for part in module.modules()]
    hidden = HiddenState(**modules)
    hidden.keep()
    optimizer = _KeptOptimizer(trainer.optimizer)
    try:
        yield
    finally:
        if trainer._current_run is not before:
            trainer._current_run.checkpoints.samplers.put_back(before.engine.device)
        before.engine = trainer._current_run.engine
        before.losses.follow(before.engine)
        for name in set(vars(trainer)) - set(attributes):
            delattr(trainer, name)
        vars(trainer).update({name: value for name, value in attributes.items() if name not in _RENEWED})
        hidden.put_back(before.engine.device)
        for put_back in kept:
            put_back()
        optimizer.put_back(trainer.optimizer)


class _Ramp(TrainerCallback):
    """Sets the learning rate of every update, `ratios` times that for each group, and stops once the loss diverges."""

    asks_alike = True

    def __init__(self, rates: list[float], ratios: list[float], on_update: Callable[[int], None] | None = None) -> None:
        self.losses: list[float] = []  # of the updates so far that had one; an update without items has none
        self.tried: list[float] = []  # the rates of these updates
        self.stop_reason: str | None = None  # why it ended before its last update, or None
        self._rates = rates
        self._ratios = ratios
        self._on_update = on_update

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        trainer._current_run.checkpoints.samplers.keep()
        self._set(trainer, 0)

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self._on_update is not None:
            self._on_update(trainer.progress.update)
        self._set(trainer, min(trainer.progress.update, len(self._rates) - 1))

    def on_log(self, trainer: TrainerLike, logs: Any = None, **kwargs: Any) -> None:
        """Keep the loss of the update, unless it came after the end: several processes end one update later."""
        if self.stop_reason is not None:
            return
        loss = float(logs["loss"])
        self.losses.append(loss)
        self.tried.append(self._rates[logs["update"] - 1])
        smoothed = _smoothed(self.losses)
        if not math.isfinite(loss):
            self._stop("the loss is not finite")
        if smoothed[-1] > min(smoothed) + (_DIVERGED - 1) * abs(min(smoothed)):
            self._stop(f"the loss is {_DIVERGED:g} times its best")

    def _stop(self, reason: str) -> None:
        self.stop_reason = reason
        raise StopTrainingError(reason)

    def _set(self, trainer: TrainerLike, index: int) -> None:
        for group, ratio in zip(trainer.optimizer.param_groups, self._ratios, strict=True):
            set_learning_rate(group, self._rates[index] * ratio)


def rising_rates(start: float, end: float, num_updates: int) -> list[float]:
    """Return learning rates that rise by the same factor from update to update; ConfigError for impossible bounds."""
    bounds: dict[str, Any] = {"start": start, "end": end}
    for name, value in bounds.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError(f"{name} must be a learning rate above 0, got {value!r}")
    if start >= end:
        raise ConfigError(f"the learning rate must rise from start to end, got start={start} and end={end}: swap them")
    if isinstance(num_updates, bool) or not isinstance(num_updates, int) or num_updates < 2:
        raise ConfigError(f"num_updates must be a whole number of at least 2, got {num_updates!r}")
    factor = math.log(end / start) / (num_updates - 1)
    return [*(start * math.exp(factor * index) for index in range(num_updates - 1)), float(end)]


def relative_rates(optimizer: Any) -> list[float]:
    """Return the initial learning rate of each parameter group relative to the first; ConfigError if that has none."""
    initial = [float(group.get("initial_lr", group.get("lr", 0.0))) for group in optimizer.param_groups]
    if not initial or initial[0] <= 0:
        raise ConfigError(
            f"the first parameter group of {type(optimizer).__name__} has the learning rate "
            f"{initial[0] if initial else None}, so the others have no ratio to it: create the optimizer with lr > 0"
        )
    return [rate / initial[0] for rate in initial]


def create_curve(rates: Sequence[float], losses: Sequence[float], stop_reason: str | None = None) -> LearningRateCurve:
    """Return a curve with its suggestion, from rising rates and the loss of each."""
    smoothed = _smoothed(losses)
    steepest = _steepest(rates, smoothed)
    finite = [(loss, rate) for loss, rate in zip(smoothed, rates, strict=True) if math.isfinite(loss)]
    lowest = min(finite)[1] if finite else None
    suggestion = None if steepest is None or lowest is None else min(steepest, lowest / 10)
    return LearningRateCurve(tuple(rates), tuple(losses), tuple(smoothed), steepest, lowest, suggestion, stop_reason)


def _steepest(rates: Sequence[float], smoothed: Sequence[float]) -> float | None:
    """Return the rate at which the loss falls fastest over the logarithm of the rate; None where it never falls."""
    finite = [index for index, loss in enumerate(smoothed) if math.isfinite(loss)]
    if len(finite) < 2:
        return None
    bottom = min(finite, key=lambda index: smoothed[index])
    reach = max(1, len(rates) // 20)
    logs = [math.log10(rate) for rate in rates]
    slopes: dict[int, float] = {}
    # A mean of one or two losses says little: slopes count once it has settled.
    for index in range(min(len(rates) // 10, bottom), bottom + 1):
        near = slice(max(0, index - reach), min(bottom, index + reach) + 1)
        slopes[index] = linear_regression(logs[near], smoothed[near]).slope if len(logs[near]) > 1 else 0.0
    best = min(slopes, key=lambda index: slopes[index])
    return rates[best] if slopes[best] < 0 else None


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Return means that forget exponentially, without the pull towards 0 that they would have at first."""
    total, weight, means = 0.0, 0.0, []
    for loss in losses:
        total = SMOOTHING * total + (1 - SMOOTHING) * loss
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        means.append(total / weight)
    return means


def _kept_module(module: nn.Module) -> Callable[[], None]:
    """Return a function that puts back a module's own parameters, buffers and mode.

    They may be on another device by then, or split over processes.
    """
    mode = module.training
    # The public iterators leave out entries that are None.
    parameters = {name: _copy(value) for name, value in module._parameters.items()}
    buffers = {name: _copy(value) for name, value in module._buffers.items()}

    def put_back() -> None:
        module.training = mode
        for name, value in parameters.items():
            current = module._parameters.get(name)
            if current is not None and value is not None:
                with torch.no_grad():
                    if local(current).shape == value.shape:
                        local(current).copy_(value)
                    else:
                        current.copy_(split_like(value, current))
                current.grad = None
        for name, value in buffers.items():
            buffer = module._buffers.get(name)
            module._buffers[name] = put(buffer, value if value is None or buffer is None else value.to(buffer.device))

    return put_back


class _KeptOptimizer:
    """The settings and the state of an optimizer, by the places of the parameters in its groups.

    Tensors are kept in host memory: the state is twice the weights, and the device may have no room for it.
    """

    def __init__(self, optimizer: Any) -> None:
        groups = optimizer.param_groups
        self._groups = [{name: _kept(each) for name, each in group.items() if name != "params"} for group in groups]
        self._states = [[_kept(optimizer.state.get(one)) for one in group["params"]] for group in groups]

    def put_back(self, optimizer: Any) -> None:
        optimizer.state.clear()
        for group, kept, states in zip(optimizer.param_groups, self._groups, self._states, strict=True):
            for name in set(group) - set(kept) - {"params"}:
                del group[name]
            group.update(_given_back(kept))
            for parameter, state in zip(group["params"], states, strict=True):
                parameter.grad = None
                if state is not None:
                    optimizer.state[parameter] = _given_back(state)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else local(tensor.detach()).to("cpu", copy=True)


class _KeptTensor(NamedTuple):
    value: Tensor  # a copy in host memory
    device: torch.device


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _KeptTensor(value.detach().to("cpu", copy=True), value.device)
    if isinstance(value, dict):
        return {name: _kept(each) for name, each in value.items()}
    return copy.deepcopy(value)


def _given_back(value: Any) -> Any:
    if isinstance(value, _KeptTensor):
        return value.value.to(value.device)
    if isinstance(value, dict):
        return {name: _given_back(each) for name, each in value.items()}
    return value


def print_nothing(*args: Any, **kwargs: Any) -> None:
    """Replace a trainer's `print` in a run that prints nothing."""
