"""Data files and their checks before training: readers, schemas, preflight. No torch, no transformers.

The interface for the layers above:

* `open_table(path)` returns a `Table`: `columns`, `len`, `table[i]` as a dict, iteration, `sha256`. Rows are read from
  the file on access. csv, tsv, json, jsonl, txt, conll, parquet; gz of these.
* `SCHEMAS["text-classification"]` has the roles of a built-in task; a `Schema` of `Role`s describes any other rows.
* `preflight(schema, data=..., columns=..., options=DataOptions(...))` checks everything and returns a `DataPlan`.
* `plan.rows("train")[i]` is a dict by role, ready for a DataLoader: {"text": ..., "label": 1}.
* `plan.to_json()` is data.json; `DataPlan.from_json(text)` reads it; `check_unchanged(plan)` refuses changed files.
* `schema.for_prediction()` with `preflight(..., test_file=...)` reads new rows without labels; `label_names` and
  `label_map` of `DataOptions` carry over the labels of a trained model.
* For a task with images `data` and the files may be folders: a folder per class, images and masks, COCO, YOLO; or
  files with a column of images. Rows hold paths or bytes, never decoded images.
* Every problem is an `InputError` with one of `CODES`.

    plan = preflight(SCHEMAS["text-classification"], data="reviews.csv")
    rows = plan.rows("train")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from loopwright.errors import InputError
from loopwright.sources.codes import CODES
from loopwright.sources.formats import open_table
from loopwright.sources.labels import Labels
from loopwright.sources.options import DataOptions
from loopwright.sources.plan import DataFile, DataPlan, Part, Split, SplitRows, check_unchanged
from loopwright.sources.preflight import preflight
from loopwright.sources.schema import Role, Schema

if TYPE_CHECKING:
    SCHEMAS: dict[str, Schema]

__all__ = [
    "CODES",
    "SCHEMAS",
    "DataFile",
    "DataOptions",
    "DataPlan",
    "InputError",
    "Labels",
    "Part",
    "Role",
    "Schema",
    "Split",
    "SplitRows",
    "check_unchanged",
    "open_table",
    "preflight",
]


def __getattr__(name: str) -> Any:
    """Return `SCHEMAS`, the schemas of the built-in tasks; each task declares its own."""
    if name == "SCHEMAS":
        return import_module("loopwright.tasks.registry").schemas()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
