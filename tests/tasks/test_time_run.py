"""Runs with `--time`: timing leaves no trace, the number of updates is kept, the learning rate ends at zero."""

import os
import signal

import pytest
import torch

from loopwright import api
from loopwright.cli import main
from loopwright.errors import InputError
from loopwright.runs import trial
from loopwright.runs.auto.time_budget import Costs
from loopwright.runs.settings import settle
from loopwright.tasks import get_task
from tasks.conftest import FLAGS
from tasks.reviews import read_lines
from tasks.test_rehearsal import ready_run
from toys import at_update

FLAGS = {name: value for name, value in FLAGS.items() if name != "epochs"}
# With epochs of 5 updates 8 s are 12 updates: 1.7 s, 12 × 0.25 s, 4 evaluations, 4 saves; one more would take 8.15 s.
COSTS = Costs(start=1.2, warm_up=0.3, update=0.25, evaluation=0.7, training_evaluation=0.0, save=0.1, end=0.2)


@pytest.fixture
def steady(monkeypatch):
    """Let a run be timed as it is, and then take as long as these costs say, whatever this machine does."""
    genuine = trial.time_run

    def time_run(*args):
        found = genuine(*args)
        assert min(found.start, found.update, found.evaluation, found.save) > 0
        return COSTS

    monkeypatch.setattr(trial, "time_run", time_run)


def weights_of(run):
    return (run.path / "model" / "model.safetensors").read_bytes()


def lines_of(run, event):
    return [line for line in read_lines(run.path / "metrics.jsonl") if line["event"] == event]


def test_timing_puts_everything_back_bit_by_bit_and_leaves_no_file(reviews, tmp_path):
    run = ready_run(tmp_path, {**FLAGS, "data": reviews, "time": "4s", "eval_on_train": True})
    job = run.job
    job.model.eval()
    before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    generator = torch.get_rng_state()
    found = trial.time_run(run)
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(module.training for module in job.model.modules())
    assert all(parameter.grad is None for parameter in job.model.parameters())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reviews.csv"]
    assert found.start > found.update > 0 and found.save > 0 and found.warm_up >= 0
    share = len(job.train_dataset) / len(job.eval_dataset)
    assert found.training_evaluation == pytest.approx(share * found.evaluation)


def test_a_run_with_a_time_is_the_run_of_the_updates_that_were_planned(reviews, tmp_path, steady):
    run = api.train("text-classification", data=reviews, output_dir=tmp_path / "timed", time="8s", **FLAGS)
    assert run.status == "done" and run.result["updates"] == 12
    assert settle(get_task("text-classification"), [], run.path / "config.yaml").training.max_steps == 12
    assert run.folder.metadata["sources"]["max_steps"] == "auto"
    assert lines_of(run, "log")[-1]["lr"] == 0.0
    assert "time    8s: 12 steps (2.4 epochs) at 0.25 s, evaluations 2.8 s" in (run.path / "log.txt").read_text()
    assert "· 12 updates in 3 epochs · 3 evaluations" in (run.path / "log.txt").read_text()
    counted = api.train("text-classification", data=reviews, output_dir=tmp_path / "counted", max_steps=12, **FLAGS)
    assert weights_of(run) == weights_of(counted) and run.metrics == counted.metrics


def test_a_run_with_a_time_that_is_interrupted_goes_on_to_the_same_end_bit_for_bit(
    reviews, tmp_path, steady, monkeypatch
):
    flags = {**FLAGS, "data": reviews, "time": "8s"}
    whole = api.train("text-classification", output_dir=tmp_path / "whole", **flags)

    def interrupt(trainer):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        callbacks = [at_update(7, interrupt)]
        patch.setattr(type(get_task("text-classification")), "callbacks", lambda self, job, run: callbacks)
        with pytest.raises(KeyboardInterrupt):
            api.train("text-classification", output_dir=tmp_path / "part", **flags)
    part = api.Run.find(tmp_path / "part")
    assert part.folder.status["update"] == 7

    def refuse(*args):
        raise AssertionError("the clock was read again")

    monkeypatch.setattr(trial, "time_run", refuse)
    resumed = part.resume(quiet=True)
    assert resumed.result["updates"] == 12
    assert weights_of(resumed) == weights_of(whole) and resumed.metrics == whole.metrics
    assert lines_of(resumed, "log")[-1]["lr"] == 0.0


def test_a_new_time_is_planned_from_where_the_run_stands(reviews, tmp_path, steady):
    run = api.train("text-classification", data=reviews, output_dir=tmp_path / "run", time="8s", **FLAGS)
    config = (run.path / "config.yaml").read_text()
    with pytest.raises(InputError, match="--time 1s is too short"):
        run.resume(time="1s", quiet=True)
    assert (run.path / "config.yaml").read_text() == config
    # 3 updates end the third epoch: 1.7 s, 0.75 s, 2 evaluations and 2 saves; another one would be in a fourth.
    longer = run.resume(time="4.5s", quiet=True)
    assert longer.result["updates"] == 15
    assert "time    4.5s: 3 more of 15 steps (3.0 epochs)" in (run.path / "log.txt").read_text()
    assert lines_of(longer, "log")[-1]["lr"] == 0.0


def test_check_and_a_time_too_short_for_one_update_leave_nothing(reviews, tmp_path, steady, capsys):
    api.check("text-classification", data=reviews, time="8s", **{**FLAGS, "quiet": False})
    assert "time    8s: 12 steps" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reviews.csv"]
    with pytest.raises(InputError, match="--time 2s is too short: with a single update the run takes about 3.5 s"):
        api.train("text-classification", data=reviews, time="2s", **FLAGS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reviews.csv"]


def test_a_signal_while_updates_are_timed_leaves_no_run_and_nothing_to_resume(reviews, tmp_path, monkeypatch, capsys):
    genuine = trial._EnoughUpdates.on_update_end

    def end(watch, trainer, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        genuine(watch, trainer, **kwargs)

    monkeypatch.setattr(trial._EnoughUpdates, "on_update_end", end)
    flags = {**FLAGS, "data": reviews, "time": "60s", "out": tmp_path / "a"}
    words = [f"--{name}={value}" for name, value in flags.items() if name != "quiet"]
    assert main(["train", "text-classification", *words, "--quiet"]) == 75
    assert capsys.readouterr() == ("", "ended by SIGTERM before the first update; nothing was trained\n")
    assert not (tmp_path / "a").exists()
