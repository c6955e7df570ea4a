"""`--profile N`: what a run says of its updates, and what it leaves."""

import gzip
import json

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
    assert "Time per update" in page and "Slowest operators" in page
    assert 'id="tuning"' not in write_report(plain.path).read_text(encoding="utf-8")


@pytest.mark.parametrize("number", ["0", "-1", "some"])
def test_a_number_of_updates_that_cannot_be_is_refused(capsys, reviews, number):
    assert main(["train", "text-classification", "--data", str(reviews), f"--profile={number}"]) == 2
    assert "profile" in capsys.readouterr().err
