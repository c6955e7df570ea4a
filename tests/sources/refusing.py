"""What the tests of bad input share: writing files, and expecting an error with a code."""

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loopwright.errors import InputError
from loopwright.sources import DataOptions, DataPlan, Schema, open_table, preflight


class Refusal:
    """The error that was raised, once the block has ended."""

    error: InputError

    def __contains__(self, text: str) -> bool:
        return text in str(self.error)

    @property
    def fix(self) -> str:
        return self.error.fix


def assert_refused(code: str, what: Any = None, *args: Any, seen: Any = (), fix: Any = (), **options: Any) -> Any:
    """Expect an InputError with this code and return it, or return a context manager that expects it.

    `what` is a schema, for a preflight with the options; the path of a file to open; or a function to call. `seen` and
    `fix` are one or several texts that the error and its fix contain.
    """
    if what is None:
        return _refused(code)
    with _refused(code) as refusal:
        if isinstance(what, Schema):
            plan_of(what, *args, **options)
        elif isinstance(what, Path):
            open_table(what, *args, **options)
        else:
            what(*args, **options)
    for text in [seen] if isinstance(seen, str) else seen:
        assert text in refusal, str(refusal.error)
    for text in [fix] if isinstance(fix, str) else fix:
        assert text in refusal.fix, str(refusal.error)
    return refusal


refused = assert_refused  # reads better inside another assertion


@contextmanager
def _refused(code: str) -> Iterator[Refusal]:
    """Expect an InputError with this code, in the form in which it is printed."""
    refusal = Refusal()
    with pytest.raises(InputError) as caught:
        yield refusal
    refusal.error = caught.value
    lines = str(caught.value).split("\n")
    assert caught.value.code == code, str(caught.value)
    assert lines[0] == f"error[{code}]: {caught.value.what}"
    assert lines[-1] == f"  fix: {caught.value.fix}" and caught.value.fix
    assert lines[1:-1] == [f"  {line}" for line in caught.value.saw]


def plan_of(schema: Schema, data: Path | str | None = None, **given: Any) -> DataPlan:
    """Return the plan of a preflight; `given` are its arguments and fields of `DataOptions`."""
    names = ("train_file", "validation_file", "test_file", "columns", "options", "say")
    arguments = {name: given.pop(name) for name in names if name in given}
    return preflight(schema, data=data, **{"options": DataOptions(**given)} | arguments)


def lengths(plan: DataPlan) -> dict[str, int]:
    return {name: len(split) for name, split in plan.splits.items()}


def all_rows(plan: DataPlan, *splits: str) -> list[dict[str, Any]]:
    return [rows[place] for rows in map(plan.rows, splits or plan.splits) for place in range(len(rows))]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def write_csv(path: Path, rows: list[Any], header: Sequence[str] = ("text", "label"), delimiter: str = ",") -> Path:
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return path


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the kind of file that the ending names; what is not a text is a cell of JSON in a csv."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            cells = ({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows)
            writer.writerows(cells)
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path
