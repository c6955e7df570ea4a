"""Plain text, by line or by paragraph, and CoNLL files with one token per line."""

from __future__ import annotations

from typing import Any

import numpy as np

from loopwright.errors import InputError
from loopwright.sources.files import FileBytes, Places, RowSplitter, Say, index_rows, line_starts
from loopwright.sources.json_files import LineSplitter
from loopwright.sources.tables import IndexedTable, Row

TEXT_UNITS = ("line", "paragraph")


class ParagraphSplitter(RowSplitter):
    """Finds paragraphs: consecutive lines that are not blank."""

    def __init__(self) -> None:
        self._is_after_blank = True

    def split(self, buffer: bytes, is_last: bool) -> tuple[Places, int]:
        starts, is_blank, num_done = line_starts(buffer, is_last)
        if not len(starts):
            return starts, 0
        is_after_blank = np.concatenate([[self._is_after_blank], is_blank[:-1]])
        self._is_after_blank = bool(is_blank[-1])
        return starts[is_after_blank & ~is_blank], num_done


class TextTable(IndexedTable):
    """A text file with the single column `text`; one row per line that is not blank, or per paragraph."""

    def __init__(self, source: FileBytes, text_unit: str, say: Say | None) -> None:
        super().__init__(source, "txt")
        if text_unit not in TEXT_UNITS:
            fix = "--text_unit line   or   --text_unit paragraph"
            raise InputError("args.value", f"--text_unit {text_unit!r} is unknown", fix=fix)
        self.columns = ("text",)
        self.text_unit = text_unit
        splitter = LineSplitter(source.keeps_blank) if text_unit == "line" else ParagraphSplitter()
        self.index = index_rows(source, splitter, say)
        self.sha256 = source.sha256

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"text_unit": self.text_unit}

    def parse(self, data: bytes, index: int) -> Row:
        return {"text": data.decode("utf-8").rstrip("\r\n").replace("\r\n", "\n")}


class ConllTable(IndexedTable):
    """A file with one token per line and blank lines between sentences.

    The first field of a line is the token, the last its tag; fields between become columns `field_2`, `field_3`, ...
    Fields are separated by tabs if the first line has one, else by spaces. Comments (`# ...`) and -DOCSTART- lines are
    skipped.
    """

    def __init__(self, source: FileBytes, say: Say | None) -> None:
        super().__init__(source, "conll")
        self.index = index = index_rows(source, ParagraphSplitter(), say)
        self.sha256 = source.sha256
        self._separator: str | None = None
        self._num_fields = 0
        is_sentence = np.ones(len(index) - 1, np.bool_)
        for start, pieces in self.pieces(None):
            for k, piece in enumerate(pieces):
                lines = self._lines(piece)
                is_sentence[start + k] = bool(lines)
                if lines and not self._num_fields:
                    self._separator = "\t" if "\t" in lines[0] else None
                    self._num_fields = len(lines[0].split(self._separator))
        # Anything but a sentence is appended to the previous one, where it has no effect.
        self.index = np.append(index[:-1][is_sentence], index[-1])
        if not len(self):
            what, fix = f"{self.path} holds no sentence", "give a file with tokens"
            raise InputError("data.no_rows", what, saw=["only comments"], fix=fix)
        if self._num_fields < 2:
            what = f"{self.path}: {self.place(0)} has one field where a token and its tag are expected"
            saw = [repr(self.source.read_row(int(self.index[0]), int(self.index[1])).decode("utf-8")[:60])]
            fix = "write one token and its tag per line, with a blank or tab between them"
            raise InputError("data.ragged", what, saw=saw, fix=fix)
        self.columns = ("tokens", *(f"field_{k}" for k in range(2, self._num_fields)), "tags")

    def parse(self, data: bytes, index: int) -> Row:
        lines = self._lines(data)
        rows = [line.split(self._separator) for line in lines]
        for line, fields in zip(lines, rows, strict=True):
            if len(fields) != self._num_fields:
                offset = int(self.index[index]) + data.index(line.encode("utf-8"))
                place = f"{self.path}: line {self.source.line_at(offset):,}"
                what = f"{place} has {len(fields)} fields where the first line has {self._num_fields}"
                fix = "--bad_rows drop   or   write the same fields in each line, and an empty line between sentences"
                raise InputError("data.ragged", what, saw=[repr(line[:60])], fix=fix)
        return {name: list(values) for name, values in zip(self.columns, zip(*rows, strict=True), strict=True)}

    def _lines(self, data: bytes) -> list[str]:
        lines = data.decode("utf-8").replace("\r\n", "\n").split("\n")
        return [line for line in lines if line.strip() and not line.startswith(("# ", "-DOCSTART-"))]
