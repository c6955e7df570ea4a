"""Batches cut into parts along their rows, to reduce peak memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from loopwright.data.loader import MicroBatch, Window
from loopwright.engine.nested import is_container, map_children
from loopwright.errors import DataError
from loopwright.keys import key

Cut = Callable[[Any, int, int, int], Any]
"""From a batch, its number of rows, and a start and stop row to the rows between them."""


def cut_rows(batch: Any, rows: int, start: int, stop: int, *, lists_are_rows: bool = False) -> Any:
    """Return some of the rows of a batch; raise a DataError if it cannot be split into rows.

    Tensors are cut in their first dimension, and so are lists with one entry per row. Scalar tensors, numbers and
    strings belong to all rows. With `lists_are_rows`, a list as long as the batch always has an entry per row, even if
    its tensors could be cut.
    """

    def cut(value: Any, is_outer: bool) -> Any:
        if isinstance(value, Tensor):
            if value.dim() and value.shape[0] != rows:
                raise DataError(
                    f"the batch has {rows} samples and a tensor of shape {tuple(value.shape)}, whose first dimension "
                    "differs. Override cut_batch to define which part of it belongs to which sample."
                )
            return value[start:stop] if value.dim() else value
        if isinstance(value, list) and len(value) == rows and not is_outer:
            are_tensors = all(isinstance(each, Tensor) and each.dim() and each.shape[0] == rows for each in value)
            if are_tensors and not lists_are_rows:
                raise DataError(
                    f"the batch has {rows} samples and a list of {rows} tensors of {rows} rows, which may be cut in "
                    "two ways. Override cut_batch to choose one."
                )
            return value[start:stop]
        if is_container(value):
            return map_children(value, lambda each: cut(each, False))
        if value is None or isinstance(value, (str, bytes, int, float, complex)):
            return value
        raise DataError(f"the batch has a {type(value).__name__}, which cannot be cut into rows. Override cut_batch.")

    return cut(batch, True)


def bounds_of(rows: int, parts: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each part, as equal as possible and none empty."""
    parts = min(parts, rows)
    return [(rows * index // parts, rows * (index + 1) // parts) for index in range(parts)]


def part_of(piece: MicroBatch, start: int, stop: int, cut: Cut) -> MicroBatch:
    """Return some rows of a micro-batch under their own key; raise a DataError if it cannot be cut."""
    if (start, stop) == (0, piece.rows):
        return piece
    batch = cut(piece.batch, piece.rows, start, stop)
    moved = None if piece.moved is None else cut(piece.moved, piece.rows, start, stop)
    return MicroBatch(batch, key(piece.key, "part", start, stop), stop - start, moved)


def cut_window(window: Window, parts: int, cut: Cut) -> Window:
    """Return a window with each micro-batch cut into this many parts, or whole if it cannot be cut."""
    whole = window.pieces if window.whole is None else window.whole
    pieces: list[MicroBatch] = []
    numbers: list[int] = []
    for number, piece in enumerate(whole):
        try:
            # A pad has no rows, and runs whole.
            found = [part_of(piece, start, stop, cut) for start, stop in bounds_of(piece.rows, parts)] or [piece]
        except DataError:
            found = [piece]
        pieces += found
        numbers += [number] * len(found)
    return window._replace(pieces=pieces, whole=whole, numbers=numbers)


def with_items(window: Window, counts: list[float | None]) -> tuple[Window, list[float | None]]:
    """Return a window and its item counts without parts that have no items, unless the whole micro-batch has none."""
    if window.numbers is None or not counts:
        return window, counts
    having = {number for number, count in zip(window.numbers, counts, strict=True) if count != 0}
    kept = [index for index, count in enumerate(counts) if count != 0 or window.numbers[index] not in having]
    if len(kept) == len(counts):
        return window, counts
    pieces, numbers = [window.pieces[index] for index in kept], [window.numbers[index] for index in kept]
    return window._replace(pieces=pieces, numbers=numbers), [counts[index] for index in kept]
