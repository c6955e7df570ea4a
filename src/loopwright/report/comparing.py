"""Several runs side by side: results, differing settings and data, and the samples that only one gets right."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, Final

from loopwright.report.blocks import Block, Panel, Table
from loopwright.report.formatting import cut, duration, metric, number
from loopwright.report.panels.sample import is_right
from loopwright.report.run_view import RunView
from loopwright.report.samples import json_lines
from loopwright.report.summary import card_of, interval_text

# Settings about a run's location, not its content.
_PLACES: Final = frozenset(("output_dir", "run_name", "logging_dir"))
_MOST_CELL: Final = 120


def notes_of(runs: Sequence[RunView]) -> list[str]:
    """Return the caveats for comparing these runs."""
    notes = []
    tasks = list(dict.fromkeys(run.task for run in runs))
    if len(tasks) > 1:
        notes.append(
            f"These are runs of different tasks ({', '.join(tasks)}): losses and metrics of one cannot be held against "
            "those of another. Settings, data and speed can."
        )
    elif len({_evaluated(run) for run in runs}) > 1:
        notes.append("These runs were evaluated on different data: a difference in metrics may come from that alone.")
    unfinished = [run.id for run in runs if not run.result]
    if unfinished:
        notes.append(f"Without a result yet, shown at the best evaluation so far: {', '.join(unfinished)}.")
    return notes


def results_table(runs: Sequence[RunView]) -> Table:
    """Return a table of each run's results."""
    cards = [card_of(run) for run in runs]
    names = list(dict.fromkeys(card.metric for card in cards if card.metric))
    rows = []
    for run, card in zip(runs, cards, strict=True):
        values = [f"{metric(card.value)}" if card.metric == name else "–" for name in names]
        interval = interval_text(card.interval) or "–"
        seconds = run.result.get("seconds") or run.metrics.seconds
        speed = run.metrics.series["samples_per_second"].mean() if "samples_per_second" in run.metrics.series else None
        updates = run.result.get("updates") or run.metrics.update
        rows.append([run.id, run.task, card.state, *values, interval, updates, duration(float(seconds)), number(speed)])
    columns = ["run", "task", "state", *names, "95 % interval", "updates", "time", "samples/s"]
    return Table("Results", columns, rows)


def panels_of(runs: Sequence[RunView]) -> list[Panel]:
    """Return the panels of a comparison; each one reports if nothing differs."""
    ids = [run.id for run in runs]
    settings = _differing([run.config for run in runs], _PLACES)
    versions = _differing([run.command for run in runs], frozenset(("command", "folder")))
    data = _differing([_data_of(run) for run in runs], frozenset())
    blocks: list[Block] = [
        Table(
            "Settings",
            ["setting", *ids],
            settings,
            "" if settings else "all settings are the same",
            is_left=True,
            is_wide=True,
        ),
        Table(
            "Versions",
            ["of", *ids],
            versions,
            "" if versions else "all versions are the same",
            is_left=True,
            is_wide=True,
        ),
    ]
    panels = [
        Panel("What differs", blocks),
        Panel(
            "Data",
            [
                Table(
                    "Data",
                    ["", *ids],
                    data,
                    "" if data else "the data is the same, byte for byte",
                    is_left=True,
                    is_wide=True,
                )
            ],
        ),
    ]
    samples = sample_table(runs)
    return [*panels, Panel("Sample by sample", [samples])] if samples is not None else panels


def sample_table(runs: Sequence[RunView]) -> Table | None:
    """Return how often only the first run, or only another, is right; None if their samples cannot be matched.

    The last column is McNemar's exact test: the probability of such a difference between two equally good models.
    """
    first = runs[0]
    ours = _hits(first.folder.evaluation / "predictions.jsonl")
    rows = []
    for run in runs[1:]:
        if run.task != first.task or _evaluated(run) != _evaluated(first):
            continue
        theirs = _hits(run.folder.evaluation / "predictions.jsonl")
        shared = ours.keys() & theirs.keys()
        if not shared:
            continue
        only_first = sum(ours[place] and not theirs[place] for place in shared)
        only_other = sum(theirs[place] and not ours[place] for place in shared)
        both = sum(ours[place] and theirs[place] for place in shared)
        neither = len(shared) - both - only_first - only_other
        rows.append([run.id, both, only_first, only_other, neither, metric(mcnemar(only_first, only_other))])
    if not rows:
        return None
    columns = ["against", "both right", f"only {first.id}", "only the other", "neither", "p"]
    note = "p: how probable such a difference is between two models that are equally good (McNemar's exact test)"
    return Table(f"{first.id} against the others", columns, rows, note, is_wide=True)


def mcnemar(only_first: int, only_other: int) -> float:
    """Return the two-sided p of McNemar's exact test on the samples that only one run gets right."""
    total = only_first + only_other
    if total == 0:
        return 1.0
    few = min(only_first, only_other)
    logs = [
        math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1) - total * math.log(2)
        for k in range(few + 1)
    ]
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


def _differing(sides: Sequence[dict[str, Any]], left_out: frozenset[str]) -> list[list[str]]:
    names = dict.fromkeys(name for side in sides for name in side)
    rows = []
    for name in names:
        values = [side.get(name) for side in sides]
        if name not in left_out and any(value != values[0] for value in values[1:]):
            rows.append([name, *("–" if value is None else cut(value, _MOST_CELL) for value in values)])
    return rows


def _data_of(run: RunView) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for file in run.data.get("files") or ():
        name = PurePath(str(file.get("path", ""))).name
        facts[f"{name}: rows"] = file.get("num_rows")
        facts[f"{name}: sha256"] = str(file.get("sha256", ""))[:16]
    for name, split in (run.data.get("splits") or {}).items():
        facts[f"rows of {name}"] = split.get("num_rows")
    facts["columns"] = run.data.get("columns")
    facts["labels"] = ", ".join(run.labels) or None
    return facts


def _evaluated(run: RunView) -> str:
    """Return the values that identify a run's validation data."""
    files = run.data.get("files") or []
    parts = ((run.data.get("splits") or {}).get("validation") or {}).get("parts") or []
    return json.dumps([[_hash_of(files, part.get("file")), part.get("rows")] for part in parts], sort_keys=True)


def _hash_of(files: Sequence[Any], place: Any) -> str:
    is_there = isinstance(place, int) and 0 <= place < len(files)
    return str(files[place].get("sha256", "")) if is_there else ""


def _hits(path: Path) -> dict[int, bool]:
    """Return whether each sample of an evaluation was right; empty if the task has no right and wrong."""
    found = {}
    for sample in json_lines(path):
        right = is_right(sample)
        if right is not None and isinstance(sample.get("position"), int):
            found[sample["position"]] = right
    return found
