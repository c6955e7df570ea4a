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

from loopwright.checkpoint import tensor_shards as shards
from loopwright.checkpoint.encoding import encode
from loopwright.checkpoint.state_by_name import untied
from loopwright.checkpoint.store import (
    MODEL,
    SHARDED_FORMAT,
    Checkpoint,
    Snapshot,
    aside_of,
    check_file_names,
    identify,
    prepare_aside,
    read,
    seal,
    stored,
    write_own,
    write_rest,
    write_tensor_file,
)
from loopwright.engine.processes import Agreement, gather_objects
from loopwright.engine.sharding import split_like
from loopwright.errors import CheckpointError
from loopwright.failpoints import failpoint

R = TypeVar("R")


@dataclass(frozen=True)
class ShardedSnapshot:
    """One process's share of the state of a run at an update boundary.

    Attributes:
        parts: its parts of split tensors, by their names in its file.
        table: where all parts of all processes belong.
        rest: everything that is not split; only rank 0 writes it.
    """

    parts: dict[str, torch.Tensor]
    table: shards.Table
    rest: Snapshot


def take_snapshot(
    model: Mapping[str, torch.Tensor], state: dict[str, Any], update: int, files: Mapping[str, bytes] | None = None
) -> ShardedSnapshot:
    """Encode a state, and agree on which process writes which part.

    Args:
        model: the weights by name.
        state: everything else.
        update: updates finished.
        files: extra files of the checkpoint, by name.

    Raises:
        CheckpointError: a value of the state cannot be saved, on any process.
    """

    def encoded() -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, torch.Tensor], Any]:
        check_file_names(files or ())
        weights, tied = untied(model)
        tensors: dict[str, torch.Tensor] = {}
        return weights, tied, tensors, encode(state, tensors)

    _, tied, tensors, text = everywhere(encoded)
    tied = gather_objects(tied)[0]  # tied weights are recognised by their memory address: one process decides
    weights = {MODEL + name: tensor for name, tensor in model.items() if name not in tied}
    everything = {**weights, **tensors}
    parts, table = shards.plan({name: tensor for name, tensor in everything.items() if shards.is_split(tensor)})
    rest = {name: tensor for name, tensor in everything.items() if not shards.is_split(tensor)}
    is_first = dist.get_rank() == 0
    own, kept = everywhere(lambda: (stored(parts), stored(rest) if is_first else {}))
    failpoint("after_snapshot")
    return ShardedSnapshot(own, table, Snapshot({}, kept, {**text, "tied": tied}, update, dict(files or {})))


def commit(
    snapshot: ShardedSnapshot,
    directory: str | Path,
    *,
    run_id: str = "",
    about: Mapping[str, Any] | None = None,
    is_ours: Callable[[], bool] = lambda: True,
    is_open: bool = False,
) -> Path:
    """Write every process's part to a temporary folder, and rename it into place once it is complete.

    Args:
        snapshot: this process's share.
        directory: the folder of the checkpoint.
        run_id: of the run.
        about: plain values that the manifest holds, readable without the rest.
        is_ours: called right before the rename, on rank 0: whether it still owns the folder.
        is_open: others may add files to the folder later; they are never read.

    Raises:
        CheckpointError: writing failed on any process.
        LeaseError: another process has taken the folder over.
    """
    final, rank = Path(directory), dist.get_rank()
    identity = gather_objects(identify(run_id, snapshot.rest.update))[0]
    aside = aside_of(final, identity)
    num_bytes = sum(part.nbytes for part in snapshot.parts.values())
    total = sum(gather_objects(num_bytes)) + snapshot.rest.num_bytes

    def begin() -> None:
        if rank == 0:
            prepare_aside(aside, total)

    def write_part() -> dict[str, Any]:
        files = write_tensor_file(aside, shards.file_of(rank), snapshot.parts, identity)
        return files | write_rest(aside, snapshot.rest, identity) if rank == 0 else files

    def finish() -> None:
        if rank == 0:
            listed = {name: one for files in written for name, one in files.items()}
            listed |= write_own(aside, shards.TABLE, {"tensors": snapshot.table}, identity)
            seal(aside, final, listed, identity, SHARDED_FORMAT, about, is_ours, is_open)

    try:
        everywhere(begin)
        written = gather_objects(everywhere(write_part))
        everywhere(finish)
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint {final}: {error}") from error
    finally:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)  # a no-op after the rename
    failpoint("after_commit")
    return final


def write(
    directory: str | Path,
    model: Mapping[str, torch.Tensor],
    state: dict[str, Any],
    update: int,
    *,
    run_id: str = "",
    about: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    is_open: bool = False,
) -> Path:
    """Write a checkpoint at once, as `store.write` does, with tensors of which some are split."""
    snapshot = take_snapshot(model, state, update, files)
    return commit(snapshot, directory, run_id=run_id, about=about, is_open=is_open)


def read_for(model: Mapping[str, Any], mesh: Any, directory: str | Path) -> Checkpoint:
    """Return the content of a checkpoint, split like the model of this run, however it was split when written.

    Args:
        model: the weights of the run as they are now.
        mesh: the processes over which they are split.
        directory: the checkpoint, sharded or not.

    Raises:
        CheckpointError: it is incomplete or damaged; each process verifies a part of the files, and all raise.
    """
    share = dist.get_rank(), dist.get_world_size()
    checkpoint = everywhere(lambda: read(directory, mesh, share))
    weights = {name: split_like(value, model.get(name, value)) for name, value in checkpoint.model.items()}
    optimizer = checkpoint.state.get("optimizer")
    if isinstance(optimizer, dict):
        kept = {
            name: {key: split_like(value, weights[name]) for key, value in entry.items()} if name in weights else entry
            for name, entry in optimizer["state"].items()
        }
        optimizer = {**optimizer, "state": kept}
    return replace(checkpoint, model=weights, state={**checkpoint.state, "optimizer": optimizer})


def everywhere(step: Callable[[], R]) -> R:
    """Run a function on every process, and return its own result; if it fails on one, all raise."""
    result, failure = None, None
    try:
        result = step()
    except BaseException as error:  # noqa: BLE001 - raised again below, once the others know
        failure = error
    told: list[str | None] = [None] * dist.get_world_size()
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    dist.all_gather_object(told, text, group=Agreement.group(is_patient=True))
    if failure is not None:
        raise failure
    for rank, cause in enumerate(told):
        if cause is not None:
            raise CheckpointError(f"saving or loading failed on process {rank}: {cause}")
    return result  # type: ignore[return-value]
