"""Labels: their kind, the order of their ids, and the encoding of file values."""

from __future__ import annotations

import difflib
import math
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.errors import InputError
from loopwright.sources.column_roles import is_number
from loopwright.sources.schema import Role
from loopwright.sources.tables import Table
from loopwright.sources.values import listed, written_list

MOST_LABELS = 20_000
MOST_SHOWN = 12
_MOST_NEAR = 8
_MOST_COMPARED = 1_000
_TRUTH = {"false": "0", "true": "1"}
WORDS_FOR_NOTHING = frozenset(
    ("nan", "na", "n/a", "null", "none", "inf", "-inf", "infinity", "-infinity", "-", "?", "#n/a", "#div/0!", "unknown")
)

Codes = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Labels:
    """The labels of a task.

    Attributes:
        kind: class (one per row), multi (several per row), float (a number), tags (one per token).
        names: The classes in the order of their ids; empty for numbers.
        label_map: Renamed labels: {"positive": "pos"}.
        separator: Between the classes of a row of kind multi, if they are one text.
    """

    kind: str
    names: tuple[str, ...]
    label_map: Mapping[str, str]
    separator: str = "|"

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ids", {name: number for number, name in enumerate(self.names)})

    def encode(self, value: Any) -> int | float | list[int]:
        """Return a label for training: an id, a number, or a list of ids; raise a KeyError for an unknown one."""
        if self.kind == "float":
            return float(value)
        if self.kind == "class":
            return self._id(label_text(value))
        return [self._id(text) for text in label_list(value, self.kind, self.separator)]

    def find(self, text: str | None) -> int | None:
        """Return the id of a class by its name in the file, None if unknown."""
        ids: dict[str, int] = self.__dict__["_ids"]
        return ids.get(self.label_map.get(text, text)) if text is not None else None

    def _id(self, text: str) -> int:
        ids: dict[str, int] = self.__dict__["_ids"]
        return ids[self.label_map.get(text, text)]


def label_text(value: Any) -> str:
    """Return a label as stripped text: "true" and "false" for booleans."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return (value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)).strip()


def label_list(value: Any, kind: str, separator: str) -> list[str]:
    """Return the labels of a multi-label row: a list, or one text with separators (spaces for tags).

    A list may also be a text, as in a csv file: "['B-PER', 'O']".
    """
    if isinstance(value, str):
        written = written_list(value) if kind == "tags" and value.lstrip().startswith("[") else listed(value)
        if written is None:
            parts = value.split() if kind == "tags" else value.split(separator)
            return [part.strip() for part in parts if part.strip()]
        value = written
    if not isinstance(value, list):
        return [label_text(value)]
    return [label_text(part) for part in value if kind == "tags" or has_value(part)]


def ordered(texts: Sequence[str]) -> tuple[str, ...]:
    """Return labels in the order of their ids: whole numbers by value, everything else as text."""
    if all(_is_whole(text) for text in texts):
        return tuple(sorted(texts, key=int))
    return tuple(sorted(texts))


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and text.isascii()


def has_value(value: Any) -> bool:
    """Whether a value is present: not null, NaN, blank text, or an empty list."""
    if isinstance(value, str):
        return bool(value) and not value.isspace()
    if isinstance(value, float):
        return not math.isnan(value)
    return value is not None and value != [] and value != {}


class LabelScan:
    """Collects the labels of one file, block by block.

    `codes` has a number per row for kind class: the index of its text in `texts`, with "" for no label. For tags and
    multi-label rows only the texts are kept.
    """

    def __init__(self, kind: str, separator: str, role: Role) -> None:
        self.kind = kind
        self.role = role
        self.separator = separator
        self._codes_by_text: defaultdict[str, int] = defaultdict(count().__next__)
        self._codes: list[Codes] = []
        self.first_rows: list[int] = []  # of each text
        self.types: dict[str, int] = {}  # kind of value -> the first row that has it
        self.smallest = float("inf")
        self.largest = float("-inf")

    @property
    def texts(self) -> list[str]:
        """All labels, in the order of first appearance."""
        return list(self._codes_by_text)

    @property
    def codes(self) -> Codes:
        """The label of each row of kind class, as an index in `texts`."""
        if len(self._codes) != 1:
            self._codes = [np.concatenate([np.zeros(0, np.int32), *self._codes])]
        return self._codes[0]

    def add(self, start: int, values: list[Any], table: Table, column: str) -> None:
        """Add the labels of some rows. `values[k]` belongs to row `start + k`."""
        if self.kind == "float":
            self._add_floats(start, values, table, column)
        elif self.kind == "class":
            self._add_classes(start, values)
        else:
            self._add_lists(start, values)
        if len(self._codes_by_text) > MOST_LABELS:
            examples = ", ".join(map(repr, self.texts[:3]))
            raise InputError(
                "data.labels",
                f"the label column {column!r} of {table.name} has more than {MOST_LABELS:,} different values",
                saw=[f"e.g. {examples}"],
                fix="--label_column with another column, or --label_kind float if it holds numbers to predict",
            )

    def _add_classes(self, start: int, values: list[Any]) -> None:
        kinds = set(map(type, values))
        if kinds != {str}:
            self._note_types(start, values)
            texts = [label_text(value) if has_value(value) else "" for value in values]
        else:
            self.types.setdefault("text", start)
            texts = values
        known = len(self._codes_by_text)
        codes = np.fromiter(map(self._codes_by_text.__getitem__, texts), np.int32, len(texts))
        if len(self._codes_by_text) > known:
            distinct, places = np.unique(codes, return_index=True)
            self.first_rows += [start + int(place) for place in places[distinct >= known]]
        self._codes.append(codes)

    def _add_lists(self, start: int, values: list[Any]) -> None:
        for row, value in enumerate(values, start):
            if not has_value(value):
                continue
            if isinstance(value, list):
                self._note_types(row, value, is_one_row=True)
            for text in label_list(value, self.kind, self.separator):
                if text not in self._codes_by_text:
                    self._codes_by_text[text]
                    self.first_rows.append(row)

    def _add_floats(self, start: int, values: list[Any], table: Table, column: str) -> None:
        for row, value in enumerate(values, start):
            if not has_value(value):
                continue
            if not is_number(value):
                raise InputError(
                    "data.label_type",
                    f"the label column {column!r} of {table.name} holds numbers, but not in {table.place(row)}",
                    saw=[f"{value!r}"],
                    fix=f"write a number there, or {self.role.flag} with another column"
                    if self.role.kind == "float"
                    else "write a number there, or --label_kind class to take all of them as classes",
                )
            number = float(value)
            self.smallest, self.largest = min(self.smallest, number), max(self.largest, number)

    def _note_types(self, start: int, values: list[Any], is_one_row: bool = False) -> None:
        for place, value in enumerate(values):
            if has_value(value):
                self.types.setdefault(_type_name(value), start if is_one_row else start + place)


def _type_name(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int):
        return "whole number"
    if isinstance(value, float):
        return "number"
    if isinstance(value, list | dict):
        return "list" if isinstance(value, list) else "object"
    return "text"  # also dates and bytes, from parquet files


def guess_kind(role: Role, given: str | None, values: list[Any]) -> str:
    """Return the kind of labels in a column by its first values: class, multi, float or tags."""
    fixed = {"position": "class"}.get(role.kind, role.kind)
    if fixed != "label":
        return fixed
    if given is not None:
        if given not in ("class", "multi", "float"):
            raise InputError(
                "args.value",
                f"--label_kind {given!r} is unknown",
                saw=["class: one per row; multi: several per row; float: a number"],
                fix="--label_kind class",
            )
        return given
    found = [value for value in values if has_value(value)]
    if found and all(
        isinstance(value, list) or (isinstance(value, str) and listed(value) is not None) for value in found
    ):
        return "multi"
    is_float = bool(found) and all(map(is_number, found)) and not all(_is_whole(label_text(value)) for value in found)
    return "float" if is_float else "class"


def check_types(scan: LabelScan, table: Table, column: str, is_kind_given: bool) -> None:
    """Refuse labels of mixed kinds (two JSON types, numbers among words), unless classes were requested."""
    types = scan.types
    if scan.kind == "float" or is_kind_given:
        return
    if "object" in types or ("list" in types and scan.kind == "class"):
        kind = "object" if "object" in types else "list"
        raise InputError(
            "data.value",
            f"the label in {table.place(types[kind])} of {table.name} is {'an' if kind == 'object' else 'a'} {kind}",
            saw=[f"column {column!r}"],
            fix="--label_kind multi if rows have several labels, or --label_column with another column",
        )
    if len(types) > 1 and not set(types) <= {"whole number", "number"}:
        raise InputError(
            "data.label_type",
            f"the label column {column!r} of {table.name} holds values of {len(types)} kinds",
            saw=[f"{name}: first in {table.place(row)}" for name, row in types.items()],
            fix="write all labels in the same way, or --label_kind class to take all of them as classes",
        )
    numbers = [place for place, text in enumerate(scan.texts) if text and is_number(text)]
    words = [place for place, text in enumerate(scan.texts) if text and not is_number(text)]
    if numbers and words and all(scan.texts[place].strip().lower() in WORDS_FOR_NOTHING for place in words):
        raise InputError(
            "data.label_type",
            f"the label column {column!r} of {table.name} holds numbers, and words that stand for none",
            saw=[
                f"{scan.texts[place]!r}, first in {table.place(scan.first_rows[place])}" for place in words[:MOST_SHOWN]
            ],
            fix="write numbers there, or leave these cells empty, and --missing_values drop",
        )
    if numbers and words:
        raise InputError(
            "data.label_type",
            f"the label column {column!r} of {table.name} holds numbers and words",
            saw=[
                f"{name}: e.g. {scan.texts[places[0]]!r}, first in {table.place(scan.first_rows[places[0]])}"
                for name, places in (("numbers", numbers), ("words", words))
            ],
            fix=f"--label_map {scan.texts[words[0]]}={scan.texts[numbers[0]]} if they mean the same, "
            "or --label_kind class to take all of them as classes",
        )


def did_you_mean(text: str, names: Sequence[str]) -> str | None:
    """Return the label that was probably meant: another spelling, the same number, a prefix, a similar text."""
    for name in names:
        if name.lower() == text.lower():
            return name
    number = _TRUTH.get(text.lower(), text)
    for name in names if is_number(number) else ():
        if is_number(other := _TRUTH.get(name.lower(), name)) and float(other) == float(number):
            return name
    for name in names:
        if min(len(name), len(text)) >= 2 and (
            text.lower().startswith(name.lower()) or name.lower().startswith(text.lower())
        ):
            return name
    return next(iter(difflib.get_close_matches(text, names, n=1)), None)


def map_flag(pairs: Iterable[tuple[str, str]]) -> str:
    """Return renamed labels as a command line option."""
    return " ".join(["--label_map", *(shlex.quote(f"{old}={new}") for old, new in pairs)])


def never_renamed(label_map: Mapping[str, str], found: Iterable[str], what: str = "row has the label") -> list[str]:
    """Return a warning for each renamed label that does not occur; called before training.

    Not an error, as a complete map may be used for a part of the data.

    Args:
        found: the labels that occur, in any split.
        what: the subject of the sentence.
    """
    names = list(dict.fromkeys(found))
    warnings = []
    for old, new in label_map.items():
        if old in names or not names:
            continue
        near = did_you_mean(old, names)
        # With very many labels only some are compared letter by letter.
        like = difflib.get_close_matches(old, names[:_MOST_COMPARED], n=_MOST_NEAR, cutoff=0)
        shown = list(dict.fromkeys([near, *like] if near else like))
        listed = ", ".join(map(repr, shown[:_MOST_NEAR]))
        more = f" and {len(names) - _MOST_NEAR} more" if len(names) > _MOST_NEAR else ""
        warnings.append(f"{map_flag([(old, new)])} changes nothing: no {what} {old!r}, but {listed}{more}")
    return warnings


def shown_counts(counts: Mapping[str, int]) -> str:
    """Return "neg 26, pos 34", truncated if there are many."""
    shown = [f"{name} {number:,}" for name, number in list(counts.items())[:MOST_SHOWN]]
    return ", ".join(shown) + (f" and {len(counts) - MOST_SHOWN} more" if len(counts) > MOST_SHOWN else "")
