"""Entities in sequences of tags, and the accuracy of tokens.

A tag is "O", or a letter, a hyphen and the type of an entity: "B-PER", "I-PER". Entities are read with nervaluate, an
extra. IOB2 and IOB1 are read directly; BIOES and BILOU are converted to IOB2 first, and tags without a letter
("PER") count as inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from loopwright.errors import ConfigError, DataError
from loopwright.metrics.base import Columns, CountingMetric, Options, Scores, as_items, ratio
from loopwright.metrics.classification import SumsPerLabel, score_row
from loopwright.metrics.sums import Counts

OUTSIDE = "O"  # the tag of a token that is in no entity
_LETTERS = {"B": "B", "I": "I", "S": "B", "U": "B", "E": "I", "L": "I", "M": "I"}


class Entities(SumsPerLabel):
    """Precision, recall and F1 of whole entities (type and both ends right), and the accuracy of tags.

    Predictions and references are a sequence of tags for each sample, or of their indices with the option `labels`,
    the list of tags. Positions whose reference is the option `ignore_index` are left out on both sides.
    """

    name = "entities"
    limits = (0.0, 1.0)
    micro_f1 = "f1"
    options_apply_early = True
    forms: ClassVar = {"predictions": as_items, "references": as_items}
    needs = ("nervaluate", "nervaluate", "text")
    defaults: ClassVar[Options] = {"labels": None, "ignore_index": -100}

    def count(self, columns: Columns) -> Counts:
        """Return three counts per type for each sample; for "O" they count tags: right, all, all."""
        rows: list[dict[int, list[int]]] = []
        pairs = zip(columns["predictions"], columns["references"], strict=True)
        for predicted, expected in [self._tags(index, *pair) for index, pair in enumerate(pairs)]:
            num_right = sum(mine == theirs for mine, theirs in zip(predicted, expected, strict=True))
            sums = {self._state.place(OUTSIDE): [num_right, len(expected), len(expected)]}
            found, given = self._entities(predicted), self._entities(expected)
            for column, entities in enumerate((found & given, found, given)):
                for kind, _, _ in entities:
                    sums.setdefault(self._state.place(kind), [0, 0, 0])[column] += 1
            rows.append(sums)
        counted = np.zeros((len(rows), len(self.labels), 3), dtype=np.int64)
        for row, sums in zip(counted, rows, strict=True):
            row[list(sums)] = list(sums.values())
        return counted.reshape(len(rows), 3 * len(self.labels))

    def score(self, totals: Counts, options: Options) -> Scores:
        sums = totals.reshape(*totals.shape[:-1], -1, 3)
        tags = sums[..., self._state.place(OUTSIDE), :]
        right, predicted, referred = np.moveaxis(sums.sum(axis=-2) - tags, -1, 0)
        return {
            "precision": ratio(right, predicted, 0.0),
            "recall": ratio(right, referred, 0.0),
            "f1": ratio(2 * right, predicted + referred, 0.0),
            "accuracy": ratio(tags[..., 0], tags[..., 1], np.nan),
        }

    def num_parts(self, totals: Counts) -> Scores:
        sums = totals.reshape(*totals.shape[:-1], -1, 3).astype(np.float64)
        tags = sums[..., self._state.place(OUTSIDE), :]
        right, predicted, referred = np.moveaxis(sums.sum(axis=-2) - tags, -1, 0)
        union = predicted + referred - right
        return {"precision": predicted, "recall": referred, "f1": union, "accuracy": tags[..., 1]}

    def table(self) -> list[dict[str, Any]]:
        """Return one row per type, sorted; call it before `compute`, which resets the metric."""
        sums = dict(zip(self.labels, self._state.sums.reshape(-1, 3), strict=True))
        return [score_row(kind, *sums[kind]) for kind in sorted(sums) if kind != OUTSIDE]

    def _tags(self, index: int, prediction: Any, reference: Any) -> tuple[list[str], list[str]]:
        for row in (prediction, reference):
            if isinstance(row, str) or not np.iterable(row):
                raise DataError(f"a sample of {self.name} is a sequence of tags, got {row!r}")
        predicted, expected = list(prediction), list(reference)
        if len(predicted) != len(expected):
            lengths = f"{len(predicted)} predictions and {len(expected)} references"
            raise DataError(f"sample {index} of {self.name} has {lengths}")
        ignored = self.options["ignore_index"]
        kept = [place for place, each in enumerate(expected) if isinstance(each, str) or each != ignored]
        return [self._tag(predicted[place]) for place in kept], [self._tag(expected[place]) for place in kept]

    def _tag(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        labels: Sequence[str] | None = self.options["labels"]
        if labels is None:
            raise ConfigError(
                f"entities got the index {value!r}: pass the list of tags to load('entities', labels=...)"
            )
        if not 0 <= int(value) < len(labels):
            raise DataError(f"{self.name} got the index {value!r}, but there are {len(labels)} labels")
        return labels[int(value)]

    def _entities(self, tags: list[str]) -> set[tuple[str, int, int]]:
        found = self._module.collect_named_entities(as_iob2(tags))
        return {(each["label"], each["start"], each["end"]) for each in found}


class TokenAccuracy(CountingMetric):
    """The share of correct tokens, among those whose reference is not the option `ignore_index`.

    Predictions and references are a sequence of integers or texts for each sample. For a masked language model, the
    reference of an unmasked token is the ignored number.
    """

    name = "token_accuracy"
    names = ("token_accuracy",)
    limits = (0.0, 1.0)
    options_apply_early = True
    forms: ClassVar = {"predictions": as_items, "references": as_items}
    defaults: ClassVar[Options] = {"ignore_index": -100}

    def count(self, columns: Columns) -> Counts:
        counted = np.zeros((len(columns["references"]), 2), dtype=np.int64)
        pairs = zip(columns["predictions"], columns["references"], strict=True)
        for index, (prediction, reference) in enumerate(pairs):
            predicted, expected = np.atleast_1d(prediction), np.atleast_1d(reference)
            if predicted.shape != expected.shape:
                raise DataError(
                    f"sample {index} of {self.name} has predictions of shape {predicted.shape} and references of shape "
                    f"{expected.shape} (scores of several classes? take the argmax first)"
                )
            is_counted = np.full(expected.shape, True) & np.asarray(expected != self.options["ignore_index"])
            counted[index] = (is_counted & (predicted == expected)).sum(), is_counted.sum()
        return counted

    def score(self, totals: Counts, options: Options) -> Scores:
        return {"token_accuracy": ratio(totals[..., 0], totals[..., 1], np.nan)}


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
