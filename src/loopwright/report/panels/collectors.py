"""Shared parts of the task panels: deterministic random samples, counts by length, histograms."""

from __future__ import annotations

import heapq
import math
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Final

from loopwright.report.blocks import Block, Examples, Histogram, Table
from loopwright.report.charts import ticks
from loopwright.report.formatting import metric
from loopwright.report.panels.sample import example

NUM_SHOWN: Final = 8
_NUM_SLICES: Final = 5
_NUM_BARS: Final = 24
_SAME: Final = 1e-6  # values with a smaller relative difference are one bar
_MOST_KEPT: Final = 20_000
_LENGTH_KEYS: Final = ("text", "text_pair", "question", "context", "source", "start")


class Collector(ABC):
    """Collects the predictions of an evaluation one by one, and makes its panel.

    Attributes:
        score_name: the name of `score`'s value in the tables by slice.
    """

    title = "Predictions"
    score_name = "mean loss"

    @abstractmethod
    def add(self, sample: Mapping[str, Any]) -> None:
        """Add a sample; called for each line of predictions.jsonl."""

    @abstractmethod
    def blocks(self) -> list[Block]:
        """Return the panel's blocks; called once, at the end."""

    def score(self, sample: Mapping[str, Any]) -> float | None:
        """Return a sample's score for the tables by slice; its loss unless a task has a better one."""
        value = sample.get("loss")
        return float(value) if isinstance(value, (int, float)) else None


class Chosen:
    """`size` samples from all over the data: those with the lowest position hash, so always the same."""

    def __init__(self, size: int = NUM_SHOWN) -> None:
        self._size = size
        self._heap: list[tuple[int, int, Mapping[str, Any]]] = []
        self._num_seen = 0

    def add(self, sample: Mapping[str, Any]) -> None:
        """Add a sample."""
        self._num_seen += 1
        entry = (-zlib.crc32(str(sample.get("position", self._num_seen)).encode()), -self._num_seen, sample)
        if len(self._heap) < self._size:
            heapq.heappush(self._heap, entry)
        elif entry[:2] > self._heap[0][:2]:
            heapq.heapreplace(self._heap, entry)

    def block(self, title: str) -> list[Block]:
        """Return the samples as a block, in data order; None if there are none."""
        ordered = sorted(self._heap, key=lambda entry: -entry[1])
        items = [example(sample) for _, _, sample in ordered]
        note = f"{len(items)} of {self._num_seen:,}" if self._num_seen > len(items) else ""
        return [Examples(title, items, note)] if items else []


class Surest:
    """The `size` samples with the highest confidence; their mistakes are the most informative."""

    def __init__(self, size: int = NUM_SHOWN) -> None:
        self._size = size
        self._heap: list[tuple[float, int, Mapping[str, Any]]] = []
        self._num_seen = 0

    def add(self, sample: Mapping[str, Any]) -> None:
        """Add a sample; one without a confidence is skipped."""
        confidence = sample.get("confidence")
        if not isinstance(confidence, (int, float)):
            return
        self._num_seen += 1
        entry = (float(confidence), -self._num_seen, sample)
        if len(self._heap) < self._size:
            heapq.heappush(self._heap, entry)
        elif entry[:2] > self._heap[0][:2]:
            heapq.heapreplace(self._heap, entry)

    def block(self, title: str) -> list[Block]:
        """Return the samples as a block, most confident first; None if there are none."""
        items = [example(sample) for _, _, sample in sorted(self._heap, key=lambda entry: entry[:2], reverse=True)]
        note = f"{len(items)} of {self._num_seen:,}" if self._num_seen > len(items) else ""
        return [Examples(title, items, note)] if items else []


class Values:
    """Numbers for a histogram; of very many, an evenly spaced part is kept."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._every = 1
        self._num_seen = 0

    def add(self, value: Any) -> None:
        """Add a number; other values are skipped."""
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return
        if self._num_seen % self._every == 0:
            self.values.append(float(value))
            if len(self.values) >= _MOST_KEPT:
                self.values = self.values[::2]
                self._every *= 2
        self._num_seen += 1


def histogram(title: str, groups: Sequence[tuple[str, Values]], note: str = "") -> list[Block]:
    """Return a histogram of groups of numbers over the same bars; None without numbers."""
    everything = [value for _, values in groups for value in values.values]
    if not everything:
        return []
    low, high = min(everything), max(everything)
    if high - low <= _SAME * max(abs(low), abs(high)):
        middle, is_share = float(f"{low:.6g}"), low >= 0 and high <= 1
        low, high = middle - 0.5, middle + 0.5
        low, high = (max(low, 0.0), min(high, 1.0)) if is_share else (low, high)
    inside = ticks(low, high, _NUM_BARS)
    step = inside[1] - inside[0] if len(inside) > 1 else high - low
    edges = [
        *([inside[0] - step] if inside[0] > low else []),
        *inside,
        *([inside[-1] + step] if inside[-1] < high else []),
    ]
    num_bars = len(edges) - 1
    counted = []
    for name, values in groups:
        counts = [0] * num_bars
        for value in values.values:
            counts[min(max(bisect_right(edges, value) - 1, 0), num_bars - 1)] += 1
        if values.values:
            counted.append((name, counts))
    return [Histogram(title, edges, counted, note)]


class ByLength:
    """The mean score of samples of similar length."""

    def __init__(self) -> None:
        self._counts: dict[int, list[float]] = {}
        self._unit = "characters"

    def add(self, sample: Mapping[str, Any], score: float | None) -> None:
        """Add a sample and its score."""
        length = self._length(sample)
        if length is None or score is None:
            return
        count = self._counts.setdefault(length, [0, 0.0])
        count[0] += 1
        count[1] += score

    def block(self, score_name: str) -> list[Block]:
        """Return the table of up to five slices of similar size; None if all samples have one length."""
        if len(self._counts) < 2:
            return []
        total = sum(count[0] for count in self._counts.values())
        rows: list[list[Any]] = []
        low, num, summed, passed = None, 0.0, 0.0, 0.0
        last = max(self._counts)
        for length in sorted(self._counts):
            low = length if low is None else low
            num += self._counts[length][0]
            summed += self._counts[length][1]
            if passed + num >= total * (len(rows) + 1) / _NUM_SLICES - 1e-9 or length == last:
                span = f"{low:,}" if low == length else f"{low:,} to {length:,}"
                rows.append([span, int(num), metric(summed / num)])
                passed, low, num, summed = passed + num, None, 0.0, 0.0
        return [Table(f"By length, in {self._unit}", ["length", "samples", score_name], rows)]

    def _length(self, sample: Mapping[str, Any]) -> int | None:
        if isinstance(sample.get("tokens"), list):
            self._unit = "words"
            return len(sample["tokens"])
        texts = [sample[key] for key in _LENGTH_KEYS if isinstance(sample.get(key), str)]
        return sum(map(len, texts)) if texts else None
