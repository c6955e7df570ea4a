"""The panel of detection and instance segmentation: objects by class, precision against recall, scores."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final

from loopwright.report.blocks import Block, Lines, Table
from loopwright.report.formats import metric
from loopwright.report.panels.classes import scores_table
from loopwright.report.panels.collectors import Collector
from loopwright.report.panels.sample import Sample, json_or_none
from loopwright.report.series import thinned

CLASSES: Final = "classes.json"
_SAME: Final = 0.5  # the minimum overlap of two boxes of the same object
_MOST_MATCHED: Final = 200_000  # objects matched against the truth; more would take long and add nothing
_COLUMNS: Final = 150
_MOST_CLASSES: Final = 60
_AVERAGES: Final = {"map": "mAP", "map_50": "mAP at 0.5", "map_75": "mAP at 0.75"}

Box = Sequence[float]


class Objects(Collector):
    """Detection and instance segmentation: objects found, wrong and missed."""

    title = "Classes of objects"
    score_name = "F1"
    score_of = "f1"

    def __init__(self, labels: Sequence[str] = ()) -> None:
        super().__init__(labels)
        self._by_number: dict[int, list[float]] = {}
        self._matched: list[tuple[float, bool]] = []
        self._num_true = 0

    def add(self, sample: Sample) -> None:
        num_objects = 0
        for label, (hits, wrong, missed) in sample["counts"].items():
            entry = self.counts.setdefault(str(label), [0, 0, 0])
            for place, count in enumerate((hits, hits + wrong, hits + missed)):
                entry[place] += count
            num_objects += hits + missed
        entry_of = self._by_number.setdefault(num_objects, [0, 0.0])
        entry_of[0] += 1
        entry_of[1] += float(sample.get("f1") or 0.0)
        if len(self._matched) < _MOST_MATCHED:
            found, truth = sample.get("objects") or [], sample.get("truth") or []
            self._num_true += sum(not each.get("crowd") for each in truth)
            for score, is_hit in matches(found, truth):
                self._matched.append((score, is_hit))
                self.values["right" if is_hit else "wrong"].add(score)

    def blocks(self) -> list[Block]:
        table = scores_table("By class", self.counts.items(), "objects")
        spread = self.histogram("Scores of the objects found", "right", "wrong")
        return [table, self._precision_and_recall(), spread]

    def slices(self) -> list[Block]:
        by_number = sorted(self._by_number.items())
        rows = [[str(number), int(num), metric(total / num)] for number, (num, total) in by_number]
        return [Table("By number of objects", ["objects", "images", "mean F1"], rows[:20])]

    def _precision_and_recall(self) -> Lines:
        """Return precision over recall: at each recall, the best precision there or beyond."""
        ranked = sorted(self._matched, key=lambda pair: -pair[0]) if self._num_true else []
        hits = list(accumulate(is_hit for _, is_hit in ranked))
        recalls = [num / self._num_true for num in hits]
        precisions = [num / place for place, num in enumerate(hits, 1)]
        best = list(accumulate(reversed(precisions), max))[::-1]
        groups = [("all classes", thinned(recalls, best, _COLUMNS))] if hits else []
        note = "all classes together; boxes that overlap by half are the same object"
        return Lines("Precision and recall", "recall", "precision", groups, note)


def matches(found: Sequence[Sample], truth: Sequence[Sample]) -> list[tuple[float, bool]]:
    """Return (score, whether it is correct) of the objects found in an image; objects in a crowd are skipped.

    The most confident object takes the true one of its class with the largest overlap, of at least half.
    """
    crowds = {index for index, each in enumerate(truth) if each.get("crowd")}
    free = set(range(len(truth))) - crowds
    scored = []
    for each in sorted(found, key=lambda each: -float(each["score"])):
        same = [index for index, other in enumerate(truth) if other["label"] == each["label"]]
        overlaps = [(overlap(each["box"], truth[index]["box"]), -index) for index in same if index in free]
        best, place = max(overlaps, default=(0.0, 0))
        if best >= _SAME:
            free.discard(-place)
            scored.append((float(each["score"]), True))
        elif not any(_share_within(each["box"], truth[index]["box"]) >= _SAME for index in same if index in crowds):
            scored.append((float(each["score"]), False))
    return scored


def overlap(first: Box, second: Box) -> float:
    """Return the intersection over union of two boxes (left, top, right, bottom)."""
    shared = _shared(first, second)
    union = _area(first) + _area(second) - shared
    return shared / union if union > 0 else 0.0


def average_precision(path: Path) -> Table:
    """Return COCO's average precision per class from eval/classes.json; an empty table without it."""
    rows = json_or_none(path)
    rows = [row for row in rows if isinstance(row, dict) and "label" in row] if isinstance(rows, list) else []
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if "map" in name]
    rows = sorted(rows, key=lambda row: row.get(names[0]) or 0.0)[:_MOST_CLASSES] if names else []
    shown = [[str(row["label"]), *(metric(row.get(name)) for name in names), row.get("there", "")] for row in rows]
    titles = [_AVERAGES.get(name, name.replace("_", " ")) for name in names]
    return Table("Average precision", ["class", *titles, "objects"], shown, "the lowest first", bar=1)


def _share_within(box: Box, crowd: Box) -> float:
    area = _area(box)
    return _shared(box, crowd) / area if area > 0 else 0.0


def _area(box: Box) -> float:
    return max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)


def _shared(first: Box, second: Box) -> float:
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    return max(width, 0.0) * max(height, 0.0)
