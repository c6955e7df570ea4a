"""Confidence intervals that cover: 95 % intervals contain the true value in about 95 % of all evaluations.

Shares are Agresti-Coull intervals, which never have width 0. Other scores between two limits are those of a share with
as many trials as their spread under resampling suggests. Means without limits follow Hall (1992), whose t interval is
corrected for skewness. `benchmarks/intervals.py` simulates the coverage.
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

LEAST_FOR_SHARES = 5
"""Fewer rows have no interval at all."""
LEAST_ROWS = 50
"""Fewer rows say too little about the spread of a score that is not a share."""
LEAST_PER_CLASS = 5
"""Fewer references of a class say too little about its part of a mean over classes."""
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
    """The sums of an evaluation, and those of its resamplings.

    Attributes:
        totals: the sums over all rows.
        replicates: the sums of each resampling, (replicates, sums).
        num_units: the number of rows, or of groups where rows come in groups, that are drawn independently.
        is_grouped: whether several rows may share a unit.
        level: of the interval, between 0 and 1.
    """

    totals: Counts
    replicates: Counts
    num_units: int
    is_grouped: bool
    level: float

    def too_few(self, least: int, per_class: Iterable[Any] = ()) -> str:
        """Return how many more rows or groups an interval would need; empty if there are enough.

        Args:
            least: the number of rows that are needed. Groups of rows are always `LEAST_ROWS`.
            per_class: the number of references of each class, if the result is a mean over classes.
        """
        unit, least = ("groups", LEAST_ROWS) if self.is_grouped else ("samples", least)
        if self.num_units < least:
            return f"at least {least} {unit} are needed, there are {self.num_units}"
        rarest = min(per_class, default=LEAST_PER_CLASS)
        if rarest >= LEAST_PER_CLASS:
            return ""
        needed = f"at least {LEAST_PER_CLASS} samples of each class are needed, the rarest has {int(rarest)}"
        return f"{needed}: about {math.ceil(self.num_units * LEAST_PER_CLASS / rarest)} {unit}" if rarest else needed

    def share(self, hits: Any, trials: Any) -> Bounds | str:
        """Return the interval of a share of independent trials (Agresti and Coull 1998)."""
        if not trials > 0:
            return UNDEFINED
        z = _z(self.level)
        size = float(trials) + z * z
        centre = (float(hits) + z * z / 2) / size
        half = z * math.sqrt(centre * (1 - centre) / size)
        return max(centre - half, 0.0), min(centre + half, 1.0)

    def f1(self, right: Any, predicted: Any, referred: Any) -> Bounds | str:
        """Return the interval of 2J / (1 + J), where J is the share of the right among all predicted or referred to."""
        return _f1_of(self.share(right, predicted + referred - right))

    def score(self, value: float, replicates: Numbers, parts: float = math.inf, *, is_f1: bool = False) -> Bounds | str:
        """Return the interval of a score between 0 and 1: that of a share with as many trials as the spread suggests.

        A little of a share's own spread is mixed in: resampling sees none if all rows are perfect. With few units,
        each is at most one trial.

        Args:
            value: of all rows.
            replicates: the value of each resampling.
            parts: how many things it is a share of, if they may be fewer than the rows.
            is_f1: whether the share is J of `f1`.
        """
        if is_f1:
            return _f1_of(self.score(value / (2 - value), replicates / (2 - replicates), parts))
        units = min(float(self.num_units), parts)
        if not math.isfinite(value) or units <= 0:
            return UNDEFINED
        spread = float(np.var(replicates[np.isfinite(replicates)]))
        own = 2 / units
        trials = (value * (1 - value) + own) / (spread + own / units)
        if units < LEAST_ROWS or spread == 0:
            trials = min(trials, units)
        return self.share(value * trials, trials)

    def mean(self, value: float, replicates: Numbers) -> Bounds | str:
        """Return the interval of a mean without limits."""
        if not math.isfinite(value) or not np.isfinite(replicates).all():
            return UNDEFINED
        deviations = replicates - replicates.mean()
        spread = float(np.sqrt(np.square(deviations).mean()))
        if spread <= 1e-12 * abs(value):
            return CONSTANT
        skewness = float((deviations**3).mean()) / spread**3
        spread *= math.sqrt(self.num_units / (self.num_units - 1))
        quantile = _t(self.level, self.num_units - 1)

        def unskewed(t: float) -> float:
            if abs(skewness) < 1e-6:
                return t
            return 3 / skewness * (float(np.cbrt(1 + skewness * (t - skewness / 6))) - 1)

        return value - spread * unskewed(quantile), value - spread * unskewed(-quantile)


def correlation(
    value: float, num_rows: int, level: float, *, is_of_ranks: bool = False, drawn: Numbers | None = None
) -> Bounds | str:
    """Return Fisher's interval of a correlation; that of ranks by Bonett and Wright (2000).

    Args:
        value: the correlation.
        num_rows: the number of rows, or of groups.
        level: of the interval, between 0 and 1.
        is_of_ranks: whether it is Spearman's.
        drawn: the correlation of each resampling, if rows come in groups: their spread replaces the formula.
    """
    unit, least = ("samples", LEAST_FOR_SHARES) if drawn is None else ("groups", LEAST_ROWS)
    if num_rows < least:
        return f"at least {least} {unit} are needed, there are {num_rows}"
    if not math.isfinite(value):
        return UNDEFINED
    limit = 1 - 0.5 / num_rows
    error = math.sqrt((1 + value * value / 2 if is_of_ranks else 1.0) / (num_rows - 3))
    if drawn is not None:
        error = float(np.std(np.arctanh(np.clip(drawn[np.isfinite(drawn)], -limit, limit)))) or error
    centre, half = math.atanh(min(max(value, -limit), limit)), _z(level) * error
    return min(math.tanh(centre - half), value), max(math.tanh(centre + half), value)


def _f1_of(bounds: Bounds | str) -> Bounds | str:
    return bounds if isinstance(bounds, str) else (2 * bounds[0] / (1 + bounds[0]), 2 * bounds[1] / (1 + bounds[1]))


def _z(level: float) -> float:
    return NormalDist().inv_cdf(0.5 + level / 2)


def _t(level: float, freedom: int) -> float:
    """Return a quantile of Student's t by its expansion in the normal one; exact to 1e-4 from 10 degrees on."""
    z = _z(level)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return float(z + sum(term / freedom**power for power, term in enumerate(terms, 1)))
