"""Files with whole weights, written one tensor at a time from a split model or a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open

from loopwright.checkpoint import tensor_shards as shards
from loopwright.checkpoint.files import HashedFile
from loopwright.checkpoint.sharded_checkpoint import everywhere
from loopwright.checkpoint.state_by_name import untied
from loopwright.checkpoint.store import MODEL, SHARDED_FORMAT, read_table, verify, write_file
from loopwright.checkpoint.tensor_file import TYPES, check_header, write_data, write_header
from loopwright.engine.nested import map_tensors
from loopwright.engine.processes import gather_objects
from loopwright.engine.sharding import split_like, whole
from loopwright.errors import CheckpointError


def gathered(state: Any, is_kept: bool) -> Any:
    """Return a state of whole host tensors where it is kept, without tensors elsewhere; every process must call it."""

    def gather(tensor: torch.Tensor) -> torch.Tensor | None:
        if is_kept:
            return whole(tensor.detach()).cpu()
        if shards.is_split(tensor):
            whole(tensor.detach())  # every process takes part
        return None

    return map_tensors(state, gather)


def write_gathered(
    path: str | Path, weights: Mapping[str, torch.Tensor], metadata: Mapping[str, str], is_writer: bool
) -> None:
    """Gather a split model's weights, one at a time, into one file; every process must call it, writer or not."""
    tied = gather_objects(untied(weights)[1])[0]
    kept = {name: tensor.detach() for name, tensor in weights.items() if name not in tied}
    arriving = iter(kept.values())

    def step() -> None:
        try:
            if is_writer:
                _write(path, kept, (whole(tensor).cpu().contiguous() for tensor in arriving), metadata)
        finally:
            for tensor in arriving:  # processes that do not write, or cannot, still have to send their parts
                whole(tensor)

    everywhere(step)


def _write(
    path: str | Path, kinds: Mapping[str, torch.Tensor], tensors: Iterable[torch.Tensor], metadata: Mapping[str, str]
) -> None:
    def write(aside: Path) -> None:
        with HashedFile(aside) as file:
            write_header(file, kinds, {"format": "pt", **metadata})
            for tensor in tensors:
                write_data(file, tensor)

    write_file(path, write)


def with_state(state: Any) -> Any:
    """Return a stand-in for a model or an optimizer with this state."""
    return SimpleNamespace(state_dict=lambda: state)


def split_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    """Return a stand-in for the optimizer of a split model that loads this process's part of a whole state."""

    def load_state_dict(saved: Mapping[str, Any]) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = {
            index: {name: split_like(value, parameters[index]) for name, value in entry.items()}
            for index, entry in saved["state"].items()
        }
        optimizer.load_state_dict({**saved, "state": state})

    return SimpleNamespace(param_groups=optimizer.param_groups, load_state_dict=load_state_dict)


def export_weights(directory: str | Path, path: str | Path) -> Path:
    """Verify a checkpoint, and write its weights, sharded or not, into one safetensors file, one tensor at a time."""
    folder, final = Path(directory), Path(path)
    manifest = verify(folder)
    is_sharded = manifest["format"] == SHARDED_FORMAT
    prefix, file_name = (MODEL, "state.safetensors") if is_sharded else ("", "model.safetensors")
    header = check_header(folder / file_name, {"format": "pt", **manifest["identity"]})
    whole_ones = {name: header[name] for name in sorted(header) if name.startswith(prefix)}
    split_ones = read_table(folder, manifest) if is_sharded else {}
    split_ones = {name: entry for name, entry in split_ones.items() if name.startswith(prefix)}

    def tensors() -> Iterator[torch.Tensor]:
        with safe_open(folder / file_name, "pt") as file:
            yield from map(file.get_tensor, whole_ones)
        for _, tensor in shards.read_split(folder, split_ones):
            yield tensor

    kinds = {
        name.removeprefix(prefix): torch.empty(entry["shape"], dtype=TYPES[entry["dtype"]], device="meta")
        for name, entry in {**whole_ones, **split_ones}.items()
    }
    try:
        _write(final, kinds, tensors(), {})
    except OSError as error:
        raise CheckpointError(f"cannot write {final}: {error}") from error
    return final
