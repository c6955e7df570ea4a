"""Means: of scores between 0 and 1, and of losses of samples of different lengths.

metric = metrics.load("bits_per_byte")
metric.add_batch(sums=[12.5, 40.25], counts=[5, 16], num_bytes=[21, 70])   # of each text
metric.compute()    # {"loss": 52.75 / 21, "perplexity": exp(52.75 / 21), "bits_per_byte": 52.75 / log(2) / 91}
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from loopwright.errors import DataError
from loopwright.metrics.base import Column, Columns, CountingMetric, Options, Scores, ratio
from loopwright.metrics.intervals import Bounds, Resampled
from loopwright.metrics.sums import Counts, ExactSums, Numbers

UNITS_PER_ONE = 2.0**32
"""For intervals a value is rounded to a multiple of 2**-32, so that sums are whole numbers of 64 bits."""
# The sum of a sample's losses is split as well, so that totals fit 64 bits.
_LARGEST = 2.0**30
_LOW_BITS = 24


class MeanMetric(CountingMetric):
    """One or several means of scores between 0 and 1, summed without rounding.

    A subclass defines their names (`names`) and each sample's scores (`values`). Results go up to the upper of the
    `limits`, a whole number.
    """

    limits = (0.0, 1.0)

    @abstractmethod
    def values(self, columns: Columns) -> Numbers:
        """Return each sample's scores: (samples, names), between 0 and 1."""

    def create_state(self) -> ExactSums:
        return ExactSums(len(self.names))

    def update(self, columns: Columns) -> None:
        values = self.values(columns)
        self._state.add(len(values), values.T)

    def result(self, options: Options) -> dict[str, Any]:
        means = [each.mean(self.num_samples, int(self.limits[1])) for each in self._state.sums]
        return dict(zip(self.names, means, strict=True))

    def count(self, columns: Columns) -> Counts:
        units = np.rint(self.values(columns) * UNITS_PER_ONE).astype(np.int64)
        return np.concatenate([units, np.ones((len(units), 1), dtype=np.int64)], axis=-1)

    def score(self, totals: Counts, options: Options) -> Scores:
        means = ratio(totals[..., :-1] / UNITS_PER_ONE, totals[..., -1:], np.nan)
        return {name: self.limits[1] * means[..., index] for index, name in enumerate(self.names)}


class MeanLoss(CountingMetric):
    """The sum of losses over their number of items, without intermediate rounding.

    `sums` are the sums of each sample's losses, `counts` their numbers of items.

    Attributes:
        weights: the columns of whole numbers that a sum may be divided by.
        terms: the columns that are summed: "sums", the weights, and any others.
    """

    name = "loss"
    greater_is_better = False
    columns: tuple[str, ...] = ("sums", "counts")
    weights: ClassVar[tuple[str, ...]] = ("counts",)
    terms: ClassVar[tuple[str, ...]] = ("sums", "counts")

    def create_state(self) -> ExactSums:
        return ExactSums(len(self.terms))

    def update(self, columns: Columns) -> None:
        terms = self.checked(columns)
        self._state.add(len(terms["sums"]), (terms[name].astype(np.float64) for name in self.terms))

    def result(self, options: Options) -> dict[str, Any]:
        return self.results(self.mean("sums", "counts"))

    def mean(self, numerator: str, denominator: str) -> float:
        sums = dict(zip(self.terms, self._state.sums, strict=True))
        return float(sums[numerator].mean(sums[denominator].finite_part))

    def results(self, loss: Any) -> dict[str, Any]:
        """Return the results of a mean loss, or of an array of them."""
        return {"loss": loss}

    def count(self, columns: Columns) -> Counts:
        """Return each sample's sum in two parts, whether it is unusable, whether it has items, and its weights."""
        terms = self.checked(columns)
        sums, weights = terms["sums"], [terms[name] for name in self.weights]
        is_usable = np.abs(sums) < _LARGEST  # False for nan, too.
        units = np.rint(np.where(is_usable, sums, 0.0) * UNITS_PER_ONE).astype(np.int64)
        parts = (units >> _LOW_BITS, units & ((1 << _LOW_BITS) - 1), ~is_usable, weights[0] > 0, *weights)
        return np.stack([part.astype(np.int64) for part in parts], axis=-1)

    def score(self, totals: Counts, options: Options) -> Scores:
        high, low, num_unusable, _, items = np.moveaxis(totals[..., :5], -1, 0)
        units = high * float(1 << _LOW_BITS) + low
        loss = np.full(units.shape, np.nan)
        np.divide(units / UNITS_PER_ONE, items, out=loss, where=(items > 0) & (num_unusable == 0))
        return self.results(loss)

    def interval(self, sample: Resampled) -> dict[str, Bounds | str]:
        """Return the intervals; samples without items say nothing."""
        return super().interval(replace(sample, num_units=min(sample.num_units, int(sample.totals[3]))))

    def checked(self, columns: Columns) -> dict[str, Column]:
        terms = {name: columns[name] for name in self.terms}
        odd = [name for name, values in terms.items() if len(values) and values.dtype.kind not in "biuf"]
        if odd:
            raise DataError(f"{odd[0]} must be numbers, got an array of type {terms[odd[0]].dtype}")
        for name in self.weights:
            if (terms[name] < 0).any() or (terms[name] % 1 != 0).any():
                raise DataError(f"{name} must be whole numbers from 0")
        return {**terms, "sums": terms["sums"].astype(np.float64)}


class Perplexity(MeanLoss):
    """The exponential of the mean loss, next to the loss itself; infinite if the loss is above about 709."""

    name = "perplexity"

    def results(self, loss: Any) -> dict[str, Any]:
        if isinstance(loss, float):
            return {"loss": loss, "perplexity": math.exp(loss) if not loss > 709 else math.inf}
        with np.errstate(over="ignore"):
            return {"loss": loss, "perplexity": np.exp(loss)}

    def interval(self, sample: Resampled) -> dict[str, Bounds | str]:
        found = super().interval(sample)
        bounds = found["loss"]
        if not isinstance(bounds, str):
            bounds = math.exp(min(bounds[0], 709.0)), math.exp(min(bounds[1], 709.0))
        return {**found, "perplexity": bounds}


class BitsPerByte(Perplexity):
    """The loss in bits per byte of text, next to loss and perplexity.

    Unlike the other two it is comparable between tokenizers, and with a compressor. `sums` are the sums of the
    tokens' negative log-likelihoods (natural logarithm), `counts` the numbers of tokens, `num_bytes` the lengths of the
    texts in UTF-8.
    """

    name = "bits_per_byte"
    columns = ("sums", "counts", "num_bytes")
    weights = ("counts", "num_bytes")
    terms = columns

    def result(self, options: Options) -> dict[str, Any]:
        return {**super().result(options), "bits_per_byte": self.mean("sums", "num_bytes") / math.log(2)}

    def score(self, totals: Counts, options: Options) -> Scores:
        scores = super().score(totals, options)
        num_items, num_bytes = totals[..., -2], totals[..., -1]
        return {**scores, "bits_per_byte": ratio(scores["loss"] * num_items, num_bytes, np.nan) / math.log(2)}
