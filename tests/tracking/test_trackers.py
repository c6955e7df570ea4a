"""Trackers: what they are given, that they never stop a run, and that no point is written twice."""

import json
import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import toys
from distributed.launcher import launch
from hf.tiny import Classifier, rows
from loopwright import Checkpointing, Trainer
from loopwright.callbacks import ModelEmaCallback, TrackerCallback
from loopwright.engine import trackers
from loopwright.errors import ConfigError
from loopwright.hf import Trainer as HfTrainer
from loopwright.hf import TrainingArguments
from toys import records
from tracking.written import configs, points, scalars, trackio_in

SPEED = ("samples_per_second", "data_wait", "peak_memory_bytes")


class Recorded(Trainer):
    """A trainer with a metric of each kind that a history may hold."""

    def calculate_train_batch_loss(self, batch):
        return super().calculate_train_batch_loss(batch[:2])

    def calculate_eval_batch_loss(self, batch):
        return super().calculate_eval_batch_loss(batch[:2])

    def eval_epoch_end(self):
        super().eval_epoch_end()
        self.run_history.update_metric("eval_score", torch.tensor(0.5))
        self.run_history.update_metric("eval_matrix", [[1, 2], [3, 4]])


def crash(update):
    return toys.at_update(update, Mock(side_effect=RuntimeError("the machine is gone")))


def trained(folder, *callbacks, num_epochs=2, resume_from=None):
    """Train for four updates per epoch, logging each and saving after each epoch; return the trainer."""
    states = folder / f"states-{num_epochs}"
    checkpoints = Checkpointing(states, every_epochs=1, asynchronous=False, run_folder=folder)
    often = {"eval_dataset": toys.data(16), "evaluate_every": 2, "log_every": 1, "gradient_clip_norm": 1.0, "seed": 1}
    options = {"momentum": 0.0, "cls": Recorded, "checkpoints": checkpoints, "resume_from": resume_from, **often}
    return toys.trained(callbacks, num_epochs=num_epochs, **options)


def averaging(folder):
    return ModelEmaCallback(0.9, save_path=str(folder / "averaged.pt"))


def fake(**raising):
    """Return a class of accelerate's shape that raises where it is told to, and counts its calls."""

    def called(name):
        def method(self, *args, **kwargs):
            self.calls.append(name)
            if name in raising:
                raise raising[name]

        return method

    stages = {"store_init_configuration": "config", "start": "start", "log": "log", "finish": "finish"}
    methods = {method: called(name) for method, name in stages.items()}
    return type("Fake", (), {"calls": [], "tracker": None, "__init__": lambda self, *args, **kwargs: None, **methods})


def reporting(folder, *names):
    return TrackerCallback(list(names) or "tensorboard", folder / "trackers")


@pytest.fixture
def use(monkeypatch):
    """Return a function that puts a class in the place of accelerate's for TensorBoard, and returns it."""
    from accelerate import tracking

    pytest.importorskip("tensorboard")
    return lambda kind: monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", kind) or kind


@pytest.fixture(scope="module")
def trackio(tmp_path_factory):
    pytest.importorskip("trackio")
    with trackio_in(tmp_path_factory.mktemp("trackio")) as folder:
        yield folder


@pytest.fixture(scope="module")
def reported(trackio, tmp_path_factory):
    """Return the folder of a run that was reported to two trackers."""
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("reported")
    trained(folder, TrackerCallback(["tensorboard", "trackio"], folder / "trackers", "whole"), averaging(folder))
    return folder


def test_trackers_have_what_metrics_jsonl_has(reported):
    board, stored = scalars(reported / "trackers" / "tensorboard"), points("whole")
    assert set(board) == set(stored)
    logs = records(reported, "log")
    assert [log["update"] for log in logs] == list(range(1, 9))
    for name in ("loss", "lr", "gradient_norm", "epoch"):
        expected = [(log["update"], log[name]) for log in logs]
        assert stored[f"train/{name}"] == expected
        assert board[f"train/{name}"] == [(update, float(np.float32(value))) for update, value in expected]
    for name in SPEED:
        expected = [(record["update"], record[name]) for record in records(reported, "speed")]
        assert stored[f"speed/{name}"] == expected and len(expected) >= 7


def test_metrics_are_given_where_they_were_measured(reported):
    stored = points("whole")
    for event, name in (("evaluation", "eval_loss_epoch"), ("training", "train_loss_epoch")):
        expected = [(each["update"], each[name]) for each in records(reported, event) if name in each]
        assert stored[name.replace("_", "/", 1)] == expected and [update for update, _ in expected] == [4, 8]
    assert [update for update, _ in stored["intermediate_eval_loss"]] == [2, 4, 6, 8]
    assert [update for update, _ in stored["eval/score"]] == [2, 4, 4, 6, 8, 8]
    assert {value for _, value in stored["eval/score"]} == {0.5}
    assert [update for update, _ in stored["ema_model_eval_loss_epoch"]] == [4, 8]
    assert not any("matrix" in name for name in stored)


def test_settings_are_given_at_the_start(reported, trackio):
    config = configs()["whole"]
    assert (config["optimizer"], config["lr"], config["model"], config["seed"]) == ("SGD", 0.05, "Linear", 1)
    assert config["num_parameters"] == 5 and "is_world_process_zero" not in config
    (written,) = (reported / "trackers" / "tensorboard").rglob("hparams.yml")
    assert yaml.safe_load(written.read_text(encoding="utf-8"))["num_epochs"] == 2


def test_custom_settings_are_made_plain():
    plain = trackers.plain_config({"lr": 0.1, "model": {"width": 3, "names": ["a"]}, "none": None, "kind": nn.Linear})
    assert plain == {"lr": 0.1, "model.width": 3, "model.names": "['a']", "none": None, "kind": str(nn.Linear)}


def test_an_unknown_tracker_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(ConfigError, match=r"no tracker 'tensorbord'.*Did you mean 'tensorboard'\?"):
        TrackerCallback("tensorbord", tmp_path)
    with pytest.raises(ConfigError, match="'none' cannot be combined"):
        TrackerCallback(["none", "tensorboard"], tmp_path)


def test_a_missing_package_is_refused_with_the_line_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.PACKAGES, "aim", ("no_such_tracker",))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "no_such_tracker").mkdir()  # as a tracker's folder of runs would lie there
    with pytest.raises(ConfigError, match="pip install no_such_tracker"):
        TrackerCallback(["tensorboard", "aim"], tmp_path)


def test_all_stands_for_what_is_installed(monkeypatch):
    for name in trackers.PACKAGES:
        monkeypatch.setitem(trackers.PACKAGES, name, ("json" if name in ("wandb", "aim") else "no_such_tracker",))
    assert trackers.resolve_trackers("all") == ["wandb", "aim"]
    assert trackers.resolve_trackers(["aim", "all", "aim"]) == ["aim", "wandb"]
    assert trackers.resolve_trackers("none") == trackers.resolve_trackers(None) == trackers.resolve_trackers([]) == []


@pytest.mark.parametrize("stage", ["start", "config", "log", "finish"])
def test_a_failing_tracker_neither_stops_a_run_nor_changes_it(tmp_path, use, capsys, stage):
    expected = trained(tmp_path / "plain")
    use(fake(**{stage: OSError("no network")}))
    capsys.readouterr()
    trainer = trained(tmp_path / "run", reporting(tmp_path / "run"))
    told = capsys.readouterr().out
    assert torch.equal(toys.weights(trainer), toys.weights(expected))
    (first, *more) = records(tmp_path / "run", "tracker_failed")
    assert first["tracker"] == "tensorboard" and first["stage"] == stage
    assert told.count("(OSError: no network): the run continues") == 1
    assert len(more) == (stage == "log") and records(tmp_path / "run", "end")[0]["state"] == "done"


def test_a_tracker_that_keeps_failing_is_given_up(tmp_path, use, capsys):
    kind = use(fake(log=TimeoutError()))
    trained(tmp_path, reporting(tmp_path))
    assert kind.calls == ["start", "config", "log", "log", "log", "finish"]
    assert "tensorboard has failed 3 times in a row" in capsys.readouterr().out


def test_a_tracker_that_started_and_failed_to_name_its_run_is_finished(tmp_path, use, capsys, monkeypatch):
    kind = use(fake())
    monkeypatch.setattr(trackers, "_identity", Mock(side_effect=ConnectionError("no network")))
    trained(tmp_path, reporting(tmp_path))
    assert kind.calls == ["start", "finish"]
    assert "failed at start (ConnectionError: no network): the run continues" in capsys.readouterr().out


def test_a_run_that_fails_closes_its_trackers_and_its_journal(tmp_path, use):
    kind = use(fake())
    with pytest.raises(RuntimeError, match="broken"):
        trained(tmp_path, reporting(tmp_path), toys.raising("on_log", RuntimeError("broken")))
    assert kind.calls == ["start", "config", "log", "finish"]
    journal = tmp_path / "trackers" / "trackers.jsonl"
    held = [os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")]
    assert journal.exists() and str(journal) not in held


def test_a_folder_that_cannot_be_written_does_not_stop_a_run(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    (tmp_path / "trackers").write_text("a file", encoding="utf-8")
    trained(tmp_path, reporting(tmp_path))
    assert "nothing is reported to trackers, but the run continues" in capsys.readouterr().out


def test_a_resumed_run_writes_no_point_twice(reported, tmp_path):
    names, folder = ["tensorboard", "trackio"], tmp_path / "trackers"
    with pytest.raises(RuntimeError, match="the machine is gone"):
        trained(tmp_path, TrackerCallback(names, folder, "resumed"), averaging(folder), crash(8))
    trained(tmp_path, TrackerCallback(names, folder, "resumed"), averaging(folder), resume_from="auto")
    assert records(tmp_path, "start")[-1]["update"] == 4
    whole, board = points("whole"), scalars(reported / "trackers" / "tensorboard")
    resumed, resumed_board = points("resumed"), scalars(folder / "tensorboard")
    # The clock may have been too fast for a figure of the speed.
    for name in (name for name in whole if not name.startswith("speed/")):
        assert resumed[name] == whole[name]
        assert resumed_board[name] == board[name]
    assert configs()["resumed"]["lr"] == 0.05
    assert [name for name in configs()].count("resumed") == 1


def test_what_a_tracker_calls_the_run_is_kept_also_if_it_joins_later(tmp_path, monkeypatch):
    from accelerate import tracking

    pytest.importorskip("tensorboard")
    given = []

    class Named(fake()):
        tracker = SimpleNamespace(hash="abc")

        def __init__(self, *args, **kwargs):
            given.append(kwargs["run_hash"])

    monkeypatch.setitem(trackers.PACKAGES, "aim", ("json",))
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "aim", Named)
    folder = tmp_path / "trackers"
    trained(tmp_path, reporting(tmp_path), num_epochs=1)
    for number in (2, 3, 4):  # it joins in the second epoch
        last = max((tmp_path / f"states-{number - 1}").glob("step-*"))
        trained(tmp_path, reporting(tmp_path, "tensorboard", "aim"), num_epochs=number, resume_from=last)
    assert given == [None, "abc", "abc"]
    journal = [json.loads(line) for line in (folder / "trackers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["identities"] for record in journal if "identities" in record] == [{}, {"aim": "abc"}]


# Puts a metric into the history when the trackers have been told of the epoch already.
late = toys.callback(
    on_training_run_epoch_end=lambda trainer, **kwargs: trainer.run_history.update_metric(
        "late", float(trainer.progress.update)
    )
)


def test_a_metric_that_came_right_before_a_save_is_reported_by_the_resumed_run(tmp_path, use):
    class Noting(fake()):
        def log(self, values, step=None):
            points.extend((step, values[name]) for name in values if name == "late")

    use(Noting)
    points, folder = [], tmp_path / "run"
    trained(tmp_path / "whole", reporting(tmp_path / "whole"), late)
    whole, points = points, []
    with pytest.raises(RuntimeError, match="the machine is gone"):
        trained(folder, reporting(folder), late, crash(5))
    trained(folder, reporting(folder), late, resume_from="auto")
    assert len(whole) == 2 and whole[0][1] == 4.0
    assert points == whole


def test_a_new_run_in_the_folder_takes_the_place_of_the_old_one(tmp_path):
    pytest.importorskip("tensorboard")
    callback = reporting(tmp_path)
    trained(tmp_path, callback)
    time.sleep(1.1)  # TensorBoard reads files in the order of their names, which have the second
    trained(tmp_path, callback, num_epochs=1)
    assert [update for update, _ in scalars(tmp_path / "trackers" / "tensorboard")["train/loss"]] == [1, 2, 3, 4]


def report_from_all(results):
    trained(Path.cwd(), TrackerCallback("tensorboard", "trackers"))


@pytest.mark.distributed
def test_several_processes_write_each_point_once(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    launch(report_from_all, tmp_path)
    folder = tmp_path / "trackers" / "tensorboard"
    assert len(list(folder.glob("events.out*"))) == 1
    assert [update for update, _ in scalars(folder)["train/loss"]] == [1, 2, 3, 4]


def hf_trainer(folder, **options):
    torch.manual_seed(0)
    args = TrainingArguments(str(folder), max_steps=4, logging_steps=1, disable_tqdm=True, use_cpu=True, **options)
    return HfTrainer(Classifier(), args, train_dataset=rows(16))


def test_a_failing_callback_of_transformers_does_not_stop_training(tmp_path, monkeypatch, caplog):
    pytest.importorskip("tensorboard")
    integrations = pytest.importorskip("transformers.integrations")

    expected = hf_trainer(tmp_path / "plain")
    expected.train()
    monkeypatch.setattr(integrations.TensorBoardCallback, "on_log", Mock(side_effect=ConnectionError("no network")))
    trainer = hf_trainer(tmp_path / "run", report_to="tensorboard")
    with caplog.at_level(logging.WARNING, logger="loopwright.hf"):
        assert trainer.train().global_step == 4
    said = [record.getMessage() for record in caplog.records if "TensorBoardCallback.on_log" in record.getMessage()]
    assert said == ["TensorBoardCallback.on_log failed, and training continues: ConnectionError: no network"]
    toys.assert_same_weights(trainer, expected)


def test_hf_takes_all_trackers_that_are_installed_and_names_what_to_install(tmp_path, monkeypatch, trackio):
    integrations = pytest.importorskip("transformers.integrations")
    monkeypatch.setattr(integrations, "get_available_reporting_integrations", lambda: ["tensorboard", "trackio"])
    trainer = hf_trainer(tmp_path, report_to="all", run_name="from-hf", project="theirs")
    assert trainer.callback_handler.callback_list.count("TrackioCallback") == 1
    trainer.train()
    assert len(points("from-hf", "theirs")["train/loss"]) == 4
    monkeypatch.setitem(trackers.PACKAGES, "wandb", ("no_such_tracker",))
    with pytest.raises(ConfigError, match="pip install no_such_tracker"):
        hf_trainer(tmp_path, report_to="wandb")
    with pytest.raises(ConfigError, match="Did you mean 'trackio'"):
        hf_trainer(tmp_path, report_to="trakio")
