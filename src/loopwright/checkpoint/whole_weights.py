"""Files with whole weights, written one tensor at a time from a split model or a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from loopwright.checkpoint import tensor_shards as shards
from loopwright.checkpoint.files import HashedFile
from loopwright.checkpoint.sharded_checkpoint import everywhere
from loopwright.checkpoint.state_by_name import untied
from loopwright.checkpoint.store import MODEL, SHARDED_FORMAT, read_table, verify, write_file
from loopwright.checkpoint.tensor_file import write_data, write_header
from loopwright.engine.nested import map_tensors
from loopwright.engine.processes import gather_objects
from loopwright.engine.sharding import load_weights, split_like, whole
from loopwright.errors import CheckpointError


def gathered(state: Any, is_kept: bool) -> Any:
    """Return a state of whole host tensors where it is kept, without tensors elsewhere; every process must call it."""
    return map_tensors(state, lambda tensor: whole(tensor.detach()).cpu() if _joined(tensor, is_kept) else None)


def _joined(tensor: torch.Tensor, is_kept: bool) -> bool:
    """Whether to keep a tensor here; every process takes part in gathering it."""
    if not is_kept and shards.is_split(tensor):
        whole(tensor.detach())
    return is_kept


def write_gathered(
    path: str | Path, weights: Mapping[str, torch.Tensor], metadata: Mapping[str, str], is_writer: bool
) -> None:
    """Write the weights of a split model into one safetensors file, gathering one tensor at a time.

    Every process must call it.

    Args:
        path: of the file.
        weights: by name; tied weights are written once.
        metadata: strings for the header.
        is_writer: whether this process writes.
    """
    tied = gather_objects(untied(weights)[1])[0]
    kept = {name: tensor.detach() for name, tensor in weights.items() if name not in tied}
    arriving = iter(kept.values())

    def write(aside: Path) -> None:
        with HashedFile(aside) as file:
            write_header(file, kept, {"format": "pt", **metadata})
            for tensor in arriving:
                write_data(file, whole(tensor).cpu().contiguous())

    def step() -> None:
        try:
            if is_writer:
                write_file(path, write)
        finally:
            for tensor in arriving:  # processes that do not write, or cannot, still have to send their parts
                whole(tensor)

    everywhere(step)


class Held:
    """A stand-in for a model or an optimizer with an already gathered state."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        """Return the gathered state."""
        return self._state


class SplitModel:
    """A split model that loads whole weights."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the split weights."""
        return self._model.state_dict()

    def load_state_dict(self, weights: Mapping[str, Any], strict: bool = True) -> None:
        """Load this process's part of whole weights."""
        load_weights(self._model, weights, strict)


class SplitOptimizer:
    """The optimizer of a split model, which loads a whole state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, split."""
        return self._optimizer.param_groups

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load this process's part of a whole state."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        state = {
            index: {name: split_like(value, parameters[index]) for name, value in entry.items()}
            for index, entry in saved["state"].items()
        }
        self._optimizer.load_state_dict({**saved, "state": state})


def export_weights(directory: str | Path, path: str | Path) -> Path:
    """Write the weights of a checkpoint, sharded or not, into one safetensors file, one tensor at a time.

    Args:
        directory: the checkpoint; it is verified first.
        path: the file, as "model.safetensors".

    Raises:
        CheckpointError: the checkpoint is damaged, or writing failed.
    """
    folder, final = Path(directory), Path(path)
    manifest = verify(folder)

    def write(aside: Path) -> None:
        with HashedFile(aside) as file:
            kinds = dict(_weights(folder, manifest, only_kinds=True))
            write_header(file, kinds, {"format": "pt"})
            for _, tensor in _weights(folder, manifest, only_kinds=False):
                write_data(file, tensor)

    try:
        write_file(final, write)
    except OSError as error:
        raise CheckpointError(f"cannot write {final}: {error}") from error
    return final


def _weights(folder: Path, manifest: Mapping[str, Any], only_kinds: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a checkpoint by name, always in the same order; with `only_kinds` just shapes and dtypes."""
    is_sharded = manifest["format"] == SHARDED_FORMAT
    prefix, name_of_file = (MODEL, "state.safetensors") if is_sharded else ("", "model.safetensors")
    with safe_open(folder / name_of_file, "pt") as file:
        for name in sorted(file.keys()):
            if name.startswith(prefix):
                tensor = file.get_tensor(name)
                yield name.removeprefix(prefix), tensor.to("meta") if only_kinds else tensor
    if is_sharded:
        table = {name: entry for name, entry in read_table(folder, manifest).items() if name.startswith(MODEL)}
        for name, tensor in shards.iterate_whole(folder, table, only_kinds):
            yield name.removeprefix(MODEL), tensor
