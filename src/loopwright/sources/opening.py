"""From names of files, folders and datasets to tables."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from loopwright.errors import InputError
from loopwright.sources.delimited import DelimitedTable
from loopwright.sources.files import FileBytes, Say, given_twice
from loopwright.sources.hub import looks_like_hub_id, open_hub, open_parquet
from loopwright.sources.images.coco import CocoTable
from loopwright.sources.images.folders import ImageFolderTable, ImagesTable, MaskFolderTable
from loopwright.sources.images.reading import IMAGE_ENDINGS
from loopwright.sources.images.tables import ListedTable, TableOfImages
from loopwright.sources.images.yolo import YoloTable
from loopwright.sources.json_files import JsonLinesTable, open_json
from loopwright.sources.tables import Table
from loopwright.sources.text_files import ConllTable, TextTable

SPLITS = ("train", "validation", "test")
KINDS_BY_ENDING = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "txt",
    ".text": "txt",
    ".conll": "conll",
    ".iob": "conll",
    ".iob2": "conll",
    ".bio": "conll",
    ".parquet": "parquet",
}
KINDS = tuple(dict.fromkeys(KINDS_BY_ENDING.values()))
IMAGE_KINDS = ("images", "image-folder", "mask-folder", "yolo", "coco")
SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "test": ("test",),
}
_FROM_ARROW = "write it as parquet: datasets.load_from_disk(FOLDER).to_parquet('train.parquet')"
# Endings of unsupported formats, and how to convert them.
_WAYS_OUT = {
    **dict.fromkeys((".zip", ".7z", ".rar"), "unzip {path}   and give the file or folder that was in it"),
    **dict.fromkeys((".tar", ".tgz"), "tar -xf {path}   and give the file or folder that was in it"),
    **dict.fromkeys((".bz2", ".xz", ".zst"), "unpack {path}   and give the file that was in it"),
    **dict.fromkeys((".xlsx", ".xls", ".ods", ".numbers"), "open it in the program that wrote it and save it as csv"),
    **dict.fromkeys((".arrow", ".feather"), _FROM_ARROW),
    **dict.fromkeys(
        (".pkl", ".pickle", ".pt", ".npy", ".npz"),
        "write its rows as csv or jsonl: it is not opened, for it can hold code",
    ),
    **dict.fromkeys((".pdf", ".docx", ".doc", ".html"), "save its text as a txt file"),
}
_WAYS_OUT |= dict.fromkeys(IMAGE_ENDINGS, "give a file with rows of text; lw tasks says which tasks read images")
SHARD = re.compile(r"-\d+-of-\d+$")  # train-00000-of-00001.parquet


def open_table(
    path: str | Path,
    *,
    kind: str | None = None,
    delimiter: str | None = None,
    quoting: str | None = None,
    text_unit: str = "line",
    split: str | None = None,
    image_dir: str | None = None,
    annotation_dir: str | None = None,
    names_file: str | None = None,
    flag: str = "--data",
    say: Say | None = None,
) -> Table:
    """Open a data file, check its bytes and index its rows.

    Args:
        path: A csv, tsv, json, jsonl, txt, conll or parquet file, all but the last also as .gz, or the id of a Hub
            dataset with `split`.
        kind: One of `KINDS` for a file with another ending, or one of `IMAGE_KINDS` for images.
        delimiter: Of a csv file; sniffed by default.
        quoting: "minimal", or "none" for a csv file in which quotes are ordinary characters; sniffed by default.
        text_unit: "line" or "paragraph": the row of a txt file.
        split: The split of a Hub dataset.
        image_dir: The location of the images: a sub-folder, or for a file the base folder of its paths, relative to it.
            It turns a csv, json, jsonl or parquet file into a table of images.
        annotation_dir: The sub-folder of masks or text files of objects.
        names_file: A file of class names by number, relative to the folder or the file.
        flag: The option that named the file, for error messages.
        say: Receives the progress every few megabytes.

    Raises:
        InputError: Any problem with the file.
    """
    if kind in IMAGE_KINDS:
        return _open_images(Path(path).expanduser(), kind, image_dir, annotation_dir, names_file, flag, say)
    if kind == "hub" and split is not None:
        table: Table = open_hub(str(path), split)[split]
    else:
        table = _open_file(Path(path).expanduser(), kind, delimiter, quoting, text_unit, flag, say)
    return table if image_dir is None else TableOfImages(table, image_dir, names_file)


def _open_file(
    path: Path,
    kind: str | None,
    delimiter: str | None,
    quoting: str | None,
    text_unit: str,
    flag: str,
    say: Say | None,
) -> Table:
    if not path.exists():
        raise missing_file(path, flag)
    if path.is_dir():
        raise InputError(
            "data.folder", f"{flag} {path} is a folder", saw=folder_listing(path), fix=f"--data {path}   or name a file"
        )
    kind = kind or kind_of(path, flag)
    if kind == "parquet":
        return open_parquet(path)
    source = FileBytes(path)
    if kind in ("csv", "tsv"):
        return DelimitedTable(source, kind, delimiter, quoting, say)
    if kind == "json":
        return open_json(source, say)
    if kind == "jsonl":
        return JsonLinesTable(source, say)
    if kind == "txt":
        return TextTable(source, text_unit, say)
    if kind == "conll":
        return ConllTable(source, say)
    known = ", ".join((*KINDS, *IMAGE_KINDS))
    raise InputError("args.value", f"--file_kind {kind!r} is unknown", saw=["known: " + known], fix="--file_kind csv")


def _open_images(
    path: Path,
    kind: str,
    image_dir: str | None,
    annotation_dir: str | None,
    names_file: str | None,
    flag: str,
    say: Say | None,
) -> Table:
    if not path.exists():
        raise missing_file(path, flag)
    if kind == "coco":
        return CocoTable(FileBytes(path), image_dir, say)
    if kind == "images":
        return ImagesTable(path, image_dir)
    if not path.is_dir():
        raise InputError("data.folder", f"{flag} {path} is no folder, which {kind} needs", fix=f"{flag} {path.parent}")
    if kind == "image-folder":
        return ImageFolderTable(path)
    made = MaskFolderTable if kind == "mask-folder" else YoloTable
    defaults = ("images", "masks" if kind == "mask-folder" else "labels")
    return made(path, image_dir or defaults[0], annotation_dir or defaults[1], names_file)


def kind_of(path: Path, flag: str) -> str:
    """Return the kind of a file by its ending."""
    ending = _ending(path)
    if ending in KINDS_BY_ENDING:
        return KINDS_BY_ENDING[ending]
    shown = f"ends in {ending!r}" if ending else "has no ending"
    raise InputError(
        "data.ending",
        f"{flag} {path}: {path.name} {shown}, which says nothing about what it is",
        saw=["read are: " + " ".join(KINDS_BY_ENDING) + ", also with .gz behind"],
        fix=_WAYS_OUT.get(ending, "rename the file, or say what it is: --file_kind txt").format(path=quote(str(path))),
    )


def _ending(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def locate(
    data: str | Path | None,
    train_file: str | Path | None,
    validation_file: str | Path | None,
    test_file: str | Path | None,
) -> dict[str, tuple[str, str]]:
    """Return (name of a file or Hub dataset, option that named it) by split, in the order of `SPLITS`.

    A Hub dataset is not loaded here; it is under "train" until it is opened.
    """
    files = {"train": train_file, "validation": validation_file, "test": test_file}
    refuse_empty_names(data, files)
    named = {split: (str(file), f"--{split}_file") for split, file in files.items() if file is not None}
    if data is None:
        if not named:
            raise InputError("args.value", "no data was given", fix="--data FILE_OR_FOLDER   or   --train_file FILE")
        return named
    if "train" in named:
        raise given_twice(data, train_file)
    path = Path(data).expanduser()
    if path.is_dir():
        return {split: (str(file), "--data") for split, file in split_files(path).items()} | named
    return {"train": (str(data), "--data")} | named


def refuse_empty_names(data: str | Path | None, files: Mapping[str, str | Path | None]) -> None:
    """Refuse an empty option, such as an unset shell variable."""
    for flag, name in {"--data": data, **{f"--{split}_file": file for split, file in files.items()}}.items():
        if isinstance(name, str) and not name.strip():
            raise InputError("args.value", f"{flag} is empty", fix=f"{flag} FILE   or leave it out")


def refuse_other_names(table: Table) -> None:
    """Refuse file names that are not UTF-8: a run writes them into its own UTF-8 files."""
    names = [table.path, *(table.files if isinstance(table, ListedTable) else ())]
    odd = [name for name in names if any("\ud800" <= character <= "\udfff" for character in name)]
    if odd:
        shown = [ascii(name)[1:-1] for name in odd[:5]]
        raise InputError(
            "data.encoding",
            f"the name of {shown[0]} is not UTF-8" if len(odd) == 1 else f"{len(odd):,} names of files are not UTF-8",
            saw=[] if len(odd) == 1 else shown,
            fix="rename it"
            if len(odd) == 1
            else "rename them, for instance: convmv -f latin1 -t utf8 -r --notest FOLDER",
        )


def is_hub(name: str) -> bool:
    """Whether a name is not a local file or similar to one, and can be a Hub dataset."""
    path = Path(name).expanduser()
    if path.exists() or _ending(path) in KINDS_BY_ENDING:
        return False
    is_in_folder = "/" in name and path.parent.is_dir()
    return looks_like_hub_id(name.partition(":")[0]) and not is_in_folder and not _near_names(path)


def split_files(folder: Path) -> dict[str, Path]:
    """Return a folder's files by split: train.*, validation.* (valid, val, dev, eval), test.*, or its only file."""
    usable = sorted(path for path in folder.iterdir() if path.is_file() and _ending(path) in KINDS_BY_ENDING)
    found: dict[str, Path] = {}
    for split, names in SPLIT_NAMES.items():
        matching = [path for path in usable if SHARD.sub("", path.name.lower().partition(".")[0]) in names]
        if len(matching) > 1:
            raise InputError(
                "data.folder",
                f"--data {folder} has several files for {split}",
                saw=[path.name for path in matching],
                fix=f"--train_file {folder / matching[0].name}   and leave --data out"
                if split == "train"
                else "keep one of them, or name the files one by one",
            )
        if matching:
            found[split] = matching[0]
    if not found and len(usable) == 1:
        found["train"] = usable[0]
    if "train" not in found and any(path.suffix == ".arrow" for path in folder.iterdir()):
        raise InputError(
            "data.folder",
            f"--data {folder} is a dataset as the package datasets saves it, which is not read",
            saw=folder_listing(folder),
            fix=_FROM_ARROW.replace("FOLDER", repr(str(folder))),
        )
    if "train" not in found:
        raise InputError(
            "data.folder",
            f"--data {folder} holds no training file",
            saw=folder_listing(folder),
            fix="name one train.csv (or .tsv .json .jsonl .txt .conll .parquet), or give --train_file"
            if not usable
            else f"--train_file {quote(str(folder / usable[0].name))}",
        )
    return found


def folder_listing(folder: Path) -> list[str]:
    """Return the content of a folder, in a few lines."""
    names = sorted(path.name + ("/" if path.is_dir() else "") for path in folder.iterdir())
    if not names:
        return ["the folder is empty"]
    return [f"it holds: {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")]


def missing_file(path: Path, flag: str) -> InputError:
    """Return the error about a missing file, with the nearest names."""
    folder = path.parent
    if path.is_symlink():
        leads = os.readlink(path)
        return InputError(
            "data.file",
            f"{flag} {path} is a link to {leads}, which does not exist",
            fix=f"make {leads}, or give another file",
        )
    near = _near_names(path)
    where = "the current folder" if folder == Path(".") else str(folder)
    saw = [f"looked in {where}"] if folder.is_dir() else [f"there is no folder {folder}"]
    if near:
        saw.append(f"near names there: {', '.join(near)}")
    elif folder.is_dir():
        saw += folder_listing(folder)
    fix = f"{flag} {quote(str(folder / near[0]))}" if near else f"{flag} with a file that exists"
    return InputError("data.file", f"{flag} {path} does not exist", saw=saw, fix=fix)


def _near_names(path: Path) -> list[str]:
    if not path.parent.is_dir():
        return []
    names = [other.name for other in path.parent.iterdir()]
    return difflib.get_close_matches(path.name, names, n=3, cutoff=0.7)


def open_all(
    located: dict[str, tuple[str, str]], settings: dict[str, Any], say: Say | None
) -> dict[str, tuple[Table, str]]:
    """Open the files of all splits; return (table, option that named it) by split."""
    tables: dict[str, tuple[Table, str]] = {}
    for split, (name, flag) in located.items():
        if is_hub(name):
            tables |= {split_of_hub(key): (table, flag) for key, table in open_hub(name).items() if split_of_hub(key)}
        else:
            tables[split] = (open_table(name, flag=flag, say=say, **settings), flag)
    return {split: tables[split] for split in SPLITS if split in tables}


def split_of_hub(key: str) -> str:
    """Return the split for a Hub dataset's split name, or ""."""
    return next((split for split, names in SPLIT_NAMES.items() if key in names), "")
