"""Metrics of texts: exact match."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopwright.errors import DataError
from loopwright.metrics.base import Column, CountingMetric, OptionsWhenAdding, ratio


class ExactMatch(OptionsWhenAdding, CountingMetric):
    """The share of texts that equal the reference, between 0 and 1.

    Options: `regexes_to_ignore` are patterns whose matches are removed from both texts first; `ignore_case`,
    `ignore_punctuation`, `ignore_numbers`. Texts are compared when they are added, so pass the options to `load`, or
    to a `compute` that gets all the texts.
    """

    name = "exact_match"
    taken_in = "texts had been compared"
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"regexes_to_ignore": None, "ignore_case": False, "ignore_punctuation": False, "ignore_numbers": False}
    )

    def count(self, columns: Mapping[str, Column]) -> NDArray[np.int64]:
        """Return (is equal, 1) for each sample."""
        predictions, references = (self._cleaned(name, columns[name]) for name in ("predictions", "references"))
        is_equal = [mine == theirs for mine, theirs in zip(predictions, references, strict=True)]
        return np.asarray([is_equal, [True] * len(is_equal)], dtype=np.int64).T

    def score(self, totals: NDArray[np.int64], options: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
        """Return the share."""
        return {"exact_match": ratio(totals[..., 0], totals[..., 1], np.nan)}

    def _cleaned(self, name: str, texts: Column) -> list[str]:
        cleaned: list[str] = texts.tolist()
        for each in cleaned:
            if not isinstance(each, str):
                raise DataError(f"{name} of exact_match must be texts, got {each!r}: use accuracy for labels")
        for pattern in self.options["regexes_to_ignore"] or []:
            cleaned = [re.sub(pattern, "", each) for each in cleaned]
        if self.options["ignore_case"]:
            cleaned = [each.lower() for each in cleaned]
        ignored = string.punctuation * bool(self.options["ignore_punctuation"])
        ignored += string.digits * bool(self.options["ignore_numbers"])
        if ignored:
            table = str.maketrans("", "", ignored)
            cleaned = [each.translate(table) for each in cleaned]
        return cleaned
