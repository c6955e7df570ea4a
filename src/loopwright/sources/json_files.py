"""JSON files: one object per line, a list of objects, an object with such a list, and SQuAD's nested format.

A list is not loaded: its objects are decoded one by one and only their offsets are kept. Rows are decoded again on
access.
"""

from __future__ import annotations

import codecs
import json
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.errors import InputError
from loopwright.sources.files import MAX_ROW_BYTES, FileBytes, Offsets, Progress, Say, index_rows, line_starts
from loopwright.sources.tables import Block, IndexedTable, Row, Table, value_at
from loopwright.sources.values import UnusableValueError

LIST_NAMES = ("data", "rows", "examples", "instances", "items", "records", "train", "validation", "test")
ROWS_FOR_COLUMNS = 1000
ROWS_PER_BLOCK = 2000
_HEAD_BYTES = 1 << 20
_DECODER = json.JSONDecoder()
_BLANKS = " \t\r\n"
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # a single surrogate, or one of a pair


class LineSplitter:
    """Finds lines; blank ones do not count."""

    def split(self, buffer: bytes, is_last: bool) -> tuple[npt.NDArray[np.int64], int]:
        """Return the row starts, and the number of bytes consumed."""
        starts, is_blank, num_done = line_starts(buffer, is_last)
        return starts[~is_blank], num_done

    def explain_long_row(self, source: FileBytes, start: int, buffer: bytes) -> InputError | None:
        """Return None: there is no better error for a long line."""
        return None


class JsonLinesTable(IndexedTable):
    """A file with one JSON object per line."""

    def __init__(self, source: FileBytes, say: Say | None) -> None:
        super().__init__(source, "jsonl")
        self.index = index_rows(source, LineSplitter(), say)
        self.sha256 = source.sha256
        self.columns = columns_of(self[k] for k in range(min(len(self), ROWS_FOR_COLUMNS)))

    def parse(self, data: bytes, index: int) -> Row:
        """Parse the bytes of a row."""
        text = data.decode("utf-8")
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            message, place = _explain(error)
            raise InputError(
                "data.json",
                f"{self.path}: {self.place(index)} is no JSON: {message} at character {place + 1}",
                saw=[repr(text[max(0, place - 30) : place + 30])],
                fix="write one JSON object per line, for instance with json.dumps"
                if index or text.lstrip().startswith("{")
                else "--file_kind csv if that is what it is, or write one JSON object per line",
            ) from error
        if not isinstance(row, dict):
            raise _no_object(self.path, self.place(index), row)
        if _HALF.search(data) is not None and not is_whole(row):
            self.notes = self.notes or (_half_note(self.name, self.place(index)),)
            return mended_row(row)
        return row


class JsonTable(Table):
    """A JSON file with a list of objects, at the top or under a name; SQuAD's articles become their questions."""

    def __init__(self, source: FileBytes, say: Say | None) -> None:
        self.path = str(source.path)
        self.kind = "json"
        self.source = source
        self.num_bytes = source.num_bytes
        starts, ends, counts = array("Q"), array("Q"), array("Q")
        columns: dict[str, None] = {}
        num_rows = 0
        for start, end, item in ListReader(source, say).items():
            try:
                rows = rows_of(item)
            except UnusableValueError as error:
                raise InputError(
                    "data.json",
                    f"{self.path}: the article in line {source.line_at(start):,} has no questions that can be read",
                    saw=[str(error)],
                    fix='write "qas": [{"question": ..., "answers": [...]}, ...] for each paragraph',
                ) from error
            if num_rows < ROWS_FOR_COLUMNS:
                columns.update(dict.fromkeys(columns_of(rows)))
            starts.append(start)
            ends.append(end)
            counts.append(len(rows))
            num_rows += len(rows)
        self.sha256 = source.sha256
        self.columns = tuple(columns)
        self._starts: Offsets = np.array(starts, np.uint64)
        self._ends: Offsets = np.array(ends, np.uint64)
        # Rows before each object: an object of SQuAD's nested format has many.
        self._firsts: Offsets = np.concatenate([[0], np.cumsum(np.array(counts, np.uint64))]).astype(np.uint64)
        self._last_rows: tuple[int, list[Row]] = (-1, [])
        if not num_rows:
            raise InputError(
                "data.no_rows", f"{self.path} holds a list without rows", saw=["[]"], fix="give a file with rows"
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last_rows": (-1, [])}

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a table of {len(self)} rows")
        item = int(np.searchsorted(self._firsts, index, side="right")) - 1
        held, rows = self._last_rows
        if held != item:
            rows = self._read(item)
            self._last_rows = (item, rows)
        return dict(rows[index - int(self._firsts[item])])

    def __iter__(self) -> Iterator[Row]:
        for item in range(len(self._starts)):
            yield from self._read(item)

    def blocks(self, columns: Sequence[str], say: Say | None = None) -> Iterator[Block]:
        """Yield all rows in order, with the named columns only. A missing value is None."""
        start, rows = 0, []
        for item in range(len(self._starts)):
            rows += self._read(item)
            if len(rows) >= ROWS_PER_BLOCK or item == len(self._starts) - 1:
                yield Block(start, {name: [value_at(row, name) for row in rows] for name in columns})
                start, rows = start + len(rows), []
                if say is not None:
                    say(Progress(self.path, "checking", int(self._ends[item]), self.num_bytes))

    def place(self, index: int) -> str:
        """Return the row and the starting line of its object."""
        item = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return f"row {index + 1:,} (line {self.source.line_at(int(self._starts[item])):,})"

    def _read(self, item: int) -> list[Row]:
        data = self.source.read_row(int(self._starts[item]), int(self._ends[item]))
        value = json.loads(data)
        if _HALF.search(data) is not None and not is_whole(value):
            value = mended_row(value)
            self.notes = self.notes or (_half_note(self.name, self.place(int(self._firsts[item]))),)
        return rows_of(value)


class ListReader:
    """Decodes the objects of one or several lists, one by one; buffers no more text than necessary."""

    def __init__(self, source: FileBytes, say: Say | None) -> None:
        self.source = source
        self.chunks = source.checked_chunks(say)
        self.text = ""
        self.place = 0  # in text
        self.known = (0, source.start)  # a position in text, not after this one, and its offset in the file
        self.decoder = codecs.getincrementaldecoder("utf-8")()

    def items(self) -> Iterator[tuple[int, int, Row]]:
        """Yield (start, end, object) for each object of the list, in bytes; read the file to its end."""
        self._enter_list()
        yield from self.list_items()
        self.finish()

    def list_items(self) -> Iterator[tuple[int, int, Row]]:
        """Yield the objects of the list whose bracket comes next, and move past its end."""
        while self._next_character() != "]":
            start = self._byte_offset()
            item = self._decode()
            if not isinstance(item, dict):
                raise _no_object(str(self.source.path), f"the value in line {self.source.line_at(start):,}", item)
            yield start, self._byte_offset(), item
            character = self._next_character()
            if character not in (",", "]"):
                raise self._damaged("a comma or the end of the list is missing", self.place)
            if character == ",":
                self.place += 1
                if self._next_character() == "]":
                    raise self._damaged("a value is missing", self.place)
        self.place += 1

    def parts(self, lists: Sequence[str]) -> Iterator[tuple[str, int, int, Any]]:
        """Yield (name, start, end, value) for an object that fills the file, in bytes.

        The named lists are yielded object by object, after a None for the list itself.
        """
        if self._next_character() != "{":
            raise self._damaged("an object in braces is expected", self.place)
        character = ","
        while character == ",":
            self.place += 1
            if character == "," and self._next_character() == "}":
                break
            name = self._decode()
            if not isinstance(name, str) or self._next_character() != ":":
                raise self._damaged("a name and a colon are expected", self.place)
            self.place += 1
            if self._next_character() == "[" and name in lists:
                yield name, self._byte_offset(), self._byte_offset(), None
                self.place += 1
                yield from ((name, *item) for item in self.list_items())
            else:
                start = self._byte_offset()
                value = self._decode()
                yield name, start, self._byte_offset(), value
            character = self._next_character()
        if self._next_character() != "}":
            raise self._damaged("a comma or the end of the object is missing", self.place)
        self.finish()

    def finish(self) -> None:
        """Read to the end of the file, so that all of it is checked."""
        for _ in self.chunks:
            pass

    def _enter_list(self) -> None:
        first = self._next_character()
        seen = []
        if first == "{":
            self.place += 1
            while self._next_character() == '"':
                name = self._decode()
                seen.append(name)
                if self._next_character() != ":":
                    raise self._damaged("a colon is missing", self.place)
                self.place += 1
                first = self._next_character()
                if name in LIST_NAMES and first == "[":
                    break
                self._decode()
                if self._next_character() != ",":
                    break
                self.place += 1
        if first != "[" or self._next_character() != "[":
            what = f"an object with the keys {', '.join(map(str, seen))}" if seen else f"what starts with {first!r}"
            raise InputError(
                "data.json",
                f"{self.source.path} is no list of objects",
                saw=[f"line {self.source.line_at(self._byte_offset())}: {what}"],
                fix='write [{"column": value}, ...], or one object per line in a .jsonl file, '
                f"or the list under one of the keys {', '.join(LIST_NAMES[:4])}",
            )
        self.place += 1

    def _next_character(self) -> str:
        """Peek at the next non-blank character; "" at the end of the file."""
        while True:
            while self.place < len(self.text) and self.text[self.place] in _BLANKS:
                self.place += 1
            if self.place < len(self.text):
                return self.text[self.place]
            if not self._read_more():
                return ""

    def _decode(self) -> Any:
        """Decode the value that starts here and move past it."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.place)
            except (ValueError, RecursionError) as error:
                message, place = _explain(error, self.place)
                is_cut_off = message.startswith("Unterminated") or place >= len(self.text) - 12
                if is_cut_off and len(self.text) - self.place <= 8 * MAX_ROW_BYTES and self._read_more():
                    continue
                raise self._damaged(message, place) from error
            if end == len(self.text) and self._read_more():
                continue  # A number could continue.
            self.place = end
            return value

    def _read_more(self) -> bool:
        """Append the next chunk, drop consumed text; return False at the end of the file."""
        chunk = next(self.chunks, None)
        if chunk is None:
            return False
        self.known = (0, self._byte_offset())
        self.text = self.text[self.place :] + self.decoder.decode(chunk[1])
        self.place = 0
        return True

    def _byte_offset(self) -> int:
        place, offset = self.known
        if self.text.isascii():
            return offset + self.place - place
        offset += len(self.text[place : self.place].encode("utf-8"))
        self.known = (self.place, offset)
        return offset

    def _damaged(self, message: str, place: int) -> InputError:
        around = self.text[max(0, place - 30) : place + 30]
        offset = self._byte_offset() + len(self.text[self.place : place].encode("utf-8"))
        return InputError(
            "data.json",
            f"{self.source.path}: {message} in line {self.source.line_at(offset):,}, at byte {offset:,}",
            saw=[f"around it: {around!r}" if self.text[place:].strip() else f"the file ends there, after {around!r}"],
            fix="write the file again, for instance with json.dump",
        )


def _explain(error: ValueError | RecursionError, place: int = 0) -> tuple[str, int]:
    """Return the problem and its position; huge numbers and deep nesting have none."""
    if isinstance(error, json.JSONDecodeError):
        return error.msg, error.pos
    return ("nested too deeply" if isinstance(error, RecursionError) else str(error)), place


def rows_of(item: Row) -> list[Row]:
    """Return the rows of an object: itself, or its questions in SQuAD's nested format.

    Raises:
        UnusableValueError: The questions of a paragraph are not a list of objects.
    """
    paragraphs = item.get("paragraphs")
    if not isinstance(paragraphs, list) or not all(isinstance(part, dict) and "qas" in part for part in paragraphs):
        return [item]
    for paragraph in paragraphs:
        questions = paragraph["qas"]
        if not isinstance(questions, list) or not all(isinstance(question, dict) for question in questions):
            raise UnusableValueError(f'"qas" is {repr(questions)[:60]}')
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


def is_whole(value: Any) -> bool:
    """Whether all texts of a value can be encoded: JSON allows lone surrogates, which no model reads."""
    if isinstance(value, str):
        return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, dict):
        return all(is_whole(part) for pair in value.items() for part in pair)
    return all(map(is_whole, value)) if isinstance(value, list) else True


def mended_row(row: Row) -> Row:
    """Return a row with the replacement character for each lone surrogate."""
    return {mended(name): mended(part) for name, part in row.items()}


def mended(value: Any) -> Any:
    """Return a value with the replacement character for each lone surrogate."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return mended_row(value)
    return [mended(part) for part in value] if isinstance(value, list) else value


def _half_note(name: str, place: str) -> str:
    return f"{place} of {name} holds half of a character: it is read as \ufffd, and so are all others"


def columns_of(rows: Any) -> tuple[str, ...]:
    """Return the names of all columns of these rows, in the order of first appearance."""
    return tuple(dict.fromkeys(name for row in rows for name in row))


def _no_object(path: str, place: str, value: Any) -> InputError:
    kind = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}.get(type(value), "a number")
    return InputError(
        "data.json",
        f"{path}: {place} is {kind}, not an object",
        saw=[repr(value)[:80]],
        fix='write each row as an object: {"column": value, ...}',
    )


def open_json(source: FileBytes, say: Say | None) -> Table:
    """Return the table of a .json file, which contains a list or one object per line.

    An object that ends within the first line is a row, unless it is alone and has a list of rows.
    """
    head = source.read(source.start, _HEAD_BYTES).decode("utf-8", "replace").lstrip(_BLANKS)
    if not head.startswith("{"):
        return JsonTable(source, say)
    try:
        first, end = _DECODER.raw_decode(head)
    except (ValueError, RecursionError):
        return JsonTable(source, say)
    _refuse_columns(first, source)
    if "\n" in head[:end]:
        return JsonTable(source, say)
    is_alone = not head[end:].strip(_BLANKS)
    holds_rows = any(
        isinstance(first.get(name), list) and all(isinstance(item, dict) for item in first[name]) for name in LIST_NAMES
    )
    return JsonTable(source, say) if is_alone and holds_rows else JsonLinesTable(source, say)


def _refuse_columns(first: Row, source: FileBytes) -> None:
    """Refuse an object of columns, each an object of values by row number: the default of pandas."""
    columns = list(first.values())
    if columns and all(isinstance(values, dict) and "0" in values for values in columns):
        raise InputError(
            "data.json",
            f"{source.path} holds columns, not rows",
            saw=[f"{name}: {str(values)[:60]}" for name, values in list(first.items())[:4]],
            fix='write rows: data.to_json(PATH, orient="records") in pandas, or a csv file',
        )
