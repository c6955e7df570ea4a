"""The result of preflight as plain data, the run folder's data.json; and the rows of a split by role."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from loopwright.errors import InputError
from loopwright.run_folder.files import DamagedFileError, read_json, sealed
from loopwright.sources.arrow import open_hub
from loopwright.sources.chats.roles import CHAT_KINDS, as_chat
from loopwright.sources.column_roles import Columns, Guess, column_names
from loopwright.sources.files import Say, sha256_of
from loopwright.sources.formats import open_table
from loopwright.sources.images.image_file import as_source, upright_size
from loopwright.sources.images.scene_scan import SceneOptions, hash_files, joined, read_scene
from loopwright.sources.images.tables import ImageTable
from loopwright.sources.labels import Labels, cell_of
from loopwright.sources.schema import GROUP, PICTURE_KINDS
from loopwright.sources.splits import Rows, group_number
from loopwright.sources.tables import DamagedRow, Row, Table, outer_column, value_at
from loopwright.sources.values import as_role

FORMAT = 1
_MOST_ROWS_LISTED = 50
_MOST_BYTES = 1 << 30  # of data.json, which lists the rows of each split
_FINDINGS = ("counts", "lengths", "label_range", "duplicates", "dropped", "guesses", "guessed", "warnings")


@dataclass(frozen=True)
class DataFile:
    """One file (or split of a Hub dataset) of a run, with its state at the start of the run."""

    path: str
    kind: str
    sha256: str
    num_bytes: int
    num_rows: int
    settings: Mapping[str, Any]  # settings for `open_table`

    def open(self, say: Say | None = None) -> Table:
        return open_table(self.path, say=say, **self.settings)


@dataclass(frozen=True)
class Part:
    """Some rows of one file, by ascending row number. `file` is an index in `DataPlan.files`."""

    file: int
    rows: Rows

    def packed(self, files: Sequence[DataFile]) -> dict[str, Any]:
        """Return the rows in a compact form for JSON: all, a short list, or a bitmap."""
        num_rows = files[self.file].num_rows
        if len(self.rows) == num_rows:
            return {"file": self.file, "rows": "all"}
        if len(self.rows) <= _MOST_ROWS_LISTED:
            return {"file": self.file, "rows": self.rows.tolist()}
        bits = np.zeros(num_rows, np.bool_)
        bits[self.rows] = True
        packed = zlib.compress(np.packbits(bits).tobytes(), 9)
        return {"file": self.file, "bitmap": base64.b64encode(packed).decode("ascii")}

    @classmethod
    def unpacked(cls, content: Mapping[str, Any], files: Sequence[DataFile]) -> Part:
        num_rows = files[content["file"]].num_rows
        if "bitmap" in content:
            bits = np.frombuffer(zlib.decompress(base64.b64decode(content["bitmap"])), np.uint8)
            return cls(content["file"], np.flatnonzero(np.unpackbits(bits, count=num_rows)).astype(np.int64))
        rows = np.arange(num_rows) if content["rows"] == "all" else np.array(content["rows"], np.int64)
        return cls(content["file"], rows)


@dataclass(frozen=True)
class Split:
    """The rows of one split: the concatenation of its parts."""

    name: str
    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return sum(len(part.rows) for part in self.parts)


@dataclass(frozen=True)
class DataPlan:
    """Everything a run needs to know about its data.

    Attributes:
        splits: By name: train, validation, test, as far as they exist.
        counts: The frequency of each label, by split; empty for numbers.
        lengths: By role: {"characters": {"p50", "p95", "max"}, "words": {...}} over all files.
        label_range: Smallest and largest label of a task that predicts a number.
        duplicates: Rows of a split that are also in training, by split, before deduplication.
        dropped: Dropped rows, by reason.
        warnings: Suspicious findings, in sentences to print.
        images: For image tasks: sizes; bad images; objects, empty scenes, clipped or dropped boxes; "class_ids": the
            number of each label in the file; "ignore_index" and "reduce_labels" of masks.
        chats: For conversations: rows by format, turns by role, conversations with tools.
        tables: The open files, by their index in `files`; not in data.json.
    """

    task: str
    files: tuple[DataFile, ...]
    splits: Mapping[str, Split]
    columns: Columns
    kinds: Mapping[str, str]
    labels: Labels | None = None
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    lengths: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)
    label_range: tuple[float, float] | None = None
    duplicates: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    guessed: tuple[Guess, ...] = ()
    warnings: tuple[str, ...] = ()
    images: Mapping[str, Any] = field(default_factory=dict)
    chats: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    tables: dict[int, Table] = field(default_factory=dict, repr=False, compare=False)

    @property
    def label_names(self) -> Sequence[str]:
        assert self.labels is not None, "the schema has labels"
        return self.labels.names

    @property
    def guesses(self) -> tuple[str, ...]:
        return tuple(map(str, self.guessed))

    def rows(self, split: str, say: Say | None = None) -> SplitRows:
        """Open the files of a split and return its rows, for a DataLoader: they can be pickled and have a length."""
        parts = self.splits[split].parts
        for part in parts:
            if part.file not in self.tables:
                self.tables[part.file] = self.files[part.file].open(say)
        return SplitRows(self, [self.tables[part.file] for part in parts], [part.rows for part in parts])

    def num_trained_on(self, other: DataPlan) -> int:
        """Return the number of another plan's validation rows that this one trains on: same rows of the same files."""
        trained = self.splits["train"].parts if "train" in self.splits else ()
        return sum(
            len(np.intersect1d(np.asarray(part.rows), np.asarray(mine.rows)))
            for part in other.splits["validation"].parts
            for mine in trained
            if self.files[mine.file].sha256 == other.files[part.file].sha256
        )

    def to_json(self) -> str:
        splits = {}
        for name, split in self.splits.items():
            splits[name] = {"num_rows": len(split), "parts": [part.packed(self.files) for part in split.parts]}
        content = {
            "format": FORMAT,
            "task": self.task,
            "files": [vars(file) for file in self.files],
            "columns": self.columns,
            "kinds": self.kinds,
            "labels": None if self.labels is None else asdict(self.labels),
            "splits": splits,
            **{name: getattr(self, name) for name in _FINDINGS},
        }
        content |= {name: getattr(self, name) for name in ("images", "chats") if getattr(self, name)}
        return json.dumps(sealed(content), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: Path) -> DataPlan:
        """Return the plan in a run's data.json; raise an InputError, resume.data, if there is none."""
        try:
            content = read_json(path, most_bytes=_MOST_BYTES)
        except (OSError, DamagedFileError) as error:
            raise _no_plan(error) from error
        return cls.from_json(content)

    @classmethod
    def from_json(cls, text: Any) -> DataPlan:
        """Return the plan of a text, or of the content of data.json; raise an InputError if it is invalid."""
        try:
            content = json.loads(text) if isinstance(text, str) else text
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r}, expected {FORMAT}")
            files = tuple(DataFile(**file) for file in content["files"])
            splits = {}
            for name, split in content["splits"].items():
                splits[name] = Split(name, tuple(Part.unpacked(part, files) for part in split["parts"]))
            labels = content["labels"]
            if labels is not None:
                labels = Labels(**labels | {name: tuple(labels.get(name, ())) for name in ("names", "dropped")})
            return cls(
                files=files,
                splits=splits,
                columns={role: _column(column) for role, column in content["columns"].items()},
                labels=labels,
                label_range=None if content["label_range"] is None else tuple(content["label_range"]),
                guessed=tuple(Guess(name, _column(value), why) for name, value, why in content.get("guessed", ())),
                warnings=tuple(content["warnings"]),
                images=content.get("images", {}),
                chats=content.get("chats", {}),
                **{name: content[name] for name in ("task", "kinds", "counts", "lengths", "duplicates", "dropped")},
            )
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, zlib.error) as error:
            raise _no_plan(error) from error


def _column(value: Any) -> str | tuple[str, ...]:
    return value if isinstance(value, str) else tuple(value)


def _no_plan(error: Exception) -> InputError:
    what, saw = "data.json cannot be read as a data plan", [f"{type(error).__name__}: {error}"]
    return InputError("resume.data", what, saw=saw, fix="start the run again with the command in its command.txt")


class SplitRows:
    """The rows of a split: `rows[i]` is a dict by role, in the task's format.

    Texts are str, tokens and texts lists of str, answers {"text": [...], "answer_start": [...]}, conversations
    `Chat`s; labels are ids, lists of ids, or numbers. A role that a file lacks (labels of a test file) is left out.

    Images and masks are absolute paths, or bytes. Objects are {"boxes": [[x0, y0, x1, y1], ...] in pixels of the
    upright image, "classes": [id, ...], "segments": [None, polygons or run lengths, ...], "crowd": [False, ...]}.
    """

    on_read: Callable[[int], None] | None = None  # called with the number of each row that is read

    def __init__(self, plan: DataPlan, tables: list[Table], rows: list[Rows]) -> None:
        self._columns = plan.columns
        self._kinds = plan.kinds
        self._labels = plan.labels
        self._scene_options = SceneOptions(*(plan.images[name] for name in SceneOptions._fields if name in plan.images))
        self._tables = tables
        self._rows = rows
        self._ends = np.cumsum([len(part) for part in rows])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a split of {len(self)} rows")
        if self.on_read is not None:
            self.on_read(index)
        table, row = self._locate(index)
        return self.by_role(table, table[row])

    def by_role(self, table: Table, values: Row, where: str = "") -> Row:
        """Return a row of a table in the task's format; raise a ValueError if that cannot be, about the row `where`."""
        if isinstance(values, DamagedRow):
            raise values.error
        found: Row = {}
        for role, column in self._columns.items():
            names = column_names(column)
            if all(outer_column(table.columns, name) for name in names):
                value = cell_of(values, names, self._kinds[role])
                is_chat = self._kinds[role] in CHAT_KINDS
                kind, name = self._kinds[role], names[0]
                found[role] = as_chat(kind, value, where) if is_chat else self._form(kind, value, found, table, name)
        return found

    def place(self, index: int) -> str:
        table, row = self._locate(index)
        return f"{table.place(row)} of {table.name}"

    def group(self, index: int) -> int | None:
        """Return the number of a row's group, the same in every file and run; None without a group column."""
        if GROUP.name not in self._columns:
            return None
        table, row = self._locate(index)
        value = value_at(table[row], str(self._columns[GROUP.name]))  # the file of a split may lack it
        return None if value is None else group_number(as_role(GROUP.kind, value))

    def _locate(self, index: int) -> tuple[Table, int]:
        part = int(np.searchsorted(self._ends, index, side="right"))
        start = int(self._ends[part - 1]) if part else 0
        return self._tables[part], int(self._rows[part][index - start])

    def _form(self, kind: str, value: Any, found: Row, table: Table, column: str) -> Any:
        if kind in ("text", "texts", "tokens", "answers"):
            return as_role(kind, value, found.get("context", ""))
        if kind not in PICTURE_KINDS:
            assert self._labels is not None, "preflight makes labels for a role that has them"
            return self._labels.encode(value)
        assert isinstance(table, ImageTable), "preflight opened it as such"
        if kind in ("image", "mask"):
            return as_source(value, table.root)
        assert self._labels is not None, "preflight makes labels for a role that has them"
        objects = read_scene(value, table.root, upright_size(found["image"]), True, self._scene_options)
        ids = [self._labels.find(table.category_name(category, column)) for category in objects.categories]
        known = [place for place, number in enumerate(ids) if number is not None]  # unknown ones were dropped
        return {
            "boxes": [objects.boxes[place] for place in known],
            "classes": [ids[place] for place in known],
            "segments": [objects.segments[place] for place in known],
            "crowd": [objects.crowd[place] for place in known],
        }


def check_unchanged(plan: DataPlan, say: Say | None = None) -> None:
    """Refuse a changed file of the plan (InputError, resume.data); for an image task this reads all images."""
    for file in plan.files:
        name = Path(file.path).name
        if file.kind != "hub" and not Path(file.path).exists():
            what, saw = f"{name} is gone since the run started", [f"it was {file.path}, sha256 {file.sha256[:12]}..."]
            raise InputError("resume.data", what, saw=saw, fix=f"put {file.path} back")
        now = _hash_now(plan, file, say)
        if now != file.sha256:
            what = f"{name} changed since the run started (sha256 {file.sha256[:12]}... -> {now[:12]}...)"
            saw = [f"then: {file.sha256}", f"now:  {now}", f"file: {file.path}"]
            raise InputError("resume.data", what, saw=saw, fix=f"--allow_changed_data   or   put {file.path} back")


def _hash_now(plan: DataPlan, file: DataFile, say: Say | None) -> str:
    if plan.images:
        table = file.open(say)
        assert isinstance(table, ImageTable), "preflight opened it as such"
        columns = {
            kind: str(plan.columns[role])
            for role, kind in plan.kinds.items()
            if kind in PICTURE_KINDS and plan.columns[role] in table.columns
            if kind != "objects" or file.kind not in ("coco", "yolo")
        }
        return joined(table.sha256, hash_files(table, columns, say))
    if file.kind == "hub":
        return open_hub(file.path, file.settings["split"])[file.settings["split"]].sha256
    return sha256_of(Path(file.path), say)
