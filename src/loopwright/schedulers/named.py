"""Schedules by name, with the formulas of `transformers.get_scheduler`.

Each schedule is a pure function from the number of finished updates to the factor on the optimizer's lr. The
functions are stateless; `get_scheduler` binds one to an optimizer. A finite schedule stays at its end.

Example:
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=100, num_training_steps=1000)
    for batch in loader:
        loss(batch).backward()
        optimizer.step()
        scheduler.step()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, Literal, SupportsFloat

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from loopwright.errors import ConfigError, nearest


def constant(update: int) -> float:
    """Keep the lr."""
    return 1.0


def constant_with_warmup(update: int, *, num_warmup_steps: float) -> float:
    """Rise linearly from 0, then stay at 1."""
    return _warmup(update, num_warmup_steps) if update < num_warmup_steps else 1.0


def linear(update: int, *, num_training_steps: float, num_warmup_steps: float = 0) -> float:
    """Rise linearly from 0 to 1, then fall linearly to 0."""
    if update < num_warmup_steps:
        return _warmup(update, num_warmup_steps)
    return max(0.0, (num_training_steps - update) / max(1, num_training_steps - num_warmup_steps))


def cosine(update: int, *, num_training_steps: float, num_warmup_steps: float = 0, num_cycles: float = 0.5) -> float:
    """Rise linearly from 0 to 1, then follow `num_cycles` cosine waves; half a wave ends at 0."""
    if update < num_warmup_steps:
        return _warmup(update, num_warmup_steps)
    return _wave(_progress(update, num_warmup_steps, num_training_steps), num_cycles)


def cosine_with_restarts(
    update: int, *, num_training_steps: float, num_warmup_steps: float = 0, num_cycles: float = 1
) -> float:
    """Rise linearly from 0 to 1, then fall along half a cosine wave, `num_cycles` times; 0 at the end."""
    if update < num_warmup_steps:
        return _warmup(update, num_warmup_steps)
    progress = _progress(update, num_warmup_steps, num_training_steps)
    return 0.0 if progress >= 1 else _wave((num_cycles * progress) % 1.0, 0.5)


def cosine_with_min_lr(
    update: int,
    *,
    num_training_steps: float,
    lr_init: float,
    num_warmup_steps: float = 0,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> float:
    """Follow `cosine`, but down to `min_lr`, or to `min_lr_rate` as a fraction of the lr."""
    lowest = _lowest_factor(lr_init, min_lr, min_lr_rate)
    if update < num_warmup_steps:
        return _warmup(update, num_warmup_steps)
    return _raised(_wave(_progress(update, num_warmup_steps, num_training_steps), num_cycles), lowest)


def cosine_warmup_with_min_lr(
    update: int,
    *,
    num_training_steps: float,
    lr_init: float,
    num_warmup_steps: float = 0,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> float:
    """Follow `cosine_with_min_lr` one update ahead, so that no update has lr 0.

    `warmup_lr_rate` is the factor of the first update; by default one over the warmup's length.
    """
    lowest = _lowest_factor(lr_init, min_lr, min_lr_rate)
    if update >= num_warmup_steps:
        progress = _progress(update + 1, num_warmup_steps, num_training_steps)
        return _raised(_wave(progress, num_cycles), lowest)
    if warmup_lr_rate is None:
        return _warmup(update + 1, num_warmup_steps)
    return warmup_lr_rate + (1 - warmup_lr_rate) * update / max(1, num_warmup_steps - 1)


def polynomial(
    update: int,
    *,
    num_training_steps: float,
    lr_init: float,
    num_warmup_steps: float = 0,
    lr_end: float = 1e-7,
    power: float = 1.0,
) -> float:
    """Rise linearly from 0 to 1, then fall by a power of the time left, to `lr_end / lr_init`."""
    if not lr_init > lr_end:
        raise ConfigError(f"lr_end={lr_end} must be smaller than the optimizer's lr, which is {lr_init}")
    if update < num_warmup_steps:
        return _warmup(update, num_warmup_steps)
    if update > num_training_steps or num_training_steps <= num_warmup_steps:
        return lr_end / lr_init
    remaining = 1 - (update - num_warmup_steps) / (num_training_steps - num_warmup_steps)
    above_end: float = (lr_init - lr_end) * remaining**power
    return (above_end + lr_end) / lr_init


def inverse_sqrt(update: int, *, num_warmup_steps: float = 0, timescale: float | None = None) -> float:
    """Rise linearly from 0 to 1, then fall with the square root of the update, forever.

    The factor is 1 / sqrt(2) `timescale` updates after the warmup; by default the warmup's length, or
    10,000 without a warmup.
    """
    if update < num_warmup_steps:
        return _warmup(update, num_warmup_steps)
    scale = timescale or num_warmup_steps or 10_000
    return 1.0 / math.sqrt((update + (scale - num_warmup_steps)) / scale)


def warmup_stable_decay(
    update: int,
    *,
    num_decay_steps: float,
    num_warmup_steps: float = 0,
    num_training_steps: float | None = None,
    num_stable_steps: float | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    """Rise from `min_lr_ratio` to 1, stay, fall back to `min_lr_ratio` and stay there.

    The stable phase is the rest of `num_training_steps`, unless `num_stable_steps` is given.
    `warmup_type` and `decay_type` are "linear", "cosine" or "1-sqrt"; `num_cycles` is for a cosine decay.
    """
    for argument, shape in (("warmup_type", warmup_type), ("decay_type", decay_type)):
        if shape not in ("linear", "cosine", "1-sqrt"):
            raise ConfigError(f"{argument}={shape!r} is not a shape: use 'linear', 'cosine' or '1-sqrt'")
    if num_stable_steps is None:
        if num_training_steps is None:
            raise ConfigError("warmup_stable_decay needs num_training_steps, or num_stable_steps")
        num_stable_steps = num_training_steps - num_warmup_steps - num_decay_steps
    decay_start = num_warmup_steps + num_stable_steps
    if update < num_warmup_steps:
        progress = _warmup(update, num_warmup_steps)
        rises = {
            "linear": progress,
            "cosine": 0.5 * (1.0 - math.cos(math.pi * progress)),
            "1-sqrt": 1.0 - math.sqrt(1.0 - progress),
        }
        return _raised(rises[warmup_type], min_lr_ratio)
    if update < decay_start:
        return 1.0
    if update >= decay_start + num_decay_steps:
        return min_lr_ratio
    progress = (update - decay_start) / max(1, num_decay_steps)
    falls = {"linear": 1.0 - progress, "cosine": _wave(progress, num_cycles), "1-sqrt": 1.0 - math.sqrt(progress)}
    return _raised(falls[decay_type], min_lr_ratio)


_FUNCTIONS: tuple[Callable[..., float], ...] = (
    *(linear, cosine, cosine_with_restarts, cosine_with_min_lr, cosine_warmup_with_min_lr, polynomial),
    *(constant, constant_with_warmup, inverse_sqrt, warmup_stable_decay),
)
SCHEDULES: Mapping[str, Callable[..., float]] = MappingProxyType({each.__name__: each for each in _FUNCTIONS})
"""Every schedule that is a function of the update, by name."""


class GreedyLR(ReduceLROnPlateau):
    """Raise the lr while a metric improves, lower it while it does not (arXiv 2512.14527).

    `step` takes the metric and is called after an evaluation. The numbers match transformers' `greedy` schedule. Its
    default `min_lr` is above the lr of most fine-tuning runs and would never lower it, so set a suitable one.

    Args:
        optimizer, mode, threshold, threshold_mode, cooldown, min_lr, eps: as in `ReduceLROnPlateau`.
        factor: multiplies the lr to lower it, and divides it to raise it; below 1.
        patience: how many evaluations in a row may improve, or not, before the lr is changed.
        warmup: evaluations after a rise that do not count.
        max_lr: the highest lr, or one for each group.
        smooth: whether to use the mean of the last `window_size` metrics.
        window_size: see `smooth`.
        reset_start: attempts to go below the lowest lr before a full reset.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: Literal["min", "max"] = "min",
        factor: float = 0.95,
        patience: int = 10,
        threshold: float = 1e-6,
        threshold_mode: Literal["rel", "abs"] = "abs",
        cooldown: int = 0,
        warmup: int = 0,
        min_lr: list[float] | float = 1e-3,
        max_lr: list[float] | float = 1.0,
        eps: float = 1e-8,
        smooth: bool = False,
        window_size: int = 50,
        reset_start: int = 500,
    ) -> None:
        super().__init__(optimizer, mode, factor, patience, threshold, threshold_mode, cooldown, min_lr, eps)
        num_groups = len(optimizer.param_groups)
        self.max_lrs = [max_lr] * num_groups if isinstance(max_lr, int | float) else list(max_lr)
        if len(self.max_lrs) != num_groups:
            raise ConfigError(f"max_lr has {len(self.max_lrs)} values for {num_groups} parameter groups")
        self.warmup = warmup
        self.smooth = smooth
        self.window_size = window_size
        self.reset_start = reset_start
        self.recent: list[float] = []
        self.warmup_counter = 0
        self.first_lrs = self._lrs()
        self._begin()

    def step(self, metrics: SupportsFloat, epoch: int | None = None) -> None:  # type: ignore[override] # as its base
        """Take the metric of an evaluation, and change the lr after enough evaluations with or without improvement."""
        current = float(metrics)
        if self.smooth:
            self.recent = [*self.recent, current][-self.window_size :]
            current = sum(self.recent) / len(self.recent)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if self.cooldown_counter > 0 or self.warmup_counter > 0:
            self.num_bad_epochs = self.num_good_epochs = 0
            if self.cooldown_counter > 0:
                self.cooldown_counter -= 1
            else:
                self.warmup_counter -= 1
        elif self._improves(current):
            self.best = current
            self.num_bad_epochs = 0
            self.num_good_epochs += 1
        else:
            self.num_bad_epochs += 1
            self.num_good_epochs = 0
        if self.num_good_epochs > self.patience:
            self._raise()
            self.warmup_counter = self.warmup
            self.num_good_epochs = 0
        elif self.num_bad_epochs > self.patience:
            self._lower()
            self.cooldown_counter = self.cooldown
            self.num_bad_epochs = 0
        self._last_lr = [*self._lrs()]

    def _begin(self) -> None:
        self.best = self.mode_worse
        self.num_bad_epochs = self.num_good_epochs = 0
        self.cooldown_counter = self.warmup_counter = 0
        self.resets_in = self.reset_start
        self.recent = []

    def _improves(self, current: float) -> bool:
        sign = 1.0 if self.mode == "max" else -1.0
        best = sign * float(self.best)
        needed: float = best * (1.0 + sign * self.threshold) if self.threshold_mode == "rel" else best + self.threshold
        return sign * current > needed

    def _raise(self) -> None:
        self.resets_in = self.reset_start
        for group, highest in zip(self.optimizer.param_groups, self.max_lrs, strict=True):
            lr = float(group["lr"])
            raised = min(lr / self.factor, highest)
            if raised - lr > self.eps:
                group["lr"] = raised

    def _lower(self) -> None:
        for group, lowest in zip(self.optimizer.param_groups, self.min_lrs, strict=True):
            lr = float(group["lr"])
            lowered = max(lr * self.factor, lowest)
            if lr - lowered > self.eps:
                group["lr"] = lowered
        if any(lr > lowest for lr, lowest in zip(self._lrs(), self.min_lrs, strict=True)):
            return
        self.resets_in -= 1
        if self.resets_in <= 0:
            for group, lr in zip(self.optimizer.param_groups, self.first_lrs, strict=True):
                group["lr"] = lr
            self._begin()

    def _lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]


# Metric-driven schedules. transformers spells the first with the lr; both are in use.
_METRIC_SCHEDULES: Mapping[str, type[ReduceLROnPlateau]] = {
    "reduce_on_plateau": ReduceLROnPlateau,
    "reduce_lr_on_plateau": ReduceLROnPlateau,
    "greedy": GreedyLR,
}


def get_scheduler(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: float | None = None,
    num_training_steps: float | None = None,
    scheduler_specific_kwargs: Mapping[str, Any] | None = None,
) -> LRScheduler:
    """Return the named schedule as a torch scheduler, to be stepped after every update.

    The first update uses the schedule's value at 0. A length that the schedule does not use is ignored.
    The state holds the count and the lr, not the lengths: a loaded state uses the current call's lengths.

    Args:
        name: a key of `SCHEDULES`, or "reduce_on_plateau" or "greedy", whose `step` takes the metric and is called
            after an evaluation.
        num_warmup_steps: updates in which the lr rises; None for no warmup.
        num_training_steps: updates of the run.
        scheduler_specific_kwargs: the schedule's own arguments by name, such as `num_cycles`.

    Raises:
        ConfigError: the name or an argument is unknown, or one is missing.
    """
    options = dict(scheduler_specific_kwargs or {})
    if name in _METRIC_SCHEDULES:
        kind = _METRIC_SCHEDULES[name]
        _check_options(name, options, list(signature(kind).parameters)[1:])
        return kind(optimizer, **options)
    if name not in SCHEDULES:
        known = [*SCHEDULES, *_METRIC_SCHEDULES]
        near = nearest(str(name), known)
        hint = f"did you mean {near!r}? " if near else ""
        raise ConfigError(f"there is no schedule {str(name)!r}: {hint}The schedules are {', '.join(known)}")
    schedule = SCHEDULES[name]
    parameters = dict(list(signature(schedule).parameters.items())[1:])
    offered = {
        "num_warmup_steps": num_warmup_steps,
        "num_training_steps": num_training_steps,
        "lr_init": float(optimizer.defaults["lr"]) if "lr_init" in parameters else None,
    }
    options = {key: each for key, each in offered.items() if key in parameters and each is not None} | options
    _check_options(name, options, list(parameters))
    missing = [key for key, each in parameters.items() if each.default is Parameter.empty and key not in options]
    if missing:
        raise ConfigError(f"the schedule {name!r} needs {', '.join(missing)}")
    for length in ("num_warmup_steps", "num_training_steps"):
        if options.get(length, 0) < 0:
            raise ConfigError(f"{length} must not be negative, got {options[length]}")
    # A partial of a module's function has an empty __dict__, so LambdaLR's state stays plain numbers.
    return LambdaLR(optimizer, partial(schedule, **options))


def _check_options(name: str, options: Mapping[str, Any], accepted: list[str]) -> None:
    unknown = [key for key in options if key not in accepted]
    if unknown:
        takes = f"it takes {', '.join(accepted)}" if accepted else "it takes none"
        raise ConfigError(f"the schedule {name!r} has no argument {', '.join(unknown)}: {takes}")


def _warmup(update: float, num_warmup_steps: float) -> float:
    return update / max(1, num_warmup_steps)


def _progress(update: float, num_warmup_steps: float, num_training_steps: float) -> float:
    # Held at the end: otherwise a cosine would raise the lr again in a run longer than planned.
    return min(1.0, (update - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps))


def _wave(progress: float, num_cycles: float) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress)))


def _raised(factor: float, lowest: float) -> float:
    return max(0.0, factor * (1.0 - lowest) + lowest)


def _lowest_factor(lr_init: float, min_lr: float | None, min_lr_rate: float | None) -> float:
    if min_lr is not None and min_lr_rate is None:
        if not lr_init > 0:
            raise ConfigError(f"min_lr={min_lr} needs an lr above 0 to start from, and the optimizer's is {lr_init}")
        return min_lr / lr_init
    if min_lr_rate is not None and min_lr is None:
        return min_lr_rate
    raise ConfigError("give one of min_lr and min_lr_rate: the lr to end at, or that as a fraction of the lr")
