"""What must not be carried over, told twice, or written: bests of a way that was left, names, identities."""

import json
import math
import os
import shutil
import signal
import threading
from functools import partial

import pytest
import torch

import toys
from distributed.launcher import launch
from loopwright import Checkpointing, Trainer, failpoints
from loopwright.callbacks import ModelEmaCallback
from loopwright.checkpoint import find_newest, store
from loopwright.errors import CheckpointError, ConfigError, Preempted
from loopwright.training.run import run_of
from resume import test_continuity as continuity
from toys import step


def with_moving_average(folder, callbacks=(), **kwargs):
    average = ModelEmaCallback(save_path=folder / "ema.pt", callbacks=callbacks)
    kwargs["checkpoints"] = Checkpointing(folder / "run")
    return toys.trained([average], num_epochs=2, eval_dataset=toys.data(16), **kwargs)


def test_an_evaluation_loss_is_recorded_as_evaluation_beside_a_moving_average(tmp_path):
    with_moving_average(tmp_path)
    records = [record for record in toys.records(tmp_path / "run") if "eval_loss_epoch" in record]
    assert [record["event"] for record in records] == ["evaluation", "evaluation"]


def test_a_signal_in_the_evaluation_of_the_average_does_not_record_the_epoch_twice(tmp_path):
    batches = []

    def send(trainer, **kwargs):
        batches.append(1)
        if len(batches) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted):
        with_moving_average(tmp_path, [toys.callback(on_eval_step_end=send)])
    resumed = with_moving_average(tmp_path, resume_from="auto")
    assert len(resumed.run_history.get_metric_values("eval_loss_epoch")) == 2


@pytest.mark.parametrize("event", ["on_train_epoch_end", "on_eval_step_end", "on_eval_epoch_end"])
def test_a_signal_after_the_last_update_does_not_record_an_epoch_that_is_cut_short_twice(event, tmp_path):
    settings = {"num_epochs": 2, "max_num_train_steps": 5, "eval_dataset": toys.data(16)}
    send = {event: lambda trainer, **kwargs: trainer.progress.update == 5 and os.kill(os.getpid(), signal.SIGTERM)}
    with pytest.raises(Preempted):
        toys.trained([toys.callback(**send)], checkpoints=Checkpointing(tmp_path), **settings)
    toys.trained(checkpoints=Checkpointing(tmp_path), resume_from="auto", **settings)
    found = [(record["event"], record["update"]) for record in toys.records(tmp_path) if "update" in record]
    assert all(found.count((name, 5)) == 1 for name in ("training", "evaluation"))


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, Preempted), (signal.SIGINT, KeyboardInterrupt)])
def test_a_second_signal_in_the_last_save_ends_the_run_as_preempted(number, error, tmp_path):
    second = threading.Timer(0.3, os.kill, (os.getpid(), number))

    def send(trainer):
        run_of(trainer).checkpoints.saver.wait()
        failpoints.arm("writer_start:1:sleep:20")
        second.start()
        os.kill(os.getpid(), number)

    trainer = toys.trainer_of([toys.at_update(3, send)], cls=Trainer)
    try:
        with pytest.raises(error):
            toys.fit(trainer, toys.data(16), checkpoints=Checkpointing(tmp_path / "run", every_updates=2))
    finally:
        second.join()
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "preempted" and status["last_checkpoint"] == "step-0000000002"


def test_the_best_of_the_way_that_was_left_is_forgotten(tmp_path):
    settings = {"eval_dataset": toys.data(8), "policy": {"keep_best": ("eval_loss_epoch", "min")}, "num_epochs": 3}
    continuity.fit(tmp_path, **settings)
    slow = partial(continuity.sgd, lr=1e-6)
    trainer = continuity.fit(tmp_path, slow, resume_from=step(tmp_path, 2), **settings)
    best = json.loads((tmp_path / "best.json").read_text())["value"]
    assert best in trainer.run_history.get_metric_values("eval_loss_epoch")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"checkpoint": "step-0000000004", "metric": 1, "value": "x"}'])
def test_a_damaged_note_of_the_best_checkpoint_is_rebuilt_from_the_manifests(content, tmp_path):
    settings = {"eval_dataset": toys.data(8), "policy": {"keep_best": ("eval_loss_epoch", "min")}}
    continuity.fit(tmp_path, num_epochs=2, **settings)
    note = (tmp_path / "best.json").read_text()
    (tmp_path / "best.json").write_text(content)
    continuity.fit(tmp_path, num_epochs=2, resume_from="auto", **settings)
    assert (tmp_path / "best.json").read_text() == note


@pytest.mark.parametrize("damage", [shutil.rmtree, lambda path: (path / "MANIFEST.json").write_text("{}")])
def test_a_lost_best_checkpoint_is_reported_and_the_best_that_is_left_replaces_it(damage, tmp_path, capsys):
    settings = {"eval_dataset": toys.data(8), "policy": {"keep_best": ("eval_loss_epoch", "max")}}
    continuity.fit(tmp_path, num_epochs=2, **settings)
    best = json.loads((tmp_path / "best.json").read_text())["checkpoint"]
    damage(tmp_path / best)
    trainer = continuity.fit(tmp_path, num_epochs=3, resume_from="auto", **settings)
    assert f"The best checkpoint, {best} (eval_loss_epoch " in capsys.readouterr().out
    left = json.loads((tmp_path / "best.json").read_text())
    assert left["checkpoint"] != best and left["value"] in list(
        trainer.run_history.get_metric_values("eval_loss_epoch")
    )


def test_what_a_killed_process_moved_aside_is_removed_once_its_successor_is_whole(tmp_path):
    continuity.fit(tmp_path, num_epochs=1)
    newest, older = step(tmp_path, 4), step(tmp_path, 2)
    shutil.copytree(newest, tmp_path / f".old-{newest.name}")
    shutil.copytree(older, tmp_path / f".old-{older.name}")
    (older / "state.json").write_text("{}")
    store.clean(tmp_path)
    assert sorted(path.name for path in tmp_path.glob(".old-*")) == [f".old-{older.name}"]


@pytest.mark.parametrize(
    "name",
    ["step_{update}", "a/b-{update}", ".x-{update}", "../up-{update}", "s-{update:x}", "[a]-{update}", "{step}", "{}"],
)
def test_names_that_could_not_be_found_again_are_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="a hyphen and the update"):
        Checkpointing(tmp_path, name=name)


def test_an_infinite_evaluation_loss_does_not_make_saving_fail(tmp_path):
    class InfiniteEvaluation(Trainer):
        def calculate_eval_batch_loss(self, batch):
            return {**super().calculate_eval_batch_loss(batch), "loss": torch.tensor(math.inf)}

    policy = {"keep_best": ("eval_loss_epoch", "min")}
    trainer = continuity.fit(tmp_path, cls=InfiniteEvaluation, eval_dataset=toys.data(8), policy=policy)
    assert trainer.progress.update == 8


@pytest.mark.parametrize("identity", [None, {}, {"run_id": "", "update": "x", "attempt": ""}])
def test_a_manifest_without_an_identity_is_a_bad_checkpoint(identity, tmp_path):
    continuity.fit(tmp_path, num_epochs=1)
    path = step(tmp_path, 4) / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    manifest.pop("sha256")
    path.write_bytes(store._canonical({**manifest, "identity": identity}))
    newest, problems = find_newest(tmp_path)
    assert newest == step(tmp_path, 3)
    assert "does not name its run and update" in str(problems[0])


def test_a_further_file_that_cannot_have_its_name_is_refused_before_the_first_update(tmp_path):
    trainer = toys.trainer_of()
    trainer.checkpoint_files = lambda: {"../x": b""}
    with pytest.raises(CheckpointError, match="plain name"):
        toys.fit(trainer, toys.data(8), checkpoints=Checkpointing(tmp_path))
    assert trainer.seen == []


def job_with_a_nan_on_one_process():
    return toys.trained((), toys.data(32), cls=toys.PoisonedOnOne, log_every=4, seed=1).result.stop_reason


@pytest.mark.distributed
def test_all_processes_name_the_update_of_a_nan_that_one_of_them_had(tmp_path):
    reasons = launch(job_with_a_nan_on_one_process, tmp_path)
    assert all("the loss of update 2 is not finite" in reason for reason in reasons), reasons
