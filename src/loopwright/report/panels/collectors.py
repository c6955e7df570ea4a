"""Shared parts of the task panels: deterministic random samples, counts by length, histograms."""

from __future__ import annotations

import heapq
import math
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from loopwright.quantities import counted
from loopwright.report.blocks import Block, Examples, Facts, Histogram, Table
from loopwright.report.charts import ticks
from loopwright.report.formats import metric
from loopwright.report.panels.sample import Sample, example

_NUM_SLICES: Final = 5
_NUM_BARS: Final = 24
_NUM_BINS: Final = 15
_SAME: Final = 1e-6  # values with a smaller relative difference are one bar
_MOST_KEPT: Final = 20_000
_LENGTH_KEYS: Final = ("text", "text_pair", "question", "context", "source", "start")


class Collector(ABC):
    """Makes the panel of an evaluation: a subclass counts each sample in `add`, and returns its figures in `blocks`."""

    title = "Predictions"
    score_name = "mean loss"
    score_of: str | Callable[[Sample], Any] = "loss"  # a field of a sample, or a function of it
    num_shown = 8

    def __init__(self, labels: Sequence[str] = ()) -> None:
        self.labels = [str(label) for label in labels]
        self.pairs: Counter[tuple[str, str]] = Counter()  # of (true label, predicted label)
        self.counts = {label: [0, 0, 0] for label in self.labels}  # how often it was right, predicted and true
        self.numbers: Counter[str] = Counter()
        self.values: defaultdict[str, Values] = defaultdict(Values)  # of a histogram, by the name of their group
        self.hits, self.misses = Chosen(self.num_shown), Chosen(self.num_shown)
        self.calibration = Calibration()

    @abstractmethod
    def add(self, sample: Sample) -> None:
        """Add a sample; called for each line of predictions.jsonl."""

    @abstractmethod
    def blocks(self) -> list[Block]:
        """Return the panel's blocks, of which empty ones are not shown; called once, at the end."""

    def score(self, sample: Sample) -> float | None:
        """Return a sample's score for the tables by slice; None if it has none."""
        value = sample.get(self.score_of) if isinstance(self.score_of, str) else self.score_of(sample)
        return float(value) if isinstance(value, (int, float)) else None

    def slices(self) -> list[Block]:
        """Return the tables by slice that only this task has."""
        return []

    def keep(self, sample: Sample, is_hit: bool) -> None:
        (self.hits if is_hit else self.misses).add(sample)

    def histogram(self, title: str, *groups: str, note: str = "") -> Histogram:
        """Return a histogram of groups of values over the same bars; groups without numbers are left out."""
        present = {name: self.values[name].values for name in groups if self.values[name].values}
        return histogram(title, present, note)


class Chosen:
    """Up to `size` samples from all over the data: those with the lowest position hash, so always the same."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._heap: list[tuple[float, int, Sample]] = []
        self._num_seen = 0

    def add(self, sample: Sample) -> None:
        rank = self._rank(sample)
        if rank is not None:
            self._num_seen += 1
            add = heapq.heappush if len(self._heap) < self._size else heapq.heappushpop
            add(self._heap, (rank, -self._num_seen, sample))

    def block(self, title: str) -> Examples:
        items = [example(sample) for _, _, sample in self._ordered()]
        return Examples(title, items, f"{len(items)} of {self._num_seen:,}" if self._num_seen > len(items) else "")

    def _rank(self, sample: Sample) -> float | None:
        return -zlib.crc32(str(sample.get("position", self._num_seen + 1)).encode())

    def _ordered(self) -> list[tuple[float, int, Sample]]:
        return sorted(self._heap, key=lambda entry: -entry[1])


class Surest(Chosen):
    """The samples with the highest confidence, highest first; their mistakes are the most informative."""

    def _rank(self, sample: Sample) -> float | None:
        confidence = sample.get("confidence")
        return float(confidence) if isinstance(confidence, (int, float)) and math.isfinite(confidence) else None

    def _ordered(self) -> list[tuple[float, int, Sample]]:
        return sorted(self._heap, key=lambda entry: entry[:2], reverse=True)


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


def histogram(title: str, groups: Mapping[str, Sequence[float]], note: str = "") -> Histogram:
    if not groups:
        return Histogram(title, [], [], note)
    low, high = min(map(min, groups.values())), max(map(max, groups.values()))
    if high - low <= _SAME * max(abs(low), abs(high)):
        middle, is_share = float(f"{low:.6g}"), low >= 0 and high <= 1
        low, high = middle - 0.5, middle + 0.5
        low, high = (max(low, 0.0), min(high, 1.0)) if is_share else (low, high)
    inside = ticks(low, high, _NUM_BARS)
    step = inside[1] - inside[0] if len(inside) > 1 else high - low
    before, after = [inside[0] - step], [inside[-1] + step]
    edges = [*(before if inside[0] > low else []), *inside, *(after if inside[-1] < high else [])]
    last = len(edges) - 2
    counted = []
    for name, values in groups.items():
        counts = [0] * (last + 1)
        for value in values:
            counts[min(max(bisect_right(edges, value) - 1, 0), last)] += 1
        counted.append((name, counts))
    return Histogram(title, edges, counted, note)


class Calibration:
    """The accuracy of predictions by their confidence, in the bins of the metric "ece"."""

    def __init__(self) -> None:
        self._counts, self._hits, self._totals = [0] * _NUM_BINS, [0] * _NUM_BINS, [0.0] * _NUM_BINS

    def add(self, confidence: Any, is_right: bool) -> None:
        """Add a prediction; one without a confidence is skipped."""
        if isinstance(confidence, (int, float)) and confidence != 0:
            place = sum(confidence > edge / _NUM_BINS for edge in range(1, _NUM_BINS))
            self._counts[place] += 1
            self._hits[place] += is_right
            self._totals[place] += confidence

    def block(self) -> Block:
        """Return the reliability diagram, or why there is none; empty without confidences."""
        gaps = sum(abs(hits - total) for hits, total in zip(self._hits, self._totals, strict=True))
        if math.isnan(gaps):
            return Facts("Calibration", [("undefined", "some confidences are not numbers")])
        number = sum(self._counts)
        accuracies = [hits / max(count, 1) for hits, count in zip(self._hits, self._counts, strict=True)]
        note = "accuracy by confidence, with the number of predictions; the line is perfect calibration. "
        note += f"ECE {metric(gaps / max(number, 1))}: the mean distance from it, over {counted(number, 'prediction')}"
        edges = [place / _NUM_BINS for place in range(_NUM_BINS + 1)]
        return Histogram("Calibration", edges, [("accuracy", accuracies)] if number else [], note, self._counts)


class ByLength:
    """The mean score of samples of similar length."""

    def __init__(self) -> None:
        self._counts: dict[int, list[float]] = {}
        self._unit = "characters"

    def add(self, sample: Sample, score: float | None) -> None:
        length = self._length(sample)
        if length is not None and score is not None:
            count = self._counts.setdefault(length, [0, 0.0])
            count[0] += 1
            count[1] += score

    def block(self, score_name: str) -> Table:
        """Return the table of up to five slices of similar size; it is empty if all samples have one length."""
        rows: list[list[Any]] = []
        total = sum(count[0] for count in self._counts.values())
        low, num, summed, passed = None, 0.0, 0.0, 0.0
        last = max(self._counts, default=0)
        for length, count in sorted(self._counts.items()) if len(self._counts) > 1 else ():
            low = length if low is None else low
            num += count[0]
            summed += count[1]
            if passed + num >= total * (len(rows) + 1) / _NUM_SLICES - 1e-9 or length == last:
                span = f"{low:,}" if low == length else f"{low:,} to {length:,}"
                rows.append([span, int(num), metric(summed / num)])
                passed, low, num, summed = passed + num, None, 0.0, 0.0
        return Table(f"By length, in {self._unit}", ["length", "samples", score_name], rows)

    def _length(self, sample: Sample) -> int | None:
        if isinstance(sample.get("tokens"), list):
            self._unit = "words"
            return len(sample["tokens"])
        texts = [sample[key] for key in _LENGTH_KEYS if isinstance(sample.get(key), str)]
        return sum(map(len, texts)) if texts else None


def label_counts(pairs: Mapping[tuple[str, str], int]) -> dict[str, list[int]]:
    """Return how often each label was right, predicted and true, from counts of (true, predicted)."""
    counts: dict[str, list[int]] = {}
    for (true, predicted), count in pairs.items():
        counts.setdefault(true, [0, 0, 0])[2] += count
        counts.setdefault(predicted, [0, 0, 0])[1] += count
        counts[true][0] += count * (true == predicted)
    return counts


def in_order(names: Sequence[str], pairs: Mapping[tuple[str, str], int]) -> list[str]:
    """Return the names, followed by the other labels of (true, predicted) pairs, sorted."""
    return list(dict.fromkeys([*names, *sorted(label for pair in pairs for label in pair)]))
