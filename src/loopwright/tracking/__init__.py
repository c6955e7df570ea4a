"""The memory of a run: the history of its metrics, and the mean of its losses."""

from __future__ import annotations

from loopwright.tracking.history import InMemoryRunHistory, RunHistory
from loopwright.tracking.loss import LossTracker

__all__ = ["InMemoryRunHistory", "LossTracker", "RunHistory"]
