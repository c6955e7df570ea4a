"""The loop of examples/own_loop.py is killed and started again: the same weights, and every update recorded once.

Most trials are processes forked from a server that has torch imported; one runs the script as a person would.
"""

import contextlib
import hashlib
import importlib.util
import json
import multiprocessing
import os
import signal
import time
import traceback
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import toys
from distributed.launcher import SERVER
from loopwright import Trainer
from loopwright.checkpoint import find_newest, verify_all
from loopwright.failpoints import arm
from loopwright.run_folder import Lease, LeaseError

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "own_loop.py"
NUM_UPDATES = 96  # 3 epochs of 1000 samples in windows of 2 x 16; the last window of an epoch is short


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_loop", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def job(run: Path, faults: str | None) -> None:
    """Run the example with these faults armed; what it prints goes into a file beside the run folder."""
    try:
        torch.set_num_threads(1)
        if faults is not None:
            arm(faults)
        with printed(run).open("w") as file, contextlib.redirect_stdout(file):
            load_example().main(run)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - told by the exit code
        traceback.print_exc()
        os._exit(1)


def start(run: Path, faults: str | None = None) -> multiprocessing.Process:
    process = SERVER.Process(target=job, args=(run, faults))
    process.start()
    return process


def exit_code(run: Path, faults: str | None = None) -> int:
    """Run the example to its end in a process of its own; return its exit code, negative for a signal."""
    process = start(run, faults)
    process.join(60)
    if process.exitcode is None:
        process.kill()
        raise AssertionError("the process hangs")
    return process.exitcode


def printed(run: Path) -> Path:
    return run.with_name("printed.txt")


def num_records(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def outcome(run: Path) -> tuple[str, bytes]:
    """Return the line that the example printed, and its metrics.jsonl."""
    return printed(run).read_text(), (run / "metrics.jsonl").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[str, bytes]:
    run = tmp_path_factory.mktemp("whole") / "run"
    assert exit_code(run) == 0
    return outcome(run)


def test_a_run_records_every_update_once_and_ends_with_one_line(whole):
    line, metrics = whole
    records = [json.loads(record) for record in metrics.splitlines()]
    assert [record["update"] for record in records] == list(range(1, NUM_UPDATES + 1))
    assert records[-1]["loss"] < records[0]["loss"] / 2
    assert line.startswith(f"loss {records[-1]['loss']:.6f} after {NUM_UPDATES} updates, weights ")
    assert line.count("\n") == 1


KILLED = -signal.SIGKILL
FAULTS = (
    "pre_rename:1:kill",  # there is no checkpoint yet: the run starts anew, and so does its metrics.jsonl
    "after_commit:2:kill",
    "mid_write:5:kill",
    "after_snapshot:3:kill",
    "pre_manifest:4:kill",
    "after_rename:5:kill",
    "mid_prune:1:kill",
    "mid_metrics_append:35:kill",
    f"mid_metrics_append:{NUM_UPDATES}:kill",
    "after_commit:10:kill",  # the last save: nothing is left to train
)


@pytest.mark.parametrize(
    "starts",
    [
        *([(faults, KILLED), (None, 0)] for faults in FAULTS),
        [("after_commit:2:kill", KILLED), ("mid_load:1:kill", KILLED), (None, 0)],
        [("pre_manifest:3:raise:ENOSPC", 0)],
        [(None, 0), ("mid_metrics_append:1:kill", 0)],
    ],
    ids=[*FAULTS, "killed while it loads", "one save is refused", "finished, and trains nothing again"],
)
def test_a_run_with_a_fault_at_a_named_point_ends_as_if_nothing_had_happened(starts, whole, tmp_path):
    run = tmp_path / "run"
    for faults, code in starts:
        assert exit_code(run, faults) == code, "the point was not reached"
    assert outcome(run) == whole
    assert {finding.problem for finding in verify_all(run / "checkpoints")} == {None}
    assert [path.name for path in (run / "checkpoints").glob(".*")] == [], "nothing half written is left"


def test_a_run_killed_from_outside_again_and_again_ends_with_the_same_bits(whole, tmp_path):
    run = tmp_path / "run"
    for least_records in (5, 25, 47, 80):
        # Slow writing holds the loop up, so that it cannot end before it is killed.
        process = start(run, "pre_fsync:*:sleep:0.02")
        while num_records(run) < least_records:
            assert process.is_alive()
            time.sleep(0.001)
        process.kill()
        process.join()
        assert process.exitcode == KILLED
        find_newest(run / "checkpoints")  # raises if there are checkpoints and none is whole
    assert exit_code(run) == 0
    assert outcome(run) == whole


def test_a_damaged_checkpoint_is_passed_over(whole, tmp_path):
    run = tmp_path / "run"
    assert exit_code(run, "after_commit:4:kill") == KILLED
    newest, _ = find_newest(run / "checkpoints")
    (newest / "state.safetensors").write_bytes(b"")
    assert exit_code(run) == 0
    assert outcome(run) == whole


def test_two_runs_do_not_share_a_folder(tmp_path):
    run = tmp_path / "run"
    with Lease(run), pytest.raises(LeaseError, match=f"pid {os.getpid()}"):
        load_example().main(run)
    assert not (run / "metrics.jsonl").exists()


def test_the_loop_gives_the_same_bits_as_the_trainer(whole):
    example = load_example()
    torch.manual_seed(example.SEED)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[]).train(
        example.Waves(),
        example.NUM_EPOCHS,
        per_device_batch_size=16,
        gradient_accumulation_steps=2,
        create_scheduler_fn=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=NUM_UPDATES),
        train_dataloader_kwargs={"num_workers": 0},
        seed=example.SEED,
    )
    weights = b"".join(weight.numpy(force=True).tobytes() for weight in model.state_dict().values())
    assert whole[0].endswith(f"weights {hashlib.sha256(weights).hexdigest()}\n")


@pytest.mark.slow
def test_the_script_is_killed_and_started_again_as_a_person_would(whole, tmp_path):
    command = (SCRIPT, "--run", tmp_path / "run")
    assert toys.python(*command, cwd=tmp_path, LW_FAILPOINT="after_commit:2:kill").returncode == KILLED
    done = toys.python(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, (tmp_path / "run" / "metrics.jsonl").read_bytes()) == whole
