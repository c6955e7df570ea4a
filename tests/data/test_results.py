"""Results that several processes compute: in their order, with their errors, and nothing is left behind."""

import os
import signal
import sys
import time

import pytest
import torch

from loopwright.data import results
from loopwright.data.results import results_of
from loopwright.errors import DataError, InputError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere one process computes them")


@pytest.fixture(autouse=True)
def two_workers(monkeypatch, no_worker_is_left_behind):
    monkeypatch.setattr(results, "_FEWEST", 50)
    monkeypatch.setattr(results, "default_num_workers", lambda dataset: 2)


def test_results_are_in_order_and_of_several_processes():
    before = torch.get_rng_state()
    found = list(results_of(lambda position: (position, os.getpid()), 501))
    assert [position for position, _ in found] == list(range(501))
    assert len({pid for _, pid in found}) == 2 and os.getpid() not in {pid for _, pid in found}
    assert torch.equal(torch.get_rng_state(), before)


def test_few_are_computed_here():
    assert set(results_of(lambda position: os.getpid(), 99)) == {os.getpid()}
    assert list(results_of(lambda position: position, 0)) == []


def test_a_caller_that_stops_leaves_no_process():
    found = results_of(lambda position: position, 10_000)
    assert next(found) == 0
    found.close()


def test_the_first_error_is_raised_at_its_turn_as_it_was():
    def failing(position):
        if position >= 300:
            raise InputError("data.chat", f"row {position}", saw=["this"], fix="that")
        return position

    seen = []
    with pytest.raises(InputError) as raised:
        for each in results_of(failing, 400):
            seen.append(each)
    assert seen == list(range(300))
    assert (raised.value.what, raised.value.saw, raised.value.fix) == ("row 300", ("this",), "that")


@pytest.mark.parametrize("is_always", [False, True])
def test_a_process_that_is_killed_is_replaced_or_an_error_and_no_hang(is_always, tmp_path):
    def killed(position):
        if position == 200 and (is_always or not (tmp_path / "killed").exists()):
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return position

    start = time.monotonic()
    if is_always:
        with pytest.raises(DataError):
            list(results_of(killed, 400))
    else:
        assert list(results_of(killed, 400)) == list(range(400))
    assert time.monotonic() - start < 20
