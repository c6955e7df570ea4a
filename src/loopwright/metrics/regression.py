"""Metrics of numbers: squared and absolute error, the coefficient of determination, two correlations.

Sums are kept without rounding (`ExactSum`), so a result has the same bits for every batch size, order and number of
processes. Spearman's correlation needs the ranks of all values and keeps them; the others keep a few sums.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar

import numpy as np

from loopwright.errors import DataError
from loopwright.metrics.base import Columns, Metric, Options
from loopwright.metrics.intervals import GROUPS, LEAST_ROWS, Bounds, correlation, hall, too_few
from loopwright.metrics.sums import Counts, ExactSums, Numbers, Rows


class PowerSums(ExactSums):
    """The sums of the values, of their squares and of their cubes, for one mean or several."""

    def __init__(self, num_means: int = 1) -> None:
        super().__init__(3 * num_means)

    def add_values(self, *values: Numbers) -> None:
        """Add the values of some samples: an array for each mean."""
        with np.errstate(over="ignore", under="ignore"):
            self.add(len(values[0]), [each**power for each in values for power in (1, 2, 3)])

    def means(self) -> list[float]:
        return [each.mean(self.num_samples) for each in self.sums[::3]]

    def intervals(self, level: float, groups: Mapping[int, Any] | None) -> list[Bounds | str]:
        """Return the interval of each mean; `groups` has a metric with such sums for each group of samples, if any."""
        others = None if groups is None else [each._state for each in groups.values()]
        return [self._interval(place, level, others) for place in range(len(self.sums) // 3)]

    def _interval(self, place: int, level: float, groups: list[PowerSums] | None) -> Bounds | str:
        number = self.num_samples
        first, second, third = (each.mean(number) for each in self.sums[3 * place : 3 * place + 3])
        num_units = number if groups is None else len(groups)
        if num_units < LEAST_ROWS:
            return too_few(num_units, LEAST_ROWS, "samples" if groups is None else GROUPS)
        if groups is None:
            variance, cubes = (second - first**2) / number, (third - 3 * first * second + 2 * first**3) / number**2
        else:
            rests = [(each.means()[place] - first) * each.num_samples for each in groups]
            variance, cubes = (math.fsum(rest**power for rest in rests) / number**power for power in (2, 3))
        return hall(first, variance, cubes, num_units, level)


class MeanError(Metric):
    """The mean of an error that a subclass defines; its powers are summed too, for the interval."""

    greater_is_better = False
    state = PowerSums

    @abstractmethod
    def errors(self, predictions: Numbers, references: Numbers) -> Numbers:
        """Return the error of each sample."""

    def update(self, columns: Columns) -> None:
        self._state.add_values(self.errors(*_numbers(columns)))

    def result(self, options: Options) -> dict[str, Any]:
        return {self.name: self._state.means()[0]}

    def own_interval(self, level: float, groups: Mapping[int, Any] | None = None) -> dict[str, Bounds | str]:
        return {self.name: self._state.intervals(level, groups)[0]}


class MeanSquaredError(MeanError):
    """The mean squared difference; with the option `squared=False` its root."""

    name = "mse"
    defaults: ClassVar[Options] = {"squared": True}

    def errors(self, predictions: Numbers, references: Numbers) -> Numbers:
        return np.square(predictions - references)

    def result(self, options: Options) -> dict[str, Any]:
        mean = super().result(options)["mse"]
        return {"mse": mean if options["squared"] else math.sqrt(mean)}

    def own_interval(self, level: float, groups: Mapping[int, Any] | None = None) -> dict[str, Bounds | str]:
        found = super().own_interval(level, groups)["mse"]
        if self.options["squared"] or isinstance(found, str):
            return {"mse": found}
        return {"mse": (math.sqrt(max(found[0], 0.0)), math.sqrt(max(found[1], 0.0)))}


class MeanAbsoluteError(MeanError):
    """The mean absolute difference."""

    name = "mae"

    def errors(self, predictions: Numbers, references: Numbers) -> Numbers:
        return np.abs(predictions - references)


class R2(Metric):
    """The coefficient of determination: 1 is perfect, 0 is no better than the mean; nan if all references are equal."""

    name = "r2"
    state = partial(ExactSums, 3)

    def update(self, columns: Columns) -> None:
        predictions, references = (columns[name].astype(np.float64) for name in ("predictions", "references"))
        self._state.add(len(references), [np.square(predictions - references), references, np.square(references)])

    def result(self, options: Options) -> dict[str, Any]:
        if not all(each.is_finite for each in self._state.sums):
            return {"r2": math.nan}
        errors, values, squares = (each.finite_part for each in self._state.sums)
        spread = squares - values * values / self.num_samples
        return {"r2": float(1 - errors / spread) if spread > 0 else math.nan}


class PearsonCorrelation(Metric):
    """Pearson's correlation; nan if one side is constant."""

    name = "pearsonr"
    state = partial(ExactSums, 5)

    def update(self, columns: Columns) -> None:
        """Add the values, their squares and their products; each product as an exact sum of two numbers."""
        x, y = _numbers(columns)
        self._state.add(len(x), [x, y, _product(x, x), _product(y, y), _product(x, y)])

    def result(self, options: Options) -> dict[str, Any]:
        if not all(each.is_finite for each in self._state.sums):
            return {"pearsonr": math.nan}
        x, y, xx, yy, xy = (each.finite_part for each in self._state.sums)
        n = self.num_samples
        return {"pearsonr": _correlation(n * xy - x * y, n * xx - x * x, n * yy - y * y)}

    def own_interval(self, level: float, groups: Mapping[int, Any] | None = None) -> dict[str, Bounds | str]:
        return _interval(self, level, groups)


class SpearmanCorrelation(Metric):
    """Spearman's correlation: Pearson's of the ranks, equal values sharing their mean rank.

    It keeps every value: 16 bytes per sample.
    """

    name = "spearmanr"
    state = partial(Rows, "predictions", "references")

    def update(self, columns: Columns) -> None:
        self._state.add(np.stack(_numbers(columns), axis=-1))

    def result(self, options: Options) -> dict[str, Any]:
        predictions, references = self._state.table.T
        if np.isnan(predictions).any() or np.isnan(references).any():
            return {"spearmanr": math.nan}
        x, y = centred_ranks(predictions), centred_ranks(references)
        return {"spearmanr": _correlation(_dot(x, y), _dot(x, x), _dot(y, y))}

    def own_interval(self, level: float, groups: Mapping[int, Any] | None = None) -> dict[str, Bounds | str]:
        return _interval(self, level, groups, is_of_ranks=True)


def _interval(
    metric: Metric, level: float, groups: Mapping[int, Metric] | None, *, is_of_ranks: bool = False
) -> dict[str, Bounds | str]:
    """Return the interval of a correlation; groups are left out in turn, at least a hundredth of them at a time."""
    [(name, value)] = metric.result(metric.options).items()
    if groups is None:
        return {name: correlation(value, metric.num_samples, level, is_of_ranks=is_of_ranks)}
    blocks = [type(metric)(**metric.options) for _ in range(min(100, len(groups)))]
    for place, (_, group) in enumerate(sorted(groups.items())):
        blocks[place % len(blocks)].merge(group)
    left: list[float] = []
    for block in blocks:
        others = type(metric)(**metric.options)
        for other in blocks:
            if other is not block:
                others.merge(other)
        left += others.result(metric.options).values() if others.num_samples else []
    limit = 1 - 0.5 / metric.num_samples
    transformed = np.arctanh(np.clip([each for each in left if math.isfinite(each)], -limit, limit))
    error = math.sqrt((len(transformed) - 1) * np.var(transformed)) if len(transformed) > 1 else 0.0
    return {name: correlation(value, len(groups), level, is_of_ranks=is_of_ranks, error=error)}


def _numbers(columns: Columns) -> tuple[Numbers, Numbers]:
    arrays = []
    for name in ("predictions", "references"):
        if columns[name].dtype.kind not in "biuf":
            raise DataError(f"{name} must be numbers, got an array of type {columns[name].dtype}")
        arrays.append(columns[name].astype(np.float64))
    return arrays[0], arrays[1]


def _product(first: Numbers, second: Numbers) -> Numbers:
    """Return the rounded products, followed by their rounding errors (Dekker 1971)."""
    with np.errstate(invalid="ignore", over="ignore"):
        products = first * second
        first_high, first_low = _halves(first)
        second_high, second_low = _halves(second)
        errors = first_high * second_high - products
        errors += first_high * second_low
        errors += first_low * second_high
        errors += first_low * second_low
    # Beyond about 1e300 the halves overflow; the rounded product is used there.
    errors[~np.isfinite(errors)] = 0.0
    return np.concatenate([products, errors])


def _halves(values: Numbers) -> tuple[Numbers, Numbers]:
    """Return two numbers of half the digits that sum to each value (Veltkamp's splitting, by 2**27 + 1)."""
    scaled = values * 134217729.0
    high = scaled - (scaled - values)
    return high, values - high


def centred_ranks(values: Numbers) -> Counts:
    """Return twice the rank of each value less its mean: integers, also for shared ranks."""
    _, codes, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    # Ranks of equal values go from last - count + 1 to last; twice their mean is 2 * last - count + 1.
    return (2 * last - counts + 1 - (len(values) + 1))[codes.reshape(-1)].astype(np.int64)


def _dot(first: Counts, second: Counts) -> int:
    """Return the sum of products as a Python integer; a chunk of 4096 products fits 64 bits up to 4e7 samples."""
    pieces = range(0, len(first), 4096)
    return sum(int(np.dot(first[start : start + 4096], second[start : start + 4096])) for start in pieces)


def _correlation(covariance: Fraction | int, first: Fraction | int, second: Fraction | int) -> float:
    if first <= 0 or second <= 0:
        return math.nan
    return math.copysign(math.sqrt(Fraction(covariance * covariance) / Fraction(first * second)), covariance)
