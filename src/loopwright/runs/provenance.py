"""Where a run comes from: its command, machine and versions, and the facts of its JSON events. No torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopwright.config.secrets import command_without_secrets, without_secrets
from loopwright.run_folder import RunFolder, write_atomically
from loopwright.runs.code_state import code_state
from loopwright.sources import DataPlan

if TYPE_CHECKING:
    from loopwright.runs.job import RunJob

_PACKAGES = ("loopwright", "torch", "accelerate", "transformers", "tokenizers", "numpy", "peft", "datasets")
_CHANGES = "uncommitted changes"


def data_facts(plan: DataPlan) -> dict[str, Any]:
    return {
        "files": [{"path": file.path, "rows": file.num_rows, "sha256": file.sha256} for file in plan.files],
        "columns": dict(plan.columns),
        "rows": {name: len(split) for name, split in plan.splits.items()},
        "labels": {name: dict(counts) for name, counts in plan.counts.items()},
    }


def run_facts(run: RunJob) -> dict[str, Any]:
    job, length = run.job, run.length
    parameters = list(job.model.parameters())
    return {
        "task": run.task.name,
        "data": data_facts(job.plan),
        "model": {
            "name": run.args.model,
            "parameters": sum(one.numel() for one in parameters),
            "trained": sum(one.numel() for one in parameters if one.requires_grad),
        },
        "updates": length.updates,
        "epochs": length.epochs,
        "evaluations": length.evaluations_after(0) - 1,
        "batch": run.training.train_batch_size * run.window,
        "processes": run.trainer.num_processes,
        "learning_rate": run.training.learning_rate,
        "metric": run.best.short_name,
        "direction": run.best.direction,
        "baselines": {name: dict(values) for name, values in run.baselines.items()},
        "expected_seconds": length.expected_seconds(),
    }


def name_of(run: RunFolder) -> str:
    return shlex.quote(run.id if run.path.name == run.id else os.path.normpath(run.path))


def place_facts(run: RunFolder) -> dict[str, Any]:
    return {"run": run.id, "folder": os.path.normpath(run.path)}


def path_facts(run: RunFolder) -> dict[str, str]:
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


def command_facts(command: Sequence[str] | None) -> dict[str, str]:
    """Return how a run was started, where, and with which versions; `command` is None for a user's script."""
    facts = {
        "command": shlex.join(command_without_secrets(command if command is not None else sys.argv)),
        "folder": str(Path.cwd()),
        "python": f"{platform.python_version()} on {platform.platform()}",
    }
    for name in _PACKAGES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts


def write_command(run: RunFolder, command: Sequence[str] | None) -> None:
    facts, state = command_facts(command), code_state(Path.cwd())
    difference = "" if state is None else state.difference and without_secrets(state.difference)
    if state is not None:
        facts["git commit"] = state.commit
    if difference is None:
        facts[_CHANGES] = "unknown: git failed, took too long, or the diff is too large"
    lines = [f"{name}: {value}" for name, value in facts.items()]
    write_atomically(run.command, "\n".join([*lines, *(["", difference] if difference else [])]) + "\n")
    if difference:
        facts[_CHANGES] = f"{len(difference.splitlines()):,} lines of diff in command.txt"
    run.record(environment=facts)
