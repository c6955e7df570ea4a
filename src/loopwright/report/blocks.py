"""The blocks of a page: plain values that panels return, tests inspect and templates draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table; numbers are right-aligned.

    Attributes:
        note: a sentence below it.
        bar: the index of the column whose numbers between 0 and 1 have a bar behind them.
        is_left: left-align all cells, as for settings.
        is_wide: use the full page width.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    bar: int | None = None
    is_left: bool = False
    is_wide: bool = False
    kind: str = "table"


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix: rows are true labels, columns are predictions."""

    title: str
    labels: Sequence[str]
    counts: Sequence[Sequence[int]]
    note: str = ""
    kind: str = "matrix"


@dataclass(frozen=True)
class Histogram:
    """A histogram of one or two groups of values.

    Attributes:
        edges: one more than there are bars.
        groups: the name of each group and its counts.
    """

    title: str
    edges: Sequence[float]
    groups: Sequence[tuple[str, Sequence[int]]]
    note: str = ""
    kind: str = "histogram"


@dataclass(frozen=True)
class Lines:
    """Lines through points, such as precision over recall.

    Attributes:
        groups: (name, points) of each line.
    """

    title: str
    x_name: str
    y_name: str
    groups: Sequence[tuple[str, Sequence[tuple[float, float]]]]
    note: str = ""
    kind: str = "lines"


@dataclass(frozen=True)
class Piece:
    """A stretch of text, marked as right, wrong, new (written by the model) or none of these."""

    text: str
    mark: str = ""


@dataclass(frozen=True)
class Example:
    """One sample: named texts, and whether the model was right if that is defined.

    Attributes:
        head: a short line above it: position, loss, confidence.
        fields: (name, pieces of text).
        is_right: None if undefined.
    """

    head: str
    fields: Sequence[tuple[str, Sequence[Piece]]]
    is_right: bool | None = None


@dataclass(frozen=True)
class Examples:
    """A list of samples."""

    title: str
    items: Sequence[Example]
    note: str = ""
    kind: str = "examples"


@dataclass(frozen=True)
class Facts:
    """Names and values in two columns."""

    title: str
    items: Sequence[tuple[str, Any]]
    note: str = ""
    kind: str = "facts"


@dataclass(frozen=True)
class Picture:
    """A picture as a data URI.

    Attributes:
        title: the caption.
        name: its file name.
        note: for example that it was scaled down.
    """

    title: str
    name: str
    uri: str
    note: str = ""
    kind: str = "picture"


Block = Table | Matrix | Histogram | Lines | Examples | Facts | Picture


@dataclass(frozen=True)
class Panel:
    """A group of blocks under a heading."""

    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)
