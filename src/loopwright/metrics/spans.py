"""Entities in sequences of tags, and the accuracy of tokens.

A tag is "O", or a letter, a hyphen and the type of an entity: "B-PER", "I-PER". Entities are read with nervaluate, an
extra. IOB2 and IOB1 are read directly; BIOES and BILOU are converted to IOB2 first, and tags without a letter
("PER") count as inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopwright.errors import ConfigError, DataError
from loopwright.metrics.base import Column, CountingMetric, OptionsWhenAdding, as_items, ratio
from loopwright.metrics.classification import SumsPerLabel
from loopwright.metrics.extras import extra_module

OUTSIDE = "O"
"""The tag of a token that is in no entity."""

_LETTERS = {"B": "B", "I": "I", "S": "B", "U": "B", "E": "I", "L": "I", "M": "I"}


class Entities(OptionsWhenAdding, SumsPerLabel):
    """Precision, recall and F1 of whole entities (type and both ends right), and the accuracy of tags.

    Predictions and references are a sequence of tags for each sample, or of their indices with the option `labels`,
    the list of tags. Positions whose reference is the option `ignore_index` are left out on both sides.
    """

    name = "entities"
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"labels": None, "ignore_index": -100})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._collect = extra_module("nervaluate", "nervaluate", self.name).collect_named_entities

    def column(self, name: str, values: Any) -> Column:
        """Return one sequence per sample."""
        return as_items(name, values)

    def count(self, columns: Mapping[str, Column]) -> NDArray[np.int64]:
        """Return three counts per type for each sample; for "O" they count tags: right, all, all."""
        rows: list[dict[str, NDArray[np.int64]]] = []
        for index, (prediction, reference) in enumerate(
            zip(columns["predictions"], columns["references"], strict=True)
        ):
            predicted, expected = self._tags(index, prediction, reference)
            num_right = sum(mine == theirs for mine, theirs in zip(predicted, expected, strict=True))
            sums = {OUTSIDE: np.asarray([num_right, len(expected), len(expected)])}
            found, given = self._entities(predicted), self._entities(expected)
            for column, entities in enumerate((found & given, found, given)):
                for kind, _, _ in entities:
                    sums.setdefault(kind, np.zeros(3, dtype=np.int64))[column] += 1
            rows.append(sums)
        places = [{self.place(kind): each for kind, each in sums.items()} for sums in rows]
        counted = np.zeros((len(rows), len(self.labels), 3), dtype=np.int64)
        for row, placed in zip(counted, places, strict=True):
            for place, each in placed.items():
                row[place] = each
        return counted.reshape(len(rows), 3 * len(self.labels))

    def score(self, totals: NDArray[np.int64], options: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
        """Return precision, recall and F1 over the entities of all types, and the accuracy of tags."""
        sums = totals.reshape(*totals.shape[:-1], -1, 3)
        tags = sums[..., self.place(OUTSIDE), :]
        right, predicted, referred = np.moveaxis(sums.sum(axis=-2) - tags, -1, 0)
        return {
            "precision": ratio(right, predicted, 0.0),
            "recall": ratio(right, referred, 0.0),
            "f1": ratio(2 * right, predicted + referred, 0.0),
            "accuracy": ratio(tags[..., 0], tags[..., 1], np.nan),
        }

    def table(self) -> list[dict[str, Any]]:
        """Return one row per type, sorted; call it before `compute`, which resets the metric."""
        sums = dict(zip(self.labels, self._totals.reshape(-1, 3), strict=True))
        return [score_row(kind, *sums[kind]) for kind in sorted(sums) if kind != OUTSIDE]

    def _tags(self, index: int, prediction: Any, reference: Any) -> tuple[list[str], list[str]]:
        for row in (prediction, reference):
            if isinstance(row, str) or not np.iterable(row):
                raise DataError(f"a sample of {self.name} is a sequence of tags, got {row!r}")
        predicted, expected = list(prediction), list(reference)
        if len(predicted) != len(expected):
            raise DataError(
                f"sample {index} of {self.name} has {len(predicted)} predictions and {len(expected)} references"
            )
        ignored = self.options["ignore_index"]
        kept = [place for place, each in enumerate(expected) if isinstance(each, str) or each != ignored]
        return [self._tag(predicted[place]) for place in kept], [self._tag(expected[place]) for place in kept]

    def _tag(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        labels: Sequence[str] | None = self.options["labels"]
        if labels is None:
            raise ConfigError(
                f"{self.name} got the index {value!r}: give the list of tags, load('entities', labels=[...])"
            )
        if not 0 <= int(value) < len(labels):
            raise DataError(f"{self.name} got the index {value!r}, but there are {len(labels)} labels")
        return labels[int(value)]

    def _entities(self, tags: list[str]) -> set[tuple[str, int, int]]:
        return {(each["label"], each["start"], each["end"]) for each in self._collect(as_iob2(tags))}


class TokenAccuracy(OptionsWhenAdding, CountingMetric):
    """The share of correct tokens, among those whose reference is not the option `ignore_index`.

    Predictions and references are a sequence of integers or texts for each sample. For a masked language model, the
    reference of an unmasked token is the ignored number.
    """

    name = "token_accuracy"
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"ignore_index": -100})

    def column(self, name: str, values: Any) -> Column:
        """Return one sequence per sample."""
        return as_items(name, values)

    def count(self, columns: Mapping[str, Column]) -> NDArray[np.int64]:
        """Return the number of right tokens and of tokens for each sample."""
        counted = np.zeros((len(columns["references"]), 2), dtype=np.int64)
        for index, (prediction, reference) in enumerate(
            zip(columns["predictions"], columns["references"], strict=True)
        ):
            predicted, expected = np.atleast_1d(prediction), np.atleast_1d(reference)
            if predicted.shape != expected.shape:
                raise DataError(
                    f"sample {index} of {self.name} has predictions of shape {predicted.shape} and references of shape "
                    f"{expected.shape} (scores of several classes? take the argmax first)"
                )
            is_counted = np.full(expected.shape, True) & np.asarray(expected != self.options["ignore_index"])
            counted[index] = (is_counted & (predicted == expected)).sum(), is_counted.sum()
        return counted

    def score(self, totals: NDArray[np.int64], options: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
        """Return the share; nan if no token counts."""
        return {"token_accuracy": ratio(totals[..., 0], totals[..., 1], np.nan)}


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


def as_iob2(tags: Sequence[str]) -> list[str]:
    """Return the tags with the letters B and I only; the next entity begins after an end tag (E, L, S, U)."""
    converted, has_ended = [], False
    for tag in tags:
        if tag == OUTSIDE:
            converted.append(tag)
            has_ended = False
            continue
        letter, hyphen, kind = tag.partition("-")
        if not (hyphen and letter in _LETTERS):
            letter, kind = "I", tag
        converted.append(f"{'B' if has_ended else _LETTERS[letter]}-{kind}")
        has_ended = letter in "ELSU"
    return converted
