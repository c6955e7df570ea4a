"""Intervals on metrics by the Poisson bootstrap.

A bootstrap estimates how the metric would vary over other test sets of the same kind: it resamples with replacement,
many times. In the Poisson form each sample is drawn 0, 1, 2, ... times, independently of the others, so one pass is
enough: every replicate keeps its own sums. The draws of a sample follow from the seed, its position and the replicate,
so batch size, order and the number of processes change nothing.

    metric = metrics.Bootstrap(metrics.load("accuracy"))
    metric.add_batch(predictions=[1, 0, 1], references=[1, 0, 0], positions=[0, 1, 2])
    metric.interval(0.95)    # {"accuracy": (low, high)}
    metric.compute()         # {"accuracy": 0.666...}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwright.errors import ConfigError, DataError
from loopwright.keys import KeyStream
from loopwright.metrics.base import Column, Columns, Metric, as_column
from loopwright.metrics.intervals import Bounds, Intervals, Resampled
from loopwright.metrics.sums import padded_sum

# Numbers held at once for a chunk of a batch.
_CHUNK = 1 << 20


class Bootstrap:
    """A metric with an interval.

    Args:
        metric: a metric that is a function of counts or sums: accuracy, F1, precision, recall, Matthews' correlation,
            exact match, loss, perplexity, or a combination of them.
        replicates: how many times to resample.
        seed: another seed draws other samples.

    Raises:
        ConfigError: the metric needs all samples at once, or there are fewer than two replicates.
    """

    def __init__(self, metric: Metric, replicates: int = 1000, seed: int = 0) -> None:
        self.metric = metric
        self.parts = metric.counting_parts
        if not self.parts:
            raise ConfigError(f"there is no bootstrap of {metric.name}, which is not a function of counts")
        if replicates < 2:
            raise ConfigError(f"an interval needs at least 2 replicates, got {replicates}; 1000 is usual")
        self.replicates = replicates
        self.seed = seed
        self.reset()

    def add_batch(self, *, positions: Any = None, groups: Any = None, **columns: Any) -> None:
        """Add samples, as the metric's own `add_batch` does.

        Args:
            positions: the index of each sample in the dataset. Without them samples are numbered in order of arrival,
                which is right in a single process that sees all of them in order.
            groups: a whole number for each sample; samples with the same one are drawn together. Give it for rows that
                resemble each other, such as sentences of one document: they say less than as many independent rows.
            columns: the metric's columns.
        """
        arrays = self.metric.as_columns(columns)
        num_samples = len(next(iter(arrays.values())))
        if groups is not None:
            places = as_column("groups", groups)
        elif positions is None:
            places = np.arange(self.metric.num_samples, self.metric.num_samples + num_samples)
        else:
            places = as_column("positions", positions)
        if len(places) != num_samples or places.dtype.kind not in "iu":
            kind = "positions" if groups is None else "groups"
            raise DataError(f"{kind} must be one whole number for each of the {num_samples} samples")
        if groups is not None:
            self._groups.update(places.tolist())
        self.metric.update(arrays)
        width = max([self.replicates, *(totals.shape[-1] for totals in self._totals)])
        step = max(1, _CHUNK // width)
        for start in range(0, num_samples, step):
            chunk = slice(start, start + step)
            weights = poisson_weights(self.seed, places[chunk], self.replicates)
            weights = np.concatenate([np.ones_like(weights[:, :1]), weights], axis=1)
            self._count(weights, {name: array[chunk] for name, array in arrays.items()})

    def interval(self, level: float = 0.95) -> Intervals:
        """Return (low, high) of the results by name; those that the samples say too little about are in `missing`.

        Args:
            level: the share of the interval, between 0 and 1.
        """
        if not 0 < level < 1:
            raise ConfigError(f"the level of an interval is between 0 and 1, got {level}")
        if self.metric.num_samples == 0:
            raise DataError(f"{self.metric.name} has no samples: call add_batch first")
        found: dict[str, Bounds | str] = {}
        num_units = len(self._groups) or self.metric.num_samples
        for part, sums in zip(self.parts, self._totals, strict=True):
            sample = Resampled(sums[0], sums[1:][self._num_drawn[1:] > 0], num_units, bool(self._groups), level)
            found |= part.interval(sample)
        return Intervals(found)

    def compute(self, **options: Any) -> dict[str, Any]:
        """Return the metric's own result, and reset; call `interval` before."""
        result = self.metric.compute(**options)
        self.reset()
        return result

    def reset(self) -> None:
        """Forget every sample."""
        self.metric.reset()
        self._groups: set[int] = set()
        # The first row has the sums over all samples, each taken once.
        self._num_drawn = np.zeros(self.replicates + 1, dtype=np.int64)
        self._totals = [np.zeros((self.replicates + 1, 0), dtype=np.int64) for _ in self.parts]

    def merge(self, other: Bootstrap) -> None:
        """Merge another bootstrap with the same seed, for example from another process."""
        if (self.seed, self.replicates) != (other.seed, other.replicates):
            raise ConfigError(
                "only bootstraps with the same seed and number of replicates can be merged, got seeds "
                f"{self.seed} and {other.seed}, replicates {self.replicates} and {other.replicates}"
            )
        self.metric.merge(other.metric)
        self._groups |= other._groups
        self._num_drawn += other._num_drawn
        for index, (part, theirs) in enumerate(zip(self.parts, other.parts, strict=True)):
            self._totals[index] = padded_sum(self._totals[index], part.columns_of(other._totals[index], theirs))

    def state_dict(self) -> dict[str, Any]:
        """Return the metric's state and the replicates' sums."""
        return {
            "metric": self.metric.state_dict(),
            "groups": sorted(self._groups),
            "num_drawn": self._num_drawn.tolist(),
            "totals": [totals.tolist() for totals in self._totals],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.metric.load_state_dict(state["metric"])
        self._groups = set(state["groups"])
        self._num_drawn = np.asarray(state["num_drawn"], dtype=np.int64)
        self._totals = [np.asarray(totals, dtype=np.int64) for totals in state["totals"]]

    def _count(self, weights: NDArray[np.uint8], columns: Columns) -> None:
        self._num_drawn += weights.sum(axis=0, dtype=np.int64)
        for index, part in enumerate(self.parts):
            # Integers below 2**53: the product of doubles is exact, and much faster than one of integers.
            drawn = weights.T.astype(np.float64) @ part.count(columns).astype(np.float64)
            self._totals[index] = padded_sum(self._totals[index], np.rint(drawn).astype(np.int64))


def poisson_weights(seed: int, positions: Column, replicates: int) -> NDArray[np.uint8]:
    """Return how often each sample is drawn in each replicate: (samples, replicates), Poisson with mean 1.

    Each sample has its own generator, seeded by the key of (seed, "bootstrap", position). Each of its numbers of 64
    bits makes four draws.
    """
    stream = KeyStream(seed, purpose="bootstrap")
    keys = np.asarray([stream.at(position) for position in positions.tolist()], dtype=np.uint64)
    words = random_words(keys, range(-(-replicates // 4)))
    return np.asarray(_poisson_table()[words.astype("<u8").view("<u2")[:, :replicates]])


def random_words(keys: NDArray[np.uint64], steps: range) -> NDArray[np.uint64]:
    """Return these steps of each key's stream of random 64-bit words: (keys, steps)."""
    # SplitMix64 (Steele, Lea and Flood 2014): the state is incremented by a constant, and mixed.
    increments = np.arange(steps.start + 1, steps.stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = keys[:, None] + increments
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


@cache
def _poisson_table() -> NDArray[np.uint8]:
    """Return the Poisson number of mean 1 for each of 2**16 equal shares.

    In integers, since the last bit of exp differs between machines.
    """
    # 1/e is the sum of (-1)**k / k!; it is computed here in units of 1/30!, and 30! > 2**107.
    unit = math.factorial(30)
    terms = [unit // math.factorial(number) for number in range(31)]
    inverse_e = sum((-1) ** number * term for number, term in enumerate(terms))
    bounds = [(cumulated * inverse_e << 16) // unit**2 for cumulated in accumulate(terms[:20])]
    return np.searchsorted(np.asarray(bounds), np.arange(1 << 16), side="right").astype(np.uint8)
