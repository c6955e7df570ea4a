"""The splits of a preflight: which rows are held out, and what training and evaluation share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from loopwright.errors import InputError
from loopwright.quantities import counted
from loopwright.sources import label_checks, splits
from loopwright.sources.column_roles import Columns, column_names
from loopwright.sources.labels import Labels, cell_of, label_text
from loopwright.sources.locations import SPLITS
from loopwright.sources.options import DataOptions
from loopwright.sources.plan import Part, Split
from loopwright.sources.scan import Scan
from loopwright.sources.schema import GROUP, Schema
from loopwright.sources.splits import Rows, duplicated_in, pairs_that_differ
from loopwright.sources.tables import Table, value_at

MOST_FEW_ROWS = 9  # If this many rows cannot be split, they are too few, whatever their labels.
FEWEST_EVALUATED = 5
_NUM_EXAMPLES = 2


@dataclass
class Partition:
    """Splits the usable rows of the files, by split; adds to `warnings`."""

    schema: Schema
    tables: Mapping[str, Table]
    columns: Columns
    options: DataOptions
    scans: Mapping[str, Scan]
    rows: dict[str, Rows]
    warnings: list[str]
    duplicates: dict[str, int] = field(default_factory=dict)  # rows of a split that are also in training
    dropped: Counter[str] = field(default_factory=Counter)  # rows by reason

    def split(self, labels: Labels | None) -> dict[str, Split]:
        parts = {split: [Part(number, rows)] for number, (split, rows) in enumerate(self.rows.items())}
        if "train" in parts and "validation" not in parts and self.options.validation_ratio:
            sides = self._hold_back(labels)
            parts["train"], parts["validation"] = ([replace(parts["train"][0], rows=side)] for side in sides)
        for split in ("validation", "test"):
            if "train" in self.rows and split in self.rows:
                self._check_groups(split)
                self._handle_duplicates(split, parts)
        if labels is not None and labels.kind != "float" and self.schema.label_role is not None:
            self._note_contradictions()
        self.splits = {split: Split(split, tuple(parts[split])) for split in SPLITS if split in parts}
        return self.splits

    def _hold_back(self, labels: Labels | None) -> tuple[Rows, Rows]:
        """Return the rows for training and those held out for validation; each class keeps rows to learn from."""
        scan, rows, name = self.scans["train"], self.rows["train"], self.tables["train"].name
        if (groups := scan.keys.get("group")) is None:
            keys = splits.split_keys(scan.keys["split"][rows], scan.keys["near_split"][rows])
            held_back = splits.is_held_back(keys, self.options.validation_ratio)
        else:
            keys = groups[rows]
            if len(np.unique(keys)) < 2:
                what, fix = f"all rows of {name} are in one group", f"leave out {GROUP.flag}"
                raise InputError("data.groups", what, saw=[f"column {self.columns[GROUP.name]!r}"], fix=fix)
            held_back = splits.are_groups_held_back(keys, self.options.validation_ratio)
        if labels is not None and labels.kind == "class" and scan.labels is not None:
            texts = [labels.rename(label_text(text)) for text in scan.labels.texts]
            firsts = {text: place for place, text in reversed([*enumerate(texts)])}  # renamed labels may be one class
            codes = np.array([firsts[text] for text in texts], np.int32)[scan.labels.codes[rows]]
            moved = splits.keep_classes_in_training(held_back, codes, keys)
            if moved:
                names = ", ".join(repr(texts[code]) for code in moved[:5])
                self.warnings.append(f"all rows of {names} stay in training: there would be none left to learn from")
        if groups is not None:
            return self._without_near_duplicates(rows[~held_back], rows[held_back])
        if held_back.any():
            return rows[~held_back], rows[held_back]
        if scan.labels is not None and len(rows) > MOST_FEW_ROWS:
            raise label_checks.unique_labels(scan.labels, len(rows))
        saw = [f"{len(rows)} rows, and no class would be left in training"]
        raise InputError("data.split", f"{name} has too few rows to hold some out", saw=saw, fix=f"add rows to {name}")

    def _without_near_duplicates(self, training: Rows, validation: Rows) -> tuple[Rows, Rows]:
        """Leave out the rows of held-out groups that have a near-duplicate in a training group."""
        near = self.scans["train"].keys["near_split"]
        is_double = duplicated_in(near[validation], near[training]) & (not self.options.keep_duplicates)
        number = int(is_double.sum())
        if number == len(validation):
            what = f"no group of {self.tables['train'].name} can be held out for validation"
            saw = ["its classes would be missing in training, or training has all of its inputs"]
            raise InputError("data.groups", what, saw=saw, fix=f"leave out {GROUP.flag}")
        if number:
            self.dropped["near_duplicates"] += number
            what = "of held-out groups with a near-duplicate in training left out of validation"
            self.warnings.append(f"{counted(number, 'row')} {what} (--keep_duplicates leaves them)")
        return training, validation[~is_double]

    def _check_groups(self, split: str) -> None:
        if "group" not in self.scans[split].keys:
            return
        groups, training = (self.scans[each].keys["group"][self.rows[each]] for each in (split, "train"))
        is_shared, table, column = duplicated_in(groups, training), self.tables[split], str(self.columns[GROUP.name])
        shared, firsts = np.unique(groups[is_shared], return_index=True)
        if not len(shared):
            return
        first = np.sort(self.rows[split][is_shared][firsts])[: label_checks.MOST_NAMED].tolist()
        saw = [f"{column} {value_at(table[row], column)!r}, first in {table.place(row)}" for row in first]
        what = f"{len(shared):,} of {len(np.unique(groups)):,} groups of {table.name} are also in"
        fix = f"leave out {GROUP.flag}   or   put all rows of a group into one file"
        raise InputError("data.groups", f"{what} {self.tables['train'].name}", saw=saw, fix=fix)

    def _handle_duplicates(self, split: str, parts: dict[str, list[Part]]) -> None:
        rows, training, name = self.rows[split], self.rows["train"], self.tables["train"].name
        keys, known = self.scans[split].keys, self.scans["train"].keys
        is_double = duplicated_in(keys["content"][rows], known["content"][training])
        is_near = duplicated_in(keys["near"][rows], known["near"][training]) & ~is_double

        def examples(key: str, is_shown: splits.Mask) -> str:
            shown = []
            for row in rows[is_shown][:_NUM_EXAMPLES].tolist():
                other = int(training[np.argmax(known[key][training] == keys[key][row])])
                shown.append(f"{self._shown(split, row)} and {self._shown('train', other)}")
            return "; ".join(shown)

        if is_near.any():
            what = f"near-duplicates of {name} in {self.tables[split].name}: {counted(int(is_near.sum()), 'row')}"
            alike = f"the same except for case, blanks and punctuation, so {split} looks better than it is"
            self.warnings.append(f"{what}, {alike}: {examples('near', is_near)}")
        number = int(is_double.sum())
        if not number:
            return
        self.duplicates[split] = number
        what = f"{counted(number, 'row')} of {self.tables[split].name} {'is' if number == 1 else 'are'} also in {name}"
        if split == "test" or self.options.keep_duplicates:
            self.warnings.append(f"{what}: kept, so {split} looks better than it is: {examples('content', is_double)}")
        elif is_double.all():
            places = [f"{each}: {self.tables[each].path}" for each in ("train", split)]
            saw = ["nothing would be left to validate on", *places]
            fix = f"--keep_duplicates   or   give other rows for {split}"
            raise InputError("data.split", f"all {what}", saw=saw, fix=fix)
        else:
            has_groups = "group" in keys  # then the other rows of their groups are in validation
            done = "left out" if has_groups else "moved to train"
            self.warnings.append(f"{what}: {done} (--keep_duplicates leaves them): {examples('content', is_double)}")
            (part,) = parts[split]
            parts[split] = [replace(part, rows=rows[~is_double])]
            parts["train"] += [] if has_groups else [replace(part, rows=rows[is_double])]

    def _note_contradictions(self) -> None:
        names = [split for split in self.rows if "label" in self.scans[split].keys]
        keys = [[self.scans[each].keys[key][self.rows[each]] for each in names] for key in ("near", "label")]
        files = np.repeat(np.arange(len(names)), [*map(len, keys[0])])
        rows = np.concatenate([self.rows[split] for split in names])
        pairs = np.stack(pairs_that_differ(*map(np.concatenate, keys)), axis=1)
        if len(pairs):
            found = ((self._shown(names[files[k]], int(rows[k]), has_label=True) for k in pair) for pair in pairs)
            shown = "; ".join(map(" and ".join, islice(found, _NUM_EXAMPLES)))
            what = "1 input has" if len(pairs) == 1 else f"{len(pairs):,} inputs have"
            self.warnings.append(f"{what} several labels: {shown}")

    def note_evaluations(self, counts: Mapping[str, Mapping[str, int]], kind: str | None) -> None:
        role = self.schema.label_role
        for split in [name for name in self.splits if name != "train" and "validation" in self.splits]:
            (part,) = self.splits[split].parts
            keys, number = list(self.scans.values())[part.file].keys, len(part.rows)
            if role is not None and role.name in self.columns and "label" not in keys:
                continue  # a test file without labels
            if number < FEWEST_EVALUATED:
                self.warnings.append(f"{split} has {counted(number, 'row')}, too few for a reliable metric")
            elif "label" in keys and (
                len(np.unique(keys["label"][part.rows])) == 1
                or (kind == "tags" and sum(map(bool, counts[split].values())) == 1)
            ):
                self.warnings.append(f"all labels of {split} are the same, so its metrics say little")

    def _shown(self, split: str, row: int, has_label: bool = False) -> str:
        """Return a row for a note: its first input, its label if asked for, and its place."""
        table = self.tables[split]
        roles = [next(role for role in self.schema.roles if role.is_input)]
        roles += [role for role in self.schema.roles if role.is_label and has_label]
        found = [cell_of(table[row], column_names(self.columns[role.name]), role.kind) for role in roles]
        texts = [repr(label_checks.shortened(str(value))) for value in found if not isinstance(value, bytes | dict)]
        return f"{': '.join(texts)} ({table.place(row)} of {table.name})".strip()
