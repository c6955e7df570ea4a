"""The data of a run, opened once; and what is said about it before torch is imported."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from loopwright.errors import InputError
from loopwright.quantities import size
from loopwright.sources import DataPlan, Schema, SplitRows
from loopwright.sources.label_advice import shortened
from loopwright.tasks.screen import Screen, Waiting

_MOST_SHOWN = 6


class RunData:
    """A plan and its rows; each split is opened when it is first asked for.

    Attributes:
        plan: what preflight found.
    """

    def __init__(self, plan: DataPlan) -> None:
        self.plan = plan
        self._rows: dict[str, SplitRows] = {}
        self._limits: dict[str, int | None] = {}
        self._waiting: Waiting | None = None

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


def _tell(waiting: Waiting, total: int, index: int) -> None:
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


class ReadingProgress:
    """Shows how far files are read, checked and hashed; a context manager.

    Args:
        screen: what is said.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._what = ""
        self._waiting: Waiting | None = None

    def __enter__(self) -> ReadingProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._waiting is not None:
            self._waiting.close(is_over=kind is None)

    def __call__(self, progress: Any) -> None:
        """Show it, if it is time; called by the readers."""
        what = f"{progress.stage} {Path(progress.path).name}"
        if self._waiting is None or what != self._what:
            if self._waiting is not None:
                self._waiting.close()
            self._what, self._waiting = what, self._screen.waiting(what)
        if progress.num_bytes:
            self._waiting.to(progress.num_bytes_done, progress.num_bytes)


def used_rows(plan: DataPlan, args: Any) -> str:
    """Return which rows a run takes of splits of which it does not take all; nothing where it takes them all."""
    limits = {"train": "max_train_samples", "validation": "max_eval_samples"}
    told = [
        f"the first {limit:,} of {split} (--{name})"
        for split, name in limits.items()
        if (limit := getattr(args, name)) is not None and limit < len(plan.splits.get(split, ()))
    ]
    return f"used: {', '.join(told)}" if told else ""


def describe(plan: DataPlan, args: Any = None) -> list[str]:
    """Return lines about the data: files, columns, splits, labels, lengths, duplicates, guesses.

    Args:
        plan: of the data.
        args: the settings of a run that trains on it; None where nothing is trained.
    """
    lines = [
        f"{Path(file.path).name}  {file.num_rows:,} row{'s' if file.num_rows != 1 else ''}  {size(file.num_bytes)}  "
        f"sha256 {file.sha256[:8]}"
        for file in plan.files
    ]
    lines += _columns(plan)
    lines.append(" / ".join(f"{name} {len(split):,}" for name, split in plan.splits.items()))
    if args is not None and (used := used_rows(plan, args)):
        lines.append(used)
    for split, counts in plan.counts.items():
        if split == "train" and counts:
            shown = [f"{shortened(name)} {count:,}" for name, count in list(counts.items())[:_MOST_SHOWN]]
            more = f" · and {len(counts) - _MOST_SHOWN} more" if len(counts) > _MOST_SHOWN else ""
            lines.append(f"labels {' · '.join(shown)}{more}")
    if plan.label_range is not None:
        lines.append(f"labels are numbers from {plan.label_range[0]:g} to {plan.label_range[1]:g}")
    lines += _lengths(plan)
    return [*lines, *(f"note: {warning}" for warning in plan.warnings)]


def _columns(plan: DataPlan) -> list[str]:
    """Return the column of each role, and beside those that were guessed that they were; then what else was guessed."""
    shown, others = [], list(plan.guesses)
    for role, column in plan.columns.items():
        guess = next((each for each in others if each.startswith(f"{role}=")), None)
        if guess is not None:
            others.remove(guess)
        shown.append(f"{role}={column!r}" if guess is None else guess.replace(" (guessed by its name)", " (guessed)"))
    return ["  ".join(shown), *others]


def _lengths(plan: DataPlan) -> list[str]:
    """Return lines about how long texts and how large images are."""
    lines = [
        f"{role}: words p50 {spread['p50']:,} p95 {spread['p95']:,} max {spread['max']:,}"
        for role, units in plan.lengths.items()
        if (spread := units.get("words")) and spread["max"] > 1
    ]
    sizes = plan.images.get("sizes") or {}
    if {"width", "height"} <= sizes.keys():
        half, largest = (f"{sizes['width'][name]} × {sizes['height'][name]}" for name in ("p50", "max"))
        lines.append(f"images {half}" if half == largest else f"images p50 {half} max {largest}")
    return lines
