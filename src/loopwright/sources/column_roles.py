"""Which column has which role: as given, else by name, else by elimination; never by an ambiguous guess."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from shlex import quote
from typing import Any, NamedTuple

from loopwright.config.display_width import display_width, pad, truncate
from loopwright.errors import InputError, nearest
from loopwright.metrics.words import count_words
from loopwright.sources.chats.formats import parsed
from loopwright.sources.chats.pairs import BESIDE, missing_columns
from loopwright.sources.chats.roles import CHAT_KINDS, chat_columns, could_be_chat, with_beside
from loopwright.sources.delimited import names_fix
from loopwright.sources.images.image_file import is_image_name
from loopwright.sources.schema import Role, Schema
from loopwright.sources.tables import Row, Table, outer_column, value_at

ROWS_SAMPLED = 500
_EXAMPLE_COLUMNS = 40
_BY_NAME = "guessed by its name"
_ID = re.compile(r"(^|[._ ])(id|uuid|index|.+_(id|at|by|name|type))$")
_STOPS = (".", "!", "?", "…", "。", "！", "？", "؟")
_LANGUAGES = "translation."  # prefix of the entries of a column of languages
_SIGNS = "|;~^,#:"  # which may separate columns
_ROWS_SEARCHED = 50  # for entries of nested columns
_MOST_NESTED = 200
FEW_LABELS = 50  # A column with more distinct values is not guessed to be labels.

# The values of columns that are a class each, in lower case.
IS_SET = dict.fromkeys(("0", "0.0", "false", "no"), False) | dict.fromkeys(("1", "1.0", "true", "yes", "x"), True)

Column = str | tuple[str, ...]
Columns = dict[str, Column]
GivenColumns = Mapping[str, str | Sequence[str]]


class Guess(NamedTuple):
    """A guessed column of a role, or another guessed setting."""

    name: str
    value: Column
    reason: str

    def __str__(self) -> str:
        return f"{self.name}={', '.join(map(repr, column_names(self.value)))} ({self.reason})"

    def brief(self) -> str:
        return str(self._replace(reason="guessed") if self.reason == _BY_NAME else self)


class ColumnSample(NamedTuple):
    """A column, sampled from the first rows."""

    name: str
    values: list[Any]

    @property
    def num_distinct(self) -> int:
        return len({json.dumps(value, sort_keys=True, default=str) for value in self.values})

    @property
    def num_words(self) -> int:
        return sum(count_words(str(value)) for value in self.values)

    @property
    def is_nested(self) -> bool:
        return any(isinstance(value, dict | list) for value in self.values)

    @property
    def is_text(self) -> bool:
        texts = [value for value in self.values if isinstance(value, str)]
        return len(texts) == len(self.values) and not all(is_number(text) for text in texts if text.strip())

    @property
    def has_chats(self) -> bool:
        return all(could_be_chat(parsed(value)) for value in self.values)

    @property
    def could_be_label(self) -> bool:
        if not self.values or self.is_nested:
            return False
        return 2 <= self.num_distinct <= min(FEW_LABELS, len(self.values) // 2)

    def has_value_as_name(self) -> bool | None:
        """Whether the name of the column looks like its values, as in a file without a header; None if uncertain."""
        texts = [text for value in self.values if (text := str(value).strip())]
        for is_such in (is_number, is_image_name):
            if texts and all(map(is_such, texts)):
                return is_such(self.name)
        if not texts or self.could_be_label:
            return self.name in texts if texts else None
        lengths, length = sorted(map(count_words, texts)), count_words(self.name)
        usual = lengths[len(lengths) // 2]
        if length > lengths[-1]:
            return False
        if self.name.endswith(_STOPS) or len(self.name.split()) > 2 or (length > 2 and length * 3 > usual):
            return True
        return False if usual > 3 else None

    def could_be(self, role: Role) -> bool:
        """Whether a column can have a role if the user says so: numbers are no texts, and texts no numbers."""
        return self.is_text if role.kind == "text" else role.kind != "float" or all(map(is_number, self.values))

    def fits(self, role: Role) -> bool:
        if role.kind == "text":
            return self.is_text and not (self.could_be_label and role.is_input)
        if role.kind in ("label", "class", "position"):
            return self.could_be_label
        if role.kind in ("chat", "prompt"):  # a pair has several columns
            return bool(self.values) and self.has_chats
        tests = {
            **dict.fromkeys(("tokens", "tags", "multi", "texts"), lambda value: isinstance(value, list)),
            **dict.fromkeys(("image", "mask"), _could_be_image),
            "float": is_number,
            "objects": lambda value: isinstance(value, dict) and len(value) > 1,
        }
        return role.kind in tests and bool(self.values) and all(map(tests[role.kind], self.values))


def column_names(column: str | Sequence[str]) -> list[str]:
    return [column] if isinstance(column, str) else list(column)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, or a text of one."""
    if isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value)) and not (isinstance(value, str) and "_" in value)
    except (TypeError, ValueError, OverflowError):
        return False


def _could_be_image(value: Any) -> bool:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    return isinstance(value, bytes) or (isinstance(value, str) and is_image_name(value.strip()))


def sample_columns(table: Table) -> dict[str, ColumnSample]:
    """Return the columns of the first rows; entries of a column of objects are columns `column.entry`."""
    rows: list[Row] = [{name: _truncated(value) for name, value in row.items()} for row in islice(table, ROWS_SAMPLED)]
    names: list[str] = []
    for name in table.columns:
        first: Any = next((row[name] for row in rows if row.get(name) is not None), None)
        is_object = isinstance(first, dict) and first and all(isinstance(value, str) for value in first.values())
        names += [f"{name}.{entry}" for entry in first] if is_object else [name]
    columns = {name: [value_at(row, name) for row in rows] for name in names}
    return {name: ColumnSample(name, [each for each in columns[name] if each is not None]) for name in names}


def nested_columns(table: Table, samples: Mapping[str, ColumnSample]) -> dict[str, ColumnSample]:
    """Return the texts and numbers inside columns of objects: `data.review.text`, `annotations.0.label`."""
    names: dict[str, None] = {}
    for name, sample in samples.items():
        for value in sample.values[:_ROWS_SEARCHED]:
            names |= dict.fromkeys(islice(_leaves(value, name), _MOST_NESTED)) if len(names) < _MOST_NESTED else {}
    rows = list(islice(table, ROWS_SAMPLED)) if names else []
    found = {name: [value_at(row, name) for row in rows] for name in names if name not in samples}
    return {name: ColumnSample(name, [each for each in values if each is not None]) for name, values in found.items()}


def _leaves(value: Any, path: str) -> Iterator[str]:
    parts: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list) and value and isinstance(value[0], dict if "." not in path else dict | str):
        parts = [("0", value[0])]
    for name, part in parts:
        if isinstance(part, str | int | float):
            yield f"{path}.{name}"
        yield from _leaves(part, f"{path}.{name}")


def has_column(table: Table, name: str) -> bool:
    """Whether a file has a column, or an entry of that name in one of its first rows."""
    return name in table.columns or any(value_at(row, name) is not None for row in islice(table, ROWS_SAMPLED))


def _truncated(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        return value | {"bytes": value["bytes"][:16]}
    return value[:16] if isinstance(value, bytes) else value


def sample_values(table: Table, column: str) -> list[Any]:
    block_rows = (value for block in table.blocks([column]) for value in block.values[column])
    return [value for value in islice(block_rows, ROWS_SAMPLED) if value is not None]


def choose_columns(schema: Schema, table: Table, given: GivenColumns) -> tuple[Columns, list[Guess]]:
    """Return the columns by role, and the guesses; InputError (data.column) if one is missing or ambiguous."""
    roles = [role.name for role in schema.roles]
    unknown = next((name for name in given if name not in roles), None)
    if unknown is not None:
        what, saw = f"--{unknown}_column: {schema.task} has no such role", [f"its roles: {', '.join(roles)}"]
        fix = f"--{nearest(unknown, roles) or roles[0]}_column instead of --{unknown}_column"
        raise InputError("args.value", what, saw=saw, fix=fix)
    choice = _Choice(schema, table)
    if len(table.columns) == 1 and sum(role.is_required for role in schema.roles) > 1:
        _refuse_one_column(table)
    if table.has_header and not any(name in choice.samples for each in given.values() for name in column_names(each)):
        _check_header(schema, table, choice.samples, given)
    choice.take(given)
    choice.guess()
    return {role: choice.columns[role] for role in roles if role in choice.columns}, choice.guesses


def possible_prompts(schema: Schema, table: Table, columns: Columns) -> list[str]:
    """Return the unused columns that may hold the prompts of pairs, where no column of prompts is known."""
    pairs = [column_names(columns[role.name]) for role in schema.roles if role.kind == "pair"]
    if all(len([name for name in names if name not in BESIDE]) > 2 for names in pairs):
        return []
    choice = _Choice(schema, table)
    choice.columns = columns
    samples = [choice.samples[name] for name in choice.texts()]
    return [each.name for each in samples if each.num_distinct > 1 and not each.could_be_label]


def _refuse_one_column(table: Table) -> None:
    """Refuse a file whose only column holds several: the same sign is in each row, equally often."""
    rows = [str(row.get(table.columns[0], "")) for row in islice(table, ROWS_SAMPLED)]
    rows += table.columns if table.has_header else ()
    signs = (sign for sign in ("\t", "::", *_SIGNS) if sign in rows[0] and len({row.count(sign) for row in rows}) == 1)
    if len(rows) < 3 or (sign := next(signs, None)) is None or table.kind not in ("csv", "tsv", "txt"):
        return
    fix = f"--file_kind csv --delimiter {quote(sign)}" if sign != "\t" else "--file_kind tsv --delimiter tab"
    if len(sign) > 1:
        path, new = quote(table.path), quote(f"{table.path}.tsv")
        command = f'python -c \'import sys; sys.stdout.write(sys.stdin.read().replace("{sign}", "\\t"))\''
        fix = f"{command} < {path} > {new}   then   {new} instead of {path}"
    saw = [f"each row has {sign!r}, as in {rows[0][:60]!r}"]
    raise InputError("data.column", f"{table.name} is read as one column", saw=saw, fix=fix)


def _check_header(schema: Schema, table: Table, samples: Mapping[str, ColumnSample], given: GivenColumns) -> None:
    """Refuse a file whose first line looks like a row, with the flags for both: it is one, or it has the names."""
    known = {name for role in schema.roles for name in (role.name, *role.names)}
    signs = [samples[name].has_value_as_name() for name in table.columns]
    is_only = len(signs) == 1 and bool(given)  # the column of a trained model is expected
    if not known.isdisjoint(map(str.lower, table.columns)) or False in signs or not (True in signs or is_only):
        return
    roles: dict[str, Role] = {}
    for role in (role for role in schema.roles if role.is_required):
        free = [name for name in table.columns if name not in roles]
        fitting = [name for name in free if samples[name].fits(role)] or free
        roles |= {fitting[0]: role} if fitting else {}
    named = {name: str(given.get(role.name, role.name)) for name, role in roles.items()}
    names = [named.get(name, f"column_{place}") for place, name in enumerate(table.columns, 1)]
    flags = " ".join(f"{role.flag} {quote(name)}" for name, role in roles.items())
    what = f"the first line of {table.name} looks like a row, not like the names of its columns"
    saw = [f"first line: {', '.join(map(repr, table.columns))[:200]}", *describe_columns(table, dict(samples))[1:]]
    raise InputError("data.header", what, saw=saw, fix=f"{names_fix(names, len(names))}   or   {flags}")


def as_spelled(name: str, others: Iterable[str]) -> str:
    """Return the one of the other names that differs only in Unicode's normal form, or the name itself."""
    others, form = list(others), unicodedata.normalize("NFC", name)
    same = (other for other in others if unicodedata.normalize("NFC", other) == form)
    return name if name in others or name.isascii() else next(same, name)


class _Choice:
    def __init__(self, schema: Schema, table: Table) -> None:
        self.schema = schema
        self.table = table
        self.samples = sample_columns(table)
        self.nested = nested_columns(table, self.samples)
        self.samples |= self.nested
        self.columns: Columns = {}
        self.guesses: list[Guess] = []
        self.given: GivenColumns = {}

    def take(self, given: GivenColumns) -> None:
        self.given = given
        absent: dict[str, str] = {}
        for role in (role for role in self.schema.roles if role.name in given):
            names = [as_spelled(name, self.samples) for name in self._split(role, given[role.name])]
            unknown = [name for name in names if name not in self.samples and not has_column(self.table, name)]
            if unknown:
                absent[role.name] = unknown[0]
            else:
                names = with_beside(role.kind, names, self.table.columns)
                self.columns[role.name] = names[0] if len(names) == 1 else tuple(names)
        if absent:
            raise self._no_such_columns(absent)

    def guess(self) -> None:
        for role in self.schema.roles:
            if role.name in self.columns:
                continue
            matching = self._by_name(role) or (self._by_name(role, is_nested=True) if role.is_required else [])
            if len(matching) > 1:
                raise self._ambiguous(role, [str(name) for name in matching])
            if matching:
                self._add(role, matching[0], _BY_NAME)
        for role in self.schema.roles:
            if role.name in self.columns or not role.is_required:
                continue
            fitting = self._fitting(role)
            if len(fitting) != 1:
                raise self._ambiguous(role, fitting)
            found = with_beside(role.kind, fitting, self.table.columns)
            self._add(role, found[0] if len(found) == 1 else tuple(found), "guessed: no other column is left that fits")

    def _add(self, role: Role, column: Column, reason: str) -> None:
        self.columns[role.name] = column
        self.guesses.append(Guess(role.name, column, reason))

    def texts(self) -> list[str]:
        """Return the unused columns that may be a part of a pair: texts, or lists of messages."""
        free = [name for name in self._free() if name not in BESIDE and not _ID.search(name.lower())]
        found = [name for name in free if self.samples[name].is_text or self.samples[name].has_chats]
        parts = [name for name in self._free(True) if not _ID.search(name.lower())]
        return found + [name for name in parts if outer_column(found, name) is None]

    def _free(self, is_nested: bool = False) -> list[str]:
        used = {name for column in self.columns.values() for name in column_names(column)}
        return [name for name in self.samples if name not in used and (name in self.nested) == is_nested]

    def _fitting(self, role: Role) -> list[str]:
        """Return the unused columns with suitable values, ids not as labels; nested ones only without others."""
        found = ([name for name in self._free(depth) if self.samples[name].fits(role)] for depth in (False, True))
        names = ([name for name in each if not role.is_label or not _ID.search(name.lower())] for each in found)
        return next(filter(None, names), [])

    def _split(self, role: Role, column: str | Sequence[str]) -> list[str]:
        """Return the columns given for a role; several, of texts or of 0 and 1, may be one comma-separated text."""
        if isinstance(column, str) and role.kind in ("texts", "label") and column not in self.samples and "," in column:
            return [name.strip() for name in column.split(",")]
        return column_names(column)

    def _by_name(self, role: Role, is_nested: bool = False) -> list[Column]:
        """Return the columns that have the role's names: one, or several if none of them is preferred."""
        if role.kind in CHAT_KINDS:
            found = chat_columns(role.kind, self.table.columns, role.names)
            return [found if len(found) > 1 else found[0]] if found and not is_nested else []
        if is_nested:
            nested = (name for name in self._free(True) if name.rpartition(".")[2].lower() in role.names)
            return [name for name in nested if self.samples[name].fits(role)]
        free = {name.lower(): name for name in self._free()}
        for name in role.names:
            if name.endswith("*") and (family := _family(name, free)):
                return [tuple(family)]
        matching: list[Column] = [free[name] for name in role.names if name in free]
        if not matching and role.kind == "texts" and (family := _family("*", free)):  # A, B, C or 1, 2, 3
            return [tuple(family)]
        is_preferred = bool(matching) and str(matching[0]).lower() in (role.names[0], role.name)
        return matching[:1] if is_preferred else matching

    def _no_such_columns(self, absent: Mapping[str, str]) -> InputError:
        # Columns that other roles use, or are proposed for, are not proposed again.
        for role in self.schema.roles:
            if role.is_required and role.name not in self.columns and role.name not in absent:
                matching = self._by_name(role)
                self.columns[role.name] = matching[0] if len(matching) == 1 else ()
        whats, fixes = [], []
        for role in (role for role in self.schema.roles if role.name in absent):
            free = [name for name in self._free() + self._free(True) if self.samples[name].could_be(role)]
            near = nearest(absent[role.name], free)
            fitting = [near] if near else self._fitting(role)
            whats.append(f"{role.flag} {absent[role.name]!r}: no such column")
            names = self._split(role, self.given[role.name])
            is_one_of_several = role.kind == "label" and len(names) > 1 and fitting
            right = [fitting[0] if name == absent[role.name] else name for name in names] if is_one_of_several else []
            fixes.append(_columns_flag(role, right) if right else self._fix(role, fitting))
            self.columns[role.name] = tuple(fitting[:1] or free[:1])
        saw = describe_columns(self.table, self.samples)
        return InputError("data.column", "; ".join(whats), saw=saw, fix=" ".join(fixes))

    def _ambiguous(self, role: Role, fitting: list[str]) -> InputError:
        what = "no column looks like it"
        if len(fitting) > 1:
            first, last = ", ".join(map(repr, fitting[:-1])), repr(fitting[-1])
            what = f"{first} and {last} would {'both' if len(fitting) == 2 else 'all'} do"
        if role.kind == "pair":
            what, fix = missing_columns(self.table.columns, role.names, self.texts())
            fix = fix or f"name the columns of {self.table.name} prompt, chosen and rejected"
            return InputError("data.column", what, saw=describe_columns(self.table, self.samples), fix=fix)
        saw, fix = describe_columns(self.table, self.samples), self._languages_fix(fitting) or self._fix(role, fitting)
        return InputError("data.column", f"the column for {role.name} cannot be guessed: {what}", saw=saw, fix=fix)

    def _languages_fix(self, fitting: list[str]) -> str:
        """Return flags for the languages of records such as {"translation": {"en": ..., "ro": ...}}; else ""."""
        codes = [name[len(_LANGUAGES) :] for name in fitting if name.lower().startswith(_LANGUAGES)]
        if len(codes) < 2:
            return ""
        unnamed = [role.name for role in self.schema.roles if role.has_language and role.name not in self.columns]
        return " ".join(f"--{role}_lang {code}" for role, code in zip(unnamed, codes, strict=False))

    def _fix(self, role: Role, fitting: list[str]) -> str:
        """Return the flag with the nearest column, of `fitting` ones or else of unused ones with suitable values."""
        free = self._free()
        switches = [
            name for name in free if {str(each).lower() for each in self.samples[name].values} <= IS_SET.keys() | {""}
        ]
        if role.kind == "label" and len(set(fitting) & set(switches)) > 1:
            return _columns_flag(role, switches)
        if role.kind in ("tokens", "tags") and not fitting:
            if self.table.kind == "txt":
                return "--file_kind conll"
            if self.table.kind in ("csv", "tsv"):
                return f"write one row per sentence into {self.table.name}, with words and tags separated by blanks"
            return f"add a column named {role.name} to {self.table.name}, with a list in each row"
        if role.kind in CHAT_KINDS and not fitting:
            formats = "messages, conversations, prompt and completion, or instruction and output"
            return f"name the columns of {self.table.name} as one of the formats of conversations: {formats}"
        if role.kind in ("image", "mask") and not fitting:
            return f"add a column named {role.name} to {self.table.name}, with the paths of the images"
        if role.kind == "text" and fitting:  # an id is a text too: prefer the column with the most words
            fitting = [max(fitting, key=lambda name: self.samples[name].num_words)]
        free = [name for name in free if self.samples[name].could_be(role) and not _ID.search(name.lower())]
        if role.is_label:  # words are rather labels than numbers
            fitting = sorted(fitting, key=lambda name: not self.samples[name].is_text)
        if not fitting and not free:
            return f"add a column named {role.name} to {self.table.name}"
        return f"{role.flag} {quote((fitting or free)[0])}"


def _columns_flag(role: Role, names: list[str]) -> str:
    return f"--{role.name}_columns {quote(','.join(names) if ',' not in ''.join(names) else json.dumps(names))}"


def _family(pattern: str, free: dict[str, str]) -> list[str]:
    """Return the columns of a pattern ("ending*"), in the order of their numbers or letters; none if there is one."""
    matches = {name: re.fullmatch(rf"{re.escape(pattern[:-1])}[_ ]?(\d+|[a-z])", lower) for lower, name in free.items()}
    ends = {name: match[1] for name, match in matches.items() if match is not None}
    return sorted(ends, key=lambda name: (len(ends[name]), ends[name])) if len(ends) > 1 else []


def describe_columns(table: Table, samples: dict[str, ColumnSample]) -> list[str]:
    width = max(map(display_width, samples), default=0)
    part = "" if len(table) <= ROWS_SAMPLED else f" in the first {ROWS_SAMPLED} rows"
    lines = []
    for name, sample in samples.items():
        example = repr(sample.values[0]) if sample.values else "nothing"
        example = pad(truncate(example, _EXAMPLE_COLUMNS, "..."), _EXAMPLE_COLUMNS)
        lines.append(f"  {pad(name, width)}  e.g. {example}  {sample.num_distinct} distinct{part}")
    return [f"columns in {table.name}:", *lines]
