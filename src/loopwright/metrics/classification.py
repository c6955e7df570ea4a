"""Metrics of labels, with scikit-learn's numbers: one label per sample, or several.

Labels are integers or texts. Most metrics keep three counts for each label seen: correct predictions, all predictions,
and references. Memory grows with the number of labels, not of samples. Those with a method `table` return one row per
label; call it before `compute`, which resets the metric.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopwright.errors import ConfigError, DataError
from loopwright.metrics import base
from loopwright.metrics.intervals import Bounds
from loopwright.metrics.regression import centred_ranks
from loopwright.metrics.sums import Counts, ExactSums, Rows, Totals

_ROUNDING = 1e-6  # by which a softmax in 32 bits may exceed 1
AVERAGES = ("binary", "micro", "macro", "weighted", None)
"""How scores of several labels become one: of the positive label, over all decisions, a mean, or none."""


class Accuracy(base.ShareMetric):
    """The share of correct predictions."""

    name = "accuracy"
    names = ("accuracy",)

    def hits(self, columns: base.Columns) -> list[base.Column]:
        predictions, references = label_columns(columns)
        return [np.asarray(predictions == references, dtype=np.bool_)]


class LabelTotals(Totals):
    """Three sums for each label seen: right, predicted, referred to."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[Any, int] = {}

    def place(self, label: Any) -> int:
        """Return the index of a label among the sums; a new label gets the next one."""
        return self.places.setdefault(label, len(self.places))

    def aligned(self, totals: Counts, other: LabelTotals) -> Counts:
        """Return sums by the labels of another state in the order of this one; new labels are appended."""
        places = [self.place(label) for label in other.places]
        placed = np.zeros((*totals.shape[:-1], len(self.places), 3), dtype=np.int64)
        counted = totals.reshape(*totals.shape[:-1], -1, 3)
        placed[..., places[: counted.shape[-2]], :] = counted
        return placed.reshape(*totals.shape[:-1], -1)

    def merge(self, other: Any) -> None:
        self.add(other.num_samples, self.aligned(other.sums, other))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "labels": list(self.places)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.places = {label: place for place, label in enumerate(state["labels"])}


class SumsPerLabel(base.CountingMetric):
    """A metric of three sums for each label seen."""

    state = LabelTotals

    @property
    def labels(self) -> list[Any]:
        """The labels seen, in the order of the sums."""
        return list(self._state.places)

    def columns_of(self, totals: Counts, other: Any) -> Counts:
        return np.asarray(self._state.aligned(totals, other._state))


class LabelMetric(SumsPerLabel):
    """A metric of samples with one label each."""

    limits: ClassVar[Bounds] = (0.0, 1.0)

    def update(self, columns: base.Columns) -> None:
        predicted, referred = self._coded(columns)
        sums = (predicted[predicted == referred], predicted, referred)
        counted = [np.bincount(codes, minlength=len(self.labels)) for codes in sums]
        self._state.add(len(predicted), np.stack(counted, axis=-1).reshape(-1))

    def count(self, columns: base.Columns) -> Counts:
        predicted, referred = self._coded(columns)
        samples = np.arange(len(predicted))
        counted = np.zeros((len(predicted), len(self.labels), 3), dtype=np.int64)
        counted[samples, predicted, 0] = predicted == referred
        counted[samples, predicted, 1] = 1
        counted[samples, referred, 2] = 1
        return counted.reshape(len(predicted), -1)

    def score(self, totals: Counts, options: base.Options) -> base.Scores:
        return {self.name: self.value(sums_by_kind(totals), options)}

    def num_per_class(self, totals: Counts) -> Counts:
        _, predicted, referred = sums_by_kind(totals)
        return np.asarray(referred[predicted + referred > 0])

    @abstractmethod
    def value(self, sums: Counts, options: base.Options) -> NDArray[np.float64]:
        """Return the result for sums of shape (3, ..., labels): right, predicted, referred to."""

    def _coded(self, columns: base.Columns) -> tuple[Counts, Counts]:
        """Return the index of each prediction's and each reference's label among the sums."""
        predictions, references = label_columns(columns)
        seen, codes = np.unique(np.concatenate([predictions, references]), return_inverse=True)
        check_same_type(self.name, self.labels, seen.tolist())
        places = np.asarray([self._state.place(label) for label in seen.tolist()], dtype=np.int64)
        coded = places[codes.reshape(-1)]
        return coded[: len(predictions)], coded[len(predictions) :]


class AveragedMetric(LabelMetric):
    """A ratio for each label, averaged into one number.

    Options, as in scikit-learn: `average` is one of `AVERAGES`; `pos_label` is the positive label of "binary";
    `labels` are the labels to use, instead of all that occur; `zero_division` is the score for a zero denominator,
    0 ("warn" means 0 too) or 1.
    """

    has_independent_parts = True
    defaults: ClassVar[base.Options] = {"average": "binary", "pos_label": 1, "labels": None, "zero_division": 0.0}

    def _known(self, options: base.Options) -> dict[str, Any]:
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
    def parts(self, right: Counts, predicted: Counts, referred: Counts) -> tuple[Counts, Counts]:
        """Return the numerator and the denominator of the ratio."""

    def result(self, options: base.Options) -> dict[str, Any]:
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

    def num_parts(self, totals: Counts) -> base.Scores:
        if self.options["average"] not in ("binary", "micro"):
            return {}
        right, predicted, referred = self._chosen(sums_by_kind(totals), self.options)[0].sum(axis=-1)
        denominator = self.parts(right, predicted, referred)[1]
        return {self.name: (denominator - right if self.micro_f1 else denominator).astype(np.float64)}

    def _chosen(self, sums: Counts, options: base.Options) -> tuple[Counts, bool]:
        """Return the sums of the labels that count, and whether the options name them."""
        chosen: list[Any] | None = [options["pos_label"]] if options["average"] == "binary" else options["labels"]
        if chosen is None:
            return sums[..., sorted(range(len(self.labels)), key=self.labels.__getitem__)], False
        sums = np.concatenate([sums, np.zeros_like(sums[..., :1])], axis=-1)  # of labels that do not occur
        return sums[..., [self._state.places.get(label, len(self.labels)) for label in chosen]], True

    def value(self, sums: Counts, options: base.Options) -> NDArray[np.float64]:
        average = options["average"]
        otherwise = 0.0 if options["zero_division"] == "warn" else float(options["zero_division"])
        sums, is_named = self._chosen(sums, options)
        is_counted = np.asarray(sums[1] + sums[2] > 0) | is_named
        right, predicted, referred = sums.sum(axis=-1) if average == "micro" else sums
        scores = base.ratio(*self.parts(right, predicted, referred), otherwise)
        if average == "macro":
            return base.ratio((scores * is_counted).sum(axis=-1), is_counted.sum(axis=-1), otherwise)
        if average == "weighted":
            # A plain mean if none of the labels has a reference.
            weights = np.where(referred.sum(axis=-1, keepdims=True) > 0, referred, 1)
            return base.ratio((scores * weights).sum(axis=-1), weights.sum(axis=-1), otherwise)
        return scores[..., 0] if average == "binary" else scores


class F1(AveragedMetric):
    """The harmonic mean of precision and recall."""

    name = "f1"
    micro_f1 = "f1"

    def parts(self, right: Counts, predicted: Counts, referred: Counts) -> tuple[Counts, Counts]:
        return 2 * right, predicted + referred


class Precision(AveragedMetric):
    """The share of a label's predictions that are correct."""

    name = "precision"

    def parts(self, right: Counts, predicted: Counts, referred: Counts) -> tuple[Counts, Counts]:
        return right, predicted


class Recall(AveragedMetric):
    """The share of the references to a label that were predicted."""

    name = "recall"

    def parts(self, right: Counts, predicted: Counts, referred: Counts) -> tuple[Counts, Counts]:
        return right, referred


class MatthewsCorrelation(LabelMetric):
    """Matthews' correlation of two or more labels; 0 if predictions or references are constant."""

    name = "matthews_correlation"
    limits = (-1.0, 1.0)

    def num_per_class(self, totals: Counts) -> Counts:
        """Return the number of references of each class; a single class leaves the correlation undefined."""
        counts = super().num_per_class(totals)
        return counts if len(counts) > 1 else np.zeros(1, dtype=np.int64)

    def value(self, sums: Counts, options: base.Options) -> NDArray[np.float64]:
        right, predicted, referred = sums
        # As doubles, which hold the squares of up to 9e7 samples exactly, and products of such squares nearly.
        samples = referred.sum(axis=-1).astype(np.float64)
        covariance = right.sum(axis=-1) * samples - (predicted * referred).sum(axis=-1)
        first, second = (samples**2 - np.square(each).sum(axis=-1) for each in (predicted, referred))
        return base.ratio(covariance, np.sqrt(first * second), 0.0)


class MultiLabel(base.CountingMetric):
    """F1 over all decisions and averaged over the labels, and the share of samples with all labels right.

    Predictions and references have one row per sample and one column per label, of 0 and 1. With the option
    `threshold` predictions are scores, and those above it count as 1. The option `labels` names the columns in the
    table.
    """

    name = "multilabel"
    limits = (0.0, 1.0)
    micro_f1 = "f1_micro"
    forms: ClassVar = {"predictions": base.as_matrix, "references": base.as_matrix}
    options_apply_early = True
    defaults: ClassVar[base.Options] = {"threshold": None, "labels": None}

    def count(self, columns: base.Columns) -> Counts:
        """Return whether all labels are right, 1, and three counts per label: right, predicted, referred to."""
        predicted, referred = columns["predictions"], columns["references"]
        if not len(predicted):
            return np.zeros((0, len(self._state.sums)), dtype=np.int64)
        width = (len(self._state.sums) - 2) // 3 if self.num_samples else predicted.shape[1]
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
        is_right = (predicted == referred).all(axis=1)
        return np.column_stack([is_right, np.ones_like(is_right), per_label]).astype(np.int64)

    def score(self, totals: Counts, options: base.Options) -> base.Scores:
        """Return the scores; a label without predictions and references has an F1 of 0."""
        right, predicted, referred = sums_by_kind(totals[..., 2:])
        return {
            "f1_micro": base.ratio(2 * right.sum(axis=-1), (predicted + referred).sum(axis=-1), 0.0),
            "f1_macro": base.ratio(2 * right, predicted + referred, 0.0).mean(axis=-1),
            "subset_accuracy": base.ratio(totals[..., 0], totals[..., 1], np.nan),
        }

    def num_parts(self, totals: Counts) -> base.Scores:
        right, predicted, referred = sums_by_kind(totals[..., 2:].astype(np.float64)).sum(axis=-1)
        return {"f1_micro": predicted + referred - right, "subset_accuracy": totals[..., 1].astype(np.float64)}

    def num_per_class(self, totals: Counts) -> Counts:
        return np.asarray(sums_by_kind(totals[2:])[2])

    def table(self) -> list[dict[str, Any]]:
        """Return one row per label, in the order of the columns."""
        sums = self._state.sums[2:].reshape(-1, 3)
        names = self.options["labels"] or range(len(sums))
        return [score_row(name, *each) for name, each in zip(names, sums, strict=True)]


def as_column_or_matrix(name: str, values: Any) -> base.Column:
    """Return the values as one number per sample, or as a row of numbers per sample if they are wider."""
    rows = values if hasattr(values, "shape") else [base.without_torch(each) for each in values]
    array = base.as_matrix(name, rows) if len(rows) and np.ndim(rows[0]) else base.as_column(name, rows)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{name} must be numbers, got an array of type {array.dtype}")
    return array.reshape(-1) if array.ndim == 2 and array.shape[1] == 1 else array


class RocAuc(base.Metric):
    """The area under the ROC curve: how often a positive sample scores higher than a negative one.

    Predictions are a row of scores per sample. References are the class of each sample, or a row of 0 and 1 for several
    labels. More than two classes give the mean over the classes, each against the rest. It keeps every score.
    """

    name = "auroc"
    state = partial(Rows, "scores", "references", "columns")
    forms: ClassVar = {
        "predictions": base.as_matrix,
        "references": lambda _, values: np.asarray(base.without_torch(values)),
    }

    @property
    def num_samples(self) -> int:
        return int((self._state.table[:, 2] == 0).sum())

    def update(self, columns: base.Columns) -> None:
        scores, references = columns["predictions"], columns["references"]
        if not len(scores):
            return
        if references.ndim == 1:
            references = references[:, None] == np.arange(max(scores.shape[1], 2))
            scores, references = (scores, references[:, -1:]) if scores.shape[1] == 1 else (scores, references)
            if scores.shape[1] == 2:
                scores, references = scores[:, 1:], references[:, 1:]
        if references.shape != scores.shape:
            raise DataError(f"auroc got scores of shape {scores.shape} and references of shape {references.shape}")
        places = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
        self._state.add(np.stack([each.reshape(-1) for each in (scores, references, places)], axis=-1).astype(float))

    def result(self, options: base.Options) -> dict[str, Any]:
        scores, references, places = self._state.table.T
        if np.isnan(scores).any():
            return {"auroc": math.nan}
        areas = []
        for place in np.unique(places):
            chosen = places == place
            is_positive = references[chosen] > 0
            positive, negative = int(is_positive.sum()), int((~is_positive).sum())
            if positive and negative:
                ranks = int(centred_ranks(scores[chosen])[is_positive].sum())  # twice the ranks, less their mean
                areas.append(0.5 + ranks / (2 * positive * negative))
        return {"auroc": sum(areas) / len(areas) if areas else math.nan}


class ExpectedCalibrationError(base.Metric):
    """The gap between accuracy and mean confidence of each bin of confidences, weighted by bin size (Guo et al. 2017).

    It tells whether a model that is 80 % confident is right 80 % of the time. The confidence is the probability of the
    predicted class. Predictions and references are rows of class probabilities and classes; or the probability of class
    1 and 0 or 1; or, for several labels, rows of probabilities and rows of 0 and 1, of which each counts. A label is
    predicted if its probability exceeds 0.5. The option `bins` is the number of bins of equal width; a confidence on an
    edge belongs to the lower bin. A probability that is nan makes the result nan. There is no interval: the estimate is
    biased upwards, so one around it would not cover.
    """

    name = "ece"
    greater_is_better = False
    forms: ClassVar = {"predictions": as_column_or_matrix, "references": as_column_or_matrix}
    options_apply_early = True
    defaults: ClassVar[base.Options] = {"bins": 15}

    def _known(self, options: base.Options) -> dict[str, Any]:
        bins = options.get("bins", 1)
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
            raise ConfigError(f"bins of {self.name} is a whole number from 1, got {bins!r}")
        return super()._known(options)

    def create_state(self) -> ExactSums:
        return ExactSums(self.options["bins"])  # of confidences less hits, by bin

    def as_columns(self, columns: Mapping[str, Any]) -> dict[str, base.Column]:
        """Return the "confidences" of all predictions, and "hits": whether they are right."""
        shares, true = super().as_columns(columns).values()
        is_of_classes = shares.ndim > true.ndim
        if len(shares) and not is_of_classes and shares.shape != true.shape:
            shapes = f"predictions of shape {shares.shape} and references of shape {true.shape}"
            raise DataError(f"{self.name} takes a class per row of probabilities, or 0 or 1 for each, got {shapes}")
        num_classes = shares.shape[1] if is_of_classes else 2
        is_odd, is_wrong = np.abs(shares - 0.5) > 0.5 + _ROUNDING, ~np.isin(true, np.arange(num_classes))
        if is_odd.any():
            shown = f"got {shares[is_odd][0]:g}: apply a softmax or a sigmoid first"
            raise DataError(f"predictions of {self.name} are probabilities from 0 to 1, {shown}")
        if is_wrong.any():
            shown = f"from 0 to {num_classes - 1}, got {true[is_wrong][0]}"
            raise DataError(f"references of {self.name} are classes {shown}")
        shares = shares.astype(np.float64)
        predicted = shares.argmax(axis=1) if is_of_classes else shares > 0.5
        confidences = shares.max(axis=1) if is_of_classes else np.where(predicted, shares, 1 - shares)
        return {"confidences": confidences.reshape(-1), "hits": (predicted == true).reshape(-1)}

    def update(self, columns: base.Columns) -> None:
        if self.num_samples == 0:
            self.reset()  # `compute` may have brought another number of bins
        bins, confidences, hits = self.options["bins"], columns["confidences"], columns["hits"].astype(np.float64)
        places = np.searchsorted(np.arange(1, bins) / bins, confidences)
        members = (places == place for place in range(bins))
        self._state.add(len(hits), (np.concatenate([confidences[each], -hits[each]]) for each in members))

    def result(self, options: base.Options) -> dict[str, Any]:
        if not all(each.is_finite for each in self._state.sums):
            return {"ece": math.nan}
        return {"ece": float(sum(abs(each.finite_part) for each in self._state.sums) / self.num_samples)}


class PairCounts(Counter[tuple[Any, Any]]):
    """How often each pair of a reference and a prediction occurred."""

    num_samples = property(Counter.total)
    merge = Counter.update

    def state_dict(self) -> dict[str, Any]:
        return {"counts": [[*pair, count] for pair, count in self.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.update({(reference, prediction): count for reference, prediction, count in state["counts"]})


class ConfusionMatrix(base.Metric):
    """How often each label was predicted for each label, and the most frequent confusions.

    The result has the `labels` and the counts in `confusion_matrix`: a row for each reference, a column for each
    prediction. The option `labels` sets the labels and their order, instead of those that occur, sorted. It has no
    single number to compare models by.
    """

    name = "confusion_matrix"
    state = PairCounts
    defaults: ClassVar[base.Options] = {"labels": None}

    def update(self, columns: base.Columns) -> None:
        predictions, references = label_columns(columns)
        check_same_type(self.name, next(iter(self._state), ()), predictions[:1].tolist())
        self._state.update(zip(references.tolist(), predictions.tolist(), strict=True))

    def result(self, options: base.Options) -> dict[str, Any]:
        labels = self._labels(options["labels"])
        places = {label: place for place, label in enumerate(labels)}
        matrix = [[0] * len(labels) for _ in labels]
        for (reference, prediction), count in self._state.items():
            matrix[places[reference]][places[prediction]] = count
        return {"confusion_matrix": matrix, "labels": labels}

    def most_confused(self, num_pairs: int = 10) -> list[dict[str, Any]]:
        """Return the most frequently confused pairs, with their share of the reference's samples."""
        referred: Counter[Any] = Counter()
        for (reference, _), count in self._state.items():
            referred[reference] += count
        wrong = [(pair, count) for pair, count in self._state.items() if pair[0] != pair[1]]
        wrong.sort(key=lambda each: (-each[1], each[0]))
        return [
            {"reference": pair[0], "prediction": pair[1], "count": count, "share": count / referred[pair[0]]}
            for pair, count in wrong[:num_pairs]
        ]

    def table(self) -> list[dict[str, Any]]:
        """Return one row per label: precision, recall, F1, and how often it was given and predicted."""
        result = self.result(self.options)
        counts = np.asarray(result["confusion_matrix"], dtype=np.int64)
        return [score_row(*each) for each in zip(result["labels"], *sums_of_matrix(counts), strict=True)]

    def _labels(self, given: Any) -> list[Any]:
        seen = {label for pair in self._state for label in pair}
        if given is None:
            return sorted(seen)
        labels: list[Any] = np.asarray(given).tolist()
        missing = sorted(seen - set(labels), key=str)
        if missing:
            raise ConfigError(f"labels of confusion_matrix lack {', '.join(map(repr, missing[:5]))}, which occur")
        return labels


def label_columns(columns: base.Columns) -> tuple[base.Column, base.Column]:
    """Return predictions and references as integers, or as texts."""
    predictions, references = (_label_array(name, columns[name]) for name in ("predictions", "references"))
    if len(predictions) and predictions.dtype != references.dtype:
        raise DataError(
            "predictions and references must both be numbers or both be texts, got "
            f"{predictions.tolist()[0]!r} and {references.tolist()[0]!r}"
        )
    return predictions, references


def _label_array(name: str, values: base.Column) -> base.Column:
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


def check_same_type(metric: str, seen: Iterable[Any], new: Iterable[Any]) -> None:
    """Refuse labels that are partly numbers and partly texts."""
    new = list(new)
    if len({isinstance(label, str) for label in (*seen, *new)}) > 1:
        raise DataError(f"labels of {metric} must all be numbers or all be texts, got {new[0]!r} after others")


def sums_by_kind(totals: Counts, num_kinds: int = 3) -> Counts:
    """Return sums of three per label, (..., 3 * labels), as (3, ..., labels): right, predicted, referred to."""
    return np.moveaxis(totals.reshape(*totals.shape[:-1], -1, num_kinds), -1, 0)


def sums_of_matrix(matrix: Counts) -> tuple[Counts, Counts, Counts]:
    """Return how often each label was right, predicted and referred to; the rows are references."""
    return np.diag(matrix), matrix.sum(axis=0), matrix.sum(axis=1)


def score_row(label: Any, right: Any, predicted: Any, referred: Any) -> dict[str, Any]:
    """Return a row of a label table: precision, recall, F1, and how often the label was given and predicted."""
    return {
        "label": label,
        "precision": int(right) / int(predicted) if predicted else 0.0,
        "recall": int(right) / int(referred) if referred else 0.0,
        "f1": 2 * int(right) / int(predicted + referred) if predicted + referred else 0.0,
        "num_references": int(referred),
        "num_predictions": int(predicted),
    }
