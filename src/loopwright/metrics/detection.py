"""Average precision of boxes and masks as COCO defines it, by faster-coco-eval, an extra.

metric = metrics.load("coco_ap", iou_types=("bbox", "segm"))
metric.add_batch(    # of each image; boxes as left, top, right, bottom in pixels
    predictions=[{"boxes": ..., "scores": ..., "classes": ..., "masks": ...}],
    references=[{"boxes": ..., "classes": ..., "masks": ..., "crowd": ..., "areas": ...}],
    positions=[17],    # the index of each image in the data
)
metric.compute()    # {"map": ..., "map_50": ..., ..., "mask_map": ..., ...}
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopwright.errors import ConfigError, DataError
from loopwright.metrics.base import Columns, Metric, Options, as_integers, as_items, without_torch
from loopwright.metrics.bootstrap import poisson_weights
from loopwright.metrics.intervals import LEAST_ROWS, UNDEFINED, Bounds, Resampled, class_trials
from loopwright.metrics.sums import Counts, Numbers

IOU_TYPES = ("bbox", "segm")
"""What is compared: boxes or masks."""

MAX_DETECTIONS = (1, 10, 100)
"""How many predictions of a class in an image count, for recall; the last for precision."""

RESAMPLED = ("map", "map_50", "map_75", "mar_100")
"""The results with an interval, for boxes and for masks."""

_THRESHOLDS = np.linspace(0.5, 0.95, 10)
_CHUNK = 1 << 20  # predictions of a class times replicates, at once
_PREFIXES = {"bbox": "", "segm": "mask_"}
_SIZES = ("all", "small", "medium", "large")  # up to 32 x 32 pixels, up to 96 x 96, and above

Objects = dict[str, list[Any]]
"""The objects of an image as lists: boxes, classes, and scores or crowd and areas; masks as COCO's run lengths."""


class ObjectsByImage(dict[int, tuple[Objects, Objects]]):
    """Predicted and true objects by the position of their image."""

    num_samples = property(dict.__len__)

    def merge(self, other: ObjectsByImage) -> None:
        for position, sides in other.items():
            self.setdefault(position, sides)

    def state_dict(self) -> dict[str, Any]:
        return {"images": [[position, *sides] for position, sides in sorted(self.items())]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.update({int(position): (found, given) for position, found, given in state["images"]})


class CocoAP(Metric):
    """Mean average precision and recall over classes and thresholds of overlap from 0.5 to 0.95.

    The results are COCO's: `map`, `map_50` and `map_75` (one threshold), `mar_1`, `mar_10` and `mar_100` (recall with
    so many predictions), and `map_small`, `map_medium`, `map_large` and `mar_small`, ... if there are objects of that
    size. Results of masks are called `mask_map`, ...

    Found and true objects are kept for each image, masks as run lengths; images and pixel scores are not. Images are
    identified by their positions: a repeated one counts once, and order and processes change nothing.

    Options: `iou_types` are "bbox", "segm" or both; `labels` names the classes in the table.
    """

    name = "coco_ap"
    state = ObjectsByImage
    options_apply_early = True
    columns = ("predictions", "references", "positions")
    forms: ClassVar = {"predictions": as_items, "references": as_items, "positions": as_integers}
    needs = ("faster_coco_eval", "faster-coco-eval", "vision")
    defaults: ClassVar[Options] = {"iou_types": ("bbox",), "labels": None}

    def _known(self, options: Options) -> dict[str, Any]:
        known = super()._known(options)
        if "iou_types" in known:
            given = known["iou_types"]
            types = known["iou_types"] = (given,) if isinstance(given, str) else tuple(given)
            if not types or any(each not in IOU_TYPES for each in types):
                raise ConfigError(f"iou_types of {self.name} are {' or '.join(IOU_TYPES)}, got {given!r}")
        return known

    def update(self, columns: Columns) -> None:
        """Keep the objects of each image, unless its position has been seen."""
        added = ObjectsByImage()
        for prediction, reference, position in zip(*(columns[name] for name in self.columns), strict=True):
            found = self._objects("prediction", prediction, position)
            added[int(position)] = (_best(found), self._objects("reference", reference, position))
        self._state.merge(added)

    def result(self, options: Options) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for kind in self.options["iou_types"]:
            precision, recall, _ = self._evaluated(kind)
            results |= {_PREFIXES[kind] + name: value for name, value in _summary(precision, recall).items()}
        return results

    def table(self) -> list[dict[str, Any]]:
        """Return one row per class that occurs; call it before `compute`, which resets the metric.

        A class without references has None for its precisions.
        """
        classes, names = self._classes(), self.options["labels"]
        images = self._state.values()
        counts = [Counter(each for image in images for each in image[side]["classes"]) for side in (0, 1)]
        rows: list[dict[str, Any]] = [{"label": each if names is None else names[each]} for each in classes]
        for kind in self.options["iou_types"]:
            precision, _, _ = self._evaluated(kind)
            for index, row in enumerate(rows):
                of_class = precision[:, :, index, 0, -1]
                for name, values in (("map", of_class), ("map_50", of_class[0])):
                    value = _mean(values)
                    row[_PREFIXES[kind] + name] = None if math.isnan(value) else value
        for place, row in zip(classes, rows, strict=True):
            row |= {"num_references": counts[1][place], "num_predictions": counts[0][place]}
        return rows

    def own_interval(self, level: float, groups: Mapping[int, Any] | None = None) -> dict[str, Bounds | str]:
        """Return the intervals of `RESAMPLED`, by resampling images or groups of them.

        Matches are sorted once; a replicate only weighs them. This takes up to 10 kB per image, and 100 MB besides.
        """
        units = {position: position for position in self._state}
        for number, group in (groups or {}).items():
            units |= dict.fromkeys(group._state, number)
        numbers, places = np.unique([units[position] for position in sorted(units)], return_inverse=True)
        sides = [self._state[position] for position in sorted(self._state)]
        counts: Counter[int] = Counter()
        for _, given in sides:
            counts.update(each for each, crowd in zip(given["classes"], given["crowd"], strict=True) if not crowd)
        sample = Resampled(np.zeros(0, np.int64), np.zeros(0, np.int64), len(numbers), groups is not None, level)
        few = sample.too_few(LEAST_ROWS, counts.values()) if counts else UNDEFINED
        weights = None if few else poisson_weights(0, numbers, 1000)[places].T
        found: dict[str, Bounds | str] = {}
        for kind in self.options["iou_types"]:
            if weights is None:
                found |= {_PREFIXES[kind] + name: few for name in RESAMPLED}
                continue
            precision, recall, overlaps = self._evaluated(kind)
            values = _summary(precision, recall)
            drawn = resampled([Matches.of(sides, each, overlaps) for each in sorted(counts)], weights)
            for name in RESAMPLED:
                bounds = sample.score(values[name], drawn[name], class_trials(list(counts.values())))
                found[_PREFIXES[kind] + name] = bounds
        return found

    def _objects(self, side: str, given: Any, position: int) -> Objects:
        """Return the objects of one image, validated, in a form that JSON keeps exactly."""
        fields = ("boxes", "classes", *(["scores"] if side == "prediction" else []))
        fields += ("masks",) if "segm" in self.options["iou_types"] else ()
        missing = [name for name in fields if not isinstance(given, Mapping) or given.get(name) is None]
        if missing:
            raise DataError(f"the {side} of image {position} lacks {', '.join(missing)}, which {self.name} needs")
        arrays = {name: np.asarray(without_torch(given[name])) for name in fields if name != "masks"}
        boxes = arrays["boxes"].astype(np.float32).reshape(-1, 4)
        objects: Objects = {"boxes": boxes.tolist(), "classes": arrays["classes"].astype(np.int64).tolist()}
        if "masks" in fields:
            objects["masks"] = [self._run_lengths(mask) for mask in without_torch(given["masks"])]
        if side == "prediction":
            objects["scores"] = arrays["scores"].astype(np.float32).tolist()
            numbers = [*boxes.reshape(-1).tolist(), *objects["scores"]]
        else:
            crowd, areas = (without_torch(given.get(name)) for name in ("crowd", "areas"))
            objects["crowd"] = [0] * len(boxes) if crowd is None else [int(each) for each in crowd]
            if areas is not None:
                objects["areas"] = [float(area) for area in areas]
            elif "masks" in objects:
                objects["areas"] = [float(area) for area in self._module.mask.area(objects["masks"])]
            else:
                sizes = boxes[:, 2:].astype(np.float64) - boxes[:, :2]
                objects["areas"] = (sizes[:, 0] * sizes[:, 1]).tolist()
            numbers = boxes.reshape(-1).tolist()
        names = self.options["labels"]
        lengths = {name: len(values) for name, values in objects.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"the {side} of image {position} must have one of each per object, got {lengths}")
        if not all(map(math.isfinite, numbers)):
            raise DataError(f"the {side} of image {position} has boxes or scores that are not numbers")
        if any(each < 0 or (names is not None and each >= len(names)) for each in objects["classes"]):
            expected = "from 0 on" if names is None else f"from 0 to {len(names) - 1}"
            raise DataError(f"the {side} of image {position} has the classes {objects['classes']}, expected {expected}")
        return objects

    def _run_lengths(self, mask: Any) -> dict[str, Any]:
        """Return a mask as COCO's compressed run lengths, from an array or from run lengths of either kind."""
        tools = self._module.mask
        if isinstance(mask, Mapping):
            height, width = (int(each) for each in mask["size"])
            counts = mask["counts"]
            if not isinstance(counts, str | bytes):
                counts = tools.frPyObjects({"size": [height, width], "counts": list(counts)}, height, width)["counts"]
        else:
            pixels = np.asarray(without_torch(mask)).astype(np.uint8)
            if pixels.ndim != 2:
                raise DataError(f"a mask of {self.name} has a height and a width, got the shape {pixels.shape}")
            height, width = pixels.shape
            counts = tools.encode(np.asfortranarray(pixels))["counts"]
        return {"size": [height, width], "counts": counts.decode() if isinstance(counts, bytes) else counts}

    def _classes(self) -> list[int]:
        return sorted({each for image in self._state.values() for side in image for each in side["classes"]})

    def _evaluated(self, kind: str) -> tuple[Numbers, Numbers, Mapping[tuple[int, int], Any]]:
        """Return precisions (thresholds, recalls, classes, sizes, limits), recalls (without recalls) and overlaps.

        Classes are in the order of `_classes`; -1 means no reference. The overlaps of predictions, most confident
        first, and references are by the number of the image and the class.
        """
        images: list[dict[str, Any]] = []
        sides: tuple[list[Any], list[Any]] = ([], [])
        for number, (_, pair) in enumerate(sorted(self._state.items())):
            images.append({"id": number, "height": 1, "width": 1})
            for side, objects in zip(sides, pair, strict=True):
                for index, (x0, y0, x1, y1) in enumerate(objects["boxes"]):
                    box = [x0, y0, x1 - x0, y1 - y0]
                    annotation: dict[str, Any] = {"id": len(side) + 1, "image_id": number, "bbox": box, "iscrowd": 0}
                    annotation["category_id"] = objects["classes"][index]
                    if kind == "segm":
                        annotation["segmentation"] = mask = objects["masks"][index]
                        images[-1] |= dict(zip(("height", "width"), mask["size"], strict=True))
                    if "scores" in objects:
                        area = float(self._module.mask.area(mask)) if kind == "segm" else box[2] * box[3]
                        annotation |= {"score": objects["scores"][index], "area": area}
                    else:
                        annotation |= {"iscrowd": objects["crowd"][index], "area": objects["areas"][index]}
                    side.append(annotation)
        categories = [{"id": each, "name": str(each)} for each in self._classes()]
        tables = ({"images": images, "categories": categories, "annotations": side} for side in sides)
        found, given = map(self._module.COCO, tables)
        evaluation = self._module.COCOeval_faster(given, found, kind)
        evaluation.params.maxDets = list(MAX_DETECTIONS)
        evaluation.evaluate()
        evaluation.accumulate()
        return np.asarray(evaluation.eval["precision"]), np.asarray(evaluation.eval["recall"]), evaluation.ious


@dataclass(frozen=True)
class Matches:
    """The predictions of one class in all images, most confident first, and the references that they meet."""

    images: Counts  # the image of each prediction
    is_hit: NDArray[np.bool_]  # whether it is right at each threshold of overlap: (thresholds, predictions)
    is_counted: NDArray[np.bool_]  # whether it counts there: one that meets a crowd does not
    num_references: Counts  # of each image

    @classmethod
    def of(cls, sides: list[tuple[Objects, Objects]], kind: int, overlaps: Mapping[tuple[int, int], Any]) -> Matches:
        images, scores, flags = [], [], [np.zeros((2, len(_THRESHOLDS), 0), dtype=np.bool_)]
        num_references = np.zeros(len(sides), dtype=np.int64)
        for number, (found, given) in enumerate(sides):
            own = [-score for score, each in zip(found["scores"], found["classes"], strict=True) if each == kind]
            crowd = [bool(each) for each, name in zip(given["crowd"], given["classes"], strict=True) if name == kind]
            num_references[number] = len(crowd) - sum(crowd)
            if own:
                table = np.asarray(overlaps[number, kind], dtype=np.float64).reshape(len(own), len(crowd))
                flags.append(_greedy(table, np.asarray(crowd, dtype=np.bool_)))
                images += [number] * len(own)
                scores += own
        order = np.argsort(scores, kind="stable")
        is_hit, is_counted = np.concatenate(flags, axis=2)[:, :, order]
        return cls(np.asarray(images, dtype=np.int64)[order], is_hit, is_counted, num_references)

    def resampled(self, weights: NDArray[Any]) -> tuple[Numbers, Numbers]:
        """Return precision and recall of each replicate and threshold; nan for replicates without references."""
        num_references = (weights @ self.num_references).astype(np.float64)
        num_references[num_references == 0] = np.nan
        drawn = weights[:, self.images].astype(np.float64)
        totals = np.cumsum(drawn, axis=1)
        precisions, recalls = (np.zeros((len(weights), len(_THRESHOLDS))) for _ in range(2))
        for index, (is_hit, is_counted) in enumerate(zip(self.is_hit, self.is_counted, strict=True)):
            counted = totals if is_counted.all() else np.cumsum(drawn * is_counted, axis=1)
            # Precision falls at every wrong prediction, so only right ones matter.
            hits = np.cumsum(drawn[:, is_hit], axis=1)
            best = np.maximum.accumulate((hits / np.maximum(counted[:, is_hit], 1))[:, ::-1], axis=1)[:, ::-1]
            recall = hits / num_references[:, None]
            reached = np.searchsorted(np.linspace(0, 1, 101), recall, side="right")
            precisions[:, index] = (np.diff(reached, axis=1, prepend=0) * best).sum(axis=1) / 101
            recalls[:, index] = recall[:, -1] if is_hit.any() else 0.0
        precisions[np.isnan(num_references)] = np.nan
        return precisions, recalls


def _greedy(overlaps: Numbers, is_crowd: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which predictions are right, and which count: (2, thresholds, predictions).

    Each takes the free reference that it overlaps most, in the order of their scores. One that meets only a crowd does
    not count.
    """
    flags = np.zeros((2, len(_THRESHOLDS), len(overlaps)), dtype=np.bool_)
    flags[1] = True
    is_free = np.repeat(~is_crowd[None], len(_THRESHOLDS), axis=0)
    for index in np.flatnonzero(overlaps.max(axis=1, initial=0.0) >= _THRESHOLDS[0]):
        free = np.where(is_free, overlaps[index], -1.0)
        chosen = free.shape[1] - 1 - free[:, ::-1].argmax(axis=1)  # the last of equal ones
        flags[0, :, index] = is_hit = free.max(axis=1) >= _THRESHOLDS
        is_free[is_hit, chosen[is_hit]] = False
        flags[1, :, index] = is_hit | (np.where(is_crowd, overlaps[index], -1.0).max() < _THRESHOLDS)
    return flags


def resampled(matches: list[Matches], weights: NDArray[Any]) -> dict[str, Numbers]:
    """Return the results of each replicate by how often it draws each image: (replicates, images)."""
    step = max(1, _CHUNK // max(len(each.images) + 1 for each in matches))
    chunks = []
    for start in range(0, len(weights), step):
        both = np.asarray([each.resampled(weights[start : start + step]) for each in matches])
        chunks.append(np.nansum(both, axis=0) / np.maximum((~np.isnan(both)).sum(axis=0), 1))
    precision, recall = np.concatenate(chunks, axis=1)
    results = (precision.mean(axis=1), precision[:, 0], precision[:, 5], recall.mean(axis=1))
    return dict(zip(RESAMPLED, results, strict=True))


def _best(objects: Objects) -> Objects:
    """Return the objects, most confident first, up to the limit per class."""
    order = sorted(range(len(objects["scores"])), key=lambda index: -objects["scores"][index])
    kept, seen = [], dict.fromkeys(objects["classes"], 0)
    for index in order:
        seen[objects["classes"][index]] += 1
        if seen[objects["classes"][index]] <= MAX_DETECTIONS[-1]:
            kept.append(index)
    return {name: [values[index] for index in kept] for name, values in objects.items()}


def _summary(precision: Numbers, recall: Numbers) -> dict[str, float]:
    """Return COCO's summary numbers; sizes without objects are left out."""
    summary = {
        "map": _mean(precision[:, :, :, 0, -1]),
        "map_50": _mean(precision[0, :, :, 0, -1]),
        "map_75": _mean(precision[5, :, :, 0, -1]),
    }
    summary |= {f"mar_{limit}": _mean(recall[:, :, 0, index]) for index, limit in enumerate(MAX_DETECTIONS)}
    for index, size in enumerate(_SIZES[1:], start=1):
        for name, values in ((f"map_{size}", precision[:, :, :, index, -1]), (f"mar_{size}", recall[:, :, index, -1])):
            if not math.isnan(value := _mean(values)):
                summary[name] = value
    return summary


def _mean(values: Numbers) -> float:
    there = values[values > -1]
    return float(there.mean()) if there.size else math.nan
