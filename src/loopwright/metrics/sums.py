"""What metrics keep of the samples: integer sums, exact sums of floats, or a few numbers per sample.

Each has `num_samples`, `merge`, `state_dict` and `load_state_dict`, and is independent of the order, the batch size and
the number of processes. An exact sum is one integer that counts units of 2**-1126; every finite double is a multiple
of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Numbers = NDArray[np.float64]

# A double is m * 2**e with 0.5 <= |m| < 1 and e >= -1073, so m * 2**53 units of 2**(e - 53) >= 2**-1126.
_MANTISSA_BITS = 53
_LOWEST_EXPONENT = -1073
_UNITS_PER_ONE = 1 << (_MANTISSA_BITS - _LOWEST_EXPONENT)
_HALF_BITS = 26


class Totals:
    """Integer sums over the samples; a batch may bring new sums."""

    def __init__(self, num_dimensions: int = 1) -> None:
        self.num_samples = 0
        self.sums: Counts = np.zeros((0,) * num_dimensions, dtype=np.int64)

    def add(self, num_samples: int, sums: Counts) -> None:
        self.num_samples += num_samples
        self.sums = padded_sum(self.sums, sums)

    def merge(self, other: Any) -> None:
        self.add(other.num_samples, other.sums)

    def state_dict(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, "totals": self.sums.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_samples = int(state["num_samples"])
        if len(state["totals"]):
            self.sums = np.asarray(state["totals"], dtype=np.int64)


class ExactSums:
    """Sums of floats over the samples, without rounding."""

    def __init__(self, num_sums: int) -> None:
        self.num_samples = 0
        self.sums = [ExactSum() for _ in range(num_sums)]

    def add(self, num_samples: int, summands: Iterable[Numbers]) -> None:
        """Add the summands of some samples: an array for each sum."""
        self.num_samples += num_samples
        for each, values in zip(self.sums, summands, strict=True):
            each.add(values)

    def merge(self, other: Any) -> None:
        self.num_samples += other.num_samples
        for mine, theirs in zip(self.sums, other.sums, strict=True):
            mine.merge(theirs)

    def state_dict(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, "sums": [each.state_dict() for each in self.sums]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_samples = int(state["num_samples"])
        for each, saved in zip(self.sums, state["sums"], strict=True):
            each.load_state_dict(saved)


class Rows:
    """A few named numbers of each sample."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._batches: list[Numbers] = []

    @property
    def num_samples(self) -> int:
        return sum(map(len, self._batches))

    @property
    def table(self) -> Numbers:
        """All rows: (samples, names)."""
        return np.concatenate([np.zeros((0, len(self._names))), *self._batches])

    def add(self, rows: Numbers) -> None:
        """Add the numbers of some samples: (samples, names)."""
        self._batches.append(rows)

    def merge(self, other: Any) -> None:
        self._batches += other._batches

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(self._names, self.table.T.tolist(), strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batches = [np.stack([np.asarray(state[name], dtype=np.float64) for name in self._names], axis=-1)]


class ExactSum:
    """A running sum of doubles that is rounded once, when it is read."""

    def __init__(self) -> None:
        self._units = 0
        self._non_finite = 0.0

    def add(self, values: Numbers) -> None:
        """Add every value; an infinite or nan value makes the sum so."""
        finite = np.isfinite(values)
        if not finite.all():
            with np.errstate(invalid="ignore"):  # inf - inf
                self._non_finite += float(values[~finite].sum())
            values = values[finite]
        if not values.size:
            return
        mantissas, exponents = np.frexp(values)
        whole = (mantissas * 2.0**_MANTISSA_BITS).astype(np.int64)
        first = int(exponents.min())
        # In two halves the sums of one exponent stay below 2**53 for 2**26 values, so bincount's doubles are exact.
        high = np.bincount(exponents - first, weights=whole >> _HALF_BITS)
        low = np.bincount(exponents - first, weights=whole & ((1 << _HALF_BITS) - 1))
        for index in np.flatnonzero((high != 0) | (low != 0)):
            shift = first + int(index) - _LOWEST_EXPONENT
            self._units += ((int(high[index]) << _HALF_BITS) + int(low[index])) << shift

    def merge(self, other: ExactSum) -> None:
        self._units += other._units
        self._non_finite += other._non_finite

    @property
    def is_finite(self) -> bool:
        return self._non_finite == 0.0

    @property
    def finite_part(self) -> Fraction:
        """The sum of the finite values, exactly."""
        return Fraction(self._units, _UNITS_PER_ONE)

    def mean(self, count: int | Fraction, scale: int = 1) -> float:
        """Return the sum over a count, times a scale, rounded once; nan if the count is 0."""
        if count == 0 or not self.is_finite:
            return self._non_finite if count else float("nan")
        return float(self.finite_part * scale / count)

    def state_dict(self) -> list[int | float]:
        """Return the state, in numbers that JSON keeps exactly."""
        return [self._units, self._non_finite]

    def load_state_dict(self, state: list[int | float]) -> None:
        self._units, self._non_finite = int(state[0]), float(state[1])


def padded_sum(first: Counts, second: Counts) -> Counts:
    """Return the sum of two arrays whose shapes may differ; missing values count as 0."""
    total = np.zeros(np.maximum(first.shape, second.shape), dtype=np.int64)
    for each in (first, second):
        total[tuple(map(slice, each.shape))] += each
    return total
