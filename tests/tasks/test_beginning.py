"""The begin and the end of a run: killed or asked to stop outside of its loop, it continues with the same bits."""

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from loopwright import api
from loopwright.cli import main
from loopwright.errors import CheckpointError, InputError
from loopwright.run_folder import LeaseError, find_run, note_in_index, record
from loopwright.runs import creation, ownership
from loopwright.runs import train as train_module
from loopwright.training.boundary import Boundary
from tasks.conftest import FLAGS
from tasks.forked import run_lines
from tasks.runs import WEIGHTS, assert_same_files

FILES = {"run.json", "config.yaml", "data.json"}
CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "open"}
WORDS = [word for name, value in FLAGS.items() if name != "quiet" for word in (f"--{name}", str(value))]


def fill(run):
    for path in (run.data, run.config, run.command):
        path.write_text("text")


def killed_at(nth, function):
    """Call a function in a fork that ends right before its nth change of the disk; return its exit code."""
    child = os.fork()
    if child == 0:
        hits = itertools.count(1)
        sys.addaudithook(lambda event, _: os._exit(9) if event in CHANGES and next(hits) == nth else None)
        function()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("place", ["new", "there", "runs"])
def test_killed_at_any_call_of_its_creation_a_run_is_whole_or_does_not_exist(tmp_path, monkeypatch, place):
    monkeypatch.setattr(creation, "_YOUNG_SECONDS", 0.0)
    for nth in itertools.count(1):
        home = tmp_path / str(nth)
        folder = None if place == "runs" else home / "run"
        monkeypatch.setenv("LOOPWRIGHT_RUNS", str(home))
        (home / "run" if place == "there" else home).mkdir(parents=True)
        if killed_at(nth, lambda where=folder: creation.create_run("x", {"task": "t"}, where, fill=fill)) == 0:
            break
        found = [file.parent for file in home.glob("[!.]*/run.json")]
        if found:
            assert {path.name for path in found[0].iterdir()} >= FILES
            assert find_run("last").path == found[0], "though it is not in the index yet"
            with pytest.raises(InputError, match="already contains a run"):
                creation.check_new_folder(found[0])
        else:
            made = creation.create_run("x", {"task": "t"}, folder, fill=fill)
            assert {path.name for path in made.path.iterdir()} == {*FILES, "command.txt"}
            assert [path.name for path in home.iterdir()] == [made.path.name]
    assert nth > 15


def test_half_a_run_of_an_older_version_is_not_resumed_and_is_replaced(reviews, tmp_path, caplog):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text('{"id": "0101-0000-x-0000", "task": "text-classification"}')
    (run / "data.json").write_text("{}")
    with pytest.raises(InputError, match="half a run"):
        api.resume(run)
    creation.check_new_folder(run)
    assert not list(run.iterdir()) and "creation was interrupted: removing it" in caplog.text
    (run / "config.yaml").write_text("of the user")
    with pytest.raises(InputError, match="is not empty"):
        creation.check_new_folder(run)
    assert (run / "config.yaml").read_text() == "of the user"


def test_a_folder_of_the_user_with_such_a_name_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(creation, "_YOUNG_SECONDS", 0.0)
    for place in (tmp_path, tmp_path / "run"):
        (place / ".new-photos").mkdir(parents=True)
        (place / ".new-photos" / "one.png").write_text("of the user")
    creation.remove_stale(tmp_path)
    assert (tmp_path / ".new-photos" / "one.png").exists() and not creation.is_half_made(tmp_path / "run")


def test_the_last_run_is_the_one_of_the_index_unless_a_newer_folder_is_not_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPWRIGHT_RUNS", str(tmp_path / "runs"))
    first, second = (creation.create_run(name, {}, fill=fill) for name in "ab")
    note_in_index(second, state="done")
    os.utime(first.path / "run.json", (1, 1))
    assert find_run("last").path.resolve() == second.path.resolve()
    note_in_index(first, state="done")
    third = creation.create_run("c", {}, fill=fill)
    assert find_run("last").path == third.path
    shutil.rmtree(third.path)
    assert find_run("last").path.resolve() == first.path.resolve()


def test_killed_again_and_again_in_the_rehearsal_a_run_is_resumed_with_the_same_bits(reviews, tmp_path, finished):
    line = ["train", "text-classification", "--data", reviews, *WORDS, "--quiet", "--out", "run"]
    for point in ("mid_eval:1", "pre_manifest:1", "run_end:1"):
        assert run_lines(line, folder=tmp_path, failpoint=f"{point}:kill")[0] == -signal.SIGKILL
        assert len(list(Path("run").glob(".trial-*"))) == 1
        line = ["resume", "run", "--quiet"]
    code, said = run_lines(line, folder=tmp_path)
    assert code == 0, said
    assert not list(Path("run").glob(".trial-*"))
    assert_same_files(tmp_path / "run", finished.path, WEIGHTS)


def test_what_a_killed_check_left_is_removed_by_the_next_one_but_not_what_a_live_one_uses(reviews, tmp_path):
    check = ["check", "text-classification", "--data", reviews, *WORDS, "--quiet"]
    assert run_lines(check, folder=tmp_path, failpoint="mid_eval:1:kill")[0] == -signal.SIGKILL
    (left,) = Path("runs").glob(".check-*")
    with ownership.Lease(Path("runs/.check-other")):
        api.check("text-classification", data=reviews, **FLAGS)
        assert [path.name for path in Path("runs").iterdir()] == [".check-other"] and not left.exists()


PHASES = {
    "start": (train_module, "_write_start", "before its first update"),
    "rehearsal": (train_module, "rehearse", "before its first update"),
    "rate": (train_module, "choose_rate", "before its first update"),
    "timing": (train_module, "plan_time", "before its first update"),
    "evaluation": (Boundary, "during_evaluation", "after its current update, evaluation or save"),
    "finish": (train_module, "finish", "stops its last evaluation"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_request_to_stop_is_heeded_in_every_phase_and_the_run_resumed(
    reviews, tmp_path, monkeypatch, capsys, finished, phase
):
    owner, name, when = PHASES[phase]
    original, ended = getattr(owner, name), []
    monkeypatch.setattr(ownership, "_HEED_SECONDS", 0.0)
    monkeypatch.setattr(record, "_STOP_SECONDS", 0.0)

    def stop_within(self, *arguments):
        if phase != "evaluation" or self.run.progress.update > 2:
            monkeypatch.setattr(owner, name, original)
            assert main(["stop", "run"]) == 0
        original(self, *arguments)
        ended.append(self)

    monkeypatch.setattr(owner, name, stop_within)
    words = {"rate": ["--lr", "auto", *WORDS[2:]], "timing": ["--time", "1m", *WORDS[:2], *WORDS[4:]]}.get(phase, WORDS)
    assert main(["train", "text-classification", "--data", str(reviews), *words, "--out", "run"]) == 75
    shown = capsys.readouterr().out
    assert "was asked to stop: it " in shown and when in shown
    assert phase in ("start", "evaluation") or not ended, "it stopped within the phase"
    assert not list(Path("run").glob(".trial-*")) and not Path("run/lease.json").exists()
    if phase == "rehearsal":  # whoever sends a run can put links into it: nothing is written through them
        victim = tmp_path / "victim"
        victim.write_text("of the user")
        Path("run/model/tokenizer_config.json").unlink()
        Path("run/model/tokenizer_config.json").symlink_to(victim)
    if phase not in ("rate", "timing"):
        assert main(["resume", "run"]) == 0
        assert_same_files(tmp_path / "run", finished.path, WEIGHTS)
        assert phase != "rehearsal" or victim.read_text() == "of the user"


def test_between_two_seeds_a_request_to_stop_is_for_the_next_run(reviews, monkeypatch, capsys):
    original = train_module._build

    def stop_before_the_second(run, *arguments):
        original(run, *arguments)
        if run.training.seed == 1 and run.folder is None:
            assert main(["stop", "last"]) == 0

    monkeypatch.setattr(train_module, "_build", stop_before_the_second)
    flags = {**FLAGS, "epochs": 1, "seed": 0, "rehearsal": False}
    runs = api.train("text-classification", data=reviews, seeds=3, **flags)
    assert [run.folder.status["state"] for run in runs] == ["done", "stopped"]
    assert "the run with the next seed stops before its first update" in capsys.readouterr().out
    assert not (runs[0].path / "stop").exists() and api.resume(runs[1].path).result


def test_a_folder_that_is_moved_in_the_last_evaluation_is_an_error(reviews, monkeypatch):
    original = train_module.finish

    def move(*arguments):
        Path("run").rename("moved")
        original(*arguments)

    monkeypatch.setattr(train_module, "finish", move)
    with pytest.raises((LeaseError, CheckpointError)):
        api.train("text-classification", data=reviews, output_dir="run", **FLAGS)
    monkeypatch.setattr(train_module, "finish", original)
    assert api.resume("moved").result
