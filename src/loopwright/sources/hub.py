"""Hub datasets, through the package `datasets`, which is imported lazily."""

from __future__ import annotations

import hashlib
import importlib
import re
from typing import Any

from loopwright.errors import InputError
from loopwright.sources.arrow import ArrowTable

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # `imdb`, `user/name`


def open_hub(name: str, split: str | None = None) -> dict[str, ArrowTable]:
    """Return the splits of a Hub dataset by name, or only one of them. `name:part` selects a configuration."""
    loaded = _load(name)
    tables = {}
    for key, dataset in loaded.items():
        # datasets' hash of data and transforms
        sha256 = hashlib.sha256(str(dataset._fingerprint).encode()).hexdigest()
        read = _Split(name, key, dataset)
        tables[key] = ArrowTable(read, name, "hub", sha256, int(dataset.dataset_size or 0), key)
    return tables if split is None else {split: tables[split]}


def _load(name: str) -> Any:
    datasets = _import_datasets(f"{name!r} is not a local file; reading it from the Hub")
    identifier, _, part = name.partition(":")
    try:
        return datasets.load_dataset(identifier, part or None, split=None, trust_remote_code=False)
    except Exception as error:  # dozens of types, from the network to the dataset's own files
        what = f"{name!r} is neither a local file or folder nor a dataset that can be loaded from the Hub"
        saw = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:160]}"
        fix = "check the name and the network"
        raise InputError("data.hub", what, saw=[saw], fix=fix) from error


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
