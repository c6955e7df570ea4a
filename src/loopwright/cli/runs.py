"""The verbs `runs`, `stop` and `verify`."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from loopwright.api import EventLines, Screen, lasted
from loopwright.cli.exit_codes import DONE, NO_CHECKPOINT, failed, print_failure
from loopwright.cli.help_text import columns
from loopwright.cli.json_output import print_line, print_objects
from loopwright.cli.parser import VerbParser, add_json, add_run
from loopwright.config.display_width import display_width, pad
from loopwright.run_folder import find_run, live_owner, runs_root
from loopwright.run_folder.summaries import RunSummary, list_runs

# When a request to stop takes effect, by the phase of the run.
_STOPS = {
    "start": "it is starting, and stops before its first update",
    "": "it stops within a second, after its current update, evaluation or save",
    "seeds": "it has ended, and the run with the next seed stops before its first update",
    "finish": "it is trained and saved, and stops its last evaluation; lw resume repeats that",
}


def runs(argv: list[str]) -> int:
    parser = VerbParser("runs", "List the runs, newest first.", "--sort metric")
    parser.add_argument(
        "--sort", choices=("time", "metric"), default="time", help="by time, or by metric: task by task, best first"
    )
    add_json(parser)
    asked = parser.parse_args(argv)
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
    rows = [_cells(run, root, now) for run in found]
    shown, forms, widths = _fitted(rows)
    cells = [{name: row[name][forms[name]] for name in shown} for row in rows]
    for line in ({name: name for name in shown}, *cells):
        print_line("  ".join(pad(line[name], widths[name]) for name in shown).rstrip())
    if asked.sort == "metric" and "task" not in shown and len({run.task for run in found}) > 1:
        print_line("(each task by itself: metrics of different tasks cannot be compared)")
    return DONE


def _fitted(rows: list[dict[str, tuple[str, ...]]]) -> tuple[list[str], dict[str, int], dict[str, int]]:
    """Return the columns that fit, with the form and the width of each: some are dropped, then others shortened."""
    shown, forms = list(rows[0]), dict.fromkeys(rows[0], 0)

    def width(name: str) -> int:
        return max(map(display_width, (name, *(row[name][forms[name]] for row in rows))))

    def is_too_wide() -> bool:
        return sum(width(name) + 2 for name in shown) - 2 > columns()

    for name in ("age", "took", "task"):
        if is_too_wide():
            shown.remove(name)
    for name in ("best", "state", "best"):
        if is_too_wide():
            forms[name] += 1
    return shown, forms, {name: width(name) for name in shown}


def _cells(run: RunSummary, root: Path, now: float) -> dict[str, tuple[str, ...]]:
    """Return the cells of a run, each in ever shorter forms; a run outside the root is named by its folder."""
    is_here = run.path.name == run.id and run.path.parent == Path(os.path.normpath(root))
    best: tuple[str, ...] = ("", "", "")
    if run.value is not None:
        direction, value = "max" if run.is_more_better else "min", f"{run.value:.4f}"
        best = (f"{run.metric} {value} ({direction})", f"{run.metric} {value}", value)
    return {
        "run": (run.id if is_here else str(run.path),),
        "task": (run.task,),
        "state": (run.state, run.state.name),
        "best": best,
        "took": ("" if run.seconds is None else lasted(run.seconds),),
        "age": ("" if run.created is None else _age(now - run.created),),
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


def stop(argv: list[str]) -> int:
    parser = VerbParser("stop", "Stop a run gracefully after its next update; its state is saved.", "last")
    add_run(parser)
    run = find_run(parser.parse_args(argv).run)
    state, owner = run.status.get("state"), live_owner(run.path)
    if owner is not None:
        run.ask_to_stop()
        print_line(f"{run.id} was asked to stop: {_STOPS.get(owner.phase, _STOPS[''])}")
    else:
        why = "its process is gone" if state in ("running", None) else state
        print_line(f"{run.id} is not running ({why}): nothing to stop")
    return DONE


def verify(argv: list[str]) -> int:
    description = "Verify every byte of a run's checkpoints, or of those that a Trainer saved in a folder."
    parser = VerbParser("verify", description, "last")
    add_run(parser)
    add_json(parser)
    asked = parser.parse_args(argv)
    folder = Path(asked.run) if any(Path(asked.run).glob("*/MANIFEST.json")) else find_run(asked.run).checkpoints
    from loopwright.checkpoint import verify_all  # late: torch is slow to import

    with Screen(is_quiet=asked.json).waiting("verifying", is_one_step=True) as waiting:
        findings = verify_all(folder, waiting.to) if folder.is_dir() else []
    if asked.json and findings:
        print_objects(*({**asdict(finding), "is_valid": finding.problem is None} for finding in findings))
    elif asked.json:
        failure = failed("checkpoint.none", NO_CHECKPOINT, f"no checkpoint in {folder}", f"lw resume {asked.run}")
        print_failure(failure, EventLines(sys.stdout))
    else:
        print_line("\n".join(map(str, findings)) or f"no checkpoint in {folder}")
    return DONE if findings and all(finding.problem is None for finding in findings) else NO_CHECKPOINT
