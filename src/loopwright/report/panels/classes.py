"""Panels of classes: confusion matrix, most confused pairs, a table by class; for labels, pixels, choices."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from loopwright.report.blocks import Block, Matrix, Table
from loopwright.report.formats import metric, percent
from loopwright.report.panels.collectors import Collector, Surest, in_order, label_counts
from loopwright.report.panels.sample import Sample, is_right

_MOST_IN_MATRIX: Final = 30
_MOST_PAIRS: Final = 10
_MOST_CLASSES: Final = 60

Pairs = Mapping[tuple[str, str], int]


def matrix_of(pairs: Pairs, labels: Sequence[str], title: str = "Confusion matrix") -> Matrix:
    """Return the matrix of (true, predicted) counts; with very many classes, those with the most mistakes."""
    note = "rows: true, columns: predicted"
    if len(labels) > _MOST_IN_MATRIX:
        mistakes: Counter[str] = Counter()
        for (true, predicted), count in pairs.items():
            if true != predicted:
                mistakes[true] += count
                mistakes[predicted] += count
        chosen = {label for label, _ in mistakes.most_common(_MOST_IN_MATRIX)}
        note += f"; the {len(chosen)} of {len(labels)} classes with the most mistakes"
        labels = [label for label in labels if label in chosen]
    counts = [[pairs.get((true, predicted), 0) for predicted in labels] for true in labels] if pairs else []
    return Matrix(title, labels, counts, note)


def confused(pairs: Pairs, unit: str = "samples") -> Table:
    totals = label_counts(pairs)
    wrong = Counter({pair: count for pair, count in pairs.items() if pair[0] != pair[1]})
    rows = [
        [true, predicted, count, percent(count / totals[true][2])]
        for (true, predicted), count in wrong.most_common(_MOST_PAIRS)
    ]
    return Table("Most confused", ["true", "predicted as", unit, "of the true"], rows)


def scores_table(title: str, counts: Iterable[tuple[str, Sequence[int]]], unit: str) -> Table:
    """Return precision, recall and F1 from (label, [right, predicted, true]); of very many, those of lowest F1."""
    entries: list[tuple[float, list[Any]]] = []
    for label, (right, predicted, true) in counts:
        f1 = 2 * right / (predicted + true) if predicted + true else None
        ratios = right / predicted if predicted else None, right / true if true else None, f1
        entries.append((-1.0 if f1 is None else f1, [label, *map(metric, ratios), true, predicted]))
    note = ""
    if len(entries) > _MOST_CLASSES:
        note = f"the {_MOST_CLASSES} of {len(entries)} classes with the lowest F1"
        entries = sorted((entry for entry in entries if entry[0] >= 0), key=lambda entry: entry[0])[:_MOST_CLASSES]
    columns = ["class", "precision", "recall", "F1", unit, "predicted"]
    return Table(title, columns, [row for _, row in entries], note, bar=3)


class Labels(Collector):
    """Text and image classification: one label a sample."""

    title = "Classes"
    score_name = "accuracy"
    score_of = staticmethod(is_right)

    def __init__(self, labels: Sequence[str] = ()) -> None:
        super().__init__(labels)
        self._losses: defaultdict[str, float] = defaultdict(float)
        self._mistakes = Surest(self.num_shown)

    def add(self, sample: Sample) -> None:
        true, predicted = str(sample["reference"]), str(sample["prediction"])
        self.pairs[true, predicted] += 1
        self._losses[true] += float(sample.get("loss") or 0.0)
        self.values["right" if true == predicted else "wrong"].add(sample.get("confidence"))
        self.calibration.add(sample.get("confidence"), true == predicted)
        if true != predicted:
            self._mistakes.add(sample)

    def blocks(self) -> list[Block]:
        labels, counts = in_order(self.labels, self.pairs), label_counts(self.pairs)
        return [
            matrix_of(self.pairs, labels),
            confused(self.pairs),
            scores_table("By class", ((label, counts.get(label, (0, 0, 0))) for label in labels), "samples"),
            self.histogram("Confidence", "right", "wrong", note="samples by the model's confidence in its prediction"),
            self.calibration.block(),
            self._mistakes.block("Most confident mistakes"),
        ]

    def slices(self) -> list[Block]:
        counts = label_counts(self.pairs)
        accuracies = {label: counts[label][0] / counts[label][2] for label in self._losses}
        rows = [
            [label, counts[label][2], metric(accuracies[label]), metric(self._losses[label] / counts[label][2])]
            for label in sorted(accuracies, key=accuracies.__getitem__)
        ]
        return [Table("By class", ["class", "samples", "accuracy", "mean loss"], rows[:_MOST_CLASSES])]


class LabelSets(Collector):
    """Text classification with any number of labels a sample."""

    title = "Labels"
    score_name = "exact match"
    score_of = staticmethod(lambda sample: set(sample["prediction"]) == set(sample["reference"]))

    def add(self, sample: Sample) -> None:
        true, predicted = set(map(str, sample["reference"])), set(map(str, sample["prediction"]))
        for label in sorted(true | predicted):
            entry = self.counts.setdefault(label, [0, 0, 0])
            for place, labels in enumerate((true & predicted, predicted, true)):
                entry[place] += label in labels
        for label, confidence in sample.get("confidences", {}).items():
            self.calibration.add(confidence, (label in predicted) == (label in true))

    def blocks(self) -> list[Block]:
        return [scores_table("By label", self.counts.items(), "samples"), self.calibration.block()]


class Choices(Collector):
    """Multiple choice: the chosen position, and the confidence."""

    title = "Choices"
    score_name = "accuracy"
    score_of = staticmethod(is_right)

    def add(self, sample: Sample) -> None:
        right = sample["prediction"] == sample["reference"]
        self.pairs[f"choice {sample['reference']}", f"choice {sample['prediction']}"] += 1
        self.values["right" if right else "wrong"].add(sample.get("confidence"))
        self.calibration.add(sample.get("confidence"), right)
        self.keep(sample, right)

    def blocks(self) -> list[Block]:
        matrix = matrix_of(self.pairs, in_order([], self.pairs), "Chosen positions")
        confidence = self.histogram("Confidence", "right", "wrong")
        examples = self.misses.block("Misses"), self.hits.block("Hits")
        return [matrix, confidence, self.calibration.block(), *examples]


class Pixels(Collector):
    """Semantic segmentation: pixels of each class."""

    title = "Classes of pixels"
    score_name = "mean IoU"
    score_of = "iou"

    def add(self, sample: Sample) -> None:
        for true, row in sample["pixels"].items():
            for predicted, count in row.items():
                self.pairs[true, predicted] += count
        self.values["images"].add(sample.get("iou"))

    def blocks(self) -> list[Block]:
        labels, counts = in_order(self.labels, self.pairs), label_counts(self.pairs)
        rows: list[list[Any]] = []
        for label in labels[:_MOST_CLASSES]:
            right, predicted, true = counts.get(label, (0, 0, 0))
            union = true + predicted - right
            rows.append([label, metric(right / union if union else None), metric(right / true if true else None), true])
        return [
            Table("By class", ["class", "IoU", "accuracy", "pixels"], rows, bar=1),
            matrix_of(self.pairs, labels),
            confused(self.pairs, "pixels"),
            self.histogram("Mean IoU by image", "images"),
        ]
