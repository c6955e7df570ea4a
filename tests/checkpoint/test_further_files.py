"""Further files of a checkpoint, folders that are open to others, and names of a run's own choosing."""

import json

import pytest
import torch
from safetensors.torch import load_file

import toys
from loopwright import Checkpointing, Trainer
from loopwright.checkpoint import find_newest, read, verify, write
from loopwright.checkpoint.store import _canonical
from loopwright.errors import CheckpointError, ConfigError
from loopwright.run_folder import read_json

MODEL = {"weight": torch.arange(4.0)}
FILES = {"config.json": b'{"width": 4}', "vocab.txt": b"a\nb\n", "empty": b""}


class WithFiles(Trainer):
    """Puts a config beside the weights, and one file that changes with every update."""

    def checkpoint_files(self):
        return {"config.json": b'{"width": 4}', "note.txt": f"update {self.progress.update}".encode()}


def with_files(folder, files=FILES, **kwargs):
    return write(folder / "step-1", MODEL, {"x": 1}, 1, files=files, **kwargs)


def checkpoints_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


# Further files


def test_further_files_lie_beside_the_weights_and_are_listed_and_hashed(tmp_path):
    folder = with_files(tmp_path)
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    listed = json.loads((folder / "MANIFEST.json").read_text())["files"]
    assert set(listed) == {*FILES, "model.safetensors", "state.safetensors", "state.json"}
    assert listed["vocab.txt"]["size"] == 4 and len(listed["vocab.txt"]["sha256"]) == 64
    assert read(folder).state == {"x": 1}


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_further_file_that_is_changed_or_gone_is_found_in_an_open_checkpoint_too(name, is_open, tmp_path):
    folder = with_files(tmp_path, is_open=is_open)
    (folder / name).write_bytes(FILES[name] + b"x")
    with pytest.raises(CheckpointError, match=rf"{name} is damaged"):
        verify(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"missing files \['{name}'\]"):
        verify(folder)


def test_an_unlisted_file_makes_a_closed_checkpoint_bad_and_an_open_one_not(tmp_path):
    closed, opened = with_files(tmp_path / "closed"), with_files(tmp_path / "open", is_open=True)
    for folder in (closed, opened):
        (folder / "added.txt").write_text("by somebody else")
        (folder / "evil.pkl").write_bytes(b"cos\nsystem\n(S'echo'\ntR.")
    with pytest.raises(CheckpointError, match=r"unlisted files \['added.txt', 'evil.pkl'\]"):
        read(closed)
    assert read(opened).state == {"x": 1}
    assert find_newest(tmp_path / "open") == (opened, [])


def test_an_open_checkpoint_cannot_be_opened_by_editing_its_manifest(tmp_path):
    folder = with_files(tmp_path)
    manifest = folder / "MANIFEST.json"
    manifest.write_text(manifest.read_text().replace('"is_open": false', '"is_open": true'))
    with pytest.raises(CheckpointError, match="its own sha256 does not match"):
        read(folder)


HOSTILE = [
    "../x",
    "/tmp/x",
    "a/../b",
    "a//b",
    "a/",
    "a/.b",
    "1/2/3/4/5/6",
    "..",
    ".hidden",
    "",
    "x" * 200,
    "a\nb",
    "a\n",
    "a\0b",
    "-rf",
]
TAKEN = ["MANIFEST.json", "weights.safetensors", "state.json", "state.safetensors"]


@pytest.mark.parametrize("name", HOSTILE + TAKEN)
def test_a_hostile_name_is_refused_on_writing_and_nothing_is_left(name, tmp_path):
    with pytest.raises(CheckpointError, match="cannot hold a further file called"):
        with_files(tmp_path / "in", {name: b"x"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in HOSTILE if "." not in name or "/" in name])
def test_a_hostile_name_in_a_manifest_is_refused_before_anything_is_opened(name, tmp_path):
    folder = with_files(tmp_path)
    (tmp_path / "x").write_bytes(FILES["config.json"])
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    manifest.pop("sha256")
    manifest["files"][name] = manifest["files"].pop("config.json")
    (folder / "config.json").unlink()
    (folder / "MANIFEST.json").write_bytes(_canonical(manifest))
    with pytest.raises(CheckpointError, match="plain names only"):
        read(folder)


def test_further_files_may_be_in_folders_and_may_be_copied_from_elsewhere(tmp_path):
    (tmp_path / "elsewhere.bin").write_bytes(b"y" * 70_000_000)
    folder = with_files(tmp_path / "in", {"a/config.json": b"{}", "a/b/c.bin": tmp_path / "elsewhere.bin"})
    assert (folder / "a" / "b" / "c.bin").stat().st_size == verify(folder)["files"]["a/b/c.bin"]["size"] == 70_000_000
    (folder / "a" / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="a/config.json is damaged"):
        read(folder)


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_not_listed_is_found_in_folders_too(kind, tmp_path):
    folder = with_files(tmp_path / "in", {"a/config.json": b"{}"})
    more = folder / "a" / "more"
    more.write_text("") if kind == "file" else more.mkdir() if kind == "folder" else more.symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match=r"unlisted files \['a/more'\]"):
        read(folder)


def test_a_listed_file_is_not_read_through_a_linked_folder(tmp_path):
    folder = with_files(tmp_path / "in", {"a/config.json": b"{}"})
    (folder / "a").rename(tmp_path / "moved")
    (folder / "a").symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"missing files \['a/config.json'\]"):
        read(folder)


def test_a_further_model_file_leaves_the_weights_in_their_own(tmp_path):
    folder = with_files(tmp_path / "in", {"model.safetensors": b"of another library"})
    assert (folder / "model.safetensors").read_bytes() == b"of another library"
    assert read(folder).model.keys() == load_file(folder / "weights.safetensors").keys()


# What a trainer puts there


def fit(folder, cls=WithFiles, num_epochs=2, resume_from=None, **policy):
    options = {"eval_dataset": toys.data(8), "checkpoints": toys.saving(folder, **policy), "resume_from": resume_from}
    return toys.trained(cls=cls, num_epochs=num_epochs, **options)


def test_the_files_of_a_trainer_are_in_every_checkpoint_as_of_its_update_and_in_states_that_users_save(tmp_path):
    fit(tmp_path, num_epochs=1).save_training_state(tmp_path / "by_hand")
    found = {path.name: (path / "note.txt").read_text() for path in tmp_path.glob("step-*")}
    assert found == {f"step-{update:010d}": f"update {update}" for update in (1, 2, 3, 4)}
    for path in tmp_path.glob("step-*"):
        assert (path / "config.json").read_bytes() == b'{"width": 4}'
        assert verify(path)["files"]["config.json"]["size"] == 12
    assert (tmp_path / "by_hand" / "note.txt").read_text() == "update 4"
    assert verify(tmp_path / "by_hand")["is_open"] is False


def test_a_trainer_whose_files_have_a_hostile_name_ends_with_that_name(tmp_path):
    class Hostile(Trainer):
        def checkpoint_files(self):
            return {"../outside": b"x"}

    with pytest.raises(CheckpointError, match=r"further file called '\.\./outside'"):
        fit(tmp_path / "run", Hostile)
    assert toys.names_in(tmp_path) == {"run"} and checkpoints_in(tmp_path / "run") == []


def test_a_run_with_open_checkpoints_continues_though_others_have_written_there(tmp_path):
    whole = fit(tmp_path / "whole")
    fit(tmp_path / "parts", num_epochs=1, is_open=True)
    newest, _ = find_newest(tmp_path / "parts")
    (newest / "README.md").write_text("added by a callback")
    resumed = fit(tmp_path / "parts", is_open=True, resume_from="auto")
    assert resumed.result.updates == 8
    assert torch.equal(toys.weights(resumed), toys.weights(whole))
    assert verify(tmp_path / "parts" / "step-0000000008")["is_open"] is True


# Names of one's own


def test_checkpoints_with_a_custom_name_are_found_pruned_and_continued(tmp_path):
    whole = fit(tmp_path / "whole")
    policy = {"name": "checkpoint-{update}", "every_updates": 1, "keep_last": 2}
    fit(tmp_path / "parts", num_epochs=1, **policy)
    assert checkpoints_in(tmp_path / "parts") == ["checkpoint-3", "checkpoint-4"]
    resumed = fit(tmp_path / "parts", resume_from="auto", num_epochs=3, **policy)
    assert resumed.result.updates == 12
    # As a text checkpoint-9 would come after checkpoint-12.
    assert checkpoints_in(tmp_path / "parts") == ["checkpoint-11", "checkpoint-12"]
    again = fit(tmp_path / "other", num_epochs=1, **policy)
    again = fit(tmp_path / "other", resume_from="auto", **policy)
    assert torch.equal(toys.weights(again), toys.weights(whole))


def test_the_best_checkpoint_keeps_its_place_under_a_custom_name(tmp_path):
    class WorseAndWorse(Trainer):
        def calculate_eval_batch_loss(self, batch):
            output = super().calculate_eval_batch_loss(batch)
            return {**output, "loss": torch.tensor(float(self.progress.update))}

    fit(tmp_path, WorseAndWorse, 3, name="checkpoint-{update}", keep_last=1, keep_best=("eval_loss_epoch", "min"))
    assert checkpoints_in(tmp_path) == ["checkpoint-12", "checkpoint-4"]
    best = read_json(tmp_path / "best.json")
    assert best == {"checkpoint": "checkpoint-4", "metric": "eval_loss_epoch", "direction": "min", "value": 4.0}


@pytest.mark.parametrize("name", ["checkpoint", "{update}-state", "step-{update}.0", ""])
def test_a_name_that_does_not_end_in_the_update_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="a hyphen and the update"):
        Checkpointing(tmp_path, name=name)
