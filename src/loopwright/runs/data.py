"""The data of a run on the terminal, and the data that a trained model gets. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loopwright.errors import InputError
from loopwright.quantities import size
from loopwright.runs.console.screen import Screen, Waiting
from loopwright.runs.settings import Settings
from loopwright.sources import DataOptions, DataPlan, Schema, preflight
from loopwright.sources.chats.roles import CHAT_KINDS, chat_cells, is_usual
from loopwright.sources.column_roles import column_names
from loopwright.sources.files import is_evident
from loopwright.sources.formats import KINDS_BY_ENDING, ending_of, open_table
from loopwright.sources.label_checks import shortened
from loopwright.sources.options import table_settings
from loopwright.sources.preflight import plan_unchecked
from loopwright.sources.schema import GROUP
from loopwright.sources.tables import outer_column, value_at
from loopwright.sources.values import without_empty_end
from loopwright.tasks.base import Task
from loopwright.tasks.data import check_inputs

_MOST_SHOWN = 6


class ReadingProgress:
    """Shows the progress of reading, checking and hashing files; a context manager."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._what = ""
        self._waiting: Waiting | None = None

    def __enter__(self) -> ReadingProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._waiting is not None:
            self._waiting.close(is_over=kind is None)

    def __call__(self, progress: Any) -> None:
        what = f"{progress.stage} {Path(progress.path).name}"
        if self._waiting is None or what != self._what:
            if self._waiting is not None:
                self._waiting.close()
            self._what, self._waiting = what, self._screen.waiting(what)
        if progress.num_bytes:
            self._waiting.to(progress.num_bytes_done, progress.num_bytes)


def used_rows(plan: DataPlan, args: Any) -> str:
    """Describe the splits of which a run uses only some rows; empty if it uses all rows."""
    limits = {"train": "max_train_samples", "validation": "max_eval_samples", "test": "max_test_samples"}
    limited = [
        f"the first {limit:,} of {split} (--{name})"
        for split, name in limits.items()
        if (limit := getattr(args, name)) is not None and limit < len(plan.splits.get(split, ()))
    ]
    return f"used: {', '.join(limited)}" if limited else ""


def print_data(plan: DataPlan, args: Any, screen: Screen) -> None:
    screen.block("data", *describe(plan, args))
    for warning in plan.warnings:
        screen.block("", f"note: {warning}", colour="yellow")


def describe(plan: DataPlan, args: Any = None) -> list[str]:
    """Describe the data: files, columns, splits, labels; `args` are the settings of a run that trains on it."""
    lines = [
        f"{Path(file.path).name}  {file.num_rows:,} row{'s' if file.num_rows != 1 else ''}  {size(file.num_bytes)}  "
        f"sha256 {file.sha256[:8]}{_encoding(file.settings, args)}"
        for file in plan.files
    ]
    lines += _columns(plan)
    lines.append(" / ".join(f"{name} {len(split):,}" for name, split in plan.splits.items()))
    if args is not None and (used := used_rows(plan, args)):
        lines.append(used)
    if counts := plan.counts.get("train"):
        shown = [f"{shortened(name)} {count:,}" for name, count in list(counts.items())[:_MOST_SHOWN]]
        more = f" · and {len(counts) - _MOST_SHOWN} more" if len(counts) > _MOST_SHOWN else ""
        lines.append(f"labels {' · '.join(shown)}{more}")
    if plan.label_range is not None:
        lines.append(f"labels are numbers from {plan.label_range[0]:g} to {plan.label_range[1]:g}")
    return [*lines, *_chats(plan), *_lengths(plan)]


def _chats(plan: DataPlan) -> list[str]:
    """Describe conversations: their format, and the turns of each role."""
    if not plan.chats:
        return []
    formats = ", ".join(f"{name} ({count:,})" for name, count in plan.chats["format"].items())
    turns = plan.chats.get("turns", {})
    tools = plan.chats.get("tools", {}).get("conversations", 0)
    shown = " · ".join(f"{role} {count:,}" for role, count in turns.items()) or "none: the rows are texts"
    return [f"format {formats}", f"turns {shown}{f' · {tools:,} conversations with tools' if tools else ''}"]


def _encoding(settings: Mapping[str, Any], args: Any) -> str:
    if "encoding" not in settings:
        return ""
    is_given = settings["encoding"] == getattr(args, "encoding", None)
    return f"  encoding {settings['encoding']}{'' if is_given else ' (detected)'}"


def _columns(plan: DataPlan) -> list[str]:
    """Return the column of each role, marking guesses; then everything else that was guessed."""
    guesses = {guess.name: guess for guess in plan.guessed}
    shown = [
        guesses.pop(role).brief() if role in guesses else f"{role}={column!r}" for role, column in plan.columns.items()
    ]
    return ["  ".join(shown), *map(str, guesses.values())]


def _lengths(plan: DataPlan) -> list[str]:
    lines = [
        f"{role}: {unit} p50 {spread['p50']:,} p95 {spread['p95']:,} max {spread['max']:,}"
        for role, units in plan.lengths.items()
        for unit in ("turns", "words")
        if (spread := units.get(unit)) and spread["max"] > 1
    ]
    sizes = plan.images.get("sizes") or {}
    if {"width", "height"} <= sizes.keys():
        half, largest = (f"{sizes['width'][name]} × {sizes['height'][name]}" for name in ("p50", "max"))
        lines.append(f"images {half}" if half == largest else f"images p50 {half} max {largest}")
    return lines


def plan_of_file(task: Task, schema: Schema, settings: Settings, own: DataPlan, **file: Any) -> DataPlan:
    """Return the plan of other data, with the run's columns or else guessed ones; `file` is as in `preflight`."""
    schema, options = task.schema_of_model(schema, own), _trained_options(task, settings.args, own)
    (path,), open_all = file.values(), preflight if "validation_file" in file else plan_unchecked
    if has_known_ending(path):  # these described the run's own files
        unset: dict[str, Any] = {"file_kind": None, "delimiter": None, "quoting": None, "column_names": ()}
        options = replace(options, **{name: unset[name] for name in unset.keys() - settings.given})
    if options.encoding is not None and "encoding" not in settings.given and is_evident(Path(path)):
        options = replace(options, encoding=None)
    roles = {role.name for role in schema.roles} | ({GROUP.name} if "validation_file" in file else set())
    now = {name.removesuffix("s").removesuffix("_column") for name in settings.given} & roles
    named = {role: column for role, column in task.columns(settings.args).items() if role in now}
    usual = {role for role, column in own.columns.items() if own.kinds.get(role) == "chat" and is_usual(column)}
    columns = {**{role: column for role, column in own.columns.items() if role in roles - usual}, **named}
    try:
        return open_all(schema, columns=columns, options=options, **file)
    except InputError as error:
        names = task.data_options(settings.args).column_names
        if error.code == "data.header" and names and not options.column_names:
            return open_all(schema, columns=columns, options=replace(options, column_names=names), **file)
        if error.code != "data.column":
            raise
    found = open_table(path, **table_settings(options) | {"keeps_damaged": True}).columns
    kept = {role: column for role, column in columns.items() if role in named or _has_columns(found, column)}
    needed = [role.name for role in schema.roles if role.is_required]
    if len(found) == 1 and len(needed) == 1 and not named:
        kept[needed[0]] = found[0]
    plan = open_all(schema, columns=kept, options=options, **file)
    check_inputs(plan, own, set(named))
    return plan


def has_known_ending(path: str | Path) -> bool:
    return ending_of(Path(path)) in KINDS_BY_ENDING


def _has_columns(found: Sequence[str], column: str | Sequence[str]) -> bool:
    names = [column] if isinstance(column, str) else column
    return all(outer_column(found, name) is not None for name in names)


def by_role(plan: DataPlan, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row by role that was given by column, or by role."""
    named = {column: role for role, column in plan.columns.items() if isinstance(column, str)}
    found = {named.get(name, name): value for name, value in row.items()}
    for role, column in plan.columns.items():  # an entry of a column, or several columns
        parts = [value_at(dict(row), name) for name in column_names(column)]
        if role not in found and any(part is not None for part in parts):
            found[role] = parts[0] if isinstance(column, str) else without_empty_end(parts)
        if plan.kinds.get(role) in CHAT_KINDS and role not in row:
            found = {role: chat_cells(plan.kinds[role], row, column_names(column))}
    return found


def _trained_options(task: Task, args: Any, plan: DataPlan) -> DataOptions:
    if plan.labels is None:
        return task.data_options(args)
    kind = plan.labels.kind if plan.labels.kind in ("class", "multi", "float") else None
    options, labels = task.data_options(args), plan.labels
    separator = labels.separator if kind == "multi" and options.label_separator is not None else None
    label_map = {**labels.label_map, **options.label_map}
    label_map |= {old: labels.rename(new) for old, new in options.label_map.items() if new not in labels.names}
    return replace(
        options, label_kind=kind, label_names=labels.names or None, label_map=label_map, label_separator=separator
    )
