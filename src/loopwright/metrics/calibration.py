"""Calibration: whether a model that is 80 % confident is right 80 % of the time.

metric = metrics.load("ece", bins=15)
metric.add_batch(predictions=probabilities, references=classes)      # (samples, classes), (samples,)
metric.table()      # a row per bin, for a reliability diagram; call it before `compute`
metric.compute()    # {"ece": ...}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from loopwright.errors import ConfigError, DataError
from loopwright.metrics.base import Column, Columns, Metric, Options, as_column, as_matrix, without_torch
from loopwright.metrics.sums import ExactSums

_ROUNDING = 1e-6  # by which a softmax in 32 bits may exceed 1


def as_column_or_matrix(name: str, values: Any) -> Column:
    """Return the values as one number per sample, or as a row of numbers per sample if they are wider."""
    values = without_torch(values)
    rows = values if isinstance(values, np.ndarray) else [without_torch(each) for each in values]
    array = as_matrix(name, rows) if len(rows) and np.ndim(rows[0]) else as_column(name, rows)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{name} must be numbers, got an array of type {array.dtype}")
    return array.reshape(-1) if array.ndim == 2 and array.shape[1] == 1 else array


class ExpectedCalibrationError(Metric):
    """The gap between accuracy and mean confidence of each bin of confidences, weighted by bin size (Guo et al. 2017).

    The confidence is the probability of the predicted class. Predictions and references are rows of class probabilities
    and classes; or the probability of class 1 and 0 or 1; or, for several labels, rows of probabilities and rows of 0
    and 1, of which each decision counts. A label is predicted if its probability exceeds 0.5. The option `bins` is the
    number of bins of equal width; a confidence on an edge belongs to the lower bin. A probability that is nan makes the
    result nan. There is no interval: the estimate is biased upwards, so one around it would not cover.
    """

    name = "ece"
    greater_is_better = False
    forms: ClassVar = {"predictions": as_column_or_matrix, "references": as_column_or_matrix}
    options_apply_early = True
    defaults: ClassVar[Options] = MappingProxyType({"bins": 15})

    def _known(self, options: Options) -> dict[str, Any]:
        known = super()._known(options)
        bins = known.get("bins", 1)
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
            raise ConfigError(f"bins of {self.name} is a whole number from 1, got {bins!r}")
        return known

    def create_state(self) -> ExactSums:
        return ExactSums(3 * self.options["bins"])  # for each bin: confidences, correct decisions, decisions

    def as_columns(self, columns: Mapping[str, Any]) -> dict[str, Column]:
        """Return "confidences" of the decisions about each sample, and "hits", whether they are right."""
        arrays = super().as_columns(columns)
        shares, true = arrays["predictions"].astype(np.float64), arrays["references"]
        is_odd = (shares < -_ROUNDING) | (shares > 1 + _ROUNDING)
        if is_odd.any():
            raise DataError(
                f"predictions of {self.name} are probabilities from 0 to 1, got {shares[is_odd][0]:g}: "
                "apply a softmax or a sigmoid first"
            )
        is_of_classes = shares.ndim == 2 and true.ndim == 1
        if len(shares) and not is_of_classes and shares.shape != true.shape:
            raise DataError(
                f"references of {self.name} must be a class per row of probabilities, or 0 or 1 per probability, got "
                f"predictions of shape {shares.shape} and references of shape {true.shape}"
            )
        num_classes = shares.shape[1] if is_of_classes else 2
        is_wrong = (true < 0) | (true >= num_classes) | (true % 1 != 0)
        if is_wrong.any():
            raise DataError(
                f"references of {self.name} are classes from 0 to {num_classes - 1}, got {true[is_wrong][0]}"
            )
        if is_of_classes:
            predicted = shares.argmax(axis=1)
            confidences = shares[np.arange(len(shares)), predicted]
        else:
            predicted = shares > 0.5
            confidences = np.where(predicted, shares, 1 - shares)
        return {"confidences": confidences, "hits": predicted == true}

    def update(self, columns: Columns) -> None:
        num_samples, bins = len(columns["confidences"]), self.options["bins"]
        if self.num_samples == 0:
            self.reset()  # `compute` may have brought another number of bins
        confidences, hits = (columns[name].astype(np.float64).reshape(-1) for name in ("confidences", "hits"))
        places = np.searchsorted(np.arange(1, bins) / bins, confidences)
        members = [places == place for place in range(bins)]
        parts = ((confidences[each], hits[each], np.ones(each.sum())) for each in members)
        self._state.add(num_samples, (column for part in parts for column in part))

    def result(self, options: Options) -> dict[str, Any]:
        gaps, num_decisions = 0, 0
        for confidence, hits, count in self._bins():
            if not confidence.is_finite:
                return {"ece": math.nan}
            gaps += abs(confidence.finite_part - hits.finite_part)
            num_decisions += count.finite_part
        return {"ece": float(gaps / num_decisions) if num_decisions else math.nan}

    def table(self) -> list[dict[str, Any]]:
        """Return a row per bin: edges, number of decisions, mean confidence and accuracy; nan without any."""
        width = self.options["bins"]
        return [
            {
                "low": place / width,
                "high": (place + 1) / width,
                "count": int(count.finite_part),
                "confidence": confidence.mean(count.finite_part),
                "accuracy": hits.mean(count.finite_part),
            }
            for place, (confidence, hits, count) in enumerate(self._bins())
        ]

    def _bins(self) -> list[tuple[Any, ...]]:
        return list(zip(*[iter(self._state.sums)] * 3, strict=True))
