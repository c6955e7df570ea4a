"""Cosine annealing with warmup and cooldown, counted in updates."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from loopwright.errors import ConfigError
from loopwright.schedulers.placeholders import Expression, TrainerPlaceholderValues
from loopwright.schedulers.scheduler_base import StatefulSchedulerBase, require

_STATE_ATTRIBUTES = (
    *("total_iterations", "lr_min_ratio", "lr_min", "warmup_iterations", "warmup_lr_init", "warmup_lr_ratio"),
    *("k_decay", "num_cooldown_iterations"),
)


class CosineLrScheduler(StatefulSchedulerBase):
    """Warm up linearly, follow half a cosine wave down to a minimum, and stay there.

    With S updates per epoch the warmup takes the first `num_warmup_epochs * S` updates, the cooldown
    the last `num_cooldown_epochs * S`, and the cosine the rest. The lr is exactly the group's own at the
    end of the warmup, and exactly the minimum from the start of the cooldown on, also after the last epoch.

    The annealing is SGDR's (https://arxiv.org/abs/1608.03983) without restarts; `k_decay` is from
    https://arxiv.org/abs/2004.05909.

    Args:
        total_num_epochs: epochs of the run, including warmup and cooldown.
        num_update_steps_per_epoch: optimizer updates per epoch.
        k_decay: above 1 the lr stays high for longer, below 1 it falls sooner.
        lr_min: the final lr of the cosine, for all groups.
        min_lr_ratio: the same as a fraction of each group's lr; overrides `lr_min`.
        num_warmup_epochs: epochs in which the lr rises.
        warmup_starting_lr: the initial lr of the warmup, for all groups.
        warmup_starting_lr_ratio: the same as a fraction of each group's lr; overrides `warmup_starting_lr`.
        num_cooldown_epochs: epochs at the minimum.

    Raises:
        ScheduleArgumentError: no epochs, no updates, or a negative `lr_min`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_epochs: int,
        num_update_steps_per_epoch: int,
        k_decay: float = 1.0,
        lr_min: float = 1e-6,
        min_lr_ratio: float | None = None,
        num_warmup_epochs: float = 0,
        warmup_starting_lr: float = 1e-6,
        warmup_starting_lr_ratio: float | None = None,
        num_cooldown_epochs: float = 0,
    ) -> None:
        lengths = {"total_num_epochs": total_num_epochs, "num_update_steps_per_epoch": num_update_steps_per_epoch}
        for name, length in lengths.items():
            require(length > 0, f"{name} must be positive, got {length}")
        require(lr_min >= 0, f"lr_min must not be negative, got {lr_min}")
        super().__init__(optimizer)
        self.total_iterations = total_num_epochs * num_update_steps_per_epoch
        self.lr_min_ratio = min_lr_ratio
        self.lr_min = lr_min
        self.warmup_iterations = num_warmup_epochs * num_update_steps_per_epoch
        self.warmup_lr_init = warmup_starting_lr
        self.warmup_lr_ratio = warmup_starting_lr_ratio
        self.k_decay = k_decay
        self.num_cooldown_iterations = num_cooldown_epochs * num_update_steps_per_epoch
        if self.warmup_iterations:
            self._update_param_groups([self._warmup_start(base) for base in self.base_lr_values])

    def get_updated_values(self, num_updates: int) -> list[float]:
        """Return the lr of each group after `num_updates` updates."""
        return [self._lr(base, num_updates) for base in self.base_lr_values]

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule and the count; the groups' own lr is saved with the optimizer."""
        return {**{name: getattr(self, name) for name in _STATE_ATTRIBUTES}, "num_updates": self._num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state and its lr, whether the optimizer was loaded or not; ConfigError for one of another class."""
        missing = [name for name in (*_STATE_ATTRIBUTES, "num_updates") if name not in state_dict]
        if missing:
            raise ConfigError(f"this is not a state of a CosineLrScheduler: it lacks {', '.join(missing)}")
        for name in _STATE_ATTRIBUTES:
            setattr(self, name, state_dict[name])
        self._num_updates = int(state_dict["num_updates"])
        self.step_update(max(self._num_updates, 0))

    @classmethod
    def create_scheduler_fn(
        cls,
        total_num_epochs: int | Expression = TrainerPlaceholderValues.NUM_EPOCHS,
        num_update_steps_per_epoch: int | Expression = TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH,
        k_decay: float = 1.0,
        lr_min: float = 1e-6,
        min_lr_ratio: float | None = None,
        num_warmup_epochs: float | Expression = 0,
        warmup_starting_lr: float = 1e-6,
        warmup_starting_lr_ratio: float | None = None,
        num_cooldown_epochs: float | Expression = 0,
    ) -> partial[CosineLrScheduler]:
        """Return a function of the optimizer, for `Trainer.train(create_scheduler_fn=...)`.

        The arguments are those of the class; the Trainer fills in the placeholders.
        """
        arguments = dict(locals())
        return partial(arguments.pop("cls"), **arguments)

    def _lr(self, base: float, num_updates: int) -> float:
        num_cosine_updates = self.total_iterations - self.warmup_iterations - self.num_cooldown_iterations
        update_in_cosine = num_updates - self.warmup_iterations
        floor = self.lr_min if self.lr_min_ratio is None else self.lr_min_ratio * base
        if update_in_cosine < 0:
            start = self._warmup_start(base)
            return start + num_updates * ((base - start) / self.warmup_iterations)
        if update_in_cosine >= num_cosine_updates:
            return floor
        if update_in_cosine == 0:
            # floor + (base - floor) need not round to base.
            return base
        angle = math.pi * update_in_cosine**self.k_decay / num_cosine_updates**self.k_decay
        lr = floor + 0.5 * (base - floor) * (1 + math.cos(angle))
        return min(max(lr, min(base, floor)), max(base, floor))

    def _warmup_start(self, base: float) -> float:
        return self.warmup_lr_init if self.warmup_lr_ratio is None else self.warmup_lr_ratio * base
