"""Metrics of language models: the loss per token, perplexity, and bits per byte.

metric = metrics.load("bits_per_byte")
metric.add_batch(sums=[12.5, 40.25], counts=[5, 16], num_bytes=[21, 70])   # of each text
metric.compute()    # {"loss": 52.75 / 21, "perplexity": exp(52.75 / 21), "bits_per_byte": 52.75 / log(2) / 91}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwright.errors import DataError
from loopwright.metrics.base import Column, ratio
from loopwright.metrics.mean_loss import Perplexity


class BitsPerByte(Perplexity):
    """The loss in bits per byte of text, next to loss and perplexity.

    Unlike the other two it is comparable between tokenizers, and with a compressor. `sums` are the sums of the
    tokens' negative log-likelihoods (natural logarithm), `counts` the numbers of tokens, `num_bytes` the lengths of the
    texts in UTF-8.
    """

    name = "bits_per_byte"
    columns = ("sums", "counts", "num_bytes")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._num_bytes = 0

    def update(self, columns: Mapping[str, Column]) -> None:
        """Add the sums, the counts and the bytes."""
        num_bytes = _whole(columns["num_bytes"])
        super().update(columns)
        self._num_bytes += int(num_bytes.sum())

    def result(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return loss, perplexity and bits per byte."""
        return {**super().result(options), "bits_per_byte": self._sum.mean(self._num_bytes) / math.log(2)}

    def count(self, columns: Mapping[str, Column]) -> NDArray[np.int64]:
        """Return the loss's summands, and the bytes."""
        return np.concatenate([super().count(columns), _whole(columns["num_bytes"])[:, None]], axis=-1)

    def score(self, totals: NDArray[np.int64], options: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
        """Return loss, perplexity and bits per byte."""
        scores = super().score(totals[..., :-1], options)
        num_items, num_bytes = totals[..., -2], totals[..., -1]
        return {**scores, "bits_per_byte": ratio(scores["loss"] * num_items, num_bytes, np.nan) / math.log(2)}

    def reset(self) -> None:
        """Forget every sample."""
        super().reset()
        self._num_bytes = 0

    def merge(self, other: Any) -> None:
        """Merge another metric of the same kind."""
        super().merge(other)
        self._num_bytes += other._num_bytes

    def state_dict(self) -> dict[str, Any]:
        """Return the sum, the counts and the bytes."""
        return {**super().state_dict(), "num_bytes": self._num_bytes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sum, the counts and the bytes."""
        super().load_state_dict(state)
        self._num_bytes = int(state["num_bytes"])


def _whole(values: Column) -> NDArray[np.int64]:
    if len(values) and (values.dtype.kind not in "iuf" or (values < 0).any() or (values % 1 != 0).any()):
        raise DataError("num_bytes must be whole numbers of bytes, and not negative")
    return values.astype(np.int64)
