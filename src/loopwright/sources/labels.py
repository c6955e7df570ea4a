"""Labels: their kind, the order of their ids, the encoding of file values, and their collection from a file."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.errors import InputError
from loopwright.sources.chats.roles import CHAT_KINDS
from loopwright.sources.column_roles import IS_SET, is_number
from loopwright.sources.schema import Role
from loopwright.sources.tables import Block, Row, Table, value_at
from loopwright.sources.values import listed, without_empty_end, written_list

MOST_LABELS = 20_000
SEPARATOR = "|"  # between the labels of a row of kind multi, if none is given

Codes = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Labels:
    """The labels of a task.

    Attributes:
        kind: class (one per row), multi (several per row), float (a number), tags (one per token).
        names: The classes in the order of their ids; empty for numbers.
        label_map: Renamed labels: {"positive": "pos"}.
        separator: Between the classes of a row of kind multi, if they are one text.
        dropped: Labels to leave out of rows of kind multi, as written or as renamed.
    """

    kind: str
    names: tuple[str, ...]
    label_map: Mapping[str, str]
    separator: str = SEPARATOR
    dropped: tuple[str, ...] = ()

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {label_text(name): number for number, name in enumerate(self.names)}

    def encode(self, value: Any) -> int | float | list[int]:
        """Return a label for training: an id, a number, or a list of ids; raise a KeyError for an unknown one."""
        if self.kind == "float":
            return float(value)
        if self.kind == "class":
            return self._ids[self.rename(label_text(value))]
        texts = label_list(value, self.kind, self.separator)
        return [self._ids[self.rename(text)] for text in texts if not self.is_dropped(text)]

    def find(self, text: str | None) -> int | None:
        """Return the id of a class by its name in the file, None if unknown."""
        return self._ids.get(self.rename(text)) if text is not None else None

    def rename(self, text: str) -> str:
        return self.label_map.get(text, text)

    def is_dropped(self, text: str) -> bool:
        return text in self.dropped or self.rename(text) in self.dropped


def label_text(value: Any) -> str:
    """Return a label as stripped text in Unicode's NFC: "true" and "false" for booleans."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return unicodedata.normalize("NFC", text.strip())


def label_list(value: Any, kind: str, separator: str) -> list[str]:
    """Return the labels of a row: a list, a list written as text, or a text with separators (spaces for tags)."""
    if not has_value(value):
        return []
    if isinstance(value, str):
        written = written_list(value) if kind == "tags" and value.lstrip().startswith("[") else listed(value)
        if written is None:
            parts = value.split() if kind == "tags" else value.split(separator)
            return [label_text(part) for part in parts if part.strip()]
        value = written
    if not isinstance(value, list):
        return [label_text(value)]
    return [label_text(part) for part in value if kind == "tags" or has_value(part)]


def ordered(texts: Sequence[str]) -> tuple[str, ...]:
    """Return labels in the order of their ids: whole numbers by value, everything else as text."""
    return tuple(sorted(texts, key=int)) if all(map(is_whole, texts)) else tuple(sorted(texts))


def is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def has_value(value: Any) -> bool:
    """Whether a value is present: not null, NaN, blank text, or an empty list."""
    if isinstance(value, str):
        return bool(value) and not value.isspace()
    if isinstance(value, float):
        return not math.isnan(value)
    return value is not None and value != [] and value != {}


def set_columns(cells: Sequence[Any], columns: Sequence[str]) -> list[str] | None:
    """Return the names of the columns that hold 1 or true; None if a cell is empty, a ValueError for other values."""
    found = []
    for value, column in zip(cells, columns, strict=True):
        if not has_value(value):
            return None
        if (text := label_text(value).lower()) not in IS_SET:
            raise ValueError(f"{value!r} in {column!r}")
        found += [column] if IS_SET[text] else []
    return found


def cell_of(row: Row, names: Sequence[str], kind: str) -> Any:
    """Return the value of a role of a kind in a row: that of its column, or of its columns together."""
    parts = [value_at(row, name) for name in names]
    if kind in CHAT_KINDS:
        return dict(zip(names, parts, strict=True))
    if len(parts) == 1:
        return parts[0]
    return set_columns(parts, names) if kind == "label" else without_empty_end(parts)


class BadRows(dict[int, InputError]):
    """The rows of a file that cannot be used, with the reason; the first one is an error, unless they are dropped."""

    FIX = "--bad_rows drop"

    def __init__(self, are_dropped: bool) -> None:
        super().__init__()
        self._are_dropped = are_dropped

    def add(self, *rows: int, error: InputError) -> None:
        if not self._are_dropped:
            raise error
        for row in rows:
            self.setdefault(row, error)


class LabelScan:
    """Collects the labels of one file, block by block.

    `codes` has a number per row for kind class: the index of its text in `texts`, with "" for no label. For tags and
    multi-label rows only the texts are kept. `types` has the kinds of values, each with the first row that has it.
    """

    def __init__(
        self, table: Table, columns: Sequence[str], role: Role, kind: str, separator: str | None, bad: BadRows
    ) -> None:
        self.table = table
        self._bad = bad
        self.columns = columns  # one, or one of 0 and 1 for each class
        self.column = ", ".join(columns)
        self.role = role
        self.kind = kind
        self.separator = separator or SEPARATOR
        self.most_labels = self.num_without = 0  # labels of a row; rows without any
        self._codes_by_text: defaultdict[str, int] = defaultdict(count().__next__)
        self._codes: list[Codes] = []
        self.first_rows: list[int] = []
        self.types: dict[str, int] = {}
        self.smallest = float("inf")
        self.largest = float("-inf")

    @property
    def name(self) -> str:
        return f"the label column {self.column!r} of {self.table.name}"

    @property
    def texts(self) -> list[str]:
        return list(self._codes_by_text)

    @property
    def codes(self) -> Codes:
        if len(self._codes) != 1:
            self._codes = [np.concatenate([np.zeros(0, np.int32), *self._codes])]
        return self._codes[0]

    def place(self, text_index: int) -> str:
        return self.table.place(self.first_rows[text_index])

    def add(self, start: int, values: list[Any]) -> None:
        """Add the labels of some rows. `values[k]` belongs to row `start + k`."""
        {"float": self._add_floats, "class": self._add_classes}.get(self.kind, self._add_lists)(start, values)
        if len(self._codes_by_text) > MOST_LABELS:
            what = f"{self.name} has more than {MOST_LABELS:,} different values"
            saw = [f"e.g. {', '.join(map(repr, self.texts[:3]))}"]
            is_numeric = all(is_number(text) for text in self.texts[:99])
            fix = "--label_kind float" if is_numeric else f"keep at most {MOST_LABELS:,} classes in {self.table.name}"
            raise InputError("data.labels", what, saw=saw, fix=fix)

    def _add_classes(self, start: int, values: list[Any]) -> None:
        if set(map(type, values)) == {str}:
            self.types.setdefault("text", start)
            texts = values
        else:
            for row, value in enumerate(values, start):
                self._note_type(row, value)
            texts = [label_text(value) if has_value(value) else "" for value in values]
        known = len(self._codes_by_text)
        codes = np.fromiter(map(self._codes_by_text.__getitem__, texts), np.int32, len(texts))
        if len(self._codes_by_text) > known:
            distinct, places = np.unique(codes, return_index=True)
            self.first_rows += [start + int(place) for place in places[distinct >= known]]
        self._codes.append(codes)

    def _add_lists(self, start: int, values: list[Any]) -> None:
        for row, value in enumerate(values, start):
            for part in value if isinstance(value, list) else ():
                self._note_type(row, part)
            texts = label_list(value, self.kind, self.separator)
            self.most_labels, self.num_without = max(self.most_labels, len(texts)), self.num_without + (not texts)
            for text in texts:
                if text not in self._codes_by_text:
                    self._codes_by_text[text]
                    self.first_rows.append(row)

    def _add_floats(self, start: int, values: list[Any]) -> None:
        for row, value in enumerate(values, start):
            if not has_value(value):
                continue
            if not is_number(value):
                what = f"{self.name} holds numbers, but not in {self.table.place(row)}"
                other = "--label_kind class" if self.role.kind != "float" else "write a number there"
                saw, fix = [repr(value), f"{self.role.flag} names another column"], f"{BadRows.FIX}   or   {other}"
                self._bad.add(row, error=InputError("data.label_type", what, saw=saw, fix=fix))
                continue
            self.smallest, self.largest = min(self.smallest, float(value)), max(self.largest, float(value))

    def _note_type(self, row: int, value: Any) -> None:
        if has_value(value):
            # The rest, dates and bytes of parquet files, are text too.
            names = {bool: "true or false", int: "whole number", float: "number", list: "list", dict: "object"}
            self.types.setdefault(names.get(type(value), "text"), row)

    def counts(self, labels: Labels, rows: npt.NDArray[np.int64] | None = None) -> Counter[str]:
        found: Counter[str] = Counter()
        if self.kind == "class":
            codes = self.codes if rows is None else self.codes[rows]
            numbers = np.bincount(codes, minlength=len(self._codes_by_text)).tolist()
            for text, number in zip(map(label_text, self.texts), numbers, strict=True):
                found[labels.rename(text)] += number
            found.pop("", None)
            return found
        is_counted = np.zeros(len(self.table), np.bool_)
        is_counted[slice(None) if rows is None else rows] = True
        for row, texts in self._lists():
            if is_counted[row]:
                found.update(map(labels.rename, texts))
        return found

    def rows_with(self, text_indexes: list[int]) -> npt.NDArray[np.bool_]:
        if self.kind == "class":
            return np.isin(self.codes, text_indexes)
        wanted = {label_text(self.texts[index]) for index in text_indexes}
        found = np.zeros(len(self.table), np.bool_)
        for row, texts in self._lists():
            found[row] = not wanted.isdisjoint(texts)
        return found

    def _lists(self) -> Iterator[tuple[int, list[str]]]:
        for block in self.table.blocks(list(self.columns)):
            for row, value in enumerate(self.cells(block), block.start):
                yield row, label_list(value, self.kind, self.separator)

    def cells(self, block: Block) -> list[Any]:
        """Return the label of each row of a block, as it is in the file: the names of several columns that are set."""
        if len(self.columns) == 1:
            return block.values[self.columns[0]]
        found = []
        for row, cells in enumerate(zip(*(block.values[name] for name in self.columns), strict=True), block.start):
            try:
                found.append(set_columns(cells, self.columns))
            except ValueError as error:
                place = f"{self.table.place(row)} of {self.table.name}"
                what = f"a column of --label_columns holds neither 0 nor 1 in {place}"
                raise InputError("data.value", what, saw=[str(error)], fix=f"write 0 or 1 in {place}") from error
        return found


def guess_kind(role: Role, given: str | None, values: list[Any]) -> str:
    """Return the kind of labels in a column by its first values: class, multi, float or tags."""
    fixed = {"position": "class"}.get(role.kind, role.kind)
    if fixed != "label":
        return fixed
    if given is not None:
        if given not in ("class", "multi", "float"):
            saw = ["class: one per row; multi: several per row; float: a number"]
            raise InputError("args.value", f"--label_kind {given!r} is unknown", saw=saw, fix="--label_kind class")
        return given
    found = [value for value in values if has_value(value)]
    are_lists = (isinstance(value, list) or isinstance(value, str) and listed(value) is not None for value in found)
    if found and all(are_lists):
        return "multi"
    is_float = bool(found) and all(map(is_number, found)) and not all(is_whole(label_text(value)) for value in found)
    return "float" if is_float else "class"
