"""Metrics of several labels per sample, and the confusion matrix of one.

Both have tables, one row per label. Call `table` before `compute`, which resets the metric.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopwright.errors import ConfigError, DataError
from loopwright.metrics.base import Column, CountingMetric, Metric, OptionsWhenAdding, as_matrix, check_same_kind, ratio
from loopwright.metrics.classification import label_columns
from loopwright.metrics.spans import score_row


class MultiLabel(OptionsWhenAdding, CountingMetric):
    """F1 over all decisions and averaged over the labels, and the share of samples with all labels right.

    Predictions and references have one row per sample and one column per label, of 0 and 1. With the option
    `threshold` predictions are scores, and those above it count as 1. The option `labels` names the columns in the
    table.
    """

    name = "multilabel"
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"threshold": None, "labels": None})

    def column(self, name: str, values: Any) -> Column:
        """Return one row per sample."""
        return as_matrix(name, values)

    def count(self, columns: Mapping[str, Column]) -> NDArray[np.int64]:
        """Return whether all labels are right, 1, and three counts per label: right, predicted, referred to."""
        predicted, referred = columns["predictions"], columns["references"]
        if not len(predicted):
            return np.zeros((0, len(self._totals)), dtype=np.int64)
        width = (len(self._totals) - 2) // 3 if self._num_samples else predicted.shape[1]
        names = self.options["labels"]
        for name, each in (("predictions", predicted), ("references", referred)):
            if each.shape[1] != width or (names is not None and len(names) != width):
                expected = width if names is None else len(names)
                raise DataError(
                    f"{name} of multilabel must have {expected} columns, got an array of shape {each.shape}"
                )
        if self.options["threshold"] is not None:
            predicted = predicted > self.options["threshold"]
        for name, each in (("predictions", predicted), ("references", referred)):
            if not ((each == 0) | (each == 1)).all():
                hint = ": give threshold= for scores" if name == "predictions" else ""
                raise DataError(f"{name} of multilabel must be 0 or 1, got {each[(each != 0) & (each != 1)][0]}{hint}")
        both = [(predicted * referred), predicted, referred]
        per_label = np.stack([each.astype(np.int64) for each in both], axis=-1).reshape(len(predicted), 3 * width)
        is_right = (predicted == referred).all(axis=1).astype(np.int64)
        return np.concatenate([np.stack([is_right, np.ones_like(is_right)], axis=-1), per_label], axis=-1)

    def score(self, totals: NDArray[np.int64], options: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
        """Return the scores; a label without predictions and references has an F1 of 0."""
        right, predicted, referred = np.moveaxis(totals[..., 2:].reshape(*totals.shape[:-1], -1, 3), -1, 0)
        return {
            "f1_micro": ratio(2 * right.sum(axis=-1), (predicted + referred).sum(axis=-1), 0.0),
            "f1_macro": ratio(2 * right, predicted + referred, 0.0).mean(axis=-1),
            "subset_accuracy": ratio(totals[..., 0], totals[..., 1], np.nan),
        }

    def table(self) -> list[dict[str, Any]]:
        """Return one row per label, in the order of the columns."""
        sums = self._totals[2:].reshape(-1, 3)
        names = self.options["labels"] or range(len(sums))
        return [score_row(name, *each) for name, each in zip(names, sums, strict=True)]


class ConfusionMatrix(Metric):
    """How often each label was predicted for each label, and the most frequent confusions.

    The result has the `labels` and the counts in `confusion_matrix`: a row for each reference, a column for each
    prediction. The option `labels` sets the labels and their order, instead of those that occur, sorted. It has no
    single number to compare models by.
    """

    name = "confusion_matrix"
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"labels": None})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._counts: Counter[tuple[Any, Any]] = Counter()

    @property
    def num_samples(self) -> int:
        """The number of samples since the last result."""
        return self._counts.total()

    def update(self, columns: Mapping[str, Column]) -> None:
        """Count the samples."""
        predictions, references = label_columns(columns)
        kinds = {isinstance(label, str) for label in (*next(iter(self._counts), ()), *predictions[:1].tolist())}
        if len(kinds) > 1:
            raise DataError("labels of confusion_matrix must all be numbers or all be texts")
        self._counts.update(zip(references.tolist(), predictions.tolist(), strict=True))

    def result(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the labels and the counts."""
        labels = self._labels(options["labels"])
        places = {label: place for place, label in enumerate(labels)}
        matrix = [[0] * len(labels) for _ in labels]
        for (reference, prediction), count in self._counts.items():
            matrix[places[reference]][places[prediction]] = count
        return {"confusion_matrix": matrix, "labels": labels}

    def most_confused(self, num_pairs: int = 10) -> list[dict[str, Any]]:
        """Return the most frequently confused pairs, with their share of the reference's samples."""
        referred: Counter[Any] = Counter()
        for (reference, _), count in self._counts.items():
            referred[reference] += count
        wrong = [(pair, count) for pair, count in self._counts.items() if pair[0] != pair[1]]
        wrong.sort(key=lambda each: (-each[1], each[0]))
        return [
            {"reference": pair[0], "prediction": pair[1], "count": count, "share": count / referred[pair[0]]}
            for pair, count in wrong[:num_pairs]
        ]

    def table(self) -> list[dict[str, Any]]:
        """Return one row per label: precision, recall, F1, and how often it was given and predicted."""
        result = self.result(self.options)
        counts = np.asarray(result["confusion_matrix"], dtype=np.int64)
        sums = zip(result["labels"], np.diag(counts), counts.sum(axis=0), counts.sum(axis=1), strict=True)
        return [score_row(*each) for each in sums]

    def reset(self) -> None:
        """Forget every sample."""
        self._counts = Counter()

    def merge(self, other: Any) -> None:
        """Merge another confusion matrix."""
        check_same_kind(self, other)
        self._counts.update(other._counts)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as [reference, prediction, count]."""
        return {"counts": [[*pair, count] for pair, count in self._counts.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts."""
        self._counts = Counter({(reference, prediction): count for reference, prediction, count in state["counts"]})

    def _labels(self, given: Any) -> list[Any]:
        seen = {label for pair in self._counts for label in pair}
        if given is None:
            return sorted(seen)
        labels: list[Any] = np.asarray(given).tolist()
        missing = sorted(seen - set(labels), key=str)
        if missing:
            raise ConfigError(f"labels of confusion_matrix lack {', '.join(map(repr, missing[:5]))}, which occur")
        return labels
