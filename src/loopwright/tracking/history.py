"""The run history: every metric of a run, in the order it was recorded, and the current epoch.

`RunHistory` is the trainer's interface; `InMemoryRunHistory` is the default implementation. Values are
kept as given. Reading never changes a history.

    history = InMemoryRunHistory()
    history.update_metric("accuracy", 0.5)
    history.get_latest_metric("accuracy")   # 0.5
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any


class RunHistory(ABC):
    """The trainer's interface to a run history.

    A subclass implements the abstract methods; saving, loading and `latest` then work through them.
    Metric names are full names, prefix included, everywhere except in `update_metric`.
    """

    @abstractmethod
    def get_metric_names(self) -> Iterable[str]:
        """Return the names of all recorded metrics, each once."""

    @abstractmethod
    def get_metric_values(self, metric_name: str) -> Iterable[Any]:
        """Return every value recorded for a metric, oldest first; empty for an unknown metric."""

    @abstractmethod
    def get_latest_metric(self, metric_name: str) -> Any:
        """Return a metric's latest value; raise a ValueError if there is none."""

    @abstractmethod
    def update_metric(self, metric_name: str, metric_value: Any) -> None:
        """Record one more value for a metric, under its name with the current prefix."""

    @abstractmethod
    def delete_metric(self, metric_name: str) -> None:
        """Remove a metric and all of its values; raise a KeyError if there are none."""

    @abstractmethod
    def set_metric_name_prefix(self, prefix: str = "") -> None:
        """Set the prefix that `update_metric` adds to names; empty by default."""

    @property
    @abstractmethod
    def metric_name_prefix(self) -> str:
        """The prefix that `update_metric` adds to names."""

    @property
    @abstractmethod
    def current_epoch(self) -> int:
        """The number of the current epoch, from 1; incremented after its last event."""

    @abstractmethod
    def _increment_epoch(self) -> None:
        """Advance to the next epoch."""

    @abstractmethod
    def _set_epoch(self, epoch: int) -> None:
        """Set the epoch of a resumed run."""

    @abstractmethod
    def reset(self) -> None:
        """Return to epoch 1 with no metrics and no prefix."""

    def latest(self) -> dict[str, Any]:
        """Return the latest value of every metric, sorted by name."""
        values = {name: list(self.get_metric_values(name)) for name in sorted(self.get_metric_names())}
        return {name: recorded[-1] for name, recorded in values.items() if recorded}

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the prefix and all recorded values, to be saved with the run.

        A history that keeps more, or keeps it elsewhere, overrides this and `load_state_dict`.
        """
        return {
            "epoch": self.current_epoch,
            "prefix": self.metric_name_prefix,
            # A set of strings has another order in every process; saved state must not.
            "metrics": {name: list(self.get_metric_values(name)) for name in sorted(self.get_metric_names())},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; each value goes through `update_metric`."""
        # All three are looked up before anything is discarded.
        epoch, prefix, metrics = state["epoch"], state["prefix"], state["metrics"]
        self.reset()
        # The names in the state are already full names, and a subclass's reset may keep the prefix.
        self.set_metric_name_prefix("")
        for name, values in metrics.items():
            for value in values:
                self.update_metric(name, value)
        self.set_metric_name_prefix(prefix)
        self._set_epoch(epoch)


class InMemoryRunHistory(RunHistory):
    """A run history that lives in memory."""

    def __init__(self) -> None:
        self.reset()

    def get_metric_names(self) -> set[str]:
        return set(self._metrics)

    def get_metric_values(self, metric_name: str) -> list[Any]:
        return list(self._metrics.get(metric_name, ()))

    def get_latest_metric(self, metric_name: str) -> Any:
        if metric_name not in self._metrics:
            raise ValueError(f"No values have been recorded for the metric {metric_name}. {self._recorded_names()}")
        return self._metrics[metric_name][-1]

    def update_metric(self, metric_name: str, metric_value: Any) -> None:
        self._metrics.setdefault(f"{self._prefix}{metric_name}", []).append(metric_value)

    def delete_metric(self, metric_name: str) -> None:
        if metric_name not in self._metrics:
            raise KeyError(f"There is no metric {metric_name} to delete. {self._recorded_names()}")
        del self._metrics[metric_name]

    def set_metric_name_prefix(self, prefix: str = "") -> None:
        self._prefix = prefix

    @property
    def metric_name_prefix(self) -> str:
        return self._prefix

    @property
    def current_epoch(self) -> int:
        return self._current_epoch

    def _increment_epoch(self) -> None:
        self._current_epoch += 1

    def _set_epoch(self, epoch: int) -> None:
        self._current_epoch = epoch

    def reset(self) -> None:
        self._current_epoch = 1
        self._prefix = ""
        # No list in here is empty: a metric exists from its first value on.
        self._metrics: dict[str, list[Any]] = {}

    def _recorded_names(self) -> str:
        if not self._metrics:
            return "Nothing has been recorded yet."
        return f"Recorded so far: {', '.join(sorted(self._metrics))}."
