"""The list of runs: what it says of each, also of those that died, were moved away or are damaged."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from loopwright.cli import main
from loopwright.run_folder import Lease
from loopwright.run_folder.summaries import list_runs


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def made(
    name, *, minutes_ago=5, state="done", value=None, metric="accuracy", direction="max", saved=True, task="a-task"
):
    folder = Path("runs") / name
    created = datetime.fromtimestamp(time.time() - 60 * minutes_ago, timezone.utc).isoformat(timespec="seconds")
    write(folder / "run.json", {"id": name, "task": task, "created": created})
    write(
        folder / "status.json", {"state": state, "last_checkpoint": "step-1" if saved else None, "updated_at": created}
    )
    if value is not None and state == "done":
        result = {"metric": metric, "direction": direction, "metrics": {metric: value}, "seconds": 83.0}
        write(folder / "result.json", result)
    elif value is not None:
        write(
            folder / "checkpoints" / "best.json", {"metric": f"eval_{metric}", "direction": direction, "value": value}
        )
    with Path("runs/index.jsonl").open("a") as index:
        index.write(json.dumps({"id": name, "path": name, "task": task, "state": "running"}) + "\n")
    return folder


def listed(capsys, *words):
    """Return the rows that `runs` prints, by the name of the run."""
    assert main(["runs", *words]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    starts = [head.index(name) for name in head.split()] + [None]
    cells = [[row[start:end].strip() for start, end in zip(starts, starts[1:], strict=False)] for row in rows]
    return {row[0]: dict(zip(head.split(), row, strict=True)) for row in cells}


def test_each_run_has_its_task_state_best_metric_duration_and_age(capsys):
    made("older", minutes_ago=150, value=0.5)
    made("newer", value=2.25, metric="perplexity", direction="min", task="causal-lm")
    rows = listed(capsys)
    assert list(rows) == ["newer", "older"]
    older = {"run": "older", "task": "a-task", "state": "done", "best": "accuracy 0.5000 (max)"}
    assert rows["older"] == {**older, "took": "1:23", "age": "2 h"}
    assert rows["newer"]["best"] == "perplexity 2.2500 (min)" and rows["newer"]["age"] == "5 min"


def test_a_run_whose_process_is_gone_is_interrupted_and_says_whether_it_can_go_on(capsys):
    folder = made("killed", state="running", value=0.75)
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    owner = {"incarnation": "x", "host": platform.node(), "pid": int(done.stdout), "boot_id": "", "process_start": 1,
             "started_at": time.time(), "heartbeat": time.time()}  # fmt: skip
    write(folder / "lease.json", owner)
    made("unsaved", state="running", saved=False)
    made("stopped", state="stopped")
    made("signalled", state="preempted")
    made("broken", state="failed", saved=False)
    made("unused", state="new", saved=False)
    made("half", state="done")
    states = {name: row["state"] for name, row in listed(capsys).items()}
    assert states == {
        "killed": "interrupted, resumable",
        "unsaved": "interrupted, nothing saved",
        "stopped": "stopped, resumable",
        "signalled": "interrupted, resumable",
        "broken": "failed, nothing saved",
        "unused": "not begun",
        "half": "trained, not evaluated",
    }
    assert listed(capsys)["killed"]["best"] == "accuracy 0.7500 (max)"


def test_a_run_that_was_stopped_early_and_evaluated_is_done_until_it_goes_on(capsys):
    folder = made("early", state="stopped")
    write(folder / "status.json", {"state": "stopped", "update": 8, "last_checkpoint": "step-8"})
    write(folder / "result.json", {"metric": "accuracy", "metrics": {"accuracy": 0.5}, "updates": 8})
    assert listed(capsys)["early"]["state"] == "done, stopped early"
    write(folder / "status.json", {"state": "stopped", "update": 9, "last_checkpoint": "step-8"})
    assert listed(capsys)["early"]["state"] == "stopped, resumable"


def test_a_run_that_goes_on_here_or_on_another_host_is_running(capsys):
    here, there, silent, beside = (made(name, state="running") for name in ("here", "there", "silent", "beside"))
    owner = {"incarnation": "x", "host": "elsewhere", "pid": 1, "boot_id": "", "process_start": 0, "started_at": 0.0}
    write(there / "lease.json", {**owner, "heartbeat": time.time()})
    write(silent / "lease.json", {**owner, "heartbeat": time.time() - 500})
    contained = {"host": platform.node(), "process_start": 1, "namespace": "pid:[1]"}  # its pid means nothing here
    write(beside / "lease.json", {**owner, **contained, "heartbeat": time.time()})
    with Lease(here, phase="of a later version"):
        states = {name: row["state"] for name, row in listed(capsys).items()}
        assert main(["stop", "here"]) == 0 and "after its current update" in capsys.readouterr().out
    write(silent / "status.json", {"stave": "running"})
    assert main(["stop", "silent"]) == 0 and "its process is gone" in capsys.readouterr().out
    assert states == {**dict.fromkeys(("here", "there", "beside"), "running"), "silent": "interrupted, resumable"}


def test_folders_that_are_gone_damaged_or_unknown_to_the_index_are_listed_as_such(capsys):
    shutil.rmtree(made("gone"))
    write(made("damaged") / "run.json", "{")
    write(made("odd") / "result.json", "[1]")
    (made("empty") / "run.json").unlink()
    write(made("undated") / "run.json", {"id": "undated", "created": "yesterday"})
    write(Path("runs/beside/run.json"), {"id": "beside", "task": "a-task"})
    write(Path("runs/demo-data/train.csv"), "a,b")
    with Path("runs/index.jsonl").open("a") as index:
        index.write('{"id": "cut')
    os.symlink("undated", "runs/last")
    states = {name: row["state"] for name, row in listed(capsys).items()}
    assert states == {
        "gone": "moved away",
        "damaged": "damaged",
        "odd": "damaged",
        "empty": "damaged: no run.json",
        "undated": "trained, not evaluated",
        "beside": "not begun",
    }


def test_sorting_by_the_metric_puts_the_best_of_each_task_first(capsys):
    for name, value, metric, direction, task in (
        ("worse", 0.5, "accuracy", "max", "images"),
        ("better", 0.9, "accuracy", "max", "images"),
        ("large", 9.0, "loss", "min", "texts"),
        ("small", 1.0, "loss", "min", "texts"),
    ):
        made(name, value=value, metric=metric, direction=direction, task=task)
    made("none", state="running")
    assert list(listed(capsys, "--sort", "metric")) == ["better", "worse", "small", "large", "none"]


@pytest.mark.parametrize(("columns", "names"), [(200, 6), (48, 4), (30, 3)], ids=["wide", "narrow", "tiny"])
def test_a_narrow_terminal_shows_fewer_columns(capsys, monkeypatch, columns, names):
    made("a-run", value=0.5)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["runs"]) == 0
    assert len(capsys.readouterr().out.splitlines()[0].split()) == names


def test_no_runs_are_no_error_and_a_wrong_order_is_one(capsys):
    assert main(["runs"]) == 0 and capsys.readouterr().out == "no runs yet in runs\n"
    assert main(["runs", "--sort", "colour"]) == 2
    assert "error[args.value]" in capsys.readouterr().err
    assert list_runs() == []


def test_an_unfinished_run_took_what_its_last_record_says(capsys):
    folder = made("killed", state="stopped")
    write(folder / "metrics.jsonl", '{"event": "log", "seconds": 0.4}\n{"event": "log", "seco')
    assert listed(capsys)["killed"]["took"] == "0.4 s"


def test_at_sixty_columns_each_run_is_on_one_line_and_sorting_says_that_tasks_are_apart(capsys, monkeypatch):
    made("1115-2053-image-classification-a7f8", value=0.5, state="stopped", task="image-classification")
    made("1115-2054-causal-lm-a7f9", value=0.5, task="causal-lm")
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["runs", "--sort", "metric"]) == 0
    head, *rows, note = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "best"] and len(rows) == 2
    assert max(map(len, (head, *rows))) <= 60 and note.startswith("(each task by itself")
