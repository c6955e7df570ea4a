"""The data of a run, opened once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from loopwright.errors import InputError
from loopwright.sources import DataPlan, Schema, SplitRows


class Screen(Protocol):
    """What shows the progress of long work; the console of a run is one."""

    def waiting(self, what: str) -> Any:
        """Return a context manager that shows how far the work is."""


class RunData:
    """A plan and its rows; each split is opened when it is first asked for.

    Attributes:
        plan: what preflight found.
    """

    def __init__(self, plan: DataPlan) -> None:
        self.plan = plan
        self._rows: dict[str, SplitRows] = {}
        self._limits: dict[str, int | None] = {}
        self._waiting: Any = None

    def has(self, split: str) -> bool:
        """Whether there is such a split, with rows in it."""
        return split in self.plan.splits and len(self.plan.splits[split]) > 0

    def missing_roles(self, split: str, schema: Schema) -> list[str]:
        """Return what the training rows have and a model is scored by, and the rows of a split lack: mostly labels."""
        needed = [role.name for role in schema.roles if role.is_required or role.is_input or role.is_label]
        here, there = self.rows(split)[0], self.rows("train")[0]
        return [name for name in needed if name in there and name not in here]

    def rows(self, split: str) -> SplitRows:
        """Return the rows of "train", "validation" or "test", each a dict by role; labels are encoded."""
        if split not in self._rows:
            self._rows[split] = self.plan.rows(split)
            self._show(self._rows[split])
        return self._rows[split]

    @contextmanager
    def watched(self, screen: Screen, what: str) -> Iterator[None]:
        """Show how far passes over the rows are while the block runs, if that takes long.

        Args:
            screen: what is said.
            what: is done with the rows.
        """
        with screen.waiting(what) as self._waiting:
            try:
                self._show(*self._rows.values())
                yield
            finally:
                self._waiting = None
                self._show(*self._rows.values())

    def _show(self, *splits: SplitRows) -> None:
        """Tell whoever waits of each row that is read; nobody, where nobody waits."""
        for rows in splits:
            waiting, total = self._waiting, len(rows)
            rows.on_read = None if waiting is None else functools.partial(_tell, waiting, total)

    @contextmanager
    def limited(self, **limits: int | None) -> Iterator[None]:
        """Let `batches` yield no more rows of a split than so many while the block runs; None is no limit."""
        self._limits = limits
        try:
            yield
        finally:
            self._limits = {}

    def num_used(self, split: str) -> int:
        """Return how many rows of a split there are, or that `limited` leaves of them."""
        number, limit = len(self.plan.splits[split]), self._limits.get(split)
        return number if limit is None else min(number, limit)

    def batches(self, split: str, size: int = 1_000, most: int = 50_000) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of a split, some at a time, up to a limit."""
        rows, end = self.rows(split), min(self.num_used(split), most)
        for start in range(0, end, size):
            yield [rows[index] for index in range(start, min(start + size, end))]


def _tell(waiting: Any, total: int, index: int) -> None:
    waiting.to(index + 1, total)


def check_inputs(plan: DataPlan, own: DataPlan, named: set[str]) -> None:
    """Refuse to take for an input, since no other column is left, what a run has as its labels.

    Args:
        plan: of the rows that are to be predicted or evaluated.
        own: of the run's own data.
        named: the roles whose columns a person has named.

    Raises:
        InputError: the file lacks the column of a role.
    """
    others = {column: role for role, column in own.columns.items() if isinstance(column, str)}
    for role, column in plan.columns.items():
        taken = others.get(column, role) if isinstance(column, str) else role
        if taken != role and taken not in plan.columns and role not in named:
            raise InputError(
                "data.column",
                f"the column for {role} cannot be guessed: {Path(plan.files[0].path).name} has none beside {column!r}, "
                f"which is the {taken} of the run",
                fix=f"--{role}_column NAME, with a file that has it",
            )
