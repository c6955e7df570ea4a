"""From the scans of all files to the labels of a plan, the counts of its splits, and its warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loopwright.errors import InputError
from loopwright.sources.images.masks import class_of
from loopwright.sources.images.names import Names
from loopwright.sources.images.scanning import SceneScan
from loopwright.sources.labels import MOST_LABELS, Labels, did_you_mean, map_flag, never_renamed, ordered
from loopwright.sources.schema import Role

_MOST_NAMED = 5
_LEAST_GAPS = 10  # classes for each id that occurs
_MOST_NAMELESS = 1_000


class Scenes:
    """The content of the images of a run: classes of objects, or of pixels.

    Args:
        role: The role of the objects or masks.
        scans: By split; the first decides the classes.
        label_names, label_map, unknown_labels: As in `DataOptions`.
        is_training: Whether the first split is trained on.
    """

    def __init__(
        self,
        role: Role,
        column: str,
        scans: Mapping[str, SceneScan],
        label_names: Sequence[str] | None,
        label_map: Mapping[str, str],
        unknown_labels: str,
        is_training: bool,
    ) -> None:
        self.role = role
        self.column = column
        self.scans = dict(scans)
        self.label_map = dict(label_map)
        self.warnings: list[str] = []
        self.num_unknown = 0
        self._has_given_names = label_names is not None
        self._lead = next(iter(scans))
        if role.kind == "mask":
            if label_map:
                raise InputError(
                    "args.value",
                    "--label_map cannot rename classes in masks, which are numbers",
                    fix="name the numbers in id2label.json",
                )
            self.labels = self._mask_labels(label_names, is_training)
        else:
            self.labels = self._object_labels(label_names, unknown_labels, is_training)

    # ----------------------------------------------------------------------------------------------------- objects

    def _object_labels(self, label_names: Sequence[str] | None, unknown_labels: str, is_training: bool) -> Labels:
        lead = self.scans[self._lead]
        found = {self.label_map.get(name, name) for name in lead.first_with}
        if not found and is_training:
            raise InputError(
                "data.annotations",
                f"no image of {lead.table.name} has an object",
                saw=[f"{len(lead.table):,} images"],
                fix="give annotations; to train without them there is masked-image-modeling",
            )
        listed = lead.table.id_names(self.column).values()
        stated = dict.fromkeys(self.label_map.get(name, name) for name in listed)
        names = tuple(label_names or (stated if found <= set(stated) else ordered(sorted(found))))
        for split, scan in self.scans.items():
            self._check_unknown(split, scan, names, unknown_labels)
        if label_names is None:  # otherwise the map comes from a model
            occurring = [*(name for scan in self.scans.values() for name in scan.first_with), *listed]
            self.warnings += never_renamed(self.label_map, map(str, occurring), "object is of the class")
        return Labels("class", names, self.label_map)

    def _check_unknown(self, split: str, scan: SceneScan, names: tuple[str, ...], unknown_labels: str) -> None:
        unknown = [name for name in scan.first_with if self.label_map.get(name, name) not in names]
        if not unknown:
            return
        number = sum(counts.get(name, 0) for counts in scan.counts.values() for name in unknown)
        if unknown_labels == "drop":
            self.num_unknown += number
            self.warnings.append(f"{number:,} objects of {scan.table.name} are of an unknown class and are left out")
            return
        saw = [f"known: {', '.join(names[:20])}" + (" ..." if len(names) > 20 else "")]
        fixes = []
        for name in unknown[:_MOST_NAMED]:
            near = did_you_mean(name, names)
            hint = f" -- did you mean {near!r}?" if near else ""
            saw.append(f"unknown {name!r}: first in {scan.table.place(scan.first_with[name][0])}{hint}")
            fixes += [(name, near)] if near else []
        raise InputError(
            "data.labels",
            f"{len(unknown)} class{'es' if len(unknown) > 1 else ''} of {scan.table.name} never "
            f"occur{'' if len(unknown) > 1 else 's'} in {self.scans[self._lead].table.name}"
            if split != self._lead
            else f"{len(unknown)} classes of {scan.table.name} are none of those that there can be",
            saw=saw,
            fix=(f"{map_flag(fixes)}   or   " if fixes else "") + "--unknown_labels drop",
        )

    # ------------------------------------------------------------------------------------------------------- masks

    def _mask_labels(self, label_names: Sequence[str] | None, is_training: bool) -> Labels:
        lead = self.scans[self._lead]
        stated = lead.table.id_names(self.column)
        largest = max((self._class(number) for number in lead.first_with), default=0)
        if label_names is not None:
            names = tuple(label_names)
        elif stated and max(stated) >= MOST_LABELS:
            raise InputError(
                "data.classes",
                f"{lead.table.names_file} has a name for class {max(stated):,}: there can be {MOST_LABELS:,} classes",
                saw=[f"{stated[max(stated)]!r}"],
                fix="number the classes 0, 1, 2, ... there and in the masks",
            )
        elif stated:
            names = _filled(stated, max(stated) + 1)
        else:
            self._check_gaps(lead, largest)
            names = _filled({}, largest + 1)
        for scan in self.scans.values():
            self._check_names(scan, names)
            self._check_ids(scan, len(names), stated)
        if len(names) < 2 and is_training and label_names is None:
            self._refuse_one_class(lead)
        return Labels("class", names, {})

    def _check_gaps(self, lead: SceneScan, largest: int) -> None:
        """Note, or refuse, ids that are probably not class numbers: a few, with wide gaps."""
        ids = sorted(lead.first_with)
        if not ids or largest < _LEAST_GAPS * len(ids):
            return
        if largest < _MOST_NAMELESS:
            first = lead.table.place(lead.first_with[ids[-1]][0])
            self.warnings.append(
                f"masks of {lead.table.name} hold {len(ids)} different ids, the largest is {ids[-1]} (first: {first}): "
                f"ids are the numbers of classes, from 0 on, so there are {largest + 1} classes"
            )
            return
        raise InputError(
            "data.classes",
            f"masks of {lead.table.name} hold {len(ids):,} ids up to {ids[-1]:,}: too many classes without names",
            saw=[f"ids: {', '.join(map(str, ids[:10]))}" + (" ..." if len(ids) > 10 else "")],
            fix="write masks with the ids 0, 1, 2, ...; or give the names of all classes in id2label.json",
        )

    def _class(self, number: int) -> int:
        found = class_of(number, *self.scans[self._lead].options)
        assert found is not None, "ignored ids are not noted"
        return found

    def _check_names(self, scan: SceneScan, names: tuple[str, ...]) -> None:
        own = scan.table.id_names(self.column)
        other = [number for number, name in own.items() if number < len(names) and names[number] != name]
        if own and other:
            raise InputError(
                "data.labels",
                f"{scan.table.names_file or scan.table.name} numbers the classes in another way",
                saw=[f"class {number} is {own[number]!r} there and {names[number]!r} here" for number in other[:5]],
                fix="give masks with the same numbers, and the same names",
            )

    def _check_ids(self, scan: SceneScan, num_classes: int, stated: Names) -> None:
        for number, (row, pixels) in sorted(scan.first_with.items()):
            place = self._class(number)
            is_nameless = bool(stated) and not self._has_given_names and place not in stated
            if not 0 <= place < num_classes or is_nameless:
                options = scan.options
                named = (
                    f"there are {num_classes}"
                    if place >= num_classes
                    else f"{scan.table.names_file} has no name for it"
                )
                raise InputError(
                    "data.classes",
                    f"masks contain class {number} but {named} (first: {scan.table.place(row)}, {pixels:,} pixels)",
                    saw=[f"ignore_index {options.ignore_index}, reduce_labels {str(options.reduce_labels).lower()}"],
                    fix=f"--ignore_index {number}   or add names to {scan.table.names_file or 'id2label.json'}",
                )

    def _refuse_one_class(self, lead: SceneScan) -> None:
        totals: Counter[int] = Counter()
        for counts in lead.counts.values():
            totals.update(counts)
        index = lead.options.ignore_index
        ignored = f"{totals[index]:,} pixels are {index}, which is ignored: "
        raise InputError(
            "data.one_class",
            f"all pixels in the masks of {lead.table.name} are of one class",
            saw=[f"pixels by id: {dict(sorted(totals.items()))}"],
            fix=f"{ignored}--ignore_index -100 to count all ids, or masks with two classes"
            if totals[index]
            else "give masks with two classes or more",
        )

    # ----------------------------------------------------------------------------------------------------- numbers

    def count(self, parts: Mapping[str, Sequence[tuple[str, Any]]]) -> dict[str, dict[str, int]]:
        """Return the number of objects, or of pixels in scanned masks, of each class, by split.

        `parts` maps each split to its (split of the file, rows).
        """
        counts = {}
        for split, pieces in parts.items():
            total: Counter[Any] = Counter()
            for file, rows in pieces:
                found = self.scans[file].counts
                for row in rows.tolist():
                    total.update(found.get(row, {}))
            counts[split] = self._by_name(total)
        training = counts.get("train")
        if training is not None and not self._has_given_names:
            never = [name for name, number in training.items() if not number]
            if never:
                what = "pixels" if self.role.kind == "mask" else "objects"
                self.warnings.append(f"{len(never)} classes have no {what} in training: {', '.join(never[:5])}")
        return counts

    def _by_name(self, total: Counter[Any]) -> dict[str, int]:
        names = self.labels.names
        counts = dict.fromkeys(names, 0)
        for key, number in total.items():
            if self.role.kind == "mask":
                place = class_of(key, *self.scans[self._lead].options)
                name = names[place] if place is not None and place < len(names) else None
            else:
                name = self.label_map.get(key, key)
            if name in counts:
                counts[str(name)] += number
        return counts

    def class_ids(self) -> list[int | None]:
        """Return the number of each class in the deciding file, by its index among the labels."""
        ids: dict[str, int] = {}
        for number, name in self.scans[self._lead].table.id_names(self.column).items():
            ids.setdefault(self.label_map.get(name, name), number)
        return [ids.get(name) for name in self.labels.names]


def _filled(names: Names, number: int) -> tuple[str, ...]:
    """Return a name for each of this many classes, by default its number."""
    return tuple(names.get(place, str(place)) for place in range(number))


def describe_images(
    scans: Mapping[str, SceneScan], scenes: Scenes | None, parts: Mapping[str, Sequence[tuple[str, Any]]]
) -> dict[str, Any]:
    """Return the image section of data.json: sizes, objects, dropped boxes, and the reading of masks."""
    sizes = np.concatenate([scan.sizes[~scan.is_bad] for scan in scans.values()])
    found: dict[str, Any] = {
        "sizes": {
            name: {"min": int(side.min()), "p50": int(np.median(side)), "max": int(side.max())}
            for name, side in zip(("width", "height"), sizes.T, strict=True)
            if len(side)
        },
        "turned": sum(scan.num_turned for scan in scans.values()),
        "bad": _shown([scan.bad for scan in scans.values()]),
    }
    if scenes is None:
        return found
    if scenes.role.kind == "mask":
        options = scans[next(iter(scans))].options
        return found | {
            "ignore_index": options.ignore_index,
            "reduce_labels": options.reduce_labels,
            "masks_scanned": sum(scan.num_masks_scanned for scan in scans.values()),
        }
    numbers = {
        split: np.concatenate([scans[file].num_objects[rows] for file, rows in pieces])
        for split, pieces in parts.items()
    }
    reasons = sorted({reason for scan in scans.values() for reason in scan.dropped})
    options = scans[next(iter(scans))].options
    return found | {
        "ignore_index": options.ignore_index,
        "reduce_labels": options.reduce_labels,
        "objects": {split: int(number.sum()) for split, number in numbers.items()},
        "most_objects": max((int(number.max()) for number in numbers.values() if len(number)), default=0),
        "empty": {split: int((number == 0).sum()) for split, number in numbers.items()},
        "clipped_boxes": _shown([scan.clipped for scan in scans.values()]),
        "dropped_boxes": {
            reason: _shown([scan.dropped[reason] for scan in scans.values() if reason in scan.dropped])
            for reason in reasons
        },
        "class_ids": scenes.class_ids(),
    }


def _shown(findings: list[Any]) -> dict[str, Any]:
    first = [text for finding in findings for text in finding.first]
    return {"number": sum(finding.number for finding in findings), "first": first[:_MOST_NAMED]}
