"""The two base classes for schedulers, stateless and counting.

A scheduler here is a function from the number of an update to the value of one field of every parameter group, usually
`lr`. It is called after every optimizer update, never per epoch. Nothing here knows the Trainer.

Example:
    class HalveEvery(StatefulSchedulerBase):
        def __init__(self, optimizer, num_updates_between):
            super().__init__(optimizer)
            self.num_updates_between = num_updates_between

        def get_updated_values(self, num_updates):
            return [base * 0.5 ** (num_updates // self.num_updates_between) for base in self.base_lr_values]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

from loopwright.errors import ConfigError

UpdatedValues: TypeAlias = "float | torch.Tensor | Iterable[Any] | None"


class ScheduleArgumentError(ConfigError, AssertionError):
    """An argument that a schedule cannot work with.

    It is also an AssertionError, because users of this API catch that; unlike an `assert` it also fires
    under `python -O`.
    """


def require(condition: bool, message: str) -> None:
    """Raise a ScheduleArgumentError with this message unless the condition holds."""
    if not condition:
        raise ScheduleArgumentError(message)


class SchedulerBase(ABC):
    """Set a field of the optimizer's parameter groups as a function of the given update number.

    The constructor stores the current value of each group under the group's key `initial_{field}` (an existing value
    wins) and in `base_lr_values`, and sets the groups to it. A tensor value, as capturable optimizers need, stays the
    same tensor and is written in place. A group without the field raises a KeyError.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, param_group_field: str = "lr") -> None:
        self.optimizer = optimizer
        self.param_group_field = param_group_field
        self.base_lr_values = self._keep_initial_values()
        self._update_param_groups(self.base_lr_values)

    @abstractmethod
    def get_updated_values(self, num_updates: int) -> UpdatedValues:
        """Return the value of the field after `num_updates` updates.

        It may be None (leave the groups alone), one number or 0-d tensor (for all groups), or any
        iterable with one value per group.
        """

    def step_update(self, num_updates: int) -> None:
        """Write the value of this update number into the parameter groups.

        A group added during the run, such as unfrozen layers, is scheduled from its initial value.
        """
        if len(self.optimizer.param_groups) > len(self.base_lr_values):
            self.base_lr_values = [*self.base_lr_values, *self._keep_initial_values()[len(self.base_lr_values) :]]
        values = self.get_updated_values(num_updates)
        if values is not None:
            self._update_param_groups(values)

    def state_dict(self) -> dict[str, Any]:
        """Return every attribute except the optimizer, which is saved separately."""
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the attributes in the given state; the optimizer is never replaced."""
        vars(self).update({key: value for key, value in state_dict.items() if key != "optimizer"})

    def _keep_initial_values(self) -> list[Any]:
        field = self.param_group_field
        base_values, tensors = [], set()
        for index, group in enumerate(self.optimizer.param_groups):
            if field not in group:
                raise KeyError(f"{field} missing from param_groups[{index}]")
            value = group[field]
            if isinstance(value, torch.Tensor):
                # torch gives all groups the same default tensor; writing in place would tie them together.
                if id(value) in tensors:
                    group[field] = value.clone()
                tensors.add(id(value))
            base_values.append(_plain(group.setdefault(f"initial_{field}", _plain(value))))
        return base_values

    def _update_param_groups(self, values: float | torch.Tensor | Iterable[Any]) -> None:
        groups = self.optimizer.param_groups
        # A 0-d array or tensor has __iter__ but cannot be iterated.
        is_several = isinstance(values, Iterable) and getattr(values, "ndim", None) != 0
        per_group = list(values) if is_several else [values] * len(groups)  # type: ignore[arg-type]
        if len(per_group) != len(groups):
            raise ConfigError(
                f"{type(self).__name__}.get_updated_values gave {len(per_group)} values for {len(groups)} "
                "parameter groups: return one number for all groups, or one value per group"
            )
        for group, value in zip(groups, per_group, strict=True):
            current = group[self.param_group_field]
            if not isinstance(current, torch.Tensor):
                group[self.param_group_field] = _plain(value)
            elif isinstance(value, torch.Tensor):
                # Not through a Python number: that would be a host sync.
                current.copy_(value)
            else:
                current.fill_(_plain(value))


class StatefulSchedulerBase(SchedulerBase):
    """A scheduler that counts the updates itself, with the interface of torch's schedulers.

    The first `step()` writes the value of update **0**, the second the value of update 1. So a loop that
    only calls `step()` after each optimizer update uses the constructor's value for update 1 and lags by
    one. The Trainer therefore primes it: it calls `step()` once before update 1. Do the same in a
    hand-written loop. The state stores the count as `num_updates`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, param_group_field: str = "lr") -> None:
        super().__init__(optimizer, param_group_field)
        self._num_updates = -1

    def step(self) -> None:
        """Count one update and write its value; call it after each optimizer update."""
        self._num_updates += 1
        self.step_update(self._num_updates)

    def state_dict(self) -> dict[str, Any]:
        """Return every attribute except the optimizer; the count is `num_updates`, -1 before any step."""
        state = super().state_dict()
        state["num_updates"] = state.pop("_num_updates")
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; the next `step()` continues from its count."""
        attributes = {key: value for key, value in state_dict.items() if key != "num_updates"}
        super().load_state_dict(attributes)
        self._num_updates = int(state_dict.get("num_updates", self._num_updates))


def _plain(value: Any) -> Any:
    is_number = value.numel() == 1 if isinstance(value, torch.Tensor) else getattr(value, "ndim", None) == 0
    return value.item() if is_number else value
