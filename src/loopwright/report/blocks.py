"""What a page is made of: plain values that the panels return, the tests look at and the templates draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table; numbers are aligned to the right.

    Attributes:
        title: above it.
        columns: their names.
        rows: their cells, numbers or texts.
        note: a sentence below it.
        bar: the column, by its place, whose numbers between 0 and 1 have a bar behind them.
        is_left: all cells are aligned to the left, as settings are.
        is_wide: over the whole page.
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
    """A confusion matrix: rows are what was true, columns what was predicted.

    Attributes:
        title: above it.
        labels: of its rows and columns.
        counts: of each cell.
        note: a sentence below it.
    """

    title: str
    labels: Sequence[str]
    counts: Sequence[Sequence[int]]
    note: str = ""
    kind: str = "matrix"


@dataclass(frozen=True)
class Histogram:
    """How often values fall between edges, for one or two groups.

    Attributes:
        title: above it.
        edges: one more than there are bars.
        groups: the name of each group and its counts.
        note: a sentence below it.
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
        title: above them.
        x_name: of the axis to the right.
        y_name: of the axis upwards.
        groups: (name, points) of each line.
        note: a sentence below it.
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
    """One sample: named texts, and whether the model was right where that can be said.

    Attributes:
        head: a short line above it: position, loss, confidence.
        fields: (name, pieces of text).
        is_right: None where there is no such thing.
    """

    head: str
    fields: Sequence[tuple[str, Sequence[Piece]]]
    is_right: bool | None = None


@dataclass(frozen=True)
class Examples:
    """Samples under each other.

    Attributes:
        title: above them.
        items: the samples.
        note: a sentence below the title.
    """

    title: str
    items: Sequence[Example]
    note: str = ""
    kind: str = "examples"


@dataclass(frozen=True)
class Facts:
    """Names and values in two columns.

    Attributes:
        title: above them.
        items: (name, value).
    """

    title: str
    items: Sequence[tuple[str, Any]]
    note: str = ""
    kind: str = "facts"


@dataclass(frozen=True)
class Picture:
    """A picture as a data URI.

    Attributes:
        title: below it.
        name: of its file.
        uri: the picture itself.
        note: that it was made smaller, say.
    """

    title: str
    name: str
    uri: str
    note: str = ""
    kind: str = "picture"


Block = Table | Matrix | Histogram | Lines | Examples | Facts | Picture


@dataclass(frozen=True)
class Panel:
    """Blocks that belong together, under a heading.

    Attributes:
        title: the heading.
        blocks: what stands under it.
    """

    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)
