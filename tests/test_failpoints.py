"""Fault points: free when not armed, exact about which hit, and clear about what they do not understand."""

import errno
import re
import signal
import time
import timeit
from pathlib import Path

import pytest

import toys
from loopwright import failpoints
from loopwright.errors import ConfigError
from loopwright.failpoints import FAILPOINTS, arm, disarm, failpoint, is_armed


def run_armed(spec, code):
    """Run code in a fresh interpreter that is armed by its environment."""
    return toys.python("-c", f"from loopwright.failpoints import failpoint\n{code}", LW_FAILPOINT=spec)


def hits_that_raise(name: str, num_hits: int, error: type[Exception]) -> list[int]:
    raised = []
    for number in range(1, num_hits + 1):
        try:
            failpoint(name)
        except error:
            raised.append(number)
    return raised


def test_every_point_has_a_name_and_a_meaning_can_be_passed_and_can_be_armed():
    assert len(FAILPOINTS) == 21
    assert [failpoint(name) for name in FAILPOINTS] == [None] * 21
    assert not any(is_armed(name) for name in FAILPOINTS)
    for name, meaning in FAILPOINTS.items():
        assert re.fullmatch(r"[a-z_]+", name)
        assert 10 < len(meaning) < 100 and "\n" not in meaning
        arm(f"{name}:1:raise")
        with pytest.raises(RuntimeError, match=f"failpoint {name}"):
            failpoint(name)
    assert is_armed("run_end") and not is_armed("mid_write")


def test_an_unknown_name_is_refused_with_the_nearest_one_armed_or_not():
    with pytest.raises(ConfigError, match="no failpoint 'pre_renam'; the nearest is 'pre_rename'"):
        failpoint("pre_renam")
    with pytest.raises(ConfigError, match="'afterbackward'; the nearest is 'after_backward'"):
        is_armed("afterbackward")
    arm("pre_rename:1:raise")
    with pytest.raises(ConfigError, match="the nearest is 'mid_eval'"):
        failpoint("mid-eval")


def test_all_names_used_in_the_package_are_known():
    used = [
        name
        for path in Path(failpoints.__file__).parent.rglob("*.py")
        for name in re.findall(r'\b(?:failpoint|is_armed|_pass)\("(\w+)"', path.read_text(encoding="utf-8"))
        if path.name != "failpoints.py"
    ]
    assert len(used) >= 6
    assert set(used) - set(FAILPOINTS) == set()


def test_the_nth_hit_or_every_hit_does_something_and_points_count_for_themselves():
    arm("mid_write:3:raise")
    assert hits_that_raise("mid_write", 6, RuntimeError) == [3]
    arm("mid_write:*:raise:EIO")
    assert hits_that_raise("mid_write", 3, OSError) == [1, 2, 3]
    arm("mid_write:2:raise, mid_write:4:raise:ENOSPC, pre_fsync:1:raise")
    assert hits_that_raise("pre_fsync", 2, RuntimeError) == [1]
    assert hits_that_raise("pre_rename", 5, Exception) == []
    assert hits_that_raise("mid_write", 3, RuntimeError) == [2]
    assert hits_that_raise("mid_write", 2, OSError) == [1]


def test_arming_again_replaces_what_was_armed_and_counts_again():
    arm("mid_write:2:raise,pre_fsync:1:raise")
    failpoint("mid_write")
    arm("mid_write:2:raise")
    assert hits_that_raise("mid_write", 3, RuntimeError) == [2]
    assert hits_that_raise("pre_fsync", 1, RuntimeError) == []
    disarm()
    assert hits_that_raise("mid_write", 5, RuntimeError) == []


def test_hits_of_several_threads_are_each_counted_once():
    arm("mid_write:777:raise")
    raised = []
    toys.at_once(*[lambda: raised.extend(hits_that_raise("mid_write", 250, RuntimeError))] * 4)
    assert len(raised) == 1


def test_raise_with_an_errno_raises_what_the_system_would():
    arm("pre_fsync:1:raise:ENOSPC,pre_fsync:2:raise:EACCES")
    with pytest.raises(OSError, match=r"No space left on device \(failpoint pre_fsync\)") as caught:
        failpoint("pre_fsync")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(PermissionError):
        failpoint("pre_fsync")


def test_sleep_waits_and_continues():
    arm("writer_start:1:sleep:0.05")
    start = time.monotonic()
    failpoint("writer_start")
    assert time.monotonic() - start >= 0.05


def test_the_environment_kills_or_exits_at_a_hit_arms_nothing_or_is_refused_at_import():
    done = run_armed("pre_rename:3:kill", 'for i in range(9): print(i, flush=True); failpoint("pre_rename")')
    assert (done.returncode, done.stdout.split()) == (-signal.SIGKILL, ["0", "1", "2"])
    done = run_armed("run_end:1:exit:75", 'import atexit; atexit.register(print, "cleaned"); failpoint("run_end")')
    assert (done.returncode, done.stdout) == (75, "")
    done = run_armed("", 'failpoint("run_end"); print("passed")')
    assert (done.returncode, done.stdout) == (0, "passed\n")
    done = run_armed("pre_renam:1:kill", "")
    assert done.returncode == 1 and "the nearest is 'pre_rename'" in done.stderr


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("", "'' is not of the form name:n:action"),
        ("mid_write", "'mid_write' is not of the form name:n:action"),
        ("mid_write:1", "not of the form"),
        ("mid_write:1:", "not of the form"),
        ("mid_write:1:kill,", "'' is not of the form"),
        ("mid_wrote:1:kill", "no failpoint 'mid_wrote'; the nearest is 'mid_write'"),
        ("mid_write:0:kill", "the hit in 'mid_write:0:kill' is '0'; it must be 1, 2"),
        ("mid_write:-1:kill", "the hit in"),
        ("mid_write:x:kill", "the hit in"),
        ("mid_write:1:explode", "is 'explode'; it must be kill, raise, raise:ERRNO, sleep:seconds or exit:code"),
        ("mid_write:1:kill:9", "is 'kill:9'; it must be"),
        ("mid_write:1:raise:ENOSPACE", "'ENOSPACE' is not an errno name"),
        ("mid_write:1:raise:errorcode", "'errorcode' is not an errno name"),
        ("mid_write:1:sleep:long", "could not convert string to float"),
        ("mid_write:1:sleep:-1", "cannot sleep -1.0 seconds"),
        ("mid_write:1:sleep:inf", "cannot sleep inf seconds"),
        ("mid_write:1:exit:300", "between 0 and 255, got 300"),
        ("mid_write:1:exit:", "invalid literal"),
    ],
)
def test_a_spec_that_cannot_be_understood_is_refused_and_leaves_things_as_they_were(spec, complaint):
    arm("pre_fsync:1:raise")
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        arm(spec)
    with pytest.raises(RuntimeError):
        failpoint("pre_fsync")


def test_a_point_that_is_not_armed_costs_less_than_a_microsecond():
    # 43 ns on an idle machine; the limit is for a busy one.
    seconds = min(timeit.repeat(lambda: failpoint("after_backward"), number=100_000, repeat=5)) / 100_000
    assert seconds < 1e-6
