"""The data of a run, opened once; and what is said about it before torch is imported."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loopwright.sources import DataPlan, Schema, SplitRows

_MOST_SHOWN = 6
_SAY_EVERY_SECONDS = 2.0


class RunData:
    """A plan and its rows; each split is opened when it is first asked for.

    Attributes:
        plan: what preflight found.
    """

    def __init__(self, plan: DataPlan) -> None:
        self.plan = plan
        self._rows: dict[str, SplitRows] = {}

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
        return self._rows[split]

    def batches(self, split: str, size: int = 1_000, most: int = 50_000) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of a split, some at a time, up to a limit."""
        rows = self.rows(split)
        end = min(len(rows), most)
        for start in range(0, end, size):
            yield [rows[index] for index in range(start, min(start + size, end))]


class ReadingProgress:
    """Says how far a large file is read, on the terminal's error stream; small files are read before it speaks."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, progress: Any) -> None:
        """Say it, if it is time; called by the readers."""
        now = time.monotonic()
        if now - self._last >= _SAY_EVERY_SECONDS and progress.num_bytes:
            self._last = now
            share = 100 * progress.num_bytes_done / progress.num_bytes
            sys.stderr.write(f"{progress.stage} {Path(progress.path).name}: {share:.0f} %\n")


def describe(plan: DataPlan) -> list[str]:
    """Return lines about the data: files, columns, splits, labels, lengths, duplicates, guesses."""
    lines = [f"{Path(file.path).name}  {file.num_rows:,} rows  sha256 {file.sha256[:8]}" for file in plan.files]
    lines.append("  ".join(f"{role}={column!r}" for role, column in plan.columns.items()))
    if plan.guesses:
        lines.append(f"guessed: {', '.join(guess.removesuffix(' (guessed by its name)') for guess in plan.guesses)}")
    lines.append(" / ".join(f"{name} {len(split):,}" for name, split in plan.splits.items()))
    for split, counts in plan.counts.items():
        if split == "train" and counts:
            shown = [f"{name} {count:,}" for name, count in list(counts.items())[:_MOST_SHOWN]]
            more = f" · and {len(counts) - _MOST_SHOWN} more" if len(counts) > _MOST_SHOWN else ""
            lines.append(f"labels {' · '.join(shown)}{more}")
    if plan.label_range is not None:
        lines.append(f"labels are numbers from {plan.label_range[0]:g} to {plan.label_range[1]:g}")
    return [*lines, *(f"note: {warning}" for warning in plan.warnings)]
