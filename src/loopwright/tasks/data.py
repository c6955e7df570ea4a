"""The data of a run, opened once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from loopwright.errors import InputError
from loopwright.sources import DataPlan, Schema, SplitRows


class Screen(Protocol):
    """Shows the progress of long work, like the console of a run."""

    def waiting(self, what: str) -> Any:
        """Return a context manager that shows the progress."""


class RunData:
    """A preflight plan and its rows; each split is opened on first use."""

    def __init__(self, plan: DataPlan) -> None:
        self.plan = plan
        self._rows: dict[str, SplitRows] = {}
        self._limits: dict[str, int | None] = {}
        self._tell: Callable[[str, int], None] | None = None  # called with each row that is read

    def has(self, split: str) -> bool:
        """Whether the split exists and has rows."""
        return split in self.plan.splits and len(self.plan.splits[split]) > 0

    def with_test(self) -> RunData:
        """Return the same data with the rows of the test split as those of the validation split."""
        plan = self.plan
        counts = {**plan.counts, "validation": plan.counts.get("test", {})}
        return RunData(replace(plan, splits={**plan.splits, "validation": plan.splits["test"]}, counts=counts))

    def missing_roles(self, split: str, schema: Schema) -> list[str]:
        """Return the roles, mostly labels, that the training rows have and scoring needs, but the split lacks."""
        needed = [role.name for role in schema.roles if role.is_required or role.is_input or role.is_label]
        here, there = self.rows(split)[0], self.rows("train")[0]
        return [name for name in needed if name in there and name not in here]

    def rows(self, split: str) -> SplitRows:
        """Return the rows of "train", "validation" or "test", each a dict by role; labels are encoded."""
        if split not in self._rows:
            self._rows[split] = self.plan.rows(split)
            self._follow()
        return self._rows[split]

    def first_rows(self, split: str, limit: int | None) -> SplitRows | KeptRows:
        """Return the rows of a split, at most so many; None is unlimited."""
        rows = self.rows(split)
        return rows if limit is None or limit >= len(rows) else KeptRows(rows, range(limit))

    @contextmanager
    def watched(self, screen: Screen, what: str) -> Iterator[None]:
        """Show the progress of passes over the rows while the block runs, if they take long."""
        num_read: dict[str, int] = {}
        with screen.waiting(what) as waiting:

            def tell(split: str, index: int) -> None:
                num_read[split] = max(num_read.get(split, 0), index + 1)
                waiting.to(index + 1, len(self._rows[split]))

            self._tell = tell
            try:
                self._follow()
                yield
            finally:
                self._tell = None
                self._follow()
                waiting.to(sum(num_read.values()))

    def _follow(self) -> None:
        for split, rows in self._rows.items():
            rows.on_read = None if self._tell is None else functools.partial(self._tell, split)

    @contextmanager
    def limited(self, **limits: int | None) -> Iterator[None]:
        """Limit the rows of each split that `batches` yields while the block runs; None is unlimited."""
        self._limits = limits
        try:
            yield
        finally:
            self._limits = {}

    def num_used(self, split: str) -> int:
        """Return the number of rows of a split, after `limited`."""
        number, limit = len(self.plan.splits[split]), self._limits.get(split)
        return number if limit is None else min(number, limit)

    def batches(self, split: str, size: int = 1_000, most: int = 50_000) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of a split in batches, up to a limit."""
        rows, end = self.rows(split), min(self.num_used(split), most)
        for start in range(0, end, size):
            yield [rows[index] for index in range(start, min(start + size, end))]

    def each_row(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield the rows that `batches` yields, one by one."""
        return itertools.chain.from_iterable(self.batches(split))


class KeptRows:
    """Some rows of a split, by number, without copying them."""

    def __init__(self, rows: Any, numbers: Sequence[int]) -> None:
        self._rows = rows
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self._rows[self._numbers[index]]
        return row

    def place(self, index: int) -> str:
        """Return the origin of a row: "line 12 of train.csv"."""
        return str(self._rows.place(self._numbers[index]))

    def group(self, index: int) -> int | None:
        """Return the number of a row's group; None without a group column."""
        found: int | None = self._rows.group(self._numbers[index])
        return found


class RowDataset:
    """Rows of a table as features, encoded on demand; the table itself is not copied.

    Args:
        rows: inputs of `encode`, by number: a split of a plan, or a list.
        encode: makes the features of a row; called in loader workers. A subclass may define `features` instead.
    """

    def __init__(self, rows: Any, encode: Callable[[Any], dict[str, Any]] = dict) -> None:
        self.rows = rows
        self._encode = encode

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> dict[str, Any]:
        if not 0 <= position < len(self):
            raise IndexError(position)
        return {**self.features(position), "position": position}

    def features(self, position: int) -> dict[str, Any]:
        """Return the features of a row, without its position."""
        return self._encode(self.rows[position])


def check_inputs(plan: DataPlan, own: DataPlan, named: set[str]) -> None:
    """Refuse to use a run's label column as an input because no other column is left."""
    others = {column: role for role, column in own.columns.items() if isinstance(column, str)}
    for role, column in plan.columns.items():
        taken = others.get(column, role) if isinstance(column, str) else role
        if taken != role and taken not in plan.columns and role not in named:
            raise InputError(
                "data.column",
                f"the column for {role} cannot be inferred: besides {column!r}, which is the {taken} of the run, "
                f"{Path(plan.files[0].path).name} has none",
                fix=f"add a column for {role} to {plan.files[0].path}",
            )
