"""The interface of image tables besides rows: the location of images, and the names of classes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from loopwright.sources.files import Say
from loopwright.sources.images.image_file import path_of
from loopwright.sources.images.names import Names, read_names
from loopwright.sources.tables import Block, Row, Table, value_at

ROWS_TRIED = 5
_SETTINGS = ("image_dir", "annotation_dir", "names_file", "bad_annotations")


class ImageTable(Table):
    """A table whose rows name images."""

    root: str  # the folder that paths in its rows are relative to
    names: Names  # of its classes, by ascending number; empty if unknown
    # As in `open_table`, as far as its kind has them.
    image_dir: str | None = None
    annotation_dir: str | None = None
    names_file: str | None = None
    bad_annotations: str | None = None
    num_left_out = 0  # entries of its file; the notes say which

    def category_name(self, value: Any, column: str) -> str | None:
        """Return the class name of an object, from its number or name in a row; None if it has none."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            return (value.strip() or None) if isinstance(value, str) else None
        names = self.id_names(column)
        return names.get(value) if names else str(value)

    def id_names(self, column: str) -> Names:
        """Return the class names of a column by number, if the data has them."""
        return self.names

    def settings(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in _SETTINGS}
        return {"kind": self.kind} | {name: value for name, value in found.items() if value is not None}


class TableOfImages(ImageTable):
    """A csv, tsv, json, jsonl, parquet or Hub table with a column of images.

    `image_dir` is the base folder of its paths, relative to the file; "" before `find_images`.
    """

    def __init__(self, table: Table, image_dir: str, names_file: str | None) -> None:
        self._table = table
        self.path = table.path
        self.kind = table.kind
        self.columns = table.columns
        self.sha256 = table.sha256
        self.num_bytes = table.num_bytes
        self.notes = table.notes
        self.image_dir = image_dir
        self.names_file = names_file
        folder = "." if table.kind == "hub" else os.path.dirname(os.path.abspath(table.path))
        self.root = os.path.normpath(os.path.join(folder, image_dir))
        self.names = read_names(Path(folder, names_file)) if names_file is not None else {}

    def find_images(self, column: str) -> None:
        """Find the base folder of the paths in a column; called once the column is known."""
        for name in [name for name in self.columns if name.lower() in ("split", "subset")]:
            self.notes += (f"the column {name!r} of {self.name} is not used: a file for each split is read as such",)
        if self.image_dir:
            return
        rows = (self[index] for index in range(min(len(self), ROWS_TRIED)))
        paths = [path for row in rows if isinstance(path := value_at(row, column), str)]
        self.image_dir = find_folder(self.root, self.name, paths)
        self.root = os.path.normpath(os.path.join(self.root, self.image_dir))

    def __len__(self) -> int:
        return len(self._table)

    def row(self, index: int) -> Row:
        return self._table.row(index)

    def blocks(self, columns: Sequence[str], say: Say | None = None) -> Iterator[Block]:
        return self._table.blocks(columns, say)

    def place(self, index: int) -> str:
        return self._table.place(index)

    def settings(self) -> dict[str, Any]:
        return self._table.settings() | super().settings()

    def class_names(self, column: str) -> tuple[str, ...]:
        return self._table.class_names(column)

    def id_names(self, column: str) -> Names:
        if not self.names:
            found = (self.class_names(f"{column}.{entry}") for entry in ("category", "categories"))
            self.names = dict(enumerate(next(filter(None, found), ())))
        if not self.names and "semantic_class_to_id" in self.columns:
            given = self[0]["semantic_class_to_id"] or {}
            self.names = dict(sorted((int(value), key) for key, value in given.items()))
        return self.names


class ListedTable(ImageTable):
    """A table over a list of images, with columns that its kind fixes. `files` are relative to `root`."""

    has_fixed_columns = True
    rows_per_block = 256
    files: list[str]

    def __init__(self, path: Path, kind: str, columns: tuple[str, ...]) -> None:
        self.path = str(path)
        self.kind = kind
        self.columns = columns
        self.root = os.path.abspath(path)
        self.names = {}

    def __len__(self) -> int:
        return len(self.files)

    def blocks(self, columns: Sequence[str], say: Say | None = None) -> Iterator[Block]:
        return super().blocks(columns)

    def place(self, index: int) -> str:
        return self.files[index]


def find_folder(root: str, file: str, images: Sequence[str]) -> str:
    """Return the first folder around a file, relative to its own, that holds one of the images; "." if none does."""
    stem = file.partition(".")[0]
    split = stem.rpartition("_")[2]
    near = [".", "images", split, stem, f"{stem}_images", f"images/{split}", f"{split}/images"]
    near += [os.path.normpath(f"../{folder}") for folder in near]
    for find in (os.path.join, path_of):
        for folder in near:
            if any(os.path.isfile(find(os.path.join(root, folder), image)) for image in images):
                return folder
    return "."
