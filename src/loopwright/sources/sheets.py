"""One sheet of an xlsx file, through openpyxl, which is imported lazily.

The sheet is converted to lines of JSON, one per row of the sheet, blank for the header and empty rows.
"""

from __future__ import annotations

import importlib
import json
import zipfile
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

from loopwright.errors import InputError
from loopwright.sources.delimited import header_names
from loopwright.sources.files import MAX_UNPACKED_BYTES, FileBytes, Say
from loopwright.sources.json_files import JsonLinesTable
from loopwright.sources.values import as_plain


class SheetBytes(FileBytes):
    """The rows of a sheet as lines of JSON. `sheet_names` are those of the file."""

    is_converted = True
    unit = "row"
    columns: tuple[str, ...] = ()

    def __init__(self, path: Path, sheet: str | None) -> None:
        self.sheet = sheet
        self.sheet_names: list[str] = []
        super().__init__(path)

    def settings(self) -> dict[str, Any]:
        return {"sheet": self.sheet}

    def convert(self, file: BinaryIO) -> Iterator[bytes]:
        try:
            openpyxl: Any = importlib.import_module("openpyxl")
        except ImportError as error:
            what, fix = f"{self.path.name}: reading xlsx files needs openpyxl", "pip install 'loopwright[excel]'"
            raise InputError("install.extra", what, saw=[str(error)], fix=fix) from error
        try:
            num_bytes = sum(info.file_size for info in zipfile.ZipFile(file).infolist())
            if num_bytes > MAX_UNPACKED_BYTES * 4:
                what = (
                    f"{self.path} unpacks to {num_bytes >> 20:,} MB, and the limit is {MAX_UNPACKED_BYTES >> 18:,} MB"
                )
                raise InputError("data.gzip", what, fix="open it in a spreadsheet program and save it as csv")
            book = openpyxl.load_workbook(file, read_only=True, data_only=True)
            yield from self._lines(self._find(book))
        except InputError:
            raise
        except Exception as error:  # openpyxl raises anything for damaged files
            what = f"{self.path} cannot be read as an xlsx file"
            saw = [
                f"{type(error).__name__}: {str(error)[:160]}",
                "an old .xls file, or one with a password, is no xlsx",
            ]
            fix = "open it in a spreadsheet program and save it as xlsx or csv, without a password"
            raise InputError("data.value", what, saw=saw, fix=fix) from error

    def _find(self, book: Any) -> Any:
        self.sheet_names = [sheet.title for sheet in book.worksheets]
        self.sheet = self.sheet or next(iter(self.sheet_names), "")
        if self.sheet not in self.sheet_names:
            near = (get_close_matches(self.sheet, self.sheet_names, n=1, cutoff=0) or [""])[0]
            what, saw = f"{self.path} has no sheet {self.sheet!r}", [f"its sheets: {', '.join(self.sheet_names)}"]
            raise InputError("args.value", what, saw=saw, fix=f"--sheet {quote(near)}", flag="--sheet")
        sheet = book[self.sheet]
        sheet.reset_dimensions()  # some programs write wrong ones
        return sheet

    def _lines(self, sheet: Any) -> Iterator[bytes]:
        names: dict[int, str] = {}
        first = 0
        for number, cells in enumerate(sheet.iter_rows(), 1):
            values = [None if cell.data_type == "e" else as_plain(cell.value) for cell in cells]
            found = {place: value for place, value in enumerate(values) if value is not None}
            row = {names.get(place, ""): value for place, value in found.items()}
            if "" in row and names:
                letter = next(cells[place].column_letter for place in found if place not in names)
                what = f"{self.path}: cell {letter}{number} has a value, but row {first} has no name above it"
                saw = [f"row {first}: {', '.join(names.values())[:200]}", "are cells merged there, or is it a title?"]
                fix = f"delete the titles, unmerge the cells of row {first}, and give each column a name"
                raise InputError("data.column", what, saw=saw, fix=fix)
            if found and not names:
                first, places = number, sorted({0, *found})
                names = dict(
                    zip(places, header_names([str(found.get(k, "")) for k in places], str(self.path)), strict=True)
                )
                self.columns, row = tuple(names.values()), {}
            whole = dict.fromkeys(self.columns) | row
            yield (json.dumps(whole, ensure_ascii=False).encode("utf-8", "replace") if row else b"") + b"\n"


def open_sheet(path: Path, sheet: str | None, say: Say | None) -> JsonLinesTable:
    """Return the rows of a sheet, whose first row that is not empty has the names of the columns."""
    source = SheetBytes(path, sheet)
    table = JsonLinesTable(source, say)
    table.kind, table.columns = "xlsx", source.columns
    if sheet is None and len(source.sheet_names) > 1:
        others = ", ".join(map(repr, source.sheet_names[1:6]))
        table.notes = (f"{table.name} has {len(source.sheet_names)} sheets: {source.sheet!r} is read, not {others}",)
    if not len(table):
        what, saw = f"{path}: the sheet {source.sheet!r} has no rows", [f"columns: {', '.join(source.columns)[:500]}"]
        other = next((name for name in source.sheet_names if name != source.sheet), None)
        fix = f"--sheet {quote(other)}" if other is not None else f"add rows to {path}"
        raise InputError("data.no_rows", what, saw=saw, fix=fix)
    return table
