"""Curves of any length in bounded memory: each stretch keeps its lowest and highest point."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

# A curve this long is halved to its extremes, so memory does not grow with the run.
_MOST_POINTS = 1 << 17
_KEPT_STRETCHES = 1 << 14

Point = tuple[float, float]


class Mark(NamedTuple):
    """An event at an update, drawn across a chart."""

    kind: str  # a key of `charts.MARK_NAMES`
    update: float
    text: str
    colour: int | None = None  # of the run if a chart has several; None for the colour of the kind


class Series:
    """The values of one metric over the updates, in the order they were logged."""

    __slots__ = ("_num_old", "_num_summed", "_sum", "_updates", "_values")

    def __init__(self) -> None:
        self._updates = array("d")
        self._values = array("d")
        # Of the thinned values: their number, their sum, and the number of remaining points.
        self._num_summed, self._sum, self._num_old = 0, 0.0, 0

    def add(self, update: float, value: float) -> None:
        self._updates.append(update)
        self._values.append(value)
        if len(self._updates) >= _MOST_POINTS:
            self._sum += math.fsum(self._values[self._num_old :])
            self._num_summed += len(self._values) - self._num_old
            points = thinned(self._updates, self._values, _KEPT_STRETCHES)
            self._num_old = len(points)
            self._updates = array("d", (point[0] for point in points))
            self._values = array("d", (point[1] for point in points))

    def points(self, num_columns: int) -> list[Point]:
        """Return at most two points per pixel column, with both ends and the lowest and highest value of the run."""
        return thinned(self._updates, self._values, num_columns)

    def best(self, is_more_better: bool) -> Point | None:
        """Return the best value and its update, the earliest of equals; None without values."""
        if not self._values:
            return None
        value = max(self._values) if is_more_better else min(self._values)
        return self._updates[self._values.index(value)], value

    def mean(self) -> float | None:
        fresh = self._values[self._num_old :]
        total = self._num_summed + len(fresh)
        return (self._sum + math.fsum(fresh)) / total if total else None


def thinned(updates: Sequence[float], values: Sequence[float], num_columns: int) -> list[Point]:
    """Return the extremes of each of `num_columns` equal columns, in order, with the first and last point."""
    if any(later < earlier for earlier, later in zip(updates, updates[1:], strict=False)):
        pairs = sorted(zip(updates, values, strict=True), key=lambda pair: pair[0])
        updates, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    size = len(updates)
    if size <= 2 * num_columns:
        return list(zip(updates, values, strict=True))
    low, width = updates[0], (updates[-1] - updates[0]) / num_columns
    chosen = {0, size - 1}
    start = 0
    for column in range(num_columns):
        is_last = column == num_columns - 1
        end = size if is_last else bisect_right(updates, low + (column + 1) * width, start)
        if end > start:
            stretch = values[start:end]
            chosen.add(start + stretch.index(min(stretch)))
            chosen.add(start + stretch.index(max(stretch)))
        start = end
    return [(updates[index], values[index]) for index in sorted(chosen)]
