"""Trackers of a task's run: `--report_to` by flags, in a file and in Python."""

import numpy as np
import pytest

from loopwright.cli import main
from loopwright.engine import trackers
from loopwright.run_folder import find_run
from loopwright.runs.settings import settle
from loopwright.tasks import get_task
from tasks.reviews import read_lines
from tracking.written import configs, points, scalars, trackio_in

NAMES = ["tensorboard", "trackio"]


def test_a_run_is_reported_to_several_trackers(tmp_path, reviews, capsys):
    for name in NAMES:
        pytest.importorskip(name)
    flags = ["--lr", "2e-3", "--epochs", "1", "--threads", "1", "--logging_steps", "1", "--out", "run"]
    with trackio_in(tmp_path / "trackio"):
        code = main(["train", "text-classification", "--data", str(reviews), *flags, "--report_to", *NAMES])
        printed = capsys.readouterr().out
        run_id = find_run("run").id
        stored, config = points(run_id), configs()[run_id]
    assert code == 0 and "trackio show --project loopwright" in printed and "* Trackio" not in printed
    board = scalars(tmp_path / "run" / "trackers" / "tensorboard")
    records = read_lines(tmp_path / "run" / "metrics.jsonl")
    losses = [(record["update"], record["loss"]) for record in records if record["event"] == "log"]
    assert stored["train/loss"] == losses and len(losses) == 5
    assert board["train/loss"] == [(update, float(np.float32(loss))) for update, loss in losses]
    (evaluation,) = [record for record in records if record["event"] == "evaluation"]
    assert stored["eval/accuracy"] == [(evaluation["update"], evaluation["eval_accuracy"])]
    assert {"eval/loss", "speed/tokens_per_second", "speed/padding_waste", "speed/data_wait"} <= set(stored)
    assert (config["learning_rate"], config["task"]) == (2e-3, "text-classification")


def test_trackers_are_named_by_flags_in_a_file_and_in_python(tmp_path):
    task = get_task("text-classification")
    file = tmp_path / "settings.yaml"
    file.write_text("report_to: [tensorboard, trackio]\n", encoding="utf-8")
    assert settle(task, ["--report_to", *NAMES]).training.report_to == NAMES
    assert settle(task, [], file).training.report_to == NAMES
    assert settle(task, {"report_to": NAMES}).training.report_to == NAMES
    assert settle(task, {"report_to": "trackio"}).training.report_to == ["trackio"]
    assert settle(task, ["--report_to", "none"]).training.report_to == settle(task, []).training.report_to == []


@pytest.mark.parametrize(
    ("name", "told"), [("wandb", "pip install no_such_tracker"), ("tensorbord", "fix: --report_to tensorboard")]
)
def test_a_tracker_that_cannot_be_had_is_refused_before_there_is_a_run(reviews, capsys, monkeypatch, name, told):
    monkeypatch.setitem(trackers.PACKAGES, "wandb", ("no_such_tracker",))
    assert main(["train", "text-classification", "--data", str(reviews), "--out", "run", "--report_to", name]) == 2
    assert told in capsys.readouterr().err
    assert not (reviews.parent / "run").exists()
