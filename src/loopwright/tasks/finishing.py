"""The end of a run: the best weights, a last evaluation with everything kept, the model folder, the result."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loopwright.checkpoint.store import read_manifest, update_of
from loopwright.engine.sharding import whole_model
from loopwright.results import TrainResult
from loopwright.run_folder import RunFolder
from loopwright.tasks.adapting import merged
from loopwright.tasks.base import Job
from loopwright.tasks.restoring import load_weights
from loopwright.tasks.scoring import Examples, as_json, write_lines, write_table
from loopwright.tasks.screen import Screen, clock, metrics_text
from loopwright.tasks.trainer import TaskTrainer


def finish(
    job: Job,
    run: RunFolder,
    best: tuple[str, str],
    trained: TrainResult,
    floors: Mapping[str, Mapping[str, float]],
    screen: Screen,
) -> None:
    """Evaluate the best model, write it and the result, and say so; called once a run has trained to its end."""
    checkpoint = load_weights(job, run)
    metrics, intervals, examples = evaluate(job, job.eval_dataset, run.evaluation, screen.say)
    result: dict[str, Any] = {
        "task": job.task.name,
        "metric": best[0].removeprefix("eval_"),
        "direction": best[1],
        "update": update_of(read_manifest(checkpoint)),
        **as_json(metrics),
        "intervals": {name: list(bounds) for name, bounds in intervals.items()},
        "baselines": {name: dict(values) for name, values in floors.items()},
        "num_suspects": len(examples.suspects),
        "updates": trained.updates,
        "epochs": trained.epochs,
        "seconds": round(trained.seconds, 1),
        "stop_reason": trained.stop_reason,
    }
    missing = job.data.missing_roles("test", job.task.schema(job.args)) if job.data.has("test") else []
    if missing:
        screen.say(
            f"note: the test file has no {' and no '.join(missing)}: it is not scored; loopwright predict reads it"
        )
    elif job.data.has("test"):
        dataset = job.task.create_dataset(job, job.data.rows("test"), is_labelled=True)
        tested, spread, _ = evaluate(job, dataset, run.evaluation / "test", screen.say)
        result |= {f"test_{name}": value for name, value in as_json(tested).items()}
        result["test_intervals"] = {name: list(bounds) for name, bounds in spread.items()}
    job.model = whole_model(job.model)
    drawn: list[Path] = []
    if not os.environ.get("RANK") or os.environ["RANK"] == "0":
        job.model = merged(job.model)
        drawn = job.task.illustrate(job, run, examples.worst)
        replace_folder(run.model, lambda folder: _write_model(job, folder, run, result))
        run.write_result(result)
        _write_report(run, screen)
    _say_result(run, result, examples, screen)
    if drawn:
        screen.block("drawn", ", ".join(str(path.relative_to(run.path)) for path in drawn))


def evaluate(
    job: Job, dataset: Any, folder: Path | None, say: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, tuple[float, float]], Examples]:
    """Evaluate a job's model on a dataset, and write predictions and examples into a folder.

    Returns:
        The metrics and the loss by name, their intervals, and the worst and the suspected samples.
    """
    trainer = TaskTrainer(job, say=say)
    found = trainer.evaluate_fully(dataset, None if folder is None else folder / "predictions.jsonl")
    bounds = {f"eval_{name}{end}" for name in trainer.intervals for end in ("_low", "_high")}
    metrics = {
        name.removeprefix("eval_"): float(value)
        for name, value in found.metrics.items()
        if name.startswith("eval_") and name not in bounds
    }
    metrics["loss"] = float(found.metrics["evaluation_loss"])
    if folder is not None and trainer.is_first:
        write_lines(folder / "worst.jsonl", trainer.examples.worst)
        if trainer.examples.suspects:
            write_table(folder / "suspects.csv", trainer.examples.suspects)
    return metrics, trainer.intervals, trainer.examples


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder aside, and put it in the place of the one of that name: whoever looks finds the old or the new."""
    aside, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for leftover in (aside, old):
        shutil.rmtree(leftover, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        write(aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _write_report(run: RunFolder, screen: Screen) -> None:
    from loopwright.report import write_report

    try:
        write_report(run.path)
    except OSError as error:  # the run itself is safe
        screen.say(f"note: the report was not written: {error}")


def _write_model(job: Job, folder: Path, run: RunFolder, result: Mapping[str, Any]) -> None:
    job.task.save(job, folder)
    (folder / "README.md").write_text(_card(job, run, result), encoding="utf-8")


def _card(job: Job, run: RunFolder, result: Mapping[str, Any]) -> str:
    """Return the model card: what it is, how good, on what data, how it was made."""
    rows = [
        f"| {name} | {value:.4f} | {_interval(result['intervals'].get(name))} |"
        for name, value in result["metrics"].items()
    ]
    floors = [
        f"| {name}: {metric} | {value:.4f} | |"
        for name, values in result["baselines"].items()
        for metric, value in values.items()
    ]
    files = [f"- {Path(file.path).name}, {file.num_rows:,} rows, sha256 {file.sha256}" for file in job.plan.files]
    return "\n".join(
        [
            f"# {job.task.name}: {run.id}",
            "",
            f"Trained with loopwright, from {job.args.model or 'random weights'}. The best model by {result['metric']} "
            f"({'more' if result['direction'] == 'max' else 'less'} is better), after update {result['update']}.",
            "",
            "| validation | value | 95 % interval |",
            "|---|---|---|",
            *rows,
            *floors,
            "",
            "Data:",
            "",
            *files,
            "",
            f"Seed {job.training.seed}. All settings are in config.yaml of the run.",
            "",
        ]
    )


def _interval(bounds: Any) -> str:
    return "" if bounds is None else f"{bounds[0]:.4f} to {bounds[1]:.4f}"


def _say_result(run: RunFolder, result: Mapping[str, Any], examples: Examples, screen: Screen) -> None:
    metric = result["metric"]
    intervals = {name: tuple(bounds) for name, bounds in result["intervals"].items()}
    floors = [f"{name} {values[metric]:.4f}" for name, values in result["baselines"].items() if metric in values]
    beside = f"   ({', '.join(floors)})" if floors else ""
    screen.say(f"done in {clock(result['seconds'])}")
    screen.block("best", f"step {result['update']}  {metrics_text(result['metrics'], intervals)}{beside}")
    if "test_metrics" in result:
        spread = {name: tuple(bounds) for name, bounds in result["test_intervals"].items()}
        screen.block("test", metrics_text(result["test_metrics"], spread))
    if examples.worst:
        screen.block(
            "worst", f"{len(examples.worst)} examples with the largest losses: {run.evaluation / 'worst.jsonl'}"
        )
    if examples.suspects:
        screen.block(
            "",
            f"{len(examples.suspects)} rows look mislabelled (model sure, label disagrees): "
            f"{run.evaluation / 'suspects.csv'}",
        )
    screen.block("files", str(run.model), str(run.path / "report.html"))
    screen.block("next", f"loopwright predict {run.path} ...   ·   loopwright resume {run.path} --epochs N")
