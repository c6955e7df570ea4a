"""csv and tsv files: delimiter and quoting are sniffed, and rows are read as Python's csv module reads them.

numpy finds the row starts: a line break ends a row if an even number of quotes precedes it. That holds as long as every
quote opens or closes a field. Otherwise (`5" disk,1`) the rest of the chunk is parsed field by field, by the rules of
the csv module: a quote is special only at the start of a field.

numpy also finds the fields of well-formed rows (`cut_columns`), many rows at a time. Other rows are left to the csv
module: a quote inside an unquoted field, text after a closing quote, or a wrong number of fields.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np

from loopwright.errors import InputError
from loopwright.sources.csv_columns import QUOTE, Bytes, cut_columns
from loopwright.sources.files import (
    BOM,
    MAX_ROW_BYTES,
    FileBytes,
    Offsets,
    Places,
    RowSplitter,
    Say,
    blank_lines,
    index_rows,
)
from loopwright.sources.tables import MOST_COLUMNS, Block, IndexedTable, Row, Table, check_columns

DELIMITERS = {"comma": ",", "tab": "\t", "semicolon": ";", "pipe": "|"}
HEAD_BYTES = 256 << 10
HEAD_ROWS = 200
MOST_ROWS_NAMED = 5
MOST_HEADER_BYTES = 16 << 20
_BACKSLASH = 92
_DECIMAL_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d+)(,\d+)?")
_DECIMAL_POINT = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?")
THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}([.,]\d{3})+")  # which may also be decimals
_TIMES_BELOW = 5  # as many lines as above a header, at least
_ROWS_COMPARED = 20
_OTHER_QUOTES: dict[str, dict[str, Any]] = {
    "single": {"quotechar": "'"},
    "backslash": {"escapechar": "\\"},
}  # what the csv module calls them
_BACKSLASHES = re.compile(r'\\(["\\])?')
_SEPARATOR_LINE = re.compile(rb'"?sep=([^"\r\n])"?\r?\n')

GivenDialect = tuple[str | None, str | None, Sequence[str]]  # delimiter, quoting, names of columns


class Dialect(NamedTuple):
    """The separators of fields and rows."""

    delimiter: str
    has_quotes: bool
    row_end: str = "\n"


class EscapedQuoteError(Exception):
    """A quoted field holds a quote after a backslash, where csv has two quotes."""


class DelimitedSplitter(RowSplitter):
    """Finds the rows of a csv file; blank lines between rows do not count, unless they are kept."""

    def __init__(self, dialect: Dialect, keeps_blank: bool = False, finds_escapes: bool = False) -> None:
        self.dialect = dialect
        self._finds_escapes = finds_escapes
        self._keeps_blank = keeps_blank
        self._delimiter = dialect.delimiter.encode()
        self._row_end = dialect.row_end.encode()
        self._after_quotes = (b"", b"\r", b"\n", self._delimiter)

    def split(self, buffer: bytes, is_last: bool) -> tuple[Places, int]:
        bytes_ = np.frombuffer(buffer, np.uint8)
        ends = np.flatnonzero(bytes_ == self._row_end[0]) + 1
        if self.dialect.has_quotes and b'"' in buffer:
            ends = self._ends_among_quotes(buffer, bytes_, ends, is_last)
        elif is_last and (not len(ends) or ends[-1] != len(buffer)):
            ends = np.append(ends, len(buffer))
        if not len(ends):
            return ends, 0
        starts = np.concatenate([np.zeros(1, ends.dtype), ends[:-1]])
        return starts if self._keeps_blank else starts[~blank_lines(bytes_, starts, ends)], int(ends[-1])

    def _ends_among_quotes(self, buffer: bytes, bytes_: Bytes, line_ends: Places, is_last: bool) -> Places:
        quotes = np.flatnonzero(bytes_ == QUOTE)
        opening = quotes[::2]
        before = bytes_[np.maximum(opening - 1, 0)]
        expected = (before == self._delimiter[0]) | (before == self._row_end[0]) | (before == QUOTE) | (opening == 0)
        is_outside = np.searchsorted(quotes, line_ends) % 2 == 0
        ends: Places = line_ends[is_outside]
        if not expected.all():
            first_stray = opening[int(np.argmin(expected))]
            ends = ends[: int(np.searchsorted(ends, first_stray, side="right"))]
            walked = self._walk(buffer, int(ends[-1]) if len(ends) else 0, is_last)
            return np.concatenate([ends, np.array(walked, ends.dtype)])
        last = int(ends[-1]) if len(ends) else 0
        if is_last and last != len(buffer) and len(quotes) % 2 == 0:
            ends = np.append(ends, len(buffer))
        return ends

    def _walk(self, buffer: bytes, start: int, is_last: bool) -> list[int]:
        ends = []
        while start < len(buffer):
            line_end = buffer.find(self._row_end, start)
            if line_end >= 0 and buffer.find(b'"', start, line_end) < 0:
                end = line_end + 1
            else:
                end, _ = self._walk_row(buffer, start, is_last)
            if end < 0:
                break
            ends.append(end)
            start = end
        return ends

    def _walk_row(self, buffer: bytes, start: int, is_last: bool) -> tuple[int, int]:
        """Return (end of the row, -1), or (-1, the open quote or -1) if the row does not end in the buffer.

        A row of too many fields ends with its line: it is refused when it is read.
        """
        line_end, num_fields = -1, 0
        while True:
            if buffer.startswith(b'"', start):
                opened, start = start, _close_quote(buffer, start)
                if start < 0 or (start == len(buffer) and not is_last):
                    return -1, opened
                after = buffer[start : start + 1]
                if self._finds_escapes and buffer[start - 2] == _BACKSLASH and after not in self._after_quotes:
                    raise EscapedQuoteError
            if line_end < start:  # the first field, or a quoted one that went on in the next line
                line_end = buffer.find(self._row_end, start)
                line_end = len(buffer) if line_end < 0 else line_end
            delimiter = buffer.find(self._delimiter, start, line_end)
            num_fields += 1
            if delimiter < 0 or num_fields > MOST_COLUMNS:
                if line_end < len(buffer):
                    return line_end + 1, -1
                return (len(buffer), -1) if is_last else (-1, -1)
            start = delimiter + 1

    def explain_long_row(self, source: FileBytes, start: int, buffer: bytes) -> InputError | None:
        if not self.dialect.has_quotes:
            return None
        end, opened = self._walk_row(buffer, 0, True)
        if end >= 0:
            return None
        line = source.line_at(start + opened)
        text = buffer[opened : opened + 60].split(b"\n")[0].decode("utf-8", "replace")
        what = f"{source.path}: the quote opened in line {line:,} is never closed"
        saw = [f"it starts with {text!r}", "a quote inside a quoted field is doubled"]
        fix = f"--quoting none   or   close the quote in line {line:,} or before it"
        return InputError("data.quote", what, saw=saw, fix=fix)


def _close_quote(buffer: bytes, start: int) -> int:
    """Return the position after the closing quote of the field that starts here, or -1."""
    place = start + 1
    while True:
        place = buffer.find(b'"', place)
        if place < 0:
            return -1
        if not buffer.startswith(b'"', place + 1):
            return place + 1
        place += 2


def split_fields(text: str, dialect: Dialect) -> list[str]:
    """Return the fields of one row, without its line end, by the rules of the csv module."""
    if not dialect.has_quotes or '"' not in text:
        return text.split(dialect.delimiter)
    fields = []
    start = 0
    while True:
        field = ""
        if text.startswith('"', start):
            place = start + 1
            while True:
                close = text.find('"', place)
                assert close >= 0, "the index holds only rows whose quotes are closed"
                field += text[place:close]
                if not text.startswith('"', close + 1):
                    break
                field += '"'
                place = close + 2
            start = close + 1
        end = text.find(dialect.delimiter, start)
        fields.append(field + (text[start:] if end < 0 else text[start:end]))
        if end < 0:
            return fields
        start = end + 1
        if len(fields) > MOST_COLUMNS:  # more than a header may have: they are only counted
            return fields + text[start:].split(dialect.delimiter)


class DelimitedTable(IndexedTable):
    """A csv or tsv file with a header, or with given names of its columns."""

    def __init__(self, source: FileBytes, kind: str, given: GivenDialect, say: Say | None) -> None:
        super().__init__(source, kind)
        delimiter, quoting, names = given
        # Of columns whose numbers are written with a "comma", a "point", or as "marks".
        self.decimals: dict[str, str] = {}
        head = source.read(source.start, HEAD_BYTES)
        stated = _SEPARATOR_LINE.match(head)
        if stated is not None:  # Spreadsheets write and read this line above the header.
            source.start += stated.end()
            delimiter = delimiter or stated[1].decode("ascii", "replace")
            head = head[stated.end() :]
        _refuse_json(head, source.path)
        if above := _lines_above(head, kind, delimiter):
            source.start, head = source.start + len(above), head[len(above) :]
            shown = above.decode("utf-8", "replace").strip().splitlines()[0]
            self.notes += (f"the header of {self.name} is in line {source.line_at(source.start)}, below {shown!r}",)
        self.dialect, self._quoting = sniff(head, kind, delimiter, quoting)
        if self.dialect.row_end.encode() not in head:
            head = source.read(source.start, MOST_HEADER_BYTES)
        first = head.partition(self.dialect.row_end.encode())[0]
        check_columns(self.path, first.count(self.dialect.delimiter.encode()) + 1 if b'"' not in first else 1)
        index = self._find_rows(quoting is None, say)
        while not (header := self._decode(source.read_row(int(index[0]), int(index[1])))):
            index = index[1:]
        self._header = header.strip("\ufeff").encode()
        fields = split_fields(header, self.dialect)
        self.index = index[1:]
        rows = [self._split_row(row) for row in range(min(len(self), _ROWS_COMPARED))]
        if rows and all(len(row) == len(fields) + 1 and not row[-1] for row in rows):
            note = f"a delimiter ends each row of {self.name}, but not its header: the field after it has no name"
            self.notes += (note,)
            fields.append("")
        self.columns, self.has_header = header_names(fields, self.path, names)
        self._are_given = bool(names)
        self.index = index[int(self.has_header) :]
        self.sha256 = source.sha256
        if not len(self):
            saw = [f"columns: {', '.join(self.columns)[:500]}"]
            fix = f"add rows   or   {names_fix(['text'], len(self.columns))}"
            raise InputError("data.no_rows", f"{self.path} has a header and no rows", saw=saw, fix=fix)

    def _find_rows(self, finds_escapes: bool, say: Say | None) -> Offsets:
        """Return the index of the rows; a file with other quotes is converted first."""
        if self._quoting in _OTHER_QUOTES:
            source, delimiter = self.source, self.dialect.delimiter
            source.rewrite(partial(as_standard, source.path, source.start, delimiter, self._quoting))
            self.notes += (f"the quotes of {self.name} are read as --quoting {self._quoting}",)
        splitter = DelimitedSplitter(self.dialect, self.source.keeps_blank, finds_escapes)
        try:
            return index_rows(self.source, splitter, say)
        except EscapedQuoteError:
            self._quoting = "backslash"
            return self._find_rows(False, say)

    def settings(self) -> dict[str, Any]:
        decimals = {"decimals": self.decimals} if self.decimals else {}
        names = {"column_names": self.columns} if self._are_given else {}
        return super().settings() | {"delimiter": self.dialect.delimiter, "quoting": self._quoting} | decimals | names

    def _split_row(self, index: int) -> list[str]:
        row = self.source.read_row(int(self.index[index]), int(self.index[index + 1]))
        return split_fields(self._decode(row), self.dialect)

    def _repeats_header(self, row: bytes) -> bool:
        """Whether a row is the header again, as in files that were put together."""
        return self.has_header and len(self.columns) > 1 and row.rstrip(b"\r\n").removeprefix(BOM) == self._header

    def _repeated(self, index: int) -> InputError:
        what, fix = f"{self.path}: {self.place(index)} repeats the header", f"delete {self.place(index)}"
        return InputError("data.header", what, saw=[self._header.decode()[:200]], fix=f"--bad_rows drop   or   {fix}")

    def parse(self, data: bytes, index: int) -> Row:
        if self._repeats_header(data):
            raise self._repeated(index)
        fields = split_fields(self._decode(data), self.dialect)
        fields = fields if fields != [""] else [""] * len(self.columns)  # a blank line
        if len(fields) != len(self.columns):
            raise self._ragged([(index, len(fields))])
        return dict(zip(self.columns, fields, strict=True)) | {
            name: with_point(fields[self.columns.index(name)], sign) for name, sign in self.decimals.items()
        }

    def salvage(self, data: bytes) -> Row:
        return dict(zip(self.columns, split_fields(self._decode(data), self.dialect), strict=False))

    def __iter__(self) -> Iterator[Row]:
        # By blocks is several times faster than by row.
        return super().__iter__() if self.source.keeps_damaged else Table.__iter__(self)

    def blocks(self, columns: Sequence[str], say: Say | None = None) -> Iterator[Block]:
        num_columns = len(self.columns)
        numbers = {name: number for number, name in enumerate(self.columns)}
        places = {name: numbers[name] for name in columns}
        for block in self._blocks(places, num_columns, say):
            for name in self.decimals.keys() & places.keys():
                block.values[name] = [with_point(value, self.decimals[name]) for value in block.values[name]]
            yield block

    def _blocks(self, places: dict[str, int], num_columns: int, say: Say | None) -> Iterator[Block]:
        delimiter, has_quotes, _ = self.dialect
        for start, data, ends in self.stretches(say):
            cut = cut_columns(data, ends, delimiter, has_quotes, num_columns, list(places.values()))
            if cut is not None and b"\0" not in data and self._header not in data:
                yield Block(start, dict(zip(places, cut, strict=True)))
                continue
            rows = [row or [""] * num_columns for row in self._split_all(data, ends)]
            wrong = [(start + k, len(row)) for k, row in enumerate(rows) if len(row) != num_columns]
            if wrong and not self.source.keeps_damaged:
                raise self._ragged(wrong[:MOST_ROWS_NAMED])
            damaged = {index: self._ragged([(index, number)]) for index, number in wrong}
            nuls = {k: data.find(b"\0", ends[k], ends[k + 1]) for k in range(len(rows))} if b"\0" in data else {}
            damaged |= {start + k: self.source.nul(int(self.index[start]) + at) for k, at in nuls.items() if at >= 0}
            again = [k for k in range(len(rows)) if self._repeats_header(data[ends[k] : ends[k + 1]])]
            if again and not self.source.keeps_damaged:
                raise self._repeated(start + again[0])
            damaged |= {start + k: self._repeated(start + k) for k in again}
            rows = [[""] * num_columns if start + k in damaged else row for k, row in enumerate(rows)]
            yield Block(start, {name: [row[place] for row in rows] for name, place in places.items()}, damaged)

    def _split_all(self, data: bytes, ends: list[int]) -> list[list[str]]:
        if data.isascii():
            text = data.decode("ascii")
            texts = [text[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        else:
            texts = [data[a:b].decode("utf-8") for a, b in zip(ends, ends[1:], strict=False)]
        if self.dialect.has_quotes:
            try:
                return list(csv.reader(texts, delimiter=self.dialect.delimiter))
            except csv.Error:  # A field over 128 kB, or a carriage return inside a field: the slow path handles both.
                pass
        return [split_fields(text.rstrip("\r\n"), self.dialect) for text in texts]

    def _decode(self, data: bytes) -> str:
        return data.decode("utf-8").rstrip("\r\n")

    def _ragged(self, wrong: list[tuple[int, int]]) -> InputError:
        expected = len(self.columns)
        saw = [f"columns: {', '.join(self.columns)[:500]}"]
        for index, found in wrong:
            text = self._decode(self.source.read_row(int(self.index[index]), int(self.index[index + 1])))
            breaks = text.count("\n")
            note = f", over {breaks + 1} lines: is a quote left open?" if breaks else ""
            saw.append(f"{self.place(index)}: expected {expected}, found {found}{note}   {text[:60]!r}")
        name = next((name for name, text in DELIMITERS.items() if text == self.dialect.delimiter), "delimiter")
        fix = f"--bad_rows drop   or   quote fields that contain a {name}"
        if wrong[0][1] < expected:
            fix = f"--bad_rows drop   or   complete {self.place(wrong[0][0])}"
        if expected == 1 and wrong[0][0] == 0:
            fix = f"delete line 1, {self.columns[0][:40]!r}, if it does not hold the names of the columns"
        what = f"{self.path}: a row has {wrong[0][1]} field{'s' if wrong[0][1] > 1 else ''}, the header has {expected}"
        return InputError("data.ragged", what, saw=saw, fix=fix)


def with_point(text: str, sign: str) -> str:
    """Return a number with a decimal point and without separators of thousands; any other text as it is.

    In a column of marks nothing is 0.
    """
    if sign == "marks":
        return text if text.strip() else "0"
    if sign == "comma" and _DECIMAL_COMMA.fullmatch(text.strip()):
        return text.replace(".", "").replace(",", ".")
    return text.replace(",", "") if sign == "point" and _DECIMAL_POINT.fullmatch(text.strip()) else text


def decimal_sign(table: DelimitedTable, column: str) -> tuple[str, str] | None:
    """Return the decimal sign of a column of numbers such as 3,5 or 1.000, and one of them; refuse an ambiguous one."""
    texts = {text.strip() for block in table.blocks([column]) for text in block.values[column]} - {""}
    with_comma = sorted(text for text in texts if "," in text)
    with_comma = with_comma or (sorted(texts) if all(map(THOUSANDS.fullmatch, texts)) else [])
    is_comma, is_point = ({text for text in texts if form.fullmatch(text)} for form in (_DECIMAL_COMMA, _DECIMAL_POINT))
    if not with_comma or is_comma | is_point != texts:
        return None
    if (is_comma == texts) == (is_point == texts):
        others = sorted(texts - is_comma) or with_comma
        what = f"the numbers in {column!r} of {table.name} are ambiguous: what precedes their decimals?"
        saw = [f"for instance {with_comma[0]} and {others[-1]}", "the other sign is between thousands"]
        fix = "--decimal comma   or   --decimal point"
        raise InputError("data.label_type", what, saw=saw, fix=fix, flag="--decimal")
    return ("comma" if is_comma == texts else "point"), with_comma[0]


def _refuse_json(head: bytes, path: Path) -> None:
    line = head.lstrip().split(b"\n", 1)[0]
    if not line.startswith(b"{"):
        return
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return
    saw = [f"its first line is {line[:60].decode('utf-8', 'replace')!r}", f"an object with {len(row)} values"]
    raise InputError("data.ending", f"{path} holds JSON, despite its name", saw=saw, fix="--file_kind jsonl")


def header_names(fields: list[str], path: str, given: Sequence[str] = ()) -> tuple[tuple[str, ...], bool]:
    """Return the names of columns, and whether the first row is a header.

    It is one if it has the given names, in any order, or with numbers for equal ones: text, text_2.
    """
    check_columns(path, len(fields))
    names = [field.strip().strip("\ufeff").strip() for field in fields]
    names = [name or f"unnamed_{place}" for place, name in enumerate(names)]
    unique = [
        f"{name}_{earlier + 1}" if (earlier := names[:place].count(name)) else name for place, name in enumerate(names)
    ]
    if list(given) == unique:
        return tuple(unique), True
    has_header = not given or sorted(names) == sorted(given)
    if len(given) not in (0, len(names)):
        what = f"--column_names has {len(given)} names, and the first row of {path} has {len(names)} fields"
        saw, fix = [repr(fields)[:200]], names_fix(given, len(names))
        raise InputError("args.value", what, saw=saw, fix=fix, flag="--column_names")
    names = names if has_header else list(given)
    twice = sorted(name for name, number in Counter(names).items() if number > 1)[:MOST_ROWS_NAMED]
    if twice:
        places = {name: [str(k + 1) for k, other in enumerate(names) if other == name] for name in twice}
        saw = [f"{name!r} is the name of columns {', '.join(places[name])}" for name in twice]
        fix = f"{names_fix(unique, len(names))}   or   give each column its own name in the first line"
        raise InputError("data.duplicate_column", f"{path} has several columns of the same name", saw=saw, fix=fix)
    return tuple(names), has_header


def names_fix(names: Sequence[str], number: int) -> str:
    """Return the flag that names the columns of a file without a header: some of them, the others by number."""
    numbered = [names[place] if place < len(names) else f"column_{place + 1}" for place in range(number)]
    is_plain = not any("," in name for name in numbered)
    return f"--column_names {quote(','.join(numbered) if is_plain else json.dumps(numbered, ensure_ascii=False))}"


def as_standard(path: Path, above: int, delimiter: str, quoting: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield a file with other quotes as the csv module writes it, after the bytes above its header."""
    first = next(chunks)
    yield first[:above]
    lines = _lines(chain([first[above:]], chunks))
    if quoting == "backslash":  # of quotes and backslashes: \\n stays two characters
        lines = (_BACKSLASHES.sub(lambda found: found[0] if found[1] else r"\\", line) for line in lines)
    limit = csv.field_size_limit(MAX_ROW_BYTES)
    reader = csv.reader(lines, delimiter=delimiter, strict=True, **_OTHER_QUOTES[quoting])
    try:
        for row in reader:
            written = io.StringIO(newline="")
            csv.writer(written, delimiter=delimiter, lineterminator="\n").writerow(row)
            yield written.getvalue().encode("utf-8", "surrogateescape")
    except csv.Error as error:
        what, saw = f"{path}: {error}, {reader.line_num:,} lines below the header", [f"read with --quoting {quoting}"]
        raise InputError("data.quote", what, saw=saw, fix="--quoting minimal   or   double the quotes there") from error
    finally:
        csv.field_size_limit(limit)


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    rest = b""
    for chunk in chunks:
        *found, rest = (rest + chunk).split(b"\n")
        yield from (line.decode("utf-8", "surrogateescape") + "\n" for line in found)
    yield rest.decode("utf-8", "surrogateescape")


def _first_lines(head: bytes) -> tuple[list[str], str]:
    """Return the first lines that are not blank, and what ends them."""
    text = head.decode("utf-8", "replace")
    row_end = "\n" if "\n" in text or "\r" not in text else "\r"
    lines = [line for line in text.split(row_end) if line.strip("\r")]
    return (lines[:-1] if len(head) >= HEAD_BYTES else lines)[:HEAD_ROWS], row_end


def _lines_above(head: bytes, kind: str, delimiter: str | None) -> bytes:
    """Return the comments and titles above the header, if the lines after them agree on their fields."""
    lines, row_end = _first_lines(head)
    for number in range(len(lines) // _TIMES_BELOW + 1):
        below = lines[number : number + _ROWS_COMPARED]
        rows = _split(below, _delimiter(below, kind, delimiter)) or [[""]]
        is_title = not any(rows[0][1:]) and " " in rows[0][0].strip()
        sizes = {*map(len, rows[1:-1])}  # the last one may be cut
        if len(sizes) == 1 and 1 < len(rows[0]) in (max(sizes), max(sizes) - 1) and not is_title:
            return head[: head.find((row_end + lines[number]).encode()) + 1] if number else b""
        if not is_title and not rows[0][0].startswith("#"):
            break
    return b""


def sniff(head: bytes, kind: str, delimiter: str | None, quoting: str | None) -> tuple[Dialect, str]:
    """Return the dialect that fits the first rows of a file best, and its quoting; given settings are not guessed."""
    lines, row_end = _first_lines(head)
    delimiter = _delimiter(lines, kind, delimiter)
    if quoting not in (None, "minimal", "none", *_OTHER_QUOTES):
        fix = "--quoting minimal   or   --quoting none"
        raise InputError("args.value", f"--quoting {quoting!r} is unknown", fix=fix)
    if quoting is None:
        quoting = "none" if _quotes_are_text(lines, delimiter) else "minimal"
        quoting = "single" if row_end == "\n" and _in_single_quotes(lines, delimiter) else quoting
    return Dialect(delimiter, quoting != "none", row_end), quoting


def _split(lines: list[str], delimiter: str, **quotes: Any) -> list[list[str]]:
    try:
        return [row for row in csv.reader([line + "\n" for line in lines], delimiter=delimiter, **quotes) if row]
    except csv.Error:
        return [line.split(delimiter) for line in lines]


def _in_single_quotes(lines: list[str], delimiter: str) -> bool:
    """Whether only single quotes make the rows agree on their fields, or all fields of a column are in them."""
    if not any(f"'{delimiter}" in line or line.rstrip().endswith("'") for line in lines):
        return False
    rows, plain = _split(lines, delimiter, quotechar="'")[:-1], _split(lines, delimiter)
    if len(rows) < 2 or len({*map(len, rows)}) > 1:
        return False
    columns = zip(*plain[1:], strict=False)
    are_quoted = ({(each[:1], each[-1:], len(each) > 1) for each in column} for column in columns)
    return len({*map(len, plain)}) > 1 or {("'", "'", True)} in are_quoted


def _delimiter(lines: list[str], kind: str, given: str | None) -> str:
    """Return the given delimiter, or the one that splits most rows into as many fields as the header; else a comma."""
    if given is not None or kind == "tsv":
        delimiter = DELIMITERS.get(given or "tab", given or "")
        if len(delimiter.encode()) != 1 or delimiter in '"\r\n':
            saw, fix = ["one ASCII character, or one of " + ", ".join(DELIMITERS)], "--delimiter comma"
            raise InputError("args.value", f"--delimiter {delimiter!r} is not a delimiter", saw=saw, fix=fix)
        return delimiter
    best, best_score = ",", (0.0, 0)
    for delimiter in DELIMITERS.values():
        rows = _split(lines, delimiter)
        if not rows or len(rows[0]) < 2:
            continue
        share = sum(len(row) == len(rows[0]) for row in rows) / len(rows)
        if (share, len(rows[0])) > best_score:
            best, best_score = delimiter, (share, len(rows[0]))
    return best


def _quotes_are_text(lines: list[str], delimiter: str) -> bool:
    """Whether quotes in a file with tabs are ordinary characters, as in the files of GLUE."""
    if delimiter != "\t" or not lines:
        return False
    rows = [line.rstrip("\r").split(delimiter) for line in lines]
    if any(len(row) != len(rows[0]) for row in rows):
        return False
    quoted = (field for row in rows for field in row if field.startswith('"'))
    return any(len(field) < 2 or field[-1] != '"' or '"' in field[1:-1].replace('""', "") for field in quoted)
