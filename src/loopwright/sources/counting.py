"""How often labels occur: over the rows of a file, also where rows have several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from loopwright.sources.labels import Labels, LabelScan, has_value, label_list, label_text, ordered
from loopwright.sources.splitting import Rows
from loopwright.sources.tables import Table
from loopwright.sources.values import UnusableValueError, as_texts


def class_counts(scan: LabelScan | None, label_map: Mapping[str, str]) -> dict[str, int]:
    """Return how many rows of a file have each class, in the order of their ids."""
    if scan is None:
        return {}
    numbers = np.bincount(scan.codes, minlength=len(scan.texts)).tolist()
    counts: Counter[str] = Counter()
    for text, number in zip(map(label_text, scan.texts), numbers, strict=True):
        if text:
            counts[label_map.get(text, text)] += number
    return {text: counts[text] for text in ordered(list(counts))}


def rows_with(table: Table, column: str, texts: set[str], labels: Labels) -> npt.NDArray[np.bool_]:
    """Return which rows, that have several labels each, have one of these."""
    found = np.zeros(len(table), np.bool_)
    for row, own in _label_lists(table, column, labels):
        found[row] = not texts.isdisjoint(own)
    return found


def count_lists(table: Table, column: str, rows: Rows, labels: Labels) -> Counter[str]:
    """Return how often each label occurs in some rows that have several each."""
    is_wanted = np.zeros(len(table), np.bool_)
    is_wanted[rows] = True
    counts: Counter[str] = Counter()
    for row, own in _label_lists(table, column, labels):
        if is_wanted[row]:
            counts.update(labels.label_map.get(text, text) for text in own)
    return counts


def most_texts(table: Table, column: str) -> int:
    """Return how many texts the row with the most of them has; rows that cannot be read are refused elsewhere."""
    most = 0
    for block in table.blocks([column]):
        for value in block.values[column]:
            with suppress(UnusableValueError):
                most = max(most, len(as_texts(value)))
    return most


def _label_lists(table: Table, column: str, labels: Labels) -> Iterator[tuple[int, list[str]]]:
    """Yield (row, its labels as texts) of a file whose rows have several."""
    for block in table.blocks([column]):
        for row, value in enumerate(block.values[column], block.start):
            yield row, label_list(value, labels.kind, labels.separator) if has_value(value) else []
