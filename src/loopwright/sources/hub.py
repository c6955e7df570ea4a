"""Parquet files and Hub datasets, through the package `datasets`, which is imported lazily."""

from __future__ import annotations

import hashlib
import importlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loopwright.errors import InputError
from loopwright.sources.files import Progress, Say, sha256_of
from loopwright.sources.tables import Block, Row, Table, as_block, check_columns

IMAGES_PER_BLOCK = 32
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # `imdb`, `user/name`


class DatasetTable(Table):
    """A table over a `datasets.Dataset`: a parquet file, or one split of a Hub dataset."""

    def __init__(self, dataset: Any, path: str, kind: str, sha256: str, num_bytes: int, split: str = "") -> None:
        self.path = path
        self.kind = kind
        self.columns = tuple(dataset.column_names)
        self.sha256 = sha256
        self.num_bytes = num_bytes
        self.split = split
        images = [column for column in self.columns if type(dataset.features[column]).__name__ == "Image"]
        for column in images:  # as {"bytes", "path"}: loader workers decode them
            dataset = dataset.cast_column(column, type(dataset.features[column])(decode=False))
        self._dataset = dataset
        self.rows_per_block = IMAGES_PER_BLOCK if images else Table.rows_per_block
        self._names = {column: names for column in self.columns if (names := _class_names(dataset.features[column]))}

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Row:
        return {column: self._named(column, value) for column, value in self._dataset[index].items()}

    def class_names(self, column: str) -> tuple[str, ...]:
        outer, _, inner = column.partition(".")
        if column in self._names or not inner or outer not in self.columns:
            return self._names.get(column, ())
        feature = self._dataset.features[outer]
        entries = getattr(feature, "feature", feature)
        return _class_names(entries[inner]) if isinstance(entries, dict) and inner in entries else ()

    def _named(self, column: str, value: Any) -> Any:
        """Return the name of a class instead of its number; -1 becomes None."""
        names = self._names.get(column)
        if names is None or value is None:
            return value
        if isinstance(value, list):
            return [names[number] if number is not None and number >= 0 else None for number in value]
        return names[value] if value >= 0 else None

    def blocks(self, columns: Sequence[str], say: Say | None = None) -> Iterator[Block]:
        wanted = {*columns, *(column.partition(".")[0] for column in columns)}
        dataset = self._dataset.select_columns([name for name in self.columns if name in wanted])
        for start in range(0, len(self), self.rows_per_block):
            stop = min(start + self.rows_per_block, len(self))
            batch = {
                column: [self._named(column, value) for value in values]
                for column, values in dataset[start:stop].items()
            }
            rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
            yield as_block(start, rows, columns)
            if say is not None:
                say(Progress(self.path, "checking", self.num_bytes * stop // len(self), self.num_bytes))

    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind} | ({"split": self.split} if self.split else {})


def _class_names(feature: Any) -> tuple[str, ...]:
    """Return the class names of a `datasets` feature, even inside a list of them."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return tuple(names) if names is not None else ()


def open_parquet(path: Path) -> DatasetTable:
    datasets = _import_datasets(f"{path.name}: reading parquet files")
    sha256 = sha256_of(path)
    columns: list[str] = []
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
        with parquet.ParquetFile(str(path)) as file:
            columns, num_rows = list(file.schema_arrow.names), file.metadata.num_rows
        check_columns(str(path), len(columns))
        if not num_rows:
            raise InputError("data.no_rows", f"{path} has no rows", fix="give a file with rows")
        twice = sorted(name for name, number in Counter(columns).items() if number > 1)[:5]
        if twice:
            what, saw = f"{path} has several columns of the same name", [repr(name) for name in twice]
            raise InputError("data.duplicate_column", what, saw=saw, fix="write it again with a unique name per column")
        with _silent(datasets):
            dataset = datasets.Dataset.from_parquet(str(path))
    except InputError:
        raise
    except Exception as error:  # any error of pyarrow and datasets about a damaged file
        what = f"{path} {'cannot be read' if columns else 'is not a parquet file'}"
        saw, fix = [str(error.__cause__ or error)[:200]], "write the file again, or its rows as csv or jsonl"
        raise InputError("data.value", what, saw=saw, fix=fix) from error
    return DatasetTable(dataset, str(path), "parquet", sha256, path.stat().st_size)


@contextmanager
def _silent(datasets: Any) -> Iterator[None]:
    """Silence the package's progress bars and warnings: the file is local, and errors are reported separately."""
    is_shown, level = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if is_shown:
            datasets.enable_progress_bars()


def open_hub(name: str, split: str | None = None) -> dict[str, DatasetTable]:
    """Return the splits of a Hub dataset by name, or only one of them. `name:part` selects a configuration."""
    datasets = _import_datasets(f"{name!r} is not a local file; reading it from the Hub")
    identifier, _, part = name.partition(":")
    try:
        loaded = datasets.load_dataset(identifier, part or None, split=None, trust_remote_code=False)
    except Exception as error:  # dozens of types, from the network to the dataset's own files
        what = f"{name!r} is neither a local file or folder nor a dataset that can be loaded from the Hub"
        saw = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:160]}"
        fix = "check the name and the network, or give a local file with --train_file"
        raise InputError("data.hub", what, saw=[saw], fix=fix) from error
    tables = {}
    for key, dataset in loaded.items():
        # datasets' hash of data and transforms
        sha256 = hashlib.sha256(str(dataset._fingerprint).encode()).hexdigest()
        tables[key] = DatasetTable(dataset, name, "hub", sha256, int(dataset.dataset_size or 0), key)
    return tables if split is None else {split: tables[split]}


def _import_datasets(what: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        what, fix = f"{what} needs the package datasets", "pip install 'loopwright[data]'"
        raise InputError("install.extra", what, saw=[str(error)], fix=fix) from error
