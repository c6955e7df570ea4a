"""The command line in processes of its own: what it imports, and what a kill, a signal and a stop leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loopwright.cli import main
from tasks.reviews import events, rows, write_csv

COMMAND = [sys.executable, "-m", "loopwright"]
FLAGS = ["--lr", "2e-3", "--batch", "8", "--save_strategy", "steps", "--save_steps", "3", "--threads", "1"]
ENDED_BY_TERM = "the run was ended by SIGTERM; it can be resumed from its last checkpoint"
HEAVY = ("torch", "transformers", "datasets", "accelerate", "tokenizers", "peft", "sklearn", "pandas")


def lw(*words, failpoint=None, **options):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **({"LW_FAILPOINT": failpoint} if failpoint else {})}
    line = [*COMMAND, *map(str, words)]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=100, **options)


def started(*words):
    """Start a command line, and return it once it trains: its first log is written."""
    line = [*COMMAND, *map(str, words)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if " · epoch " in line:
            return process
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["tasks"], ["train", "--help"]], ids=" ".join)
@pytest.mark.parametrize("buffering", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_reader_that_has_gone_away_is_no_error(words, buffering):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        environment = {**os.environ, "PYTHONUNBUFFERED": buffering}
        done = subprocess.run(
            [*COMMAND, *words], stdout=writing, stderr=subprocess.PIPE, env=environment, text=True, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["tasks"],
        ["runs"],
        ["explain", "text-classification"],
        ["explain", "errors"],
        ["train", "text-classification", "--print_config"],
        ["check", "text-classification", "--data", "reviews.csv", "--files"],
        ["train", "text-classification", "--data", "absent.csv"],
    ],
    ids=lambda words: "-".join(words).replace("--", "").replace(".", "-"),
)
def test_what_needs_no_model_imports_no_torch(reviews, words):
    code = f"""
import sys
from loopwright.cli import main
code = main({words!r})
print(code, [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    expected = "2 []" if "absent.csv" in words else "0 []"
    assert done.stderr.splitlines()[-1] == expected, done.stderr


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_model_and_metrics_where_it_was_moved_to(capsys, reviews, tmp_path):
    words = ["train", "text-classification", "--data", str(reviews), "--epochs", "2", *FLAGS]
    assert main([*words, "--out", "whole"]) == 0
    assert lw(*words, "--out", "killed", failpoint="after_optimizer_step:14:kill").returncode == -signal.SIGKILL
    moved = (tmp_path / "killed").rename(tmp_path / "moved")
    capsys.readouterr()
    assert main(["predict", "moved", "great lovely film"]) == 0
    assert "label" in json.loads(capsys.readouterr().out)
    assert main(["resume", "moved"]) == 0
    assert "Resumed training state" in capsys.readouterr().out
    for name in ("model/model.safetensors", "eval/predictions.jsonl"):
        assert (moved / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert events(moved) == events(tmp_path / "whole")
    assert main(["evaluate", "moved"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)], ids=["interrupt", "term"])
def test_a_signal_ends_a_run_saved_and_with_its_code(reviews, tmp_path, number, code):
    process = started("train", "text-classification", "--data", reviews, "--epochs", "9999", "--out", "run", *FLAGS)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code and out.count("continue with: lw resume run\n") == 1
    assert err == ("" if number == signal.SIGINT else f"{ENDED_BY_TERM}\n")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "preempted" and status["last_checkpoint"]
    assert main(["resume", "last", "--max_steps", str(status["update"] + 2)]) == 0


@pytest.mark.slow
def test_stop_ends_a_run_in_order_within_a_second(reviews, tmp_path):
    process = started("train", "text-classification", "--data", reviews, "--epochs", "9999", "--out", "run", *FLAGS)
    begun = time.monotonic()
    assert main(["stop", "run"]) == 0
    process.communicate(timeout=60)
    assert process.returncode == 75 and time.monotonic() - begun < 30
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "stopped"
    index = [json.loads(line) for line in Path("runs/index.jsonl").read_text().splitlines()]
    assert index[-1]["state"] == "stopped"
    assert main(["resume", "run", "--max_steps", "1"]) == 0  # the file does not stop it again


def test_small_files_are_checked_fast(tmp_path):
    write_csv(tmp_path / "reviews.csv", rows(2_000))
    done = lw("check", "text-classification", "--data", "reviews.csv", "--files")
    assert done.returncode == 0 and "2,000 rows" in done.stdout
