"""Tensors split over processes: which process writes which part, and how any other split reads them back.

torch's planner for distributed checkpoints decides who writes; its files are not used, since those are pickled. Each
process writes one safetensors file, and `shards.json` maps each part to its place in a tensor. A table is trusted only
if its parts cover every tensor exactly once, and exist in the files it names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from loopwright.checkpoint.tensor_file import DTYPES, TYPES
from loopwright.engine.processes import gather_objects
from loopwright.engine.sharding import local, own_offsets
from loopwright.errors import CheckpointError

TABLE = "shards.json"
_MOST_COMPARED = 64  # other parts, per part on average: those that a second dimension splits
# {tensor: {"dtype", "shape", "parts": [{"file", "offsets", "shape"}]}}
Table = dict[str, dict[str, Any]]


def is_split(value: Any) -> bool:
    """Whether a value is a tensor split over the processes."""
    return isinstance(value, torch.Tensor) and hasattr(value, "to_local")


def file_of(rank: int) -> str:
    """Return the name of the file that a process writes its parts to."""
    return f"shard-{rank:05d}.safetensors"


def is_shard_file(name: str) -> bool:
    """Whether this is a name that `file_of` returns."""
    digits = name.removeprefix("shard-").removesuffix(".safetensors")
    return digits.isascii() and digits.isdigit() and name == file_of(int(digits))


def plan(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Table]:
    """Return this process's parts of split tensors by name, and the table of all parts; every process must call it."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    rank = dist.get_rank()
    for name, tensor in tensors.items():
        if any(placement.is_partial() for placement in tensor.placements):  # type: ignore[attr-defined]
            raise CheckpointError(f"{name} is a partial sum, not yet reduced over the processes: it cannot be saved")
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors), is_coordinator=rank == 0)
    plans = gather_objects(planner.create_local_plan())
    try:
        plans, _ = planner.create_global_plan(plans)
    except ValueError as error:
        raise CheckpointError(f"the processes hold different states, which cannot be saved together: {error}") from None
    table: Table = {}
    for writer, of_rank in enumerate(plans):
        for item in of_rank.items:
            data = item.tensor_data
            assert data is not None, item.index.fqn  # only tensors are planned here
            whole = {"dtype": DTYPES[data.properties.dtype], "shape": list(data.size), "parts": []}
            entry = table.setdefault(item.index.fqn, whole)
            if math.prod(data.chunk.sizes):
                offsets, shape = list(data.chunk.offsets), list(data.chunk.sizes)
                entry["parts"].append({"file": file_of(writer), "offsets": offsets, "shape": shape})
    own = planner.finish_plan(plans[rank])
    parts = {}
    for item in own.items:
        part = planner.resolve_data(item)
        assert isinstance(part, torch.Tensor), item.index.fqn
        if part.numel() and item.tensor_data is not None:
            parts[part_name(item.index.fqn, item.tensor_data.chunk.offsets)] = part.detach()
    return parts, table


def part_name(tensor: str, offsets: Any) -> str:
    """Return the name of a part in its file: the tensor, and the offset of the part."""
    return f"{tensor}@{','.join(map(str, offsets))}"


def check_table(table: Any, headers: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Raise a CheckpointError unless the parts of a table are in the files and cover every tensor exactly once."""
    found = 0
    for name, entry in table.items():
        try:
            shape = entry["shape"]
            if len(shape) > 64 or any(type(extent) is not int or not 0 <= extent < 1 << 63 for extent in shape):
                raise ValueError(f"a shape of {shape}")
            if entry["dtype"] not in TYPES:
                raise KeyError(entry["dtype"])
            boxes = []
            for part in entry["parts"]:
                stored = headers[part["file"]][part_name(name, part["offsets"])]
                if stored["shape"] != part["shape"] or stored["dtype"] != entry["dtype"]:
                    raise ValueError(f"{part['file']} holds another part")
                sides = zip(part["offsets"], part["shape"], strict=True)
                boxes.append([(first, first + size) for first, size in sides])
            _check_cover(shape, boxes)
            found += len(boxes)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: the parts of {name!r} do not make up the tensor ({error})") from None
    listed = sum(len(header) for header in headers.values())
    if listed != found:
        raise CheckpointError(f"{path} names {found} parts, the shard files hold {listed}")


def _check_cover(shape: list[int], boxes: list[list[tuple[int, int]]]) -> None:
    for box in boxes:
        if len(box) != len(shape) or any(
            not 0 <= first < last <= extent for (first, last), extent in zip(box, shape, strict=True)
        ):
            raise ValueError("a part lies outside")
    ordered, num_compared = sorted(boxes), 0
    # Overlapping parts share an index of the first dimension: only those are compared with each other.
    for index, box in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if shape and other[0][0] >= box[0][1]:
                break
            num_compared += 1
            if num_compared > _MOST_COMPARED * len(boxes):
                raise ValueError("too many parts begin together")
            if all(first < end and start < last for (first, last), (start, end) in zip(box, other, strict=True)):
                raise ValueError("two parts overlap")
    volume = sum(math.prod(last - first for first, last in box) for box in boxes)
    if volume != math.prod(shape):
        raise ValueError(f"they hold {volume} numbers of {math.prod(shape)}")


def read_split(folder: Path, table: Table, mesh: Any = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a table by name, each split over the processes of a mesh, or whole without one."""
    files: dict[str, Any] = {}
    with ExitStack() as stack:
        for name, entry in table.items():
            target = _empty(entry, mesh)
            own, origin = local(target).detach(), own_offsets(target)
            for part in entry["parts"]:
                sides = zip(part["offsets"], part["shape"], origin, own.shape, strict=True)
                shared = [(max(first, start), min(first + size, start + most)) for first, size, start, most in sides]
                if all(first < end for first, end in shared):
                    if part["file"] not in files:
                        files[part["file"]] = stack.enter_context(safe_open(folder / part["file"], "pt"))
                    stored = files[part["file"]].get_tensor(part_name(name, part["offsets"]))
                    own[_within(shared, origin)] = stored[_within(shared, part["offsets"])]
            yield name, target


def _within(box: list[tuple[int, int]], origin: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(first - start, end - start) for (first, end), start in zip(box, origin, strict=True))


def _empty(entry: Mapping[str, Any], mesh: Any) -> torch.Tensor:
    shape, dtype = entry["shape"], TYPES[entry["dtype"]]
    if mesh is None:
        return torch.empty(shape, dtype=dtype)
    from torch.distributed.tensor import Shard, empty

    # Along the first dimension, as FSDP2 splits.
    return empty(*shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
