"""Several runs side by side: results, differing settings and data, and the samples that only one gets right."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Final

from loopwright.report.blocks import Panel, Table
from loopwright.report.formats import cut, duration, metric, number
from loopwright.report.panels.sample import is_right, json_lines
from loopwright.report.run_view import RunView, view
from loopwright.report.summary import card_of, interval_text, verdict_text
from loopwright.run_folder import RunFolder

# Settings and facts about a run's location, not its content.
_PLACES: Final = frozenset(("output_dir", "run_name", "logging_dir", "command", "folder"))
_MOST_CELL: Final = 120


def notes_of(runs: Sequence[RunView]) -> list[str]:
    """Return the caveats for comparing these runs."""
    notes = []
    tasks = list(dict.fromkeys(run.task for run in runs))
    if len(tasks) > 1:
        what = f"These runs have different tasks ({', '.join(tasks)}): their losses and metrics are not comparable."
        notes.append(f"{what} Settings, data and speed are.")
    elif len({_evaluated(run) for run in runs}) > 1:
        notes.append("These runs were evaluated on different data: their metrics may differ for that reason alone.")
    unfinished = [run.name for run in runs if not run.result]
    if unfinished:
        notes.append(f"No result yet, shown at the best evaluation so far: {', '.join(unfinished)}.")
    return notes


def results_table(runs: Sequence[RunView]) -> Table:
    cards = [card_of(run) for run in runs]
    names = list(dict.fromkeys(card.metric for card in cards if card.metric))
    rows = []
    for run, card in zip(runs, cards, strict=True):
        values = [metric(card.value) if card.metric == name else "–" for name in names]
        seconds = run.result.get("seconds") or run.metrics.seconds
        length = run.result.get("updates") or run.metrics.update, duration(float(seconds))
        speed = number(run.metrics.mean("samples_per_second"))
        rows.append([run.name, run.task, card.state, *values, interval_text(card.interval) or "–", *length, speed])
    columns = ["run", "task", "state", *names, "95 % interval", "updates", "time", "samples/s"]
    return Table("Results", columns, rows)


def panels_of(runs: Sequence[RunView]) -> list[Panel]:
    """Return the panels of a comparison; each one reports if nothing differs."""

    def differing(title: str, heading: str, sides: Sequence[Mapping[str, Any]], otherwise: str) -> Table:
        rows = []
        for name in dict.fromkeys(name for side in sides for name in side):
            values = [side.get(name) for side in sides]
            if name not in _PLACES and any(value != values[0] for value in values[1:]):
                rows.append([name, *("–" if value is None else cut(value, _MOST_CELL) for value in values)])
        columns = [heading, *(run.name for run in runs)]
        return Table(title, columns, rows, "" if rows else otherwise, is_left=True, is_wide=True)

    settings = differing("Settings", "setting", [run.config for run in runs], "all settings are the same")
    versions = differing("Versions", "of", [run.command for run in runs], "all versions are the same")
    data = differing("Data", "", [_data_of(run) for run in runs], "the data is the same, byte for byte")
    panels = [Panel("What differs", [settings, versions]), Panel("Data", [data])]
    samples = sample_table(runs)
    return [*panels, Panel("Sample by sample", [samples])] if samples is not None else panels


def sample_table(runs: Sequence[RunView]) -> Table | None:
    """Return how often only the first run, or only another, is right; None if their samples cannot be matched."""
    first = runs[0]
    ours = _hits(first.folder.evaluation / "predictions.jsonl")
    rows = []
    for run in runs[1:]:
        if run.task != first.task or _evaluated(run) != _evaluated(first):
            continue
        theirs = _hits(run.folder.evaluation / "predictions.jsonl")
        shared = ours.keys() & theirs.keys()
        if shared:
            counts = Counter((ours[place], theirs[place]) for place in shared)
            only_one = counts[True, False], counts[False, True]
            rows.append([run.name, counts[True, True], *only_one, counts[False, False]])
    columns = ["against", "both right", f"only {first.name}", "only the other", "neither"]
    return Table(f"{first.name} against the others", columns, rows, is_wide=True) if rows else None


def compare_runs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    return verdicts_of([view(RunFolder(folder)) for folder in folders])


def verdicts_of(runs: Sequence[RunView]) -> list[dict[str, Any]]:
    """Return the verdict on the first run against each other one, on the rows of both; "text" has it in words."""
    found = []
    for run in runs[1:]:
        verdict = {"run": runs[0].id, "baseline": run.id, "kind": None, **_compared(runs[0], run)}
        text = f"There is no verdict on {runs[0].name} and {run.name}: {verdict.get('reason')}."
        if verdict["kind"] is not None:
            words = verdict_text({**verdict, "split": ""})
            where = f"By {verdict['metric']} on the {verdict['split']} data"
            text = f"{where}, {runs[0].name} is {words[0].lower()}{words[1:]}"
        found.append({**verdict, "text": text})
    return found


def _compared(first: RunView, other: RunView) -> dict[str, Any]:
    from loopwright.metrics.paired import judge, read_rows

    name, is_more_better = str(first.decisive), first.is_more_better
    if not (first.result and other.result):
        return {"reason": "one of them has no result yet"}
    if first.task != other.task or name != other.decisive:
        return {"reason": "they are not scored by the same metric"}
    shared = [split for split in ("test", "validation") if _evaluated(first, split) == _evaluated(other, split) != "[]"]
    for split, place, prefix in (("test", "test", "test_"), ("validation", "", "")):
        scores = [read_rows(run.folder.evaluation / place / "rows.npz").get(name) for run in (first, other)]
        values = [(run.result.get(f"{prefix}metrics") or {}).get(name, math.nan) for run in (first, other)]
        ours, theirs = scores
        if split not in shared or ours is None or theirs is None or not all(map(math.isfinite, values)):
            continue
        verdict: dict[str, Any] = {"split": split, "metric": name, "direction": "max" if is_more_better else "min"}
        verdict |= {"value": values[0], "baseline_value": values[1]}
        # The better one was picked from several evaluations; that the other one was, too, only makes p larger.
        is_ours = (values[0] > values[1]) == is_more_better
        picked = 1 if split == "test" else (first if is_ours else other).result.get("evaluations", 1)
        sides = (ours, theirs) if is_ours else (theirs, ours)
        verdict |= {**judge(*sides, greater_is_better=is_more_better, num_picked=picked), "evaluations": picked}
        if verdict["kind"] is None:
            return {**verdict, "reason": "they share too few rows"}
        opposite = {"better": "worse", "worse": "better"}
        return verdict if is_ours else {**verdict, "kind": opposite.get(verdict["kind"], verdict["kind"])}
    return {"reason": "they have no scores of single rows" if shared else "they were evaluated on different data"}


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


def _evaluated(run: RunView, split: str = "validation") -> str:
    """Return the values that identify a run's validation or test data."""
    files = run.data.get("files") or []
    hashes = {index: str(file.get("sha256", "")) for index, file in enumerate(files)}
    parts = ((run.data.get("splits") or {}).get(split) or {}).get("parts") or []
    return json.dumps([[hashes.get(part.get("file"), ""), part.get("rows")] for part in parts], sort_keys=True)


def _hits(path: Path) -> dict[int, bool]:
    """Return whether each sample of an evaluation was right; empty if the task has no right and wrong."""
    verdicts = ((sample.get("position"), is_right(sample)) for sample in json_lines(path))
    return {place: right for place, right in verdicts if right is not None and isinstance(place, int)}
