"""Ownership of a run folder, tried with real processes."""

import errno
import fcntl
import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

import toys
from loopwright.errors import ConfigError, LoopwrightError
from loopwright.run_folder import lease as lease_module
from loopwright.run_folder.files import DamagedFileError
from loopwright.run_folder.lease import Lease, LeaseError

HOLD = """
import os, sys, time
from loopwright.run_folder.lease import Lease
lease = Lease(sys.argv[1])
lease.acquire()
children = []
for _ in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    children.append(child)
print(*children, flush=True)
sys.stdin.read()
lease.release()
"""

TRY = """
import sys
from loopwright.run_folder.lease import Lease, LeaseError
try:
    Lease(sys.argv[1]).acquire()
    print("taken")
except LeaseError as error:
    print("refused:", error)
"""


@contextmanager
def owner_process(folder, num_children=0):
    """Start a process that owns the folder until its input is closed; yield it and the pids of its children."""
    with started(HOLD, folder, num_children) as owner:
        children = [int(pid) for pid in owner.stdout.readline().split()]
        try:
            yield owner, children
        finally:
            for pid in [*children, *([] if owner.poll() is not None else [owner.pid])]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def run_script(code, folder):
    done = toys.python("-c", code, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


try_in_another_process = partial(run_script, TRY)


def started(code, *arguments):
    """Start a process that is spoken to through its input and output."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def assert_free(folder):
    with Lease(folder) as lease:
        assert lease.still_ours()


def assert_refused(folder, match):
    with pytest.raises(LeaseError, match=match) as caught:
        Lease(folder).acquire()
    return caught.value


GONE = {"pid": 2**22 + 1, "process_start": 12345}


def refuse(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


def content(folder):
    return json.loads((folder / "lease.json").read_text())


def rewrite(folder, **changes):
    text = json.dumps({**content(folder), **changes})
    (folder / "lease.json").write_text(text)
    return text


def leave_lease(folder, **changes):
    """Write the lease of an owner that is gone, or is said to be elsewhere."""
    with Lease(folder):
        left = content(folder)
    (folder / "lease.json").write_text(json.dumps({**left, "incarnation": "left", **changes}))


def is_alive(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_a_lease_says_who_holds_it_and_is_gone_afterwards(tmp_path):
    folder, incarnations = tmp_path / "runs" / "new", set()
    lease = Lease(folder)
    for _ in range(3):
        assert not lease.still_ours()
        assert lease.acquire() is None
        said = content(folder)
        assert (said["pid"], said["host"]) == (os.getpid(), platform.node())
        assert said["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert abs(said["heartbeat"] - time.time()) < 30 and said["started_at"] == said["heartbeat"]
        assert len(said["incarnation"]) == 32
        incarnations.add(said["incarnation"])
        assert lease.still_ours()
        lease.release()
        lease.release()
        assert not lease.still_ours()
        assert toys.names_in(folder) == {".lock"}
    assert len(incarnations) == 3


def test_the_same_process_cannot_take_a_folder_twice_and_does_not_lose_it_by_trying(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    first = Lease(tmp_path / "run")
    first.acquire()
    for second in (first, Lease(tmp_path / "run"), Lease(tmp_path / "link"), Lease(f"{tmp_path}/link/../run")):
        with pytest.raises(LeaseError, match=f"in use by this process, pid {os.getpid()} on host {platform.node()}"):
            second.acquire()
    assert first.still_ours()
    # Opening and closing .lock for the second attempt would have given up the lock.
    assert "refused" in try_in_another_process(tmp_path / "run")
    first.release()
    with Lease(tmp_path / "link") as again:
        assert again.still_ours()


def test_of_many_threads_exactly_one_gets_the_folder(tmp_path):
    barrier, taken, refused = threading.Barrier(8), [], []

    def attempt():
        lease = Lease(tmp_path)
        barrier.wait()
        try:
            lease.acquire()
            taken.append(lease)
        except LeaseError as error:
            refused.append(error)

    toys.at_once(*[attempt] * 8)
    assert (len(taken), len(refused)) == (1, 7)
    taken[0].release()


def test_two_folders_do_not_disturb_each_other_and_others_are_refused_with_the_pid(tmp_path):
    with Lease(tmp_path / "a") as first, Lease(tmp_path / "b") as second:
        assert first.still_ours() and second.still_ours()
        answer = try_in_another_process(tmp_path / "a")
    assert answer.startswith("refused") and f"pid {os.getpid()} on host {platform.node()}" in answer


def test_a_lease_is_released_when_its_block_fails(tmp_path):
    with pytest.raises(KeyError), Lease(tmp_path):
        raise KeyError
    assert try_in_another_process(tmp_path) == "taken"
    assert issubclass(LeaseError, LoopwrightError)


def test_a_second_process_is_refused_with_pid_and_host_until_the_first_is_done(tmp_path):
    with owner_process(tmp_path) as (owner, _):
        start = time.monotonic()
        error = assert_refused(tmp_path, rf"in use by pid {owner.pid} on host {platform.node()} \(last")
        assert time.monotonic() - start < 0.9
        assert error.owner.pid == owner.pid == content(tmp_path)["pid"]
        owner.stdin.close()
        assert owner.wait(timeout=60) == 0
        assert_free(tmp_path)


def test_a_killed_owner_is_followed_at_once_even_while_its_forked_children_live(tmp_path):
    with owner_process(tmp_path, num_children=2) as (owner, children):
        incarnation = content(tmp_path)["incarnation"]
        os.kill(owner.pid, signal.SIGKILL)
        # Not waited for: it may still be a zombie, which has a pid and a start time.
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        start = time.monotonic()
        lease = Lease(tmp_path)
        previous = lease.acquire()
        assert time.monotonic() - start < 1.0
        assert len(children) == 2 and all(is_alive(pid) for pid in children)
        assert (previous.pid, previous.incarnation) == (owner.pid, incarnation)
        assert lease.still_ours() and content(tmp_path)["pid"] == os.getpid()
        lease.release()


def test_of_many_processes_exactly_one_gets_the_folder(tmp_path):
    code = """
import sys, time
from loopwright.run_folder.lease import Lease, LeaseError
lease = Lease(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
try:
    lease.acquire()
    print("taken", flush=True)
except LeaseError as error:
    print(error, flush=True)
sys.stdin.read()
"""
    for trial in range(2):
        folder = tmp_path / str(trial)
        processes = [started(code, folder) for _ in range(5)]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in processes]
        for process in processes:
            with process:
                process.kill()
        winner = processes[answers.index("taken\n")].pid
        assert answers.count("taken\n") == 1
        assert sum(f"pid {winner} on host" in answer for answer in answers) == 4


def test_an_owner_that_has_not_yet_written_its_name_is_waited_for_and_named(tmp_path):
    code = """
import sys, time
from loopwright.run_folder import lease
real_write_json = lease.write_json
def write_json(path, value):
    print("locked", flush=True)
    time.sleep(0.3)
    real_write_json(path, value)
lease.write_json = write_json
lease.Lease(sys.argv[1]).acquire()
sys.stdin.read()
"""
    leave_lease(tmp_path, **GONE)
    owner = started(code, tmp_path)
    assert owner.stdout.readline() == "locked\n"
    assert_refused(tmp_path, f"in use by pid {owner.pid} on host")
    owner.communicate()


def test_a_child_that_exits_closes_and_releases_takes_nothing_from_its_parent(tmp_path):
    code = f"""
import os, subprocess, sys
from loopwright.run_folder.lease import Lease, LeaseError
lease = Lease(sys.argv[1])
lease.acquire()
for _ in range(3):
    child = os.fork()
    if child == 0:
        told = [lease.still_ours()]
        lease.heartbeat()
        lease.release()
        os.close(lease._descriptor)
        try:
            Lease(sys.argv[1]).acquire()
        except LeaseError as error:
            told.append(f"pid {{os.getppid()}} on host" in str(error))
        os._exit(0 if told == [False, True] else 1)
    assert os.waitpid(child, 0)[1] == 0
assert lease.still_ours()
print(subprocess.run([sys.executable, "-c", {TRY!r}, sys.argv[1]], capture_output=True, text=True).stdout)
"""
    assert "refused: " in run_script(code, tmp_path)


def test_a_started_program_does_not_inherit_the_lock_file(tmp_path):
    with Lease(tmp_path):
        listing = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, close_fds=False).stdout
    assert "fd" in listing and ".lock" not in listing


@pytest.mark.parametrize(
    "left",
    [
        GONE,
        {"pid": os.getppid(), "process_start": 1},
        {"boot_id": "another", "pid": os.getppid()},
        {"host": "container-7", "pid": 1},
    ],
    ids=["gone", "pid given out again", "before a reboot", "another container"],
)
def test_the_lease_of_an_owner_that_is_gone_is_taken_over(tmp_path, left):
    leave_lease(tmp_path, **left)
    with Lease(tmp_path) as lease:
        assert lease.still_ours() and content(tmp_path)["incarnation"] != "left"


def test_a_live_owner_that_lost_its_lock_is_still_the_owner(tmp_path):
    with owner_process(tmp_path) as (owner, _):
        (tmp_path / ".lock").unlink()
        rewrite(tmp_path, heartbeat=time.time() - 1000)
        assert_refused(tmp_path, rf"pid {owner.pid} on host .* \(last heartbeat 1000 s ago\).*delete")


def test_another_host_is_refused_while_its_heartbeat_is_young_and_followed_when_it_is_old(tmp_path):
    elsewhere = {"host": "elsewhere", "boot_id": "another", "pid": 77}
    leave_lease(tmp_path, **elsewhere, heartbeat=time.time() + 3600)
    assert_refused(tmp_path, "-3600 s ago")
    rewrite(tmp_path, heartbeat=time.time() - 30)
    assert_refused(tmp_path, r"pid 77 on host elsewhere \(last heartbeat 30 s ago\).*delete .*lease\.json")
    assert content(tmp_path)["incarnation"] == "left"
    with Lease(tmp_path, stale_seconds=20):
        assert content(tmp_path)["host"] == platform.node()
    leave_lease(tmp_path, **elsewhere, heartbeat=time.time() - 61)
    lease = Lease(tmp_path)
    assert lease.acquire().host == "elsewhere"
    lease.release()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x"}', "7", '"text"'])
def test_a_damaged_lease_is_refused_by_name_and_nothing_is_kept(tmp_path, text):
    (tmp_path / "lease.json").write_text(text)
    for _ in range(2):
        assert_refused(tmp_path, r"lease\.json does not name the owner of the folder: .*delete the file")
    assert (tmp_path / "lease.json").read_text() == text
    os.utime(tmp_path / "lease.json", (0, time.time() - 61))  # a live owner would have renewed it
    assert_free(tmp_path)


def test_damage_to_any_byte_of_a_lease_takes_no_folder_away(tmp_path):
    with Lease(tmp_path, stale_seconds=1000.0) as lease:
        whole = (tmp_path / "lease.json").read_bytes()
        for place in reversed(range(len(whole))):
            damaged = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
            (tmp_path / "lease.json").write_bytes(damaged)
            assert lease.still_ours(), place
        lease._next_heartbeat = 0.0
        lease.heartbeat()
        assert content(tmp_path)["incarnation"] == json.loads(whole)["incarnation"]
    (tmp_path / "lease.json").write_bytes(damaged)  # of this machine, where the lock decides
    assert_free(tmp_path)


def test_a_heartbeat_is_cheap_and_written_only_when_it_is_time(tmp_path):
    with Lease(tmp_path) as lease:
        start = time.perf_counter()
        for _ in range(10_000):
            lease.heartbeat()
        assert (time.perf_counter() - start) / 10_000 < 10e-6
    with Lease(tmp_path, stale_seconds=0.3) as lease:
        first = content(tmp_path)
        for _ in range(100):
            lease.heartbeat()
        assert content(tmp_path) == first
        time.sleep(0.06)
        lease.heartbeat()
        second = content(tmp_path)
        assert second["heartbeat"] > first["heartbeat"]
        assert {**second, "heartbeat": first["heartbeat"]} == first
        assert lease.still_ours()


def wait_for_heartbeat(folder: Path, since: float) -> float:
    deadline = time.monotonic() + 30
    while (found := content(folder)["heartbeat"]) <= since:
        assert time.monotonic() < deadline, "no heartbeat for 30 seconds"
        time.sleep(0.01)
    return found


def test_an_owner_that_is_busy_with_one_long_thing_stays_alive_for_other_hosts(tmp_path):
    with Lease(tmp_path, stale_seconds=0.3) as lease:
        first = content(tmp_path)
        last = wait_for_heartbeat(tmp_path, wait_for_heartbeat(tmp_path, first["heartbeat"]))
        assert content(tmp_path) == {**first, "heartbeat": last}
        assert lease.still_ours()
    assert not (tmp_path / "lease.json").exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "loopwright lease"]


def test_an_owner_that_lost_its_lease_while_it_was_busy_learns_of_it_at_its_next_update(tmp_path):
    with Lease(tmp_path, stale_seconds=0.3) as lease:
        left = rewrite(tmp_path, incarnation="new", started_at=1.0)
        lease._thread.join(30)  # it ends when it sees that
        assert not lease._thread.is_alive()
        for _ in range(2):
            with pytest.raises(LeaseError, match="no longer belongs to this process"):
                lease.heartbeat()
    assert (tmp_path / "lease.json").read_text() == left


def test_a_forked_child_writes_no_heartbeats(tmp_path):
    code = """
import os, sys, threading, time
from pathlib import Path
from loopwright.run_folder.lease import Lease
lease = Lease(sys.argv[1], stale_seconds=0.0)
lease.acquire()
path = Path(sys.argv[1]) / "lease.json"
read, write = os.pipe()
child = os.fork()
if child == 0:
    os.read(read, 1)
    time.sleep(0.3)
    os._exit(1 if path.exists() or threading.active_count() > 1 else 0)
lease.release()
os.write(write, b"x")
print(os.waitpid(child, 0)[1])
"""
    assert run_script(code, tmp_path) == "0"


@pytest.mark.parametrize("is_deleted", [False, True])
def test_an_owner_whose_lease_was_taken_over_knows_it_and_removes_nothing(tmp_path, is_deleted):
    lease = Lease(tmp_path, stale_seconds=0.0)
    lease.acquire()
    rewrite(tmp_path, incarnation="new", started_at=1.0)
    if is_deleted:
        (tmp_path / "lease.json").unlink()
    left = toys.contents(tmp_path)
    assert not lease.still_ours()
    with pytest.raises(LeaseError, match="no longer belongs to this process"):
        lease.heartbeat()
    lease.release()
    assert toys.contents(tmp_path) == left


def test_a_disk_that_refuses_a_heartbeat_is_a_problem_and_no_error(tmp_path, monkeypatch, caplog):
    with Lease(tmp_path, stale_seconds=0.0) as lease:
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="loopwright"):
            patch.setattr(lease_module, "write_json", refuse)
            lease.heartbeat()
            lease.heartbeat()
        assert lease.problem.errno == errno.ENOSPC and len(caplog.records) == 1
        assert lease.still_ours()
        lease.heartbeat()
        assert lease.problem is None


def test_a_folder_that_cannot_be_written_is_an_error_and_nothing_is_kept(tmp_path, monkeypatch):
    num_open = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(lease_module, "write_json", refuse)
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                Lease(tmp_path).acquire()
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert try_in_another_process(tmp_path) == "taken"


def test_a_planted_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedFileError, match="is a link"):
        Lease(tmp_path / "run").acquire()
    assert (tmp_path / "elsewhere").read_text() == "precious"


@pytest.fixture
def no_locks(monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)


def test_without_locks_an_owner_that_is_gone_is_followed_and_another_container_judged_by_its_heartbeat(
    tmp_path, no_locks
):
    leave_lease(tmp_path, **GONE)
    assert_free(tmp_path)
    leave_lease(tmp_path, host="container-7", pid=GONE["pid"])
    assert_refused(tmp_path, "container-7")
    rewrite(tmp_path, heartbeat=time.time() - 100)
    assert_free(tmp_path)


def test_without_locks_a_live_process_is_still_refused_whatever_its_heartbeat(tmp_path, no_locks, caplog):
    with owner_process(tmp_path) as (owner, _):
        rewrite(tmp_path, heartbeat=time.time() - 1000)
        with caplog.at_level(logging.WARNING, logger="loopwright"):
            assert_refused(tmp_path, f"pid {owner.pid}")
    assert "has no file locks" in caplog.text


@pytest.mark.parametrize(
    "away", [shutil.rmtree, lambda folder: folder.rename(folder.with_name("moved"))], ids=["deleted", "moved"]
)
def test_a_folder_that_was_deleted_or_moved_is_lost_and_not_created_again(away, tmp_path):
    folder = tmp_path / "run"
    lease = Lease(folder)
    lease.acquire()
    away(folder)
    for _ in range(2):
        with pytest.raises(LeaseError, match="while a run wrote to it") as caught:
            lease.still_ours()
    moved = tmp_path / "moved"
    assert (f"moved to {moved}" in str(caught.value)) == moved.exists() and not folder.exists()
    lease.release()
    assert not folder.exists()
    if moved.exists():
        assert_free(moved)


def test_a_folder_that_was_deleted_and_taken_by_another_process_is_lost(tmp_path):
    folder = tmp_path / "run"
    with Lease(folder) as lease:
        shutil.rmtree(folder)
        assert "refused" not in try_in_another_process(folder)
        with pytest.raises(LeaseError, match="deleted, replaced"):
            lease.still_ours()


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_file_where_the_folder_should_be_is_refused_with_its_name(name, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{name} cannot be a run folder: .* is a file"):
        Lease(tmp_path / name).acquire()


def test_a_system_that_does_not_tell_about_processes_goes_by_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "_boot_id", lambda: "")
    monkeypatch.setattr(lease_module, "_process_start", lambda pid: 0)
    leave_lease(tmp_path, pid=os.getppid())
    with Lease(tmp_path) as lease:
        assert lease.still_ours()
        assert "refused" in try_in_another_process(tmp_path)
