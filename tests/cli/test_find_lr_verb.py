"""`lw find-lr`, and `--lr auto`."""

import json
from pathlib import Path

import pytest
import yaml

from cli.streams import run
from loopwright import api
from loopwright.report import write_report
from loopwright.results import LearningRateCurve
from loopwright.runs.auto.learning_rate import plot_lines

TRAIN = {"epochs": 1, "batch": 16, "threads": 1, "quiet": True}


def test_a_loss_that_rises_from_the_start_is_drawn_too():
    losses = (0.8, 0.9, 1.7)
    plot = plot_lines(LearningRateCurve((1e-3, 1e-2, 1e-1), losses, losses, None, 1e-3, None))
    assert sum(line.count("*") for line in plot) == 3


def test_find_lr_shows_a_curve_a_suggestion_and_the_command_and_leaves_nothing(capsys, reviews, tmp_path):
    line = ["find-lr", "text-classification", "--data", reviews, "--threads", "1", "--num_updates", "24", "--lr", "1"]

    code, out, _ = run(capsys, *line)

    assert code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["reviews.csv"]
    suggestion = next(row.split()[1] for row in out.splitlines() if row.startswith("suggestion "))
    command = f"lw train text-classification --data {reviews} --threads 1 --lr {suggestion}"
    assert out.splitlines()[-1].strip() == command
    plot = [row for row in out.splitlines() if "*" in row and " |" in row]
    assert len(plot) >= 5 and any("1e-7" in row for row in out.splitlines())

    code, out, _ = run(capsys, *line, "--quiet")
    assert (code, out) == (0, f"{suggestion}\n")


def test_a_rate_that_is_left_to_the_run_is_found_kept_and_gives_the_run_that_a_typed_one_gives(reviews, tmp_path):
    found = api.train("text-classification", data=reviews, learning_rate="auto", out=tmp_path / "auto", **TRAIN)
    told = json.loads((found.path / "lr_find.json").read_text())
    config = (found.path / "config.yaml").read_text()
    typed = api.train("text-classification", data=reviews, lr=told["chosen"], out=tmp_path / "typed", **TRAIN)

    assert f"{told['chosen']:g}" in told["trials"] and f"{told['suggestion']:.2g}" in told["trials"]
    assert len(told["rates"]) == len(told["losses"]) == len(told["smoothed"]) <= 100
    assert f"learning_rate: {told['chosen']}  # auto" in config
    assert yaml.safe_load(config)["learning_rate"] == told["chosen"]
    assert "lr      " in (found.path / "log.txt").read_text()
    assert "lr auto linear" in (found.path / "log.txt").read_text()
    assert found.metrics == typed.metrics
    weights = [next((one.path / "model").glob("*.safetensors")).read_bytes() for one in (found, typed)]
    assert weights[0] == weights[1]
    page = write_report(found.path).read_text(encoding="utf-8")
    assert "Loss over the learning rate" in page

    longer = found.resume(epochs=2, quiet=True)
    assert f"learning_rate: {told['chosen']}  # auto" in (longer.path / "config.yaml").read_text()
    assert json.loads((found.path / "lr_find.json").read_text()) == told


def test_a_run_that_has_begun_refuses_to_look_for_its_rate(capsys, finished):
    code, _, err = run(capsys, "resume", finished.path, "--lr", "auto", "--epochs", "3")
    assert code == 2 and "error[args.value]: --learning_rate auto: " in err and "fix: --learning_rate 0.002" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--start", "1", "--end", "0.1"], "must rise from start to end"),
        (["--num_updates", "1"], "num_updates must be a whole number of at least 2"),
        (["--start", "low"], "expected a number, got 'low'"),
        (["--lrr", "1"], "--lr instead of --lrr"),
    ],
    ids=["end below start", "one update", "a word", "unknown flag"],
)
def test_what_cannot_be_searched_ends_with_2(capsys, reviews, words, told):
    code, _, err = run(capsys, "find-lr", "text-classification", "--data", reviews, "--threads", "1", *words)
    assert code == 2 and told in err, err
    assert not Path("runs").exists()
