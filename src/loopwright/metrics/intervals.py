"""Confidence intervals that cover: 95 % intervals contain the true value in about 95 % of all evaluations.

Shares get Agresti-Coull intervals (1998), which never have width 0. Other scores between two limits get those of a
share with as many trials as their spread under resampling suggests. Means without limits follow Hall (1992), whose t
interval is corrected for skewness. `benchmarks/intervals.py` simulates the coverage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from loopwright.metrics.sums import Counts, Numbers

Bounds = tuple[float, float]

LEAST_FOR_SHARES = 5  # fewer rows have no interval at all
LEAST_ROWS = 50  # fewer say too little about the spread of a score that is not a share
LEAST_UNITS = 30  # the same for units that a score depends on, such as rows with entities
LEAST_PER_CLASS = 5  # fewer references of a class say too little about its part of a mean over classes
GROUPS = "independent rows or groups"
UNDEFINED = "it is undefined on this data"
CONSTANT = "every sample has the same value"


class Intervals(dict[str, Bounds]):
    """(low, high) by the name of a result.

    Attributes:
        missing: for each result without an interval, why it has none.
    """

    def __init__(self, found: Mapping[str, Bounds | str] | None = None) -> None:
        super().__init__()
        self.missing: dict[str, str] = {}
        for name, each in (found or {}).items():
            if isinstance(each, str):
                self.missing[name] = each
            elif all(map(math.isfinite, each)) and each[0] < each[1]:
                self[name] = float(each[0]), float(each[1])
            else:
                self.missing[name] = UNDEFINED

    @property
    def entries(self) -> dict[str, Bounds | str]:
        """Both: bounds and reasons."""
        return {**self, **self.missing}


@dataclass(frozen=True)
class Resampled:
    """The sums of an evaluation, and those of its resamplings."""

    totals: Counts  # over all rows
    replicates: Counts  # of each resampling: (replicates, sums)
    num_units: int  # rows, or groups where rows come in groups, that are drawn independently
    is_grouped: bool  # whether several rows may share a unit
    level: float  # of the interval, between 0 and 1

    def too_few(self, least: int, per_class: Iterable[Any] = ()) -> str:
        """Return how many rows, groups or references of a class an interval would need; empty if there are enough."""
        unit = GROUPS if self.is_grouped else "samples"
        if self.num_units < least:
            return too_few(self.num_units, least, unit)
        rarest = min(per_class, default=LEAST_PER_CLASS)
        if rarest >= LEAST_PER_CLASS:
            return ""
        needed = f"at least {LEAST_PER_CLASS} samples of each class are needed, the rarest has {int(rarest)}"
        return f"{needed}: about {math.ceil(self.num_units * LEAST_PER_CLASS / rarest)} {unit}" if rarest else needed

    def score(
        self,
        value: float,
        replicates: Numbers,
        units: float = math.inf,
        limits: Bounds = (0.0, 1.0),
        *,
        is_f1: bool = False,
        trials: float | None = None,
    ) -> Bounds | str:
        """Return the interval of a score between limits: that of a share with as many trials as the spread suggests.

        A little of a share's own spread is mixed in: resampling sees none if all rows are perfect. With few units,
        each is at most one trial. An F1 is 2J / (1 + J), where J is the share of the right among all predicted or
        referred to. `units` are those that it depends on; `trials` are given if they are known.
        """
        low, high = limits
        value, replicates = (value - low) / (high - low), (replicates - low) / (high - low)
        if is_f1:
            value, replicates = value / (2 - value), replicates / (2 - replicates)
        units = min(float(self.num_units), units)
        if not math.isfinite(value) or units <= 0:
            return UNDEFINED
        spread = 0.0 if trials else float(np.var(replicates[np.isfinite(replicates)]))
        if spread:
            own = 2 / units
            trials = (value * (1 - value) + own) / (spread + own / units)
        trials = trials or units
        is_small = self.num_units < LEAST_ROWS or units < LEAST_UNITS
        trials = min(trials, units) if spread and is_small else trials
        z = _z(self.level)
        size = trials + z * z
        centre = (value * trials + z * z / 2) / size
        half = z * math.sqrt(max(centre * (1 - centre), 0.0) / size)
        # A perfect score may be a rounding error above its limit.
        ends = np.asarray([max(centre - half, min(value, 0.0)), min(centre + half, max(value, 1.0))])
        ends = low + (high - low) * (2 * ends / (1 + ends) if is_f1 else ends)
        return float(ends[0]), float(ends[1])

    def mean(self, value: float, replicates: Numbers) -> Bounds | str:
        """Return the interval of a mean without limits."""
        if not np.isfinite(replicates).all():
            return UNDEFINED
        deviations = replicates - replicates.mean()
        moments = float(np.square(deviations).mean()), float((deviations**3).mean())
        return hall(value, *moments, self.num_units, self.level)


def too_few(number: int, least: int, unit: str = "samples") -> str:
    """Return how many units an interval would need."""
    return f"at least {least} {unit} are needed, there are {number}"


def hall(value: float, variance: float, third: float, num_units: int, level: float) -> Bounds | str:
    """Return Hall's interval of a mean, by the second and third central moments of its distribution."""
    if not all(map(math.isfinite, (value, variance, third))):
        return UNDEFINED
    spread = math.sqrt(max(variance, 0.0))
    if spread <= 1e-12 * abs(value):
        return CONSTANT
    skewness = third / spread**3
    spread *= math.sqrt(num_units / (num_units - 1))
    quantile = _t(level, num_units - 1)

    def unskewed(t: float) -> float:
        if abs(skewness) < 1e-6:
            return t
        return 3 / skewness * (float(np.cbrt(1 + skewness * (t - skewness / 6))) - 1)

    return value - spread * unskewed(quantile), value - spread * unskewed(-quantile)


def equal_units(parts: float, drawn: Numbers) -> float:
    """Return how many units of one part each, or of equally many, would vary as much under resampling (Kish 1965)."""
    spread = float(np.var(drawn))
    return min(parts, parts**2 / spread) if spread else parts


def class_trials(counts: Any) -> float:
    """Return the trials of a share that varies as a mean over classes of equal accuracy, by their references."""
    return len(counts) ** 2 / float((1 / np.maximum(counts, 1)).sum()) if len(counts) else math.inf


def correlation(
    value: float, num_units: int, level: float, *, is_of_ranks: bool = False, error: float | None = None
) -> Bounds | str:
    """Return Fisher's interval of a correlation, for ranks Bonett and Wright's (2000).

    `error` is the standard error of its z if rows come in groups, which are then the units.
    """
    unit, least = ("samples", LEAST_FOR_SHARES) if error is None else (GROUPS, LEAST_ROWS)
    if num_units < least:
        return too_few(num_units, least, unit)
    if not math.isfinite(value):
        return UNDEFINED
    limit = 1 - 0.5 / num_units
    centre = math.atanh(min(max(value, -limit), limit))
    half = _z(level) * (error or math.sqrt((1 + value * value / 2 if is_of_ranks else 1.0) / (num_units - 3)))
    return min(math.tanh(centre - half), value), max(math.tanh(centre + half), value)


def _z(level: float) -> float:
    return NormalDist().inv_cdf(0.5 + level / 2)


def _t(level: float, freedom: int) -> float:
    """Return a quantile of Student's t by its expansion in the normal one; exact to 1e-4 from 10 degrees on."""
    z = _z(level)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return float(z + sum(term / freedom**power for power, term in enumerate(terms, 1)))
