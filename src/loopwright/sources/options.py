"""Options for reading data and handling its flaws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loopwright.errors import InputError


@dataclass(frozen=True)
class DataOptions:
    """Options for reading data and handling its flaws, each with a command line option of the same name.

    Attributes:
        validation_ratio: Fraction of the rows held out for validation if no file is given; 0 holds out none.
        label_kind: class, multi or float, if the values are ambiguous.
        label_map: Labels to rename, once: {"positive": "pos"}.
        label_names: All labels in the order of their ids; by default the sorted labels of the training rows.
        label_separator: Between several labels in one text; given, rows have several labels.
        drop_labels: Labels whose rows are left out; of rows with several labels only the label.
        unknown_labels: "refuse" or "drop" rows whose label is unknown.
        missing_values: "refuse" or "drop" rows that lack a value.
        bad_rows: "refuse" or "drop" rows that cannot be read or used, such as those with a field too many.
        keep_duplicates: Whether validation rows that are also in training stay; otherwise they move to training.
        file_kind, encoding, sheet, delimiter, quoting, column_names, text_unit: As for `open_table`, for all files.
        decimal: "comma" or "point" before the decimals of labels that are numbers; detected by default.
        image_dir: The base folder of the paths in a file, if it is not the file's own folder, or images/ in it.
        id2label: A json file of class names by number, for masks and objects.
        ignore_index: The id in masks for no class.
        reduce_labels: Whether 0 in masks means no class and all other ids are one too high.
        mask_values: The values of the classes in masks, in the order of their ids: 0, 255=road, ff0000, or auto.
        bad_annotations: "refuse" or "drop" annotations that do not match their images or have an invalid format.
        bad_images: "refuse" or "drop" rows whose image is missing, truncated or invalid.
    """

    validation_ratio: float = 0.2
    label_kind: str | None = None
    label_map: Mapping[str, str] = field(default_factory=dict)
    label_names: Sequence[str] | None = None
    label_separator: str | None = None
    drop_labels: Sequence[str] = ()
    unknown_labels: str = "refuse"
    missing_values: str = "refuse"
    bad_rows: str = "refuse"
    keep_duplicates: bool = False
    file_kind: str | None = None
    encoding: str | None = None
    sheet: str | None = None
    decimal: str | None = None
    delimiter: str | None = None
    quoting: str | None = None
    column_names: Sequence[str] = ()
    text_unit: str = "line"
    image_dir: str | None = None
    id2label: str | None = None
    ignore_index: int = 255
    reduce_labels: bool = False
    mask_values: Sequence[str] = ()
    bad_annotations: str = "refuse"
    bad_images: str = "refuse"

    def __post_init__(self) -> None:
        if self.label_separator == "":
            raise InputError("args.value", "--label_separator is empty", fix="--label_separator ','")
        for name in ("unknown_labels", "missing_values", "bad_rows", "bad_images", "bad_annotations"):
            value, fix = getattr(self, name), f"--{name} refuse   or   --{name} drop"
            if value not in ("refuse", "drop"):
                raise InputError("args.value", f"--{name} {value!r} is unknown", fix=fix)


def table_settings(options: DataOptions) -> dict[str, Any]:
    """Return the arguments of `open_table` for all files."""
    names = ("encoding", "sheet", "delimiter", "quoting", "column_names", "text_unit")
    found = {name: getattr(options, name) for name in names}
    return found | {"kind": options.file_kind, "keeps_damaged": options.bad_rows == "drop"}
