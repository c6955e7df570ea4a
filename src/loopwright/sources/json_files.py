"""JSON files: one object per line, a list of objects, an object with such a list, and SQuAD's nested format.

Lines stream: only their offsets stay in memory. A file that is a single JSON value is loaded whole, up to
`MAX_JSON_BYTES`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from shlex import quote
from typing import Any

from loopwright.config.files import MOST_DEPTH, check_depth
from loopwright.errors import InputError
from loopwright.sources.files import FileBytes, Places, RowSplitter, Say, index_rows, line_starts
from loopwright.sources.tables import MOST_COLUMNS, DamagedRow, IndexedTable, Row, Table

MAX_JSON_BYTES = 512 << 20
LIST_NAMES = ("data", "rows", "examples", "instances", "items", "records", "train", "validation", "test")
ROWS_FOR_COLUMNS = 1000
_HEAD_BYTES = 1 << 20
_LIST_KEY = re.compile(rf'"({"|".join(LIST_NAMES)})"\s*:\s*\[')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # a lone surrogate, or one of a pair


class LineSplitter(RowSplitter):
    """Finds lines; blank ones do not count, unless they are kept."""

    def __init__(self, keeps_blank: bool = False) -> None:
        self._keeps_blank = keeps_blank

    def split(self, buffer: bytes, is_last: bool) -> tuple[Places, int]:
        starts, is_blank, num_done = line_starts(buffer, is_last)
        return starts if self._keeps_blank else starts[~is_blank], num_done


class JsonLinesTable(IndexedTable):
    """A file with one JSON object per line."""

    def __init__(self, source: FileBytes, say: Say | None) -> None:
        super().__init__(source, "jsonl")
        self.index = index_rows(source, LineSplitter(source.keeps_blank), say)
        self.sha256 = source.sha256
        self.columns = columns_of(self[k] for k in range(min(len(self), ROWS_FOR_COLUMNS)))

    def parse(self, data: bytes, index: int) -> Row:
        text = data.decode("utf-8")
        try:
            row = json.loads(text if text.strip() else "{}")
            if data.count(b"[") + data.count(b"{") > MOST_DEPTH:
                check_depth(row)
        except (ValueError, RecursionError) as error:
            message, place = _explain(error)
            fix = f"--bad_rows drop   or   write {self.place(index)} as one JSON object"
            if not index and not text.lstrip().startswith("{"):
                fix = "--file_kind csv"
            what = f"{self.path}: {self.place(index)} is not JSON: {message} at character {place + 1}"
            raise InputError("data.json", what, saw=[repr(text[max(0, place - 30) : place + 30])], fix=fix) from error
        if not isinstance(row, dict):
            raise _not_an_object(self.path, self.place(index), row)
        if _SURROGATE.search(data) is not None and (readable := encodable(row)) != row:
            self.notes = self.notes or (_surrogate_note(self, index),)
            row = readable
        return dict(row)


class JsonTable(Table):
    """A JSON file with a list of objects, at the top or under a key; SQuAD's articles become their questions.

    Its rows are in memory. A pickled table loads them again, so that loader workers can be spawned.
    """

    rows_per_block = 2000

    def __init__(self, source: FileBytes, say: Say | None) -> None:
        self.path = str(source.path)
        self.kind = "json"
        self.source = source
        self.num_bytes = source.num_bytes
        self._rows: list[Row] | None = self._load(say)
        self.sha256 = source.sha256
        self.columns = columns_of(self._rows[:ROWS_FOR_COLUMNS])
        self._num_rows = len(self._rows)
        if not self._rows:
            fix = "give a file with rows"
            raise InputError("data.no_rows", f"{self.path} holds an empty list", saw=["[]"], fix=fix)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_rows": None}

    def settings(self) -> dict[str, Any]:
        return super().settings() | self.source.settings()

    def __len__(self) -> int:
        return self._num_rows

    def row(self, index: int) -> Row:
        if self._rows is None:
            self._rows = self._load(None)
        row = self._rows[index]
        return row if isinstance(row, DamagedRow) else dict(row)

    def __iter__(self) -> Iterator[Row]:
        return map(self.row, range(len(self)))  # with the keys that each row has

    def _load(self, say: Say | None) -> list[Row]:
        content = load_json(self.source, say, _conversion(self.source))
        found = _find_rows(content)
        if found is None:
            keys = f"an object with the keys {', '.join(content)}" if isinstance(content, dict) else repr(content)
            fix = 'write [{"column": value}, ...], or one object per line in a .jsonl file'
            what = f"{self.path} is not a list of objects"
            raise InputError("data.json", what, saw=[f"it holds {keys}"[:200]], fix=fix)
        items, path = found
        if path and path not in LIST_NAMES:
            self.notes = (f"the rows of {self.name} are read from: {path}",)
        rows: list[Row] = []
        for number, item in enumerate(items):
            try:
                rows += _rows_of(item, self.path, f"item {number + 1:,} of the list")
            except InputError as error:
                if not self.source.keeps_damaged:
                    raise
                rows.append(DamagedRow(error, {}))
        if _SURROGATE.search(self.source.read(0, self.num_bytes)) is not None:
            broken = {number: new for number, row in enumerate(rows) if (new := encodable(row)) != row}
            for number, row in broken.items():
                rows[number] = row
            self.notes += (_surrogate_note(self, min(broken)),) if broken else ()
        return rows


def load_json(source: FileBytes, say: Say | None, fix_if_large: str) -> Any:
    """Return the value of a file that holds one; raise an InputError, data.json, if it is damaged or too large."""
    if source.num_bytes > MAX_JSON_BYTES:
        what = f"{source.path} is larger than {MAX_JSON_BYTES >> 20} MB, the limit for JSON that is loaded whole"
        raise InputError("data.json", what, saw=[f"it has {source.num_bytes:,} bytes"], fix=fix_if_large)
    text = b"".join(source.checked_chunks(say)).decode("utf-8")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        message, place = _explain(error)
        offset = source.start + len(text[:place].encode("utf-8"))
        around = repr(text[max(0, place - 30) : place + 30])
        what = f"{source.path}: {message} in line {source.line_at(offset):,}, at byte {offset:,}"
        saw = [f"around it: {around}" if text[place:].strip() else f"the file ends there, after {around}"]
        raise InputError("data.json", what, saw=saw, fix="write the file again, for instance with json.dump") from error


def _conversion(source: FileBytes) -> str:
    key = _LIST_KEY.search(source.read(source.start, _HEAD_BYTES).decode("utf-8", "replace"))
    is_list = source.read(source.start, 64).lstrip().startswith(b"[")
    rows = "json.load(sys.stdin)" + ("" if is_list or key is None else f'["{key[1]}"]')
    return (
        f"python -c 'import json, sys; sys.stdout.writelines(json.dumps(row) + \"\\n\" for row in {rows})' "
        f"< {quote(str(source.path))} > {quote(str(source.path.with_suffix('.jsonl')))}   "
        "and give the .jsonl file, which is not loaded whole"
    )


def _explain(error: ValueError | RecursionError) -> tuple[str, int]:
    """Return the problem and its position; huge numbers and deep nesting have none."""
    if isinstance(error, json.JSONDecodeError):
        return error.msg.removesuffix(" at"), error.pos
    return ("nested too deeply" if isinstance(error, RecursionError) else str(error)), 0


def _find_rows(content: Any) -> tuple[list[Any], str] | None:
    """Return the rows in a JSON value, and where they are if not in a list at the top; None if there are none.

    They may also be written by column, as lists or (the default of pandas) by row number, or by an id.
    """
    if not isinstance(content, dict):
        return (content, "") if isinstance(content, list) else None
    values = list(content.values())
    if values and all(isinstance(each, dict) and "0" in each for each in values):
        return [{name: each.get(key) for name, each in content.items()} for key in values[0]], "by column"
    sizes = {
        len(each) if isinstance(each, list) and not any(isinstance(part, dict) for part in each) else -1
        for each in values
    }
    if len(values) > 1 and len(sizes) == 1 and sizes != {-1}:
        return [dict(zip(content, row, strict=True)) for row in zip(*values, strict=True)], "by column"
    if len(values) > 1 and all(isinstance(each, dict) for each in values) and set.intersection(*map(set, values)):
        return values, "by id"
    for name in sorted(content, key=lambda name: name not in LIST_NAMES):
        rows = content[name]
        if isinstance(rows, list) and (name in LIST_NAMES or (rows and all(isinstance(row, dict) for row in rows))):
            return rows, name
    found = ((name, _find_rows(part)) for name, part in content.items() if isinstance(part, dict))
    return next(((rows[0], f"{name}.{rows[1]}") for name, rows in found if rows is not None), None)


def _rows_of(item: Any, path: str, place: str) -> list[Row]:
    if not isinstance(item, dict):
        raise _not_an_object(path, place, item)
    try:
        check_depth(item)
    except ValueError as error:
        what, fix = f"{path}: {place}: {error}", "--bad_rows drop   or   write its values as text or numbers"
        raise InputError("data.json", what, fix=fix) from error
    return _questions(item, f"{path}: {place}")


def _questions(item: Row, place: str) -> list[Row]:
    """Return the rows of an object: itself, or its questions in SQuAD's nested format."""
    paragraphs = item.get("paragraphs")
    if not isinstance(paragraphs, list) or not all(isinstance(part, dict) and "qas" in part for part in paragraphs):
        return [item]
    for paragraph in paragraphs:
        questions = paragraph["qas"]
        if not isinstance(questions, list) or not all(isinstance(question, dict) for question in questions):
            what = f"{place} is an article without readable questions"
            fix = '--bad_rows drop   or   write "qas": [{"question": ..., "answers": [...]}, ...] for each paragraph'
            raise InputError("data.json", what, saw=[f'"qas" is {repr(questions)[:60]}'], fix=fix)
    return [
        {
            "id": question.get("id"),
            "title": item.get("title"),
            "question": question.get("question"),
            "context": paragraph.get("context"),
            "answers": question.get("answers", []),
        }
        for paragraph in paragraphs
        for question in paragraph["qas"]
    ]


def encodable(value: Any) -> Any:
    """Return a value with the replacement character for each lone surrogate, which JSON allows and no model reads."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {encodable(name): encodable(part) for name, part in value.items()}
    return [encodable(part) for part in value] if isinstance(value, list) else value


def _surrogate_note(table: Table, index: int) -> str:
    place = f"{table.place(index)} of {table.name}"
    return f"{place} holds half of a character: it is read as \ufffd, and so are all others"


def columns_of(rows: Iterable[Row]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for row in rows:
        found |= dict.fromkeys(row)
        if len(found) > MOST_COLUMNS:  # refused by open_table
            break
    return tuple(found)


def _not_an_object(path: str, place: str, value: Any) -> InputError:
    kind = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}.get(type(value), "a number")
    fix = '--bad_rows drop   or   write each row as an object: {"column": value, ...}'
    return InputError("data.json", f"{path}: {place} is {kind}, not an object", saw=[repr(value)[:80]], fix=fix)


def open_json(source: FileBytes, say: Say | None) -> Table:
    """Return the table of a .json file: JSON lines if its first line is a whole object, unless that holds all rows."""
    head = source.read(source.start, _HEAD_BYTES).decode("utf-8", "replace").lstrip(" \t\r\n")
    try:
        first, end = json.JSONDecoder().raw_decode(head) if head.startswith("{") else ({}, 0)
    except (ValueError, RecursionError):
        first, end = {}, 0
    if not end or "\n" in head[:end]:
        return JsonTable(source, say)
    found = None if head[end:].strip() else _find_rows(first)
    if found is None or not all(isinstance(row, dict) for row in found[0]):
        return JsonLinesTable(source, say)
    is_row = "by" not in found[1] and found[1] not in LIST_NAMES and len(str(found[0])) * 2 < len(str(first))
    return JsonLinesTable(source, say) if is_row else JsonTable(source, say)
