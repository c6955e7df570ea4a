"""The command line in processes of its own: what it imports, and what a kill, a signal and a stop leave behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loopwright.cli import main
from tasks.forked import start
from tasks.reviews import rows, write_csv

COMMAND = [sys.executable, "-m", "loopwright"]
TRAIN = ["train", "text-classification", "--data", "reviews.csv", "--epochs", "9999", "--out", "run", "--batch", "8"]
TRAIN += ["--save_strategy", "steps", "--save_steps", "3", "--threads", "1"]
ENDED_BY_TERM = "the run was ended by SIGTERM; it can be resumed from its last checkpoint"
HEAVY = ("torch", "transformers", "datasets", "accelerate", "tokenizers", "peft", "sklearn", "pandas")


def lw(*words, failpoint=None, **options):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **({"LW_FAILPOINT": failpoint} if failpoint else {})}
    line = [*COMMAND, *map(str, words)]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=100, **options)


@contextlib.contextmanager
def started(folder, *words):
    """Start a command line, and give its process and output once it trains: its first log is written."""
    os.mkfifo("out")
    Path("err").touch()
    process = start([*words], folder=folder, out=folder / "out", err=folder / "err")
    with open("out") as output:
        assert any(" · epoch " in line for line in output), Path("err").read_text()
        yield process, output


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
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)], ids=["interrupt", "term"])
def test_a_signal_ends_a_run_saved_and_with_its_code(reviews, tmp_path, number, code):
    with started(tmp_path, *TRAIN) as (process, output):
        os.kill(process.pid, number)
        assert output.read().count("continue with: lw resume run\n") == 1
    process.join(60)
    assert process.exitcode == code
    assert Path("err").read_text() == ("" if number == signal.SIGINT else f"{ENDED_BY_TERM}\n")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "preempted" and status["last_checkpoint"]
    assert main(["resume", "last", "--max_steps", str(status["update"] + 2)]) == 0


@pytest.mark.slow
def test_stop_ends_a_run_in_order_within_a_second(reviews, tmp_path):
    with started(tmp_path, *TRAIN) as (process, output):
        begun = time.monotonic()
        assert main(["stop", "run"]) == 0
        output.read()
    process.join(60)
    assert process.exitcode == 75 and time.monotonic() - begun < 30
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "stopped"
    index = [json.loads(line) for line in Path("runs/index.jsonl").read_text().splitlines()]
    assert index[-1]["state"] == "stopped"
    assert main(["resume", "run", "--max_steps", "1"]) == 0  # the file does not stop it again


def test_small_files_are_checked_fast(tmp_path):
    write_csv(tmp_path / "reviews.csv", rows(2_000))
    done = lw("check", "text-classification", "--data", "reviews.csv", "--files")
    assert done.returncode == 0 and "2,000 rows" in done.stdout
