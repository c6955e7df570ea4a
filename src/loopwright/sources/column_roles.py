"""Which column has which role: as given, else by name, else by elimination; never by an ambiguous guess."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from shlex import quote
from typing import Any, NamedTuple

from loopwright.errors import InputError
from loopwright.sources.images.reading import is_image_name
from loopwright.sources.schema import Role, Schema
from loopwright.sources.tables import Row, Table, value_at

ROWS_LOOKED_AT = 500
_LANGUAGES = "translation."  # prefix of the entries of a column of languages
FEW_LABELS = 50  # A column with more distinct values is not guessed to be labels.

Columns = dict[str, str | tuple[str, ...]]


class ColumnSample(NamedTuple):
    """A column, sampled from the first rows."""

    name: str
    values: list[Any]

    @property
    def num_distinct(self) -> int:
        """The number of distinct values in the sample."""
        return len({json.dumps(value, sort_keys=True, default=str) for value in self.values})

    @property
    def is_text(self) -> bool:
        """Whether the values are texts, and not all numbers."""
        texts = [value for value in self.values if isinstance(value, str)]
        return len(texts) == len(self.values) and not all(is_number(text) for text in texts if text.strip())

    @property
    def could_be_label(self) -> bool:
        """Whether the values are few and repeat, as classes do."""
        if not self.values or any(isinstance(value, dict | list) for value in self.values):
            return False
        return 2 <= self.num_distinct <= min(FEW_LABELS, len(self.values) // 2)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, or a text of one."""
    if isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value)) and not (isinstance(value, str) and "_" in value)
    except (TypeError, ValueError, OverflowError):
        return False


def sample_columns(table: Table) -> dict[str, ColumnSample]:
    """Return the columns of the first rows; entries of a column of objects are columns `column.entry`."""
    rows: list[Row] = [_without_bytes(row) for row in islice(table, ROWS_LOOKED_AT)]
    names = list(table.columns)
    for name in table.columns:
        first = next((row[name] for row in rows if row.get(name) is not None), None)
        if isinstance(first, dict) and first and all(isinstance(value, str) for value in first.values()):
            names[names.index(name) : names.index(name) + 1] = [f"{name}.{entry}" for entry in first]
    return {name: ColumnSample(name, _values(rows, name)) for name in names}


def _without_bytes(row: Row) -> Row:
    """Return a row with images truncated to their first bytes."""
    return {name: _first_bytes(value) for name, value in row.items()}


def _first_bytes(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        return value | {"bytes": value["bytes"][:16]}
    return value[:16] if isinstance(value, bytes) else value


def sample_values(table: Table, column: str) -> list[Any]:
    """Return the values of a column in the first rows, without empty ones."""
    block_rows = (value for block in table.blocks([column]) for value in block.values[column])
    return [value for value in islice(block_rows, ROWS_LOOKED_AT) if value is not None]


def _values(rows: list[Row], column: str) -> list[Any]:
    return [value for row in rows if (value := value_at(row, column)) is not None]


def choose_columns(schema: Schema, table: Table, given: Mapping[str, str | Sequence[str]]) -> tuple[Columns, list[str]]:
    """Return the columns by role, and a sentence about each guess; InputError (data.column) if missing or ambiguous."""
    unknown = [name for name in given if name not in {role.name for role in schema.roles}]
    if unknown:
        roles = [role.name for role in schema.roles]
        raise InputError(
            "args.value",
            f"--{unknown[0]}_column: {schema.task} has no such role",
            saw=[f"its roles: {', '.join(roles)}"],
            fix=f"--{(difflib.get_close_matches(unknown[0], roles) or roles)[0]}_column {given[unknown[0]]}",
        )
    samples = sample_columns(table)
    chosen: Columns = {}
    absent: dict[str, str] = {}
    for role in schema.roles:
        if role.name in given:
            names = _as_told(role, given[role.name], samples)
            unknown = [name for name in names if name not in samples and name not in table.columns]
            if unknown:
                absent[role.name] = unknown[0]
            else:
                chosen[role.name] = names[0] if len(names) == 1 else tuple(names)
    if absent:
        raise _no_such_columns(schema, absent, table, samples, chosen)
    guesses: list[str] = []
    for role in schema.roles:
        if role.name not in chosen and (column := _by_name(role, table, samples, chosen)) is not None:
            chosen[role.name] = column
            guesses.append(f"{role.name}={_shown(column)} (guessed by its name)")
    for role in schema.roles:
        if role.name in chosen or not role.is_required:
            continue
        left = [sample for name, sample in samples.items() if name not in _used(chosen)]
        fitting = [sample.name for sample in left if _fits(role, sample)]
        if len(fitting) != 1:
            raise _cannot_choose(role, table, samples, chosen, fitting, _languages_fix(schema, chosen, fitting))
        chosen[role.name] = fitting[0]
        guesses.append(f"{role.name}={fitting[0]!r} (guessed: no other column is left that fits)")
    return {role.name: chosen[role.name] for role in schema.roles if role.name in chosen}, guesses


def _used(chosen: Columns) -> set[str]:
    return {name for column in chosen.values() for name in ([column] if isinstance(column, str) else column)}


def _shown(column: str | tuple[str, ...]) -> str:
    return repr(column) if isinstance(column, str) else ", ".join(map(repr, column))


def _as_told(role: Role, column: str | Sequence[str], samples: dict[str, ColumnSample]) -> list[str]:
    """Return the columns named for a role; several of a role of texts may be one comma-separated word."""
    if isinstance(column, str) and role.kind == "texts" and column not in samples and "," in column:
        return [name.strip() for name in column.split(",")]
    return [column] if isinstance(column, str) else list(column)


def _no_such_columns(
    schema: Schema, absent: Mapping[str, str], table: Table, samples: dict[str, ColumnSample], chosen: Columns
) -> InputError:
    # Columns that other roles use, or are proposed for, are not proposed again.
    taken = dict(chosen)
    for role in schema.roles:
        if role.is_required and role.name not in taken and role.name not in absent:
            with suppress(InputError):  # ambiguous: none is chosen
                taken[role.name] = _by_name(role, table, samples, taken) or ()
    whats, fixes = [], []
    for role in schema.roles:
        if role.name in absent:
            free = [name for name in samples if name not in _used(taken)]
            near = difflib.get_close_matches(absent[role.name], free, n=1, cutoff=0.5)
            fitting = near or [name for name in free if _fits(role, samples[name])]
            whats.append(f"{role.flag} {absent[role.name]!r}: no such column")
            fixes.append(_column_fix(role, fitting, free, table, samples))
            taken[role.name] = tuple(fitting[:1] or free[:1])
    return InputError("data.column", "; ".join(whats), saw=describe_columns(table, samples), fix=" ".join(fixes))


def _by_name(
    role: Role, table: Table, samples: dict[str, ColumnSample], chosen: Columns
) -> str | tuple[str, ...] | None:
    """Return the column with one of the role's names, or None; refuse several, unless one has the first name."""
    used = _used(chosen)
    free = {name.lower(): name for name in samples if name not in used}
    several = [tuple(found) for name in role.names if name.endswith("*") and (found := _family(name, free))]
    if several:
        return several[0]
    matching = [free[name] for name in role.names if name in free]
    if len(matching) > 1 and matching[0].lower() != role.names[0] and matching[0].lower() != role.name:
        raise _cannot_choose(role, table, samples, chosen, matching)
    return matching[0] if matching else None


def _family(pattern: str, free: dict[str, str]) -> list[str]:
    stem = re.escape(pattern[:-1])
    found = [
        (match[1], name) for lower, name in free.items() if (match := re.fullmatch(rf"{stem}_?(\d+|[a-z])", lower))
    ]
    return [name for _, name in sorted(found, key=lambda pair: (len(pair[0]), pair[0]))] if len(found) > 1 else []


def _fits(role: Role, sample: ColumnSample) -> bool:
    if role.kind == "text":
        return sample.is_text and not (sample.could_be_label and role.is_input)
    if role.kind in ("label", "class", "position"):
        return sample.could_be_label
    if role.kind == "float":
        return bool(sample.values) and all(map(is_number, sample.values))
    if role.kind in ("tokens", "tags", "multi", "texts"):
        return bool(sample.values) and all(isinstance(value, list) for value in sample.values)
    if role.kind in ("image", "mask"):
        return bool(sample.values) and all(map(_could_be_image, sample.values))
    if role.kind == "objects":
        return bool(sample.values) and all(isinstance(value, dict) and len(value) > 1 for value in sample.values)
    return False


def _could_be_image(value: Any) -> bool:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    return isinstance(value, bytes) or (isinstance(value, str) and is_image_name(value.strip()))


def _cannot_choose(
    role: Role, table: Table, samples: dict[str, ColumnSample], chosen: Columns, fitting: list[str], fix: str = ""
) -> InputError:
    what = f"{' and '.join(map(repr, fitting))} would both do" if len(fitting) > 1 else "no column looks like it"
    if len(fitting) > 2:
        what = f"{', '.join(map(repr, fitting[:-1]))} and {fitting[-1]!r} would all do"
    left = [name for name in samples if name not in _used(chosen)]
    return InputError(
        "data.column",
        f"the column for {role.name} cannot be guessed: {what}",
        saw=describe_columns(table, samples),
        fix=fix or _column_fix(role, fitting, left, table, samples),
    )


def _languages_fix(schema: Schema, chosen: Columns, fitting: list[str]) -> str:
    """Return flags for the languages of records such as {"translation": {"en": ..., "ro": ...}}; else ""."""
    codes = [name[len(_LANGUAGES) :] for name in fitting if name.lower().startswith(_LANGUAGES)]
    unnamed = [role.name for role in schema.roles if role.has_language and role.name not in chosen]
    if len(codes) < 2:
        return ""
    return " ".join(f"--{role}_lang {code}" for role, code in zip(unnamed, codes, strict=False))


def _column_fix(
    role: Role, fitting: list[str], others: list[str], table: Table, samples: dict[str, ColumnSample]
) -> str:
    """Return the flag with the nearest column, of `fitting` ones or else of unused `others` with suitable values."""
    if role.kind in ("tokens", "tags") and not fitting:
        if table.kind == "txt":
            return "--file_kind conll if each line holds a word and its tag, with blank lines between sentences"
        if table.kind in ("csv", "tsv"):
            return "give one row for each sentence, its words and its tags with blanks between them; or a .conll file"
        return (
            f"{role.flag} with a column that holds a list of {'words' if role.kind == 'tokens' else 'tags'} in each row"
        )
    if role.kind == "text" and not fitting:
        others = [name for name in others if not any(isinstance(part, dict | list) for part in samples[name].values)]
    if role.kind in ("image", "mask") and not fitting:
        return f"--data FOLDER of images   or   a file with a column of their paths, named by {role.flag}"
    if not fitting and not others:
        return f"a file with a column for {role.name}, named by {role.flag}"
    if role.kind == "text" and fitting:  # an id is a text too: prefer the column with the most words
        fitting = [max(fitting, key=lambda name: sum(len(str(value).split()) for value in samples[name].values))]
    return f"{role.flag} {quote((fitting or others)[0])}"


def describe_columns(table: Table, samples: dict[str, ColumnSample]) -> list[str]:
    """Return a line about each column: an example and the number of distinct values."""
    width = max(map(len, samples), default=0)
    part = "" if len(table) <= ROWS_LOOKED_AT else f" in the first {ROWS_LOOKED_AT} rows"
    lines = []
    for name, sample in samples.items():
        example = repr(sample.values[0]) if sample.values else "nothing"
        example = example if len(example) <= 40 else example[:37] + "..."
        lines.append(f"  {name:<{width}}  e.g. {example:<40}  {sample.num_distinct} distinct{part}")
    return [f"columns in {table.name}:", *lines]
