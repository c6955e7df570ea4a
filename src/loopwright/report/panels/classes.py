"""Panels of classes: confusion matrix, most confused pairs, a table by class; for labels, pixels, choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from loopwright.report.blocks import Block, Matrix, Table
from loopwright.report.formatting import metric, percent
from loopwright.report.panels.collectors import Chosen, Collector, Surest, Values, histogram
from loopwright.report.panels.sample import is_right

_MOST_IN_MATRIX: Final = 30
_MOST_PAIRS: Final = 10
_MOST_CLASSES: Final = 60

Pairs = Mapping[tuple[str, str], int]


def matrix_of(pairs: Pairs, labels: Sequence[str], title: str = "Confusion matrix") -> list[Block]:
    """Return the matrix of (true, predicted) counts; with very many classes, those with the most mistakes."""
    if not pairs:
        return []
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
    counts = [[pairs.get((true, predicted), 0) for predicted in labels] for true in labels]
    return [Matrix(title, labels, counts, note)] if labels else []


def confused(pairs: Pairs, what: str = "samples") -> list[Block]:
    """Return the most frequently confused pairs of classes."""
    totals: Counter[str] = Counter()
    for (true, _), count in pairs.items():
        totals[true] += count
    wrong = Counter({pair: count for pair, count in pairs.items() if pair[0] != pair[1]})
    rows = [
        [true, predicted, count, percent(count / totals[true])]
        for (true, predicted), count in wrong.most_common(_MOST_PAIRS)
    ]
    return [Table("Most confused", ["true", "predicted as", what, "of the true"], rows)] if rows else []


def by_class(pairs: Pairs, labels: Sequence[str], what: str = "samples") -> list[Block]:
    """Return precision, recall and F1 per class, as scikit-learn counts them; a dash if undefined."""
    true_counts: Counter[str] = Counter()
    predicted_counts: Counter[str] = Counter()
    for (true, predicted), count in pairs.items():
        true_counts[true] += count
        predicted_counts[predicted] += count
    counts = [(label, pairs.get((label, label), 0), predicted_counts[label], true_counts[label]) for label in labels]
    return scores_table("By class", counts, what)


def scores_table(title: str, counts: Iterable[tuple[str, int, int, int]], what: str) -> list[Block]:
    """Return precision, recall and F1 from (label, hits, predicted, true); worst first if there are many."""
    entries: list[tuple[float, list[Any]]] = []
    for label, hits, predicted, true in counts:
        f1 = 2 * hits / (predicted + true) if predicted + true else None
        row = [
            label,
            metric(hits / predicted if predicted else None),
            metric(hits / true if true else None),
            metric(f1),
            true,
            predicted,
        ]
        entries.append((-1.0 if f1 is None else f1, row))
    note = ""
    if len(entries) > _MOST_CLASSES:
        note = f"the {_MOST_CLASSES} of {len(entries)} classes with the lowest F1"
        entries = sorted((entry for entry in entries if entry[0] >= 0), key=lambda entry: entry[0])[:_MOST_CLASSES]
    rows = [row for _, row in entries]
    columns = ["class", "precision", "recall", "F1", what, "predicted"]
    return [Table(title, columns, rows, note, bar=3)] if rows else []


class Labels(Collector):
    """Text and image classification: one label a sample; `names` are the labels in the model's order."""

    title = "Classes"
    score_name = "accuracy"

    def __init__(self, names: Sequence[str]) -> None:
        self._names = [str(name) for name in names]
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._losses: dict[str, list[float]] = {}
        self._sure, self._unsure = Values(), Values()
        self._mistakes = Surest()

    def add(self, sample: Mapping[str, Any]) -> None:
        """Count a sample."""
        true, predicted = str(sample["reference"]), str(sample["prediction"])
        self._pairs[true, predicted] += 1
        entry = self._losses.setdefault(true, [0, 0, 0.0])
        entry[0] += 1
        entry[1] += true == predicted
        entry[2] += float(sample.get("loss") or 0.0)
        (self._sure if true == predicted else self._unsure).add(sample.get("confidence"))
        if true != predicted:
            self._mistakes.add(sample)

    def score(self, sample: Mapping[str, Any]) -> float | None:
        """Return 1 for a correct prediction."""
        return float(sample["prediction"] == sample["reference"])

    def blocks(self) -> list[Block]:
        """Return the matrix, pairs, table, confidence, and the most confident mistakes."""
        labels = list(dict.fromkeys([*self._names, *sorted(label for pair in self._pairs for label in pair)]))
        sure = histogram(
            "How sure it was", [("right", self._sure), ("wrong", self._unsure)], "samples by the model's confidence"
        )
        mistakes = self._mistakes.block("Most confident mistakes")
        tables = [*matrix_of(self._pairs, labels), *confused(self._pairs), *by_class(self._pairs, labels)]
        return [*tables, *sure, *mistakes]

    def slices(self) -> list[Block]:
        """Return accuracy and mean loss of each true class, the lowest accuracy first."""
        rows = [
            [label, int(num), metric(right / num), metric(loss / num)]
            for label, (num, right, loss) in sorted(self._losses.items(), key=lambda item: item[1][1] / item[1][0])
        ]
        return [Table("By class", ["class", "samples", "accuracy", "mean loss"], rows[:_MOST_CLASSES])] if rows else []


class LabelSets(Collector):
    """Text classification with any number of labels a sample."""

    title = "Labels"
    score_name = "exact match"

    def __init__(self, names: Sequence[str]) -> None:
        self._counts: dict[str, list[int]] = {str(name): [0, 0, 0] for name in names}

    def add(self, sample: Mapping[str, Any]) -> None:
        """Count the labels of a sample."""
        true, predicted = set(map(str, sample["reference"])), set(map(str, sample["prediction"]))
        for label in sorted(true | predicted):
            entry = self._counts.setdefault(label, [0, 0, 0])
            entry[0] += label in true and label in predicted
            entry[1] += label in predicted
            entry[2] += label in true

    def score(self, sample: Mapping[str, Any]) -> float | None:
        """Return 1 if all labels are right."""
        return float(set(sample["prediction"]) == set(sample["reference"]))

    def blocks(self) -> list[Block]:
        """Return the table."""
        counts = ((label, entry[0], entry[1], entry[2]) for label, entry in self._counts.items())
        return scores_table("By label", counts, "samples")


class Choices(Collector):
    """Multiple choice: the chosen position, and the confidence."""

    title = "Choices"
    score_name = "accuracy"

    def __init__(self) -> None:
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._sure, self._unsure = Values(), Values()
        self._hits, self._misses = Chosen(), Chosen()

    def add(self, sample: Mapping[str, Any]) -> None:
        """Count a sample."""
        right = sample["prediction"] == sample["reference"]
        self._pairs[f"choice {sample['reference']}", f"choice {sample['prediction']}"] += 1
        (self._sure if right else self._unsure).add(sample.get("confidence"))
        (self._hits if right else self._misses).add(sample)

    def score(self, sample: Mapping[str, Any]) -> float | None:
        """Return 1 for a correct choice."""
        return float(bool(is_right(sample)))

    def blocks(self) -> list[Block]:
        """Return the positions, the confidence, and examples."""
        labels = sorted({label for pair in self._pairs for label in pair})
        sure = histogram("How sure it was", [("right", self._sure), ("wrong", self._unsure)])
        places = matrix_of(self._pairs, labels, "Which place was chosen")
        return [*places, *sure, *self._misses.block("Misses"), *self._hits.block("Hits")]


class Pixels(Collector):
    """Semantic segmentation: pixels of each class."""

    title = "Classes of pixels"
    score_name = "mean IoU"

    def __init__(self, names: Sequence[str]) -> None:
        self._names = [str(name) for name in names]
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._values = Values()

    def add(self, sample: Mapping[str, Any]) -> None:
        """Count the pixels of an image."""
        for true, row in sample["pixels"].items():
            for predicted, count in row.items():
                self._pairs[true, predicted] += count
        self._values.add(sample.get("iou"))

    def score(self, sample: Mapping[str, Any]) -> float | None:
        """Return the mean IoU of an image."""
        value = sample.get("iou")
        return float(value) if isinstance(value, (int, float)) else None

    def blocks(self) -> list[Block]:
        """Return IoU by class, the matrix, the pairs, and IoU by image."""
        labels = list(dict.fromkeys([*self._names, *sorted(label for pair in self._pairs for label in pair)]))
        rows: list[list[Any]] = []
        for label in labels:
            hits = self._pairs.get((label, label), 0)
            true = sum(count for (left, _), count in self._pairs.items() if left == label)
            predicted = sum(count for (_, right), count in self._pairs.items() if right == label)
            union = true + predicted - hits
            rows.append([label, metric(hits / union if union else None), metric(hits / true if true else None), true])
        table = Table("By class", ["class", "IoU", "accuracy", "pixels"], rows[:_MOST_CLASSES], bar=1)
        spread = histogram("Mean IoU by image", [("images", self._values)])
        return [table, *matrix_of(self._pairs, labels), *confused(self._pairs, "pixels"), *spread]
