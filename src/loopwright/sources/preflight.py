"""Preflight: all checks of the data that are possible before torch is imported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from loopwright.errors import InputError
from loopwright.quantities import agreeing, counted
from loopwright.sources import column_roles, label_checks
from loopwright.sources.chats.roles import describe_chats
from loopwright.sources.column_roles import Columns, GivenColumns, Guess, column_names, is_number, sample_values
from loopwright.sources.delimited import DelimitedTable, decimal_sign
from loopwright.sources.files import Say, unreadable
from loopwright.sources.images.layouts import Layout
from loopwright.sources.images.scene_scan import SceneScan, joined
from loopwright.sources.images.scenes import Parts, Scenes, describe_images
from loopwright.sources.images.tables import TableOfImages
from loopwright.sources.labels import Labels, LabelScan, guess_kind, is_whole, label_text, ordered
from loopwright.sources.locations import Given, check_encoding, locate, open_places
from loopwright.sources.options import DataOptions, table_settings
from loopwright.sources.partition import Partition
from loopwright.sources.plan import DataFile, DataPlan, Part, Split
from loopwright.sources.scan import Lengths, Scan, scan_table
from loopwright.sources.schema import GROUP, Role, Schema
from loopwright.sources.splits import Mask
from loopwright.sources.tables import DamagedRow, Table
from loopwright.sources.values import UnusableValueError, as_texts


def preflight(
    schema: Schema,
    *,
    data: str | Path | None = None,
    train_file: str | Path | None = None,
    validation_file: str | Path | None = None,
    test_file: str | Path | None = None,
    columns: GivenColumns | None = None,
    options: DataOptions | None = None,
    say: Say | None = None,
) -> DataPlan:
    """Open the data of a task, check all of it, and return the plan; any problem is an InputError.

    `data` is a file, a folder with train, validation and test files, or the id of a Hub dataset. Without a validation
    file rows are held out by a hash of their content, or by groups if `columns` has "group". With only a validation or
    test file nothing is split, to evaluate a trained model on other data. For image tasks all of these may be folders
    of images.
    """
    options, columns = options or DataOptions(), columns or {}
    if GROUP.name in columns:
        schema = replace(schema, roles=(*schema.roles, GROUP))
    files = {"train": train_file, "validation": validation_file, "test": test_file}
    tables = _open(schema, data, files, options, say)
    return _Check(schema, tables, columns, options, say).run()


def plan_unchecked(
    schema: Schema, *, test_file: str | Path, columns: GivenColumns, options: DataOptions, say: Say | None = None
) -> DataPlan:
    """Return the plan of a file to predict, with all of its rows: no value is checked, and damaged rows are kept."""
    tables = _open(schema, None, {"test": test_file}, options, say, keeps_damaged=True, keeps_blank=True)
    table = tables["test"]
    if not table.columns and isinstance(row := table[0], DamagedRow):
        raise row.error
    chosen = _Check(schema, tables, columns, options, say)._choose_columns()
    if isinstance(table, TableOfImages):
        table.find_images(str(chosen["image"]))
    return DataPlan(
        task=schema.task,
        files=(DataFile(table.path, table.kind, table.sha256, table.num_bytes, len(table), table.settings()),),
        splits={"test": Split("test", (Part(0, np.arange(len(table))),))},
        columns=chosen,
        kinds={role.name: role.kind for role in schema.roles if role.name in chosen},
        tables={0: table},
    )


def _open(
    schema: Schema, data: str | Path | None, files: Given, options: DataOptions, say: Say | None, **more: Any
) -> dict[str, Table]:
    settings = table_settings(options) | more
    try:
        if schema.has_images:
            tables = Layout(schema, options, settings).open_all(data, files, say)
        else:
            tables = open_places(locate(data, files, settings), say)
    except OSError as error:  # of an unreadable folder
        raise unreadable(Path(error.filename or data or files.get("train") or "."), error) from error
    if not tables:
        what = f"{data or files.get('train')} has no split for training, validation or testing"
        raise InputError("data.split", what, fix="name one of its splits train")
    for table in tables.values():
        check_encoding(table)
    return tables


@dataclass
class _Check:
    """One preflight. `lead` is the split whose file decides columns and labels."""

    schema: Schema
    tables: dict[str, Table]
    given: GivenColumns
    options: DataOptions
    say: Say | None
    guesses: list[Guess] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    losses: dict[str, list[str]] = field(default_factory=dict)  # the warnings about dropped rows, by split
    dropped: Counter[str] = field(default_factory=Counter)
    columns: Columns = field(default_factory=dict)
    kept: dict[str, Mask] = field(default_factory=dict)
    scans: dict[str, Scan] = field(default_factory=dict)
    lengths: Lengths = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)  # columns that may hold the prompts of pairs

    def __post_init__(self) -> None:
        self.lead, self.lead_table = next(iter(self.tables.items()))

    def run(self) -> DataPlan:
        self.columns = self._choose_columns()
        columns = {split: self._columns_of(split) for split in self.tables}
        kind = self._label_kind()
        for split in self.tables:
            self._scan(split, columns[split], kind)
        scenes = self._scenes()
        labels = self._labels(kind) if scenes is None else scenes.labels
        self._check_rows_left()
        rows = {split: np.flatnonzero(kept) for split, kept in self.kept.items()}
        partition = Partition(self.schema, self.tables, self.columns, self.options, self.scans, rows, self.warnings)
        splits = partition.split(labels)
        self.dropped.update(partition.dropped)
        files = list(self.tables)
        parts = {name: [(files[part.file], part.rows) for part in split.parts] for name, split in splits.items()}
        if scenes is None:
            counts = self._count_labels(parts, labels)
        else:
            counts = scenes.count(parts)
            scenes.note_boxes()
            self.warnings += scenes.warnings
            self.dropped.update(scenes.dropped)
        if labels is not None and self.schema.label_role is not None:
            self._check_classes(labels, counts, self.schema.label_role)
        partition.note_evaluations(counts, kind)
        return DataPlan(
            task=self.schema.task,
            files=tuple(self._data_file(split) for split in self.tables),
            splits=splits,
            columns=self.columns,
            kinds={role.name: role.kind for role in self.schema.roles if role.name in self.columns},
            labels=labels,
            counts=counts,
            lengths={
                role: {unit: found.summary() for unit, found in units.items()} for role, units in self.lengths.items()
            },
            label_range=self._label_range(labels),
            duplicates=partition.duplicates,
            dropped=dict(self.dropped),
            guessed=tuple(self.guesses),
            warnings=tuple(self.warnings),
            chats=describe_chats(sum((scan.chats for scan in self.scans.values()), Counter())),
            images=describe_images(self.scene_scans, scenes, parts) if self.scene_scans else {},
            tables=dict(enumerate(self.tables.values())),
        )

    def _data_file(self, split: str) -> DataFile:
        table, scenes = self.tables[split], self.scans[split].scenes
        path = table.path if table.kind == "hub" else str(Path(table.path).resolve())
        sha256 = joined(table.sha256, scenes.sha256) if scenes is not None else table.sha256
        return DataFile(path, table.kind, sha256, table.num_bytes, len(table), table.settings())

    def _choose_columns(self) -> Columns:
        """Return the columns of the deciding file; a folder of images has fixed ones."""
        table = self.lead_table
        if not table.has_fixed_columns:
            columns, self.guesses = column_roles.choose_columns(self.schema, table, self.given)
            self.prompts = column_roles.possible_prompts(self.schema, table, columns)
            if self.prompts:
                flags = "   or   ".join(f"--prompt_column {quote(name)}" for name in self.prompts)
                self.warnings.append(f"the prompt is what both answers begin with; if a column holds it, {flags}")
            return columns
        groups = {role: str(column) for role, column in self.given.items() if role == GROUP.name}
        for column in set(groups.values()) - set(table.columns):
            what, saw = f"{GROUP.flag} {column!r}: no such column", [f"columns: {', '.join(table.columns)}"]
            fix = f"give a csv file with the paths of the images, their labels and a column {column!r}"
            raise InputError("data.column", what, saw=saw, fix=fix)
        try:
            return column_roles.choose_columns(self.schema, table, groups)[0]
        except InputError as error:
            if error.code != "data.column":
                raise
            saw = [f"it was read as {table.kind}, which has: {', '.join(table.columns)}"]
            fix = f"give annotations for {self.schema.task}"
            what = f"{table.name} holds images without annotations"
            raise InputError("data.annotations", what, saw=saw, fix=fix) from error

    def _columns_of(self, split: str) -> Columns:
        """Return the columns of a split's file; label columns may be missing in a test file."""
        if split == self.lead:
            return self.columns
        table, lead, found = self.tables[split], self.lead_table.name, dict(self.columns)
        samples = column_roles.sample_columns(table)
        for role in self.schema.roles:
            given = column_names(self.columns.get(role.name, ()))
            names = tuple(column_roles.as_spelled(name, samples) for name in given)
            absent = [name for name in names if name not in samples and not column_roles.has_column(table, name)]
            if not absent:
                found |= {role.name: names if len(names) > 1 else names[0]} if names else {}
                continue
            what = f"{table.name} has no column {absent[0]!r}"
            if split != "test" or role.is_input:
                what, fix = f"{what}, the {role.name} of {lead}", f"name the columns of {table.name} as in {lead}"
                raise InputError("data.column", what, saw=column_roles.describe_columns(table, samples), fix=fix)
            del found[role.name]
            lost = "its rows are in no group" if role is GROUP else f"there is no {role.name} to test against"
            self.warnings.append(f"{what}: {lost}")
        return found

    def _scan(self, split: str, columns: Columns, label_kind: str | None) -> None:
        table, role = self.tables[split], self.schema.label_role
        if isinstance(table, TableOfImages):
            table.find_images(str(columns["image"]))
        kind = label_kind if role is not None and role.name in columns else None
        try:
            scan = scan_table(table, self.schema, columns, kind, self.options, self.lengths, self.say)
        except InputError as refused:
            if refused.flag == "--prompt_column":
                flags = [f"--prompt_column {quote(name)}" for name in self.prompts]
                refused.fix = "   or   ".join([*flags, refused.fix or ""])
            raise
        self.scans[split] = scan
        self.warnings += [*table.notes, *scan.notes]
        self.kept[split] = np.ones(len(table), np.bool_)
        is_bad = np.isin(np.arange(len(table)), list(scan.bad_rows))
        if scan.bad_rows:
            error = scan.bad_rows[min(scan.bad_rows)]
            note = f"{counted(len(scan.bad_rows), 'row')} of {table.name} cannot be used ({error.what})"
            self._drop(split, "bad_rows", is_bad, note, error)
        is_missing = np.logical_or.reduce(list(scan.missing.values())) & ~is_bad
        if is_missing.any():
            number = int(is_missing.sum())
            what = f"{number:,} of {counted(len(table), 'row')} of {table.name} {agreeing(number, 'lacks')} a value"
            saw = [_missing_rows(name, found, table) for name, found in scan.missing.items() if found.any()]
            used = {name for column in columns.values() for name in column_names(column)}
            others = {name: each for each in table.columns for name in used - {each} if name.lower() == each.lower()}
            saw += [f"{name!r} and {other!r} are two columns: is it one?" for name, other in others.items()]
            error = InputError("data.missing", what, saw=saw, fix="--missing_values drop   or   fill them in")
            note = f"{counted(number, 'row')} of {table.name} {agreeing(number, 'lacks')} a value"
            self._drop(split, "missing_values", is_missing, note, error)
        if scan.scenes is None:
            return
        self.warnings += scan.scenes.warnings
        if scan.scenes.table.num_left_out:
            self.dropped["bad_annotations"] += scan.scenes.table.num_left_out
        problem, is_unusable = scan.scenes.problem(), scan.scenes.is_unusable
        if problem is not None:
            if not is_unusable.any():
                raise problem
            number = int(is_unusable.sum())
            has = agreeing(number, "has")
            note = f"{counted(number, 'image')} of {table.name} {has} annotations that cannot be used"
            self._drop(split, "bad_annotations", is_unusable, f"{note} ({problem.saw[0]})", problem)
        bad = scan.scenes.bad
        if bad.number:
            of_all = f"{bad.number:,} of {counted(len(table), 'image')} of {table.name}"
            what = f"{of_all} {agreeing(bad.number, 'is')} missing, truncated or not readable"
            error = InputError("data.image", what, saw=bad.first, fix=scan.scenes.bad_fix)
            note = f"{counted(bad.number, 'image')} of {table.name} cannot be read ({bad.first[0]})"
            self._drop(split, "bad_images", scan.scenes.is_bad, note, error)

    def _drop(self, split: str, option: str, is_dropped: Mask, note: str, error: InputError) -> None:
        if getattr(self.options, option) == "refuse":
            raise error
        verb = agreeing(int(is_dropped.sum()), "is")
        self._leave_out(split, option, is_dropped, f"{note} and {verb} left out")

    def _leave_out(self, split: str, option: str, is_dropped: Mask, note: str) -> None:
        self.dropped[option] += int(is_dropped.sum())
        self.kept[split] &= ~is_dropped
        self.losses.setdefault(split, []).append(note)
        self.warnings.append(note)

    @property
    def scene_scans(self) -> dict[str, SceneScan]:
        return {split: scan.scenes for split, scan in self.scans.items() if scan.scenes is not None}

    @property
    def label_scans(self) -> dict[str, LabelScan]:
        return {split: scan.labels for split, scan in self.scans.items() if scan.labels is not None}

    def _scenes(self) -> Scenes | None:
        role = self.schema.scene_role
        if role is None or role.name not in self.columns:
            return None
        column = str(self.columns[role.name])
        return Scenes(role, column, self.scene_scans, self.options, is_training=self.lead == "train")

    def _label_kind(self) -> str | None:
        role = self.schema.label_role
        if role is None or role.name not in self.columns:
            return None
        names, options = column_names(self.columns[role.name]), self.options
        column = names[0]
        if role.kind == "label" and (len(names) > 1 or options.label_separator is not None):
            if options.label_kind not in (None, "multi"):
                flag = "--label_columns" if len(names) > 1 else "--label_separator"
                what = f"{flag} means several labels per row, --label_kind {options.label_kind} means one"
                raise InputError("args.value", what, fix="--label_kind multi")
            found = {str(each).strip().lower() for name in names for each in sample_values(self.lead_table, name)}
            for table in self.tables.values():
                if isinstance(table, DelimitedTable) and "x" in found <= {"x", ""} and set(names) <= {*table.columns}:
                    table.decimals = dict.fromkeys(names, "marks")
            return "multi"
        if role.kind in ("label", "float") and options.label_kind in (None, "float"):
            self._read_decimals(column)
        values = sample_values(self.lead_table, column)
        given = options.label_kind or ("float" if self.options.decimal else None)
        kind = guess_kind(role, given, values)
        numbers = {float(each) for each in values if is_number(each)} if kind == "float" else set()
        if kind == "float" and options.label_names and all(each.is_integer() for each in numbers):
            kind = "class"  # 0.0 and 1.0, as spreadsheets write them
        if role.kind == "label" and given is None and kind != "class":
            what = "several classes per row" if kind == "multi" else "numbers, so a number is predicted"
            self.guesses.append(Guess("label_kind", kind, f"guessed: {column!r} holds {what}"))
            if 0 < len(numbers) <= 10 and all(number.is_integer() for number in numbers):
                self.warnings.append(f"the numbers in {column!r} look like classes: if they are, --label_kind class")
        return kind

    def _read_decimals(self, column: str) -> None:
        """Read numbers such as 3,5 in files whose delimiter is a semicolon, or as --decimal has it."""
        for table in self.tables.values():
            if not isinstance(table, DelimitedTable) or column not in table.columns:
                continue
            if self.options.decimal is not None:
                table.decimals = {column: self.options.decimal}
            elif table.dialect.delimiter == ";" and (found := decimal_sign(table, column)) is not None:
                table.decimals = {column: found[0]}
                guess = Guess("decimal", found[0], f"guessed: {column!r} holds numbers such as {found[1]}")
                self.guesses += [guess] if guess.name not in [each.name for each in self.guesses] else []

    def _labels(self, kind: str | None) -> Labels | None:
        role, options = self.schema.label_role, self.options
        if kind is None or role is None:
            self._refuse("has no classes")
            return None
        scans = self.label_scans
        lead = scans[self.lead]
        if kind != "float" and options.label_kind is None and not options.label_map:
            for scan in scans.values():
                if error := label_checks.mixed_types(scan, options.drop_labels):
                    raise error
        labels = Labels(kind, (), dict(options.label_map), lead.separator, tuple(options.drop_labels))
        found = [text for text in map(label_text, lead.texts) if text and not labels.is_dropped(text)]
        may_be_float = role.kind == "label" and options.label_kind is None and options.label_names is None
        if kind == "class" and may_be_float and all(map(is_number, found)) and not all(map(is_whole, found)):
            kind = "float"  # The first rows had whole numbers, later ones do not.
            self.guesses.append(Guess("label_kind", kind, f"guessed: {lead.column!r} holds numbers that are not whole"))
        if kind == "float":
            self._refuse("predicts a number here")
            return Labels("float", (), {})
        if role.kind == "position":
            self._refuse("has the positions of choices as labels", ("label_names", "drop_labels"))
        if kind == "tags" and options.drop_labels:
            fix = label_checks.map_flag((tag, "O") for tag in options.drop_labels)
            raise InputError("args.value", "--drop_labels would leave words without a tag", fix=fix)
        mapped = dict.fromkeys(map(labels.rename, found))
        columns = lead.columns if len(lead.columns) > 1 else self.lead_table.class_names(lead.column)
        stated = tuple(dict.fromkeys(labels.rename(name) for name in columns if not labels.is_dropped(name)))
        if not mapped.keys() <= set(stated):
            stated = ordered(sorted(mapped))
        names = tuple(options.label_names or self._positions(role) or stated)
        if options.label_names and self.lead == "train":
            labels = replace(labels, label_map=label_checks.names_of_numbers(names, found, options.label_map))
        if self.lead == "train":  # otherwise map and names come from a model
            texts = [text for scan in scans.values() for text in map(label_text, [*scan.texts, *columns]) if text]
            if absent := label_checks.absent_labels(options.label_map, options.drop_labels, texts):
                raise absent
        labels = replace(labels, names=names)
        for split, scan in scans.items():
            self._drop_labels(split, scan, labels)
            self._handle_unknown(split, scan, labels)
            if kind == "multi" and options.label_separator is not None:
                self.warnings += label_checks.odd_separator(scan)
        return labels

    def _refuse(self, why: str, names: Sequence[str] = ("label_names", "label_map", "drop_labels")) -> None:
        """Refuse options about classes where there are none."""
        for name in names if self.lead == "train" else ():
            if getattr(self.options, name):
                what = f"--{name} cannot be followed: {self.schema.task} {why}"
                raise InputError("args.value", what, fix=f"leave out --{name}", flag=f"--{name}")

    def _drop_labels(self, split: str, scan: LabelScan, labels: Labels) -> None:
        places = [place for place, text in enumerate(map(label_text, scan.texts)) if text and labels.is_dropped(text)]
        if not places:
            return
        names = label_checks.listing([label_text(scan.texts[place]) for place in places])
        is_dropped = scan.rows_with(places) & self.kept[split]
        rows = f"{counted(int(is_dropped.sum()), 'row')} of {scan.table.name}"
        if scan.kind == "multi":
            self.warnings.append(f"--drop_labels removes {names} from {rows}")
            return
        self._leave_out(split, "drop_labels", is_dropped, f"{rows} labelled {names} left out (--drop_labels)")

    def _positions(self, role: Role) -> tuple[str, ...]:
        """Return 0, 1, ... for a label that is the position among the texts of its row."""
        if role.kind != "position":
            return ()
        column = self.columns[next(other.name for other in self.schema.roles if other.kind == "texts")]
        most = len(column) if not isinstance(column, str) else 0
        for block in self.lead_table.blocks(column_names(column)) if not most else ():
            for value in block.values[str(column)]:
                with suppress(UnusableValueError):  # refused elsewhere
                    most = max(most, len(as_texts(value)))
        return tuple(map(str, range(most)))

    def _handle_unknown(self, split: str, scan: LabelScan, labels: Labels) -> None:
        clean = [label_text(text) for text in scan.texts]
        known = labels.find
        unknown = [at for at, text in enumerate(clean) if text and known(text) is None and not labels.is_dropped(text)]
        if not unknown:
            return
        first = {clean[place]: f"first in {scan.place(place)}" for place in unknown[: label_checks.MOST_NAMED]}
        saw, fix = [label_checks.known_names(labels.names)], ""
        if scan.kind == "class":
            numbers = {text: int((scan.codes == clean.index(text)).sum()) for text in first}
            first = {text: f"{counted(numbers[text], 'row')}, {place}" for text, place in first.items()}
            counts = {name: each.counts(labels) for name, each in self.label_scans.items()}
            saw = ["   ".join(f"{name}: {label_checks.shown_counts(found)}" for name, found in counts.items() if found)]
        if scan.role.kind == "position":
            fix = label_checks.fix_of_positions([text for text in clean if text], len(labels.names))
        lead, number = self.lead_table, len(unknown)
        if self.lead == "train" and self.options.label_names:
            fix = label_checks.fix_of_names(labels.names, [clean[place] for place in unknown])
        error = label_checks.unknown_labels("label", number, scan.table, lead, labels.names, first, saw, fix)
        is_unknown = scan.rows_with(unknown) & self.kept[split]
        number = int(is_unknown.sum())
        note = f"{counted(number, 'row')} of {scan.table.name} {agreeing(number, 'has')} an unknown label"
        self._drop(split, "unknown_labels", is_unknown, note, error)

    def _count_labels(self, parts: Parts, labels: Labels | None) -> dict[str, dict[str, int]]:
        if labels is None or labels.kind == "float":
            return {}
        counts, scans = {}, self.label_scans
        for name, pieces in parts.items():
            found = (scans[file].counts(labels, rows) for file, rows in pieces if file in scans)
            total = sum(found, Counter[str]())
            counts[name] = {label: total[label] for label in labels.names}
        return counts

    def _check_classes(self, labels: Labels, counts: dict[str, dict[str, int]], role: Role) -> None:
        table, column = self.lead_table, ", ".join(column_names(self.columns[role.name]))
        if self.lead != "train" or labels.kind == "float":
            return
        is_new = self.options.label_names is None
        if len(labels.names) < (1 if labels.kind == "multi" else 2):
            what, saw = f"all labels of {table.name} are {''.join(labels.names)!r}", [f"{role.flag} {column}"]
            what = what if labels.names else f"no row of {table.name} has a label"
            fix = f"add rows of another class to {table.name}"
            if table.has_fixed_columns:
                saw, fix = [], "put the images into a folder for each class, two at least"
            raise InputError("data.one_class", what, saw=saw, fix=fix)
        self.warnings += label_checks.rare_classes(counts, labels.kind)
        if is_new and role.kind != "position":
            totals = sum((Counter(each) for each in counts.values()), Counter[str]())
            self.warnings += label_checks.odd_classes(totals, column, has_typos=labels.kind != "tags")
            if role.kind == "label" and labels.kind == "class":
                self.warnings += label_checks.joined_classes(totals)

    def _check_rows_left(self) -> None:
        for split, kept in self.kept.items():
            if not kept.any():
                what, name = "has no usable rows", self.tables[split].name
                fix = f"give rows with all values and known labels in {name}"
                raise InputError("data.split", f"{name} {what}", saw=self.losses.get(split, ()), fix=fix)

    def _label_range(self, labels: Labels | None) -> tuple[float, float] | None:
        if labels is None or labels.kind != "float":
            return None
        scans = self.label_scans.values()
        numbers = [float(text) for scan in scans for text in scan.texts if text.strip()]
        return min([scan.smallest for scan in scans] + numbers), max([scan.largest for scan in scans] + numbers)


def _missing_rows(role: str, is_missing: Mask, table: Table) -> str:
    places = [table.place(int(row)) for row in np.flatnonzero(is_missing)[: label_checks.MOST_NAMED]]
    return f"{role}: {counted(int(is_missing.sum()), 'row')}, first in {', '.join(places)}"
