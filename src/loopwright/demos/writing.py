"""Demos by name, and as files, so that a demo is an ordinary run on files."""

from __future__ import annotations

import csv
import difflib
import io
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loopwright.demos import stdlib_docs
from loopwright.demos.dates import date_rows
from loopwright.demos.demo_data import DemoData, Row
from loopwright.demos.function_rows import choice_rows, pair_rows, question_rows
from loopwright.demos.placing import NOTES, check_folder, digest_of, place_files
from loopwright.demos.stdlib_docs import StdlibDocs
from loopwright.demos.tag_rows import tag_rows
from loopwright.demos.text_rows import area_rows, language_rows, summary_rows
from loopwright.errors import ConfigError, DataError

_TRANSLATION = "translation"
_FROM_DOCS: dict[str, Callable[[StdlibDocs], tuple[list[Row], list[Row]]]] = {
    "text-classification": area_rows,
    "token-classification": tag_rows,
    "question-answering": question_rows,
    "causal-lm": language_rows,
    "masked-lm": language_rows,
    "multiple-choice": choice_rows,
    "summarization": summary_rows,
    "sentence-embedding": pair_rows,
}
TASKS = (*_FROM_DOCS, _TRANSLATION)
# These have images, which `write_demo` writes; they have no rows to load.
IMAGE_TASKS = (
    *("image-classification", "semantic-segmentation", "object-detection", "instance-segmentation"),
    "masked-image-modeling",
)
VARIANTS = {"image-classification": ("fashion",), "masked-image-modeling": ("fashion",)}

# Their texts have one line. The others have many, or columns of lists or objects, so they become JSON lines.
_CSV_TASKS = {"text-classification", "multiple-choice", "sentence-embedding", "translation"}


def load_demo(task: str) -> DemoData:
    """Return the demo data of a text task as rows.

    The same Python gives the same rows on every machine; other versions differ slightly.

    Raises:
        DataError: there is no such demo, it has images, or this Python has no sources of its standard library.
    """
    if task == _TRANSLATION:
        train, validation = date_rows()
        return DemoData(task, train, validation, "generated dates from 1900 to 2099", "none needed: generated")
    if task not in _FROM_DOCS:
        if task in IMAGE_TASKS:
            raise DataError(f"the demo of {task} is made of images, not of rows: write_demo writes them as files")
        near = difflib.get_close_matches(task, (*TASKS, *IMAGE_TASKS), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join((*TASKS, *IMAGE_TASKS))}."
        raise DataError(f"no demo data for the task {task!r}: {hint}")
    found = stdlib_docs.load()
    train, validation = _FROM_DOCS[task](found)
    source = f"docstrings and help() pages of the standard library of Python {found.python}"
    return DemoData(task, train, validation, source, stdlib_docs.LICENCE)


def write_demo(
    task: str, folder: str | Path, *, variant: str | None = None, source: str | Path | None = None
) -> dict[str, Path]:
    """Write the demo data of a task as `train` and `validation` files that the command line reads.

    It also writes `demo.json`: the source, the licence, the number of rows, and the fingerprint. Idempotent.

    Args:
        task: one of `TASKS` or `IMAGE_TASKS`.
        folder: created if missing.
        variant: other data for the same task: "fashion" (Fashion-MNIST) for image-classification and
            masked-image-modeling; None for the usual data. It never depends on installed packages, so a demo is the
            same everywhere.
        source: for "fashion", the folder of its four gz files; None for Debian's location.

    Returns:
        The paths of "train", "validation" and "notes". For images the first two are folders (image-classification,
        masked-image-modeling, semantic-segmentation) or COCO files next to `images`.

    Raises:
        ConfigError: the task has no such variant.
        DataError: as `load_demo`; or the folder has other files of these names, which stay unchanged.
        InputError: Pillow is needed and not installed.
        OSError: the files cannot be written.
    """
    variants = (*VARIANTS.get(task, ()), None)
    if variant not in variants:
        raise ConfigError(f"the demo of {task} has no variant {variant!r}: expected {' or '.join(map(repr, variants))}")
    if source is not None and variant is None:
        raise ConfigError(
            f"source={str(source)!r} is for a variant that is read from files: give variant='fashion' too"
        )
    target = Path(folder)
    check_folder(target, task)
    files, splits, notes = _image_demo(task, variant, source) if task in IMAGE_TASKS else _text_demo(task)
    place_files(target, files, {"task": task, **notes})
    return {**{split: target / name for split, name in splits.items()}, "notes": target / NOTES}


def _text_demo(task: str) -> tuple[dict[str, bytes], dict[str, str], dict[str, Any]]:
    demo = load_demo(task)
    kind = "csv" if task in _CSV_TASKS else "jsonl"
    splits = {split: f"{split}.{kind}" for split in ("train", "validation")}
    files = {splits["train"]: _encode(demo.train, kind), splits["validation"]: _encode(demo.validation, kind)}
    notes = {
        "source": demo.source,
        "licence": demo.licence,
        "python": platform.python_version(),
        "columns": demo.columns,
        "rows": {"train": len(demo.train), "validation": len(demo.validation)},
        "fingerprint": demo.fingerprint,
    }
    return files, splits, notes


def _image_demo(
    task: str, variant: str | None, source: str | Path | None
) -> tuple[dict[str, bytes], dict[str, str], dict[str, Any]]:
    # Imported lazily: text demos need neither numpy nor Pillow.
    from loopwright.demos.images.image_files import make_image_files, package_versions

    made = make_image_files(task, variant or "digits", source)
    notes = {
        "variant": variant,
        "source": made.source,
        "licence": made.licence,
        "python": platform.python_version(),
        "packages": package_versions(),
        "classes": list(made.names),
        "rows": made.num_rows,
        "fingerprint": digest_of(made.files),
    }
    return made.files, made.splits, notes


def _encode(rows: list[Row], kind: str) -> bytes:
    if kind == "csv":
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
