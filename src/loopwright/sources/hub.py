"""Parquet files and Hub datasets, through the package `datasets`, which is imported lazily."""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loopwright.errors import InputError
from loopwright.sources.files import Progress, Say, sha256_of
from loopwright.sources.tables import Block, Row, Table, value_at

ROWS_PER_BLOCK = 1000
IMAGES_PER_BLOCK = 32
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def looks_like_hub_id(name: str) -> bool:
    """Whether a name can be a Hub dataset: `imdb`, `user/name`."""
    return _HUB_ID.fullmatch(name) is not None


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
        self._rows_per_block = IMAGES_PER_BLOCK if images else ROWS_PER_BLOCK
        self._names = {column: names for column in self.columns if (names := _class_names(dataset.features[column]))}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a table of {len(self)} rows")
        return {column: self._named(column, value) for column, value in self._dataset[index].items()}

    def class_names(self, column: str) -> tuple[str, ...]:
        """Return the classes of a column that defines them, in the order of their numbers."""
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
        """Yield all rows in order, with the named columns only. A missing value is None."""
        num_rows, step = len(self), self._rows_per_block
        needed = [name for name in self.columns if any(column.partition(".")[0] == name for column in (*columns,))]
        needed += [name for name in columns if name in self.columns and name not in needed]
        dataset = self._dataset.select_columns(needed)
        for start in range(0, num_rows, step):
            batch = {
                column: [self._named(column, value) for value in values]
                for column, values in dataset[start : start + step].items()
            }
            rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
            yield Block(start, {name: [value_at(row, name) for row in rows] for name in columns})
            if say is not None:
                done = min(1.0, (start + step) / num_rows)
                say(Progress(self.path, "checking", int(done * self.num_bytes), self.num_bytes))

    def settings(self) -> dict[str, Any]:
        """Return the kind, and the split of a Hub dataset."""
        return {"kind": self.kind} | ({"split": self.split} if self.split else {})


def _class_names(feature: Any) -> tuple[str, ...]:
    """Return the class names of a `datasets` feature, even inside a list of them."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return tuple(names) if names is not None else ()


def open_parquet(path: Path) -> DatasetTable:
    """Return the table of a parquet file."""
    datasets = _import_datasets(f"{path.name}: reading parquet files")
    sha256 = sha256_of(path)
    columns: list[str] = []
    try:
        columns, num_rows = _parquet_head(path)
        if not num_rows:
            raise InputError("data.no_rows", f"{path} has no rows", fix="give a file with rows")
        twice = sorted({name for name in columns if columns.count(name) > 1})
        if twice:
            raise InputError(
                "data.duplicate_column",
                f"{path} has {len(twice)} column name{'s' if len(twice) > 1 else ''} twice or more",
                saw=[repr(name) for name in twice],
                fix="write it again with a name of its own for each column",
            )
        with _silent(datasets):
            dataset = datasets.Dataset.from_parquet(str(path))
    except InputError:
        raise
    except Exception as error:  # any error of pyarrow and datasets about a damaged file
        raise InputError(
            "data.value",
            f"{path} cannot be read" if columns else f"{path} is no parquet file",
            saw=[str(error.__cause__ or error)[:200]],
            fix="write the file again, or its rows as csv or jsonl",
        ) from error
    return DatasetTable(dataset, str(path), "parquet", sha256, path.stat().st_size)


def _parquet_head(path: Path) -> tuple[list[str], int]:
    """Return the columns and the number of rows of a parquet file; pyarrow comes with datasets."""
    parquet: Any = importlib.import_module("pyarrow.parquet")
    with parquet.ParquetFile(str(path)) as file:
        return list(file.schema_arrow.names), int(file.metadata.num_rows)


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
    datasets = _import_datasets(f"{name!r} is no file here, and reading it from the Hub")
    identifier, _, part = name.partition(":")
    try:
        loaded = datasets.load_dataset(identifier, part or None, split=None)
    except Exception as error:  # dozens of types, from the network to the dataset's own files
        raise InputError(
            "data.hub",
            f"{name!r} is neither a file or folder here nor a dataset that can be loaded from the Hub",
            saw=[f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"],
            fix="check the name and the network, or give a local file with --train_file",
        ) from error
    tables = {
        key: DatasetTable(
            dataset,
            name,
            "hub",
            hashlib.sha256(str(dataset._fingerprint).encode()).hexdigest(),  # datasets' hash of data and transforms
            int(dataset.dataset_size or 0),
            key,
        )
        for key, dataset in loaded.items()
    }
    return tables if split is None else {split: tables[split]}


def _import_datasets(what: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise InputError(
            "install.extra",
            f"{what} needs the package datasets",
            saw=[str(error)],
            fix="pip install 'loopwright[data]'",
        ) from error
