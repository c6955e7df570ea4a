"""RunRecord: the lease, the metrics and the status of a run, together."""

import errno
import json
import os
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from loopwright.failpoints import arm, disarm
from loopwright.run_folder import LeaseError, RunRecord, read_status
from loopwright.tracking import InMemoryRunHistory
from toys import contents, numbers, records


@contextmanager
def begun(folder, state=None, end="done"):
    record = RunRecord(folder)
    record.open()
    record.begin(state)
    yield record
    record.close(end)


@pytest.fixture
def record(tmp_path):
    with begun(tmp_path) as record:
        yield record


def without_times(folder):
    return numbers(folder, *{one["event"] for one in records(folder)})


def test_a_record_without_a_folder_does_nothing_and_still_tells_the_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = RunRecord()
    assert record.open() is None
    record.begin({"offset": 500, "recorded": {}, "seconds": 70.0})
    record.write("log", loss=1.0)
    record.write_metrics("epoch", InMemoryRunHistory())
    record.set_status(state="running")
    record.beat()
    assert record.keep("nan_batch.json", {}) is None
    assert record.is_ours()
    assert record.state_dict()["offset"] == 0
    record.close("done")
    assert 70.0 <= record.seconds == record.seconds < 80.0, "the clock stops with the run"
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_written_down_from_its_start_to_its_end(tmp_path, record):
    record.set_status(state="running", update=0)
    record.write("log", update=2, loss=0.5)
    record.close("stopped", "enough")
    assert without_times(tmp_path) == [
        {"event": "log", "update": 2, "loss": 0.5},
        {"event": "end", "state": "stopped", "message": "enough"},
    ]
    assert all(0 <= one["seconds"] < 10 and one["time"] > 1e9 for one in records(tmp_path))
    status = read_status(tmp_path)
    assert (status["state"], status["message"], status["last_error"]) == ("stopped", "enough", None)
    assert not (tmp_path / "lease.json").exists()
    record.close("failed", "again")
    assert read_status(tmp_path)["state"] == "stopped", "a second end is none"


def test_the_folder_is_free_again_after_a_close(tmp_path):
    with begun(tmp_path) as first:
        with pytest.raises(LeaseError, match=f"in use by this process, pid {os.getpid()}"):
            RunRecord(tmp_path).open()
        assert first.is_ours()
    with begun(tmp_path) as second:
        assert second.is_ours()


def test_a_run_that_is_refused_before_it_begins_leaves_the_record_of_another_as_it_is(tmp_path, record):
    record.close("done", None)
    before = contents(tmp_path)
    refused = RunRecord(tmp_path)
    refused.open()
    refused.close("failed", "ConfigError: something", ValueError("something"))
    assert contents(tmp_path) == before
    with begun(tmp_path) as again:
        assert again.is_ours()


def test_a_run_that_begins_starts_new_metrics_and_one_that_continues_cuts_them_back(tmp_path):
    with begun(tmp_path, end="failed") as first:
        first.write("log", update=1)
        first.write("log", update=2)
        state = first.state_dict()
        first.write("log", update=3)
    with begun(tmp_path, state) as second:
        second.write("log", update=3)
    assert [one.get("update") for one in records(tmp_path)] == [1, 2, 3, None]
    with begun(tmp_path):
        pass
    assert [one["event"] for one in records(tmp_path)] == ["end"]


def test_the_time_continues_where_it_was(tmp_path):
    with begun(tmp_path, {"offset": 0, "recorded": {}, "seconds": 1000.0}) as record:
        record.write("log")
        assert 1000.0 <= record.state_dict()["seconds"] < 1010.0
    assert [int(one["seconds"]) // 10 for one in records(tmp_path)] == [100, 100]


def test_only_what_is_new_in_a_history_is_written_and_a_resumed_record_knows_what_was(tmp_path):
    history = InMemoryRunHistory()
    with begun(tmp_path, end="failed") as record:
        history.update_metric("loss", 1.0)
        history.update_metric("accuracy", np.float32(0.5))
        record.write_metrics("epoch", history, update=1)
        record.write_metrics("epoch", history, update=2)
        history.update_metric("loss", 0.5)
        record.write_metrics("epoch", history, update=3)
        state = record.state_dict()
    with begun(tmp_path, state) as again:
        again.write_metrics("epoch", history, update=4)
        history.update_metric("loss", float("nan"))
        again.write_metrics("epoch", history, update=5)
    assert without_times(tmp_path)[:-1] == [
        {"event": "epoch", "update": 1, "accuracy": 0.5, "loss": 1.0},
        {"event": "epoch", "update": 3, "loss": 0.5},
        {"event": "epoch", "update": 5, "loss": None, "nonfinite": {"loss": "nan"}},
    ]


def test_a_metric_that_was_deleted_and_comes_back_is_new(tmp_path, record):
    history = InMemoryRunHistory()
    for value in (1, 2, 3):
        history.update_metric("loss", value)
    record.write_metrics("epoch", history)
    history.delete_metric("loss")
    record.write_metrics("epoch", history)
    history.update_metric("loss", 4)
    record.write_metrics("epoch", history)
    assert [one.get("loss") for one in records(tmp_path)] == [3, 4]


def test_a_metric_may_have_the_name_of_a_field_of_the_record(tmp_path, record):
    history, names = InMemoryRunHistory(), ("event", "update", "epoch", "time", "seconds", "nonfinite")
    for name in (*names, "self", "history"):
        history.update_metric(name, 9)
    record.write_metrics("epoch", history, update=1, epoch=2)
    found = records(tmp_path)[0]
    assert (found["event"], found["update"], found["epoch"]) == ("epoch", 1, 2)
    assert found["time"] > 1e9 and found["seconds"] < 9
    assert [found[f"metric_{name}"] for name in names] == [9] * 6
    assert found["self"] == found["history"] == 9


def test_metrics_of_any_type_become_what_json_can_hold(tmp_path, record):
    history = InMemoryRunHistory()
    values = {
        "array": (np.array([[1, 2]]), [[1, 2]]),
        "flag": (np.bool_(True), True),
        "mapping": ({"a": torch.tensor(2), 3: (1, 2)}, {"a": 2, "3": [1, 2]}),
        "object": (ValueError, str(ValueError)),
        "tensor": (torch.tensor([0.5, float("inf")]), [0.5, None]),
        "text": ("words", "words"),
    }
    for name, (value, _) in values.items():
        history.update_metric(name, value)
    record.write_metrics("epoch", history)
    found = records(tmp_path)[0]
    assert {name: found[name] for name in values} == {name: expected for name, (_, expected) in values.items()}
    assert found["flag"] is True and found["nonfinite"] == {"tensor.1": "inf"}


def test_a_file_of_its_own_is_kept_in_the_folder_whatever_kind_of_numbers_it_holds(tmp_path, record):
    path = record.keep("nan_batch.json", {"samples": [np.int64(3), 4], "update": 1})
    assert path == tmp_path / "nan_batch.json"
    assert json.loads(path.read_text()) == {"samples": [3, 4], "update": 1}
    record.write("skipped_update", samples=[np.int64(3)])
    assert records(tmp_path)[0]["samples"] == [3]


def test_a_record_that_the_disk_refuses_is_reported_and_written_with_the_next_one(tmp_path, record, caplog):
    arm("mid_metrics_append:1:raise:ENOSPC,mid_metrics_append:2:raise:ENOSPC")
    record.write("log", update=1)
    assert "No space left" in read_status(tmp_path)["last_error"]
    assert "cannot write metrics.jsonl" in caplog.text
    record.write("log", update=2)
    assert records(tmp_path) == []
    record.write("log", update=3)
    record.close("done")
    assert [one.get("update") for one in records(tmp_path)] == [1, 2, 3, None]


def test_a_record_is_not_saved_while_the_disk_refuses_what_was_written(tmp_path, record):
    arm("mid_metrics_append:*:raise:EIO")
    record.write("log", update=1)
    with pytest.raises(OSError, match="Input/output error"):
        record.state_dict()
    disarm()
    offset = record.state_dict()["offset"]
    assert offset == (tmp_path / "metrics.jsonl").stat().st_size > 0


def test_a_file_that_the_disk_refuses_does_not_stop_the_run(tmp_path, record, monkeypatch, caplog):
    def refuse(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        assert record.keep("nan_batch.json", {}) is None
    assert "cannot write nan_batch.json" in caplog.text
    record.close("done")
    assert not (tmp_path / "nan_batch.json").exists()


def test_a_record_whose_folder_was_taken_over_writes_nothing_more_at_its_end(tmp_path, record):
    record.set_status(state="running")
    lease = json.loads((tmp_path / "lease.json").read_text())
    (tmp_path / "lease.json").write_text(json.dumps({**lease, "incarnation": "another", "started_at": 1.0}))
    assert not record.is_ours()
    record.close("failed", "lost")
    assert records(tmp_path) == [] and read_status(tmp_path)["state"] == "running"
    assert json.loads((tmp_path / "lease.json").read_text())["incarnation"] == "another"
