"""From the scans of all files to the labels of a plan, the counts of its splits, and its warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from loopwright.errors import InputError
from loopwright.quantities import agreeing, counted
from loopwright.sources.images.masks import AUTO, GREY, MOST_VALUES, MaskValues, likely_values, value_texts
from loopwright.sources.images.names import Names
from loopwright.sources.images.scene_scan import MOST_NAMED, Findings, SceneScan
from loopwright.sources.label_checks import absent_labels, known_names, unknown_labels
from loopwright.sources.labels import MOST_LABELS, Labels, ordered
from loopwright.sources.options import DataOptions
from loopwright.sources.schema import Role

FEW_CLIPPED = 3  # More clipped boxes than this, and than half of all, or a quarter if corners fit, are suspicious.
_LEAST_GAPS = 10  # classes for each id that occurs
_MOST_NAMELESS = 1_000
_SHARP = 0.8  # of the pixels in masks whose edges are blurred
_LEFT_OUT = {
    "zero_size": "without a size",
    "outside": "outside the image",
    "unusable": "that cannot be used",
    "no_outline": "without an outline",
    "nameless": "with a category without a name",
}

Parts = Mapping[str, Sequence[tuple[str, Any]]]  # by split: (split of the file, rows)


class Scenes:
    """The content of the images of a run: classes of objects, or of pixels. The first of the `scans` decides them."""

    def __init__(
        self, role: Role, column: str, scans: Mapping[str, SceneScan], options: DataOptions, is_training: bool
    ) -> None:
        self.role = role
        self.column = column
        self.scans = scans
        self.options = options
        self.warnings: list[str] = []
        self.dropped: Counter[str] = Counter()
        self._lead = next(iter(scans.values()))
        self._is_training = is_training
        self.labels = self._mask_labels() if role.kind == "mask" else self._object_labels()

    def _object_labels(self) -> Labels:
        lead, options = self._lead, self.options
        label_map = dict(options.label_map)
        labels = Labels("class", (), label_map, dropped=tuple(options.drop_labels))
        found = {labels.rename(name) for name in lead.first_with if not labels.is_dropped(name)}
        if not found and self._is_training:
            what, saw = f"no image of {lead.table.name} has an object", [f"{len(lead.table):,} images"]
            fix = "give annotations; masked-image-modeling trains without them"
            if lead.dropped:
                what = f"no object of {lead.table.name} can be used"
                saw = [f"{found.number:,} {_LEFT_OUT[key]}: {found.first[0]}" for key, found in lead.dropped.items()]
                fix = "correct the annotations"
                if lead.table.kind == "yolo" and "outside" in lead.dropped:
                    fix = "write boxes as fractions of the image, from 0 to 1, not in pixels or percent"
            raise InputError("data.annotations", what, saw=saw, fix=fix)
        listed = lead.table.id_names(self.column).values()
        stated = dict.fromkeys(labels.rename(name) for name in listed if not labels.is_dropped(name))
        names = tuple(options.label_names or (stated if found <= set(stated) else ordered(sorted(found))))
        labels = replace(labels, names=names)
        if self._is_training:  # otherwise the map comes from a model
            occurring = [*(name for scan in self.scans.values() for name in scan.first_with), *listed]
            if error := absent_labels(label_map, labels.dropped, map(str, occurring), "object is of the class"):
                raise error
        for scan in self.scans.values():
            self._handle_unknown(scan, labels)
        return labels

    def _handle_unknown(self, scan: SceneScan, labels: Labels) -> None:
        unknown = [name for name in scan.first_with if labels.find(name) is None and not labels.is_dropped(name)]
        dropped = [name for name in scan.first_with if labels.is_dropped(name)]
        self._leave_out(scan, "drop_labels", dropped, f"of the classes {', '.join(dropped)} (--drop_labels)")
        if not unknown:
            return
        if self.options.unknown_labels == "refuse":
            first = {name: f"first in {scan.table.place(scan.first_with[name][0])}" for name in unknown[:MOST_NAMED]}
            saw, lead = [known_names(labels.names)], self._lead.table
            raise unknown_labels("class", len(unknown), scan.table, lead, labels.names, first, saw)
        self._leave_out(scan, "unknown_labels", unknown, "of an unknown class")

    def _leave_out(self, scan: SceneScan, reason: str, names: list[Any], what: str) -> None:
        number = sum(counts.get(name, 0) for counts in scan.counts.values() for name in names)
        if number:
            self.dropped[reason] += number
            self.warnings.append(f"{counted(number, 'object')} of {scan.table.name} left out: {what}")

    def note_boxes(self) -> None:
        for scan in self.scans.values():
            for reason, found in scan.dropped.items():
                self.dropped[f"boxes_{reason}"] += found.number
                boxes = f"{counted(found.number, 'box')} of {scan.table.name} {_LEFT_OUT[reason]}"
                self.warnings.append(f"left out: {boxes}: {found.first[0]}")
            number = scan.clipped.number
            if number:
                is_doubtful = number > max(scan.num_objects.sum() // (4 if scan.are_corners else 2), FEW_CLIPPED)
                doubt = ": boxes are x, y, width, height; are these corners?" if is_doubtful else ""
                boxes = f"{counted(number, 'box')} of {scan.table.name} {agreeing(number, 'is')}"
                self.warnings.append(f"{boxes} clipped at the image's edge{doubt}")

    def _mask_labels(self) -> Labels:
        lead, options = self._lead, self.options
        for flag, value in (("--label_map", options.label_map), ("--drop_labels", options.drop_labels)):
            if value:
                what = f"{flag} cannot change classes in masks, which are numbers"
                raise InputError("args.value", what, fix=f"leave out {flag}")
        if tuple(lead.options.mask_values) == (AUTO,):
            values = self._find_values()
            for scan in self.scans.values():
                scan.apply(values)
        self._note_masks()
        stated = self._stated()
        if stated and max(stated) >= MOST_LABELS and options.label_names is None:
            number, fix = max(stated), "number the classes 0, 1, 2, ... there and in the masks"
            what = f"{lead.table.names_file} names class {number:,}, but at most {MOST_LABELS:,} classes are possible"
            raise InputError("data.classes", what, saw=[repr(stated[number])], fix=fix)
        largest = max(stated, default=max((self._class(number) for number in lead.first_with), default=0))
        if not stated and options.label_names is None:
            self._check_gaps(largest)
        names = tuple(options.label_names or (stated.get(place, str(place)) for place in range(largest + 1)))
        for scan in self.scans.values():
            self._check_names(scan, names)
            self._check_ids(scan, len(names), stated)
        has_ignored = any(options.ignore_index in found for found in lead.counts.values())
        has_one = len(names) < 2 or (len(lead.first_with) < 2 and has_ignored)
        if has_one and self._is_training and options.label_names is None:
            raise self._one_class()
        return Labels("class", names, {})

    def _find_values(self) -> MaskValues:
        """Return the values in the masks of all files, for `--mask_values auto`."""
        are_colors = any(scan.colored for scan in self.scans.values())
        totals: Counter[int] = Counter()
        for scan in self.scans.values():
            for row, found in scan.counts.items():
                scale = GREY if are_colors and row not in scan.colored else 1
                totals.update({number * scale: pixels for number, pixels in found.items()})
        palettes = [name for scan in self.scans.values() for name in scan.palettes.first]
        if 2 <= len(totals) <= MOST_VALUES and not (are_colors and palettes):
            numbers = tuple(sorted(totals))
            return MaskValues(numbers, tuple(value_texts(numbers, are_colors)), are_colors)
        what = f"masks of {self._lead.table.name} hold {len(totals):,} different values"
        what += f", which is not 2 to {MOST_VALUES}" if not palettes else ", palettes among colours"
        likely = value_texts(likely_values(totals, are_colors), are_colors)
        saw = [f"frequent ones: {', '.join(likely[:8])}", *palettes]
        saw.append("--mask_values gives other pixels the nearest of its values")
        fix = f"--mask_values {','.join(likely)}"
        fix = fix if len(likely) > 1 else "give masks with two values or more, as PNG"
        raise InputError("data.masks", what, saw=saw, fix=fix)

    def _stated(self) -> Names:
        """Return the names of classes by number; with `--mask_values` a file may give them by value."""
        stated, values = self._lead.table.id_names(self.column), self._lead.options.values
        if values is None:
            return stated
        if stated and set(values.numbers) == set(stated):
            return {place: stated[number] for place, number in enumerate(values.numbers)}
        has_names = values.names != tuple(value_texts(values.numbers, values.are_colors))
        return dict(enumerate(values.names)) if has_names or not stated else stated

    def _note_masks(self) -> None:
        for scan in self.scans.values():
            if scan.scaled.number:
                masks = f"{counted(scan.scaled.number, 'mask')} of {scan.table.name}"
                what = f"{masks} {agreeing(scan.scaled.number, 'is')} scaled to the size of the image"
                self.warnings.append(f"{what}: {scan.scaled.first[0]}")
            if scan.num_other_pixels:
                share = f"{scan.num_other_pixels / scan.num_pixels:.2%} of the pixels in masks of {scan.table.name}"
                self.warnings.append(f"{share} have other values than --mask_values and take the nearest")

    def _check_gaps(self, largest: int) -> None:
        """Note, or refuse, ids that are probably not class numbers: a few, with wide gaps."""
        ids, table = sorted(self._lead.first_with), self._lead.table
        totals = sum(map(Counter, self._lead.counts.values()), Counter[int]())
        likely = likely_values(totals, are_colors=False)
        if len(ids) > MOST_VALUES and sum(totals[value] for value in likely) > _SHARP * totals.total():
            blurred = f"masks of {table.name} hold {len(ids)} ids, nearly all pixels {', '.join(map(str, likely))}"
            self.warnings.append(f"{blurred}: if edges are blurred, --mask_values {','.join(map(str, likely))}")
        if not ids or largest < _LEAST_GAPS * len(ids):
            return
        if largest >= _MOST_NAMELESS:
            what = f"masks of {table.name} hold {len(ids):,} ids up to {ids[-1]:,}: too many classes without names"
            saw = [f"ids: {', '.join(map(str, ids[:10]))}" + (" ..." if len(ids) > 10 else "")]
            fix = "--mask_values auto" if len(ids) <= MOST_VALUES else "write masks with the ids 0, 1, 2, ..."
            fix += "   or   give the names of all classes in id2label.json"
            raise InputError("data.classes", what, saw=saw, fix=fix)
        first = table.place(self._lead.first_with[ids[-1]][0])
        found = f"masks of {table.name} hold {len(ids)} different ids, the largest is {ids[-1]} (first: {first})"
        meaning = f"ids are the numbers of classes, from 0 on, so there are {largest + 1} classes"
        meaning += f"; --mask_values auto makes a class of each value: {len(ids)} classes"
        self.warnings.append(f"{found}: {meaning}")

    def _class(self, number: int) -> int:
        found = self._lead.options.class_of(number)
        assert found is not None, "ignored ids are not counted"
        return found

    def _check_names(self, scan: SceneScan, names: tuple[str, ...]) -> None:
        own = scan.table.id_names(self.column)
        other = [number for number, name in own.items() if number < len(names) and names[number] != name]
        if other:
            what = f"{scan.table.names_file or scan.table.name} numbers the classes differently"
            saw = [f"class {number} is {own[number]!r} there and {names[number]!r} here" for number in other[:5]]
            raise InputError("data.labels", what, saw=saw, fix="give masks with the same numbers, and the same names")

    def _check_ids(self, scan: SceneScan, num_classes: int, stated: Names) -> None:
        names_file, options = scan.table.names_file, scan.options
        for number, (row, pixels) in sorted(scan.first_with.items()):
            place = self._class(number)
            is_named = not stated or self.options.label_names is not None or place in stated
            if 0 <= place < num_classes and is_named:
                continue
            known = f"there are {num_classes}" if place >= num_classes else f"{names_file} has no name for it"
            what = f"masks contain class {number} but {known} (first: {scan.table.place(row)}, {pixels:,} pixels)"
            saw = [f"ignore_index {options.ignore_index}, reduce_labels {str(options.reduce_labels).lower()}"]
            fix = f"--ignore_index {number}   or   add names to {names_file or 'id2label.json'}"
            raise InputError("data.classes", what, saw=saw, fix=fix)

    def _one_class(self) -> InputError:
        totals = sum(map(Counter, self._lead.counts.values()), Counter[int]())
        fix = "give masks with two classes or more"
        if 2 <= len(totals) <= MOST_VALUES and not self._lead.options.mask_values:
            fix = f"--mask_values {','.join(map(str, sorted(totals)))}"
        what = f"all pixels in the masks of {self._lead.table.name} are of one class"
        if ignored := totals[self._lead.options.ignore_index]:
            what += f", except {ignored:,} that are {self._lead.options.ignore_index}, which is ignored"
        return InputError("data.one_class", what, saw=[f"pixels by id: {dict(sorted(totals.items()))}"], fix=fix)

    def count(self, parts: Parts) -> dict[str, dict[str, int]]:
        counts: dict[str, dict[str, int]] = {}
        for split, pieces in parts.items():
            total: Counter[Any] = Counter()
            for file, rows in pieces:
                found = self.scans[file].counts
                for row in rows.tolist():
                    total.update(found.get(row, {}))
            counts[split] = dict.fromkeys(self.labels.names, 0)
            for key, number in total.items():
                place = self._lead.options.class_of(key) if self.role.kind == "mask" else self.labels.find(key)
                if place is not None and place < len(self.labels.names):
                    counts[split][self.labels.names[place]] += number
        never = [name for name, number in counts.get("train", {}).items() if not number]
        if never and self.options.label_names is None:
            what = "pixels" if self.role.kind == "mask" else "objects"
            shown = ", ".join(never[:MOST_NAMED])
            self.warnings.append(f"{counted(len(never), 'class', 'has')} no {what} in training: {shown}")
        return counts

    def class_ids(self) -> list[int | None]:
        """Return the number of each class in the deciding file, by its index among the labels."""
        ids: dict[str, int] = {}
        for number, name in self._lead.table.id_names(self.column).items():
            ids.setdefault(self.labels.rename(name), number)
        return [ids.get(name) for name in self.labels.names]


def describe_images(scans: Mapping[str, SceneScan], scenes: Scenes | None, parts: Parts) -> dict[str, Any]:
    sizes = np.concatenate([scan.sizes[~scan.is_bad] for scan in scans.values()])
    found: dict[str, Any] = {
        "sizes": {
            name: {"min": int(side.min()), "p50": int(np.median(side)), "max": int(side.max())}
            for name, side in zip(("width", "height"), sizes.T, strict=True)
            if len(side)
        },
        "turned": sum(scan.num_turned for scan in scans.values()),
        "bad": _merged(scan.bad for scan in scans.values()),
    }
    if scenes is None:
        return found
    found |= next(iter(scans.values())).options._asdict()
    if scenes.role.kind == "mask":
        return found | {"masks_scanned": sum(scan.num_masks_scanned for scan in scans.values())}
    numbers = {
        split: np.concatenate([scans[file].num_objects[rows] for file, rows in pieces])
        for split, pieces in parts.items()
    }
    reasons = sorted({reason for scan in scans.values() for reason in scan.dropped})
    return found | {
        "objects": {split: int(number.sum()) for split, number in numbers.items()},
        "most_objects": max((int(number.max()) for number in numbers.values() if len(number)), default=0),
        "empty": {split: int((number == 0).sum()) for split, number in numbers.items()},
        "clipped_boxes": _merged(scan.clipped for scan in scans.values()),
        "dropped_boxes": {
            reason: _merged(scan.dropped[reason] for scan in scans.values() if reason in scan.dropped)
            for reason in reasons
        },
        "class_ids": scenes.class_ids(),
    }


def _merged(findings: Iterable[Findings]) -> dict[str, Any]:
    found = list(findings)
    first = [text for each in found for text in each.first]
    return {"number": sum(each.number for each in found), "first": first[:MOST_NAMED]}
