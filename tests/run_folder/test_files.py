"""Files that are old or new, never half written."""

import errno
import gc
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import pytest

import toys
from loopwright.failpoints import arm
from loopwright.run_folder import files

POINTS = ["mid_write", "pre_fsync", "pre_rename", "after_rename"]
OLD, NEW = "old " * 1000, "new content " * 2000


def assert_holds(path, text):
    """The file has this content, and nothing lies beside it."""
    assert path.read_text() == text
    assert toys.names_in(path.parent) == {path.name}


def refuse(*args):
    raise OSError(errno.EIO, "Input/output error")


@pytest.fixture
def file(tmp_path):
    files.write_atomically(tmp_path / "file", OLD)
    return tmp_path / "file"


def write_in_child(path, spec):
    """Write the new content in another process that is armed with this fault, and return its exit status."""
    code = f"""
import sys
from loopwright.run_folder.files import write_atomically
write_atomically(sys.argv[1], {NEW!r}, faults=True)
"""
    return toys.python("-c", code, path, LW_FAILPOINT=spec).returncode


@pytest.mark.parametrize("data", [b"", b"\x00\xff" * 3, "", "text ü", b"x" * 3_000_000])
def test_a_file_holds_what_was_written_and_a_reader_of_the_old_one_keeps_it(file, data):
    with open(file) as reader:
        files.write_atomically(file, data)
        assert reader.read() == OLD
    expected = data.encode() if isinstance(data, str) else data
    assert toys.contents(file.parent) == {"file": expected}


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "file").symlink_to(tmp_path / "elsewhere")
    files.write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "elsewhere").read_text() == "precious"
    assert not (tmp_path / "file").is_symlink() and (tmp_path / "file").read_text() == "new"


def test_the_file_is_synced_before_it_is_renamed_and_the_folder_after(tmp_path, monkeypatch):
    calls, real_fsync, real_replace = [], os.fsync, os.replace

    def fsync(descriptor):
        calls.append("fsync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name[:9])
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda *args: calls.append("rename") or real_replace(*args))
    (tmp_path / "folder").mkdir()
    files.write_atomically(tmp_path / "folder" / "file", "data")
    assert calls == ["fsync .tmp-file", "rename", "fsync folder"]


def test_short_and_interrupted_writes_are_continued_to_the_end(tmp_path, monkeypatch):
    real_write, draw, num_calls = os.write, random.Random(0), 0

    def write(descriptor, data):
        nonlocal num_calls
        num_calls += 1
        if draw.random() < 0.2:
            raise InterruptedError(errno.EINTR, "interrupted")
        return real_write(descriptor, data[: draw.randint(1, 700)])

    monkeypatch.setattr(os, "write", write)
    files.write_atomically(tmp_path / "file", NEW)
    monkeypatch.undo()
    assert (tmp_path / "file").read_text() == NEW
    assert num_calls > 50


def test_write_all_takes_any_kind_of_bytes(tmp_path):
    descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    for data in (b"ab", bytearray(b"cd"), memoryview(b"efgh").cast("H"), b""):
        files.write_all(descriptor, data)
    os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == b"abcdefgh"


def test_a_system_that_takes_no_bytes_is_an_error_and_no_endless_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", lambda descriptor, data: 0)
    with pytest.raises(OSError, match="accepts no more bytes, 2 are left"):
        files.write_atomically(tmp_path / "file", "data")
    assert toys.names_in(tmp_path) == set()


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("action", ["raise:ENOSPC", "raise:EIO", "raise"])
def test_a_failure_leaves_the_old_content_until_the_rename_and_no_temporary_file(file, point, action):
    arm(f"{point}:1:{action}")
    with pytest.raises((OSError, RuntimeError), match=f"failpoint {point}"):
        files.write_atomically(file, NEW, faults=True)
    assert_holds(file, NEW if point == "after_rename" else OLD)


def test_faults_are_passed_only_when_asked_for(tmp_path):
    arm(",".join(f"{point}:*:raise" for point in POINTS))
    files.write_json(tmp_path / "file", 1)
    assert files.read_json(tmp_path / "file") == 1
    with pytest.raises(RuntimeError):
        files.write_json(tmp_path / "file", 2, faults=True)
    assert files.read_json(tmp_path / "file") == 1


def test_a_failed_fsync_is_not_tried_again_and_the_file_is_thrown_away(file, monkeypatch):
    fsync = Mock(side_effect=refuse)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error"):
        files.write_atomically(file, NEW)
    assert fsync.call_count == 1
    assert_holds(file, OLD)


def test_no_descriptor_is_left_open_by_failures(tmp_path):
    gc.collect()  # what earlier tests left open is closed now, not in between
    before = len(os.listdir("/proc/self/fd"))
    arm("mid_write:*:raise:ENOSPC")
    for _ in range(20):
        with pytest.raises(OSError):
            files.write_atomically(tmp_path / "file", NEW, faults=True)
    (tmp_path / "folder").mkdir()
    for _ in range(20):
        with pytest.raises(files.DamagedFileError):
            files.read_json(tmp_path / "folder")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_disk_is_an_error_that_leaves_the_old_content(file):
    code = """
import errno, resource, sys
from loopwright.run_folder.files import write_atomically
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_atomically(sys.argv[1], "x" * 100_000)
except OSError as error:
    sys.exit(3 if error.errno == errno.EFBIG else 4)
"""
    assert toys.python("-c", code, file).returncode == 3
    assert_holds(file, OLD)


def test_a_folder_that_cannot_be_synced_on_principle_is_tolerated_and_a_broken_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EINVAL, "no")))
    files.fsync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError):
        files.fsync_folder(tmp_path)


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("point", POINTS)
def test_a_process_killed_while_writing_leaves_what_was_there_or_the_new_content(file, point, is_there):
    if not is_there:
        file.unlink()
    assert write_in_child(file, f"{point}:1:kill") == -signal.SIGKILL
    is_new = point == "after_rename"
    assert len(files.remove_leftovers(file.parent)) == (0 if is_new else 1)
    if is_there or is_new:
        assert_holds(file, NEW if is_new else OLD)
    else:
        assert toys.names_in(file.parent) == set()


def test_kills_at_random_moments_never_leave_a_torn_file(tmp_path):
    code = """
import sys
from loopwright.run_folder.files import write_json
number = 0
while True:
    number += 1
    write_json(sys.argv[1], {"number": number, "padding": [number] * 5000})
    if number == 1:
        print(flush=True)
"""
    draw, seen = random.Random(0), []
    for _ in range(8):
        with subprocess.Popen([sys.executable, "-c", code, tmp_path / "file"], stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            time.sleep(draw.uniform(0, 0.08))
            child.kill()
        content = files.read_json(tmp_path / "file")
        assert content["padding"] == [content["number"]] * 5000
        seen.append(content["number"])
    files.remove_leftovers(tmp_path)
    assert toys.names_in(tmp_path) == {"file"}
    assert len(set(seen)) > 1


def test_leftovers_are_only_temporary_files_and_never_folders_or_links(tmp_path):
    for name in (".tmp-status.json-00ff", "file", ".tmp"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".tmp-0000000100-abc").mkdir()
    (tmp_path / ".tmp-link").symlink_to(tmp_path / "file")
    assert files.remove_leftovers(tmp_path) == [tmp_path / ".tmp-status.json-00ff"]
    assert toys.names_in(tmp_path) == {".tmp", ".tmp-0000000100-abc", ".tmp-link", "file"}


def test_json_comes_back_as_it_was_written_and_a_missing_file_reads_as_the_default(tmp_path):
    value = {"a": [1, 2.5, None, True, "ü\n"], "b": {}}
    assert files.read_json(tmp_path / "file") is None
    assert files.read_json(tmp_path / "file", default={}) == {}
    assert files.read_json(tmp_path / "no folder" / "file", default=3) == 3
    files.write_json(tmp_path / "file", value)
    assert files.read_json(tmp_path / "file") == value
    assert (tmp_path / "file").read_text().endswith("}\n")


@pytest.mark.parametrize("value", [float("nan"), {"x": float("inf")}, {1, 2}, b"bytes"])
def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path, value):
    files.write_json(tmp_path / "file", "old")
    with pytest.raises((TypeError, ValueError)):
        files.write_json(tmp_path / "file", value)
    assert_holds(tmp_path / "file", '"old"\n')


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"a": 1', b"\x00" * 100, b"\xff\xfe", b'{"a": NaN}', b"-Infinity", b"[" * 200_000, b'{"a": 1} x'],
)
def test_a_damaged_file_is_an_error_that_names_it_whatever_the_default(tmp_path, content):
    (tmp_path / "status.json").write_bytes(content)
    with pytest.raises(files.DamagedFileError, match=r"(?s)status\.json is damaged: .*move it away"):
        files.read_json(tmp_path / "status.json", default={})


def test_what_is_no_file_of_a_plausible_size_is_refused_without_being_read(tmp_path):
    (tmp_path / "real").write_text("[1]")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)
    for name, complaint in {
        "link": "is a link",
        "folder": "not a plain file",
        "pipe": "not a plain file",
        "huge": "1099511627776 bytes, expected at most",
    }.items():
        with pytest.raises(files.DamagedFileError, match=complaint):
            files.read_json(tmp_path / name)
    with pytest.raises(files.DamagedFileError, match="holds a list, expected an object"):
        files.read_json(tmp_path / "real", default={})


def test_a_small_file_is_read_in_little_memory(tmp_path):
    value = {"numbers": list(range(50_000))}
    files.write_json(tmp_path / "file", value)
    tracemalloc.start()
    try:
        found = files.read_json(tmp_path / "file")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == value
    assert peak < 8 * 1024 * 1024


def test_a_file_that_may_not_be_read_is_not_a_missing_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "open", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(PermissionError):
        files.read_json(tmp_path / "file", default={})


def test_the_run_folder_and_the_failpoints_need_no_torch():
    modules = "import sys, loopwright.failpoints, loopwright.run_folder"
    done = toys.python("-c", f"{modules}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))")
    assert done.stdout == "[]\n", done.stderr


def test_a_private_file_gets_the_mode_of_a_new_file_and_others_keep_theirs(tmp_path):
    new = tmp_path / "new"
    new.write_text("")
    private, shared, note = (tmp_path / name for name in ("a.safetensors", "b.safetensors", "note.txt"))
    for path, mode in ((private, 0o600), (shared, 0o640), (note, 0o600)):
        path.write_text("")
        path.chmod(mode)
    files.give_usual_mode(tmp_path)
    assert private.stat().st_mode == new.stat().st_mode
    assert [path.stat().st_mode & 0o777 for path in (shared, note)] == [0o640, 0o600]
    files.give_usual_mode(note)
    assert note.stat().st_mode == new.stat().st_mode
    assert toys.names_in(tmp_path) == {"a.safetensors", "b.safetensors", "new", "note.txt"}
