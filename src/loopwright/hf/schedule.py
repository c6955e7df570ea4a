"""Metric-driven schedules, as the core steps them."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau


class MetricSchedule:
    """Wraps a schedule that is stepped after evaluations: the core saves it, and its own `step` is a no-op.

    Args:
        schedule: the schedule.
    """

    def __init__(self, schedule: ReduceLROnPlateau) -> None:
        self.schedule = schedule

    def step(self) -> None:
        """No-op: an update has no metric."""

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state."""
        return self.schedule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.schedule.load_state_dict(state)
