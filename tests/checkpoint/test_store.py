"""Checkpoints on disk: whole or refused, never half; and nothing in them can run code."""

import hashlib
import json
import math
import os
import shutil
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import toys
from loopwright.checkpoint import Checkpointing, find_newest, prune, read, store, verify, write
from loopwright.errors import CheckpointError, ConfigError
from toys import assert_same, contents, names_in

FILES = ["model.safetensors", "state.safetensors", "state.json", "MANIFEST.json"]


def weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"layer.weight": torch.full((2, 3), value), "layer.bias": torch.tensor([value, -value])}


def state(value: float = 1.0) -> dict:
    return {"answer": value, "nested": {1: (torch.tensor([value]), None)}, "flag": True}


def checkpoint(folder: Path, update: int = 1, value: float = 1.0) -> Path:
    return write(folder, weights(value), state(value), update)


def assert_holds(folder: Path, value: float, update: int = 1) -> None:
    found = read(folder)
    assert found.update == update
    assert_same(found.model, weights(value))
    assert_same(found.state, state(value))


# Writing and reading


def test_what_is_written_is_read_and_each_file_is_listed_and_hashed(tmp_path):
    folder = tmp_path / "not" / "yet" / "there"
    assert checkpoint(folder, update=7, value=2.5) == folder
    assert_holds(folder, 2.5, update=7)
    assert names_in(folder) == set(FILES)
    assert names_in(folder.parent) == {"there"}, "nothing is left beside it"
    manifest = verify(folder)
    assert manifest["format"] == 1 and manifest["identity"]["update"] == "7"
    assert sorted(manifest["files"]) == sorted(FILES[:3])
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    # The weights open with safetensors alone, under their own names.
    loaded = load_file(folder / "model.safetensors")
    assert set(loaded) == set(weights())
    assert torch.equal(loaded["layer.weight"], weights(2.5)["layer.weight"])
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt" and file.metadata()["update"] == "7"


def test_the_folders_on_the_way_to_a_checkpoint_are_synced_before_it_is_committed(tmp_path, monkeypatch):
    synced: list[str] = []
    sync = os.fsync

    def noting(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    write(tmp_path / "run" / "checkpoints" / "step-1", weights(), {}, 1)
    names = [name.removeprefix(str(tmp_path)) for name in synced]
    assert names[:2] == ["", "/run"]
    assert names[-1] == "/run/checkpoints"
    aside = names[-2]
    assert aside.startswith("/run/checkpoints/.tmp-step-1-")
    assert set(names[2:-2]) == {f"{aside}/{name}" for name in FILES}


def test_a_folder_may_be_given_as_text(tmp_path):
    checkpoint(str(tmp_path / "a"))
    assert_holds(str(tmp_path / "a"), 1.0)
    assert verify(str(tmp_path / "a"))["identity"]["update"] == "1"
    assert find_newest(str(tmp_path))[0] == tmp_path / "a"


def test_tied_weights_are_stored_once_and_come_back_under_each_name(tmp_path):
    tied = torch.randn(2, 2)
    model = {"a": tied, "b": tied, "c": tied.clone(), "d": tied, "empty": torch.zeros(0), "empty2": torch.zeros(0)}
    write(tmp_path / "a", model, {}, 1)
    assert set(load_file(tmp_path / "a" / "model.safetensors")) == {"a", "c", "empty", "empty2"}
    found = read(tmp_path / "a")
    assert found.model["a"] is found.model["b"] is found.model["d"]
    assert found.model["a"] is not found.model["c"]
    assert_same({name: found.model[name] for name in model}, model)
    assert found.state == {} and len(found.model) == len(model)


def test_views_and_overlapping_tensors_are_stored_each_with_its_own_values(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    model = {"whole": base, "row": base[1], "transposed": base.t(), "flat": base.view(12), "part": base[:, 1:3]}
    write(tmp_path / "a", model, {"again": [base, base, base.view(4, 3)]}, 1)
    found = read(tmp_path / "a")
    assert_same({name: found.model[name] for name in model}, model)
    assert torch.equal(found.state["again"][1], base) and torch.equal(found.state["again"][2], base.view(4, 3))


def test_a_model_without_weights_and_a_state_without_tensors_can_be_saved(tmp_path):
    write(tmp_path / "a", {}, {"x": 1}, 0)
    found = read(tmp_path / "a")
    assert (found.model, found.state, found.update) == ({}, {"x": 1}, 0)


def test_every_type_of_weight_comes_back(tmp_path):
    types = [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
    model = {str(dtype): torch.tensor([1, 0, 1]).to(dtype) for dtype in types} | {"scalar": torch.tensor(2.0)}
    write(tmp_path / "a", model, {}, 1)
    found = read(tmp_path / "a").model
    assert found.keys() == model.keys()
    assert_same({name: found[name] for name in model}, model)


def test_what_cannot_be_saved_is_refused_by_name_and_nothing_is_left(tmp_path):
    with pytest.raises(CheckpointError, match=r"state\.callback\.0 is a builtins\.object"):
        write(tmp_path / "a", weights(), {"callback": [object()]}, 1)
    for bad in (torch.eye(2).to_sparse(), torch.zeros(1, dtype=torch.complex128), torch.zeros(1, device="meta")):
        with pytest.raises(CheckpointError, match="layer.bad is a .* cannot be saved"):
            write(tmp_path / "a", {"layer.bad": bad}, {}, 1)
        with pytest.raises(CheckpointError, match=r"state\.x\.0 is a .* cannot be saved"):
            write(tmp_path / "a", {}, {"x": [bad]}, 1)
    assert names_in(tmp_path) == set()


# Damage


def is_refused(folder: Path) -> str | None:
    """The reason why a checkpoint is not read, or None if it is."""
    try:
        read(folder)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_anywhere_is_detected(name, tmp_path):
    folder = checkpoint(tmp_path / "a")
    whole = (folder / name).read_bytes()
    assert 80 < len(whole) < 2000
    for position in range(len(whole)):
        for flip in (0x01, 0x80) if name == "MANIFEST.json" else (0x01,):
            damaged = bytearray(whole)
            damaged[position] ^= flip
            (folder / name).write_bytes(damaged)
            reason = is_refused(folder)
            assert reason is not None, f"byte {position} of {name}"
            assert str(folder) in reason
    (folder / name).write_bytes(whole)
    assert is_refused(folder) is None


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_emptied_grown_or_missing_is_detected(name, tmp_path):
    folder = checkpoint(tmp_path / "a")
    whole = (folder / name).read_bytes()
    for damaged in (b"", whole[:1], whole[: len(whole) // 2], whole[:-1], whole + b"\0", whole * 2, b"[]", b"3", None):
        (folder / name).unlink() if damaged is None else (folder / name).write_bytes(damaged)
        reason = is_refused(folder)
        assert reason is not None and name in reason, damaged and damaged[:20]


@pytest.mark.parametrize("name", ["optimizer.pt", ".hidden", "model.safetensors.bak"])
def test_a_file_that_is_not_listed_is_detected(name, tmp_path):
    folder = checkpoint(tmp_path / "a")
    (folder / name).write_bytes(b"")
    assert is_refused(folder) == f"{folder}: missing files none, unlisted files ['{name}']"
    (folder / name).unlink()
    (folder / name).mkdir()
    assert "unlisted files" in is_refused(folder)


def test_files_of_two_checkpoints_do_not_mix(tmp_path):
    first, second = checkpoint(tmp_path / "a", value=1.0), checkpoint(tmp_path / "b", value=2.0)
    for name in FILES:
        shutil.copytree(first, tmp_path / "mixed")
        shutil.copy(second / name, tmp_path / "mixed" / name)
        assert is_refused(tmp_path / "mixed") is not None, name
        shutil.rmtree(tmp_path / "mixed")


def test_a_newer_format_is_refused_with_both_versions_and_a_damaged_file_by_name(tmp_path):
    folder = checkpoint(tmp_path / "a")
    body = {**verify(folder), "format": 3}
    whole = (folder / "MANIFEST.json").read_text()
    (folder / "MANIFEST.json").write_text(json.dumps(store.sealed(body)))
    assert is_refused(folder) == f"{folder} has format 3, this version reads formats 1 and 2"
    (folder / "MANIFEST.json").write_text(whole)
    (folder / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"state\.json is damaged: 2 bytes with sha256 "):
        verify(folder)


def test_a_folder_without_a_manifest_is_not_a_checkpoint(tmp_path):
    assert is_refused(tmp_path) == f"{tmp_path} is not a checkpoint: it has no MANIFEST.json"
    assert is_refused(tmp_path / "nowhere") is not None
    (tmp_path / "file").write_text("x")
    assert is_refused(tmp_path / "file") is not None


# A write that fails


def fail_at_call(monkeypatch, target, name, number, error=OSError):
    """Let the n-th call of a function raise, as a full disk would, or end the process where the error is None."""
    calls, function = [], getattr(target, name)

    def wrapper(*args, **kwargs):
        calls.append(name)
        if len(calls) == number:
            if error is None:
                os._exit(9)
            raise error("no space left on device")
        return function(*args, **kwargs)

    monkeypatch.setattr(target, name, wrapper)


FAILURES = [
    (store, "write_tensors", 1),  # the weights
    (store, "write_tensors", 2),  # the other tensors
    (os, "fsync", 1),
    (os, "fsync", 3),
    (os, "fsync", 5),  # the folder
    (os, "rename", 1),
]


@pytest.mark.parametrize(("target", "name", "number"), FAILURES)
def test_a_write_that_fails_leaves_nothing_and_reports_it(target, name, number, tmp_path, monkeypatch):
    fail_at_call(monkeypatch, target, name, number)
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*no space left on device"):
        checkpoint(tmp_path / "a")
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize(("target", "name", "number"), [*FAILURES, (os, "rename", 2)])
def test_a_write_that_fails_leaves_an_older_one_of_the_same_name_as_it_was(target, name, number, tmp_path, monkeypatch):
    checkpoint(tmp_path / "a", value=1.0)
    before = contents(tmp_path / "a")
    with monkeypatch.context() as patched:
        fail_at_call(patched, target, name, number)
        with pytest.raises(CheckpointError, match="no space left on device"):
            checkpoint(tmp_path / "a", update=2, value=2.0)
    assert names_in(tmp_path) == {"a"}
    assert contents(tmp_path / "a") == before
    assert_holds(tmp_path / "a", 1.0)

    checkpoint(tmp_path / "a", update=2, value=2.0)
    assert_holds(tmp_path / "a", 2.0, update=2)
    assert names_in(tmp_path) == {"a"}


def test_an_interrupt_inside_a_write_is_raised_as_it_is_and_leaves_nothing(tmp_path, monkeypatch):
    checkpoint(tmp_path / "a")
    fail_at_call(monkeypatch, store, "write_tensors", 1, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint(tmp_path / "a", value=2.0)
    assert names_in(tmp_path) == {"a"}
    assert_holds(tmp_path / "a", 1.0)


KILLS = [(store, "write_tensors", 2), (store, "sealed", 1), (os, "rename", 1), (os, "rename", 2)]


@pytest.mark.parametrize(("target", "name", "number"), KILLS)
def test_a_process_killed_inside_a_write_leaves_a_whole_checkpoint_to_find(target, name, number, tmp_path, monkeypatch):
    checkpoint(tmp_path / "a", update=1, value=1.0)
    process = os.fork()
    if process == 0:  # dies inside the write, without a chance to clean up
        try:
            fail_at_call(monkeypatch, target, name, number, error=None)
            checkpoint(tmp_path / "a", update=2, value=2.0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
    # The rename into place is what makes it a checkpoint; until then the old one stands.
    assert find_newest(tmp_path) == (tmp_path / "a", [])
    assert_holds(tmp_path / "a", 1.0)


# Finding and pruning


def checkpoints(folder: Path, *updates: int) -> None:
    for update in updates:
        checkpoint(folder / f"step-{update}", update)


def test_the_newest_is_the_one_with_the_highest_update_whatever_the_clock_says(tmp_path):
    for name, update in (("step-9", 9), ("epoch_1", 10), ("final", 8), ("zzz", 2)):
        checkpoint(tmp_path / name, update)
    os.utime(tmp_path / "epoch_1", (1, 1))
    os.utime(tmp_path / "epoch_1" / "MANIFEST.json", (1, 1))
    assert find_newest(tmp_path) == (tmp_path / "epoch_1", [])


def test_bad_ones_are_passed_over_and_reported(tmp_path):
    checkpoints(tmp_path, 1, 2, 3, 4)
    (tmp_path / "step-4" / "MANIFEST.json").write_text("{}")
    (tmp_path / "step-3" / "state.json").unlink()
    newest, problems = find_newest(tmp_path)
    assert newest == tmp_path / "step-2"
    assert [type(problem) for problem in problems] == [CheckpointError] * 2
    assert "step-4" in str(problems[0]) and "step-3" in str(problems[1])
    for update in (1, 2):  # where all are bad that is an error, and not a fresh start
        (tmp_path / f"step-{update}" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint can be trusted: .*step-2.*step-1.*Move them away"):
        find_newest(tmp_path)


def test_where_there_is_none_there_is_nothing_to_find(tmp_path):
    assert find_newest(tmp_path / "nowhere") == (None, [])
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a file").write_text("x")
    (tmp_path / ".tmp-step-1-abc").mkdir()  # what a killed process leaves: no manifest, so no checkpoint
    (tmp_path / ".tmp-step-1-abc" / "model.safetensors").write_bytes(b"half")
    assert find_newest(tmp_path) == (None, [])


def test_pruning_keeps_the_newest(tmp_path):
    checkpoints(tmp_path, 5, 20, 10, 15)
    prune(tmp_path, keep_last=2)
    assert names_in(tmp_path) == {"step-15", "step-20"}
    prune(tmp_path, keep_last=5)
    assert names_in(tmp_path) == {"step-15", "step-20"}


def test_spare_checkpoints_do_not_push_out_others_and_only_the_newest_stay(tmp_path):
    for update in range(1, 8):
        write(tmp_path / f"step-{update}", weights(1.0), state(1.0), update, about={store.SPARE: update not in (1, 3)})
        prune(tmp_path, keep_last=2)
    assert names_in(tmp_path) == {"step-1", "step-3", "step-6", "step-7"}
    checkpoint(tmp_path / "step-8", 8)
    prune(tmp_path, keep_last=2)
    assert names_in(tmp_path) == {"step-3", "step-7", "step-8"}


def test_pruning_never_removes_the_protected_one_or_the_last(tmp_path, monkeypatch):
    checkpoints(tmp_path, 1, 2, 3)
    prune(tmp_path, keep_last=1, protected=[tmp_path / "step-1"])
    assert names_in(tmp_path) == {"step-1", "step-3"}
    monkeypatch.chdir(tmp_path)
    prune(tmp_path, keep_last=1, protected=[Path("step-1")])  # the same one by another name
    assert names_in(tmp_path) == {"step-1", "step-3"}
    prune(tmp_path, keep_last=0)
    assert names_in(tmp_path) == {"step-3"}


def test_pruning_leaves_alone_what_it_does_not_know_or_trust(tmp_path):
    checkpoints(tmp_path, 1, 2, 3)
    checkpoint(tmp_path / "epoch_1", 1)
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-1" / "MANIFEST.json").write_text("damaged")
    prune(tmp_path, keep_last=1)
    assert names_in(tmp_path) == {"step-1", "step-3", "epoch_1", "step-notes"}


def test_pruning_continues_after_a_process_was_killed_while_pruning(tmp_path):
    checkpoints(tmp_path, 1, 2)
    os.rename(tmp_path / "step-1", tmp_path / ".del-step-1")  # and killed before it was gone
    checkpoint(tmp_path / "step-1", 1)
    prune(tmp_path, keep_last=1)
    assert names_in(tmp_path) - {".del-step-1"} == {"step-2"}


# When to save


def test_a_policy_says_when_and_where():
    policy = Checkpointing("runs/a", every_updates=3, every_epochs=2)
    assert policy.path(12) == Path("runs/a/step-0000000012")
    assert [update for update in range(1, 10) if policy.is_due_after_update(update)] == [3, 6, 9]
    assert [epoch for epoch in range(1, 7) if policy.is_due_after_epoch(epoch)] == [2, 4, 6]
    assert policy.keep_last == 3
    only_at_the_end = Checkpointing("runs/a")
    assert not only_at_the_end.is_due_after_update(1) and not only_at_the_end.is_due_after_epoch(1)


@pytest.mark.parametrize("name", ["every_updates", "every_epochs", "keep_last"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "3"])
def test_a_policy_of_no_whole_number_above_zero_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be a whole number of at least 1, got {value!r}"):
        Checkpointing("runs/a", **{name: value})


TIMES = [("every_seconds", -1), ("every_seconds", math.nan), ("max_stall_seconds", -0.5), ("max_stall_seconds", None)]


@pytest.mark.parametrize(("name", "value"), TIMES)
def test_a_policy_of_no_time_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be a number of at least 0, got {value!r}"):
        Checkpointing("runs/a", **{name: value})


# Safety


def test_reading_a_checkpoint_unpickles_nothing(tmp_path):
    """A hook of the interpreter counts every class or function that pickle looks up while a checkpoint is read."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    write(tmp_path / "a", model.state_dict(), state(), 1)
    code = """
        import io, pickle, sys
        from loopwright.checkpoint import find_newest, read
        found = []
        def hook(event, args):
            if event.startswith(("pickle.", "marshal.", "exec", "compile", "os.system", "subprocess.")):
                found.append(event)
        read(sys.argv[1])  # imports whatever it needs
        sys.addaudithook(hook)
        checkpoint = read(sys.argv[1])
        newest, _ = find_newest(sys.argv[2])
        while_reading = list(found)
        pickle.loads(pickle.dumps(io.StringIO))
        assert "pickle.find_class" in found, "the hook sees nothing at all"
        print(len(checkpoint.model), newest is not None, while_reading)
    """
    done = toys.python("-c", textwrap.dedent(code), tmp_path / "a", tmp_path)
    assert done.stdout == "7 True []\n", done.stderr
