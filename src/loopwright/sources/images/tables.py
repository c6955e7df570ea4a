"""The interface of image tables besides rows: the location of images, and the names of classes."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from loopwright.sources.files import Say
from loopwright.sources.images.names import Names, read_names
from loopwright.sources.images.reading import path_of
from loopwright.sources.tables import Block, Row, Table, value_at

ROWS_PER_BLOCK = 256
ROWS_TRIED = 5


class ImageTable(Table):
    """A table whose rows name images.

    Attributes:
        root: The folder that paths in its rows are relative to.
        names: The names of its classes by ascending number; empty if unknown.
        names_file: The file of these names, relative to the table's folder.
    """

    root: str
    names: Names
    names_file: str | None = None

    def category_name(self, value: Any, column: str) -> str | None:
        """Return the class name of an object, from its number or name in a row; None if it has none."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            text = str(value).strip() if isinstance(value, str) else ""
            return text or None
        return self.names.get(value) if self.names else str(value)

    def id_names(self, column: str) -> Names:
        """Return the class names of a column by number, if the data has them."""
        return self.names


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
        self.image_dir = image_dir
        self.names_file = names_file
        folder = "." if table.kind == "hub" else os.path.dirname(os.path.abspath(table.path))
        self.root = os.path.normpath(os.path.join(folder, image_dir))
        self.names = read_names(Path(folder, names_file)) if names_file is not None else {}

    def find_images(self, column: str) -> None:
        """Find the base folder of the paths in a column; called once the column is known."""
        if self.image_dir:
            return
        rows = (self[index] for index in range(min(len(self), ROWS_TRIED)))
        paths = [path for row in rows if isinstance(path := value_at(row, column), str)]
        self.image_dir = next(
            (place for place in (".", "images", "..", "../images") if self._are_in(place, paths)), "."
        )
        self.root = os.path.normpath(os.path.join(self.root, self.image_dir))

    def _are_in(self, place: str, paths: list[str]) -> bool:
        return any(os.path.isfile(path_of(os.path.join(self.root, place), path)) for path in paths)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Row:
        return self._table[index]

    def blocks(self, columns: Sequence[str], say: Say | None = None) -> Iterator[Block]:
        """Yield all rows in order, with the named columns only. A missing value is None."""
        return self._table.blocks(columns, say)

    def place(self, index: int) -> str:
        """Return the location of a row, for error messages."""
        return self._table.place(index)

    def settings(self) -> dict[str, Any]:
        """Return the table's settings, the location of its images, and the file of its names."""
        names = {"names_file": self.names_file} if self.names_file is not None else {}
        return self._table.settings() | {"image_dir": self.image_dir} | names

    def class_names(self, column: str) -> tuple[str, ...]:
        """Return the classes of a column in the order of their ids, if the table names them."""
        return self._table.class_names(column)

    def category_name(self, value: Any, column: str) -> str | None:
        """Return the class name of an object; Hub datasets know their own names."""
        names = self.id_names(column)
        if names and isinstance(value, int) and not isinstance(value, bool):
            return names.get(value)
        return super().category_name(value, column)

    def id_names(self, column: str) -> Names:
        """Return the names by number: from a file, the column, or a column `semantic_class_to_id`."""
        if not self.names:
            stated = next(
                (names for entry in ("category", "categories") if (names := self.class_names(f"{column}.{entry}"))), ()
            )
            self.names = dict(enumerate(stated))
        if not self.names and "semantic_class_to_id" in self.columns:
            given = self[0]["semantic_class_to_id"] or {}
            self.names = {number: name for number, name in sorted((int(value), key) for key, value in given.items())}
        return self.names


class ListedTable(ImageTable):
    """A table over lists in memory: one image per row, with its own columns."""

    has_fixed_columns = True
    files: list[str]  # the images, relative to `root`

    def __len__(self) -> int:
        return len(self.files)

    @abstractmethod
    def row(self, index: int) -> Row:
        """Return one row; called with a valid index."""

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a table of {len(self)} rows")
        return self.row(index)

    def blocks(self, columns: Sequence[str], say: Say | None = None) -> Iterator[Block]:
        """Yield all rows in order, with the named columns only."""
        for start in range(0, len(self), ROWS_PER_BLOCK):
            rows = [self.row(index) for index in range(start, min(start + ROWS_PER_BLOCK, len(self)))]
            yield Block(start, {name: [value_at(row, name) for row in rows] for name in columns})

    def place(self, index: int) -> str:
        """Return the image of a row."""
        return self.files[index]
