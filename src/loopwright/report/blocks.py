"""The blocks of a page: plain values that panels return, tests inspect and templates draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Kind:
    """A block of a page; templates choose the drawing by its `kind`, the name of its class."""

    title: str

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Table(Kind):
    """A table; numbers are right-aligned. `bar` is the index of a column of shares, drawn with a bar behind each."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    bar: int | None = None
    is_left: bool = False
    is_wide: bool = False


@dataclass(frozen=True)
class Matrix(Kind):
    """A confusion matrix: rows are true labels, columns are predictions."""

    labels: Sequence[str]
    counts: Sequence[Sequence[int]]
    note: str = ""


@dataclass(frozen=True)
class Histogram(Kind):
    """A histogram of one or two groups, each with a name and its counts; `edges` are one more than the bars.

    With `sizes` the bars are shares of so many samples each, beside the diagonal: a reliability diagram.
    """

    edges: Sequence[float]
    groups: Sequence[tuple[str, Sequence[float]]]
    note: str = ""
    sizes: Sequence[int] = ()


@dataclass(frozen=True)
class Lines(Kind):
    """Lines through points, such as precision over recall; `groups` are (name, points) of each line."""

    x_name: str
    y_name: str
    groups: Sequence[tuple[str, Sequence[tuple[float, float]]]]
    note: str = ""


class Piece(NamedTuple):
    """A stretch of text, marked as right, wrong, new (written by the model) or none of these."""

    text: str
    mark: str = ""


class Example(NamedTuple):
    """One sample: a short line above it, (name, pieces of text), and whether the model was right, if defined."""

    head: str
    fields: Sequence[tuple[str, Sequence[Piece]]]
    is_right: bool | None = None


@dataclass(frozen=True)
class Examples(Kind):
    """A list of samples."""

    items: Sequence[Example]
    note: str = ""


@dataclass(frozen=True)
class Facts(Kind):
    """Names and values in two columns."""

    items: Sequence[tuple[str, Any]]
    note: str = ""


@dataclass(frozen=True)
class Picture(Kind):
    """A picture as a data URI; `name` is its file name."""

    name: str
    uri: str
    note: str = ""


Block = Table | Matrix | Histogram | Lines | Examples | Facts | Picture


def without_empty(blocks: Sequence[Block]) -> list[Block]:
    contents = ("rows", "counts", "groups", "items", "uri")
    return [block for block in blocks if any(getattr(block, name, None) for name in contents)]


class Panel(NamedTuple):
    """A group of blocks under a heading."""

    title: str
    blocks: Sequence[Block] = ()
