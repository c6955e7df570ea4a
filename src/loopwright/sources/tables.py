"""The interface of every reader of a data file: columns, length, any row by number, all rows in order.

A table keeps only the index of its rows in memory. It can be pickled, and its rows can be read from loader workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loopwright.errors import InputError
from loopwright.sources.files import BLOCK_BYTES, FileBytes, Offsets, Progress, Say

Row = dict[str, Any]
MOST_COLUMNS = 10_000


def check_columns(path: str, number: int) -> None:
    if number > MOST_COLUMNS:
        what = f"{path} has {number:,} columns, and the limit is {MOST_COLUMNS:,}"
        raise InputError("data.column", what, fix="write it again with the columns that the task needs")


class Block(NamedTuple):
    """Consecutive rows, column by column: `values[name][k]` belongs to row `start + k`.

    Rows that cannot be read are in `damaged`, by number, and have no values.
    """

    start: int
    values: dict[str, list[Any]]
    damaged: Mapping[int, InputError] = {}


class DamagedRow(Row):
    """A row that cannot be read, with the values that can be, if a table keeps its place."""

    def __init__(self, error: InputError, values: Row) -> None:
        super().__init__(values)
        self.error = error


class Table(ABC):
    """Rows of one data source, each a dict by column name. csv values are text, JSON values keep their types."""

    has_fixed_columns = False  # whether its kind fixes its column names, so that nothing is guessed
    has_header = False  # whether its first line named its columns
    rows_per_block = 1000  # of `blocks`; the sha256 of images depends on it, so it never changes
    notes: tuple[str, ...] = ()  # suspicious findings, in sentences

    path: str
    kind: str
    columns: tuple[str, ...]
    sha256: str
    num_bytes: int

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def row(self, index: int) -> Row:
        """Return one row; called with a valid index."""

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a table of {len(self)} rows")
        return self.row(index)

    def blocks(self, columns: Sequence[str], say: Say | None = None) -> Iterator[Block]:
        """Yield all rows in order, with the named columns only. A missing value is None."""
        for start in range(0, len(self), self.rows_per_block):
            stop = min(start + self.rows_per_block, len(self))
            yield as_block(start, self.rows(start, stop, columns), columns)
            if say is not None:
                say(Progress(self.path, "checking", self.num_bytes * stop // len(self), self.num_bytes))

    def rows(self, start: int, stop: int, columns: Sequence[str]) -> list[Row]:
        """Return the rows of a block, with these columns at least."""
        return [self.row(index) for index in range(start, stop)]

    @property
    def name(self) -> str:
        return Path(self.path).name

    def place(self, index: int) -> str:
        return f"row {index + 1:,}"

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `open_table` to read this file in the same way again."""
        return {"kind": self.kind}

    def class_names(self, column: str) -> tuple[str, ...]:
        """Return the classes of a column in the order of their ids, if the file names them; else empty."""
        return ()

    def __iter__(self) -> Iterator[Row]:
        for block in self.blocks(self.columns):
            for values in zip(*(block.values[name] for name in self.columns), strict=True):
                yield dict(zip(self.columns, values, strict=True))


class IndexedTable(Table):
    """A table over a file of consecutive rows."""

    def __init__(self, source: FileBytes, kind: str) -> None:
        self.source = source
        self.path = str(source.path)
        self.kind = kind
        self.num_bytes = source.num_bytes
        self.columns = ()
        self.index: Offsets = np.zeros(1, np.uint64)  # row i spans index[i] to index[i + 1]

    @abstractmethod
    def parse(self, data: bytes, index: int) -> Row:
        """Parse the bytes of a row."""

    def __len__(self) -> int:
        return len(self.index) - 1

    def salvage(self, data: bytes) -> Row:
        """Return the values of a damaged row that can be read."""
        return {}

    def row(self, index: int) -> Row:
        return self._row_of(self.source.read_row(int(self.index[index]), int(self.index[index + 1])), index)

    def _row_of(self, data: bytes, index: int) -> Row:
        try:
            if b"\0" in data:
                raise self.source.nul(int(self.index[index]) + data.index(b"\0"))
            return self.parse(data, index)
        except InputError as error:
            if not self.source.keeps_damaged:
                raise
            return DamagedRow(error, self.salvage(data))

    def __iter__(self) -> Iterator[Row]:
        for start, pieces in self.pieces(None):
            yield from (self._row_of(piece, start + k) for k, piece in enumerate(pieces))

    def blocks(self, columns: Sequence[str], say: Say | None = None) -> Iterator[Block]:
        for start, pieces in self.pieces(say):
            yield as_block(start, [self._row_of(piece, start + k) for k, piece in enumerate(pieces)], columns)

    def pieces(self, say: Say | None) -> Iterator[tuple[int, list[bytes]]]:
        """Yield (first row, bytes of each row) for a few megabytes of rows at a time."""
        for start, data, places in self.stretches(say):
            yield start, [data[a:b] for a, b in zip(places, places[1:], strict=False)]

    def stretches(self, say: Say | None) -> Iterator[tuple[int, bytes, list[int]]]:
        """Yield (first row, bytes of some rows, the start of each row in them and the end of the last)."""
        start, num_rows = 0, len(self)
        while start < num_rows:
            offset = int(self.index[start])
            stop = int(np.searchsorted(self.index, offset + BLOCK_BYTES, side="right")) - 1
            stop = min(max(stop, start + 1), num_rows)
            end = int(self.index[stop])
            data = self.source.read_row(offset, end)
            places = (self.index[start : stop + 1] - np.uint64(offset)).tolist()
            yield start, data, places
            start = stop
            if say is not None:
                say(Progress(self.path, "checking", end, self.num_bytes))

    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind} | self.source.settings()

    def place(self, index: int) -> str:
        return f"{self.source.unit} {self.source.line_at(int(self.index[index])):,}"


def as_block(start: int, rows: list[Row], columns: Sequence[str]) -> Block:
    damaged = {number: row.error for number, row in enumerate(rows, start) if isinstance(row, DamagedRow)}
    readable = [{} if isinstance(row, DamagedRow) else row for row in rows] if damaged else rows
    return Block(start, {name: [value_at(row, name) for row in readable] for name in columns}, damaged)


def value_at(row: Any, column: str) -> Any:
    """Return the value of a column, or None. `a.b.0` is the first part of the entry `b` of column `a`.

    Keys that contain dots are found as well, the longest first.
    """
    if isinstance(row, dict) and column in row:
        return row[column]
    head = column
    while head := head.rpartition(".")[0]:
        rest = column[len(head) + 1 :]
        if isinstance(row, dict) and head in row:
            return value_at(row[head], rest)
        if isinstance(row, list) and head.isdecimal() and int(head) < len(row):
            return value_at(row[int(head)], rest)
    if isinstance(row, list) and column.isdecimal() and int(column) < len(row):
        return row[int(column)]
    return None


def outer_column(columns: Sequence[str], column: str) -> str | None:
    """Return the column of a file that holds a column, which can be an entry of it; None if there is none."""
    while column and column not in columns:
        column = column.rpartition(".")[0]
    return column or None
