"""The formats of data files, and the table of each."""

from __future__ import annotations

import contextlib
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import quote

from loopwright.errors import InputError
from loopwright.sources.arrow import open_arrow, open_hub
from loopwright.sources.delimited import DelimitedTable, GivenDialect
from loopwright.sources.files import (
    PACKINGS,
    FileBytes,
    Say,
    as_on_disk,
    folder_listing,
    missing_file,
    open_text,
    read_data,
)
from loopwright.sources.images.coco import CocoTable
from loopwright.sources.images.folders import ImageFolderTable, ImagesTable, MaskFolderTable
from loopwright.sources.images.image_file import IMAGE_ENDINGS
from loopwright.sources.images.tables import TableOfImages
from loopwright.sources.images.yolo import YoloTable
from loopwright.sources.json_files import JsonLinesTable, open_json
from loopwright.sources.sheets import open_sheet
from loopwright.sources.tables import Table, check_columns
from loopwright.sources.text_files import ConllTable, TextTable

_ENDINGS = {
    "csv": (".csv",),
    "tsv": (".tsv", ".tab"),
    "json": (".json",),
    "jsonl": (".jsonl", ".ndjson"),
    "txt": (".txt", ".text"),
    "conll": (".conll", ".iob", ".iob2", ".bio"),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather"),
    "xlsx": (".xlsx", ".xlsm"),
}
KINDS_BY_ENDING = {ending: kind for kind, endings in _ENDINGS.items() for ending in endings}
KINDS = tuple(_ENDINGS)
IMAGE_KINDS = ("images", "image-folder", "mask-folder", "yolo", "coco")
FROM_ARROW = "write it as parquet: datasets.load_from_disk({folder}).to_parquet('train.parquet')"
# Endings of unsupported formats, and how to convert them.
_CONVERSIONS = {
    (".zip",): "unzip {path}   then   {inner} instead of {path}",
    (".gz", ".bz2", ".xz"): "--file_kind csv",
    (".tar", ".tgz"): "tar -xf {path}   then   {inner} instead of {path}",
    (".zst", ".7z", ".rar"): "unpack {path}, and give the file that was in it",
    (".xls", ".xlsb", ".ods", ".numbers"): "open it in the program that wrote it and save it as xlsx or csv",
    (".pkl", ".pickle", ".pt", ".npy", ".npz"): "write its rows as csv or jsonl; it is not opened, as it can hold code",
    (".pdf", ".docx", ".doc", ".html"): "save its text as a txt file",
    IMAGE_ENDINGS: "give a file with rows of text; lw tasks lists the tasks that read images",
}


def open_table(
    path: str | Path,
    *,
    kind: str | None = None,
    encoding: str | None = None,
    sheet: str | None = None,
    delimiter: str | None = None,
    quoting: str | None = None,
    column_names: Sequence[str] = (),
    decimals: Mapping[str, str] | None = None,
    text_unit: str = "line",
    split: str | None = None,
    image_dir: str | None = None,
    annotation_dir: str | None = None,
    names_file: str | None = None,
    bad_annotations: str | None = None,
    keeps_damaged: bool = False,
    keeps_blank: bool = False,
    flag: str = "--data",
    say: Say | None = None,
) -> Table:
    """Open a data file, check its bytes and index its rows; any problem is an InputError.

    Args:
        path: A csv, tsv, json, jsonl, txt or conll file, also packed (`PACKINGS`); a parquet, arrow, feather or xlsx
            file; or the id of a Hub dataset with `split`.
        kind: One of `KINDS` for a file with another ending, or one of `IMAGE_KINDS` for images.
        encoding: Of a text file; detected by default. `utf-8,cp1252` decodes each line by the first one that can.
        sheet: Of an xlsx file; the first by default.
        delimiter: Of a csv file; sniffed by default.
        quoting: "minimal", "single" for single quotes, "backslash" for quotes after backslashes, or "none" for quotes
            that are ordinary characters of a csv file; sniffed by default.
        column_names: Of a csv or xlsx file without a header, whose first line is a row then.
        decimals: The columns of a csv file whose numbers have a "comma" before their decimals, or a "point" and
            commas between thousands.
        text_unit: "line" or "paragraph": the row of a txt file.
        image_dir: The location of the images: a sub-folder, or for a file the base folder of its paths, relative to it.
            It turns a csv, json, jsonl or parquet file into a table of images.
        annotation_dir: The sub-folder of masks or text files of objects.
        names_file: A file of class names by number, relative to the folder or the file.
        bad_annotations: "drop" to leave out entries of a COCO json that do not match its images or categories.
        keeps_damaged: Keep the place of a row that cannot be read, as a `DamagedRow`.
        keeps_blank: Keep blank lines and rows as rows, except at the end.
        flag: The option that named the file, for error messages.
        say: Receives the progress every few megabytes.
    """
    local = as_on_disk(path)
    if kind == "hub" and split is not None:
        table: Table = open_hub(str(path), split)[split]
    elif not local.exists():
        raise missing_file(local, flag)
    elif kind == "coco":
        return open_text(local, encoding, lambda source: CocoTable(source, image_dir, say, bad_annotations))
    elif kind in IMAGE_KINDS:
        return _open_images(local, kind, flag, image_dir, annotation_dir, names_file)
    elif local.is_dir():
        what, fix = f"{flag} {path} is a folder", f"--data {quote(str(path))} instead of {flag} {quote(str(path))}"
        raise InputError("data.folder", what, saw=folder_listing(local), fix=fix)
    else:
        kind = kind or kind_of(local, flag)
        if kind in ("parquet", "arrow"):
            table = open_arrow(local, kind)
        elif kind == "xlsx":
            table = open_sheet(local, sheet, column_names, keeps_blank, say)
        else:
            csv = delimiter, quoting, column_names
            table = _open_text(local, encoding, kind, csv, text_unit, say, keeps_damaged, keeps_blank)
        if isinstance(table, DelimitedTable):
            table.decimals = dict(decimals or {})
        elif column_names and kind != "xlsx":
            what = f"--column_names is for csv, tsv and xlsx files, and {path} is none"
            raise InputError("args.value", what, fix="leave out --column_names", flag="--column_names")
    check_columns(table.path, len(table.columns))
    images = table if image_dir is None else TableOfImages(table, image_dir, names_file)
    images.has_header = table.has_header
    return images


def _open_text(
    path: Path, encoding: str | None, kind: str, csv: GivenDialect, text_unit: str, say: Say | None, *keeps: bool
) -> Table:
    readers: dict[str, Callable[[FileBytes], Table]] = {
        **dict.fromkeys(("csv", "tsv"), lambda source: DelimitedTable(source, kind, csv, say)),
        "txt": lambda source: TextTable(source, text_unit, say),
        "json": lambda source: open_json(source, say),
        "jsonl": lambda source: JsonLinesTable(source, say),
        "conll": lambda source: ConllTable(source, say),
    }
    if kind not in readers:
        saw = ["known: " + ", ".join((*KINDS, *IMAGE_KINDS))]
        raise InputError("args.value", f"--file_kind {kind!r} is unknown", saw=saw, fix="--file_kind csv")
    return open_text(path, encoding, readers[kind], *keeps)


def _open_images(
    path: Path, kind: str, flag: str, image_dir: str | None, annotation_dir: str | None, names_file: str | None
) -> Table:
    if kind == "images":
        return ImagesTable(path, image_dir)
    if not path.is_dir():
        what = f"{flag} {path} is not a folder, which {kind} needs"
        raise InputError("data.folder", what, fix=f"{flag} {quote(str(path.parent))}")
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
    saw = ["supported: " + " ".join(KINDS_BY_ENDING) + f", also with {' '.join(PACKINGS)}"]
    fix = next((fix for endings, fix in _CONVERSIONS.items() if ending in endings), "")
    fix = fix or f"--file_kind {_sniffed(path)}"
    head = read_data(path, 256).lstrip().lower() if ending == ".xls" else b"<"
    if not head.startswith((b"\xd0\xcf\x11\xe0", b"<")):  # html is what web sites call .xls, too
        fix = "--file_kind xlsx" if head.startswith(b"pk") else "--file_kind csv"
    raise InputError("data.ending", what, saw=saw, fix=fix.format(path=quote(str(path)), inner=quote(_inner(path))))


def _inner(path: Path) -> str:
    """Return the data file in an archive: its first one of a known kind, else the folder or name without the ending."""
    names = []
    with contextlib.suppress(OSError, zipfile.BadZipFile, tarfile.TarError):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        elif path.is_file() and tarfile.is_tarfile(path):
            with tarfile.open(path) as packed:
                names = packed.getnames()
    names = [name for name in names if not name.startswith("__MACOSX/")]
    known = (name for name in names if ending_of(Path(name)) in KINDS_BY_ENDING)
    return next(known, None) or next(iter(names), None) or str(path.with_suffix(""))


def _sniffed(path: Path) -> str:
    """Return the probable kind of a file with another ending, by its first line."""
    with contextlib.suppress(OSError, InputError):
        line = read_data(path, 4096).lstrip(b"\xef\xbb\xbf \t\r\n").partition(b"\n")[0]
        marks = {"jsonl": line[:1] == b"{", "json": line[:1] == b"[", "tsv": b"\t" in line, "csv": b"," in line}
        return next((kind for kind, is_such in marks.items() if is_such or (kind == "csv" and b";" in line)), "txt")
    return "txt"


def ending_of(path: Path) -> str:
    """Return the ending of a file name in lower case, without that of a packed file."""
    name = Path(path.name.lower())
    return (Path(name.stem).suffix or name.suffix) if name.suffix in PACKINGS else name.suffix
