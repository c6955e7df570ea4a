"""What a run says about itself: metrics.jsonl, status.json and who owns the folder, over resumes and faults."""

import errno
import json
import math
import os
import platform
import shutil
import signal
from pathlib import Path

import pytest
import torch

import toys
from distributed.launcher import SERVER, launch
from loopwright import Checkpointing, Trainer
from loopwright.callbacks import ModelEmaCallback, SaveTrainingStateCallback, StopTrainingError
from loopwright.checkpoint import find_newest, read, verify, write
from loopwright.checkpoint.staging import Staging
from loopwright.errors import CheckpointError, ConfigError, Preempted
from loopwright.failpoints import arm
from loopwright.run_folder import LeaseError, read_status
from loopwright.training.run import run_of
from toys import at_update, contents, numbers, records, stop_at

NUM_UPDATES = 10  # five per epoch: nine micro-batches of two, in windows of two


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
    ema = ModelEmaCallback(decay=0.7, save_path=folder.parent / f"{folder.name}.ema.pt")
    often = {"eval_dataset": toys.data(7), "log_every": 2, "evaluate_every": 3}
    windows = {"per_device_batch_size": 2, "gradient_accumulation_steps": 2, "gradient_clip_norm": 1.0}
    kwargs = {"checkpoints": toys.saving(folder, **kwargs.pop("policy", {})), "cls": cls, **often, **windows, **kwargs}
    model = toys.network(6, dropout=0.3)
    trainer = toys.trained([ema, *callbacks], toys.data(18), num_epochs, model=model, **kwargs)
    return trainer, trainer.result


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
    training = [(one["event"], one["update"]) for one in found if "train_accuracy" in one]
    assert training == [("training", 5), ("training", 10)]
    assert [one["event"] for one in found if "epochs_done" in one] == ["epoch", "epoch"]


def test_a_record_says_when_it_started_what_was_saved_and_how_it_ended(whole):
    trainer, folder = whole
    start = {"event": "start", "update": 0, "epoch": 1, "resumed_from": None, "tier": "T0", "seed": trainer.seed}
    assert records(folder)[0].items() >= start.items()
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
    watch = toys.watch(on_checkpoint_saved=lambda trainer, path, **kwargs: path.name)
    policy = {"every_updates": None, "every_epochs": 1, "asynchronous": asynchronous}
    run(tmp_path / "run", [watch], policy=policy)
    names = ["step-0000000005", "step-0000000010"]
    assert [one["checkpoint"] for one in records(tmp_path / "run", "checkpoint")] == watch.seen == names
    assert read(tmp_path / "run" / names[-1]).state["run"]["progress"]["epoch"] == 2


def test_a_save_after_the_last_epoch_that_fails_is_made_up_for_at_the_end_of_the_run(tmp_path):
    arm("pre_fsync:1:raise:EIO")
    run(tmp_path / "run", num_epochs=1, policy={"every_updates": None, "every_epochs": 1})
    assert [one["checkpoint"] for one in records(tmp_path / "run", "checkpoint")] == ["step-0000000005"]


def test_a_run_without_checkpoints_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = toys.trained(cls=Measured, eval_dataset=toys.data(8)).result
    assert list(tmp_path.iterdir()) == [] and result.seconds > 0


def test_states_saved_by_a_callback_alone_keep_no_record(tmp_path):
    toys.trained([SaveTrainingStateCallback(tmp_path / "states", save_every_n_epochs=1)], num_epochs=2)
    assert sorted(path.name for path in tmp_path.rglob("*.json*")) == sorted(["MANIFEST.json", "state.json"] * 3)


def test_the_record_may_be_in_a_folder_of_its_own(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    checkpoints = Checkpointing(folder, every_updates=2, keep_best=None, run_folder=tmp_path / "run")
    run(tmp_path / "run", checkpoints=checkpoints, num_epochs=1)
    assert records(tmp_path / "run", "end")[0]["state"] == "done"
    assert read_status(tmp_path / "run")["last_checkpoint"] == "step-0000000005"
    assert all(path.is_dir() and path.name.startswith("step-") for path in folder.iterdir())


def test_a_record_that_was_taken_away_is_started_again_and_reports_it(whole, tmp_path):
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


def test_the_time_of_a_run_survives_a_resume(tmp_path):
    _, first = run(tmp_path / "run", [stop_at(4)])
    path, _ = find_newest(tmp_path / "run")
    checkpoint, waited = read(path), 100.0  # as if the run had lasted so much longer when it was saved
    saved_after = checkpoint.state["record"]["seconds"]
    checkpoint.state["record"]["seconds"] += waited
    run_id = verify(path)["identity"]["run_id"]
    write(path, checkpoint.model, checkpoint.state, checkpoint.update, run_id=run_id, about=checkpoint.about)
    assert 0 < saved_after <= first.seconds
    _, second = run(tmp_path / "run", resume_from="auto")
    assert second.seconds > waited + saved_after
    seconds = [one["seconds"] for one in records(tmp_path / "run")]
    assert seconds == sorted(seconds) and seconds[-1] > waited
    assert second.seconds == pytest.approx(seconds[-1], abs=0.5)


def test_results_are_compared_without_their_time():
    one, other = (toys.fit(toys.trainer_of(), toys.data(16)) for _ in range(2))
    assert one == other and one.seconds != other.seconds


# A disk that refuses


def status_at_updates(folder: Path):
    return toys.watch(on_update_end=lambda trainer, **kwargs: read_status(folder))


def refuse_records(patch, error: OSError) -> None:
    """Make the disk refuse lines of metrics.jsonl, and nothing else."""
    real_write = os.write

    def write(descriptor, data):
        if bytes(data[:9]) == b'{"event":':
            raise error
        return real_write(descriptor, data)

    patch.setattr(os, "write", write)


def test_a_record_that_cannot_be_written_does_not_end_the_run_and_is_caught_up(whole, tmp_path, caplog):
    _, folder = whole
    watch = status_at_updates(tmp_path / "run")
    # The first record of the run is its start; the log of update 2 and all that follows in that update is refused.
    arm("mid_metrics_append:2:raise:ENOSPC")
    _, result = run(tmp_path / "run", [watch], policy={"every_updates": 5})
    assert result.updates == NUM_UPDATES
    assert "cannot write metrics.jsonl" in caplog.text and "No space left on device" in caplog.text
    assert "No space left on device" in watch.seen[2]["last_error"]
    assert read_status(tmp_path / "run")["last_error"] is None, "a checkpoint was made since"
    assert numbers(tmp_path / "run") == numbers(folder)


def test_a_disk_that_refuses_only_the_record_ends_the_run_after_two_saves_and_it_resumes_exactly(
    whole, tmp_path, monkeypatch
):
    trainer, folder = whole
    run(tmp_path / "run", [stop_at(2)])
    with monkeypatch.context() as patched:
        refuse_records(patched, OSError(errno.EDQUOT, "Disk quota exceeded"))
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


def test_a_manual_save_that_the_record_prevents_is_a_checkpoint_error(tmp_path, monkeypatch):
    def save(trainer, **kwargs):
        with monkeypatch.context() as patched:
            refuse_records(patched, OSError(errno.EIO, "Input/output error"))
            trainer.write_record("log")
            with pytest.raises(CheckpointError, match="its metrics could not be written"):
                trainer.save_training_state(tmp_path / "state")

    run(tmp_path / "run", [toys.callback(on_update_end=save)], num_epochs=1)
    assert not (tmp_path / "state").exists() and read_status(tmp_path / "run")["state"] == "done"


# status.json


def test_a_status_reports_how_the_run_is_doing_and_that_it_is_done(tmp_path):
    watch = status_at_updates(tmp_path / "run")
    run(tmp_path / "run", [watch])
    assert {status["state"] for status in watch.seen} == {"running"}
    assert watch.seen[0]["pid"] == os.getpid() and watch.seen[0]["host"] == platform.node()
    expected = {"state": "done", "message": None, "update": NUM_UPDATES, "last_error": None}
    last = {"last_checkpoint": f"step-{NUM_UPDATES:010d}"}
    assert read_status(tmp_path / "run").items() >= {**expected, **last}.items()


def test_a_stopped_run_reports_why_and_the_resumed_one_is_running_again(tmp_path):
    run(tmp_path / "run", [stop_at(4)])
    status = read_status(tmp_path / "run")
    assert (status["state"], status["message"], status["last_checkpoint"]) == ("stopped", "enough", "step-0000000004")
    watch = toys.watch(on_training_run_start=lambda trainer, **kwargs: read_status(tmp_path / "run"))
    run(tmp_path / "run", [watch], resume_from="auto")
    expected = {"state": "running", "message": None, "update": 4, "last_checkpoint": "step-0000000004"}
    assert watch.seen[0].items() >= expected.items()
    assert read_status(tmp_path / "run")["state"] == "done"


def fail(trainer):
    raise ZeroDivisionError("by nothing")


def test_a_run_that_raises_says_what_and_gives_the_folder_back(tmp_path):
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", [at_update(3, fail)])
    told = dict.fromkeys(("message", "last_error"), "ZeroDivisionError: by nothing")
    assert read_status(tmp_path / "run").items() >= {"state": "failed", "update": 3, "epoch": 1, **told}.items()
    assert records(tmp_path / "run")[-1]["state"] == "failed"
    assert not (tmp_path / "run" / "lease.json").exists()
    assert run(tmp_path / "run", resume_from="auto")[1].updates == NUM_UPDATES
    assert read_status(tmp_path / "run")["last_error"] is None


def test_a_run_that_raises_keeps_the_save_that_it_has_begun(tmp_path):
    arm("pre_manifest:*:sleep:0.3")
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", [at_update(3, fail)], policy={"every_updates": 2})
    assert [path.name for path in (tmp_path / "run").glob("*step-*")] == ["step-0000000002"]
    status = read_status(tmp_path / "run")
    assert (status["last_checkpoint"], status["last_error"]) == ("step-0000000002", "ZeroDivisionError: by nothing")
    assert [record["update"] for record in records(tmp_path / "run", "checkpoint")] == [2]


def test_a_save_that_is_left_out_since_the_one_before_takes_long_is_reported(tmp_path, capsys):
    arm("pre_manifest:*:sleep:0.3")
    trainer, _ = run(tmp_path / "run", policy={"max_stall_seconds": 0.001})
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


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("has_own_record", [True, False])
@pytest.mark.parametrize("at", [5, NUM_UPDATES])
@pytest.mark.parametrize("how", ["moved", "deleted", "replaced", "checkpoints"])
def test_a_run_whose_folder_goes_away_fails_and_names_what_is_left(tmp_path, how, at, has_own_record, asynchronous):
    home, moved = tmp_path / "home", tmp_path / "moved"
    folder = home / "checkpoints" if has_own_record else home
    target = folder if how == "checkpoints" else home
    policy = {"run_folder": home if has_own_record else None, "asynchronous": asynchronous}

    def take_away(trainer):
        run_of(trainer).checkpoints.saver.wait()
        if how == "deleted":
            shutil.rmtree(target)
            return
        target.rename(moved)
        if how == "replaced":
            shutil.copytree(moved, target)

    with pytest.raises(LeaseError, match="while a run (wrote|saved) to it") as caught:
        run(folder, [at_update(at, take_away)], policy=policy)
    assert caught.value.code == "disk.write" and caught.value.fix and "step-" in str(caught.value)
    if how == "replaced":
        shutil.rmtree(target)
    assert not list(target.rglob("*")), "nothing is created in the old place"
    if how != "deleted":
        assert (f"moved to {moved}" in str(caught.value)) == (target == home)
        moved.replace(target)
        assert run(folder, policy=policy, resume_from="auto")[1].updates == NUM_UPDATES


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (signal.SIGTERM, Preempted, "the run was ended by SIGTERM"),
        (signal.SIGINT, KeyboardInterrupt, "KeyboardInterrupt"),
    ],
)
def test_a_run_ended_by_a_signal_is_preempted_and_reports_which(number, error, message, tmp_path):
    with pytest.raises(error):
        run(tmp_path / "run", [at_update(3, lambda trainer: os.kill(os.getpid(), number))])
    status = read_status(tmp_path / "run")
    assert status["state"] == "preempted" and status["message"].startswith(message)
    assert status["last_checkpoint"] == "step-0000000003"


def test_a_refused_save_is_reported_at_once_and_forgotten_with_the_next_good_one(tmp_path, capsys):
    watch = status_at_updates(tmp_path / "run")
    arm("pre_manifest:2:raise:ENOSPC")
    run(tmp_path / "run", [watch], policy={"asynchronous": False})
    errors = [status["last_error"] for status in watch.seen[:4]]
    assert errors[0] is errors[1] is None, "the save after update 2 comes after this look"
    assert "step-0000000002" in errors[2] and "No space left on device" in errors[2]
    assert errors[3] is None and watch.seen[3]["last_checkpoint"] == "step-0000000003"
    assert "Saving failed, trying again at the next save" in capsys.readouterr().out
    assert "step-0000000002" not in {one["checkpoint"] for one in records(tmp_path / "run", "checkpoint")}


def test_a_run_that_is_refused_leaves_the_record_of_the_one_before_as_it_is(tmp_path):
    run(tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run"):
        run(tmp_path / "run")
    assert contents(tmp_path / "run") == before
    assert read_status(tmp_path / "run")["state"] == "done"


# Who owns the folder


def train_and_wait(folder: Path, has_begun, may_end) -> None:
    """Train in another process; wait in the middle of it until told to go on."""
    torch.set_num_threads(1)

    def wait(trainer):
        has_begun.set()
        assert may_end.wait(60)

    run(folder, [at_update(2, wait)], policy={"asynchronous": False})
    os._exit(0)


def in_another_process(folder: Path):
    has_begun, may_end = SERVER.Event(), SERVER.Event()
    process = SERVER.Process(target=train_and_wait, args=(folder, has_begun, may_end))
    process.start()
    assert has_begun.wait(60)
    return process, may_end


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


def test_the_folder_of_a_killed_process_is_taken_over_with_a_message(whole, tmp_path, capsys):
    trainer, folder = whole
    process, _ = in_another_process(tmp_path / "run")
    process.kill()
    process.join(60)
    assert read_status(tmp_path / "run")["state"] == "running", "it could not say otherwise"
    resumed, _ = run(tmp_path / "run", resume_from="auto")
    expected = f"Taking over from pid {process.pid} on host {platform.node()}, which ended without releasing the run"
    assert expected in capsys.readouterr().out
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
    callback = toys.callback(on_train_epoch_end=start_another, on_update_end=start_another)
    outer, result = run(tmp_path / "run", [callback])
    assert refused == [3] and result.updates == NUM_UPDATES
    assert torch.equal(toys.weights(outer), toys.weights(trainer))
    assert numbers(tmp_path / "run") == numbers(folder)


def test_a_run_whose_checkpoints_are_uploaded_and_removed_saves_on_with_one_note(tmp_path, caplog):
    upload = toys.callback(on_checkpoint_saved=lambda trainer, path, **kwargs: shutil.rmtree(path))
    assert run(tmp_path / "run", [upload], policy={"asynchronous": False})[1].updates == NUM_UPDATES
    assert caplog.text.count("was removed during the run; saving continues") == 1


def take_over(folder: Path) -> None:
    """Make lease.json say that another process has taken the folder over."""
    lease = json.loads((folder / "lease.json").read_text())
    (folder / "lease.json").write_text(json.dumps({**lease, "incarnation": "another", "pid": 1, "started_at": 1.0}))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_process_that_lost_the_folder_commits_nothing_more_and_leaves_nothing_half_written(asynchronous, tmp_path):
    def lose(trainer, **kwargs):
        if trainer.progress.update == 3:
            take_over(tmp_path / "run")

    with pytest.raises(LeaseError, match="another process has taken over the run folder"):
        run(tmp_path / "run", [toys.callback(on_before_optimizer_step=lose)], policy={"asynchronous": asynchronous})
    names = sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir())
    expected = [f"step-{update:010d}" for update in (1, 2, 3)]
    # The third may have been on its way when the folder was lost.
    assert names == expected or (asynchronous and names == expected[:2])
    assert find_newest(tmp_path / "run") == (tmp_path / "run" / names[-1], [])
    assert json.loads((tmp_path / "run" / "lease.json").read_text())["incarnation"] == "another"
    assert records(tmp_path / "run", "end") == [], "the end is the new owner's to tell"


def test_a_process_that_lost_the_folder_ends_with_its_next_heartbeat(tmp_path):
    def lose(trainer):
        take_over(tmp_path / "run")
        run_of(trainer).logbook.record._lease._next_heartbeat = 0.0  # as if ten seconds had passed

    with pytest.raises(LeaseError, match="another run took it over"):
        run(tmp_path / "run", [at_update(2, lose)])
    assert read_status(tmp_path / "run")["state"] == "running"


@pytest.mark.parametrize(
    "error", [StopTrainingError("enough"), KeyboardInterrupt(), SystemExit(3)], ids=lambda e: type(e).__name__
)
def test_the_folder_is_free_again_whatever_ended_the_run(error, tmp_path):
    try:
        toys.trained([toys.raising("on_update_end", error)], checkpoints=Checkpointing(tmp_path))
    except BaseException as raised:  # noqa: BLE001 - whatever it is
        assert raised is error
    assert not (tmp_path / "lease.json").exists()
    assert toys.trained(checkpoints=Checkpointing(tmp_path), resume_from="auto").result.updates == 4


# Two processes of one run


def record_of_two() -> list:
    folder = Path.cwd()
    out = []
    for name, update in (("whole", None), ("parts", 2), ("parts", None)):
        _, result = run(folder / name, [stop_at(update)], num_epochs=1, torch_seed=5, resume_from="auto")
        out.append([result.updates, result.stop_reason, result.seconds > 0])
    return out


@pytest.mark.slow
@pytest.mark.distributed
def test_of_two_processes_the_first_alone_writes_the_record_and_each_update_once(tmp_path):
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
