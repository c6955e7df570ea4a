"""Files that were made to mislead: refused by name, in little time and memory, and nothing in them is run."""

import collections
import copy
import hashlib
import json
import os
import pickle
import random
import shutil
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import loopwright
from loopwright.callbacks import TrainerCallback
from loopwright.checkpoint import columns, find_newest, read, store, write
from loopwright.checkpoint import tensor_file as tensor_file_module
from loopwright.checkpoint.store import _canonical, read_manifest
from loopwright.errors import CheckpointError


def checkpoint(folder: Path, update: int = 1) -> Path:
    return write(folder, {"weight": torch.ones(4, 4)}, {"answer": 42, "noise": torch.zeros(3)}, update)


def replace(folder: Path, name: str, data: bytes) -> None:
    """Put other bytes into a file and make the manifest agree with them, as a careful attacker would."""
    (folder / name).write_bytes(data)
    manifest = read_manifest(folder)
    manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "MANIFEST.json").write_bytes(_canonical(manifest))


def refusal(folder: Path) -> str:
    started = time.perf_counter()
    with pytest.raises(CheckpointError) as refused:
        read(folder)
    assert time.perf_counter() - started < 1
    return str(refused.value)


def tensor_file(header: dict | bytes, data: bytes = b"", claimed: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text + data


def identity(folder: Path) -> dict[str, str]:
    return {"format": "pt", **read_manifest(folder)["identity"]}


def test_a_header_that_claims_too_much_is_refused_before_it_is_read(tmp_path):
    folder = checkpoint(tmp_path / "a")
    for claimed in (10**10, 2**64 - 1, 2**63):  # more than the file holds
        replace(folder, "model.safetensors", tensor_file(b"{}", claimed=claimed))
        assert "header claims" in refusal(folder)
    replace(folder, "model.safetensors", tensor_file(b" " * 11_000_000))
    assert "header claims 11000000 bytes" in refusal(folder)


def test_what_would_be_too_large_to_be_read_again_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file_module, "_LARGEST_HEADER_BYTES", 1000)
    many = {f"weight-{number}": torch.zeros(4) for number in range(100)}
    with pytest.raises(CheckpointError, match=r"the list of 100 tensors takes .* bytes"):
        write(tmp_path / "a", many, {}, 1)
    few_and_large = {f"weight-{number}": torch.zeros(16 * 1024) for number in range(20)}
    write(tmp_path / "b", few_and_large, {}, 1)
    assert (tmp_path / "b" / "model.safetensors").read_bytes().index(b"\0\0\0\0" * 8) > 1000
    assert set(read(tmp_path / "b").model) == set(few_and_large)
    monkeypatch.setattr(store, "_LARGEST_STATE_BYTES", 1000)
    largest = (
        r"state\.json takes .* bytes, and a checkpoint can hold 1,000 of it; its largest part is state\.callbacks\.1"
    )
    for save in (write, lambda folder, *given: store.check_savable(*given[:2])):
        with pytest.raises(CheckpointError, match=largest) as raised:
            save(tmp_path / "c", {}, {"callbacks": ["", "x" * 1000], "seed": 1}, 1)
        assert raised.value.code == "checkpoint.size"
    monkeypatch.setattr(store, "_LARGEST_MANIFEST_BYTES", 1000)
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json takes"):
        write(tmp_path / "d", {}, {}, 1, about={"text": "x" * 1000})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_a_state_that_becomes_too_large_is_not_saved_and_training_goes_on(
    tmp_path, monkeypatch, capsys, is_asynchronous
):
    class Collector(TrainerCallback):
        odd = ()

        def on_update_end(self, trainer, **kwargs):
            if trainer.progress.update == 2:
                self.odd = [2**70] * 2000
                monkeypatch.setattr(tensor_file_module, "_MOST_PARSED_BYTES", 120_000)

        def state_dict(self):
            return {"odd": self.odd}

    model = torch.nn.Linear(2, 1)
    trainer = loopwright.Trainer(
        model, torch.nn.MSELoss(), torch.optim.AdamW(model.parameters()), callbacks=[Collector()]
    )
    policy = loopwright.Checkpointing(tmp_path, every_updates=1, asynchronous=is_asynchronous)
    data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    trainer.train(data, 1, per_device_batch_size=2, checkpoints=policy)
    assert trainer.progress.update == 4 and [path.name for path in tmp_path.glob("step-*")] == ["step-0000000001"]
    assert capsys.readouterr().out.count("the limit; its largest part is state.callbacks.0.state") == 4


def test_entries_that_lie_about_their_place_or_size_are_refused_by_name(tmp_path):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    lies = [
        {**entry, "data_offsets": [0, 16]},
        {**entry, "data_offsets": [8, 16]},
        {**entry, "data_offsets": [-8, 0]},
        {**entry, "shape": [10**9, 10**9, 10**9]},
        {**entry, "shape": [2**70]},
        {**entry, "shape": [2] + [1] * 100},
        {**entry, "shape": [True, 2]},
        {**entry, "dtype": "F31"},
        {"dtype": "F32"},
        "nothing",
    ]
    for number, lie in enumerate(lies):
        folder = checkpoint(tmp_path / str(number))
        header = {"__metadata__": identity(folder), "weight": lie}
        replace(folder, "model.safetensors", tensor_file(header, b"\0" * 8))
        assert "'weight' is inconsistent" in refusal(folder), lie


def test_bytes_that_no_entry_accounts_for_are_refused(tmp_path):
    folder = checkpoint(tmp_path / "a")
    replace(folder, "model.safetensors", tensor_file({"__metadata__": identity(folder)}, b"payload"))
    assert "its tensors take 0 bytes of 7" in refusal(folder)


@pytest.mark.parametrize("piece", [b"[],", b"{},", b'{"a":0},', b"0,", b"1.5,", b'"\\ud83d",'])
def test_a_large_state_is_refused_before_it_takes_memory(tmp_path, piece):
    folder = checkpoint(tmp_path / "a")
    for size in (20_000_000, 3_000_000):
        replace(folder, "state.json", b'{"state": [' + piece * (size // len(piece)) + b"0]}")
        tracemalloc.start()
        refusal(folder)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
        tracemalloc.stop()


def mutated(value: Any, draw: random.Random) -> Any:
    """Return JSON with one of its nodes replaced, removed or nested deeply."""
    if isinstance(value, (dict, list)) and value and draw.random() < 0.9:
        place = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        changed = copy.copy(value)
        if draw.random() < 0.15:
            del changed[place]
        else:
            changed[place] = mutated(value[place], draw)
        return changed
    deep: Any = 0
    for _ in range(draw.choice([5, 900, 5000])):
        deep = [deep]
    odd = [None, True, -1, 10**30, 10**4000, 0.5, "", "x" * 100, [], {}, [[]], {"$": "tensor", "v": "no"}, {"$": "set"}]
    odd += [
        {"$": "deque", "v": [], "maxlen": -1},
        {"$": "bytes", "v": "?"},
        {"$": [], "v": 0},
        deep,
        {"$": "float", "v": []},
    ]
    return draw.choice([*odd, {"$": "dict", "v": [[1]]}, {"$": "set", "v": [[]]}, {"$": "ndarray", "v": "state.noise"}])


@pytest.mark.parametrize(
    "name", ["state.json", "long state.json", "MANIFEST.json", "state.safetensors", "model.safetensors"]
)
def test_whatever_a_checkpoint_with_right_hashes_says_it_is_resumed_or_refused(tmp_path, name, monkeypatch):
    if name.startswith("long"):
        monkeypatch.setattr(columns, "_MOST_ITEMS", 3)  # of which more are kept as tensors
        name = "state.json"

    def trainer():
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        return loopwright.Trainer(model, torch.nn.MSELoss(), torch.optim.AdamW(model.parameters()))

    data = TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
    trainer().train(data, 1, checkpoints=loopwright.Checkpointing(tmp_path / "run", every_epochs=1))
    original = next((tmp_path / "run").glob("step-*"))
    outcomes = collections.Counter()
    for seed in range(60):
        folder, draw = tmp_path / str(seed) / original.name, random.Random(f"{name} {seed}")
        shutil.copytree(original, folder)
        content = (folder / name).read_bytes()
        if name.endswith("tensors"):
            end = 8 + struct.unpack("<Q", content[:8])[0]
            replace(folder, name, tensor_file(as_text(mutated(json.loads(content[8:end]), draw)), content[end:]))
        elif name == "MANIFEST.json":
            manifest = read_manifest(folder)
            (folder / name).write_bytes(
                _canonical(changed if isinstance(changed := mutated(manifest, draw), dict) else {})
            )
        else:
            replace(folder, name, as_text(mutated(json.loads(content), draw)))
        try:
            trainer().train(data, 2, resume_from=folder)
            outcomes["resumed"] += 1
        except (CheckpointError, loopwright.errors.DataError):  # other data than the run began with
            outcomes["refused"] += 1
    assert outcomes["refused"] >= 15


def as_text(value: Any) -> bytes:
    """Return JSON of any depth and size of numbers."""
    if isinstance(value, dict):
        return b"{" + b",".join(json.dumps(key).encode() + b":" + as_text(item) for key, item in value.items()) + b"}"
    depth = 0
    while isinstance(value, list) and len(value) == 1:
        value, depth = value[0], depth + 1
    plain = (
        as_text(value) if isinstance(value, dict) else b"" if isinstance(value, list) else json.dumps(value).encode()
    )
    inner = b"[" + b",".join(map(as_text, value)) + b"]" if isinstance(value, list) else plain
    return b"[" * depth + inner + b"]" * depth


def test_a_key_that_occurs_twice_and_json_without_end_are_refused(tmp_path):
    for number, text in enumerate((b'{"a": 1, "a": 2}', b"[" * 100_000, b"{} {}", b"[]", b"\xff")):
        for name in ("model.safetensors", "state.json"):
            folder = checkpoint(tmp_path / f"{number}-{name}")
            replace(folder, name, tensor_file(text) if name.endswith("tensors") else text)
            assert f"{name} is damaged" in refusal(folder)


def test_a_file_of_another_checkpoint_is_refused_even_if_the_manifest_was_made_to_agree(tmp_path):
    ours, other = checkpoint(tmp_path / "ours", 1), checkpoint(tmp_path / "other", 2)
    for name in ("model.safetensors", "state.safetensors", "state.json"):
        mixed = tmp_path / f"mixed-{name}"
        shutil.copytree(ours, mixed)
        replace(mixed, name, (other / name).read_bytes())
        assert "belongs to another checkpoint" in refusal(mixed)


def test_links_and_pipes_are_not_followed(tmp_path):
    for number, name in enumerate(("model.safetensors", "state.json", "MANIFEST.json")):
        folder = checkpoint(tmp_path / str(number))
        elsewhere = tmp_path / f"elsewhere-{number}"
        os.rename(folder / name, elsewhere)
        os.symlink(elsewhere, folder / name)
        assert name in refusal(folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert f"{name} is not a plain file" in refusal(folder)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_a_planted_pickle_is_refused_and_never_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("optimizer.bin", "scheduler.pt", "random_states_0.pkl"):
        folder = checkpoint(tmp_path / f"with-{name}")
        (folder / name).write_bytes(pickle.dumps(Bomb()))
        assert f"unlisted files ['{name}']" in refusal(folder)
    for name in ("model.safetensors", "state.safetensors", "state.json"):
        folder = checkpoint(tmp_path / f"as-{name}")
        replace(folder, name, pickle.dumps(Bomb()))
        refusal(folder)
    assert not (tmp_path / "exploded").exists()


def test_a_manifest_with_other_names_than_ours_is_refused(tmp_path):
    for number, name in enumerate(("../../etc/passwd", "/etc/passwd", "sub/model.safetensors")):
        folder = checkpoint(tmp_path / str(number))
        manifest = read_manifest(folder)
        manifest["files"][name] = manifest["files"].pop("model.safetensors")
        (folder / "MANIFEST.json").write_bytes(_canonical(manifest))
        assert "MANIFEST.json lists" in refusal(folder)


def test_a_bad_checkpoint_is_put_into_quarantine_and_not_counted_again(tmp_path):
    for update in (1, 2, 3):
        checkpoint(tmp_path / f"step-{update}", update)
    (tmp_path / "step-3" / "state.json").write_bytes(b"x")
    newest, problems = find_newest(tmp_path, quarantine=True)
    assert newest == tmp_path / "step-2"
    assert "state.json is damaged" in str(problems[0])
    assert {path.name.split("-step")[0] for path in tmp_path.iterdir()} == {".bad", "step-1", "step-2"}
    assert find_newest(tmp_path) == (tmp_path / "step-2", [])
