"""From the scans of all files to the labels of a plan, the counts of its splits, and its warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from loopwright.errors import InputError
from loopwright.sources.images.masks import class_of
from loopwright.sources.images.names import Names
from loopwright.sources.images.scene_scan import MOST_NAMED, Findings, SceneScan
from loopwright.sources.label_checks import known_names, never_renamed, unknown_labels
from loopwright.sources.labels import MOST_LABELS, Labels, ordered
from loopwright.sources.options import DataOptions
from loopwright.sources.schema import Role

MOST_CLIPPED = 9  # More clipped boxes than this, and than half of all, are suspicious.
_LEAST_GAPS = 10  # classes for each id that occurs
_MOST_NAMELESS = 1_000

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
        found = {label_map.get(name, name) for name in lead.first_with}
        if not found and self._is_training:
            what, saw = f"no image of {lead.table.name} has an object", [f"{len(lead.table):,} images"]
            fix = "give annotations; masked-image-modeling trains without them"
            raise InputError("data.annotations", what, saw=saw, fix=fix)
        listed = lead.table.id_names(self.column).values()
        stated = dict.fromkeys(label_map.get(name, name) for name in listed)
        names = tuple(options.label_names or (stated if found <= set(stated) else ordered(sorted(found))))
        labels = Labels("class", names, label_map)
        for scan in self.scans.values():
            self._handle_unknown(scan, labels)
        if options.label_names is None:  # otherwise the map comes from a model
            occurring = [*(name for scan in self.scans.values() for name in scan.first_with), *listed]
            self.warnings += never_renamed(label_map, map(str, occurring), "object is of the class")
        return labels

    def _handle_unknown(self, scan: SceneScan, labels: Labels) -> None:
        unknown = [name for name in scan.first_with if labels.find(name) is None]
        if not unknown:
            return
        if self.options.unknown_labels == "refuse":
            first = {name: f"first in {scan.table.place(scan.first_with[name][0])}" for name in unknown[:MOST_NAMED]}
            saw, lead = [known_names(labels.names)], self._lead.table
            raise unknown_labels("class", len(unknown), scan.table, lead, labels.names, first, saw)
        number = sum(counts.get(name, 0) for counts in scan.counts.values() for name in unknown)
        self.dropped["unknown_labels"] += number
        self.warnings.append(f"{number:,} objects of {scan.table.name} are of an unknown class and are left out")

    def note_boxes(self) -> None:
        for scan in self.scans.values():
            for reason, found in scan.dropped.items():
                self.dropped[f"boxes_{reason}"] += found.number
                what = "have no size" if reason == "zero_size" else "lie outside their image"
                boxes = f"{found.number:,} boxes of {scan.table.name}"
                self.warnings.append(f"{boxes} {what} and are left out: {found.first[0]}")
            number = scan.clipped.number
            if number:
                is_doubtful = number > max(scan.num_objects.sum() // 2, MOST_CLIPPED)
                doubt = ": boxes are x, y, width, height; are these corners?" if is_doubtful else ""
                self.warnings.append(f"{number:,} boxes of {scan.table.name} are clipped at the image's edge{doubt}")

    def _mask_labels(self) -> Labels:
        lead, options = self._lead, self.options
        if options.label_map:
            what = "--label_map cannot rename classes in masks, which are numbers"
            raise InputError("args.value", what, fix="name the numbers in id2label.json")
        stated = lead.table.id_names(self.column)
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
        if len(names) < 2 and self._is_training and options.label_names is None:
            raise self._one_class()
        return Labels("class", names, {})

    def _check_gaps(self, largest: int) -> None:
        """Note, or refuse, ids that are probably not class numbers: a few, with wide gaps."""
        ids, table = sorted(self._lead.first_with), self._lead.table
        if not ids or largest < _LEAST_GAPS * len(ids):
            return
        if largest >= _MOST_NAMELESS:
            what = f"masks of {table.name} hold {len(ids):,} ids up to {ids[-1]:,}: too many classes without names"
            saw = [f"ids: {', '.join(map(str, ids[:10]))}" + (" ..." if len(ids) > 10 else "")]
            fix = "write masks with the ids 0, 1, 2, ...; or give the names of all classes in id2label.json"
            raise InputError("data.classes", what, saw=saw, fix=fix)
        first = table.place(self._lead.first_with[ids[-1]][0])
        found = f"masks of {table.name} hold {len(ids)} different ids, the largest is {ids[-1]} (first: {first})"
        meaning = f"ids are the numbers of classes, from 0 on, so there are {largest + 1} classes"
        self.warnings.append(f"{found}: {meaning}")

    def _class(self, number: int) -> int:
        found = class_of(number, *self._lead.options)
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
            fix = f"--ignore_index {number}   or add names to {names_file or 'id2label.json'}"
            raise InputError("data.classes", what, saw=saw, fix=fix)

    def _one_class(self) -> InputError:
        totals = sum(map(Counter, self._lead.counts.values()), Counter[int]())
        index = self._lead.options.ignore_index
        fix = "give masks with two classes or more"
        if totals[index]:
            ignored = f"{totals[index]:,} pixels are {index}, which is ignored"
            fix = f"{ignored}: --ignore_index -100 to count all ids, or masks with two classes"
        what = f"all pixels in the masks of {self._lead.table.name} are of one class"
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
                place = class_of(key, *self._lead.options) if self.role.kind == "mask" else self.labels.find(key)
                if place is not None and place < len(self.labels.names):
                    counts[split][self.labels.names[place]] += number
        never = [name for name, number in counts.get("train", {}).items() if not number]
        if never and self.options.label_names is None:
            what = "pixels" if self.role.kind == "mask" else "objects"
            self.warnings.append(f"{len(never)} classes have no {what} in training: {', '.join(never[:MOST_NAMED])}")
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
