"""Calibration: whether a model that is 80 % confident is right 80 % of the time.

metric = metrics.load("ece", bins=15)
metric.add_batch(predictions=probabilities, references=classes)      # (samples, classes), (samples,)
metric.compute()    # {"ece": ...}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from loopwright.errors import ConfigError, DataError
from loopwright.metrics.base import Column, Columns, Metric, Options, as_column, as_matrix, without_torch
from loopwright.metrics.sums import ExactSums

_ROUNDING = 1e-6  # by which a softmax in 32 bits may exceed 1


def as_column_or_matrix(name: str, values: Any) -> Column:
    """Return the values as one number per sample, or as a row of numbers per sample if they are wider."""
    rows = values if hasattr(values, "shape") else [without_torch(each) for each in values]
    array = as_matrix(name, rows) if len(rows) and np.ndim(rows[0]) else as_column(name, rows)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{name} must be numbers, got an array of type {array.dtype}")
    return array.reshape(-1) if array.ndim == 2 and array.shape[1] == 1 else array


class ExpectedCalibrationError(Metric):
    """The gap between accuracy and mean confidence of each bin of confidences, weighted by bin size (Guo et al. 2017).

    The confidence is the probability of the predicted class. Predictions and references are rows of class probabilities
    and classes; or the probability of class 1 and 0 or 1; or, for several labels, rows of probabilities and rows of 0
    and 1, of which each counts. A label is predicted if its probability exceeds 0.5. The option `bins` is the number of
    bins of equal width; a confidence on an edge belongs to the lower bin. A probability that is nan makes the result
    nan. There is no interval: the estimate is biased upwards, so one around it would not cover.
    """

    name = "ece"
    greater_is_better = False
    forms: ClassVar = {"predictions": as_column_or_matrix, "references": as_column_or_matrix}
    options_apply_early = True
    defaults: ClassVar[Options] = {"bins": 15}

    def _known(self, options: Options) -> dict[str, Any]:
        bins = options.get("bins", 1)
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
            raise ConfigError(f"bins of {self.name} is a whole number from 1, got {bins!r}")
        return super()._known(options)

    def create_state(self) -> ExactSums:
        return ExactSums(self.options["bins"])  # of confidences less hits, by bin

    def as_columns(self, columns: Mapping[str, Any]) -> dict[str, Column]:
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

    def update(self, columns: Columns) -> None:
        if self.num_samples == 0:
            self.reset()  # `compute` may have brought another number of bins
        bins, confidences, hits = self.options["bins"], columns["confidences"], columns["hits"].astype(np.float64)
        places = np.searchsorted(np.arange(1, bins) / bins, confidences)
        members = (places == place for place in range(bins))
        self._state.add(len(hits), (np.concatenate([confidences[each], -hits[each]]) for each in members))

    def result(self, options: Options) -> dict[str, Any]:
        if not all(each.is_finite for each in self._state.sums):
            return {"ece": math.nan}
        return {"ece": float(sum(abs(each.finite_part) for each in self._state.sums) / self.num_samples)}
