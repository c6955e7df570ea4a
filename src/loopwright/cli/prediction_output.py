"""Write predictions: JSON lines to a file or the terminal, csv, and parquet."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from shlex import quote
from typing import Any, TextIO

from loopwright import api
from loopwright.errors import InputError

Row = Mapping[str, Any]

ENDINGS = (".csv", ".jsonl", ".parquet")
# Characters that a terminal obeys, as JSON writes them; json.dumps escapes the others.
_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_ROWS_AT_ONCE = 5_000


def check_out(out: Path, inputs: Iterable[str]) -> Path:
    """Refuse a file that cannot be written, or that is an input, before anything is predicted."""
    if out.exists() and any(out.samefile(each) for each in inputs if os.path.exists(each)):
        what = f"--out {out} is a file that is read: it would be overwritten"
        raise InputError("args.value", what, fix=f"--out {quote(str(out.with_name(f'predicted_{out.name}')))}")
    if out.suffix.lower() not in ENDINGS:
        fix = f"--out {quote(str(out.with_suffix('.jsonl')))}"
        raise InputError("args.value", f"--out {out} ends in none of {', '.join(ENDINGS)}", fix=fix)
    if out.suffix.lower() == ".parquet":
        _import_arrow()
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


def write_file(rows: Iterable[Row], out: Path, is_safe: bool) -> None:
    """Write a csv, jsonl or parquet file, which appears once it is complete."""
    aside = out.with_name(f".{out.name}.part")
    try:
        if out.suffix.lower() == ".parquet":
            _write_parquet(rows, aside)
        else:
            with aside.open("w", encoding="utf-8", newline="") as file:
                write_lines(rows, file) if out.suffix.lower() == ".jsonl" else _write_table(rows, file, is_safe)
        aside.replace(out)
    finally:
        aside.unlink(missing_ok=True)


def write_lines(rows: Iterable[Row], file: TextIO) -> None:
    for row in rows:
        file.write(json_text(row).translate(_ESCAPES) + "\n")


def json_text(value: Any) -> str:
    """Return a value as JSON: null for a number that is not finite, the size of bytes, anything else as text."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_as_text)
    except ValueError:
        plain = json.loads(json.dumps(value, default=_as_text), parse_constant=lambda word: None)
        return json.dumps(plain, ensure_ascii=False)


def complete(rows: Iterable[Row], look: Callable[[list[Row]], None] = lambda some: None) -> Iterator[list[Row]]:
    """Yield rows, as JSON has them, in lists once all are there, from a file meanwhile; `look` gets each list first."""
    rows = iter(rows)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        while some := list(islice(rows, _ROWS_AT_ONCE)):
            text = json_text(some)
            look(json.loads(text))
            file.write(text + "\n")
        file.seek(0)
        yield from map(json.loads, file)


def _as_text(value: Any) -> str:
    return f"{len(value):,} bytes" if isinstance(value, bytes) else str(value)


def _write_table(rows: Iterable[Row], file: TextIO, is_safe: bool) -> None:
    cells = (
        {
            name: json_text(value).strip('"') if isinstance(value, (list, dict, bytes)) else value
            for name, value in row.items()
        }
        for row in rows
    )
    for first in cells:
        api.write_csv(file, list(first), chain([first], cells), is_safe)


def _import_arrow() -> Any:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        what, fix = "writing parquet files needs the package pyarrow", "pip install 'loopwright[arrow]'"
        raise InputError("install.extra", what, saw=[str(error)], fix=fix) from error


def _write_parquet(rows: Iterable[Row], path: Path) -> None:
    """Write a parquet file; a column whose values have no common type becomes text."""
    arrow, parquet = _import_arrow()
    types: dict[str, Any] = {}

    def find_types(some: list[Row]) -> None:
        for name in dict.fromkeys(name for row in some for name in row):
            try:
                found = arrow.schema([(name, arrow.array([row.get(name) for row in some]).type)])
                known = [arrow.schema([(name, types[name])])] if name in types else []
                types[name] = arrow.unify_schemas([*known, found], promote_options="permissive").field(name).type
            except (ValueError, TypeError, OverflowError):  # of pyarrow
                types[name] = arrow.string()

    def column(name: str, some: list[Row]) -> Any:
        values = [row.get(name) for row in some]
        if types[name] == arrow.string():
            values = [each if each is None or isinstance(each, str) else json_text(each) for each in values]
        return arrow.array(values, type=types[name])

    lists = complete(rows, find_types)
    for first in lists:
        with parquet.ParquetWriter(path, arrow.schema(list(types.items()))) as writer:
            for some in chain([first], lists):
                writer.write_table(arrow.table({name: column(name, some) for name in types}))
