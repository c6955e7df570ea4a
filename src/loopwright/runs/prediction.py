"""Predictions, one per input row, in order; a row that cannot be predicted has an error instead. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from loopwright.errors import InputError
from loopwright.runs.data import by_role, plan_of_file
from loopwright.runs.settings import Settings
from loopwright.sources import DataPlan, Role
from loopwright.sources.chats.roles import CHAT_KINDS, as_chat, chat_text
from loopwright.sources.column_roles import column_names
from loopwright.sources.labels import has_value
from loopwright.sources.schema import PICTURE_KINDS
from loopwright.sources.tables import DamagedRow, Row, Table
from loopwright.sources.values import UnusableValueError, as_role, as_text
from loopwright.tasks.base import Task

ERROR = "error"
_logger = logging.getLogger("loopwright")
_MOST_NAMED = 5
STRICT_FIX = "strict=False, which gives each of these rows an error in place of a prediction"


class InputRows:
    """The usable rows among the inputs, by role, as a task predicts them; the others are in `errors`, by number.

    Args:
        given: the inputs by number, each a dict by column.
        convert: makes a row by role of an input, or raises a ValueError that names the place.
        roles: the roles that a row may have.
        columns: the columns known so far; those that only some rows have are added.
    """

    def __init__(
        self,
        given: Sequence[Row] | Any,
        convert: Callable[[Row, str], Row],
        roles: Sequence[Role],
        columns: Sequence[str] = (),
    ) -> None:
        self.given, self._convert, self._roles = given, convert, roles
        self.columns = dict.fromkeys(columns)
        self.errors: dict[int, ValueError] = {}
        self.notes: list[str] = []  # about how a file is read
        for number in range(len(given)):
            values = given[number]
            self.columns |= dict.fromkeys(values)
            with suppress(ValueError):
                self._row(values)
                continue
            try:  # again with its place, which is slow to find
                self._row(values, self._place(number))
            except ValueError as error:
                self.errors[number] = error.with_traceback(None)  # which would keep the values of the row
        self._numbers = np.setdiff1d(np.arange(len(given)), list(self.errors), assume_unique=True)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Row:
        return self._row(self.given[int(self._numbers[index])])

    def refuse_errors(self) -> None:
        if self.errors:
            saw = [f"row {number + 1:,}: {text_of(error)}" for number, error in self.errors.items()][:_MOST_NAMED]
            what = f"{len(self.errors):,} of {len(self.given):,} rows cannot be predicted"
            raise InputError(_code(next(iter(self.errors.values()))), what, saw=saw, fix=STRICT_FIX)

    def _place(self, number: int) -> str:
        table = self.given
        return f"{table.place(number)} of {table.name}" if isinstance(table, Table) else f"row {number + 1:,}"

    def _row(self, values: Row, where: str = "") -> Row:
        row = self._convert(values, where)
        for role in self._roles:
            if role.name not in row and not role.is_required:
                continue
            value: Any = row.get(role.name)
            if role.kind in PICTURE_KINDS:
                is_present = value is not None and value != ""
            else:
                is_present = has_value(value) and (role.kind != "texts" or all(map(has_value, value)))
            if not is_present and (not role.may_be_empty or (value is None and role.is_required)):
                raise InputError("data.missing", f"the row has no {role.name}", fix=f"give it a value for {role.name}")
        return row


def is_data_file(task: Task, given: str | Path) -> bool:
    """Whether an input of `predict` is a file of rows, and not itself an input, such as an image or a text."""
    try:
        return Path(given).is_file() and not task.is_input(str(given))
    except (OSError, ValueError):  # a text that no file can have as its name
        return False


def file_or_items(task: Task, inputs: str | Path | Iterable[Any]) -> str | Path | list[Any]:
    if isinstance(inputs, (str, Path)):
        return inputs if is_data_file(task, inputs) else [str(inputs)]
    return [str(each) if isinstance(each, Path) else each for each in inputs]


def read_inputs(task: Task, settings: Settings, plan: DataPlan, inputs: str | Path | Sequence[Any]) -> InputRows:
    """Return the rows of a data file, or of texts and dicts, for the model of a run with this `plan`."""
    schema = task.schema_of_model(task.schema(settings.args).for_prediction(), plan)
    if isinstance(inputs, (str, Path)):
        found = plan_of_file(task, task.schema(settings.args).for_prediction(), settings, plan, test_file=inputs)
        rows, table = found.rows("test"), found.tables[0]
        needed = {name for column in found.columns.values() for name in column_names(column)}

        def complete(values: Row, where: str) -> Row:
            """Make a row of one that lacks only its last fields, if the run does not need them."""
            is_ragged = isinstance(values, DamagedRow) and values.error.code == "data.ragged"
            # Its last field may be cut.
            is_short = is_ragged and len(values) < len(table.columns) and needed <= {*list(values)[:-1]}
            return rows.by_role(table, dict(values) if is_short else values, where)

        made = InputRows(table, complete, schema.roles, table.columns)
        other = {role: column for role, column in found.columns.items() if column != plan.columns.get(role)}
        made.notes = [
            *table.notes,
            *(f"{role} is read from {', '.join(map(repr, column_names(column)))}" for role, column in other.items()),
        ]
        return made
    if not any(isinstance(each, Mapping) for each in inputs):
        return InputRows(task.rows_of_texts(plan, [_line(each) for each in inputs]), _checked, schema.roles)
    kinds = {role.name: role.kind for role in schema.roles if role.kind in ("text", "texts", "tokens")}

    def named(values: Row) -> Row:
        row = by_role(plan, values)
        return row | {"tokens": row["text"]} if "tokens" in kinds and "text" in row and "tokens" not in row else row

    def convert(values: Row, where: str) -> Row:
        row = named(values)
        kinds_of_chats = {role.name: role.kind for role in schema.roles if role.kind in CHAT_KINDS}
        chats = {name: as_chat(kind, row[name], where) for name, kind in kinds_of_chats.items()}
        return _checked({name: as_role(kinds[name], row[name]) if name in kinds else row[name] for name in row} | chats)

    given = [dict(each) if isinstance(each, Mapping) else {task.roles[0].name: each} for each in inputs]
    for role in schema.roles:
        if role.is_required and not any(role.name in named(each) for each in given):
            column = plan.columns.get(role.name, role.name)
            what, saw = f"no row to predict has {role.name}", [f"the first has {', '.join(map(str, given[0]))}"]
            raise InputError("data.column", what, saw=saw, fix=f"give rows with {role.name!r} or {column!r}")
    return InputRows(given, convert, schema.roles)


def _line(item: Any) -> str:
    try:
        return as_text(item)
    except UnusableValueError:
        return ""


def _checked(row: Row, where: str = "") -> Row:
    """Refuse half characters, which only a text that Python was given can have."""
    for value in row.values():
        (value if isinstance(value, str) else chat_text(value)).encode()
    return row


class Predictions:
    """Yields (input, prediction) for each input, in order: the input by column, and the prediction of the task.

    The prediction of an unusable row has no values and an "error", its reason. If `is_strict`, such a row is an
    InputError instead, before anything is yielded wherever it can be found without the model.
    """

    def __init__(
        self,
        task: Task,
        plan: DataPlan,
        rows: InputRows,
        predict: Callable[[InputRows], Iterator[Row]],
        is_strict: bool,
    ) -> None:
        self._rows, self._predict, self._is_strict = rows, predict, is_strict
        self._names, self._repeated = dict.fromkeys(task.predicted_for(plan)), task.repeated
        self.num_rows = len(rows.given)
        self.num_failed = 0
        self.notes = rows.notes
        self.renamed: dict[str, str] = {}  # fields of a prediction that are also columns of the input
        if is_strict:
            rows.refuse_errors()

    @property
    def failures(self) -> str:
        """The number of rows that could not be predicted so far, as a sentence."""
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows:,} rows"
        return f"{self.num_failed:,} of {rows} could not be predicted"

    def __iter__(self) -> Iterator[tuple[Row, Row]]:
        first: list[tuple[int, Row]] = []  # the unusable rows before the first prediction, which has the names
        names: dict[str, None] | None = None
        for number, found in self._found():
            if names is None and ERROR in found:
                first.append((number, found))
                continue
            if names is None:
                names = dict.fromkeys(found)
                yield from self._named(first, names)
            yield from self._named([(number, found)], names)
        if names is None:
            yield from self._named(first, self._names)

    def collect(self) -> list[Row]:
        """Return all predictions, without the inputs; log the number of those with an error."""
        found = [prediction for _, prediction in self]
        if self.num_failed:
            _logger.warning("%s; see their 'error'", self.failures)
        return found

    def rows(self, *, with_inputs: bool, is_table: bool) -> Iterator[Row]:
        """Yield each prediction, alone or beside the columns of its input; in a table all rows have all columns.

        A field with the name of a column of the input gets another name.
        """
        columns = self._rows.columns
        for values, found in self:
            found |= {ERROR: found.get(ERROR)} if is_table else {}
            if not with_inputs:
                yield found
                continue
            fields = {name: value for name, value in found.items() if name not in self._repeated}
            for name in fields:
                if name in columns and name not in self.renamed:
                    self.renamed[name] = _free_name(name, {*columns, *fields})
            named = {self.renamed.get(name, name): value for name, value in fields.items()}
            yield {**(dict.fromkeys(columns) if is_table else {}), **values, **named}

    def _found(self) -> Iterator[tuple[int, Row]]:
        errors = self._rows.errors
        predicted = self._predict(self._rows) if len(self._rows) else iter(())
        for number in range(self.num_rows):
            found = {ERROR: errors[number]} if number in errors else next(predicted)
            if isinstance(error := found.get(ERROR), Exception):
                if self._is_strict:
                    what = f"row {number + 1:,} cannot be predicted: {getattr(error, 'what', error)}"
                    raise InputError(_code(error), what, fix=STRICT_FIX) from error
                self.num_failed += 1
                found = {**found, ERROR: text_of(error)}
            yield number, found

    def _named(self, found: Sequence[tuple[int, Row]], names: dict[str, None]) -> Iterator[tuple[Row, Row]]:
        for number, each in found:
            yield self._rows.given[number], {**names, **each} if ERROR in each else each


def _free_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name = f"predicted_{name}"
    return name


def _code(error: BaseException) -> str:
    return getattr(error, "code", None) or "data.value"


def text_of(error: BaseException) -> str:
    """Return an error in a line, with its code."""
    return f"{_code(error)}: {getattr(error, 'what', None) or error}"
