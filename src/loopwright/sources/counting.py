"""Label frequencies over the rows of a file, including rows with several labels."""

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
    """Return the number of rows per class of a file, in the order of ids."""
    if scan is None:
        return {}
    numbers = np.bincount(scan.codes, minlength=len(scan.texts)).tolist()
    counts: Counter[str] = Counter()
    for text, number in zip(map(label_text, scan.texts), numbers, strict=True):
        if text:
            counts[label_map.get(text, text)] += number
    return {text: counts[text] for text in ordered(list(counts))}


def rows_with(table: Table, column: str, texts: set[str], labels: Labels) -> npt.NDArray[np.bool_]:
    """Return which rows of a multi-label file have one of these labels."""
    found = np.zeros(len(table), np.bool_)
    for row, own in _label_lists(table, column, labels):
        found[row] = not texts.isdisjoint(own)
    return found


def count_lists(table: Table, column: str, rows: Rows, labels: Labels) -> Counter[str]:
    """Return the frequency of each label in some rows of a multi-label file."""
    is_wanted = np.zeros(len(table), np.bool_)
    is_wanted[rows] = True
    counts: Counter[str] = Counter()
    for row, own in _label_lists(table, column, labels):
        if is_wanted[row]:
            counts.update(labels.label_map.get(text, text) for text in own)
    return counts


def most_texts(table: Table, column: str) -> int:
    """Return the largest number of texts in a row; unreadable rows are refused elsewhere."""
    most = 0
    for block in table.blocks([column]):
        for value in block.values[column]:
            with suppress(UnusableValueError):
                most = max(most, len(as_texts(value)))
    return most


def _label_lists(table: Table, column: str, labels: Labels) -> Iterator[tuple[int, list[str]]]:
    for block in table.blocks([column]):
        for row, value in enumerate(block.values[column], block.start):
            yield row, label_list(value, labels.kind, labels.separator) if has_value(value) else []
