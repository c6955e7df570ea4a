"""How data is read and what is done about its flaws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loopwright.errors import InputError


@dataclass(frozen=True)
class DataOptions:
    """How data is read and what is done about its flaws. Each is an option of the command line under the same name.

    Attributes:
        validation_ratio: Share of the rows held back where no validation file is given; 0 holds none back.
        label_kind: class, multi or float, where the values of the label column do not say it.
        label_map: Labels to read as others: {"positive": "pos"}.
        label_names: All labels in the order of their ids; those of the training rows, sorted, where it is not given.
        label_separator: Between several labels in one text.
        unknown_labels: "refuse" or "drop" rows whose label is unknown.
        missing_values: "refuse" or "drop" rows that lack a value.
        keep_duplicates: Whether validation rows that are also in training stay; otherwise they move to training.
        file_kind, delimiter, quoting, text_unit: As for `open_table`, for all files.
        image_dir: The folder from which the paths in a file go, where it is not that of the file, or images/ in it.
        id2label: A json file with the names of classes by number, for masks and objects that have numbers.
        ignore_index: The id in masks that stands for no class.
        reduce_labels: Whether 0 in masks stands for no class and all other ids are one too high.
        bad_images: "refuse" or "drop" rows whose image is missing, cut off or none.
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
            if getattr(self, name) not in ("refuse", "drop"):
                raise InputError(
                    "args.value",
                    f"--{name} {getattr(self, name)!r} is unknown",
                    fix=f"--{name} refuse   or   --{name} drop",
                )
