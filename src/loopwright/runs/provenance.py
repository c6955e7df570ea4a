"""The facts about a run in its JSON events before the first update: data, model, length. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from loopwright.run_folder import RunFolder
from loopwright.runs.clock import Course
from loopwright.sources import DataPlan
from loopwright.tasks.base import Job


def data_facts(plan: DataPlan) -> dict[str, Any]:
    """Return the facts about the data: files, columns, and rows per split."""
    return {
        "files": [{"path": file.path, "rows": file.num_rows, "sha256": file.sha256} for file in plan.files],
        "columns": dict(plan.columns),
        "rows": {name: len(split) for name, split in plan.splits.items()},
        "labels": {name: dict(counts) for name, counts in plan.counts.items()},
    }


def run_facts(
    job: Job,
    course: Course,
    best: tuple[str, str],
    batch: int,
    num_processes: int,
    floors: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Return the facts about a run; called once its length is known.

    Args:
        job: of the run.
        course: its length and schedule.
        best: the decisive metric, as named in the history, and "min" or "max".
        batch: samples of an update.
        num_processes: the world size.
        floors: the scores of the trivial baselines.
    """
    parameters = list(job.model.parameters())
    return {
        "task": job.task.name,
        "data": data_facts(job.plan),
        "model": {
            "name": job.args.model,
            "parameters": sum(one.numel() for one in parameters),
            "trained": sum(one.numel() for one in parameters if one.requires_grad),
        },
        "updates": course.updates,
        "epochs": course.epochs,
        "evaluations": course.evaluations_after(0) - 1,
        "batch": batch,
        "processes": num_processes,
        "learning_rate": job.training.learning_rate,
        "metric": best[0].removeprefix("eval_"),
        "direction": best[1],
        "baselines": {name: dict(values) for name, values in floors.items()},
        "expected_seconds": course.expected_seconds(),
    }


def place_facts(run: RunFolder) -> dict[str, Any]:
    """Return the location of a run."""
    return {"run": run.id, "folder": os.path.normpath(run.path)}


def path_facts(run: RunFolder) -> dict[str, str]:
    """Return the existing files and folders of a run, by kind."""
    paths = {
        "model": run.model if run.is_finished else None,
        "report": run.path / "report.html",
        "result": run.result,
        "config": run.config,
        "metrics": run.path / "metrics.jsonl",
        "log": run.log,
        "checkpoints": run.checkpoints,
    }
    return {name: os.path.normpath(path) for name, path in paths.items() if path is not None and path.exists()}
