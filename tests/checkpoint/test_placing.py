"""A checkpoint that takes the place of another of its name, and readers who come in between."""

import multiprocessing
import os
import signal
import threading

import pytest
import torch

from loopwright import failpoints
from loopwright.checkpoint import find_newest, read, verify, write
from loopwright.checkpoint.atomic_replace import restore_moved
from loopwright.errors import CheckpointError


def write_best(folder, number):
    write(folder / "best", {"weight": torch.full((200,), float(number))}, {"number": number}, number)


def wait_for(path):
    while not path.exists():
        pass


def test_a_reader_between_the_two_renames_finds_the_old_one_and_the_writer_still_commits(tmp_path):
    write_best(tmp_path, 1)
    failpoints.arm("mid_replace:1:sleep:0.5")
    writer = threading.Thread(target=write_best, args=(tmp_path, 2))
    writer.start()
    wait_for(tmp_path / ".old-best")
    assert find_newest(tmp_path) == (tmp_path / "best", [])
    assert read(tmp_path / "best").state["number"] == 1
    writer.join()
    assert read(tmp_path / "best").state["number"] == 2
    assert os.listdir(tmp_path) == ["best"]


def test_a_reader_whose_checkpoint_is_replaced_meanwhile_reads_the_new_one(tmp_path):
    write_best(tmp_path, 1)
    failpoints.arm("mid_load:1:sleep:0.5")
    found = []
    reader = threading.Thread(target=lambda: found.append(read(tmp_path / "best")))
    reader.start()
    write_best(tmp_path, 2)
    reader.join()
    assert [(one.state["number"], one.model["weight"][0].item()) for one in found] == [(2, 2.0)]


def test_a_damaged_checkpoint_that_nobody_replaces_is_refused_at_once(tmp_path):
    write_best(tmp_path, 1)
    (tmp_path / "best" / "state.json").write_text("{}")
    failpoints.arm("mid_load:1:raise")
    with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
        read(tmp_path / "best")


def test_a_disk_that_refuses_between_the_two_renames_leaves_the_old_one_in_place(tmp_path):
    write_best(tmp_path, 1)
    failpoints.arm("mid_replace:1:raise:EIO")
    with pytest.raises(CheckpointError, match="cannot write"):
        write_best(tmp_path, 2)
    assert os.listdir(tmp_path) == ["best"]
    assert read(tmp_path / "best").state["number"] == 1


def test_what_was_moved_aside_is_not_put_over_what_took_its_place(tmp_path):
    write_best(tmp_path, 1)
    os.rename(tmp_path / "best", tmp_path / ".old-best")
    write_best(tmp_path, 2)
    restore_moved(tmp_path / "best")
    assert read(tmp_path / "best").state["number"] == 2


def killed_while_replacing(folder):
    failpoints.arm("mid_replace:1:kill")
    write_best(folder, 2)


def test_a_kill_between_the_two_renames_leaves_the_old_one_to_be_found(tmp_path):
    write_best(tmp_path, 1)
    process = multiprocessing.get_context("fork").Process(target=killed_while_replacing, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "best").exists()
    assert find_newest(tmp_path) == (tmp_path / "best", [])
    assert read(tmp_path / "best").state["number"] == 1


def write_many(folder, count):
    for number in range(2, count):
        write_best(folder, number)


@pytest.mark.parametrize("look", [verify, read, find_newest], ids=["verify", "read", "find_newest"])
def test_readers_of_a_checkpoint_that_another_process_replaces_all_the_time_see_whole_ones(look, tmp_path):
    write_best(tmp_path, 1)
    writer = multiprocessing.get_context("fork").Process(target=write_many, args=(tmp_path, 30))
    writer.start()
    num_reads = 0
    while writer.is_alive():
        found = look(tmp_path if look is find_newest else tmp_path / "best")
        assert look is not find_newest or found == (tmp_path / "best", [])
        num_reads += 1
    assert writer.exitcode == 0 and num_reads > 10
    assert read(tmp_path / "best").state["number"] == 29
