"""The data of a run on the terminal: reading progress, and a description. No torch."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from loopwright.quantities import size
from loopwright.runs.console.screen import Screen, Waiting
from loopwright.sources import DataPlan
from loopwright.sources.label_checks import shortened

_MOST_SHOWN = 6


class ReadingProgress:
    """Shows the progress of reading, checking and hashing files; a context manager."""

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
        """Show the progress if due; called by the readers."""
        what = f"{progress.stage} {Path(progress.path).name}"
        if self._waiting is None or what != self._what:
            if self._waiting is not None:
                self._waiting.close()
            self._what, self._waiting = what, self._screen.waiting(what)
        if progress.num_bytes:
            self._waiting.to(progress.num_bytes_done, progress.num_bytes)


def used_rows(plan: DataPlan, args: Any) -> str:
    """Describe the splits of which a run uses only some rows; empty if it uses all rows."""
    limits = {"train": "max_train_samples", "validation": "max_eval_samples"}
    limited = [
        f"the first {limit:,} of {split} (--{name})"
        for split, name in limits.items()
        if (limit := getattr(args, name)) is not None and limit < len(plan.splits.get(split, ()))
    ]
    return f"used: {', '.join(limited)}" if limited else ""


def describe(plan: DataPlan, args: Any = None) -> list[str]:
    """Describe the data: files, columns, splits, labels, lengths, duplicates, guesses.

    Args:
        plan: of the data.
        args: the settings of a run that trains on it; None if nothing is trained.
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
    """Return the column of each role, marking guesses; then everything else that was guessed."""
    guesses = {guess.name: guess for guess in plan.guessed}
    shown = [
        guesses.pop(role).brief() if role in guesses else f"{role}={column!r}" for role, column in plan.columns.items()
    ]
    return ["  ".join(shown), *map(str, guesses.values())]


def _lengths(plan: DataPlan) -> list[str]:
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
