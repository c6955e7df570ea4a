"""The mean loss of samples of different lengths, and its exponential.

metric = metrics.load("perplexity")
metric.add_batch(sums=[12.5, 40.25], counts=[5, 16])   # of each text: sum over its tokens, number of tokens
metric.compute()                                       # {"loss": 52.75 / 21, "perplexity": exp(52.75 / 21)}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwright.errors import DataError
from loopwright.metrics.base import Column, CountingMetric
from loopwright.metrics.sums import ExactSum

# For intervals a sample's sum is rounded to a multiple of 2**-32 and split, so that totals fit 64 bits.
_UNITS_PER_ONE = 2.0**32
_LARGEST = 2.0**30
_LOW_BITS = 24


class MeanLoss(CountingMetric):
    """The sum of losses over their number of items, without intermediate rounding."""

    name = "loss"
    greater_is_better = False
    columns: tuple[str, ...] = ("sums", "counts")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._sum = ExactSum()
        self._count = 0

    def update(self, columns: Mapping[str, Column]) -> None:
        """Add the sums and the counts."""
        sums, counts = _checked(columns)
        self._num_samples += len(sums)
        self._sum.add(sums)
        self._count += int(counts.sum())

    def result(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the mean."""
        return self.results(self._sum.mean(self._count))

    def results(self, loss: Any) -> dict[str, Any]:
        """Return the results of a mean loss, or of an array of them."""
        return {"loss": loss}

    def count(self, columns: Mapping[str, Column]) -> NDArray[np.int64]:
        """Return each sample's sum in two parts, whether it is unusable, and its number of items."""
        sums, counts = _checked(columns)
        is_usable = np.abs(sums) < _LARGEST  # False for nan, too.
        units = np.rint(np.where(is_usable, sums, 0.0) * _UNITS_PER_ONE).astype(np.int64)
        parts = (units >> _LOW_BITS, units & ((1 << _LOW_BITS) - 1), ~is_usable, counts)
        return np.stack([part.astype(np.int64) for part in parts], axis=-1)

    def score(self, totals: NDArray[np.int64], options: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
        """Return the mean loss; nan if a sample was unusable."""
        high, low, num_unusable, items = np.moveaxis(totals, -1, 0)
        units = high * float(1 << _LOW_BITS) + low
        loss = np.full(units.shape, np.nan)
        np.divide(units / _UNITS_PER_ONE, items, out=loss, where=(items > 0) & (num_unusable == 0))
        return self.results(loss)

    def reset(self) -> None:
        """Forget every sample."""
        super().reset()
        self._sum = ExactSum()
        self._count = 0

    def merge(self, other: Any) -> None:
        """Merge another metric of the same kind."""
        super().merge(other)
        self._sum.merge(other._sum)
        self._count += other._count

    def state_dict(self) -> dict[str, Any]:
        """Return the sum and the counts."""
        return {**super().state_dict(), "sum": self._sum.state_dict(), "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sum and the counts."""
        super().load_state_dict(state)
        self._sum.load_state_dict(state["sum"])
        self._count = int(state["count"])


class Perplexity(MeanLoss):
    """The exponential of the mean loss, next to the loss itself; infinite if the loss is above about 709."""

    name = "perplexity"

    def results(self, loss: Any) -> dict[str, Any]:
        """Return the loss and the perplexity."""
        if isinstance(loss, float):
            return {"loss": loss, "perplexity": math.exp(loss) if not loss > 709 else math.inf}
        with np.errstate(over="ignore"):
            return {"loss": loss, "perplexity": np.exp(loss)}


def _checked(columns: Mapping[str, Column]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    sums, counts = columns["sums"], columns["counts"]
    if sums.dtype.kind not in "biuf" or counts.dtype.kind not in "iuf":
        raise DataError(f"sums and counts must be numbers, got arrays of type {sums.dtype} and {counts.dtype}")
    whole = counts.astype(np.int64)
    if not (whole == counts).all() or (whole < 0).any():
        raise DataError("counts must be whole numbers of items, and not negative")
    return sums.astype(np.float64), whole
