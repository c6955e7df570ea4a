"""The verbs `runs`, `stop` and `verify`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from loopwright.cli.exit_codes import DONE, NO_CHECKPOINT, failed, say_failure
from loopwright.cli.help_text import columns
from loopwright.cli.json_output import print_line, print_objects
from loopwright.cli.parser import VerbParser, add_json
from loopwright.run_folder import find_run, runs_root
from loopwright.run_folder.summaries import RunSummary, is_owned, list_runs
from loopwright.runs.console.json_events import EventLines
from loopwright.runs.console.screen import Screen, lasted

# Abbreviations for a narrow terminal, applied in order: the metric's direction, the reason of the state, its name.
_SHORTER: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("best", lambda cell: cell.partition(" (")[0]),
    ("state", lambda cell: cell.partition(",")[0]),
    ("best", lambda cell: cell.rpartition(" ")[2]),
)


def runs(words: list[str]) -> int:
    """List all runs, newest first."""
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
        print_objects(*(asdict(run) for run in found))
        return DONE
    if not found:
        print_line(f"no runs yet in {root}")
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
        print_line("  ".join(f"{row[name]:<{widths[name]}}" for name in shown).rstrip())
    if asked.sort == "metric" and "task" not in shown and len({run.task for run in found}) > 1:
        print_line("(each task by itself: a metric of one cannot be held against that of another)")
    return DONE


def _widths(rows: list[dict[str, str]]) -> dict[str, int]:
    return {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}


def _row(run: RunSummary, root: Path, now: float) -> dict[str, str]:
    """Return the table row of a run; a run outside the root is named by its folder."""
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
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(int(seconds), 0)} s"


def _rank(run: RunSummary) -> tuple[bool, str, str, float]:
    """Return the sort key of a run: runs with a metric first, grouped by task and metric, best first."""
    value = run.value or 0.0
    return run.value is None, run.task, run.metric or "", -value if run.is_more_better else value


def stop(words: list[str]) -> int:
    """Ask a run to stop gracefully."""
    run = find_run(_one_run("stop", words).run)
    state = run.status["state"]
    if state == "running" and is_owned(run.path):
        run.ask_to_stop()
        print_line(f"{run.id} was asked to stop")
    else:
        why = "its process is gone" if state == "running" else state
        print_line(f"{run.id} is not running ({why}): nothing to stop")
    return DONE


def verify(words: list[str]) -> int:
    """Verify every byte of the checkpoints of a run, or of a folder that a `Trainer` saves to."""
    asked = _one_run("verify", words)
    folder = Path(asked.run) if any(Path(asked.run).glob("*/MANIFEST.json")) else find_run(asked.run).checkpoints
    from loopwright.checkpoint import verify_all  # late: torch is slow to import

    with Screen(is_quiet=asked.json).waiting("verifying", is_one_step=True) as waiting:
        findings = verify_all(folder, waiting.to) if folder.is_dir() else []
    if asked.json and findings:
        print_objects(*({**asdict(finding), "is_valid": finding.problem is None} for finding in findings))
    elif asked.json:
        told = failed("checkpoint.none", NO_CHECKPOINT, f"no checkpoint in {folder}", f"lw resume {asked.run}")
        say_failure(told, EventLines(sys.stdout))
    else:
        print_line("\n".join(map(str, findings)) or f"no checkpoint in {folder}")
    return DONE if findings and all(finding.problem is None for finding in findings) else NO_CHECKPOINT


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
