"""Options for reading data and handling its flaws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loopwright.errors import InputError


@dataclass(frozen=True)
class DataOptions:
    """Options for reading data and handling its flaws, each with a command line option of the same name.

    Attributes:
        validation_ratio: Fraction of the rows held out for validation if no file is given; 0 holds out none.
        label_kind: class, multi or float, if the values are ambiguous.
        label_map: Labels to rename: {"positive": "pos"}.
        label_names: All labels in the order of their ids; by default the sorted labels of the training rows.
        label_separator: Between several labels in one text.
        unknown_labels: "refuse" or "drop" rows whose label is unknown.
        missing_values: "refuse" or "drop" rows that lack a value.
        keep_duplicates: Whether validation rows that are also in training stay; otherwise they move to training.
        file_kind, delimiter, quoting, text_unit: As for `open_table`, for all files.
        image_dir: The base folder of the paths in a file, if it is not the file's own folder, or images/ in it.
        id2label: A json file of class names by number, for masks and objects.
        ignore_index: The id in masks for no class.
        reduce_labels: Whether 0 in masks means no class and all other ids are one too high.
        bad_images: "refuse" or "drop" rows whose image is missing, truncated or invalid.
    """

    validation_ratio: float = 0.2
    label_kind: str | None = None
    label_map: Mapping[str, str] = field(default_factory=dict)
    label_names: Sequence[str] | None = None
    label_separator: str = "|"
    unknown_labels: str = "refuse"
    missing_values: str = "refuse"
    keep_duplicates: bool = False
    file_kind: str | None = None
    delimiter: str | None = None
    quoting: str | None = None
    text_unit: str = "line"
    image_dir: str | None = None
    id2label: str | None = None
    ignore_index: int = 255
    reduce_labels: bool = False
    bad_images: str = "refuse"

    def __post_init__(self) -> None:
        for name in ("unknown_labels", "missing_values", "bad_images"):
            value, fix = getattr(self, name), f"--{name} refuse   or   --{name} drop"
            if value not in ("refuse", "drop"):
                raise InputError("args.value", f"--{name} {value!r} is unknown", fix=fix)
