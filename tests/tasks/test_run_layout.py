"""Where runs are, what they are called, and which one a person means."""

import json
import re
from datetime import datetime

import pytest

from loopwright.errors import InputError
from loopwright.run_folder import RunFolder, find_run, note_in_index, read_index, runs_root
from loopwright.runs.creation import create_run


def fill(run):
    run.config.touch()
    run.data.touch()


def make(label="reviews", folder=None):
    run = create_run(label, {"task": "text-classification"}, folder, fill=fill)
    note_in_index(run, task="text-classification", state="running")
    return run


def test_an_id_has_the_time_a_word_of_the_data_and_4_hex_digits():
    run = create_run("My Reviews (2).v3", {"task": "x"}, now=datetime(2025, 11, 15, 9, 12))
    assert re.fullmatch(r"1115-0912-my-reviews-2-v3-[0-9a-f]{4}", run.id)
    assert run.path == runs_root() / run.id and run.metadata["task"] == "x"
    assert create_run("§", {}).id.split("-")[2] == "run"


def test_a_run_is_found_by_folder_id_start_of_id_and_as_the_last(tmp_path):
    first, second = make("alpha"), make("beta", tmp_path / "elsewhere")
    assert find_run(first.path) == first
    assert find_run(first.id).path == first.path
    assert find_run(first.id[:12]).id == first.id or first.id[:9] == second.id[:9]
    assert find_run("last").id == second.id
    assert find_run(second.id).metadata == second.metadata
    assert (runs_root() / "last").resolve() == (tmp_path / "elsewhere").resolve()


def test_what_is_not_found_is_told_with_the_nearest():
    run = make("gamma")
    with pytest.raises(InputError) as caught:
        find_run(run.id[:-1] + "zz")
    assert caught.value.code == "run.unknown" and run.id in str(caught.value)
    make("gamma")
    with pytest.raises(InputError, match="the start of several run ids"):
        find_run(run.id[:9])


def test_the_last_run_that_is_still_there_is_taken(tmp_path):
    first, second = make("alpha"), make("beta")
    second.path.rename(tmp_path / "gone")
    assert find_run("last").id == first.id
    assert find_run(tmp_path / "gone").id == second.id  # by its run.json, whatever its folder is called


def test_the_index_merges_what_is_said_of_a_run_and_passes_over_torn_lines():
    run, other = make("alpha"), make("beta")
    note_in_index(run, state="done", value=0.5)
    with (runs_root() / "index.jsonl").open("a") as file:
        file.write('{"id": "torn')
    entries = read_index()
    assert [entry["id"] for entry in entries] == [other.id, run.id]
    assert entries[1]["state"] == "done" and entries[1]["task"] == "text-classification"


def test_another_root_is_taken_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPWRIGHT_RUNS", str(tmp_path / "root"))
    assert make().path.parent == tmp_path / "root"


def test_a_folder_in_use_is_refused(tmp_path):
    run = make("alpha", tmp_path / "mine")
    with pytest.raises(InputError) as caught:
        make("alpha", run.path)
    assert caught.value.code == "run.exists"


def test_a_run_says_how_it_is_doing_and_is_asked_to_stop_by_a_file():
    run = make()
    assert run.status == {"state": "new"} and run.read_result() == {}
    run.write_result({"metrics": {"accuracy": 0.5}})
    assert RunFolder(run.path).read_result()["metrics"] == {"accuracy": 0.5}
    run.ask_to_stop()
    assert (run.path / "stop").is_file()
    run.append_log("a line")
    assert run.log.read_text() == "a line\n"
    assert json.loads((run.path / "run.json").read_text())["id"] == run.id
