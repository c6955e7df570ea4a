"""`--profile N`: where the time of updates goes; `--profile start`: the time before the first one."""

import gzip
import json
import subprocess
import sys
import time

import pytest

from loopwright import api
from loopwright.cli import main
from loopwright.report import write_report

TRAIN = {"epochs": 1, "batch": 4, "threads": 1, "quiet": True, "lr": 2e-3}


def test_a_profiled_run_says_where_its_time_went_and_has_the_numbers_of_another(reviews, tmp_path):
    profiled = api.train("text-classification", data=reviews, profile=2, out=tmp_path / "profiled", **TRAIN)
    plain = api.train("text-classification", data=reviews, out=tmp_path / "plain", **TRAIN)

    found = json.loads((profiled.path / "profile" / "summary.json").read_text())
    assert (found["first_update"], found["last_update"]) == (4, 5)
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert json.loads(gzip.decompress((profiled.path / "profile" / "trace.json.gz").read_bytes()))["traceEvents"]
    assert "profile updates 4 to 5: " in (profiled.path / "log.txt").read_text()
    assert "\nprofile:" not in (profiled.path / "config.yaml").read_text()
    assert profiled.metrics == plain.metrics
    weights = [next((run.path / "model").glob("*.safetensors")).read_bytes() for run in (profiled, plain)]
    assert weights[0] == weights[1]
    page = write_report(profiled.path).read_text(encoding="utf-8")
    assert "Time per update" in page and "Slowest operators" in page and "Limit of the machine (estimated)" in page
    assert 'id="tuning"' not in write_report(plain.path).read_text(encoding="utf-8")


@pytest.mark.parametrize("number", ["0", "-1", "some"])
def test_a_number_of_updates_that_cannot_be_is_refused(capsys, reviews, number):
    assert main(["train", "text-classification", "--data", str(reviews), f"--profile={number}"]) == 2
    assert "profile" in capsys.readouterr().err


def test_the_phases_of_the_start_add_up_to_the_time_since_the_process_began(reviews, tmp_path):
    words = ["--data", str(reviews), "--max_steps", "1", "--threads", "1", "--profile", "start", "--json"]
    began = time.time()
    command = [sys.executable, "-m", "loopwright", "train", "text-classification", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    (found,) = (event for event in events if event["event"] == "start_profile")
    phases = [
        "import",
        "import torch",
        "import transformers",
        "read and check data",
        "tokenizer",
        "model",
        "rows",
        "baselines",
        "device",
        "rehearsal",
    ]
    assert {*phases, "first batch", "first update"} <= set(found["seconds"])
    assert sum(found["seconds"].values()) == pytest.approx(found["total_seconds"], abs=0.02)
    assert found["total_seconds"] == pytest.approx(found["time"] - began, abs=0.3)
    log = next((tmp_path / "runs").glob("*/log.txt")).read_text()
    assert "s from the start of the command to the first update" in log and "profile" in log
    assert not list((tmp_path / "runs").glob("*/profile"))
