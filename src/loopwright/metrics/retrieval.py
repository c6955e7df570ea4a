"""Metrics of embeddings: recall at k, reciprocal rank and NDCG of retrieval, Spearman's correlation of cosines.

metric = metrics.load("retrieval", ks=(1, 10))
for start, rows in metrics.similarity_rows(queries, pool):     # some queries at a time, against the whole pool
    metric.add_batch(predictions=rows, references=right_ones[start : start + len(rows)])
metric.compute()    # {"recall@1": ..., "recall@10": ..., "mrr": ..., "ndcg@10": ...}
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopwright.errors import ConfigError, DataError
from loopwright.metrics.base import Column, Columns, Options, as_integers, as_ks, as_matrix
from loopwright.metrics.means import MeanMetric
from loopwright.metrics.regression import SpearmanCorrelation
from loopwright.metrics.sums import Numbers


class Retrieval(MeanMetric):
    """The share of queries whose right item is among the first k, for each k of the option `ks`, and the mean 1 / rank.

    `ndcg@k`, for the largest k, is the normalized discounted cumulative gain: with a single right item, the mean
    1 / log2(1 + rank), where ranks beyond k count as 0. Predictions are the similarities of each query to the items of
    a pool, one row per query; references are the columns of the right items. In a batch of pairs the pool is the batch,
    and the references are 0, 1, 2, ... Ties rank before the right item, so constant similarities score 0.
    """

    name = "retrieval"
    forms: ClassVar = {"predictions": as_matrix, "references": as_integers}
    options_apply_early = True
    defaults: ClassVar[Options] = {"ks": (1, 5, 10)}

    @property
    def names(self) -> tuple[str, ...]:
        return (*(f"recall@{k}" for k in self.options["ks"]), "mrr", f"ndcg@{max(self.options['ks'])}")

    def _known(self, options: Options) -> dict[str, Any]:
        return as_ks(self.name, super()._known(options))

    def compute(self, **given: Any) -> dict[str, Any]:
        if "ks" in given:  # they decide what is kept, before any query is added
            raise ConfigError("ks of retrieval apply when queries are added: pass them to load('retrieval', ks=...)")
        return super().compute(**given)

    def values(self, columns: Columns) -> Numbers:
        similarities, places = columns["predictions"], columns["references"]
        size = similarities.shape[1]
        if ((places < 0) | (places >= size)).any():
            wrong = places[(places < 0) | (places >= size)][0]
            raise DataError(f"references of retrieval are indices into rows of {size} similarities, got {wrong}")
        right = similarities[np.arange(len(places)), places]
        # Counted from below, so that ties and nan come before the right one.
        ranks = size - (similarities < right[:, None]).sum(axis=1)
        # From a table, since the last bit of numpy's logarithm may depend on the length of the array.
        table = [1 / math.log2(1 + rank) for rank in range(1, max(self.options["ks"]) + 1)]
        gains = np.asarray([*table, 0.0])[np.minimum(ranks, len(table) + 1) - 1]
        return np.stack([*(ranks <= k for k in self.options["ks"]), 1.0 / ranks, gains], axis=-1)


class CosineSpearman(SpearmanCorrelation):
    """Spearman's correlation of the cosine similarities of pairs of embeddings with given scores.

    `first` and `second` have one row per pair, `scores` one number. It keeps 16 bytes per pair.
    """

    name = "cosine_spearman"
    columns = ("first", "second", "scores")
    forms: ClassVar = {"first": as_matrix, "second": as_matrix}

    def as_columns(self, columns: Mapping[str, Any]) -> dict[str, Column]:
        arrays = super().as_columns(columns)
        if arrays["first"].shape != arrays["second"].shape:
            shapes = f"{arrays['first'].shape} and {arrays['second'].shape}"
            raise DataError(f"the embeddings of pairs must have the same shape, got {shapes}")
        products = normalized_rows(arrays["first"]) * normalized_rows(arrays["second"])
        return {"predictions": products.sum(axis=1), "references": arrays["scores"]}


def similarity_rows(queries: Any, pool: Any, chunk_size: int = 256) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield (index of the first query, cosine similarities of `chunk_size` queries to the whole pool).

    Queries and pool are embeddings, one row each: lists, a numpy array or a tensor.
    """
    rows, items = as_matrix("queries", queries), normalized_rows(as_matrix("pool", pool))
    if rows.shape[1] != items.shape[1]:
        raise DataError(f"queries have {rows.shape[1]} dimensions, but items of the pool {items.shape[1]}")
    for start in range(0, len(rows), chunk_size):
        yield start, normalized_rows(rows[start : start + chunk_size]) @ items.T


def normalized_rows(rows: Column) -> Numbers:
    """Return the rows as doubles of length 1; a row of zeros is unchanged."""
    doubles = np.ascontiguousarray(rows, dtype=np.float64)
    lengths = np.sqrt(np.square(doubles).sum(axis=1, keepdims=True))
    return doubles / np.where(lengths == 0, 1.0, lengths)
