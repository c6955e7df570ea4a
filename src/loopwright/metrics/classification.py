"""Metrics of labels: accuracy, F1, precision, recall and Matthews' correlation, with scikit-learn's numbers.

Labels are integers or texts. All but accuracy keep three counts for each label seen: correct predictions, all
predictions, and references. Memory grows with the number of labels, not of samples.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopwright.errors import ConfigError, DataError
from loopwright.metrics.base import Column, CountingMetric, ratio

AVERAGES = ("binary", "micro", "macro", "weighted", None)
"""How scores of several labels become one: of the positive label, over all decisions, a mean, or none."""


class Accuracy(CountingMetric):
    """The share of correct predictions."""

    name = "accuracy"

    def count(self, columns: Mapping[str, Column]) -> NDArray[np.int64]:
        """Return (is right, 1) for each sample."""
        predictions, references = label_columns(columns)
        is_right = np.asarray(predictions == references, dtype=np.int64)
        return np.stack([is_right, np.ones_like(is_right)], axis=-1)

    def score(self, totals: NDArray[np.int64], options: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
        """Return the share."""
        return {"accuracy": ratio(totals[..., 0], totals[..., 1], np.nan)}


class SumsPerLabel(CountingMetric):
    """A metric of three sums for each label seen: right, predicted, referred to."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._places: dict[Any, int] = {}

    @property
    def labels(self) -> list[Any]:
        """The labels seen, in the order of the sums."""
        return list(self._places)

    def place(self, label: Any) -> int:
        """Return the index of a label among the sums; a new label gets the next one."""
        return self._places.setdefault(label, len(self._places))

    def columns_of(self, totals: NDArray[np.int64], other: Any) -> NDArray[np.int64]:
        """Return another metric's sums, in the order of this one's labels; new labels are added."""
        places = [self.place(label) for label in other.labels]
        placed = np.zeros((*totals.shape[:-1], len(self._places), 3), dtype=np.int64)
        counted = totals.reshape(*totals.shape[:-1], -1, 3)
        placed[..., places[: counted.shape[-2]], :] = counted
        return placed.reshape(*totals.shape[:-1], -1)

    def reset(self) -> None:
        """Forget every sample and label."""
        super().reset()
        self._places = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and their labels."""
        return {**super().state_dict(), "labels": self.labels}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore sums and labels."""
        super().load_state_dict(state)
        self._places = {label: place for place, label in enumerate(state["labels"])}


class LabelMetric(SumsPerLabel):
    """A metric of samples with one label each."""

    def update(self, columns: Mapping[str, Column]) -> None:
        """Count the samples."""
        predicted, referred = self._coded(columns)
        num_labels = len(self._places)
        self._num_samples += len(predicted)
        counted = [
            np.bincount(codes, minlength=num_labels)
            for codes in (predicted[predicted == referred], predicted, referred)
        ]
        self._totals = np.stack(counted, axis=-1).reshape(-1) + np.pad(
            self._totals, (0, 3 * num_labels - len(self._totals))
        )

    def count(self, columns: Mapping[str, Column]) -> NDArray[np.int64]:
        """Return three numbers per label for each sample."""
        predicted, referred = self._coded(columns)
        samples = np.arange(len(predicted))
        counted = np.zeros((len(predicted), len(self._places), 3), dtype=np.int64)
        counted[samples, predicted, 0] = predicted == referred
        counted[samples, predicted, 1] = 1
        counted[samples, referred, 2] = 1
        return counted.reshape(len(predicted), -1)

    def score(self, totals: NDArray[np.int64], options: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
        """Return the result by name."""
        right, predicted, referred = np.moveaxis(totals.reshape(*totals.shape[:-1], -1, 3), -1, 0)
        return {self.name: self.value(right, predicted, referred, options)}

    @abstractmethod
    def value(
        self,
        right: NDArray[np.int64],
        predicted: NDArray[np.int64],
        referred: NDArray[np.int64],
        options: Mapping[str, Any],
    ) -> NDArray[np.float64]:
        """Return the result for counts of shape (..., labels)."""

    def _coded(self, columns: Mapping[str, Column]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the index of each prediction's and each reference's label among the sums."""
        predictions, references = label_columns(columns)
        seen, codes = np.unique(np.concatenate([predictions, references]), return_inverse=True)
        if len({isinstance(label, str) for label in [*self._places, *seen.tolist()]}) > 1:
            raise DataError(f"labels of {self.name} must all be numbers or all be texts, got {seen[0]!r} after others")
        places = np.asarray([self.place(label) for label in seen.tolist()], dtype=np.int64)
        coded = places[codes.reshape(-1)]
        return coded[: len(predictions)], coded[len(predictions) :]


class AveragedMetric(LabelMetric):
    """A ratio for each label, averaged into one number.

    Options, as in scikit-learn: `average` is one of `AVERAGES`; `pos_label` is the positive label of "binary";
    `labels` are the labels to use, instead of all that occur; `zero_division` is the score for a zero denominator,
    0 ("warn" means 0 too) or 1.
    """

    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"average": "binary", "pos_label": 1, "labels": None, "zero_division": 0.0}
    )

    def _known(self, options: Mapping[str, Any]) -> dict[str, Any]:
        if options.get("average") not in AVERAGES:
            names = ", ".join(map(repr, AVERAGES))
            raise ConfigError(f"average={options['average']!r} of {self.name} is not known: use one of {names}")
        if options.get("zero_division", 0) not in ("warn", 0, 1):
            raise ConfigError(f"zero_division of {self.name} is 0 or 1, got {options['zero_division']!r}")
        known = super()._known(options)
        if known.get("labels") is not None:
            known["labels"] = np.asarray(known["labels"]).tolist()
        return known

    @abstractmethod
    def parts(
        self, right: NDArray[np.int64], predicted: NDArray[np.int64], referred: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the numerator and the denominator of the ratio."""

    def result(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of the sums; raise if the average does not fit the labels that occurred."""
        if options["average"] == "binary":
            present, positive = sorted(self.labels, key=str), options["pos_label"]
            if len(present) > 2:
                raise ConfigError(
                    f"{self.name} with average='binary' is for two labels, but {len(present)} occur "
                    f"({', '.join(map(str, present[:5]))}{', ...' if len(present) > 5 else ''}): "
                    "give average='macro', 'micro', 'weighted' or None"
                )
            if len(present) == 2 and positive not in present:
                raise ConfigError(
                    f"pos_label={positive!r} of {self.name} does not occur: the labels are {present[0]!r} and "
                    f"{present[1]!r}"
                )
        return super().result(options)

    def value(
        self,
        right: NDArray[np.int64],
        predicted: NDArray[np.int64],
        referred: NDArray[np.int64],
        options: Mapping[str, Any],
    ) -> NDArray[np.float64]:
        """Return the averaged ratio, or one ratio per label for average=None."""
        average = options["average"]
        otherwise = 0.0 if options["zero_division"] == "warn" else float(options["zero_division"])
        chosen: list[Any] | None = [options["pos_label"]] if average == "binary" else options["labels"]
        if chosen is None:
            order = sorted(range(len(self._places)), key=self.labels.__getitem__)
        else:
            right, predicted, referred = (_with_zero_label(each) for each in (right, predicted, referred))
            order = [self._places.get(label, len(self._places)) for label in chosen]
        right, predicted, referred = (each[..., order] for each in (right, predicted, referred))
        is_counted = np.asarray(predicted + referred > 0) | (chosen is not None)
        if average == "micro":
            right, predicted, referred = (each.sum(axis=-1) for each in (right, predicted, referred))
        scores = ratio(*self.parts(right, predicted, referred), otherwise)
        if average == "macro":
            return ratio((scores * is_counted).sum(axis=-1), is_counted.sum(axis=-1), otherwise)
        if average == "weighted":
            # A plain mean if none of the labels has a reference.
            weights = np.where(referred.sum(axis=-1, keepdims=True) > 0, referred, 1)
            return ratio((scores * weights).sum(axis=-1), weights.sum(axis=-1), otherwise)
        return scores[..., 0] if average == "binary" else scores


class F1(AveragedMetric):
    """The harmonic mean of precision and recall."""

    name = "f1"

    def parts(
        self, right: NDArray[np.int64], predicted: NDArray[np.int64], referred: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return twice the correct ones, and all predicted and referred to."""
        return 2 * right, predicted + referred


class Precision(AveragedMetric):
    """The share of a label's predictions that are correct."""

    name = "precision"

    def parts(
        self, right: NDArray[np.int64], predicted: NDArray[np.int64], referred: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the correct ones, and all predicted."""
        return right, predicted


class Recall(AveragedMetric):
    """The share of the references to a label that were predicted."""

    name = "recall"

    def parts(
        self, right: NDArray[np.int64], predicted: NDArray[np.int64], referred: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the correct ones, and all referred to."""
        return right, referred


class MatthewsCorrelation(LabelMetric):
    """Matthews' correlation of two or more labels; 0 if predictions or references are constant."""

    name = "matthews_correlation"

    def value(
        self,
        right: NDArray[np.int64],
        predicted: NDArray[np.int64],
        referred: NDArray[np.int64],
        options: Mapping[str, Any],
    ) -> NDArray[np.float64]:
        """Return the covariance of the indicators of the labels over the roots of their variances."""
        # As doubles, which hold the squares of up to 9e7 samples exactly, and products of such squares nearly.
        samples = referred.sum(axis=-1).astype(np.float64)
        covariance = right.sum(axis=-1) * samples - (predicted * referred).sum(axis=-1)
        first, second = (samples**2 - np.square(each).sum(axis=-1) for each in (predicted, referred))
        return ratio(covariance, np.sqrt(first * second), 0.0)


def label_columns(columns: Mapping[str, Column]) -> tuple[Column, Column]:
    """Return predictions and references as integers, or as texts."""
    predictions, references = (_label_array(name, columns[name]) for name in ("predictions", "references"))
    if len(predictions) and predictions.dtype != references.dtype:
        raise DataError(
            "predictions and references must both be numbers or both be texts, got "
            f"{predictions.tolist()[0]!r} and {references.tolist()[0]!r}"
        )
    return predictions, references


def _label_array(name: str, values: Column) -> Column:
    if values.dtype.kind in "biu":
        return values.astype(np.int64)
    if values.dtype.kind == "f":
        if not np.equal(np.mod(values, 1), 0).all():
            odd = values[~np.equal(np.mod(values, 1), 0)][0]
            raise DataError(
                f"{name} must be labels, got {odd}: turn scores into labels first, by argmax or a threshold"
            )
        return values.astype(np.int64)
    if values.dtype.kind in "UO" and all(isinstance(each, str) for each in values.tolist()):
        return values.astype(object)
    raise DataError(f"{name} must be whole numbers or texts, got an array of type {values.dtype}")


def _with_zero_label(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([counts, np.zeros_like(counts[..., :1])], axis=-1)
