"""The area under the ROC curve, and the coefficient of determination."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from loopwright.errors import DataError
from loopwright.metrics import base
from loopwright.metrics.regression import centred_ranks
from loopwright.metrics.sums import ExactSums, Rows


class RocAuc(base.Metric):
    """The area under the ROC curve: how often a positive sample scores higher than a negative one.

    Predictions are a row of scores per sample. References are the class of each sample, or a row of 0 and 1 for several
    labels. More than two classes give the mean over the classes, each against the rest. It keeps every score.
    """

    name = "auroc"
    forms: ClassVar = {"predictions": base.as_matrix, "references": lambda _, values: _array(values)}

    @property
    def num_samples(self) -> int:
        return int((self._state.table[:, 2] == 0).sum())

    def create_state(self) -> Rows:
        return Rows("scores", "references", "columns")

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


class R2(base.Metric):
    """The coefficient of determination: 1 is perfect, 0 is no better than the mean; nan if all references are equal."""

    name = "r2"

    def create_state(self) -> ExactSums:
        return ExactSums(3)

    def update(self, columns: base.Columns) -> None:
        predictions, references = (columns[name].astype(np.float64) for name in ("predictions", "references"))
        self._state.add(len(references), [np.square(predictions - references), references, np.square(references)])

    def result(self, options: base.Options) -> dict[str, Any]:
        if not all(each.is_finite for each in self._state.sums):
            return {"r2": math.nan}
        errors, values, squares = (each.finite_part for each in self._state.sums)
        spread = squares - values * values / self.num_samples
        return {"r2": float(1 - errors / spread) if spread > 0 else math.nan}


def _array(values: Any) -> base.Column:
    return np.asarray(base.without_torch(values))
