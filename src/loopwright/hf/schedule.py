"""Schedules that go by a metric, as the core steps them."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau


class MetricSchedule:
    """Holds a schedule that is stepped after evaluations: the core saves it, and its own steps do nothing.

    Args:
        schedule: the schedule.
    """

    def __init__(self, schedule: ReduceLROnPlateau) -> None:
        self.schedule = schedule

    def step(self) -> None:
        """Do nothing: an update has no metric."""

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state."""
        return self.schedule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        self.schedule.load_state_dict(state)
