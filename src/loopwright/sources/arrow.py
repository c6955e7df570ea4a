"""Parquet, arrow and feather files through pyarrow, and Hub datasets through datasets, both imported lazily.

A file is written once, batch by batch, into a temporary file without compression, which is mapped into memory: rows are
read in any order. Dictionaries become their values; dates, times and decimals become text.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from loopwright.errors import InputError
from loopwright.sources.files import sha256_of
from loopwright.sources.tables import Row, Table, check_columns, outer_column
from loopwright.sources.values import as_plain

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # `imdb`, `user/name`
IMAGES_PER_BLOCK = 32
_ROWS_PER_BATCH = 1000
_IMAGE_TYPE = "struct<bytes: binary, path: string>"
_PLAIN_TYPES = ("string", "large_string", "bool", "int8", "int16", "int32", "int64", "float", "double", "binary")


class ArrowTable(Table):
    """A table over the arrow table that `read` returns: of a file, or of one split of a Hub dataset."""

    def __init__(self, read: Callable[[], Any], path: str, kind: str, sha256: str, num_bytes: int, split: str = ""):
        self.path, self.kind, self.sha256, self.num_bytes, self.split = path, kind, sha256, num_bytes, split
        self._read = read
        self._table: Any = read()
        self.columns = tuple(self._table.column_names)
        self._num_rows = self._table.num_rows
        stated = json.loads((self._table.schema.metadata or {}).get(b"huggingface", b"{}"))
        self._features: Row = stated.get("info", {}).get("features", {})
        fields = {field.name: field.type for field in self._table.schema}
        has_images = any(str(type_) == _IMAGE_TYPE for type_ in fields.values())
        self.rows_per_block = IMAGES_PER_BLOCK if has_images else Table.rows_per_block
        self._odd = [name for name, type_ in fields.items() if str(type_).partition("[")[0] not in _PLAIN_TYPES]
        self._names = {name: names for name in self.columns if (names := _class_names(self._features.get(name)))}

    def __getstate__(self) -> Row:
        return self.__dict__ | {"_table": None}

    def __len__(self) -> int:
        return int(self._num_rows)

    def row(self, index: int) -> Row:
        return self._rows(index, index + 1, self.columns)[0]

    def _rows(self, start: int, stop: int, columns: Sequence[str]) -> list[Row]:
        if self._table is None:
            self._table = self._read()
        rows: list[Row] = self._table.select(columns).slice(start, stop - start).to_pylist()
        for name in (name for name in columns if name in self._odd or name in self._names):
            for row in rows:
                row[name] = self._named(name, as_plain(row[name]))
        return rows

    def class_names(self, column: str) -> tuple[str, ...]:
        outer, _, inner = column.partition(".")
        if column in self._names or not inner:
            return self._names.get(column, ())
        feature = self._features.get(outer) or {}
        entries = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
        return _class_names(entries.get(inner)) if isinstance(entries, dict) else ()

    def _named(self, column: str, value: Any) -> Any:
        """Return the name of a class instead of its number; -1 becomes None."""
        names = self._names.get(column)
        if names is None or value is None:
            return value
        if isinstance(value, list):
            return [names[number] if number is not None and number >= 0 else None for number in value]
        return names[value] if value >= 0 else None

    def rows(self, start: int, stop: int, columns: Sequence[str]) -> list[Row]:
        wanted = {outer_column(self.columns, column) for column in columns}
        return self._rows(start, stop, [name for name in self.columns if name in wanted])

    def settings(self) -> Row:
        return {"kind": self.kind} | ({"split": self.split} if self.split else {})


def _class_names(feature: Any) -> tuple[str, ...]:
    """Return the class names that `datasets` has written for a column, even inside a list of them."""
    while isinstance(feature, list) or (isinstance(feature, dict) and "feature" in feature):
        feature = feature[0] if isinstance(feature, list) else feature["feature"]
    names = feature.get("names") if isinstance(feature, dict) else None
    return tuple(names) if isinstance(names, list) else ()


def open_arrow(path: Path, kind: str) -> ArrowTable:
    """Open a parquet, arrow or feather file; refuse a damaged one, and one without rows or with equal names."""
    try:
        importlib.import_module("pyarrow")
    except ImportError as error:
        what, fix = f"{path.name}: reading {kind} files needs the package pyarrow", "pip install 'loopwright[arrow]'"
        raise InputError("install.extra", what, saw=[str(error)], fix=fix) from error
    return ArrowTable(partial(_read_file, path, kind), str(path), kind, sha256_of(path), path.stat().st_size)


def _read_file(path: Path, kind: str) -> Any:
    pa: Any = importlib.import_module("pyarrow")
    try:
        schema, num_rows, batches = (_open_parquet if kind == "parquet" else _open_ipc)(pa, path)
        check_columns(str(path), len(schema.names))
        twice = sorted(name for name, number in Counter(schema.names).items() if number > 1)[:5]
        if twice:
            what, saw = f"{path} has several columns of the same name", [repr(name) for name in twice]
            raise InputError("data.duplicate_column", what, saw=saw, fix="write it again with a unique name per column")
        if not num_rows:
            raise InputError("data.no_rows", f"{path} has no rows", fix="give a file with rows")
        with tempfile.NamedTemporaryFile(suffix=".arrow") as file:
            with pa.ipc.new_file(file.name, schema) as writer:
                for batch in batches:
                    writer.write_table(batch, max_chunksize=_ROWS_PER_BATCH)
            return pa.ipc.open_file(pa.memory_map(file.name)).read_all()  # stays mapped when the name is gone
    except InputError:
        raise
    except Exception as error:  # any error of pyarrow about a damaged file
        saw, fix = [str(error)[:200]], "write the file again, or its rows as csv or jsonl"
        raise InputError("data.value", f"{path} cannot be read as a {kind} file", saw=saw, fix=fix) from error


def _open_parquet(pa: Any, path: Path) -> tuple[Any, int, Iterator[Any]]:
    parquet: Any = importlib.import_module("pyarrow.parquet")
    file = parquet.ParquetFile(str(path))
    batches = (pa.Table.from_batches([batch]) for batch in file.iter_batches(_ROWS_PER_BATCH))
    return file.schema_arrow, file.metadata.num_rows, batches


def _open_ipc(pa: Any, path: Path) -> tuple[Any, int, Iterator[Any]]:
    source = pa.memory_map(str(path))
    try:
        table = pa.ipc.open_file(source).read_all()
    except pa.ArrowInvalid:  # the format of `datasets`, without an index of its batches
        source.seek(0)
        table = pa.ipc.open_stream(source).read_all()
    return table.schema, table.num_rows, iter([table])


def open_hub(name: str, split: str | None = None) -> dict[str, ArrowTable]:
    """Return the splits of a Hub dataset by name, or only one of them. `name:part` selects a configuration."""
    loaded = _load(name)
    tables = {}
    for key, dataset in loaded.items():
        # datasets' hash of data and transforms
        sha256 = hashlib.sha256(str(dataset._fingerprint).encode()).hexdigest()
        tables[key] = ArrowTable(_Split(name, key, dataset), name, "hub", sha256, int(dataset.dataset_size or 0), key)
    return tables if split is None else {split: tables[split]}


def _load(name: str) -> Any:
    datasets = _import_datasets(f"{name!r} is not a local file; reading it from the Hub")
    identifier, _, part = name.partition(":")
    try:
        return datasets.load_dataset(identifier, part or None, split=None, trust_remote_code=False)
    except Exception as error:  # dozens of types, from the network to the dataset's own files
        what = f"{name!r} is neither a local file or folder nor a dataset that can be loaded from the Hub"
        saw = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:160]}"
        raise InputError("data.hub", what, saw=[saw], fix="check the name and the network") from error


class _Split:
    """Returns the arrow table of a split; a pickled one loads it again."""

    def __init__(self, name: str, key: str, dataset: Any) -> None:
        self._name, self._key, self._dataset = name, key, dataset

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_dataset": None}

    def __call__(self) -> Any:
        if self._dataset is None:
            self._dataset = _load(self._name)[self._key]
        return self._dataset.data.table


def _import_datasets(what: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        what, fix = f"{what} needs the package datasets", "pip install 'loopwright[data]'"
        raise InputError("install.extra", what, saw=[str(error)], fix=fix) from error
