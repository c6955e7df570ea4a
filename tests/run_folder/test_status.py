"""status.json: told at once when it matters, seldom otherwise, and never a reason to stop training."""

import errno
import logging
import os
import platform
import shutil
import signal
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

import toys
from loopwright.errors import CheckpointError, ConfigError
from loopwright.failpoints import arm
from loopwright.run_folder import status as status_module
from loopwright.run_folder.files import DamagedFileError
from loopwright.run_folder.status import STATES, RunStatus, read

NEVER = 1e9


@pytest.fixture
def writes(monkeypatch) -> list[dict]:
    contents, real_write_json = [], status_module.write_json

    def write_json(path, value):
        contents.append(value)
        real_write_json(path, value)

    monkeypatch.setattr(status_module, "write_json", write_json)
    return contents


def test_a_status_holds_every_field_from_the_first_update_on(tmp_path):
    before = datetime.now(timezone.utc)
    status = RunStatus(tmp_path)
    assert read(tmp_path) is None
    assert status.update(update=12, epoch=1)
    content = read(tmp_path)
    assert abs((datetime.fromisoformat(content.pop("updated_at")) - before).total_seconds()) < 30
    told = {
        "state": "running",
        "update": 12,
        "epoch": 1,
        "epochs": None,
        "message": None,
        "last_checkpoint": None,
        "last_error": None,
    }
    assert content == {**told, "pid": os.getpid(), "host": platform.node()}


def test_fields_that_are_not_given_stay_and_errors_and_odd_values_become_text(tmp_path):
    status = RunStatus(tmp_path)
    status.update(update=1, message="warming up", last_checkpoint=Path("checkpoints/step-1"))
    status.update(update=2, force=True)
    status.update(message=None, force=True)
    content = read(tmp_path)
    assert (content["update"], content["message"], content["last_checkpoint"]) == (2, None, "checkpoints/step-1")
    status.update(last_error=CheckpointError("disk full"), message=float("nan"))
    content = read(tmp_path)
    assert (content["last_error"], content["message"]) == ("CheckpointError: disk full", "nan")


def test_frequent_updates_are_written_at_most_once_per_interval_and_forced_ones_at_once(tmp_path, writes):
    status = RunStatus(tmp_path, every_seconds=NEVER)
    start = time.perf_counter()
    told = [status.update(update=update, epoch=1) for update in range(2000)]
    assert (time.perf_counter() - start) / 2000 < 50e-6
    assert told == [True] + [False] * 1999 and status.problem is None
    assert len(writes) == 1 and read(tmp_path)["update"] == 0
    assert status.update(update=2, force=True)
    assert status.update(force=True)
    assert len(writes) == 3 and read(tmp_path)["update"] == 2


def test_what_was_held_back_is_written_once_the_interval_is_over(tmp_path, writes):
    status = RunStatus(tmp_path, every_seconds=0.05)
    status.update(update=1)
    status.update(update=2, message="held back")
    time.sleep(0.06)
    assert status.update(epoch=4)
    content = read(tmp_path)
    assert (content["update"], content["message"], content["epoch"]) == (2, "held back", 4)
    assert len(writes) == 2


def test_a_new_state_or_error_is_written_at_once_and_only_once(tmp_path, writes):
    status = RunStatus(tmp_path, every_seconds=NEVER)
    status.update(update=1)
    assert not status.update(update=2)
    assert status.update(last_error="cannot save")
    assert not status.update(last_error="cannot save", update=3)
    assert status.update(state="failed")
    assert not status.update(state="failed", update=4)
    assert [content["state"] for content in writes] == ["running", "running", "failed"]
    assert read(tmp_path)["update"] == 3


@pytest.mark.parametrize("state", STATES)
def test_every_state_can_be_told(tmp_path, state):
    assert RunStatus(tmp_path).update(state=state)
    assert read(tmp_path)["state"] == state


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"state": "finished"}, "one of running, done, stopped, failed, preempted; got 'finished'"),
        ({"state": None}, "got None"),
        ({"step": 3}, "no field 'step'; it has state, update, epoch"),
        ({"pid": 3}, "no field 'pid'"),
    ],
)
def test_an_unknown_state_or_field_is_refused_and_changes_nothing(tmp_path, fields, complaint):
    status = RunStatus(tmp_path)
    with pytest.raises(ConfigError, match=complaint):
        status.update(update=9, **fields)
    status.update(force=True)
    assert read(tmp_path)["update"] is None


def test_threads_may_update_at_the_same_time(tmp_path):
    status = RunStatus(tmp_path, every_seconds=0.0)
    toys.at_once(*[lambda: [status.update(update=i, force=True) for i in range(20)]] * 3)
    assert read(tmp_path)["update"] == 19
    assert sorted(path.name for path in tmp_path.iterdir()) == ["status.json"]


def test_a_full_disk_is_kept_as_the_problem_and_not_raised(tmp_path, caplog):
    status = RunStatus(tmp_path, every_seconds=0.0)
    status.update(update=1)
    arm("pre_status:1:raise:ENOSPC,pre_status:2:raise:ENOSPC")
    with caplog.at_level(logging.WARNING, logger="loopwright"):
        assert not status.update(update=2)
        assert not status.update(update=3, state="failed")
    assert isinstance(status.problem, OSError) and status.problem.errno == errno.ENOSPC
    assert len(caplog.records) == 1 and "No space left on device" in caplog.text and "training continues" in caplog.text
    assert read(tmp_path)["update"] == 1

    assert status.update(update=4)
    assert status.problem is None
    assert (read(tmp_path)["update"], read(tmp_path)["state"]) == (4, "failed")


def test_a_disk_that_refuses_is_not_asked_at_every_update(tmp_path, writes):
    status = RunStatus(tmp_path / "missing", every_seconds=NEVER)
    for update in range(100):
        assert not status.update(update=update)
    assert len(writes) == 1
    assert isinstance(status.problem, FileNotFoundError)


def test_a_folder_that_comes_back_is_written_again(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    status = RunStatus(folder, every_seconds=0.0)
    status.update(update=1)
    shutil.rmtree(folder)
    assert not status.update(update=2)
    folder.mkdir()
    assert status.update(update=3) and read(folder)["update"] == 3


def test_a_process_killed_while_writing_leaves_the_status_before(tmp_path):
    code = """
import sys
from loopwright.run_folder.status import RunStatus
status = RunStatus(sys.argv[1], every_seconds=0.0)
for update in range(10):
    status.update(update=update)
"""
    assert toys.python("-c", code, tmp_path, LW_FAILPOINT="pre_status:4:kill").returncode == -signal.SIGKILL
    assert (read(tmp_path)["update"], read(tmp_path)["state"]) == (2, "running")


def test_a_damaged_status_is_an_error_for_readers_and_replaced_by_the_run(tmp_path):
    (tmp_path / "status.json").write_text('{"state": "runn')
    with pytest.raises(DamagedFileError, match=r"status\.json is damaged"):
        read(tmp_path)
    assert RunStatus(tmp_path).update(update=1)
    assert read(tmp_path)["update"] == 1
