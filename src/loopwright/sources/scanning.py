"""One pass over all rows of a file: content hashes, lengths, labels, missing and unusable values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.errors import InputError
from loopwright.sources.column_roles import Columns
from loopwright.sources.files import Say
from loopwright.sources.images.scanning import SceneOptions, SceneScan
from loopwright.sources.images.tables import ImageTable
from loopwright.sources.labels import LabelScan, has_value, label_list
from loopwright.sources.schema import PICTURE_KINDS, Role, Schema
from loopwright.sources.tables import Table
from loopwright.sources.values import UnusableValueError, as_answers, as_text, as_texts, as_tokens, without_empty_end

LONGEST_COUNTED = 1 << 18  # Longer lengths share a bin; the maximum stays exact.
MOST_ROWS_NAMED = 5
IGNORED_TAG = "-100"  # the value in transformers' features for an ignored tag

Hashes = npt.NDArray[np.uint64]


class LengthHistogram:
    """A histogram of lengths."""

    def __init__(self) -> None:
        self._counts: npt.NDArray[np.int64] = np.zeros(1, np.int64)
        self._longest = 0

    def add(self, lengths: Iterable[int]) -> None:
        """Count some lengths."""
        array = lengths if isinstance(lengths, np.ndarray) else np.fromiter(lengths, np.int64)
        if not len(array):
            return
        self._longest = max(self._longest, int(array.max()))
        counts = np.bincount(np.minimum(array, LONGEST_COUNTED), minlength=len(self._counts))
        counts[: len(self._counts)] += self._counts
        self._counts = counts

    def merge(self, other: LengthHistogram) -> None:
        """Add the counts of another histogram."""
        counts = np.zeros(max(len(self._counts), len(other._counts)), np.int64)
        counts[: len(self._counts)] += self._counts
        counts[: len(other._counts)] += other._counts
        self._counts, self._longest = counts, max(self._longest, other._longest)

    def summary(self) -> dict[str, int]:
        """Return the median, the 95th percentile and the maximum."""
        total = np.cumsum(self._counts)
        places = {name: int(np.searchsorted(total, share * total[-1])) for name, share in (("p50", 0.5), ("p95", 0.95))}
        return {name: min(place, self._longest) for name, place in places.items()} | {"max": self._longest}


@dataclass
class Problem:
    """A problem of some rows: their number, and the first ones."""

    num_rows: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)

    def add(self, row: int, what: str) -> None:
        """Count a row."""
        self.num_rows += 1
        if len(self.first) < MOST_ROWS_NAMED:
            self.first.append((row, what))


@dataclass
class Scan:
    """The findings of one pass over a file.

    Attributes:
        content: A hash of the model's inputs, per row: equal rows are duplicates.
        split_key: The hash that splits rows; the same array as `content` unless the schema has `split_by`.
        is_missing: Which rows lack a required value.
        missing: The same by role, counted.
        lengths: Characters and rough words by role.
        labels: The findings in the label column, if there is one.
        scenes: The findings in the images, if there are any.
    """

    num_rows: int
    content: Hashes
    split_key: Hashes
    is_missing: npt.NDArray[np.bool_]
    missing: dict[str, Problem]
    lengths: dict[str, tuple[LengthHistogram, LengthHistogram]]
    labels: LabelScan | None
    scenes: SceneScan | None = None


def scan_table(
    table: Table,
    schema: Schema,
    columns: Columns,
    label_kind: str | None,
    separator: str,
    say: Say | None,
    scene_options: SceneOptions | None = None,
) -> Scan:
    """Read all rows of a table once.

    Raises:
        InputError: A value has the wrong type (data.value), an answer is not in its context (data.answers), tags and
            tokens differ in number (data.tags), labels have mixed types (data.label_type); for images see `SceneScan`.
    """
    roles = [role for role in schema.roles if role.name in columns]
    names = {role.name: _column_list(columns[role.name]) for role in roles}
    is_missing = np.zeros(len(table), np.bool_)
    missing = {role.name: Problem() for role in roles}
    lengths = {role.name: (LengthHistogram(), LengthHistogram()) for role in roles if _has_length(role)}
    label_role = schema.label_role
    labels = LabelScan(label_kind, separator, label_role) if label_kind is not None and label_role is not None else None
    scenes = SceneScan(table, scene_options or SceneOptions(), say) if isinstance(table, ImageTable) else None
    content: list[bytes] = []
    split_key: list[bytes] = []
    inputs = [role.name for role in roles if role.is_input]
    for block in table.blocks(list(dict.fromkeys(name for group in names.values() for name in group)), say):
        values: dict[str, list[Any]] = {}
        for role in roles:
            raw = _gather(role, [block.values[name] for name in names[role.name]])
            if role.kind in PICTURE_KINDS:
                assert scenes is not None, "images are read from tables of images"
                values[role.name] = scenes.add(role, names[role.name][0], block.start, raw)
            else:
                values[role.name] = raw if role.is_label else _convert(role, raw, values, table, block.start)
            # A multi-label row may have no class at all.
            checked = (
                [value if value != [] else True for value in raw] if label_kind == "multi" and role.is_label else None
            )
            _find_missing(role, checked or values[role.name], block.start, is_missing, missing[role.name])
            if role.name in lengths:
                _measure(role, values[role.name], *lengths[role.name])
            if role.is_label and labels is not None:
                labels.add(block.start, raw, table, names[role.name][0])
                if role.kind == "tags":
                    _check_tags(values, role, table, block.start)
        content.append(_hash([values[name] for name in inputs]))
        if schema.split_by:
            split_key.append(_hash([values[name] for name in schema.split_by]))
    if scenes is not None:
        scenes.finish()
    hashes = np.frombuffer(b"".join(content), "<u8")
    keys = np.frombuffer(b"".join(split_key), "<u8") if schema.split_by else hashes
    return Scan(len(table), hashes, keys, is_missing, missing, lengths, labels, scenes)


def _column_list(column: str | tuple[str, ...]) -> list[str]:
    return [column] if isinstance(column, str) else list(column)


def _has_length(role: Role) -> bool:
    return role.kind in ("text", "tokens") and role.name not in ("id", "image_id")


def _gather(role: Role, columns: list[list[Any]]) -> list[Any]:
    """Return one value per row, even for a role with several columns."""
    if len(columns) == 1:
        return columns[0]
    return [without_empty_end(list(parts)) for parts in zip(*columns, strict=True)]


def _convert(role: Role, raw: list[Any], others: dict[str, list[Any]], table: Table, start: int) -> list[Any]:
    """Return the values in the format of their role; refuse unusable ones."""
    if role.kind == "text" and set(map(type, raw)) == {str}:
        return raw
    if role.kind == "answers":
        return _convert_answers(raw, others.get("context", []), table, start)
    convert: Callable[[Any], Any] = {"text": as_text, "tokens": as_tokens, "texts": as_texts}[role.kind]
    converted = []
    for row, value in enumerate(raw, start):
        try:
            converted.append(convert(value))
        except UnusableValueError as error:
            raise InputError(
                "data.value",
                f"{table.name}: the {role.name} in {table.place(row)} cannot be used",
                saw=[str(error)],
                fix=f"{role.flag} with another column, or write the value as it is needed",
            ) from error
    return converted


def _convert_answers(raw: list[Any], contexts: list[str], table: Table, start: int) -> list[Any]:
    problem = Problem()
    converted = []
    for row, (value, context) in enumerate(zip(raw, contexts, strict=True), start):
        try:
            converted.append(as_answers(value, context))
        except UnusableValueError as error:
            problem.add(row, str(error))
    if problem.num_rows:
        raise InputError(
            "data.answers",
            f"{table.name}: {problem.num_rows:,} of the rows up to {table.place(start + len(raw) - 1)} have an answer "
            "that cannot be found",
            saw=[f"{table.place(row)}: {what}" for row, what in problem.first],
            fix="correct answer_start (characters, from 0), or take these rows out of the file",
        )
    return converted


def _find_missing(
    role: Role, values: list[Any], start: int, is_missing: npt.NDArray[np.bool_], problem: Problem
) -> None:
    if role.may_be_empty:
        return
    if set(map(type, values)) == {str} and all(values) and not any(map(str.isspace, values)):
        return
    for row, value in enumerate(values, start):
        if not has_value(value) or (role.kind == "texts" and not all(map(has_value, value))):
            is_missing[row] = True
            problem.add(row, "")


def _measure(role: Role, values: list[Any], characters: LengthHistogram, words: LengthHistogram) -> None:
    if role.kind == "tokens":
        characters.add([sum(map(len, tokens)) for tokens in values])
        words.add([len(tokens) for tokens in values])
    else:
        characters.add(map(len, values))
        words.add(np.fromiter(map(str.count, values, repeat(" ")), np.int64, len(values)) + 1)


def _check_tags(values: dict[str, list[Any]], role: Role, table: Table, start: int) -> None:
    for row, (tokens, tags) in enumerate(zip(values["tokens"], values[role.name], strict=True), start):
        if not has_value(tags):
            continue
        found = label_list(tags, "tags", "")
        saw = [f"tokens: {str(tokens)[:80]}", f"tags:   {str(tags)[:80]}"]
        if len(found) != len(tokens):
            what = f"{table.place(row)} has {len(tokens)} tokens and {len(found)} tags"
            raise InputError("data.tags", f"{table.name}: {what}", saw=saw, fix="give each token one tag")
        is_absent = [tag in ("", IGNORED_TAG) for tag in found]
        if isinstance(tags, list):
            is_absent = [absent or tag is None for absent, tag in zip(is_absent, tags, strict=True)]
        if any(is_absent):
            place = is_absent.index(True)
            what = f"the token {tokens[place]!r} in {table.place(row)} has no tag"
            raise InputError("data.tags", f"{table.name}: {what}", saw=saw, fix="give each token one tag, O for none")


def _hash(columns: list[list[Any]]) -> bytes:
    """Return eight bytes per row that depend on the values only."""
    digest = partial(hashlib.blake2b, digest_size=8)
    texts = ["\x1e".join(part) for part in columns[0]] if type(columns[0][0]) is list else columns[0]
    if len(columns) > 1:
        flat = [["\x1e".join(part) for part in column] if type(column[0]) is list else column for column in columns]
        texts = list(map("\x1f".join, zip(*flat, strict=True)))
    # JSON allows lone surrogates, which other encodings reject.
    return b"".join([digest(text.encode("utf-8", "surrogatepass")).digest() for text in texts])
