"""What scripts are told of a run before its first update: data, model, length. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from loopwright.run_folder import RunFolder
from loopwright.runs.clock import Course
from loopwright.sources import DataPlan
from loopwright.tasks.base import Job


def data_facts(plan: DataPlan) -> dict[str, Any]:
    """Return what is told of the data: its files, its columns, and how many rows each split has."""
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
    """Return what is told of a run; called once its length is known.

    Args:
        job: of the run.
        course: what it has before it.
        best: the metric that decides, as the history has it, and "min" or "max".
        batch: samples of an update.
        num_processes: that train.
        floors: what trivial methods reach.
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
    """Return where a run is."""
    return {"run": run.id, "folder": os.path.normpath(run.path)}


def path_facts(run: RunFolder) -> dict[str, str]:
    """Return the files and folders of a run that there are, by what they are."""
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
