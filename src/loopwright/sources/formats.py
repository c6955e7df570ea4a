"""The formats of data files, and the table of each."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from loopwright.errors import InputError
from loopwright.sources.delimited import DelimitedTable
from loopwright.sources.files import FileBytes, Say, folder_listing, missing_file
from loopwright.sources.hub import open_hub, open_parquet
from loopwright.sources.images.coco import CocoTable
from loopwright.sources.images.folders import ImageFolderTable, ImagesTable, MaskFolderTable
from loopwright.sources.images.image_file import IMAGE_ENDINGS
from loopwright.sources.images.tables import TableOfImages
from loopwright.sources.images.yolo import YoloTable
from loopwright.sources.json_files import JsonLinesTable, open_json
from loopwright.sources.tables import Table, check_columns
from loopwright.sources.text_files import ConllTable, TextTable

_ENDINGS = {
    "csv": (".csv",),
    "tsv": (".tsv", ".tab"),
    "json": (".json",),
    "jsonl": (".jsonl", ".ndjson"),
    "txt": (".txt", ".text"),
    "conll": (".conll", ".iob", ".iob2", ".bio"),
    "parquet": (".parquet",),
}
KINDS_BY_ENDING = {ending: kind for kind, endings in _ENDINGS.items() for ending in endings}
KINDS = tuple(_ENDINGS)
IMAGE_KINDS = ("images", "image-folder", "mask-folder", "yolo", "coco")
FROM_ARROW = "write it as parquet: datasets.load_from_disk({folder}).to_parquet('train.parquet')"
# Endings of unsupported formats, and how to convert them.
_CONVERSIONS = {
    (".zip", ".7z", ".rar"): "unzip {path}   and give the file or folder that was in it",
    (".tar", ".tgz"): "tar -xf {path}   and give the file or folder that was in it",
    (".bz2", ".xz", ".zst"): "unpack {path}   and give the file that was in it",
    (".xlsx", ".xls", ".ods", ".numbers"): "open it in the program that wrote it and save it as csv",
    (".arrow", ".feather"): FROM_ARROW.format(folder="FOLDER"),
    (".pkl", ".pickle", ".pt", ".npy", ".npz"): "write its rows as csv or jsonl; it is not opened, as it can hold code",
    (".pdf", ".docx", ".doc", ".html"): "save its text as a txt file",
    IMAGE_ENDINGS: "give a file with rows of text; lw tasks lists the tasks that read images",
}


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
    """Open a data file, check its bytes and index its rows; any problem is an InputError.

    Args:
        path: A csv, tsv, json, jsonl, txt, conll or parquet file, all but the last also as .gz, or the id of a Hub
            dataset with `split`.
        kind: One of `KINDS` for a file with another ending, or one of `IMAGE_KINDS` for images.
        delimiter: Of a csv file; sniffed by default.
        quoting: "minimal", or "none" for a csv file in which quotes are ordinary characters; sniffed by default.
        text_unit: "line" or "paragraph": the row of a txt file.
        image_dir: The location of the images: a sub-folder, or for a file the base folder of its paths, relative to it.
            It turns a csv, json, jsonl or parquet file into a table of images.
        annotation_dir: The sub-folder of masks or text files of objects.
        names_file: A file of class names by number, relative to the folder or the file.
        flag: The option that named the file, for error messages.
        say: Receives the progress every few megabytes.
    """
    local = Path(path).expanduser()
    if kind == "hub" and split is not None:
        table: Table = open_hub(str(path), split)[split]
    elif not local.exists():
        raise missing_file(local, flag)
    elif kind == "coco":
        return CocoTable(FileBytes(local), image_dir, say)
    elif kind in IMAGE_KINDS:
        return _open_images(local, kind, flag, image_dir, annotation_dir, names_file)
    elif local.is_dir():
        what, fix = f"{flag} {path} is a folder", f"--data {path}   or name a file"
        raise InputError("data.folder", what, saw=folder_listing(local), fix=fix)
    else:
        table = _open_file(local, kind or kind_of(local, flag), delimiter, quoting, text_unit, say)
    check_columns(table.path, len(table.columns))
    return table if image_dir is None else TableOfImages(table, image_dir, names_file)


def _open_file(
    path: Path, kind: str, delimiter: str | None, quoting: str | None, text_unit: str, say: Say | None
) -> Table:
    if kind == "parquet":
        return open_parquet(path)
    if kind not in KINDS:
        saw = ["known: " + ", ".join((*KINDS, *IMAGE_KINDS))]
        raise InputError("args.value", f"--file_kind {kind!r} is unknown", saw=saw, fix="--file_kind csv")
    source = FileBytes(path)
    if kind in ("csv", "tsv"):
        return DelimitedTable(source, kind, delimiter, quoting, say)
    if kind == "txt":
        return TextTable(source, text_unit, say)
    return {"json": open_json, "jsonl": JsonLinesTable, "conll": ConllTable}[kind](source, say)


def _open_images(
    path: Path, kind: str, flag: str, image_dir: str | None, annotation_dir: str | None, names_file: str | None
) -> Table:
    if kind == "images":
        return ImagesTable(path, image_dir)
    if not path.is_dir():
        what = f"{flag} {path} is not a folder, which {kind} needs"
        raise InputError("data.folder", what, fix=f"{flag} {path.parent}")
    if kind == "image-folder":
        return ImageFolderTable(path)
    if kind == "mask-folder":
        return MaskFolderTable(path, image_dir or "images", annotation_dir or "masks", names_file)
    return YoloTable(path, image_dir or "images", annotation_dir or "labels", names_file)


def kind_of(path: Path, flag: str) -> str:
    ending = ending_of(path)
    if ending in KINDS_BY_ENDING:
        return KINDS_BY_ENDING[ending]
    what = f"{flag} {path}: {f'the ending {ending!r} is not supported' if ending else 'the file name has no ending'}"
    saw = ["supported: " + " ".join(KINDS_BY_ENDING) + ", also with .gz"]
    fix = next((fix for endings, fix in _CONVERSIONS.items() if ending in endings), "")
    fix = fix or "rename the file, or name its format: --file_kind txt"
    raise InputError("data.ending", what, saw=saw, fix=fix.format(path=quote(str(path))))


def ending_of(path: Path) -> str:
    """Return the ending of a file name in lower case, without .gz."""
    return Path(path.name.lower().removesuffix(".gz")).suffix
