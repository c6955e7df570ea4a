"""One sheet of an xlsx file, through openpyxl, which is imported lazily.

The sheet is converted to lines of JSON, one per row of the sheet, blank for the header and empty rows.
"""

from __future__ import annotations

import importlib
import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

from loopwright.errors import InputError
from loopwright.sources.delimited import header_names, names_fix
from loopwright.sources.files import MAX_UNPACKED_BYTES, FileBytes, Say
from loopwright.sources.json_files import JsonLinesTable
from loopwright.sources.values import as_plain

_MERGED, _UNSAVED = re.compile(rb"<mergeCell "), re.compile(rb"</f>(<v ?/>|<v></v>)?</c>")


class SheetBytes(FileBytes):
    """The rows of a sheet as lines of JSON, without blank rows at the end."""

    is_converted = True
    unit = "row"
    columns: tuple[str, ...] = ()
    has_header = True

    def __init__(self, path: Path, sheet: str | None, names: Sequence[str], keeps_blank: bool) -> None:
        self.sheet, self._names = sheet, names
        self._blank_row = b"{}\n" if keeps_blank else b"\n"
        self.notes: list[str] = []
        super().__init__(path)

    def settings(self) -> dict[str, Any]:
        return {"sheet": self.sheet} | ({"column_names": self.columns} if self._names else {})

    def convert(self, file: BinaryIO) -> Iterator[bytes]:
        try:
            openpyxl: Any = importlib.import_module("openpyxl")
        except ImportError as error:
            what, fix = f"{self.path.name}: reading xlsx files needs openpyxl", "pip install 'loopwright[excel]'"
            raise InputError("install.extra", what, saw=[str(error)], fix=fix) from error
        try:
            archive = zipfile.ZipFile(file)
            num_bytes = sum(info.file_size for info in archive.infolist())
            if num_bytes > MAX_UNPACKED_BYTES * 4:
                what = (
                    f"{self.path} unpacks to {num_bytes >> 20:,} MB, and the limit is {MAX_UNPACKED_BYTES >> 18:,} MB"
                )
                raise InputError("data.gzip", what, fix="open it in a spreadsheet program and save it as csv")
            sheets = [archive.read(name) for name in archive.namelist() if name.startswith("xl/worksheets/")]
            is_merged = any(map(_MERGED.search, sheets))  # only a book that is loaded whole has the ranges
            sheet = self._find(openpyxl.load_workbook(file, read_only=not is_merged, data_only=True))
            if any(map(_UNSAVED.search, sheets)):
                self._refuse_formulas(sheet, openpyxl.load_workbook(file, read_only=True)[sheet.title])
            yield from self._lines(sheet, self._fill(sheet) if is_merged else {})
        except InputError:
            raise
        except Exception as error:  # openpyxl raises anything for damaged files
            what = f"{self.path} cannot be read as an xlsx file"
            saw = [
                f"{type(error).__name__}: {str(error)[:160]}",
                "an old .xls file, or one with a password, is no xlsx",
            ]
            fix = "open it in a spreadsheet program and save it as xlsx or csv, without a password"
            file.seek(0)
            if not file.read(4).startswith((b"PK", b"\xd0\xcf\x11\xe0", b"<")):
                fix = "--file_kind csv"
            raise InputError("data.value", what, saw=saw, fix=fix) from error

    def _find(self, book: Any) -> Any:
        """Return the given sheet, or the first one with rows under its header."""
        names, given = [sheet.title for sheet in book.worksheets], self.sheet
        for sheet in book.worksheets if book.read_only else ():
            sheet.reset_dimensions()  # some programs write wrong ones
        if given is None:
            rows = {sheet.title: filter(any, sheet.iter_rows(values_only=True)) for sheet in book.worksheets}
            filled = (name for name in names if len(list(islice(rows[name], 2))) == 2)
            self.sheet = next(filled, next(iter(names), ""))
        if self.sheet not in names:
            near = (get_close_matches(str(self.sheet), names, n=1, cutoff=0) or [""])[0]
            what, saw = f"{self.path} has no sheet {self.sheet!r}", [f"its sheets: {', '.join(names)}"]
            raise InputError("args.value", what, saw=saw, fix=f"--sheet {quote(near)}", flag="--sheet")
        if given is None and len(names) > 1:
            others = ", ".join(repr(name) for name in names if name != self.sheet)
            self.notes.append(f"{self.path.name} has {len(names)} sheets: {self.sheet!r} is read, not {others[:200]}")
        return book[self.sheet]

    def _fill(self, sheet: Any) -> dict[tuple[int, int], Any]:
        """Return the values of merged cells that go over several rows, below the first one, by row and column."""
        ranges = [each for each in sheet.merged_cells.ranges if each.max_row > each.min_row > 1]
        if ranges:
            shown = ", ".join(each.coord for each in ranges[:5])
            self.notes.append(f"{self.path.name}: each row of the merged cells has their value: {shown}")
        values = [as_plain(sheet.cell(each.min_row, each.min_col).value) for each in ranges]
        return {
            place: value for each, value in zip(ranges, values, strict=True) for places in each.rows for place in places
        }

    def _refuse_formulas(self, values: Any, formulas: Any) -> None:
        for shown, written in zip(values.iter_rows(), formulas.iter_rows(), strict=False):
            for cell, formula in zip(shown, written, strict=False):
                if cell.value is None and formula.data_type == "f":
                    what = f"{self.path}: the formula in cell {formula.coordinate} has no saved value"
                    fix = "open it in a spreadsheet program and save it again"
                    raise InputError("data.value", what, saw=[str(formula.value)[:80]], fix=fix)

    def _lines(self, sheet: Any, filled: Mapping[tuple[int, int], Any]) -> Iterator[bytes]:
        names: dict[int, str] = {}
        first, num_rows, blank = 0, 0, b""
        for number, cells in enumerate(sheet.iter_rows(), 1):
            values = [None if cell.data_type == "e" else as_plain(cell.value) for cell in cells]
            values = [filled.get((number, k + 1), value) for k, value in enumerate(values)] if filled else values
            found = {place: value for place, value in enumerate(values) if value is not None}
            if names and (beyond := [k for k, value in found.items() if k not in names and str(value).strip()]):
                what = (
                    f"{self.path}: cell {cells[beyond[0]].coordinate} has a value, but row {first} has no name above it"
                )
                saw = [f"row {first}: {', '.join(names.values())[:200]}", "are cells merged there, or is it a title?"]
                fix = f"delete the titles, unmerge the cells of row {first}, and give each column a name"
                raise InputError("data.column", what, saw=saw, fix=fix)
            if found and not names:
                first, places = number, [*range(len(self._names))] or sorted({0, *found})
                fields = [str(found.get(k, "")) for k in places]
                self.columns, self.has_header = header_names(fields, str(self.path), self._names)
                names = dict(zip(places, self.columns, strict=True))
                found = {} if self.has_header else found
            row = {names[place]: value for place, value in found.items() if place in names}
            if row:
                whole = json.dumps(dict.fromkeys(self.columns) | row, ensure_ascii=False)
                yield blank + whole.encode("utf-8", "replace")
                num_rows, blank = num_rows + 1, b"\n"
            else:
                blank += self._blank_row if number > first and names else b"\n"
        if names and not num_rows:
            what, saw = (
                f"{self.path}: the sheet {self.sheet!r} has no rows",
                [f"columns: {', '.join(self.columns)[:500]}"],
            )
            fix = f"add rows to {self.path}   or   {names_fix(['text'], len(names))}"
            raise InputError("data.no_rows", what, saw=saw, fix=fix)


def open_sheet(
    path: Path, sheet: str | None, names: Sequence[str], keeps_blank: bool, say: Say | None
) -> JsonLinesTable:
    """Return the rows of a sheet, whose first row that is not empty has the names of the columns, if none are given."""
    source = SheetBytes(path, sheet, names, keeps_blank)
    table = JsonLinesTable(source, say)
    table.kind, table.columns, table.has_header = "xlsx", source.columns, source.has_header
    table.notes = tuple(source.notes)
    return table
