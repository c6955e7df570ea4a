"""The callback that reports a run to trackers: TensorBoard, trackio, wandb and others."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from loopwright.callbacks.base import TrainerCallback
from loopwright.engine.trackers import TrackedRun, Trackers, plain_config, resolve_trackers, where_to_look
from loopwright.protocols import TrainerLike
from loopwright.run_folder.files import DamagedFileError, read_json_lines
from loopwright.run_folder.metrics_log import MetricsLog

_JOURNAL = "trackers.jsonl"


class TrackerCallback(TrainerCallback):
    """Reports losses, learning rate, speed, metrics and settings to trackers, from rank 0 only.

    The step of a point is the number of updates. A tracker's error is printed once and written to metrics.jsonl as
    `tracker_failed`; the run continues. A resumed run continues the tracker's run if it supports that. `trackers.jsonl`
    in the folder records the reported points, so that none is repeated.

    Args:
        report_to: one or several trackers by name; "all" for every installed one, "none" for none.
        folder: for the files of the trackers; created when a run begins.
        run_name: the trackers' name for the run; by default the folder's name.
        config: settings to show; by default from the run config, the optimizer and the model.
        project: the trackers' project for the run.

    Raises:
        ConfigError: a tracker is not known or not installed.
    """

    asks_alike = True

    def __init__(
        self,
        report_to: str | Iterable[str] | None,
        folder: str | Path,
        run_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        project: str = "loopwright",
    ) -> None:
        self.trackers = resolve_trackers(report_to)
        self.folder = Path(folder)
        self.run_name = run_name or self.folder.resolve().name
        self.config = config
        self.project = project
        self._open: Trackers | None = None
        self._journal: MetricsLog | None = None
        self._written: dict[str, int] = {}
        self._counts: dict[str, int] | None = None  # of the reported values; None before the first tracker

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._counts = None
        if not self.trackers or not trainer.run_config.is_world_process_zero:
            return

        def tell(tracker: str, what: str, text: str) -> None:
            trainer.notify("tracker.failed", text, tracker=tracker, stage=what)
            trainer.write_record("tracker_failed", tracker=tracker, stage=what, message=text)

        try:
            run = self._begin(trainer)
        except (OSError, DamagedFileError) as error:
            tell(", ".join(self.trackers), "start", f"nothing is reported to trackers, but the run continues: {error}")
            return
        trackers = Trackers(self.trackers, tell)
        identities = trackers.start(run)
        self._open, self._counts = trackers, _counts(trainer.run_history)
        if not run.is_resumed:
            self._note({"event": "run", "id": run.id, "identities": identities})
        elif new := {name: value for name, value in identities.items() if run.identities.get(name) != value}:
            self._note({"event": "identities", "identities": new})
        if trackers.names:
            text = "Trackers: " + ", ".join(where_to_look(name, run) for name in trackers.names)
            trainer.notify("trackers", text, trackers=trackers.names)

    def on_log(self, trainer: TrainerLike, logs: Any = None, **kwargs: Any) -> None:
        if self._open is None:
            return
        speed: Mapping[str, Any] = getattr(trainer, "speed", {})
        values = {f"train/{name}": value for name, value in (logs or {}).items() if name != "update"}
        self._report(trainer, "log", {**values, **{f"speed/{name}": value for name, value in speed.items()}})

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._report_news(trainer, "training")

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._report_news(trainer, "intermediate" if kwargs.get("is_intermediate") else "evaluation")

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Report metrics recorded since, such as those of an averaged model."""
        self._report_news(trainer, "epoch")

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._report_news(trainer, "end")
        self.release()

    def release(self) -> None:
        if self._open is not None:
            self._open.finish()
            self._open = None
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def state_dict(self) -> dict[str, Any]:
        """Return the number of reported values of each metric; later values are still to be reported."""
        return {} if self._counts is None else {"counts": dict(self._counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._open is not None and "counts" in state:
            self._counts = dict(state["counts"])

    def _report_news(self, trainer: TrainerLike, kind: str) -> None:
        if self._open is None:
            return
        before, self._counts = self._counts or {}, _counts(trainer.run_history)
        latest = trainer.run_history.latest()
        news = [name for name, count in self._counts.items() if count > before.get(name, 0)]
        # Dashboards group metrics by the part before a slash: eval/accuracy, train/loss_epoch.
        self._report(trainer, kind, {re.sub(r"^(eval|train)_", r"\1/", name): latest[name] for name in news})

    def _report(self, trainer: TrainerLike, kind: str, values: Mapping[str, Any]) -> None:
        update = trainer.progress.update
        numbers = {name: number for name, value in values.items() if (number := _number(value)) is not None}
        if self._open is None or not numbers or update <= self._written.get(kind, -1):
            return
        # Recorded before it is reported: a process killed in between skips a point instead of repeating it.
        self._note({"event": kind, "update": update})
        self._open.log(numbers, update)

    def _begin(self, trainer: TrainerLike) -> TrackedRun:
        """Open the journal of reported points, and return the run as the trackers see it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / _JOURNAL
        earlier = list(read_json_lines(path))
        first = earlier[0] if earlier and earlier[0].get("event") == "run" else {}
        is_resumed = bool(first) and trainer.progress.update > 0
        self._journal = MetricsLog(path)
        self._written = {}
        identities: dict[str, str] = {}
        if is_resumed:
            for record in earlier:
                kind, update = str(record.get("event")), record.get("update")
                identities |= record["identities"] if isinstance(record.get("identities"), dict) else {}
                if isinstance(update, int):
                    self._written[kind] = max(update, self._written.get(kind, -1))
        else:
            self._journal.cut_back(0)
        word = re.sub(r"[^A-Za-z0-9_-]+", "-", self.run_name)[:50]
        return TrackedRun(
            project=self.project,
            name=self.run_name,
            folder=self.folder,
            id=(first if is_resumed else {}).get("id", f"{word}-{os.urandom(4).hex()}"),
            config=plain_config(_settings_of(trainer) if self.config is None else self.config),
            is_resumed=is_resumed,
            replaces=bool(first) and not is_resumed,
            identities=identities,
        )

    def _note(self, record: Mapping[str, Any]) -> None:
        if self._journal is not None:
            with contextlib.suppress(OSError):  # at worst a resumed run repeats a point
                self._journal.append(record)


def _counts(history: Any) -> dict[str, int]:
    return {name: len(list(history.get_metric_values(name))) for name in sorted(history.get_metric_names())}


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)):
        return value
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (2,))) == 1:  # a tensor or an array of one number
        return float(value.item())
    return None


def _settings_of(trainer: TrainerLike) -> dict[str, Any]:
    optimizer, model = trainer.optimizer, trainer.get_model()
    parameters = list(model.parameters()) if hasattr(model, "parameters") else []
    groups = getattr(optimizer, "param_groups", None) or [{}]
    own = ("is_local_process_zero", "is_world_process_zero")
    return {
        "model": type(model).__name__,
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "optimizer": type(optimizer).__name__,
        "lr": groups[0].get("lr"),
        "weight_decay": groups[0].get("weight_decay"),
        "seed": getattr(trainer, "seed", None),
        **{name: value for name, value in trainer.run_config.to_dict().items() if name not in own},
    }
