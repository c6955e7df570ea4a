"""The runs of a folder at a glance: state, best metric, duration. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from loopwright.run_folder.files import DamagedFileError, open_regular, parse_line, read_json
from loopwright.run_folder.layout import RunFolder, read_index, runs_in, runs_root
from loopwright.run_folder.lease import live_owner
from loopwright.run_folder.record import METRICS

_TAIL_BYTES = 1 << 16
_ENDED = {"stopped": "stopped", "preempted": "interrupted", "failed": "failed", "running": "interrupted"}


class RunState(str):
    """The state of a run as text, such as "interrupted, resumable"; `name` is it without the detail."""

    name: str

    def __new__(cls, name: str, detail: str = "") -> RunState:  # noqa: D102
        state = super().__new__(cls, f"{name}, {detail}" if detail else name)
        state.name = name
        return state


@dataclass(frozen=True)
class RunSummary:
    """One run of a list."""

    id: str
    path: Path
    task: str = ""
    state: RunState = RunState("")  # in words: "done", "running", "interrupted, resumable", "damaged", "moved away"
    metric: str | None = None  # the name of the deciding metric; None before the first evaluation
    value: float | None = None  # of the best model so far
    is_more_better: bool = True
    seconds: float | None = None  # its training time, including resumed parts; None if unknown
    created: float | None = None  # when it began, in seconds since 1970; None if unknown


def list_runs(root: Path | None = None) -> list[RunSummary]:
    """Return the runs in the index and next to it, newest last, including missing and unreadable folders."""
    root = runs_root() if root is None else root
    entries = {entry["id"]: entry for entry in read_index(root)}
    known = {os.path.realpath(root / entry["path"]) for entry in entries.values()}
    found = [_summary(entry, root / entry["path"]) for entry in entries.values()]
    found += [_summary({"id": each.name}, each) for each in runs_in(root) if os.path.realpath(each) not in known]
    return sorted(found, key=lambda run: run.created or 0.0)


def _summary(entry: Mapping[str, Any], path: Path) -> RunSummary:
    run = RunFolder(path)
    known: dict[str, Any] = {"id": str(entry["id"]), "task": str(entry.get("task", "")), **_metric(entry, {}, {})}
    known["path"] = Path(os.path.normpath(path))
    if not path.is_dir():
        return RunSummary(**known, state=RunState("moved away"))
    try:
        metadata, status, result = run.metadata, run.status, run.read_result()
        best = read_json(run.checkpoints / "best.json", {})
    except (DamagedFileError, OSError):
        return RunSummary(**known, state=RunState("damaged"))
    if not metadata:
        return RunSummary(**known, state=RunState("damaged: no run.json"))
    known |= {name: str(metadata[name]) for name in ("id", "task") if name in metadata}
    known |= _metric(entry, result, best)
    seconds = _number(result.get("seconds"))
    return RunSummary(
        **known,
        state=_state(run, status, result),
        seconds=_last_seconds(path / METRICS) if seconds is None else seconds,
        created=seconds_since_1970(metadata.get("created")),
    )


def _state(run: RunFolder, status: Mapping[str, Any], result: Mapping[str, Any]) -> RunState:
    state = str(status.get("state", "new"))
    if state == "running" and live_owner(run.path) is not None:
        return RunState("running")
    if state == "done":
        return RunState("done") if result else RunState("trained", "not evaluated")
    if state == "stopped" and result.get("updates", -1) == status.get("update"):
        return RunState("done", "stopped early")
    if state not in _ENDED:
        return RunState("not begun" if state == "new" else state)
    return RunState(_ENDED[state], "resumable" if status.get("last_checkpoint") else "nothing saved")


def _metric(entry: Mapping[str, Any], result: Mapping[str, Any], best: Mapping[str, Any]) -> dict[str, Any]:
    """Return the deciding metric and its value, from the result, else the best checkpoint, else the index."""
    value = (result.get("metrics") or {}).get(str(result.get("metric")))
    for source in ({**result, "value": value}, best, entry):
        name, value = source.get("metric"), _number(source.get("value"))
        if isinstance(name, str) and value is not None:
            is_more_better = source.get("direction", "max") == "max"
            return {"metric": name.removeprefix("eval_"), "value": value, "is_more_better": is_more_better}
    return {}


def _last_seconds(path: Path) -> float | None:
    """Return the training time at a run's last complete record; None if there is none."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            lines = file.read().split(b"\n")[:-1]
    except (OSError, DamagedFileError):
        return None
    found = (_number((parse_line(line) or {}).get("seconds")) for line in reversed(lines))
    return next((seconds for seconds in found if seconds is not None), None)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and abs(value) < sys.float_info.max
    return float(value) if is_number else None


def seconds_since_1970(text: Any) -> float | None:
    """Return a time in ISO format in seconds; None for anything else."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return None
