"""Preflight: all checks of the data that are possible before torch is imported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loopwright.errors import InputError
from loopwright.sources.column_roles import (
    Columns,
    choose_columns,
    describe_columns,
    is_number,
    sample_columns,
    sample_values,
)
from loopwright.sources.counting import class_counts, count_lists, most_texts, rows_with
from loopwright.sources.files import Say, unreadable
from loopwright.sources.images.layouts import Layout
from loopwright.sources.images.scanning import SceneOptions, SceneScan, joined
from loopwright.sources.images.summary import Scenes, describe_images
from loopwright.sources.images.tables import TableOfImages
from loopwright.sources.label_advice import a_label_for_each_row, fix_of_positions, notes_on_absent, notes_on_classes
from loopwright.sources.labels import (
    Labels,
    LabelScan,
    check_types,
    did_you_mean,
    guess_kind,
    label_text,
    map_flag,
    never_renamed,
    ordered,
    shown_counts,
)
from loopwright.sources.opening import locate, open_all, refuse_other_names
from loopwright.sources.options import DataOptions
from loopwright.sources.plan import DataFile, DataPlan, Part, Split
from loopwright.sources.scanning import LengthHistogram, Scan, scan_table
from loopwright.sources.schema import Role, Schema
from loopwright.sources.splitting import Rows, duplicated_in, is_held_back, keep_classes_in_training
from loopwright.sources.tables import Table

MOST_FEW_ROWS = 9  # If this many rows cannot be split, they are too few, whatever their labels.

Mask = npt.NDArray[np.bool_]


def preflight(
    schema: Schema,
    *,
    data: str | Path | None = None,
    train_file: str | Path | None = None,
    validation_file: str | Path | None = None,
    test_file: str | Path | None = None,
    columns: Mapping[str, str | Sequence[str]] | None = None,
    options: DataOptions | None = None,
    say: Say | None = None,
) -> DataPlan:
    """Open the data of a task, check all of it, and return the plan.

    `data` is a file, a folder with train, validation and test files, or the id of a Hub dataset. Without a validation
    file rows are held out by a hash of their content. With only a validation or test file nothing is split, to evaluate
    a trained model on other data. For image tasks all of these may be folders of images.

    Raises:
        InputError: Any problem; nothing was written.
    """
    options = options or DataOptions()
    settings = {
        "kind": options.file_kind,
        "delimiter": options.delimiter,
        "quoting": options.quoting,
        "text_unit": options.text_unit,
    }
    try:
        if schema.has_images:
            files = {"train": train_file, "validation": validation_file, "test": test_file}
            tables = Layout(schema, options.image_dir, options.id2label, settings).open_all(data, files, say)
        else:
            opened = open_all(locate(data, train_file, validation_file, test_file), settings, say)
            tables = {split: table for split, (table, _) in opened.items()}
    except OSError as error:  # of an unreadable folder
        raise unreadable(Path(error.filename or data or train_file or "."), error) from error
    if not tables:
        raise InputError(
            "data.split",
            f"{data or train_file} has no split for training, validation or testing",
            fix="give the files with --train_file and --validation_file",
        )
    for table in tables.values():
        refuse_other_names(table)
    return _Check(schema, tables, columns or {}, options, say).run()


class _Check:
    """One preflight. `lead` is the split whose file decides columns and labels."""

    def __init__(
        self,
        schema: Schema,
        tables: dict[str, Table],
        given: Mapping[str, str | Sequence[str]],
        options: DataOptions,
        say: Say | None,
    ) -> None:
        self.schema = schema
        self.tables = tables
        self.given = given
        self.options = options
        self.say = say
        self.lead = next(iter(tables))
        self.guesses: list[str] = []
        self.warnings: list[str] = []
        self.dropped: Counter[str] = Counter()
        self.duplicates: dict[str, int] = {}
        self.columns: Columns = {}
        self.kept: dict[str, Mask] = {}
        self.scans: dict[str, Scan] = {}

    def run(self) -> DataPlan:
        self.columns, guessed = self._choose_columns()
        self.guesses += guessed
        columns = {split: self._columns_of(split) for split in self.tables}
        kind = self._label_kind()
        for split, table in self.tables.items():
            role = self.schema.label_role
            has_labels = role is not None and role.name in columns[split]
            if isinstance(table, TableOfImages):
                table.find_images(str(columns[split]["image"]))
            self.scans[split] = scan_table(
                table,
                self.schema,
                columns[split],
                kind if has_labels else None,
                self.options.label_separator,
                self.say,
                SceneOptions(self.options.ignore_index, self.options.reduce_labels),
            )
            self.warnings += table.notes
            self._handle_missing(split)
            self._handle_bad_images(split)
        scenes = self._resolve_scenes()
        labels = self._resolve_labels(kind) if scenes is None else scenes.labels
        splits = self._split(labels)
        counts = self._count_labels(splits, labels)
        parts = {
            name: [(list(self.tables)[part.file], part.rows) for part in split.parts] for name, split in splits.items()
        }
        if scenes is not None:
            counts = scenes.count(parts)
            self.warnings += scenes.warnings
            self._note_boxes(scenes)
        found = self._scene_scans()
        if labels is not None and self.schema.label_role is not None:
            self._check_classes(labels, counts, self.schema.label_role)
        return DataPlan(
            task=self.schema.task,
            files=tuple(
                DataFile(
                    table.path if table.kind == "hub" else str(Path(table.path).resolve()),
                    table.kind,
                    joined(table.sha256, found[split].sha256) if split in found else table.sha256,
                    table.num_bytes,
                    len(table),
                    table.settings(),
                )
                for split, table in self.tables.items()
            ),
            splits=splits,
            columns=self.columns,
            kinds={role.name: role.kind for role in self.schema.roles if role.name in self.columns},
            labels=labels,
            counts=counts,
            lengths=self._lengths(),
            label_range=self._label_range(labels),
            duplicates=self.duplicates,
            dropped=dict(self.dropped),
            guesses=tuple(self.guesses),
            warnings=tuple(self.warnings),
            images=describe_images(found, scenes, parts) if found else {},
            tables=dict(enumerate(self.tables.values())),
        )

    # ------------------------------------------------------------------------------------------ columns and values

    def _choose_columns(self) -> tuple[Columns, list[str]]:
        """Return the columns of the deciding file; a folder of images has fixed ones."""
        table = self.tables[self.lead]
        if not table.has_fixed_columns:
            return choose_columns(self.schema, table, self.given)
        try:
            return choose_columns(self.schema, table, {})[0], []
        except InputError as error:
            if error.code != "data.column":
                raise
            raise InputError(
                "data.annotations",
                f"{table.name} holds images and nothing that says what is in them",
                saw=[f"it was read as {table.kind}, which has: {', '.join(table.columns)}"],
                fix=f"give annotations for {self.schema.task}, or --file_kind if it was taken for something else",
            ) from error

    def _columns_of(self, split: str) -> Columns:
        """Return the columns of a split's file; label columns may be missing in a test file."""
        table = self.tables[split]
        if split == self.lead:
            return self.columns
        found: Columns = {}
        samples = sample_columns(table)
        for role in self.schema.roles:
            if role.name not in self.columns:
                continue
            column = self.columns[role.name]
            absent = [
                name
                for name in ([column] if isinstance(column, str) else column)
                if name not in samples and name not in table.columns
            ]
            if not absent:
                found[role.name] = column
            elif split == "test" and not role.is_input:
                self.warnings.append(
                    f"{table.name} has no column {absent[0]!r}: there is no {role.name} to test against"
                )
            else:
                lead = self.tables[self.lead].name
                raise InputError(
                    "data.column",
                    f"{table.name} has no column {absent[0]!r}, which is the {role.name} of {lead}",
                    saw=describe_columns(table, samples),
                    fix=f"name the columns of {table.name} as those of {lead}",
                )
        return found

    def _handle_missing(self, split: str) -> None:
        scan, table = self.scans[split], self.tables[split]
        self.kept[split] = ~scan.is_missing
        if not scan.is_missing.any():
            return
        number = int(scan.is_missing.sum())
        if self.options.missing_values == "refuse":
            saw = [
                f"{role}: {problem.num_rows:,} row{'s' if problem.num_rows > 1 else ''}, first in "
                + ", ".join(table.place(row) for row, _ in problem.first)
                for role, problem in scan.missing.items()
                if problem.num_rows
            ]
            raise InputError(
                "data.missing",
                f"{number:,} of {scan.num_rows:,} rows of {table.name} lack a value",
                saw=saw,
                fix="fill them in, or --missing_values drop",
            )
        self.dropped["missing_values"] += number
        self.warnings.append(f"{number:,} rows of {table.name} lack a value and are left out")

    def _handle_bad_images(self, split: str) -> None:
        scan, table = self.scans[split].scenes, self.tables[split]
        if scan is None:
            return
        self.warnings += scan.warnings
        if not scan.bad.number:
            return
        if self.options.bad_images == "refuse":
            raise InputError(
                "data.image",
                f"{scan.bad.number:,} of {len(table):,} images of {table.name} are missing, cut off or no images",
                saw=scan.bad.first,
                fix="put them back, or --bad_images drop",
            )
        self.kept[split] &= ~scan.is_bad
        self.dropped["bad_images"] += scan.bad.number
        self.warnings.append(f"{scan.bad.number:,} images of {table.name} cannot be read and are left out")

    # ------------------------------------------------------------------------------------------------------ scenes

    def _scene_scans(self) -> dict[str, SceneScan]:
        return {split: scan.scenes for split, scan in self.scans.items() if scan.scenes is not None}

    def _resolve_scenes(self) -> Scenes | None:
        role = self.schema.scene_role
        if role is None or role.name not in self.columns:
            return None
        options = self.options
        return Scenes(
            role,
            str(self.columns[role.name]),
            self._scene_scans(),
            options.label_names,
            options.label_map,
            options.unknown_labels,
            is_training=self.lead == "train",
        )

    def _note_boxes(self, scenes: Scenes) -> None:
        if scenes.num_unknown:
            self.dropped["unknown_labels"] += scenes.num_unknown
        for scan in scenes.scans.values():
            for reason, found in scan.dropped.items():
                self.dropped[f"boxes_{reason}"] += found.number
                what = "have no size" if reason == "zero_size" else "lie outside their image"
                self.warnings.append(
                    f"{found.number:,} boxes of {scan.table.name} {what} and are left out: {found.first[0]}"
                )
            if scan.clipped.number:
                is_doubtful = scan.clipped.number > max(scan.num_objects.sum() // 2, MOST_FEW_ROWS)
                doubt = ": boxes are x, y, width, height; are these corners?" if is_doubtful else ""
                what = f"{scan.clipped.number:,} boxes of {scan.table.name} are cut at the image's edge"
                self.warnings.append(what + doubt)

    # ------------------------------------------------------------------------------------------------------ labels

    def _label_kind(self) -> str | None:
        role = self.schema.label_role
        if role is None or role.name not in self.columns:
            return None
        column = self.columns[role.name]
        assert isinstance(column, str), "a label has one column"
        values = sample_values(self.tables[self.lead], column)
        kind = guess_kind(role, self.options.label_kind, values)
        if role.kind == "label" and self.options.label_kind is None and kind != "class":
            what = "several classes per row" if kind == "multi" else "numbers, so a number is predicted"
            self.guesses.append(f"label_kind={kind!r} (guessed: {column!r} holds {what})")
            numbers = {float(value) for value in values if is_number(value)} if kind == "float" else set()
            if 0 < len(numbers) <= 10 and all(number.is_integer() for number in numbers):
                self.warnings.append(
                    f"the numbers in {column!r} look like classes: --label_kind class if that is what they are"
                )
        return kind

    def _resolve_labels(self, kind: str | None) -> Labels | None:
        """Return the labels; refuse or drop rows with an unknown label."""
        role, options = self.schema.label_role, self.options
        if kind is None or role is None:
            return None
        column = str(self.columns[role.name])
        with_labels = {split: scan.labels for split, scan in self.scans.items() if scan.labels is not None}
        for split, scan in with_labels.items():
            check_types(scan, self.tables[split], column, options.label_kind is not None or bool(options.label_map))
        lead = with_labels[self.lead]
        found = [text for text in map(label_text, lead.texts) if text]
        is_float = role.kind == "label" and options.label_kind is None and options.label_names is None
        if kind == "class" and is_float and all(map(is_number, found)) and not _all_whole(found):
            kind = "float"  # The first rows had whole numbers, later ones do not.
            self.guesses.append(f"label_kind='float' (guessed: {column!r} holds numbers that are not whole)")
        if kind == "float":
            return Labels("float", (), {})
        mapped = {options.label_map.get(text, text) for text in found}
        stated = self.tables[self.lead].class_names(column)
        if not mapped <= set(stated):
            stated = ordered(sorted(mapped))
        names = tuple(options.label_names or self._fixed_names(role) or stated)
        labels = Labels(kind, names, dict(options.label_map), options.label_separator)
        for split, scan in with_labels.items():
            self._handle_unknown(split, scan, labels, column)
        if options.label_names is None:  # otherwise the map comes from a model
            texts = (label_text(text) for scan in with_labels.values() for text in scan.texts)
            self.warnings += never_renamed(options.label_map, filter(None, texts))
        return labels

    def _fixed_names(self, role: Role) -> tuple[str, ...]:
        """Return 0, 1, ... for a label that is the position among the texts of its row."""
        if role.kind != "position":
            return ()
        texts = next(other for other in self.schema.roles if other.kind == "texts")
        column = self.columns[texts.name]
        if not isinstance(column, str):
            return tuple(map(str, range(len(column))))
        return tuple(map(str, range(most_texts(self.tables[self.lead], column))))

    def _handle_unknown(self, split: str, scan: LabelScan, labels: Labels, column: str) -> None:
        known = set(labels.names)
        clean = [label_text(text) for text in scan.texts]
        unknown = [place for place, text in enumerate(clean) if text and labels.label_map.get(text, text) not in known]
        if not unknown:
            return
        table = self.tables[split]
        if scan.kind == "class":
            is_unknown = np.isin(scan.codes, unknown) & self.kept[split]
        else:
            is_unknown = rows_with(table, column, {clean[place] for place in unknown}, labels) & self.kept[split]
        if self.options.unknown_labels == "drop":
            number = int(is_unknown.sum())
            self.kept[split] &= ~is_unknown
            self.dropped["unknown_labels"] += number
            self.warnings.append(f"{number:,} rows of {table.name} have an unknown label and are left out")
            return
        saw = [f"known: {', '.join(labels.names[:20])}" + (" ..." if len(labels.names) > 20 else "")]
        if scan.kind == "class":
            raw_counts = {name: class_counts(self.scans[name].labels, labels.label_map) for name in self.scans}
            saw = ["   ".join(f"{name}: {shown_counts(counts)}" for name, counts in raw_counts.items() if counts)]
        role = self.schema.label_role
        is_position = role is not None and role.kind == "position"
        fixes = []
        for place in unknown[:5]:
            near = None if is_position else did_you_mean(clean[place], labels.names)
            hint = f" -- did you mean {near!r}?" if near else ""
            rows = f"{int((scan.codes == place).sum()):,} rows, " if scan.kind == "class" else ""
            rows = rows.replace("1 rows", "1 row") if rows.startswith("1 ") else rows
            saw.append(f"unknown {clean[place]!r}: {rows}first in {table.place(scan.first_rows[place])}{hint}")
            if near:
                fixes.append((clean[place], near))
        number, plural = len(unknown), "s" if len(unknown) > 1 else ""
        where = (
            f"of {table.name} never occur{'' if plural else 's'} in {self.tables[self.lead].name}"
            if split != self.lead
            else f"of {table.name} {'are' if plural else 'is'} none of the labels that there can be"
        )
        raise InputError(
            "data.labels",
            f"{number} label{plural} {where}",
            saw=saw,
            fix=fix_of_positions([text for text in clean if text], len(labels.names))
            if is_position
            else (f"{map_flag(fixes)}   or   " if fixes else "") + "--unknown_labels drop",
        )

    def _count_labels(self, splits: dict[str, Split], labels: Labels | None) -> dict[str, dict[str, int]]:
        if labels is None or labels.kind == "float" or self.schema.label_role is None:
            return {}
        column = str(self.columns[self.schema.label_role.name])
        files = list(self.tables)
        counts = {}
        for name, split in splits.items():
            total: Counter[str] = Counter()
            for part in split.parts:
                file = files[part.file]
                scan = self.scans[file].labels
                if scan is None:
                    continue
                if labels.kind == "class":
                    numbers = np.bincount(scan.codes[part.rows], minlength=len(scan.texts))
                    for text, number in zip(map(label_text, scan.texts), numbers.tolist(), strict=True):
                        if number:
                            total[labels.label_map.get(text, text)] += number
                else:
                    total += count_lists(self.tables[file], column, part.rows, labels)
            counts[name] = {label: total[label] for label in labels.names}
        return counts

    def _check_classes(self, labels: Labels, counts: dict[str, dict[str, int]], role: Role) -> None:
        has_training = self.lead == "train" and self.options.label_names is None
        if labels.kind in ("class", "tags") and len(labels.names) < 2 and has_training:
            only = labels.names[0] if labels.names else ""
            is_folder = self.tables[self.lead].has_fixed_columns
            raise InputError(
                "data.one_class",
                f"all labels of {self.tables[self.lead].name} are {only!r}",
                saw=[f"{role.flag} {self.columns[role.name]}"] if not is_folder else [],
                fix=f"{role.flag} with another column, or rows of at least two classes"
                if not is_folder
                else "put the images into a folder for each class, two at least",
            )
        if self.lead != "train" or labels.kind == "float":
            return
        if labels.kind in ("multi", "tags"):
            self.warnings += notes_on_absent(counts["train"])
        is_guessed = role.name not in self.given and not self.tables[self.lead].has_fixed_columns
        if has_training and role.kind != "position":
            self.warnings += notes_on_classes(counts["train"], str(self.columns[role.name]), is_guessed)
        if has_training and labels.kind == "class":
            rare = [name for name, number in counts["train"].items() if number < 2]
            if rare:
                what = "1 class has" if len(rare) == 1 else f"{len(rare):,} classes have"
                more = f" and {len(rare) - 5:,} more" if len(rare) > 5 else ""
                self.warnings.append(f"{what} fewer than 2 training rows: {', '.join(rare[:5])}{more}")

    # ------------------------------------------------------------------------------------------------------ splits

    def _split(self, labels: Labels | None) -> dict[str, Split]:
        files = {split: number for number, split in enumerate(self.tables)}
        rows: dict[str, Rows] = {split: np.flatnonzero(kept) for split, kept in self.kept.items()}
        for split, kept in rows.items():
            if not len(kept):
                name = self.tables[split].name
                raise InputError(
                    "data.split",
                    f"{name} has no usable rows",
                    saw=[warning for warning in self.warnings if name in warning],
                    fix=f"give rows with all values and known labels in {name}",
                )
        if "train" not in rows:
            return {split: Split(split, (Part(files[split], kept),)) for split, kept in rows.items()}
        if "validation" not in rows:
            return self._hold_back(rows, files, labels)
        parts = {split: [Part(files[split], kept)] for split, kept in rows.items()}
        training = self.scans["train"].content[rows["train"]]
        for split in ("validation", "test"):
            if split in rows:
                is_double = duplicated_in(self.scans[split].content[rows[split]], training)
                self._handle_duplicates(split, rows[split], is_double, parts, files[split])
        return {split: Split(split, tuple(found)) for split, found in parts.items()}

    def _handle_duplicates(
        self, split: str, rows: Rows, is_double: Mask, parts: dict[str, list[Part]], file: int
    ) -> None:
        number = int(is_double.sum())
        if not number:
            return
        self.duplicates[split] = number
        shown = f"{number:,} rows of {self.tables[split].name} are also in {self.tables['train'].name}"
        if split == "test" or self.options.keep_duplicates:
            self.warnings.append(f"{shown}: kept, so {split} looks better than it is")
            return
        if is_double.all():
            raise InputError(
                "data.split",
                f"all {number:,} rows of {self.tables[split].name} are also in {self.tables['train'].name}",
                saw=["nothing would be left to validate on"],
                fix="give other rows with --validation_file, leave it out, or --keep_duplicates",
            )
        self.warnings.append(f"{shown}: moved to train (--keep_duplicates leaves them)")
        parts[split] = [Part(file, rows[~is_double])]
        parts["train"].append(Part(file, rows[is_double]))

    def _hold_back(self, rows: dict[str, Rows], files: dict[str, int], labels: Labels | None) -> dict[str, Split]:
        all_rows, scan = rows["train"], self.scans["train"]
        splits = {split: Split(split, (Part(files[split], kept),)) for split, kept in rows.items()}
        held_rows = all_rows[:0]
        if self.options.validation_ratio:
            held_back = is_held_back(scan.split_key[all_rows], self.options.validation_ratio)
            if labels is not None and labels.kind == "class" and scan.labels is not None:
                codes = scan.labels.codes[all_rows]
                moved = keep_classes_in_training(held_back, codes)
                if moved:
                    names = ", ".join(repr(label_text(scan.labels.texts[code])) for code in moved[:5])
                    self.warnings.append(
                        f"all rows of {names} stay in training: there would be none left to learn from"
                    )
            held_rows = all_rows[held_back]
            role = self.schema.label_role
            if not len(held_rows) and scan.labels is not None and role is not None and len(all_rows) > MOST_FEW_ROWS:
                column, name = str(self.columns[role.name]), self.tables["train"].name
                raise a_label_for_each_row(scan.labels.texts, len(all_rows), column, name, role)
            if not len(held_rows):
                raise InputError(
                    "data.split",
                    f"{self.tables['train'].name} has too few rows to hold some back",
                    saw=[f"{len(all_rows)} rows, and no class would be left in training"],
                    fix="give more rows, or --validation_file",
                )
            splits["train"] = Split("train", (Part(files["train"], all_rows[~held_back]),))
        ordered_splits = {"train": splits["train"]}
        if len(held_rows):
            ordered_splits["validation"] = Split("validation", (Part(files["train"], held_rows),))
        if "test" in rows:
            test = self.scans["test"].content[rows["test"]]
            is_double = duplicated_in(test, scan.content[all_rows])
            self._handle_duplicates("test", rows["test"], is_double, {}, files["test"])
            ordered_splits["test"] = splits["test"]
        return ordered_splits

    # ----------------------------------------------------------------------------------------------------- numbers

    def _lengths(self) -> dict[str, dict[str, dict[str, int]]]:
        merged: dict[str, tuple[LengthHistogram, LengthHistogram]] = {}
        for scan in self.scans.values():
            for role, (characters, words) in scan.lengths.items():
                total = merged.setdefault(role, (LengthHistogram(), LengthHistogram()))
                total[0].merge(characters)
                total[1].merge(words)
        return {
            role: {"characters": characters.summary(), "words": words.summary()}
            for role, (characters, words) in merged.items()
        }

    def _label_range(self, labels: Labels | None) -> tuple[float, float] | None:
        if labels is None or labels.kind != "float":
            return None
        scans = [scan.labels for scan in self.scans.values() if scan.labels is not None]
        numbers = [float(text) for scan in scans for text in scan.texts if text.strip()]
        low = min([scan.smallest for scan in scans] + numbers)
        high = max([scan.largest for scan in scans] + numbers)
        return low, high


def _all_whole(texts: list[str]) -> bool:
    return all(text.removeprefix("-").isdecimal() for text in texts)
