"""Runs that are killed, refused by the disk, or ended by a signal: each continues as if nothing had happened.

Every trial is a process of its own, forked from a server that has one thread and torch imported; a kill is a SIGKILL.
"""

import hashlib
import json
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import toys
from distributed.launcher import SERVER, exit_code
from loopwright import Checkpointing, Trainer
from loopwright.callbacks import TrainerCallback
from loopwright.checkpoint import find_newest
from loopwright.failpoints import FAILPOINTS, arm
from loopwright.run_folder import read_status
from toys import Augmented

NUM_UPDATES = 12


class Journal(TrainerCallback):
    """Keeps what every update saw in a file that outlives the process; a replayed update overwrites its line."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "seen.jsonl"
        self.digest = hashlib.sha256()

    def on_train_step_end(self, trainer, batch=None, batch_output=None, **kwargs):
        self.digest.update(batch[0].numpy().tobytes())

    def on_update_end(self, trainer, **kwargs):
        with self.path.open("a") as file:
            file.write(json.dumps([trainer.progress.update, self.digest.hexdigest()]) + "\n")
        self.digest = hashlib.sha256()


class Signals(TrainerCallback):
    """Sends this process a signal in the middle of update 5, and leaves a file at the run's end."""

    def __init__(self, folder: Path, number: int, times: int = 1) -> None:
        self.folder, self.number, self.times = folder, number, times

    def on_train_step_end(self, trainer, batch=None, batch_output=None, **kwargs):
        if trainer.progress.update == 4 and kwargs["step"] % 2 == 0:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)

    def on_training_run_end(self, trainer, **kwargs):
        (self.folder / "ended").touch()


def train(folder: Path, workers: int = 0, signal_number: int | None = None, times: int = 1, **policy) -> dict:
    callbacks = [] if signal_number is None else [Signals(folder, signal_number, times)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[Journal(folder), *callbacks])
    checkpoints = Checkpointing(folder / "checkpoints", every_updates=2, **policy)
    schedule = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=NUM_UPDATES)
    result = trainer.train(
        Augmented(44), 2, Augmented(44), per_device_batch_size=4, gradient_accumulation_steps=2, seed=5,
        create_scheduler_fn=schedule, train_dataloader_kwargs={"num_workers": workers},
        eval_dataloader_kwargs={"num_workers": 0}, checkpoints=checkpoints, resume_from="auto", log_every=2,
    )  # fmt: skip
    seen = dict(json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines())
    return {
        "weights": hashlib.sha256(toys.weights(model).numpy().tobytes()).hexdigest(),
        "seen": [seen[str(update)] if str(update) in seen else seen[update] for update in sorted(seen)],
        "metrics": result.metrics,
        "updates": result.updates,
        "record": toys.numbers(folder / "checkpoints"),
    }


def job(folder: Path, spec: str | None, kwargs: dict) -> None:
    """Train, with a fault armed, and leave what came of it in a file."""
    if spec is not None:
        arm(spec)
    (folder / "outcome.json").write_text(json.dumps(train(folder, **kwargs)))


def in_a_process(folder: Path, spec: str | None = None, **kwargs) -> int:
    return exit_code(job, folder, spec, kwargs)


def outcome(folder: Path) -> dict:
    return json.loads((folder / "outcome.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("whole")
    assert in_a_process(folder) == 0
    return outcome(folder)


ELSEWHERE = ("mid_quarantine", "mid_load", "mid_replace")
KILLED_AT = [name for name in FAILPOINTS if name not in ELSEWHERE]
ONCE = ("before_first_update", "before_final_save", "run_end", "pre_best", "mid_prune", "pre_status")
BEFORE_ANY = ("before_first_update", "pre_status", "mid_metrics_append")


@pytest.mark.parametrize("point", KILLED_AT)
def test_a_run_killed_at_a_named_point_continues_as_if_nothing_had_happened(point, whole, tmp_path):
    hit = 1 if point in ONCE else 6 if point in ("after_backward", "after_optimizer_step", "pre_fsync") else 3
    assert in_a_process(tmp_path, f"{point}:{hit}:kill") == -signal.SIGKILL, "the point was not reached"
    newest, problems = find_newest(tmp_path / "checkpoints")
    assert problems == []
    assert newest is not None or point in BEFORE_ANY
    assert in_a_process(tmp_path) == 0
    assert outcome(tmp_path) == whole
    hidden = [path.name for path in (tmp_path / "checkpoints").glob(".*")]
    assert hidden == [".lock"], "nothing half written is left"
    assert read_status(tmp_path / "checkpoints")["state"] == "done"


def test_a_run_killed_before_it_noted_its_best_checkpoint_knows_it_afterwards(tmp_path):
    assert in_a_process(tmp_path / "whole") == 0
    assert in_a_process(tmp_path / "killed", "pre_best:1:kill") == -signal.SIGKILL
    assert not (tmp_path / "killed" / "checkpoints" / "best.json").exists()
    assert in_a_process(tmp_path / "killed") == 0
    best, expected = ((tmp_path / name / "checkpoints" / "best.json").read_text() for name in ("killed", "whole"))
    assert best == expected


def test_a_run_killed_while_it_loads_changes_nothing(whole, tmp_path):
    assert in_a_process(tmp_path, "after_commit:2:kill") == -signal.SIGKILL
    assert in_a_process(tmp_path, "mid_load:1:kill") == -signal.SIGKILL
    assert in_a_process(tmp_path) == 0
    assert outcome(tmp_path) == whole


def test_a_run_killed_while_it_puts_a_bad_checkpoint_away_falls_back_to_an_older_one(whole, tmp_path):
    assert in_a_process(tmp_path, "after_commit:4:kill") == -signal.SIGKILL
    newest, _ = find_newest(tmp_path / "checkpoints")
    damaged = newest / "state.json"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert in_a_process(tmp_path, "mid_quarantine:1:kill") == -signal.SIGKILL
    assert in_a_process(tmp_path) == 0
    assert outcome(tmp_path) == whole
    assert [path.name[:9] for path in (tmp_path / "checkpoints").glob(".bad-*")] == [".bad-step"]


def test_a_run_killed_again_and_again_at_random_moments_ends_with_the_same_bits(whole, tmp_path):
    moments = random.Random(7)
    kills = 0
    for _ in range(15):
        workers = moments.choice((0, 0, 2))
        process = SERVER.Process(target=job, args=(tmp_path, None, {"workers": workers}))
        process.start()
        time.sleep(moments.uniform(0.02, 0.2))
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        if (tmp_path / "checkpoints").exists():
            find_newest(tmp_path / "checkpoints")  # raises if there are checkpoints and none is whole
    assert in_a_process(tmp_path) == 0
    assert outcome(tmp_path) == whole
    assert kills >= 3


@pytest.mark.parametrize("asynchronous", [True, False])
def test_one_refused_save_is_made_up_for_and_two_in_a_row_end_the_run(whole, tmp_path, asynchronous):
    once, twice = tmp_path / "once", tmp_path / "twice"
    for folder in (once, twice):
        folder.mkdir()
    assert in_a_process(once, "pre_fsync:5:raise:ENOSPC", asynchronous=asynchronous) == 0
    assert outcome(once) == whole
    assert in_a_process(twice, "pre_fsync:*:raise:ENOSPC", asynchronous=asynchronous) == 74
    assert "failpoint pre_fsync" in read_status(twice / "checkpoints")["last_error"]
    assert in_a_process(twice) == 0
    assert outcome(twice) == whole


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_in_order_and_it_continues_exactly(number, code, whole, tmp_path):
    assert in_a_process(tmp_path, signal_number=number) == code
    assert (tmp_path / "ended").exists()
    newest, _ = find_newest(tmp_path / "checkpoints")
    assert newest.name == f"step-{5:010d}"
    assert in_a_process(tmp_path) == 0
    assert outcome(tmp_path) == whole


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_second_signal_ends_the_run_at_once_and_harms_nothing(number, code, whole, tmp_path):
    assert in_a_process(tmp_path, signal_number=number, times=2) == code
    assert not (tmp_path / "ended").exists()
    assert find_newest(tmp_path / "checkpoints")[1] == []
    assert in_a_process(tmp_path) == 0
    assert outcome(tmp_path) == whole


def test_the_best_checkpoint_outlives_the_window_of_the_last_ones(tmp_path):
    assert in_a_process(tmp_path, keep_last=1, keep_best=("train_loss_epoch", "max")) == 0
    best = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert best["metric"] == "train_loss_epoch" and best["direction"] == "max"
    assert (tmp_path / "checkpoints" / best["checkpoint"] / "MANIFEST.json").exists()
    names = {path.name for path in (tmp_path / "checkpoints").glob("step-*")}
    assert names == {best["checkpoint"], f"step-{NUM_UPDATES:010d}"}


def test_a_fresh_run_does_not_mix_with_the_checkpoints_of_another(tmp_path):
    checkpoints = Checkpointing(tmp_path / "checkpoints", every_updates=1)
    trainer = toys.trained(checkpoints=checkpoints)
    with pytest.raises(ValueError, match="holds checkpoints of an earlier run"):
        toys.fit(trainer, toys.data(16), checkpoints=checkpoints)
