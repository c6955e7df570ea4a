"""Sums of floats without rounding.

Such a sum is independent of the order, the batch size and the number of processes. It is kept as one integer that
counts units of 2**-1126; every finite double is a multiple of one.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

# A double is m * 2**e with 0.5 <= |m| < 1 and e >= -1073, so m * 2**53 units of 2**(e - 53) >= 2**-1126.
_MANTISSA_BITS = 53
_LOWEST_EXPONENT = -1073
_UNITS_PER_ONE = 1 << (_MANTISSA_BITS - _LOWEST_EXPONENT)
_HALF_BITS = 26


class ExactSum:
    """A running sum of doubles that is rounded once, when it is read."""

    def __init__(self) -> None:
        self._units = 0
        self._non_finite = 0.0

    def add(self, values: NDArray[np.float64]) -> None:
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
        """Add the values of another sum."""
        self._units += other._units
        self._non_finite += other._non_finite

    @property
    def is_finite(self) -> bool:
        """Whether every value was."""
        return self._non_finite == 0.0

    @property
    def finite_part(self) -> Fraction:
        """The sum of the finite values, exactly."""
        return Fraction(self._units, _UNITS_PER_ONE)

    def mean(self, count: int, scale: int = 1) -> float:
        """Return the sum over a count, times a scale, rounded once; nan if the count is 0."""
        if count == 0 or not self.is_finite:
            return self._non_finite if count else float("nan")
        return float(self.finite_part * scale / count)

    def state_dict(self) -> list[int | float]:
        """Return the state, in numbers that JSON keeps exactly."""
        return [self._units, self._non_finite]

    def load_state_dict(self, state: list[int | float]) -> None:
        """Restore a state."""
        self._units, self._non_finite = int(state[0]), float(state[1])
