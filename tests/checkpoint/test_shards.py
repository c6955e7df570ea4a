"""The table of a sharded checkpoint's parts, made by hand; the processes that write one are in tests/distributed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from loopwright.checkpoint import export_weights, read, store, verify, write
from loopwright.checkpoint.__main__ import main
from loopwright.checkpoint.tensor_shards import TABLE, check_table, file_of, is_shard_file, part_name
from loopwright.errors import CheckpointError

WHOLE = torch.arange(21, dtype=torch.float32).reshape(7, 3)
WEIGHT, MOMENT = "model/weight", "state.optimizer.moment"


def parts_of(name: str, tensor: torch.Tensor, *cuts: int) -> list[tuple[str, torch.Tensor, dict]]:
    """The rows between cuts, as (name in the file, numbers, entry of the table)."""
    edges = [0, *cuts, len(tensor)]
    found = []
    for number, (first, last) in enumerate(zip(edges, edges[1:], strict=False)):
        part = tensor[first:last].contiguous()
        entry = {"file": file_of(number), "offsets": [first, 0], "shape": list(part.shape)}
        found.append((part_name(name, [first, 0]), part, entry))
    return found


def sharded(folder: Path, change=lambda table: None) -> Path:
    """A checkpoint whose weight is split in two and whose moment is split elsewhere."""
    split = {WEIGHT: parts_of(WEIGHT, WHOLE, 4), MOMENT: parts_of(MOMENT, -WHOLE, 2)}
    table = {
        name: {"dtype": "F32", "shape": [7, 3], "parts": [entry for _, _, entry in parts]}
        for name, parts in split.items()
    }
    change(table)
    draft = store.Draft(folder, store.identify("run", 5))
    draft.create(0, store.Label())
    buffer = {"model/mean": torch.tensor([1.0, 2.0])}
    state = {"optimizer": {"moment": {"$": "tensor", "v": MOMENT}}, "tied": {"again": "weight"}}
    draft.write_rest(store.Snapshot({}, buffer, state, 5, {}))
    for rank in range(2):
        draft.write_tensors(file_of(rank), {parts[rank][0]: parts[rank][1] for parts in split.values()})
    draft.write_json(TABLE, {"tensors": table})
    draft.seal(store.SHARDED_FORMAT, store.Label(metadata={"note": "by hand"}))
    return folder


def test_parts_are_put_together_wherever_they_were_cut(tmp_path):
    checkpoint = read(sharded(tmp_path / "a"))
    assert torch.equal(checkpoint.model["weight"], WHOLE)
    assert checkpoint.model["again"] is checkpoint.model["weight"]
    assert torch.equal(checkpoint.model["mean"], torch.tensor([1.0, 2.0]))
    assert torch.equal(checkpoint.state["optimizer"]["moment"], -WHOLE)
    assert checkpoint.update == 5 and checkpoint.about == {"note": "by hand"}


SPOILED = {
    "a part is left out": lambda table: table[WEIGHT]["parts"].pop(),
    "a part is named twice": lambda table: table[WEIGHT]["parts"].append(table[WEIGHT]["parts"][0]),
    "a tensor is left out": lambda table: table.pop(MOMENT),
    "a part is elsewhere": lambda table: table[WEIGHT]["parts"][0].update(file=file_of(1)),
    "a file is not there": lambda table: table[WEIGHT]["parts"][0].update(file=file_of(7)),
    "another shape": lambda table: table[WEIGHT].update(shape=[8, 3]),
    "another type": lambda table: table[WEIGHT].update(dtype="I32"),
    "an unknown type": lambda table: table.update({"model/more": {"dtype": "F7", "shape": [0], "parts": []}}),
    "no shape": lambda table: table.update({"model/more": {"dtype": "F32", "shape": [0, -1], "parts": []}}),
    "no entry": lambda table: table.update({"model/more": None}),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_table_that_does_not_cover_every_tensor_once_is_refused(tmp_path, name):
    folder = sharded(tmp_path / "a", SPOILED[name])
    with pytest.raises(CheckpointError, match="shards.json"):
        verify(folder)
    with pytest.raises(CheckpointError):
        read(folder)


def test_parts_that_overlap_are_refused_although_their_sizes_add_up():
    table, header = {"x": {"dtype": "F32", "shape": [7, 3], "parts": []}}, {}
    for offsets, shape in (([0, 0], [4, 3]), ([2, 0], [3, 3])):
        table["x"]["parts"].append({"file": file_of(0), "offsets": offsets, "shape": shape})
        header[part_name("x", offsets)] = {"dtype": "F32", "shape": shape}
    with pytest.raises(CheckpointError, match="overlap"):
        check_table(table, {file_of(0): header}, Path(TABLE))


def test_a_table_of_another_checkpoint_is_refused(tmp_path):
    first, second = sharded(tmp_path / "a"), sharded(tmp_path / "b")
    manifest = store.read_manifest(first)
    (first / TABLE).write_bytes((second / TABLE).read_bytes())
    manifest["files"][TABLE] = store.read_manifest(second)["files"][TABLE]
    (first / store.MANIFEST).write_bytes(store._canonical(manifest))
    with pytest.raises(CheckpointError, match="belongs to another checkpoint"):
        read(first)
    (first / TABLE).write_text(json.dumps({"identity": manifest["identity"]}))
    with pytest.raises(CheckpointError, match="damaged"):
        read(first)


def test_processes_that_verify_a_share_find_a_fault_between_them(tmp_path):
    folder = sharded(tmp_path / "a")
    data = bytearray((folder / file_of(1)).read_bytes())
    data[-1] ^= 1
    (folder / file_of(1)).write_bytes(data)
    found = []
    for rank in range(3):
        try:
            verify(folder, (rank, 3))
        except CheckpointError as error:
            found.append(str(error))
    assert len(found) == 1 and file_of(1) in found[0]


def test_only_names_that_a_process_gives_are_shard_files():
    assert file_of(3) == "shard-00003.safetensors" and file_of(123456) == "shard-123456.safetensors"
    assert is_shard_file(file_of(3)) and is_shard_file(file_of(123456))
    others = ("shard-3.safetensors", "shard-.safetensors", "model.safetensors", "shards.json")
    assert not any(map(is_shard_file, others))


def test_a_further_file_may_not_take_the_name_of_a_shard(tmp_path):
    for name in (file_of(0), TABLE):
        with pytest.raises(CheckpointError, match="further file"):
            write(tmp_path / "a", {}, {}, 1, files={name: b""})


def test_the_weights_of_any_checkpoint_are_exported_as_one_file(tmp_path, capsys):
    folder = sharded(tmp_path / "a")
    assert export_weights(folder, tmp_path / "out" / "model.safetensors") == tmp_path / "out" / "model.safetensors"
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == {"weight", "mean"} and torch.equal(exported["weight"], WHOLE)
    whole = write(tmp_path / "whole", {"weight": WHOLE, "scale": torch.tensor(2.0)}, {}, 1)
    assert main(["export", str(whole), str(tmp_path / "b.safetensors")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "b.safetensors")
    exported = load_file(tmp_path / "b.safetensors")
    assert torch.equal(exported["weight"], WHOLE) and exported["scale"] == 2.0
    (folder / file_of(0)).unlink()
    assert main(["export", str(folder), str(tmp_path / "c.safetensors")]) == 65
    assert "missing files" in capsys.readouterr().err and not (tmp_path / "c.safetensors").exists()
