"""The end of a run: best weights, a last full evaluation, the model folder, the result."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from loopwright.callbacks import TrainerCallback
from loopwright.checkpoint.atomic_replace import put_in_place, restore_moved
from loopwright.checkpoint.store import read_manifest, update_of
from loopwright.engine.memory import forget_frames
from loopwright.engine.sharding import whole_model
from loopwright.metrics import Intervals
from loopwright.metrics.paired import RowScores
from loopwright.protocols import TrainerLike
from loopwright.report import write_report
from loopwright.results import TrainResult
from loopwright.run_folder import RunFolder
from loopwright.runs.clock import TimeSpent
from loopwright.runs.console.end import print_summary
from loopwright.runs.console.screen import Screen, Waiting
from loopwright.runs.creation import removed_on_error
from loopwright.runs.job import RunJob
from loopwright.runs.model_card import model_card
from loopwright.runs.model_sums import write_sums
from loopwright.runs.ownership import Ownership
from loopwright.runs.trainer import HeedStop, TaskTrainer
from loopwright.runs.verdicts import ROWS, save_rows, verdict_of
from loopwright.runs.weights import load_weights
from loopwright.tasks.adapters import merged
from loopwright.tasks.base import Job
from loopwright.tasks.scoring import Examples, as_json, intervals_as_json, write_lines, write_table

_SKELETON = "skeleton"  # in the model folder of a run with adapters: what it was built from


def finish(run: RunJob, trained: TrainResult, spent: TimeSpent) -> None:
    job, folder, screen = run.job, run.folder, run.screen
    assert folder is not None
    checkpoint = load_weights(job, folder)
    began = time.monotonic()
    with screen.waiting("evaluating the best model") as waiting:
        found = evaluate(job, job.eval_dataset, folder.evaluation, screen.print, waiting, run.owner)
    metrics, examples = found.metrics, found.examples
    num_evaluations = max(1, len(list(run.trainer.run_history.get_metric_values(run.best.name))))
    result: dict[str, Any] = {
        "task": run.task.name,
        "metric": run.best.short_name,
        "direction": run.best.direction,
        "update": update_of(read_manifest(checkpoint)),
        **as_json(metrics, found.tokens),
        **intervals_as_json(found.intervals),
        "baselines": {name: dict(values) for name, values in run.baselines.items()},
        "verdict": verdict_of(run.directions, metrics, found.rows, run.baselines, run.baseline_rows, num_evaluations),
        "evaluations": num_evaluations,
        "num_suspects": len(examples.suspects),
        "updates": trained.updates,
        "epochs": trained.epochs,
        "seconds": round(trained.seconds, 1),
        "stop_reason": trained.stop_reason,
        **_test(run, folder),
    }
    spent.evaluation += time.monotonic() - began
    job.model = whole_model(job.model)
    if os.environ.get("RANK", "0") in ("", "0"):
        run.owner.check_folder()
        job.model, check = merged(job.model)
        if check is not None and not check.is_passed:
            screen.remark("warning", f"{check.text}: prefer lw export with --adapters to the model folder")
        drawn = _illustrate(job, folder, examples, screen)
        replace_folder(folder.model, lambda aside: _write_model(job, aside, folder, result))
        folder.write_result(result)
        try:
            write_report(folder.path)
        except OSError as error:  # the run itself is safe
            screen.remark("note", f"the report was not written: {error}")
        run.owner.check_folder()
        print_summary(run, result, examples, drawn, spent)


def _test(run: RunJob, folder: RunFolder) -> dict[str, Any]:
    """Return the results on the test data, which the verdict is then on; empty without any, or if it has no labels."""
    job, screen = run.job, run.screen
    if not job.data.has("test"):
        return {}
    missing = job.data.missing_roles("test", run.task.schema(run.args))
    if missing:
        screen.remark("note", f"the test file has no {' and no '.join(missing)}: it is not scored; lw predict reads it")
        return {}
    rows = job.data.first_rows("test", run.args.max_test_samples)
    dataset = run.task.create_dataset(job, rows, is_labelled=True)
    with screen.waiting("evaluating on the test data") as waiting:
        found = evaluate(job, dataset, folder.evaluation / "test", screen.print, waiting, run.owner)
    values = {**as_json(found.metrics, found.tokens), **intervals_as_json(found.intervals)}
    tested = {f"test_{name}": value for name, value in values.items()}
    scored = found.rows, run.baselines, run.baseline_rows
    return {**tested, "verdict": verdict_of(run.directions, found.metrics, *scored, num_picked=1, prefix="test_")}


class Evaluated(NamedTuple):
    """The outcome of an evaluation; `tokens` are those of metrics for which the script decides."""

    metrics: dict[str, float]
    intervals: Intervals
    tokens: dict[str, str]
    examples: Examples
    rows: dict[str, RowScores]


def evaluate(
    job: Job,
    dataset: Any,
    folder: Path | None,
    report: Callable[[str], None],
    waiting: Waiting | None = None,
    owner: Ownership | None = None,
) -> Evaluated:
    """Evaluate a job's model; a folder, if given, gets the predictions."""
    callbacks: list[TrainerCallback] = [] if waiting is None else [CountBatches(waiting)]
    callbacks += [] if owner is None else [HeedStop(owner)]
    trainer = TaskTrainer(job, callbacks=callbacks, report=lambda kind, text, **fields: report(text))
    found = trainer.evaluate_fully(dataset, None if folder is None else folder / "predictions.jsonl")
    bounds = {f"eval_{name}{end}" for name in trainer.intervals for end in ("_low", "_high")}
    metrics = {
        name.removeprefix("eval_"): float(value)
        for name, value in found.metrics.items()
        if name.startswith("eval_") and name not in bounds
    }
    metrics["loss"] = float(found.metrics["evaluation_loss"])
    if folder is not None and trainer.is_first:
        save_rows(folder / ROWS, trainer.rows)
        write_lines(folder / "worst.jsonl", _with_places(trainer.examples.worst, dataset))
        if trainer.examples.suspects:
            suspects = _with_places(trainer.examples.suspects, dataset)
            write_table(folder / "suspects.csv", suspects, job.args.safe_csv)
    trainer.intervals.missing = {name: why for name, why in trainer.intervals.missing.items() if name in metrics}
    return Evaluated(metrics, trainer.intervals, trainer.tokens, trainer.examples, trainer.rows)


def _with_places(samples: list[dict[str, Any]], dataset: Any) -> list[dict[str, Any]]:
    find = getattr(getattr(dataset, "rows", None), "place", None)
    if find is None:
        return samples
    return [{"position": one["position"], "place": find(one["position"]), **one} for one in samples]


class CountBatches(TrainerCallback):
    """Shows the progress of an evaluation."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting

    def on_eval_step_end(self, trainer: TrainerLike, *args: Any, step: int = 0, **kwargs: Any) -> None:
        self._waiting.to(step + 1, len(trainer.eval_loader))


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder aside, then swap it in: readers see either the old or the new one."""
    aside = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    with removed_on_error(aside):
        write(aside)
    put_in_place(aside, folder)


def model_source(run: RunFolder, is_finished: bool = False) -> Path:
    """Return the folder to build a run's model from: before its end the skeleton, which merging does not change."""
    restore_moved(run.model)
    kept = run.model / _SKELETON
    return kept if kept.is_dir() and not is_finished else run.model


def _illustrate(job: Job, run: RunFolder, examples: Examples, screen: Screen) -> list[Path]:
    """Return the files that the task drew or wrote; its errors are logged, and the model is written anyway."""
    try:
        return job.task.illustrate(job, run, examples.worst)
    except Exception as error:  # noqa: BLE001 - a model that generates may raise anything, memory that has run out too
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        forget_frames(error)
        screen.remark("note", f"no pictures and samples at the end ({reason})")
        return []


def _write_model(job: Job, folder: Path, run: RunFolder, result: Mapping[str, Any]) -> None:
    if job.args.lora:
        shutil.copytree(model_source(run), folder / _SKELETON)
    job.task.save(job, folder)
    (folder / "README.md").write_text(model_card(job, run, result), encoding="utf-8")
    write_sums(folder)
