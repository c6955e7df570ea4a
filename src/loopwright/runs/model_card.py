"""The model card, README.md beside the weights: the model, its scores, its data, and how it was trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopwright.checkpoint.store import read_manifest, update_of
from loopwright.config.safe_text import inert
from loopwright.models import SmallModel
from loopwright.quantities import counted
from loopwright.report import missing_intervals, of_both_splits
from loopwright.report.summary import verdict_text
from loopwright.run_folder import METRICS, RunFolder, read_json, read_metrics
from loopwright.runs.console.screen import eval_metrics, metric_text
from loopwright.runs.data import used_rows
from loopwright.runs.model_sums import BASE_CONFIG
from loopwright.runs.weights import best_checkpoint
from loopwright.tasks.adapters import quantization_options
from loopwright.tasks.base import Job

_MOST_LABELS = 50


def model_card(job: Job, run: RunFolder, result: Mapping[str, Any]) -> str:
    num_parameters = sum(parameter.numel() for parameter in job.model.parameters())
    table = _table("validation", result, "", result["baselines"])
    lines = [
        f"# {job.task.name}: {inert(run.id)}",
        "",
        f"Trained with loopwright, from {inert(job.args.model or 'random weights')}; {num_parameters:,} parameters. "
        f"{_chosen(result)}",
        *(["", *table] if result["metrics"] else []),
        *(["", _verdict(result)] if "baseline" in result.get("verdict", {}) else []),
    ]
    if "test_metrics" in result:
        lines += ["", *_table("test", result, "test_", {})]
    if missing := missing_intervals(of_both_splits(result, "no_intervals")):
        lines += ["", *map(inert, missing)]
    lines += ["", "## How to open it", "", *_how_to_open(job)]
    lines += ["", "## Data", "", *_data(job), "", "## Limits", "", *_limits(job, result), "", "## How it was made", ""]
    lines += [
        f"Seed {job.training.seed}, "
        f"{'' if result['epochs'] is None else _several(result['epochs'], 'full epoch') + ', '}"
        f"{_several(result['updates'], 'update')}, learning rate "
        f"{job.training.learning_rate:g}, batch {job.training.train_batch_size}, {job.training.mixed_precision} mixed "
        "precision. All settings are in config.yaml of the run, all figures in report.html.",
        "",
    ]
    return "\n".join(lines)


def card_so_far(job: Job, run: RunFolder) -> str:
    """Return the card of an unfinished run, with the scores of the evaluation after which its weights were saved."""
    checkpoint = best_checkpoint(run)
    assert checkpoint is not None, "the weights are those of a checkpoint"
    update = update_of(read_manifest(checkpoint))
    best = read_json(run.checkpoints / "best.json", {})
    records = [record for record in read_metrics(run.path / METRICS) if record.get("update") == update]
    evaluations = (record for record in reversed(records) if record.get("event") == "evaluation")
    latest: Mapping[str, Any] = next(evaluations, {})
    metrics = eval_metrics({name: value for name, value in latest.items() if isinstance(value, float)})
    intervals = {
        name: (latest[f"eval_{name}_low"], latest[f"eval_{name}_high"])
        for name in metrics
        if f"eval_{name}_low" in latest and f"eval_{name}_high" in latest
    }
    reached = run.status.get("update") or update
    result = {
        "is_unfinished": True,
        "metric": str(best.get("metric", "")).removeprefix("eval_"),
        "direction": best.get("direction"),
        "update": update,
        "metrics": metrics,
        "intervals": intervals,
        "baselines": read_json(run.path / "baselines.json", {}) if metrics else {},
        "updates": max(reached, update),
        "epochs": None,
        "num_suspects": 0,
    }
    return model_card(job, run, result)


def _chosen(result: Mapping[str, Any]) -> str:
    place = f"after update {result['update']} of {result['updates']}"
    if result.get("is_unfinished"):
        place += ", and the run is not finished"
    if not result["metric"]:
        return f"The model {place}; it was not evaluated."
    direction = "more is better" if result["direction"] == "max" else "less is better"
    return f"The best model by {inert(result['metric'])} ({direction}) on the validation data, {place}."


def _verdict(result: Mapping[str, Any]) -> str:
    texts = {name: inert(value) if isinstance(value, str) else value for name, value in result["verdict"].items()}
    return verdict_text(texts, inert(result["metric"]))


def _several(count: float, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _how_to_open(job: Job) -> list[str]:
    inner = job.model.get_base_model() if hasattr(job.model, "peft_config") else job.model
    kind = type(inner)
    if isinstance(job.model, SmallModel):
        text = "A small net of loopwright"
        code = ["from loopwright import models", "", 'model = models.load("FOLDER")']
    elif hasattr(kind, "from_pretrained"):
        text = "A model of transformers"
        is_text = hasattr(job.processor, "convert_tokens_to_ids")
        name, opener = ("tokenizer", "AutoTokenizer") if is_text else ("processor", "AutoImageProcessor")
        code = [
            f"from transformers import {', '.join(sorted((opener, kind.__name__)))}",
            "",
            f'model = {kind.__name__}.from_pretrained("FOLDER")',
        ]
        if inner is not job.model:
            text = "Adapters for a model of transformers, as peft reads them"
            code = _opening_adapters(job, inner, opener)
        code.append(f'{name} = {opener}.from_pretrained("FOLDER")')
    else:
        text = "Your own module: model.safetensors holds its weights, your code creates it"
        code = ["from safetensors.torch import load_file", "", 'weights = load_file("FOLDER/model.safetensors")']
    lines = [f"{text}; FOLDER is the folder of this file.", "", "```python", *code, "```"]
    notes = job.task.model_card_lines(job)
    return [*lines, "", *notes] if notes else lines


def _opening_adapters(job: Job, base: Any, opener: str) -> list[str]:
    """Return the lines that open the base model, with the head and the vocabulary of the run, and its adapters."""
    kind, resized, names = type(base).__name__, [], {opener, type(base).__name__}
    options = [f'config="FOLDER/{BASE_CONFIG}"', "ignore_mismatched_sizes=True"]
    if job.args.load_in:
        quantized = ", ".join(f"{name}={value!r}" for name, value in quantization_options(job.training.bf16).items())
        options.append(f"quantization_config=BitsAndBytesConfig({quantized})")
        resized.append(f"model.resize_token_embeddings({len(base.get_input_embeddings().weight)})")
        names.add("BitsAndBytesConfig")
    if base.can_generate():
        resized.append('model.generation_config = GenerationConfig.from_pretrained("FOLDER")')
        names.add("GenerationConfig")
    return [
        "from peft import PeftModel",
        f"from transformers import {', '.join(sorted(names))}",
        "",
        f"model = {kind}.from_pretrained(",
        *(f"    {option}," for option in (json.dumps(job.args.model, ensure_ascii=False), *options)),
        ")",
        *resized,
        'model = PeftModel.from_pretrained(model, "FOLDER")',
    ]


def _table(split: str, result: Mapping[str, Any], prefix: str, baselines: Any) -> list[str]:
    metrics, intervals, tokens = (result.get(f"{prefix}{name}", {}) for name in ("metrics", "intervals", "tokens"))
    names = {name: inert(f"{name} ({tokens[name]})" if name in tokens else name) for name in metrics}
    rows = [
        f"| {names[name]} | {metric_text(value, intervals.get(name))} | {_interval(intervals.get(name))} |"
        for name, value in metrics.items()
    ]
    rows += [
        f"| {inert(name)} (baseline): {inert(metric)} | {value:.4f} | |"
        for name, values in baselines.items()
        for metric, value in values.items()
        if not metric.startswith("test_")
    ]
    return [f"| {split} | value | 95 % interval |", "|---|---|---|", *rows]


def _data(job: Job) -> list[str]:
    lines = [
        f"- {inert(Path(file.path).name)}, {counted(file.num_rows, 'row')}, sha256 {file.sha256}"
        for file in job.plan.files
    ]
    lines.append(f"- rows: {', '.join(f'{name} {len(split):,}' for name, split in job.plan.splits.items())}")
    if used := used_rows(job.plan, job.args):
        lines.append(f"- {used}")
    lines.append(
        f"- columns: {', '.join(f'{inert(role)} = {inert(column)}' for role, column in job.plan.columns.items())}"
    )
    names = list(job.plan.labels.names) if job.plan.labels is not None and job.plan.labels.names else []
    if names:
        more = f" and {len(names) - _MOST_LABELS} more" if len(names) > _MOST_LABELS else ""
        lines.append(f"- labels: {', '.join(map(inert, names[:_MOST_LABELS]))}{more}")
    return lines


def _limits(job: Job, result: Mapping[str, Any]) -> list[str]:
    lines = [
        "- In 95 of 100 evaluations an interval contains the true value on data of this kind. It says nothing about "
        "other kinds of data."
    ]
    if "test_metrics" not in result:
        lines.append(
            "- The model was chosen on the validation data, so its figures there are a little too good; no test data "
            "was given."
        )
    if result["num_suspects"]:
        what = "1 row looks" if result["num_suspects"] == 1 else f"{result['num_suspects']} rows look"
        lines.append(f"- In the validation data {what} mislabelled (eval/suspects.csv).")
    return lines


def _interval(bounds: Any) -> str:
    return "" if bounds is None else f"{bounds[0]:.4f} to {bounds[1]:.4f}"
