"""What a run says about itself: metrics.jsonl, status.json and who owns the folder, over resumes and faults."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import platform
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import toys
from distributed.launcher import launch
from loopwright import Checkpointing, Trainer
from loopwright.callbacks import ModelEmaCallback, SaveTrainingStateCallback, StopTrainingError, TrainerCallback
from loopwright.checkpoint import find_newest, read, verify, write
from loopwright.checkpoint.staging import Staging
from loopwright.errors import CheckpointError, ConfigError, Preempted
from loopwright.failpoints import arm, disarm
from loopwright.run_folder import LeaseError, read_metrics, read_status
from loopwright.training.run import run_of

NUM_UPDATES = 10  # five per epoch: nine micro-batches of two, in windows of two
NUMBERS = ("log", "training", "evaluation", "epoch", "skipped_update")


class Measured(Trainer):
    """Records metrics in hooks of training, of evaluation and of the whole epoch."""

    def train_epoch_end(self):
        self.run_history.update_metric("train_accuracy", torch.tensor(0.25 * self.progress.update))

    def eval_epoch_end(self):
        total = sum(parameter.detach().sum() for parameter in self.model.parameters())
        self.run_history.update_metric("accuracy", total)
        self.run_history.update_metric("never_finite", math.nan)

    def training_run_epoch_end(self):
        self.run_history.update_metric("epochs_done", self.run_history.current_epoch)


def run(folder: Path, callbacks=(), num_epochs: int = 2, cls=Measured, **kwargs):
    """Train a model with dropout, momentum and a moving average; everything is made anew."""
    model = toys.network(6, dropout=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ema = ModelEmaCallback(decay=0.7, save_path=folder.parent / f"{folder.name}.ema.pt")
    trainer = cls(model, nn.MSELoss(), optimizer, callbacks=[ema, *callbacks])
    policy = {"every_updates": 1, "keep_last": 99, "keep_best": None, **kwargs.pop("policy", {})}
    kwargs.setdefault("checkpoints", Checkpointing(folder, **policy))
    result = toys.fit(
        trainer,
        toys.data(18),
        num_epochs=num_epochs,
        eval_dataset=toys.data(7),
        per_device_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_clip_norm=1.0,
        log_every=2,
        evaluate_every=3,
        **kwargs,
    )
    return trainer, result


def records(folder: Path, *events: str) -> list[dict]:
    return [record for record in read_metrics(folder / "metrics.jsonl") if not events or record["event"] in events]


def numbers(folder: Path) -> list[dict]:
    """Return what a record says of the training, without clock times, starts and saves."""
    found = records(folder, *NUMBERS)
    return [{name: value for name, value in one.items() if name not in ("time", "seconds")} for one in found]


def stop_at(update: int | None):
    return toys.callback(
        on_update_end=lambda trainer, **kwargs: trainer.progress.update == update and trainer.request_stop("enough")
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that was never interrupted, with a checkpoint after every update."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    trainer, _ = run(folder)
    assert trainer.progress.update == NUM_UPDATES
    return trainer, folder


# What is recorded


def test_every_log_evaluation_and_epoch_is_recorded_with_the_metrics_of_its_hooks(whole):
    trainer, folder = whole
    found = numbers(folder)
    logs = [one for one in found if one["event"] == "log"]
    assert [one["update"] for one in logs] == [2, 4, 5, 6, 8, 10]
    assert [one["epoch"] for one in logs] == [1, 1, 1, 2, 2, 2]
    assert all({"loss", "lr", "gradient_norm"} <= one.keys() for one in logs)
    history = trainer.run_history
    names = history.get_metric_names()
    assert {"train_accuracy", "accuracy", "ema_model_accuracy", "intermediate_eval_loss", "epochs_done"} <= names
    for name in sorted(names):
        values = [one for one in found if name in one]
        assert len(values) == len(history.get_metric_values(name)), name
        for one, expected in zip(values, history.get_metric_values(name), strict=True):
            if math.isnan(expected):
                assert one[name] is None and one["nonfinite"][name] == "nan"
            else:
                assert one[name] == float(expected), name
    assert [one["update"] for one in found if "intermediate_eval_loss" in one] == [3, 6, 9]
    assert [one["update"] for one in found if "ema_model_accuracy" in one] == [5, 10]
    assert [(one["event"], one["update"]) for one in found if "train_accuracy" in one] == [
        ("training", 5),
        ("training", 10),
    ]
    assert [one["event"] for one in found if "epochs_done" in one] == ["epoch", "epoch"]


def test_a_record_says_when_it_started_what_was_saved_and_how_it_ended(whole):
    trainer, folder = whole
    start = records(folder)[0]
    assert {name: start[name] for name in ("event", "update", "epoch", "resumed_from", "tier", "seed")} == {
        "event": "start",
        "update": 0,
        "epoch": 1,
        "resumed_from": None,
        "tier": "T0",
        "seed": trainer.seed,
    }
    saved = {one["checkpoint"] for one in records(folder, "checkpoint")}
    assert saved == {f"step-{update:010d}" for update in range(1, NUM_UPDATES + 1)}
    assert all(one["checkpoint"].endswith(f"{one['update']:010d}") for one in records(folder, "checkpoint"))
    assert (records(folder)[-1]["event"], records(folder)[-1]["state"]) == ("end", "done")
    seconds = [one["seconds"] for one in records(folder)]
    assert seconds == sorted(seconds) and seconds[-1] < 60


@pytest.mark.parametrize("update", range(1, NUM_UPDATES + 1))
def test_after_a_resume_at_any_checkpoint_every_update_is_recorded_once_and_as_in_the_whole_run(
    update, whole, tmp_path
):
    _, folder = whole
    shutil.copytree(folder, tmp_path / "run")
    run(tmp_path / "run", torch_seed=99, resume_from=tmp_path / "run" / f"step-{update:010d}")
    assert numbers(tmp_path / "run") == numbers(folder)
    starts = records(tmp_path / "run", "start")
    assert [one["resumed_from"] for one in starts] == [None, f"step-{update:010d}"]
    assert starts[0]["run_id"] == starts[1]["run_id"]
    assert len(records(tmp_path / "run", "end")) == 1


def test_a_run_resumed_several_times_is_recorded_as_if_never_interrupted(whole, tmp_path):
    _, folder = whole
    for update in (1, 5, 6, None):
        run(tmp_path / "run", [stop_at(update)], torch_seed=7 if update == 1 else 99, resume_from="auto")
    assert numbers(tmp_path / "run") == numbers(folder)
    assert [one["update"] for one in records(tmp_path / "run", "start")] == [0, 1, 5, 6]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_that_ends_with_a_save_after_its_last_epoch_saves_and_records_that_state_once(asynchronous, tmp_path):
    told = []

    class Told(TrainerCallback):
        def on_checkpoint_saved(self, trainer, path, **kwargs):
            told.append(path.name)

    policy = {"every_updates": None, "every_epochs": 1, "asynchronous": asynchronous}
    run(tmp_path / "run", [Told()], policy=policy)
    names = ["step-0000000005", "step-0000000010"]
    assert [one["checkpoint"] for one in records(tmp_path / "run", "checkpoint")] == told == names
    assert read(tmp_path / "run" / names[-1]).state["run"]["progress"]["epoch"] == 2


def test_a_save_after_the_last_epoch_that_fails_is_made_up_for_at_the_end_of_the_run(tmp_path):
    arm("pre_fsync:1:raise:EIO")
    try:
        run(tmp_path / "run", num_epochs=1, policy={"every_updates": None, "every_epochs": 1})
    finally:
        disarm()
    assert [one["checkpoint"] for one in records(tmp_path / "run", "checkpoint")] == ["step-0000000005"]


def test_a_run_without_checkpoints_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = toys.trainer_of(cls=Measured)
    result = toys.fit(trainer, toys.data(16), eval_dataset=toys.data(8))
    assert list(tmp_path.iterdir()) == [] and result.seconds > 0


def test_states_saved_by_a_callback_alone_keep_no_record(tmp_path):
    trainer = toys.trainer_of([SaveTrainingStateCallback(tmp_path / "states", save_every_n_epochs=1)])
    toys.fit(trainer, toys.data(16), num_epochs=2)
    assert sorted(path.name for path in tmp_path.rglob("*.json*")) == sorted(["MANIFEST.json", "state.json"] * 3)


def test_the_record_may_be_in_a_folder_of_its_own(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    checkpoints = Checkpointing(folder, every_updates=2, keep_best=None, run_folder=tmp_path / "run")
    run(tmp_path / "run", checkpoints=checkpoints, num_epochs=1)
    assert records(tmp_path / "run", "end")[0]["state"] == "done"
    assert read_status(tmp_path / "run")["last_checkpoint"] == "step-0000000005"
    assert all(path.is_dir() and path.name.startswith("step-") for path in folder.iterdir())


def test_a_record_that_was_taken_away_is_begun_anew_and_says_so(whole, tmp_path):
    _, folder = whole
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    run(tmp_path / "run", resume_from=tmp_path / "run" / "step-0000000006")
    assert records(tmp_path / "run")[0]["event"] == "earlier_records_missing"
    assert numbers(tmp_path / "run") == [one for one in numbers(folder) if one["update"] > 6]


def test_two_runs_of_one_trainer_have_a_record_each(tmp_path):
    trainer, _ = run(tmp_path / "first", num_epochs=1)
    checkpoints = Checkpointing(tmp_path / "second", keep_best=None)
    toys.fit(trainer, toys.data(18), eval_dataset=toys.data(7), checkpoints=checkpoints)
    first, second = records(tmp_path / "first", "start"), records(tmp_path / "second", "start")
    assert len(first) == len(second) == 1 and first[0]["run_id"] != second[0]["run_id"]
    trainer.evaluate(toys.data(7))
    assert records(tmp_path / "second")[-1]["event"] == "end", "an evaluation afterwards adds nothing"


# Time


def test_the_time_of_a_run_goes_on_over_a_resume(tmp_path):
    _, first = run(tmp_path / "run", [stop_at(4)])
    waited = 100.0
    saved_after = make_older(tmp_path / "run", waited)
    assert 0 < saved_after <= first.seconds
    _, second = run(tmp_path / "run", resume_from="auto")
    assert second.seconds > waited + saved_after
    seconds = [one["seconds"] for one in records(tmp_path / "run")]
    assert seconds == sorted(seconds) and seconds[-1] > waited
    assert second.seconds == pytest.approx(seconds[-1], abs=0.5)


def make_older(folder: Path, seconds: float) -> float:
    """Make the newest checkpoint say that the run had lasted so much longer when it was saved; return what it said."""
    path, _ = find_newest(folder)
    checkpoint = read(path)
    before = checkpoint.state["record"]["seconds"]
    checkpoint.state["record"]["seconds"] = before + seconds
    run_id = verify(path)["identity"]["run_id"]
    write(path, checkpoint.model, checkpoint.state, checkpoint.update, run_id=run_id, about=checkpoint.about)
    return before


def test_results_are_compared_without_their_time():
    one, other = (toys.fit(toys.trainer_of(), toys.data(16)) for _ in range(2))
    assert one == other and one.seconds != other.seconds


# A disk that refuses


def test_a_record_that_cannot_be_written_does_not_end_the_run_and_is_caught_up(whole, tmp_path, caplog):
    _, folder = whole
    told = []
    watch = toys.callback(on_update_end=lambda trainer, **kwargs: told.append(read_status(tmp_path / "run")))
    # The first record of the run is its start; the log of update 2 and all that follows in that update is refused.
    arm("mid_metrics_append:2:raise:ENOSPC")
    _, result = run(tmp_path / "run", [watch], policy={"every_updates": 5})
    assert result.updates == NUM_UPDATES
    assert "cannot write metrics.jsonl" in caplog.text and "No space left on device" in caplog.text
    assert "No space left on device" in told[2]["last_error"]
    assert read_status(tmp_path / "run")["last_error"] is None, "a checkpoint was made since"
    assert numbers(tmp_path / "run") == numbers(folder)


def test_a_disk_that_refuses_only_the_record_ends_the_run_after_two_saves_and_it_goes_on_exactly(
    whole, tmp_path, monkeypatch
):
    trainer, folder = whole
    run(tmp_path / "run", [stop_at(2)])
    real_write = os.write

    def refuse_records(descriptor, data):
        if bytes(data[:9]) == b'{"event":':
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return real_write(descriptor, data)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", refuse_records)
        with pytest.raises(CheckpointError, match="saving failed twice in a row: .*Disk quota exceeded"):
            run(tmp_path / "run", resume_from="auto", policy={"asynchronous": False}, cls=Unrehearsed)
    status = read_status(tmp_path / "run")
    assert status["state"] == "failed" and "Disk quota exceeded" in status["last_error"]
    assert find_newest(tmp_path / "run") == (tmp_path / "run" / "step-0000000002", [])
    resumed, _ = run(tmp_path / "run", resume_from="auto")
    assert torch.equal(toys.weights(resumed), toys.weights(trainer))
    assert numbers(tmp_path / "run") == numbers(folder)


class Unrehearsed(Measured):
    """Does not encode its state before the first update, so that the disk can refuse later than at the start."""

    def create_checkpoints(self, run):
        checkpoints = super().create_checkpoints(run)
        checkpoints.rehearse = lambda: None
        return checkpoints


def test_a_save_of_ones_own_that_the_record_prevents_is_a_checkpoint_error(tmp_path, monkeypatch):
    real_write = os.write

    def save(trainer, **kwargs):
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", lambda descriptor, data: refuse(descriptor, data, real_write))
            trainer.write_record("log")
            with pytest.raises(CheckpointError, match="the metrics of the run are not safe"):
                trainer.save_training_state(tmp_path / "state")

    def refuse(descriptor, data, real_write):
        if bytes(data[:9]) == b'{"event":':
            raise OSError(errno.EIO, "Input/output error")
        return real_write(descriptor, data)

    run(tmp_path / "run", [toys.callback(on_update_end=save)], num_epochs=1)
    assert not (tmp_path / "state").exists() and read_status(tmp_path / "run")["state"] == "done"


# status.json


def test_a_status_says_how_the_run_is_doing_and_that_it_is_done(tmp_path):
    during = []
    watch = toys.callback(on_update_end=lambda trainer, **kwargs: during.append(read_status(tmp_path / "run")))
    run(tmp_path / "run", [watch])
    assert {status["state"] for status in during} == {"running"}
    assert during[0]["pid"] == os.getpid() and during[0]["host"] == platform.node()
    status = read_status(tmp_path / "run")
    expected = {
        "state": "done",
        "message": None,
        "update": NUM_UPDATES,
        "last_checkpoint": f"step-{NUM_UPDATES:010d}",
        "last_error": None,
    }
    assert {name: status[name] for name in expected} == expected


def test_a_stopped_run_says_why_and_the_resumed_one_is_running_again(tmp_path):
    run(tmp_path / "run", [stop_at(4)])
    status = read_status(tmp_path / "run")
    assert (status["state"], status["message"], status["last_checkpoint"]) == ("stopped", "enough", "step-0000000004")
    at_start = []
    look = toys.callback(on_training_run_start=lambda trainer, **kwargs: at_start.append(read_status(tmp_path / "run")))
    run(tmp_path / "run", [look], resume_from="auto")
    assert (at_start[0]["state"], at_start[0]["message"]) == ("running", None)
    assert (at_start[0]["update"], at_start[0]["last_checkpoint"]) == (4, "step-0000000004")
    assert read_status(tmp_path / "run")["state"] == "done"


def test_a_run_that_raises_says_what_and_gives_the_folder_back(tmp_path):
    def fail(trainer, **kwargs):
        if trainer.progress.update == 3:
            raise ZeroDivisionError("by nothing")

    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", [toys.callback(on_update_end=fail)])
    status = read_status(tmp_path / "run")
    assert (status["state"], status["message"]) == ("failed", "ZeroDivisionError: by nothing")
    assert (status["update"], status["epoch"]) == (3, 1)
    assert status["last_error"] == "ZeroDivisionError: by nothing"
    assert records(tmp_path / "run")[-1]["state"] == "failed"
    assert not (tmp_path / "run" / "lease.json").exists()
    assert run(tmp_path / "run", resume_from="auto")[1].updates == NUM_UPDATES
    assert read_status(tmp_path / "run")["last_error"] is None


def test_a_run_that_raises_keeps_the_save_that_it_has_begun(tmp_path):
    def fail(trainer, **kwargs):
        if trainer.progress.update == 3:
            raise ZeroDivisionError("by nothing")

    arm("pre_manifest:*:sleep:0.3")
    try:
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "run", [toys.callback(on_update_end=fail)], policy={"every_updates": 2})
    finally:
        disarm()
    assert [path.name for path in (tmp_path / "run").glob("*step-*")] == ["step-0000000002"]
    status = read_status(tmp_path / "run")
    assert (status["last_checkpoint"], status["last_error"]) == ("step-0000000002", "ZeroDivisionError: by nothing")
    assert [record["update"] for record in records(tmp_path / "run", "checkpoint")] == [2]


def test_a_save_that_is_left_out_since_the_one_before_takes_long_is_told(tmp_path, capsys):
    arm("pre_manifest:*:sleep:0.3")
    try:
        trainer, _ = run(tmp_path / "run", policy={"max_stall_seconds": 0.001})
    finally:
        disarm()
    left_out = [line for line in capsys.readouterr().out.splitlines() if "is still being written after 0.001 s" in line]
    assert left_out[-1].endswith(f"({len(left_out)} left out so far)")
    assert len(left_out) == run_of(trainer).checkpoints.saver.skipped > 0
    assert find_newest(tmp_path / "run")[0].name == f"step-{NUM_UPDATES:010d}"


def test_without_memory_for_a_copy_training_waits_for_its_saves_and_has_the_same_bits(
    tmp_path, whole, caplog, monkeypatch
):
    def refuse(buffers, name, tensor):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4711 bytes")

    monkeypatch.setattr(Staging, "_buffer", refuse)
    trainer, _ = run(tmp_path / "run")
    assert "training waits while it is saved" in caplog.text
    assert len(list((tmp_path / "run").glob("step-*"))) == NUM_UPDATES
    assert numbers(tmp_path / "run") == numbers(whole[1])


def test_a_folder_that_is_deleted_while_a_run_writes_to_it_is_made_again_and_that_is_said(tmp_path, whole, caplog):
    def delete(trainer, **kwargs):
        if trainer.progress.update == 5:
            run_of(trainer).checkpoints.saver.wait()
            shutil.rmtree(tmp_path / "run")

    trainer, _ = run(tmp_path / "run", [toys.callback(on_update_end=delete)])
    assert "was deleted or moved while a run writes to it" in caplog.text
    kept = sorted(path.name for path in (tmp_path / "run").glob("step-*"))
    assert kept == [f"step-{update:010d}" for update in range(5, NUM_UPDATES + 1)]
    assert read_status(tmp_path / "run")["state"] == "done"
    events = [record["event"] for record in records(tmp_path / "run")]
    assert events[0] == "earlier_records_missing" and events[-1] == "end"
    assert numbers(tmp_path / "run") == [record for record in numbers(whole[1]) if record["update"] >= 5]
    assert run(tmp_path / "run", resume_from="auto")[1].updates == NUM_UPDATES


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (signal.SIGTERM, Preempted, "the run was ended by SIGTERM"),
        (signal.SIGINT, KeyboardInterrupt, "KeyboardInterrupt"),
    ],
)
def test_a_run_ended_by_a_signal_is_preempted_and_says_by_which(number, error, message, tmp_path):
    send = toys.callback(
        on_update_end=lambda trainer, **kwargs: trainer.progress.update == 3 and os.kill(os.getpid(), number)
    )
    with pytest.raises(error):
        run(tmp_path / "run", [send])
    status = read_status(tmp_path / "run")
    assert status["state"] == "preempted" and status["message"].startswith(message)
    assert status["last_checkpoint"] == "step-0000000003"


def test_a_refused_save_is_told_at_once_and_forgotten_with_the_next_good_one(tmp_path, capsys):
    told = []
    watch = toys.callback(on_update_end=lambda trainer, **kwargs: told.append(read_status(tmp_path / "run")))
    arm("pre_manifest:2:raise:ENOSPC")
    run(tmp_path / "run", [watch], policy={"asynchronous": False})
    errors = [status["last_error"] for status in told[:4]]
    assert errors[0] is errors[1] is None, "the save after update 2 comes after this look"
    assert "step-0000000002" in errors[2] and "No space left on device" in errors[2]
    assert errors[3] is None and told[3]["last_checkpoint"] == "step-0000000003"
    assert "Saving failed, trying again at the next save" in capsys.readouterr().out
    assert "step-0000000002" not in {one["checkpoint"] for one in records(tmp_path / "run", "checkpoint")}


def test_a_run_that_is_refused_leaves_the_record_of_the_one_before_as_it_is(tmp_path):
    run(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run"):
        run(tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert read_status(tmp_path / "run")["state"] == "done"


# Who owns the folder


SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "torch._dynamo", "accelerate", "loopwright.trainer"])


def train_and_wait(folder: Path, has_begun, may_end) -> None:
    """Train in another process; wait in the middle of it until told to go on."""
    torch.set_num_threads(1)

    def wait(trainer, **kwargs):
        if trainer.progress.update == 2:
            has_begun.set()
            assert may_end.wait(60)

    run(folder, [toys.callback(on_update_end=wait)], policy={"asynchronous": False})
    os._exit(0)


def in_another_process(folder: Path):
    has_begun, may_end = SERVER.Event(), SERVER.Event()
    process = SERVER.Process(target=train_and_wait, args=(folder, has_begun, may_end))
    process.start()
    assert has_begun.wait(60)
    return process, may_end


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_process_is_refused_with_the_first_ones_pid_and_host_before_anything_is_touched(tmp_path):
    process, may_end = in_another_process(tmp_path / "run")
    before = contents(tmp_path / "run")
    trainer = toys.trainer_of()
    weights = toys.weights(trainer)
    for resume_from in (None, "auto"):
        with pytest.raises(LeaseError, match=rf"in use by pid {process.pid} on host {platform.node()}"):
            toys.fit(trainer, toys.data(8), checkpoints=Checkpointing(tmp_path / "run"), resume_from=resume_from)
    assert contents(tmp_path / "run") == before
    assert torch.equal(toys.weights(trainer), weights) and trainer.seen == []
    may_end.set()
    process.join(60)
    assert process.exitcode == 0 and read_status(tmp_path / "run")["state"] == "done"
    assert records(tmp_path / "run")[-1]["event"] == "end"


def test_the_folder_of_a_killed_process_is_taken_over_and_that_is_said(whole, tmp_path, capsys):
    trainer, folder = whole
    process, _ = in_another_process(tmp_path / "run")
    process.kill()
    process.join(60)
    assert read_status(tmp_path / "run")["state"] == "running", "it could not say otherwise"
    resumed, _ = run(tmp_path / "run", resume_from="auto")
    said = capsys.readouterr().out
    expected = f"Taking over from pid {process.pid} on host {platform.node()}, which ended without releasing the run"
    assert expected in said
    assert torch.equal(toys.weights(resumed), toys.weights(trainer))
    assert numbers(tmp_path / "run") == numbers(folder)


def test_a_trainer_cannot_train_into_the_folder_that_another_one_of_this_process_trains_into(whole, tmp_path):
    refused = []

    def start_another(trainer, **kwargs):
        if trainer.progress.update == 3:
            with pytest.raises(LeaseError, match="in use by this process"):
                run(tmp_path / "run", resume_from="auto")
            refused.append(trainer.progress.update)

    trainer, folder = whole
    outer, result = run(
        tmp_path / "run", [toys.callback(on_train_epoch_end=start_another, on_update_end=start_another)]
    )
    assert refused == [3] and result.updates == NUM_UPDATES
    assert torch.equal(toys.weights(outer), toys.weights(trainer))
    assert numbers(tmp_path / "run") == numbers(folder)


def take_over(folder: Path) -> None:
    """Make lease.json say that another process has taken the folder over."""
    lease = json.loads((folder / "lease.json").read_text())
    (folder / "lease.json").write_text(json.dumps({**lease, "incarnation": "another", "pid": 1}))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_process_that_lost_the_folder_commits_nothing_more_and_leaves_nothing_half_written(asynchronous, tmp_path):
    def lose(trainer, **kwargs):
        if trainer.progress.update == 3:
            take_over(tmp_path / "run")

    with pytest.raises(LeaseError, match="another process has taken the run folder over"):
        run(tmp_path / "run", [toys.callback(on_before_optimizer_step=lose)], policy={"asynchronous": asynchronous})
    names = sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir())
    expected = [f"step-{update:010d}" for update in (1, 2, 3)]
    # The third may have been on its way when the folder was lost.
    assert names == expected or (asynchronous and names == expected[:2])
    assert find_newest(tmp_path / "run") == (tmp_path / "run" / names[-1], [])
    assert json.loads((tmp_path / "run" / "lease.json").read_text())["incarnation"] == "another"
    assert records(tmp_path / "run", "end") == [], "the end is the new owner's to tell"


def test_a_process_that_lost_the_folder_ends_with_its_next_heartbeat(tmp_path):
    def lose(trainer, **kwargs):
        if trainer.progress.update == 2:
            take_over(tmp_path / "run")
            run_of(trainer).logbook.record._lease._next_heartbeat = 0.0  # as if ten seconds had passed

    with pytest.raises(LeaseError, match="another run took it over"):
        run(tmp_path / "run", [toys.callback(on_update_end=lose)])
    assert read_status(tmp_path / "run")["state"] == "running"


@pytest.mark.parametrize(
    "error", [StopTrainingError("enough"), KeyboardInterrupt(), SystemExit(3)], ids=lambda e: type(e).__name__
)
def test_the_folder_is_free_again_whatever_ended_the_run(error, tmp_path):
    def fail(trainer, **kwargs):
        raise error

    trainer = toys.trainer_of([toys.callback(on_update_end=fail)])
    try:
        toys.fit(trainer, toys.data(16), checkpoints=Checkpointing(tmp_path))
    except BaseException as raised:  # noqa: BLE001 - whatever it is
        assert raised is error
    assert not (tmp_path / "lease.json").exists()
    assert (
        toys.fit(toys.trainer_of(), toys.data(16), checkpoints=Checkpointing(tmp_path), resume_from="auto").updates == 4
    )


# Two processes of one run


def record_of_two() -> list:
    folder = Path(os.environ["RECORD_FOLDER"])
    out = []
    for name, update in (("whole", None), ("parts", 2), ("parts", None)):
        _, result = run(folder / name, [stop_at(update)], num_epochs=1, torch_seed=5, resume_from="auto")
        out.append([result.updates, result.stop_reason, result.seconds > 0])
    return out


@pytest.mark.slow
@pytest.mark.distributed
def test_of_two_processes_the_first_alone_writes_the_record_and_each_update_once(tmp_path, monkeypatch):
    monkeypatch.setenv("RECORD_FOLDER", str(tmp_path))
    first, second = launch(record_of_two, tmp_path, timeout_seconds=90)
    assert first == second
    updates = first[0][0]
    assert [one[:2] for one in first] == [[updates, None], [2, "enough"], [updates, None]]
    found = numbers(tmp_path / "parts")
    assert found == numbers(tmp_path / "whole")
    logs = [one["update"] for one in found if one["event"] == "log"]
    assert logs == sorted(set(logs)) and logs[-1] == updates
    assert len(records(tmp_path / "whole", "start")) == len(records(tmp_path / "whole", "end")) == 1
    assert read_status(tmp_path / "parts")["state"] == "done"
