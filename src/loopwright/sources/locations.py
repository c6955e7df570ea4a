"""From the names of files, folders and datasets that a user gives to tables by split."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from loopwright.errors import InputError
from loopwright.sources.arrow import HUB_ID, open_hub
from loopwright.sources.files import Say, as_on_disk, folder_listing, near_files
from loopwright.sources.formats import FROM_ARROW, KINDS_BY_ENDING, ending_of, open_table
from loopwright.sources.images.tables import ListedTable
from loopwright.sources.tables import Table

SPLIT_NAMES = {
    "train": ("train", "training", "训练"),
    "validation": ("validation", "valid", "val", "dev", "eval", "验证"),
    "test": ("test", "testing", "holdout", "测试"),
}
SPLITS = tuple(SPLIT_NAMES)
_SHARD = re.compile(r"-\d+-of-\d+$")  # train-00000-of-00001.parquet

Settings = dict[str, Any]
Given = Mapping[str, str | Path | None]


class Place(NamedTuple):
    """The location of a split's data, the option that named it, and the settings for `open_table`."""

    path: str
    flag: str
    settings: Settings


def check_given(data: str | Path | None, files: Given) -> None:
    """Refuse data that is not given, given twice, or empty, such as an unset shell variable."""
    given = {"--data": data} | {f"--{split}_file": file for split, file in files.items()}
    for flag, name in given.items():
        if isinstance(name, str) and not name.strip():
            raise InputError("args.value", f"{flag} is empty", fix=f"leave out {flag}")
        if "://" in str(name):
            raise InputError("data.file", f"{flag} {name} is a URL", fix="download it, and give the file")
    if all(name is None for name in given.values()):
        raise InputError("args.value", "no data was given", fix="lw demo")
    if data is not None and files["train"] is not None:
        saw = [f"--data {data}", f"--train_file {files['train']}"]
        what = "both --data and --train_file name the training data"
        raise InputError("args.value", what, saw=saw, fix="leave out --data")


def locate(data: str | Path | None, files: Given, settings: Settings) -> dict[str, Place]:
    """Return the location of each split. A Hub dataset is under "train" until it is opened."""
    check_given(data, files)
    places = {split: Place(str(file), f"--{split}_file", settings) for split, file in files.items() if file is not None}
    if data is None:
        return places
    folder = as_on_disk(data)
    found = split_files(folder) if folder.is_dir() else {"train": Path(data)}
    return {split: Place(str(file), "--data", settings) for split, file in found.items()} | places


def open_places(places: Mapping[str, Place], say: Say | None) -> dict[str, Table]:
    tables: dict[str, Table] = {}
    for split, (path, flag, settings) in places.items():
        if is_hub(path):
            tables |= {split_of(key): table for key, table in open_hub(path).items() if split_of(key)}
        else:
            tables[split] = open_table(path, flag=flag, say=say, **settings)
    return {split: tables[split] for split in SPLITS if split in tables}


def split_of(name: str) -> str:
    return next((split for split, names in SPLIT_NAMES.items() if name in names), "")


def split_of_file(path: Path) -> str:
    """Return the split that a file is for by its name (train.csv, dev-00000-of-00001.parquet), or ""."""
    return split_of(_SHARD.sub("", path.name.lower().partition(".")[0]))


def split_files(folder: Path) -> dict[str, Path]:
    """Return a folder's files by split: train.*, validation.* (valid, val, dev, eval), test.*, or its only file."""
    usable = sorted(path for path in folder.iterdir() if path.is_file() and ending_of(path) in KINDS_BY_ENDING)
    found = files_by_split(folder, {path: split_of_file(path) for path in usable})
    if not found and len(usable) == 1:
        found["train"] = usable[0]
    if "train" in found:
        return found
    what = f"--data {folder} holds no training file"
    fix = f"put a train.csv (or .tsv .json .jsonl .txt .conll .parquet) into {folder}"
    if any(path.suffix == ".arrow" for path in folder.iterdir()):
        what = f"--data {folder} was saved by the package datasets in a format that is not supported"
        fix = FROM_ARROW.format(folder=repr(str(folder)))
    elif usable:
        fix = f"--train_file {quote(str(usable[0]))} instead of --data {quote(str(folder))}"
    raise InputError("data.folder", what, saw=folder_listing(folder), fix=fix)


def files_by_split(folder: Path, splits: Mapping[Path, str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for split in SPLITS:
        matching = [path for path, name in splits.items() if name == split]
        if len(matching) > 1:
            fix = f"keep one of them in {folder}"
            if split == "train":
                fix = f"--train_file {quote(str(matching[0]))} instead of --data {quote(str(folder))}"
            what, saw = f"--data {folder} has several files for {split}", [path.name for path in matching]
            raise InputError("data.folder", what, saw=saw, fix=fix)
        if matching:
            found[split] = matching[0]
    return found


def check_encoding(table: Table) -> None:
    """Refuse file names that are not UTF-8: a run writes them into its own UTF-8 files."""
    names = [table.path, *(table.files if isinstance(table, ListedTable) else ())]
    odd = [ascii(name)[1:-1] for name in names if any("\ud800" <= character <= "\udfff" for character in name)]
    if len(odd) == 1:
        raise InputError("data.encoding", f"the file name {odd[0]} is not UTF-8", fix="rename it, in ASCII or UTF-8")
    if odd:
        fix = "rename them, in ASCII or UTF-8"
        raise InputError("data.encoding", f"{len(odd):,} file names are not UTF-8", saw=odd[:5], fix=fix)


def is_hub(name: str) -> bool:
    """Whether a name is not a local file or similar to one, and can be a Hub dataset."""
    path = as_on_disk(name)
    if path.exists() or ending_of(path) in KINDS_BY_ENDING:
        return False
    is_in_folder = "/" in name and path.parent.is_dir()
    return HUB_ID.fullmatch(name.partition(":")[0]) is not None and not is_in_folder and not near_files(path)
