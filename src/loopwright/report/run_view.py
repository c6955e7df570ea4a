"""A run folder as a report reads it: every existing file, and a note for each unreadable one."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from loopwright.config.config_file import is_cut_off
from loopwright.config.files import UNREADABLE_YAML, load_yaml
from loopwright.errors import InputError
from loopwright.report.metrics import Metrics
from loopwright.run_folder import METRICS, DamagedFileError, RunFolder, find_run, read_json
from loopwright.run_folder.files import open_regular
from loopwright.run_folder.status import STATUS

_SILENT_SECONDS: Final = 180.0  # a run has a heartbeat every few seconds; after this silence it is lost
_MOST_LOG_BYTES: Final = 1 << 20


@dataclass
class RunView:
    """Everything a report knows about a run."""

    folder: RunFolder
    metrics: Metrics
    metadata: dict[str, Any] = field(default_factory=dict)  # run.json
    status: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # the origin of each config value
    command: dict[str, str] = field(default_factory=dict)  # how and where the run was started, with which versions
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)  # by name and metric
    best: dict[str, Any] = field(default_factory=dict)  # best.json: the best checkpoint so far, and its metric
    guarantee: str = ""
    rehearsal: str = ""
    model: str = ""
    notes: list[str] = field(default_factory=list)  # files that could not be read
    now: float = 0.0  # the clock, in seconds since 1970
    heartbeat: float | None = None  # the time of the folder owner's last one

    @property
    def id(self) -> str:
        """The id of the run, or the name of its folder."""
        return str(self.metadata.get("id") or self.folder.path.resolve().name)

    @property
    def name(self) -> str:
        """The name of its folder, as --out gave it; one that is called `run` or the like has that of its parent too."""
        path = self.folder.path.resolve()
        return f"{path.parent.name}/{path.name}" if path.name in ("run", "out", "output", "model") else path.name

    @property
    def task(self) -> str:
        """The task, or the kind of a run without one."""
        return str(self.metadata.get("task") or self.data.get("task") or "training")

    @property
    def state(self) -> str:
        """The state in status.json, or "lost" if it is running without a heartbeat."""
        state = str(self.status.get("state", "new"))
        if state != "running":
            return state
        is_alive = self.heartbeat is not None and self.now - self.heartbeat < _SILENT_SECONDS
        return "running" if is_alive else "lost"

    @property
    def is_live(self) -> bool:
        return self.state == "running"

    @property
    def labels(self) -> list[str]:
        return [str(name) for name in (self.data.get("labels") or {}).get("names") or ()]

    @property
    def decisive(self) -> str | None:
        """The metric that selects the best model; None if unknown."""
        if self.result.get("metric"):
            return str(self.result["metric"])
        asked = self.best.get("metric") or self.config.get("metric_for_best_model")
        return asked.removeprefix("eval_") if isinstance(asked, str) else None

    @property
    def metric(self) -> str | None:
        """The metric to show first: the decisive one, or one that has a baseline."""
        if self.decisive is not None:
            return self.decisive
        names = (name for values in self.baselines.values() for name in values)
        return next((name for name in names if f"eval_{name}" in self.metrics.series), None)

    @property
    def is_more_better(self) -> bool:
        direction = self.result.get("direction") or self.best.get("direction")
        if direction is not None:
            return bool(direction == "max")
        errors = ("loss", "error", "perplexity", "mse", "bits")
        return not any(name in (self.metric or "loss") for name in errors)


def open_run(name: str | Path) -> RunFolder:
    """Return the run with this name, even without run.json, as a Trainer leaves it; an InputError names the nearest."""
    folder = Path(name)
    if any((folder / file).is_file() for file in (METRICS, STATUS)):
        return RunFolder(folder)
    return find_run(name)


def view(folder: RunFolder, metrics: Metrics | None = None) -> RunView:
    """Read a run folder, continuing from the metrics read so far; an InputError means that it has nothing to show."""
    if not folder.path.is_dir():
        raise InputError("run.unknown", f"{folder.path} is not a folder", fix="lw runs")
    found = RunView(folder, metrics or Metrics(folder.path / METRICS), now=time.time())
    found.metadata = _json(found, "run.json")
    found.status = _json(found, STATUS)
    found.result = _json(found, folder.result.name)
    found.data = _json(found, folder.data.name)
    baselines = found.result.get("baselines") or _json(found, "baselines.json")
    found.baselines = {name: {key: float(value) for key, value in each.items()} for name, each in baselines.items()}
    found.best = _json(found, "checkpoints/best.json") or _json(found, "best.json")
    _read_heartbeat(found)
    _read_config(found)
    for name, key in (("sources", "sources"), ("command", "environment")):
        setattr(found, name, {each: str(value) for each, value in (found.metadata.get(key) or {}).items()})
    for name in ("guarantee", "rehearsal", "model"):
        setattr(found, name, str(found.metadata.get(name, "")))
    try:
        found.metrics.read()
    except (OSError, DamagedFileError) as error:
        found.notes.append(f"{METRICS} cannot be read: {getattr(error, 'strerror', 'it is not a plain file')}")
    if found.metrics.num_bad:
        listed = ", ".join(map(str, found.metrics.bad_lines))
        more = ", …" if found.metrics.num_bad > len(found.metrics.bad_lines) else ""
        count = found.metrics.num_bad
        lines = "1 line of metrics.jsonl is" if count == 1 else f"{count:,} lines of metrics.jsonl are"
        found.notes.append(f"{lines} damaged and left out: line {listed}{more}")
    return found


def read_state(folder: RunFolder) -> str:
    """Return a run's state, in a word, without reading its metrics."""
    found = RunView(folder, Metrics(folder.path / METRICS), now=time.time())
    found.status = _json(found, STATUS)
    _read_heartbeat(found)
    return found.state


def _read_heartbeat(found: RunView) -> None:
    heartbeat = _json(found, "lease.json").get("heartbeat")
    found.heartbeat = float(heartbeat) if isinstance(heartbeat, (int, float)) else None


def _json(found: RunView, name: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = read_json(found.folder.path / name, {})
    except (DamagedFileError, OSError):
        found.notes.append(f"{name} cannot be read and is left out")
        return {}
    return content


def _read_config(found: RunView) -> None:
    path = found.folder.config
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            text = file.read(_MOST_LOG_BYTES).decode(errors="replace")
        if text and is_cut_off(path):
            found.notes.append("config.yaml was cut off: what its end said is missing here; lw resume puts it back")
        content = load_yaml(text) or {}
        found.config = content if isinstance(content, dict) else {}
    except FileNotFoundError:
        return
    except (OSError, DamagedFileError) as error:
        found.notes.append(f"{path.name} cannot be read: {getattr(error, 'strerror', 'it is not a plain file')}")
    except (*UNREADABLE_YAML, yaml.YAMLError):
        found.notes.append("config.yaml cannot be read and is left out")
