"""metrics.jsonl: each record once, in order, whatever tears the file."""

import collections
import errno
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toys
from loopwright.failpoints import arm
from loopwright.run_folder import files, metrics_log
from loopwright.run_folder import read_metrics as read
from loopwright.run_folder.files import DamagedFileError
from loopwright.run_folder.metrics_log import MetricsLog

keys = st.text(max_size=8).filter(lambda key: key != "nonfinite")
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
records = st.dictionaries(keys, values | st.lists(values, max_size=3) | st.dictionaries(keys, values, max_size=2))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def log(path):
    with MetricsLog(path) as log:
        yield log


def append_updates(log, *updates):
    for update in updates:
        log.append({"update": update, "loss": 1 / (update + 1)})


def written_to(path, *updates, cut_back=None):
    """Open a log, cut it back, append and close it; return its length."""
    with MetricsLog(path) as log:
        if cut_back is not None:
            log.cut_back(cut_back)
        append_updates(log, *updates)
        return log.sync()


def updates_in(path):
    return [record["update"] for record in read(path)]


@settings(max_examples=60)
@given(st.lists(records, max_size=8), st.data())
def test_records_come_back_as_they_were_appended_and_a_file_cut_anywhere_is_repaired_to_its_whole_lines(written, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        with MetricsLog(path) as log:
            for record in written:
                log.append(record)
        content = path.read_bytes()
        assert list(read(path)) == written
        assert content.count(b"\n") == len(written)

        cut = data.draw(st.integers(0, len(content)))
        path.write_bytes(content[:cut])
        num_whole = content[:cut].count(b"\n")
        assert list(read(path)) == written[:num_whole]
        with MetricsLog(path) as log:
            assert path.read_bytes() == b"".join(content.splitlines(keepends=True)[:num_whole])
            log.append({"after": True})
        assert list(read(path)) == [*written[:num_whole], {"after": True}]


def test_a_record_can_be_read_as_soon_as_it_is_appended_and_none_after_the_close(path, log):
    for update in range(5):
        append_updates(log, update)
        assert updates_in(path) == list(range(update + 1))
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        append_updates(log, 5)
    assert updates_in(path) == list(range(5))


def test_any_mapping_is_a_record_tuples_are_lists_and_numbers_that_are_not_finite_null_and_named(path, log):
    log.append({"update": 7, "loss": math.nan, "norm": math.inf, "lr": 0.1})
    log.append({"eval": {"loss": -math.inf, "ok": 1.0}, "all": [1.0, np.float64("nan")]})
    log.append(collections.ChainMap({"a": (1, 2)}))
    log.append({"loss": np.float64(0.5)})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines == [
        {"update": 7, "loss": None, "norm": None, "lr": 0.1, "nonfinite": {"loss": "nan", "norm": "inf"}},
        {"eval": {"loss": None, "ok": 1.0}, "all": [1.0, None], "nonfinite": {"eval.loss": "-inf", "all.1": "nan"}},
        {"a": [1, 2]},
        {"loss": 0.5},
    ]
    assert list(read(path)) == lines


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"a": {"b": [1, {3}]}}, "a set under 'a.b.1'"),
        ({"loss": np.float32(1)}, "a float32 under 'loss'"),
        ({"loss": b"1"}, "a bytes under 'loss'"),
        ([1, 2], "is a mapping, got list"),
        ("loss", "is a mapping, got str"),
    ],
)
def test_what_is_not_a_record_is_refused_by_its_key_and_not_written(path, log, record, complaint):
    append_updates(log, 1)
    with pytest.raises(TypeError, match=complaint):
        log.append(record)
    append_updates(log, 2)
    assert updates_in(path) == [1, 2]


def test_short_writes_are_continued_even_if_threads_append_at_the_same_time(path, log, monkeypatch):
    real_write = os.write

    def write(descriptor, data):
        time.sleep(0)  # lets another thread go first
        return real_write(descriptor, data[:3])

    monkeypatch.setattr(os, "write", write)
    toys.at_once(*(partial(append_updates, log, *range(i, 100, 4)) for i in range(4)))
    assert sorted(updates_in(path)) == list(range(100))


def test_appending_is_cheap(log):
    record = {"update": 12345, "epoch": 3, "loss": 0.123456789, "lr": 0.001, "grad_norm": 1.23456, "speed": 1234.5}
    seconds = []
    for _ in range(2000):
        start = time.perf_counter()
        log.append(record)
        seconds.append(time.perf_counter() - start)
    # 5 us on this kind of machine; a busy one may take a little longer.
    assert sorted(seconds)[len(seconds) // 2] < 20e-6


@pytest.mark.parametrize("line", [b"[1]", b"7", b'{"upd\0te":3}', b"\xff", b"[" * 100_000, b"x" * 3_000, b'{"cut": "o'])
def test_a_damaged_line_is_skipped_and_reported_once_by_its_number(path, line, caplog, monkeypatch):
    monkeypatch.setattr(files, "_MOST_LINE_BYTES", 1_000)
    path.write_bytes(b'{"update":1}\n\n' + line + b'\n{"update":2}\n{"update":3}')
    for _ in range(2):
        assert [record["update"] for record in read(path)] == [1, 2]
    assert caplog.messages == [f"{path}: 1 damaged line is skipped, the first is line 3"]
    assert list(read(path, for_bad={})) == [{"update": 1}, {}, {"update": 2}]


def test_a_missing_file_has_no_records_and_none_is_written_in_a_missing_folder_or_through_a_link(path, tmp_path):
    assert list(read(path)) == []
    with pytest.raises(FileNotFoundError):
        MetricsLog(tmp_path / "no folder" / "metrics.jsonl")
    (tmp_path / "elsewhere").write_text("precious")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedFileError, match="is a link"):
        MetricsLog(path)
    assert (tmp_path / "elsewhere").read_text() == "precious"


@pytest.mark.parametrize("num_torn_bytes", [1, 65_535, 65_536, 65_537, 200_000])
@pytest.mark.parametrize("whole", [b"", b'{"update":1}\n'])
def test_a_torn_line_of_any_length_is_dropped(path, whole, num_torn_bytes):
    path.write_bytes(whole + b"x" * num_torn_bytes)
    MetricsLog(path).close()
    assert path.read_bytes() == whole


def test_a_process_killed_in_the_middle_of_an_append_loses_only_that_record(path):
    code = """
import sys
from loopwright.run_folder.metrics_log import MetricsLog
log = MetricsLog(sys.argv[1])
for update in range(10):
    log.append({"update": update})
"""
    for expected in ([0, 1, 2], [0, 1, 2, 0, 1, 2]):
        assert toys.python("-c", code, path, LW_FAILPOINT="mid_metrics_append:4:kill").returncode == -signal.SIGKILL
        assert not path.read_bytes().endswith(b"\n")
        assert updates_in(path) == expected


def test_kills_at_random_moments_lose_and_double_nothing_that_was_appended(path):
    code = """
import os, sys
from loopwright.run_folder import read_metrics as read
from loopwright.run_folder.metrics_log import MetricsLog
log = MetricsLog(sys.argv[1])
update = sum(1 for _ in read(sys.argv[1]))
while True:
    log.append({"update": update, "padding": "x" * 300})
    os.write(1, b"%d\\n" % update)
    update += 1
"""
    draw, last = random.Random(0), -1
    for _ in range(6):
        child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
        child.stdout.readline()
        timer = threading.Timer(draw.uniform(0.005, 0.05), child.kill)
        timer.start()
        told = child.stdout.read().split()
        child.wait()
        timer.join()
        child.stdout.close()
        updates = updates_in(path)
        assert updates == list(range(len(updates)))
        assert updates[-1] > last and (not told or updates[-1] >= int(told[-1]))
        last = updates[-1]


@pytest.mark.parametrize("action", ["raise:ENOSPC", "raise:EIO", "raise"])
def test_a_failed_append_leaves_nothing_and_may_be_repeated(path, log, action):
    append_updates(log, 1)
    arm(f"mid_metrics_append:1:{action}")
    with pytest.raises((OSError, RuntimeError)):
        append_updates(log, 2)
    assert updates_in(path) == [1] and path.read_bytes().endswith(b"\n")
    append_updates(log, 2, 3)
    assert updates_in(path) == [1, 2, 3]


def refuse(*args):
    raise OSError(errno.EIO, "Input/output error")


def test_a_torn_line_that_could_not_be_removed_is_removed_before_the_next_one(path, log, monkeypatch):
    append_updates(log, 1)
    arm("mid_metrics_append:1:raise:ENOSPC")
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refuse)
        with pytest.raises(OSError, match="No space left"):
            append_updates(log, 2)
        assert not path.read_bytes().endswith(b"\n")
        with pytest.raises(OSError, match="Input/output error"):
            append_updates(log, 2)
    append_updates(log, 2)
    assert updates_in(path) == [1, 2]


def test_an_fsync_that_failed_is_never_tried_again_and_never_reported_as_success(path, log, monkeypatch):
    append_updates(log, 1)
    with monkeypatch.context() as patch:
        fsync = Mock(side_effect=refuse)
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="Input/output error"):
            log.sync()
    for _ in range(3):
        with pytest.raises(OSError, match="an earlier fsync failed: Input/output error") as caught:
            log.sync()
        assert caught.value.errno == errno.EIO
    append_updates(log, 2)
    log.close()
    assert fsync.call_count == 1
    assert written_to(path) == path.stat().st_size
    assert updates_in(path) == [1, 2]


def test_sync_returns_the_length_and_reaches_the_disk(path, monkeypatch):
    synced, real_fsync = [], os.fsync

    def fsync(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with MetricsLog(path) as log:
        assert log.sync() == 0
        append_updates(log, 1, 2)
        assert log.sync() == path.stat().st_size > 0
    # A new name must be synced in its folder too.
    assert synced == [path.parent, path, path]


def test_cutting_back_forgets_what_came_after_the_checkpoint(path):
    offset = written_to(path, 1, 2)
    written_to(path, 3, 4)
    assert written_to(path, cut_back=offset) == offset
    written_to(path, 3)
    assert updates_in(path) == [1, 2, 3]
    written_to(path, cut_back=path.stat().st_size)
    assert updates_in(path) == [1, 2, 3]
    written_to(path, 1, cut_back=0)
    assert updates_in(path) == [1]


def test_an_offset_beyond_the_end_or_inside_a_line_is_refused_and_the_file_left_alone(path, log):
    append_updates(log, 1, 2)
    content = path.read_bytes()
    with pytest.raises(DamagedFileError, match=f"ends at byte {len(content)}, but the checkpoint recorded 500 bytes"):
        log.cut_back(500)
    for offset in range(1, len(content)):
        if content[offset - 1 : offset] != b"\n":
            with pytest.raises(DamagedFileError, match=f"no line ends at byte {offset}"):
                log.cut_back(offset)
    with pytest.raises(ValueError, match="0 or more"):
        log.cut_back(-1)
    assert path.read_bytes() == content


@pytest.mark.parametrize("offset", [3, 500, 10**12])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_missing_or_empty_file_starts_over_and_reports_it(path, offset, is_there):
    if is_there:
        path.touch()
    with MetricsLog(path) as log:
        log.cut_back(offset)
        assert log.sync() == offset
        append_updates(log, 7)
    first, second = read(path)
    assert first == {"event": "earlier_records_missing", "offset": offset}
    assert second["update"] == 7


def test_a_log_that_started_again_can_be_cut_back_to_older_and_newer_checkpoints(path):
    def resumed(offset):
        written_to(path, cut_back=offset)
        return [record.get("update") for record in read(path)]

    newer = written_to(path, 7, 8, cut_back=5000)
    written_to(path, 9, 10)
    assert newer > 5000
    assert resumed(newer) == [None, 7, 8]
    written_to(path, 9)
    # Killed again, and now from the checkpoint that the lost file belonged to, and from one before it.
    assert resumed(5000) == [None]
    written_to(path, 7)
    assert resumed(3000) == [None]
    with pytest.raises(DamagedFileError, match="ends at byte 5000, but the checkpoint recorded 6000"):
        resumed(6000)
    assert resumed(0) == []


OPERATIONS = st.lists(
    st.sampled_from(["append", "append", "append", "checkpoint", "kill", "lose the file"]), min_size=1, max_size=25
)


@settings(max_examples=60)
@given(OPERATIONS, st.data())
def test_every_update_appears_once_whatever_happens_between_checkpoints(operations, data):
    """A run that is killed with a torn line, now and then loses its log, and resumes from any of its checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        log = MetricsLog(path)
        update, kept, checkpoints = 0, [], []
        for operation in operations:
            if operation == "append":
                append_updates(log, update)
                kept.append(update)
                update += 1
            elif operation == "checkpoint":
                checkpoints.append((update, log.sync()))
            else:
                log.close()
                update, offset = data.draw(st.sampled_from([(0, 0), *checkpoints]))
                checkpoints = [known for known in checkpoints if known[0] <= update]
                if operation == "lose the file":
                    path.unlink()
                    kept = []
                else:
                    path.write_bytes(path.read_bytes() + b'{"update":12'[: data.draw(st.integers(0, 12))])
                    kept = [known for known in kept if known < update]
                log = MetricsLog(path)
                log.cut_back(offset)
        log.close()
        assert [record["update"] for record in read(path) if "event" not in record] == kept


def test_opening_a_long_log_reads_its_last_block_and_not_all_of_it(path, monkeypatch):
    written_to(path, *range(5000))
    num_read, real_pread = [], os.pread

    def pread(*args):
        data = real_pread(*args)
        num_read.append(len(data))
        return data

    monkeypatch.setattr(metrics_log.os, "pread", pread)
    MetricsLog(path).close()
    assert 0 < sum(num_read) <= 66_000 < path.stat().st_size
