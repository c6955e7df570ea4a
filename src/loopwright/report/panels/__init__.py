"""The task panel of a report, from eval/predictions.jsonl, worst.jsonl and suspects.csv: read once, as a stream."""

from __future__ import annotations

import contextlib
import csv
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from loopwright.quantities import counted
from loopwright.report.blocks import Block, Example, Examples, Panel, Table, without_empty
from loopwright.report.formats import cut, metric, percent
from loopwright.report.panels import texts
from loopwright.report.panels.classes import Choices, Labels, LabelSets, Pixels
from loopwright.report.panels.collectors import ByLength, Collector
from loopwright.report.panels.objects import CLASSES, Objects, average_precision
from loopwright.report.panels.sample import Sample, example, is_right, json_lines
from loopwright.run_folder.files import DamagedFileError, read_bytes

NUM_WORST: Final = 20
_NUM_SUSPECTS: Final = 20
_HIDDEN_COLUMNS: Final = {"position", "place", "loss", "confidence", "sure", "rank", "prediction", "reference"}

__all__ = ["NUM_WORST", "Findings", "read_findings"]


@dataclass
class Findings:
    """The results of an evaluation; `notes` name the files that could not be read."""

    panel: Panel | None = None
    worst: Examples | None = None
    suspects: Table | None = None
    slices: list[Block] = field(default_factory=list)
    num_samples: int = 0
    notes: list[str] = field(default_factory=list)


def read_findings(folder: Path, labels: Sequence[str]) -> Findings:
    findings = Findings()
    by_length = ByLength()
    collector: Collector | None = None
    bad = 0
    verdicts: Counter[bool | None] = Counter()
    for sample in json_lines(folder / "predictions.jsonl"):
        if not sample:
            bad += 1
            continue
        try:
            collector = collector or _collector_for(sample)(labels)
            collector.add(sample)
            by_length.add(sample, collector.score(sample))
            findings.num_samples += 1
            verdicts[is_right(sample)] += 1
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
            bad += 1
    generated = without_empty([texts.generations(json_lines(folder / "samples.jsonl"))])
    if collector is not None:
        blocks = without_empty([*collector.blocks(), average_precision(folder / CLASSES)])
        # Figures first, then the samples written during the run, then those of the last evaluation.
        place = next((index for index, block in enumerate(blocks) if isinstance(block, Examples)), len(blocks))
        findings.panel = Panel(collector.title, [*blocks[:place], *generated, *blocks[place:]])
        findings.slices = without_empty([*collector.slices(), by_length.block(collector.score_name)])
    elif generated:
        findings.panel = Panel("Text", generated)
    if bad:
        findings.notes.append(f"{counted(bad, 'line')} of eval/predictions.jsonl could not be read: left out")
    findings.worst = _worst(folder / "worst.jsonl", verdicts)
    findings.suspects = _suspects(folder / "suspects.csv")
    return findings


def _worst(path: Path, verdicts: Mapping[bool | None, int]) -> Examples | None:
    """Return the samples with the largest losses: non-finite ones, then those without correct predictions."""
    is_perfect = bool(verdicts.get(True)) and set(verdicts) == {True}
    bad: list[Example] = []
    others: list[Example] = []
    for sample in filter(None, json_lines(path)):
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):  # a damaged line
            (others if math.isfinite(sample.get("loss") or 0.0) else bad).append(example(sample))
    if is_perfect and not bad:
        return Examples(f"No mistakes on {counted(verdicts[True], 'row')}", [])
    has_mistakes = any(item.is_right is False for item in others)
    others = [item for item in others if item.is_right is not True or not (has_mistakes or is_perfect)]
    shown = [*bad, *others][:NUM_WORST]
    what = counted(len(shown), "mistake" if has_mistakes and not bad else "sample")
    note = f"the loss of {len(bad):,} is not finite" if bad else ""
    return Examples(f"The {what} with the largest losses", shown, note) if shown else None


def _collector_for(sample: Sample) -> type[Collector]:
    """Return the collector of samples of this form; the form is more reliable than the task's name."""
    predicted, true = sample.get("prediction"), sample.get("reference")
    forms: list[tuple[type[Collector], bool]] = [
        (Choices, "choices" in sample),
        (Pixels, "pixels" in sample),
        (Objects, isinstance(sample.get("counts"), Mapping)),
        (texts.Tags, isinstance(sample.get("tokens"), list)),
        (texts.Answers, "question" in sample),
        (texts.Retrieval, "rank" in sample and "similarity" in sample),
        (texts.Masked, isinstance(predicted, list) and "num_tokens" in sample),
        (LabelSets, isinstance(predicted, list)),
        (texts.Numbers, isinstance(predicted, float) and isinstance(true, (int, float))),
        (texts.Written, isinstance(predicted, str) and isinstance(true, str) and "source" in sample),
        (Labels, isinstance(predicted, str) and isinstance(true, str)),
        (texts.Language, "num_tokens" in sample),
        (texts.Losses, True),
    ]
    return next(kind for kind, holds in forms if holds)


def _suspects(path: Path) -> Table | None:
    try:
        rows = list(csv.DictReader(io.StringIO(read_bytes(path).decode(errors="replace"), newline="")))
    except (OSError, DamagedFileError, csv.Error):
        return None
    shown = []
    for row in rows[:_NUM_SUSPECTS]:
        others = [value for name, value in row.items() if name not in _HIDDEN_COLUMNS and isinstance(value, str)]
        text = Path(row["image"]).name if row.get("image") else cut(" · ".join(filter(None, others)), 240)
        place = row.get("place") or row.get("position", "")
        labels = row.get("reference", ""), row.get("prediction", "")
        shown.append([place, *labels, _share(row.get("sure")), text])
    if not shown:
        return None
    note = "the model is confident and disagrees with the label: eval/suspects.csv has "
    note += "them all" if len(rows) <= _NUM_SUSPECTS else f"all {len(rows)}"
    return Table("Suspected labels", ["row", "label", "prediction", "confidence", "sample"], shown, note, is_wide=True)


def _share(text: str | None) -> str:
    try:
        return percent(float(text or ""))
    except ValueError:
        return metric(None)
