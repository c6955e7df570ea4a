"""Data that a run was not trained on: the plan of a file for a trained model, and rows by column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loopwright.errors import InputError
from loopwright.runs.settings import Settings
from loopwright.sources import DataOptions, DataPlan, Schema, preflight
from loopwright.sources.formats import KINDS_BY_ENDING, open_table
from loopwright.tasks.base import Task
from loopwright.tasks.data import check_inputs


def plan_of_file(task: Task, schema: Schema, settings: Settings, own: DataPlan, **file: Any) -> DataPlan:
    """Return the plan of a file of other data, with the run's columns or else guessed ones.

    Args:
        task: the task.
        schema: the required roles.
        settings: of the run, with the flags of this call.
        own: the plan of the run's own data.
        file: the path, under its argument name of `preflight`.

    Raises:
        InputError: the file cannot be used; it says why and how to fix it.
    """
    schema, options = task.schema_of_model(schema, own), _trained_options(task, settings.args, own)
    (path,) = file.values()
    if has_known_ending(path):
        options = replace(options, file_kind=None, delimiter=None)  # these described the run's own files
    roles = {role.name for role in schema.roles}
    now = {name.removesuffix("_column") for name in settings.given} & roles
    named = {role: column for role, column in task.columns(settings.args).items() if role in now}
    columns = {**{role: column for role, column in own.columns.items() if role in roles}, **named}
    try:
        return preflight(schema, columns=columns, options=options, **file)
    except InputError as error:
        if error.code != "data.column":
            raise
    found = open_table(
        path, kind=options.file_kind, delimiter=options.delimiter, quoting=options.quoting, text_unit=options.text_unit
    ).columns
    kept = {role: column for role, column in columns.items() if role in named or _has_columns(found, column)}
    needed = [role.name for role in schema.roles if role.is_required]
    if len(found) == 1 and len(needed) == 1 and not named:
        kept[needed[0]] = found[0]
    plan = preflight(schema, columns=kept, options=options, **file)
    check_inputs(plan, own, set(named))
    return plan


def has_known_ending(path: str | Path) -> bool:
    """Whether a file has a known data extension, such as .csv or .jsonl.gz."""
    return Path(Path(path).name.lower().removesuffix(".gz")).suffix in KINDS_BY_ENDING


def _has_columns(found: Sequence[str], column: str | Sequence[str]) -> bool:
    names = [column] if isinstance(column, str) else column
    return all(name in found or name.partition(".")[0] in found for name in names)


def by_role(plan: DataPlan, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its columns renamed to roles."""
    named = {column: role for role, column in plan.columns.items() if isinstance(column, str)}
    return {named.get(name, name): value for name, value in row.items()}


def _trained_options(task: Task, args: Any, plan: DataPlan) -> DataOptions:
    """Return the options to read other data with the model's labels."""
    if plan.labels is None:
        return task.data_options(args)
    kind = plan.labels.kind if plan.labels.kind in ("class", "multi", "float") else None
    return replace(
        task.data_options(args), label_kind=kind, label_names=plan.labels.names or None, label_map=plan.labels.label_map
    )
