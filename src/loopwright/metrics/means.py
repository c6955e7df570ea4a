"""Metrics that average scores of the samples, each between 0 and 1."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopwright.metrics.base import Column, CountingMetric, ratio
from loopwright.metrics.sums import ExactSum

UNITS_PER_ONE = 2.0**32
"""For intervals a score is rounded to a multiple of 2**-32, so that sums are whole numbers of 64 bits."""


class MeanMetric(CountingMetric):
    """One or several means of scores between 0 and 1, summed without rounding.

    A subclass defines their names (`names`) and each sample's scores (`values`). Results are multiplied by `scale`.
    """

    scale: ClassVar[int] = 1

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._sums = [ExactSum() for _ in self.names]

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The keys of the result."""

    @abstractmethod
    def values(self, columns: Mapping[str, Column]) -> NDArray[np.float64]:
        """Return each sample's scores: (samples, names), between 0 and 1."""

    def update(self, columns: Mapping[str, Column]) -> None:
        """Add the samples' scores."""
        values = self.values(columns)
        self._num_samples += len(values)
        for index, each in enumerate(self._sums):
            each.add(values[:, index])

    def result(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the means."""
        means = [each.mean(self._num_samples, self.scale) for each in self._sums]
        return dict(zip(self.names, means, strict=True))

    def count(self, columns: Mapping[str, Column]) -> NDArray[np.int64]:
        """Return each sample's scores as integers, and 1."""
        units = np.rint(self.values(columns) * UNITS_PER_ONE).astype(np.int64)
        return np.concatenate([units, np.ones((len(units), 1), dtype=np.int64)], axis=-1)

    def score(self, totals: NDArray[np.int64], options: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
        """Return the means."""
        means = ratio(totals[..., :-1] / UNITS_PER_ONE, totals[..., -1:], np.nan)
        return {name: self.scale * means[..., index] for index, name in enumerate(self.names)}

    def reset(self) -> None:
        """Forget every sample."""
        super().reset()
        self._sums = [ExactSum() for _ in self.names]

    def merge(self, other: Any) -> None:
        """Merge another metric of the same kind."""
        super().merge(other)
        for mine, theirs in zip(self._sums, other._sums, strict=True):
            mine.merge(theirs)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of samples and the sums."""
        return {**super().state_dict(), "sums": [each.state_dict() for each in self._sums]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the number of samples and the sums."""
        super().load_state_dict(state)
        for each, saved in zip(self._sums, state["sums"], strict=True):
            each.load_state_dict(saved)
