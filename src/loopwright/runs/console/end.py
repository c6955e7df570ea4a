"""The summary at the end of a run: time use, best model, its mistakes, files, next steps."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopwright.config.display_width import truncate
from loopwright.config.program import program
from loopwright.config.safe_text import visible
from loopwright.metrics.words import first_words
from loopwright.report import missing_intervals, summary_of
from loopwright.runs.clock import TimeSpent
from loopwright.runs.console.screen import clock, in_order, lasted, metrics_text
from loopwright.runs.provenance import name_of
from loopwright.tasks.base import Job
from loopwright.tasks.scoring import Examples

if TYPE_CHECKING:
    from loopwright.runs.job import RunJob

_TEXT_ROLES = ("text", "question", "source", "sentence", "context", "image")
_MOST_COLUMNS = 61
_MOST_WORDS = 6


def print_summary(
    run: RunJob, result: Mapping[str, Any], examples: Examples, drawn: Sequence[Path], spent: TimeSpent
) -> None:
    folder, screen = run.folder, run.screen
    assert folder is not None
    place = os.path.normpath(folder.path)
    total = time.monotonic() - screen.began
    trained = lasted(result["seconds"])
    screen.block("done in", f"{trained} of training; this command took {clock(total)} ({spent.text(total)})")
    metric = result["metric"]
    baselines = [f"{name} {values[metric]:.4f}" for name, values in result["baselines"].items() if metric in values]
    beside = f"   ({', '.join(baselines)})" if baselines else ""
    shown = metrics_text(in_order(result["metrics"], metric), result["intervals"], result.get("tokens"))
    screen.block("best", f"step {result['update']}  {shown}{beside}", colour="green")
    screen.block("", summary_of(folder.path), *missing_intervals(result.get("no_intervals", {})))
    if "test_metrics" in result:
        missing = missing_intervals(result.get("test_no_intervals", {}))
        tested = in_order(result["test_metrics"], metric)
        screen.block("test", metrics_text(tested, result["test_intervals"], result.get("test_tokens")), *missing)
    if examples.worst:
        more = f"   {len(examples.worst)} in report.html" if len(examples.worst) > 1 else ""
        screen.block("worst", f"{mistake_text(examples.worst[0])}{more}")
    if examples.suspects:
        number = len(examples.suspects)
        what = "1 row looks" if number == 1 else f"{number} rows look"
        screen.block("", f"{what} mislabelled (model sure, label disagrees): {place}/eval/suspects.csv")
    screen.block("files", f"{place}/model   {place}/report.html")
    if drawn:
        screen.block("", ", ".join(str(path.relative_to(folder.path)) for path in drawn))
    name = name_of(folder)
    longer = f"--epochs {2 * max(int(result['epochs']), 1)}"
    if run.training.max_steps > 0:  # overrides the epochs
        longer = f"--max_steps {2 * run.training.max_steps}"
    verbs = [f"report {name} --open", f"predict {name} {_input(run.job)}", f"resume {name} {longer}"]
    if run.job.task.dialogue is not None:
        verbs.insert(1, f"chat {name}")
    commands = [f"{program()} {verb}" for verb in verbs]
    screen.block("next", *commands, wraps=False)
    screen.events.add("end", next=commands)


def mistake_text(sample: Mapping[str, Any]) -> str:
    parts = []
    role = next((role for role in _TEXT_ROLES if isinstance(sample.get(role), str)), None)
    if role is not None:
        given = Path(sample[role]).name if role == "image" else " ".join(sample[role].split())
        parts.append(f"'{truncate(given, _MOST_COLUMNS)}'")
    elif isinstance(sample.get("tokens"), list):
        parts.append(f"'{_short(' '.join(map(str, sample['tokens'])))}'")
    elif "position" in sample:
        parts.append(f"row {sample['position']}")
    predicted, true = sample.get("prediction"), sample.get("reference")
    if isinstance(predicted, (str, int, float)):
        parts.append(f"→ {_short(predicted)}{f', true {_short(true)}' if isinstance(true, (str, int, float)) else ''}")
    sure = sample.get("sure", sample.get("confidence"))
    if sure is not None and math.isfinite(sure):
        parts.append(f"sure {sure:.2f}")
    if (loss := sample.get("loss")) is not None:
        parts.append(f"loss {loss:.3g}" if math.isfinite(loss) else f"loss is {loss}")
    return " · ".join(parts).replace(" · → ", " → ")


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return truncate(text, _MOST_COLUMNS)


def _input(job: Job) -> str:
    """Return an example input to predict, as one would type it: a validation row or a file."""
    row = job.data.rows("validation")[0]
    if isinstance(row.get("image"), str):
        return shlex.quote(os.path.relpath(row["image"]))
    if isinstance(row.get("text"), str) and "text_pair" not in row:
        text = job.task.example_input(job, first_words(row["text"], _MOST_WORDS))
        return shlex.quote(visible(text) or "a text")
    file = job.plan.files[-1].path
    return shlex.quote(os.path.relpath(file)) if Path(file).is_file() else "FILE"
