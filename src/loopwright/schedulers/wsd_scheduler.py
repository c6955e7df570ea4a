"""Warmup, stable, decay (WSD): train long at one lr, decay briefly whenever a finished model is needed.

This is the schedule of https://arxiv.org/abs/2410.05192 in both its forms: WSD continues from the state
before a decay, WSD-S from the state after it. WSDCheckpointCallback saves and loads these states.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

import torch

from loopwright.errors import ConfigError
from loopwright.schedulers.placeholders import Expression, TrainerPlaceholderValues
from loopwright.schedulers.scheduler_base import StatefulSchedulerBase, require

_LARGEST_RATIO_OF_SEVERAL_DECAYS = 1 / 3
_DERIVED_ATTRIBUTES = ("checkpoint_steps", "checkpoint_decay_info")
_STATE_ATTRIBUTES = (
    *("base_lr_values", "decay_phase_ratio", "is_continuation_from_checkpoint", "lr_min", "num_checkpoints"),
    *("num_warmup_steps", "param_group_field", "previous_checkpoint_step", "total_steps"),
    *("use_inverse_sqrt_decay", "warmup_starting_lr"),
)


class WSDLrScheduler(StatefulSchedulerBase):
    """Warm up linearly, hold the lr, and decay it before every checkpoint; then hold it again.

    The run is divided into periods that end at the checkpoint steps (`estimate_checkpoint_steps`). The last
    `int(length * decay_phase_ratio)` updates of a period are its decay. With t from 0 to 1 within a decay,
    an lr b becomes `b * (lr_min + (1 - lr_min) * (1 - sqrt(t)))`, or in the inverse form
    `b / (t / lr_min + 1 - t)`. Two special cases: a ratio of 0 never decays, and the inverse form with
    `lr_min=0`, which would fall to 0 at once, is the line `b * (1 - t)`. After the last checkpoint t stays 1.

    A continuation (`is_continuation_from_checkpoint=True`) is a new run of `total_steps` updates from an
    older state: no warmup, and the count starts over. With no state loaded it is a fresh stable phase.

    Args:
        num_epochs: epochs of the run; with `num_update_steps_per_epoch` instead of `total_steps`.
        num_update_steps_per_epoch: optimizer updates per epoch.
        total_steps: optimizer updates of the run.
        num_warmup_steps: updates in which the lr rises; None takes 1 % of the run.
        decay_phase_ratio: the part of each period that decays; at most 1/3 with several checkpoints.
        lr_min: the end of a decay, as a fraction of each group's lr.
        warmup_starting_lr: the start of the warmup, for all groups; an lr, not a fraction.
        use_inverse_sqrt_decay: decay by the square root, else by the inverse form.
        num_checkpoints: how many times to decay.
        is_continuation_from_checkpoint: this run continues from a state of an earlier one.

    Raises:
        ConfigError: the length is given twice or not at all, the warmup starts above every group's lr,
            or the decays of several checkpoints are too long.
        ScheduleArgumentError: a number out of its range.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        num_epochs: int | None = None,
        num_update_steps_per_epoch: int | None = None,
        total_steps: int | None = None,
        num_warmup_steps: float | None = 0,
        decay_phase_ratio: float = 0.1,
        lr_min: float = 1e-6,
        warmup_starting_lr: float = 1e-6,
        use_inverse_sqrt_decay: bool = True,
        num_checkpoints: int = 1,
        is_continuation_from_checkpoint: bool = False,
    ) -> None:
        num_updates = _length_of_run(num_epochs, num_update_steps_per_epoch, total_steps)
        require(0 <= decay_phase_ratio <= 1, f"decay_phase_ratio must be in 0..1, got {decay_phase_ratio}")
        require(lr_min >= 0, f"lr_min must not be negative, got {lr_min}")
        require(num_checkpoints > 0, f"num_checkpoints must be positive, got {num_checkpoints}")
        if num_checkpoints > 1 and decay_phase_ratio > _LARGEST_RATIO_OF_SEVERAL_DECAYS:
            raise ConfigError(
                f"decay_phase_ratio={decay_phase_ratio} is too long for {num_checkpoints} checkpoints: "
                "use at most 1/3, or one checkpoint"
            )
        super().__init__(optimizer)
        if warmup_starting_lr > max(self.base_lr_values):
            raise ConfigError(
                f"warmup_starting_lr={warmup_starting_lr} is above the largest lr of the optimizer "
                f"({max(self.base_lr_values)}): a warmup has to rise"
            )
        self.total_steps = num_updates
        self.num_warmup_steps = int(0.01 * num_updates) if num_warmup_steps is None else num_warmup_steps
        self.decay_phase_ratio = decay_phase_ratio
        self.lr_min = lr_min
        self.warmup_starting_lr = warmup_starting_lr
        self.use_inverse_sqrt_decay = use_inverse_sqrt_decay
        self.num_checkpoints = num_checkpoints
        self.is_continuation_from_checkpoint = is_continuation_from_checkpoint
        self.previous_checkpoint_step: int | None = None
        self._plan_periods()
        if self._is_warming_up(0):
            self._update_param_groups(self.warmup_starting_lr)

    def get_updated_values(self, num_updates: int) -> list[float]:
        """Return the lr of each group after `num_updates` updates."""
        if self._is_warming_up(num_updates):
            start, progress = self.warmup_starting_lr, num_updates / self.num_warmup_steps
            return [start + progress * (base - start) for base in self.base_lr_values]
        fraction = self._decay_fraction(num_updates)
        return [base if fraction is None else self._decayed(base, fraction) for base in self.base_lr_values]

    def step_update(self, num_updates: int) -> None:
        """Write the lr of this update number; `previous_checkpoint_step` records the last one before a decay."""
        super().step_update(num_updates)
        if num_updates == self.get_phase_info(num_updates)["pre_decay_step"] - 1:
            self.previous_checkpoint_step = num_updates

    def get_checkpoint_steps(self) -> list[int]:
        """Return the update counts at which a decay is complete."""
        return self.checkpoint_steps

    def get_decay_info(self) -> list[dict[str, int]]:
        """Return for each period its `period_start`, `period_end`, `decay_steps` and `pre_decay_step`."""
        return self.checkpoint_decay_info

    def get_phase_info(self, num_updates: int) -> dict[str, int]:
        """Return the first period that ends at this count or later, else the last one."""
        for info in self.checkpoint_decay_info:
            if info["period_end"] >= num_updates:
                return info
        return self.checkpoint_decay_info[-1]

    def get_current_phase_info(self) -> dict[str, int]:
        """Return the period of the current count."""
        return self.get_phase_info(self._num_updates)

    def get_current_step(self) -> int:
        """Return the update number of the last written lr; -1 before any `step()`."""
        return self._num_updates

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule, the groups' lr and the count (`num_updates`)."""
        state = {name: getattr(self, name) for name in (*_STATE_ATTRIBUTES, *_DERIVED_ATTRIBUTES)}
        return {**state, "num_updates": self._num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; keys may be missing, and periods are planned again from the state.

        In a continuation the schedule comes from the state, but the new `total_steps` stays, the count
        starts over, there is no warmup and the lr returns to the stable one. To resume an interrupted
        continuation use `resume_state_dict`.
        """
        if not self.is_continuation_from_checkpoint:
            self.resume_state_dict(state_dict)
            return
        kept = {
            "total_steps": self.total_steps,
            "is_continuation_from_checkpoint": True,
            "previous_checkpoint_step": None,
            # 0 if the Trainer has already primed this scheduler, so that loading late costs no update.
            "num_updates": min(self._num_updates, 0),
        }
        self.resume_state_dict({**state_dict, **kept})

    def resume_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume exactly where the state was saved, in a continuation too, with its lr."""
        for name in _STATE_ATTRIBUTES:
            if name in state_dict:
                setattr(self, name, state_dict[name])
        self._num_updates = int(state_dict.get("num_updates", self._num_updates))
        self._plan_periods()
        self._update_param_groups(self.get_updated_values(max(self._num_updates, 0)))

    @classmethod
    def create_scheduler_fn(
        cls,
        total_num_epochs: int | Expression = TrainerPlaceholderValues.NUM_EPOCHS,
        num_update_steps_per_epoch: (
            int | Expression
        ) = TrainerPlaceholderValues.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH,
        num_warmup_epochs: float | None = None,
        decay_phase_ratio: float = 0.1,
        lr_min: float = 1e-6,
        warmup_starting_lr: float = 1e-6,
        use_inverse_sqrt_decay: bool = True,
        num_checkpoints: int = 1,
        is_continuation_from_checkpoint: bool = False,
    ) -> partial[WSDLrScheduler]:
        """Return a function of the optimizer, for `Trainer.train(create_scheduler_fn=...)`.

        The arguments are those of the class, the warmup in epochs (None: 1 % of the run); the Trainer
        fills in the placeholders.
        """
        arguments = dict(locals())
        arguments["num_epochs"], warmup = arguments.pop("total_num_epochs"), arguments.pop("num_warmup_epochs")
        arguments["num_warmup_steps"] = None if warmup is None else num_update_steps_per_epoch * warmup
        return partial(arguments.pop("cls"), **arguments)

    def _plan_periods(self) -> None:
        self.checkpoint_steps = estimate_checkpoint_steps(self.total_steps, self.num_checkpoints)
        self.checkpoint_decay_info = []
        for start, end in zip([0, *self.checkpoint_steps], self.checkpoint_steps, strict=False):
            decay = int((end - start) * self.decay_phase_ratio)
            info = {"period_start": start, "period_end": end, "decay_steps": decay, "pre_decay_step": end - decay}
            self.checkpoint_decay_info.append(info)

    @lru_cache(maxsize=0)  # noqa: B019 - nothing is kept; tests written for pytorch-accelerated clear the cache
    def _get_checkpoint_info(self, num_updates: int) -> tuple[int, int]:
        period = self.get_phase_info(num_updates + 1)
        return period["period_end"] - period["period_start"], num_updates - period["period_start"]

    def _is_warming_up(self, num_updates: int) -> bool:
        return not self.is_continuation_from_checkpoint and num_updates < self.num_warmup_steps

    def _decay_fraction(self, num_updates: int) -> float | None:
        """Return the completed fraction of the decay, above 0 and up to 1, or None outside a decay."""
        if num_updates >= self.total_steps:
            return 1.0 if self.decay_phase_ratio > 0 else None
        # At a period's end its decay is over: the next one counts, hence the + 1.
        period = self.get_phase_info(num_updates + 1)
        if num_updates <= period["pre_decay_step"]:
            return None
        return (num_updates - period["pre_decay_step"]) / period["decay_steps"]

    def _decayed(self, base: float, fraction: float) -> float:
        if self.use_inverse_sqrt_decay:
            return base * (self.lr_min + (1 - self.lr_min) * (1 - math.sqrt(fraction)))
        if self.lr_min == 0:
            return base * (1 - fraction)
        return base / (fraction * (1 / self.lr_min) + (1 - fraction))


def estimate_checkpoint_steps(total_steps: int, num_checkpoints: int = 3) -> list[int]:
    """Return `num_checkpoints` update counts, each half of the next (rounded down), the last one the total.

    A total that cannot be halved that often raises a ConfigError.
    """
    require(num_checkpoints > 0, f"num_checkpoints must be positive, got {num_checkpoints}")
    smallest_total = 2 ** (num_checkpoints - 1)
    if total_steps < smallest_total:
        raise ConfigError(
            f"{num_checkpoints} checkpoints, each at twice the update of the one before, need at least "
            f"{smallest_total} updates, but the run has {total_steps}: ask for fewer checkpoints"
        )
    return [int(total_steps) >> halvings for halvings in reversed(range(num_checkpoints))]


def _length_of_run(num_epochs: int | None, num_update_steps_per_epoch: int | None, total_steps: int | None) -> int:
    if num_epochs is not None and num_update_steps_per_epoch is not None:
        if total_steps is not None:
            raise ConfigError(
                "the length of the run is given twice: give either total_steps, "
                "or num_epochs and num_update_steps_per_epoch"
            )
        total_steps = num_epochs * num_update_steps_per_epoch
    if total_steps is None:
        raise ConfigError(
            "the length of the run is missing: give total_steps, or num_epochs and num_update_steps_per_epoch"
        )
    require(total_steps > 0, f"the run must have at least one update, got {total_steps}")
    return int(total_steps)
