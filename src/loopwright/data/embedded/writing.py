"""Demos by name, and as files, so that a demo is an ordinary run on files."""

from __future__ import annotations

import csv
import difflib
import io
import json
import platform
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from loopwright.data.embedded import stdlib_docs
from loopwright.data.embedded.dates import date_rows
from loopwright.data.embedded.demo_data import DemoData, Row
from loopwright.data.embedded.function_rows import choice_rows, pair_rows, question_rows
from loopwright.data.embedded.stdlib_docs import StdlibDocs
from loopwright.data.embedded.tag_rows import tag_rows
from loopwright.data.embedded.text_rows import area_rows, language_rows, summary_rows
from loopwright.errors import DataError
from loopwright.run_folder import DamagedFileError, read_json, write_atomically, write_json

NOTES = "demo.json"

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

# Their texts are of one line. The others are of many, or have columns of lists or objects, so they become JSON lines.
_CSV_TASKS = {"text-classification", "multiple-choice", "sentence-embedding", "translation"}


def load_demo(task: str) -> DemoData:
    """Return the demo data of a task; called by `write_demo`, and by who wants rows instead of files.

    The same Python gives the same rows on every machine; another version gives slightly others.

    Args:
        task: one of `TASKS`.

    Raises:
        DataError: there is no such demo, or this Python came without the sources of its standard library.
    """
    if task == _TRANSLATION:
        train, validation = date_rows()
        return DemoData(task, train, validation, "generated dates from 1900 to 2099", "none needed: generated")
    if task not in _FROM_DOCS:
        near = difflib.get_close_matches(task, TASKS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(TASKS)}."
        raise DataError(f"no demo data for the task {task!r}: {hint}")
    found = stdlib_docs.load()
    train, validation = _FROM_DOCS[task](found)
    source = f"docstrings and help() pages of the standard library of Python {found.python}"
    return DemoData(task, train, validation, source, stdlib_docs.LICENCE)


def write_demo(task: str, folder: str | Path) -> dict[str, Path]:
    """Write the demo data of a task as `train` and `validation` files that the command line reads.

    Beside them comes `demo.json`: the source, the licence, the number of rows, and the fingerprint. Called for a demo
    on the command line; calling it again writes the same files.

    Args:
        task: one of `TASKS`.
        folder: where to; it is made if it is missing.

    Returns:
        The paths of "train", "validation" and "notes".

    Raises:
        DataError: as `load_demo`; or the folder holds other files of these names, which stay as they are.
        OSError: the files cannot be written.
    """
    target = Path(folder)
    kind = "csv" if task in _CSV_TASKS else "jsonl"
    demo = load_demo(task)
    _check_folder(target, task)
    target.mkdir(parents=True, exist_ok=True)
    paths = {split: target / f"{split}.{kind}" for split in ("train", "validation")}
    contents = {"train": _encode(demo.train, kind), "validation": _encode(demo.validation, kind)}
    paths["notes"] = target / NOTES
    notes = {
        "task": task,
        "source": demo.source,
        "licence": demo.licence,
        "python": platform.python_version(),
        "columns": demo.columns,
        "rows": {"train": len(demo.train), "validation": len(demo.validation)},
        "fingerprint": demo.fingerprint,
        "sha256": {paths[split].name: sha256(content).hexdigest() for split, content in contents.items()},
    }
    # The notes come first: a folder that has them may be written to again, also after a crash in between.
    write_json(paths["notes"], notes)
    for split, content in contents.items():
        write_atomically(paths[split], content)
    return paths


def _check_folder(folder: Path, task: str) -> None:
    """Refuse a folder with data files that are not those of an earlier call for the same task, unchanged since."""
    try:
        notes = read_json(folder / NOTES)
    except DamagedFileError:
        notes = None
    digests = notes.get("sha256") if isinstance(notes, dict) and notes.get("task") == task else None
    written = digests if isinstance(digests, dict) else {}
    foreign = [
        path.name
        for path in sorted(folder.glob("*"))
        if path.stem in {"train", "validation", "test"}
        and not (path.is_file() and sha256(path.read_bytes()).hexdigest() == written.get(path.name))
    ]
    if foreign:
        raise DataError(
            f"{folder} already holds {', '.join(foreign)}, which is not what the demo of {task} writes there. Give a "
            "folder that is new or empty."
        )


def _encode(rows: list[Row], kind: str) -> bytes:
    if kind == "csv":
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
