"""The run history: every metric of a run, in the order it was recorded, and the current epoch.

`RunHistory` is what the trainer needs; `InMemoryRunHistory` is the one it makes by default. Values are
kept as they are given. Reading never changes a history.

    history = InMemoryRunHistory()
    history.update_metric("accuracy", 0.5)
    history.get_latest_metric("accuracy")   # 0.5
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any


class RunHistory(ABC):
    """What a trainer asks of a run history.

    A subclass implements the abstract methods; saving, loading and `latest` then work through them.
    Metric names are full names, prefix included, everywhere but in `update_metric`.
    """

    @abstractmethod
    def get_metric_names(self) -> Iterable[str]:
        """Return the names of all recorded metrics, each once."""

    @abstractmethod
    def get_metric_values(self, metric_name: str) -> Iterable[Any]:
        """Return every value recorded for a metric, oldest first; none for an unknown metric."""

    @abstractmethod
    def get_latest_metric(self, metric_name: str) -> Any:
        """Return the value recorded last for a metric.

        Raises:
            ValueError: nothing has been recorded for it.
        """

    @abstractmethod
    def update_metric(self, metric_name: str, metric_value: Any) -> None:
        """Record one more value for a metric, under its name with the current prefix in front."""

    @abstractmethod
    def delete_metric(self, metric_name: str) -> None:
        """Forget a metric and all of its values.

        Raises:
            KeyError: nothing has been recorded for it.
        """

    @abstractmethod
    def set_metric_name_prefix(self, prefix: str = "") -> None:
        """Set what `update_metric` puts in front of names from now on; nothing by default."""

    @property
    @abstractmethod
    def metric_name_prefix(self) -> str:
        """What `update_metric` puts in front of names."""

    @property
    @abstractmethod
    def current_epoch(self) -> int:
        """The number of the epoch that is running, from 1; one more once its last event is over."""

    @abstractmethod
    def _increment_epoch(self) -> None:
        """Go on to the next epoch."""

    @abstractmethod
    def _set_epoch(self, epoch: int) -> None:
        """Go to an epoch, when a run is resumed."""

    @abstractmethod
    def reset(self) -> None:
        """Go back to epoch 1 with no metrics and no prefix."""

    def latest(self) -> dict[str, Any]:
        """Return the value recorded last for every metric, by name in alphabetical order."""
        values = {name: list(self.get_metric_values(name)) for name in sorted(self.get_metric_names())}
        return {name: recorded[-1] for name, recorded in values.items() if recorded}

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the prefix and all recorded values, to be saved with the run.

        A history that keeps more than that, or keeps it elsewhere, overrides this and `load_state_dict`.
        """
        # A set of strings has another order in every process; saved state must not.
        names = sorted(self.get_metric_names())
        return {
            "epoch": self.current_epoch,
            "prefix": self.metric_name_prefix,
            "metrics": {name: list(self.get_metric_values(name)) for name in names},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything by what `state_dict` returned; each value goes through `update_metric`."""
        # All three are looked up before anything is thrown away.
        epoch, prefix, metrics = state["epoch"], state["prefix"], state["metrics"]
        self.reset()
        # The names in the state are full names already, and a subclass's reset may keep the prefix.
        self.set_metric_name_prefix("")
        for name, values in metrics.items():
            for value in values:
                self.update_metric(name, value)
        self.set_metric_name_prefix(prefix)
        self._set_epoch(epoch)


class InMemoryRunHistory(RunHistory):
    """A run history that lives in memory."""

    def __init__(self) -> None:
        self._current_epoch = 1
        self._prefix = ""
        # No list in here is empty: a metric exists from its first value on.
        self._metrics: dict[str, list[Any]] = {}

    def get_metric_names(self) -> set[str]:
        """Return the names of all recorded metrics, as a set of the caller's own."""
        return set(self._metrics)

    def get_metric_values(self, metric_name: str) -> list[Any]:
        """Return every value recorded for a metric, oldest first, as a list of the caller's own."""
        return list(self._metrics.get(metric_name, ()))

    def get_latest_metric(self, metric_name: str) -> Any:
        """Return the value recorded last for a metric; ValueError if there is none."""
        if metric_name not in self._metrics:
            raise ValueError(f"No values have been recorded for the metric {metric_name}. {self._recorded_names()}")
        return self._metrics[metric_name][-1]

    def update_metric(self, metric_name: str, metric_value: Any) -> None:
        """Record one more value for a metric, under its name with the current prefix in front."""
        self._metrics.setdefault(f"{self._prefix}{metric_name}", []).append(metric_value)

    def delete_metric(self, metric_name: str) -> None:
        """Forget a metric and all of its values; KeyError if there are none."""
        if metric_name not in self._metrics:
            raise KeyError(f"There is no metric {metric_name} to delete. {self._recorded_names()}")
        del self._metrics[metric_name]

    def set_metric_name_prefix(self, prefix: str = "") -> None:
        """Set what `update_metric` puts in front of names from now on; nothing by default."""
        self._prefix = prefix

    @property
    def metric_name_prefix(self) -> str:
        """What `update_metric` puts in front of names."""
        return self._prefix

    @property
    def current_epoch(self) -> int:
        """The number of the epoch that is running, from 1; one more once its last event is over."""
        return self._current_epoch

    def _increment_epoch(self) -> None:
        self._current_epoch += 1

    def _set_epoch(self, epoch: int) -> None:
        self._current_epoch = epoch

    def reset(self) -> None:
        """Go back to epoch 1 with no metrics and no prefix."""
        self._current_epoch = 1
        self._prefix = ""
        self._metrics = {}

    def latest(self) -> dict[str, Any]:
        """Return the value recorded last for every metric, by name in alphabetical order."""
        return {name: self._metrics[name][-1] for name in sorted(self._metrics)}

    def _recorded_names(self) -> str:
        if not self._metrics:
            return "Nothing has been recorded yet."
        return f"Recorded so far: {', '.join(sorted(self._metrics))}."
