"""Checkpoints of models split over processes: each process writes its part, and rank 0 commits them as one.

    shard-00000.safetensors ...   what each process holds of weights and optimizer
    shards.json                   where in which tensor each part belongs
    state.safetensors             the tensors that every process has whole, weights among them as "model/..."
    state.json  MANIFEST.json     as in any checkpoint

No process ever holds the whole. The manifest is written once all processes have reported the size and hash of their
file; until then the checkpoint does not exist. Every process must call the functions of this module.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from loopwright.checkpoint import store
from loopwright.checkpoint import tensor_shards as shards
from loopwright.checkpoint.encoding import encode
from loopwright.checkpoint.state_by_name import untied
from loopwright.engine.processes import gather_objects, share_failures
from loopwright.engine.sharding import split_like
from loopwright.errors import CheckpointError
from loopwright.failpoints import failpoint

R = TypeVar("R")


@dataclass(frozen=True)
class ShardedSnapshot:
    """One process's share of the state of a run at an update boundary."""

    parts: dict[str, torch.Tensor]  # its parts of split tensors, by their names in its file
    table: shards.Table  # where all parts of all processes belong
    rest: store.Snapshot  # everything that is not split; only rank 0 writes it


def take_snapshot(
    model: Mapping[str, torch.Tensor], state: dict[str, Any], update: int, files: store.Files | None = None
) -> ShardedSnapshot:
    """Encode a state, as `store.take_snapshot` does, and agree on which process writes which part."""

    def encoded() -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, torch.Tensor], Any]:
        store.check_file_names(files or ())
        weights, tied = untied(model)
        tensors: dict[str, torch.Tensor] = {}
        return weights, tied, tensors, encode(state, tensors)

    _, tied, tensors, text = everywhere(encoded)
    tied = gather_objects(tied)[0]  # tied weights are recognised by their memory address: one process decides
    weights = {store.MODEL + name: tensor for name, tensor in model.items() if name not in tied}
    everything = {**weights, **tensors}
    parts, table = shards.plan({name: tensor for name, tensor in everything.items() if shards.is_split(tensor)})
    rest = {name: tensor for name, tensor in everything.items() if not shards.is_split(tensor)}
    is_first = dist.get_rank() == 0
    own, kept = everywhere(lambda: (store.stored(parts), store.stored(rest) if is_first else {}))
    failpoint("after_snapshot")
    return ShardedSnapshot(own, table, store.Snapshot({}, kept, {**text, "tied": tied}, update, dict(files or {})))


def commit(snapshot: ShardedSnapshot, directory: str | Path, label: store.Label) -> Path:
    """Write all parts to a temporary folder and rename it into place; fails on all processes as `store.commit` does."""
    is_first = dist.get_rank() == 0
    draft = store.Draft(Path(directory), gather_objects(store.identify(label.run_id, snapshot.rest.update))[0])
    num_bytes = sum(part.nbytes for part in snapshot.parts.values())
    total = sum(gather_objects(num_bytes)) + snapshot.rest.num_bytes

    def write_part() -> dict[str, Any]:
        draft.write_tensors(shards.file_of(dist.get_rank()), snapshot.parts)
        if is_first:
            draft.write_rest(snapshot.rest)
        return draft.files

    def finish() -> None:
        if is_first:
            for files in written:
                draft.files.update(files)
            draft.write_json(shards.TABLE, {"tensors": snapshot.table})
            draft.seal(store.SHARDED_FORMAT, label)

    try:
        everywhere(lambda: draft.create(total, label) if is_first else None)
        written = gather_objects(everywhere(write_part))
        everywhere(finish)
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint {draft.final}: {error}") from error
    finally:
        if is_first:
            shutil.rmtree(draft.folder, ignore_errors=True)  # a no-op after the rename
    failpoint("after_commit")
    return draft.final


def read_for(model: Mapping[str, Any], mesh: Any, directory: str | Path) -> store.Checkpoint:
    """Return the content of a checkpoint, sharded or not, split like the weights of this run (`model`)."""
    share = dist.get_rank(), dist.get_world_size()
    checkpoint = everywhere(lambda: store.read(directory, mesh, share))
    weights = {name: split_like(value, model.get(name, value)) for name, value in checkpoint.model.items()}
    optimizer = checkpoint.state.get("optimizer")
    if isinstance(optimizer, dict):
        kept = dict(optimizer["state"])
        for name in kept.keys() & weights.keys():
            kept[name] = {key: split_like(value, weights[name]) for key, value in kept[name].items()}
        optimizer = {**optimizer, "state": kept}
    return replace(checkpoint, model=weights, state={**checkpoint.state, "optimizer": optimizer})


def everywhere(step: Callable[[], R]) -> R:
    """Run a function on every process, and return its own result; if it fails on one, all raise."""
    result, failures = share_failures(step)
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise CheckpointError(f"saving or loading failed on process {rank}: {': '.join(failure)}")
    return result
