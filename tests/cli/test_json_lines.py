"""`--json`: standard output for scripts, whatever happens."""

import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from cli.streams import SignalsOn, parsed
from distributed.launcher import run as run_ranks
from loopwright.cli import main
from loopwright.cli.json_output import json_events
from loopwright.cli.launch import work
from loopwright.run_folder import read_json
from loopwright.runs import train as runs_train
from loopwright.runs.console.json_events import EventLines
from tasks.reviews import read_lines
from tasks.squares import write_squares

FLAGS = ["--lr", "2e-3", "--batch", "16", "--threads", "1", "--no_rehearsal"]
EPOCHS = "--epochs instead of --epoch"
OF_START = {"run", "folder", "task", "data", "model", "updates", "epochs", "evaluations", "batch", "processes"}
OF_START |= {"learning_rate", "metric", "direction", "baselines", "expected_seconds"}


def told(capsys, *words):
    """Run a command line with --json; return its exit code and what it tells. Nothing else is printed."""
    code = main([*map(str, words), "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    return code, parsed(out)


def test_a_run_tells_the_records_of_its_metrics_and_how_it_ended(capsys, reviews):
    line = ["train", "text-classification", "--data", reviews, "--out", "run", "--epochs", "1", *FLAGS]
    code, events = told(capsys, *line)
    warning, start, *others, end = events
    assert warning["event"] == "warning"  # few updates
    records = {record["event"]: record for record in read_lines(Path("run/metrics.jsonl"))}
    assert code == 0
    assert [event["event"] for event in others] == ["log", "speed", "training", "evaluation", "checkpoint"]
    assert {name: start[name] for name in start if name not in OF_START} == records["start"]
    assert set(start) >= OF_START and start["folder"] == "run" and start["task"] == "text-classification"
    assert start["updates"] == records["log"]["update"] and sum(start["data"]["rows"].values()) == 96
    assert {**records["evaluation"], "is_best": True} == others[3] and "eval_accuracy_low" in others[3]
    assert [each for each in others if each["event"] != "evaluation"] == [
        records[name] for name in ("log", "speed", "training", "checkpoint")
    ]
    assert (end["event"], end["state"], end["exit_code"]) == ("end", "done", 0)
    assert end["result"] == read_json("run/result.json")
    assert end["seconds"] == records["end"]["seconds"]
    assert {"model", "report", "metrics", "log"} <= set(end["paths"])
    assert all(map(os.path.exists, end["paths"].values()))
    commands = [["lw", verb, "run"] for verb in ("report", "predict", "resume")]
    assert [command.split()[:3] for command in end["next"]] == commands
    assert "done in" in Path("run/log.txt").read_text()

    code, events = told(capsys, "resume", "run", "--epochs", "2")
    start = next(event for event in events if event["event"] == "start")
    assert code == 0 and start["resumed_from"] is not None and start["update"] == start["updates"] // 2
    assert any("num_epochs: 1 -> 2" in event["message"] for event in events if event["event"] == "note")
    assert events[-1]["exit_code"] == 0 and told(capsys, "resume", "run")[1][-1]["state"] == "done"


@pytest.mark.parametrize(
    ("words", "code", "fix"),
    [
        ("trian x", "args.unknown", "lw train x --json"),
        ("train nothing", "args.task", "lw tasks"),
        ("train", "args.task", "lw train text-classification --data FILE --json"),
        ("train text-classification --data absent.csv", "data.file", "put the file there: absent.csv"),
        ("train text-classification --epoch 3", "args.unknown", EPOCHS),
        ("train text-classification --batch 0", "args.value", "--batch 16"),
        ("check text-classification", "data.file", "lw demo text-classification"),
        ("resume nothing", "run.unknown", "lw runs"),
        ("resume", "args.value", "lw resume last"),
        ("demo nothing", "args.task", "lw tasks"),
        ("demo", "args.task", "lw demo text-classification --json"),
        ("demo --quiet nothing", "args.task", "lw tasks"),
        ("find-lr text-classification --data absent.csv", "data.file", "put the file there: absent.csv"),
        ("evaluate last", "run.unknown", "lw demo text-classification"),
        ("verify last", "run.unknown", "lw demo text-classification"),
        ("compare last", "args.value", "lw report last"),
        ("runs --sorted", "args.unknown", "--sort instead of --sorted"),
        ("tasks all", "args.unknown", "leave out all"),
        ("doctor now", "args.unknown", "leave out now"),
        ("launch train", "args.value", "lw launch -- train --json"),
    ],
)
def test_what_is_wrong_before_anything_starts_is_one_object_with_a_code_and_a_fix(capsys, words, code, fix):
    exit_code, events = told(capsys, *words.split())
    assert exit_code == 2 and len(events) == 1
    assert [events[0][name] for name in ("event", "code", "fix", "exit_code")] == ["error", code, fix, 2]
    assert events[0]["message"] and "error[" not in events[0]["message"]


def test_a_run_that_diverges_tells_the_error_and_then_its_end(capsys, reviews):
    code, events = told(
        capsys, "train", "text-classification", "--data", reviews, "--out", "run", *FLAGS, "--lr", "1e30"
    )
    error, end = events[-2:]
    assert code == 4 and (error["event"], error["code"], error["exit_code"]) == ("error", "loss.nan", 4)
    assert (end["event"], end["state"], end["exit_code"], end["folder"]) == ("end", "diverged", 4, "run")
    assert end["result"] is None and "model" not in end["paths"]
    assert any("nonfinite" in event for event in events)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_a_run_in_order_and_the_last_line_says_how_to_go_on(monkeypatch, reviews, number, code):
    out = SignalsOn('"event":"log"', number)
    monkeypatch.setattr(sys, "stdout", out)
    line = ["train", "text-classification", "--data", str(reviews), "--out", "run", "--epochs", "3", "--json", *FLAGS]
    assert main([*line, "--logging_steps", "1"]) == code
    end = parsed(out.getvalue())[-1]
    assert (end["event"], end["state"], end["exit_code"]) == ("end", "preempted", code)
    assert end["next"] == ["lw resume run"] and "saved checkpoints/step-" in end["message"]
    assert end["paths"]["checkpoints"] == "run/checkpoints"


def test_a_signal_after_the_last_update_is_told_in_the_last_line_too(capsys, monkeypatch, reviews):
    monkeypatch.setattr(runs_train, "finish", lambda *args: os.kill(os.getpid(), signal.SIGTERM))
    line = ["train", "text-classification", "--data", reviews, "--out", "run", "--max_steps", "2", *FLAGS]
    code, events = told(capsys, *line)
    assert (code, events[-1]["state"], events[-1]["next"]) == (75, "preempted", ["lw resume run"])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_check_tells_what_a_run_would_be_and_leaves_nothing(capsys, reviews, tmp_path):
    line = ["text-classification", "--data", reviews, "--lr", "2e-3", "--threads", "1"]
    code, (check, end) = told(capsys, "check", *line)
    assert code == 0 and check["event"] == "check" and set(check) >= OF_START - {"run", "folder"}
    assert check["rehearsal"]["update_seconds"] > 0 and (end["state"], end["exit_code"]) == ("checked", 0)
    code, (files, end) = told(capsys, "check", *line, "--files")
    assert files["data"] == check["data"] and end["state"] == "checked"
    (config,) = told(capsys, "train", *line, "--print_config")[1]
    assert config["values"]["learning_rate"] == 2e-3 and config["sources"]["learning_rate"] == "flag"
    assert [path.name for path in tmp_path.iterdir()] == ["reviews.csv"]


def test_the_verbs_that_look_answer_in_objects(capsys, finished, tmp_path, reviews):
    folder = shutil.copytree(finished.path, tmp_path / "runs" / "one")
    code, (found,) = told(capsys, "runs")
    assert code == 0 and (found["id"], found["state"]) == (finished.id, "done")
    assert found["value"] == finished.metrics[found["metric"]]
    code, checkpoints = told(capsys, "verify", folder)
    assert code == 0 and all(one["is_valid"] and one["problem"] is None for one in checkpoints)
    shutil.rmtree(folder / "checkpoints")
    code, (error,) = told(capsys, "verify", folder)
    assert code == 65 and (error["code"], error["exit_code"]) == ("checkpoint.none", 65)
    code, (compared,) = told(capsys, "compare", folder, finished.path, "--out", tmp_path / "page.html")
    assert code == 0 and Path(compared["path"]).is_file()
    assert [one["result"] for one in compared["runs"]] == [finished.result] * 2
    code, (answer,) = told(capsys, "evaluate", folder)
    assert code == 0 and answer["metrics"] == finished.metrics
    assert {*answer["intervals"], *answer["no_intervals"]} <= set(answer["metrics"]) and "loss" in answer[
        "no_intervals"
    ]
    code, tasks = told(capsys, "tasks")
    assert code == 0 and len(tasks) == 16 and all(set(one) == {"task", "summary"} for one in tasks)
    code, (machine,) = told(capsys, "doctor")
    assert code == 0 and machine["threads"] >= 1 and machine["missing"]["text"] == []
    line = ["find-lr", "text-classification", "--data", reviews, "--threads", "1", "--num_updates", "12"]
    code, (curve,) = told(capsys, *line)
    assert code == 0 and len(curve["rates"]) == len(curve["losses"]) <= 12


def test_an_evaluation_of_rows_that_were_trained_on_warns_before_it_answers(capsys, finished):
    data = json.loads(Path(finished.path / "data.json").read_text())["files"][0]["path"]
    code, (warning, answer) = told(capsys, "evaluate", finished.path, "--data", data)
    assert code == 0 and warning["event"] == "warning" and "were trained on" in warning["message"]
    assert "metrics" in answer


def test_what_others_print_and_warn_of_does_not_come_between_the_lines(capsys):
    with json_events(True) as events:
        print("a library speaks")
        with warnings.catch_warnings():
            warnings.simplefilter("always")  # the tests raise them
            warnings.warn("this is old", DeprecationWarning, stacklevel=1)
        logging.getLogger("loopwright").warning("a worker is %s", "lost")
        events.emit("value", number=float("nan"), where=Path("here"))
    out, err = capsys.readouterr()
    lines = parsed(out)
    assert err == "a library speaks\n"
    assert [(line["event"], line.get("message")) for line in lines[:2]] == [
        ("warning", "this is old"),
        ("warning", "a worker is lost"),
    ]
    assert lines[2]["number"] is None and lines[2]["nonfinite"] == {"number": "nan"} and lines[2]["where"] == "here"
    assert logging.getLogger("loopwright").handlers == []


def test_what_c_libraries_and_other_processes_print_does_not_come_between_the_lines():
    script = """
import os, subprocess
from loopwright.cli.json_output import json_events
print("before")
with json_events(True) as events:
    os.write(1, b"C\\n")
    subprocess.run(["echo", "worker"], check=True)
    events.emit("value", number=1)
print("after")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, line, last = done.stdout.splitlines()
    assert (first, json.loads(line)["number"], last) == ("before", 1, "after")
    assert done.stderr == "C\nworker\n"


def test_a_reader_that_has_gone_away_does_not_stop_what_is_told():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    events = EventLines(Closed())
    events.emit("one")
    events.emit("two")
    assert EventLines(None).emit("three") is None


def test_a_full_disk_under_the_lines_is_told_to_people(capsys, monkeypatch, reviews):
    line = ["train", "text-classification", "--data", str(reviews), "--epochs", "1", *FLAGS]
    for words in (line, ["check", *line[1:], "--files"], ["tasks"]):
        with open("/dev/full", "w") as full, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", full)
            assert main([*words, "--json"]) == 74
        assert capsys.readouterr().err.count("error[disk.write]: [Errno 28] No space left on device") == 1


def test_a_standard_output_that_is_closed_takes_what_is_said():
    line = f"{sys.executable} -m loopwright tasks"
    for words in ("", "--json"):
        done = subprocess.run(f"{line} {words} >&-", shell=True, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_process_beside_the_first_tells_scripts_nothing_and_people_what_is_wrong(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "text-classification", "--data", "absent.csv", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error[data.file]: --data absent.csv does not exist")


def test_a_run_that_is_started_again_by_launch_still_speaks_to_scripts(capsys, monkeypatch, finished, tmp_path):
    folder = shutil.copytree(finished.path, tmp_path / "copied")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert work(["train", "text-classification", "--data", "reviews.csv", "--output_dir", str(folder), "--json"]) == 0
    (end,) = parsed(capsys.readouterr().out)
    assert (end["event"], end["state"], end["folder"]) == ("end", "done", str(folder))


def train_with_two_seeds():
    os.dup2(os.open("errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)  # the output is standard output alone
    words = ["train", "image-classification", "--data", "squares", "--seeds", "2", "--json"]
    return work([*words, "--epochs", "1", "--no_rehearsal", "--out", "run"])


@pytest.mark.slow
@pytest.mark.distributed
def test_of_two_processes_the_first_alone_writes_also_of_several_seeds(tmp_path):
    write_squares(tmp_path / "squares", 30)
    first, second = run_ranks(train_with_two_seeds, tmp_path)
    events = parsed(first.output)
    assert first["returned"] == second["returned"] == 0 and second.output == "", Path("errors").read_text()
    starts = [event for event in events if event["event"] == "start"]
    assert [(start["seed"], start["processes"]) for start in starts] == [(42, 2), (43, 2)]
    assert [event["exit_code"] for event in events if "exit_code" in event] == [0, 0, 0]
    assert events[-1]["event"] == "seeds" and events[-1]["metrics"]["accuracy"]["runs"] == 2
