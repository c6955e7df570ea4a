"""Checkpoints on disk: written aside, hashed, synced, renamed; verified before they are read.

A checkpoint is a folder:

    model.safetensors   the weights under their own names, each tied weight once
    state.safetensors   every other tensor
    state.json          everything else, as tagged JSON
    MANIFEST.json       size and sha256 of the other files, the update, the format version

It exists when its manifest does. Nothing here can run code from a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from loopwright.checkpoint.encoding import decode, encode
from loopwright.checkpoint.named import untied
from loopwright.errors import CheckpointError

FORMAT = 1
MANIFEST = "MANIFEST.json"
_FILES = ("model.safetensors", "state.safetensors", "state.json")
_UNSAVABLE = (torch.complex32, torch.complex128)
_READ_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        model: the weights by name, tied ones under each of their names.
        state: everything else.
        update: the update it was written after.
    """

    model: dict[str, torch.Tensor]
    state: dict[str, Any]
    update: int


def write(directory: str | Path, model: Mapping[str, torch.Tensor], state: dict[str, Any], update: int) -> Path:
    """Write a checkpoint; an older one of the same name stays whole until the new one is.

    Args:
        directory: its folder.
        model: the weights by name.
        state: everything else; see `encoding.encode` for what it may hold.
        update: the update it belongs to; decides which checkpoint is newest.

    Raises:
        CheckpointError: something in the state cannot be saved, or the disk refuses.
    """
    final = Path(directory)
    weights, tied = untied(model)
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode({**state, "tied": tied}, tensors)
    aside = final.with_name(f".tmp-{final.name}-{uuid.uuid4().hex[:8]}")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        save_file(stored(weights), aside / "model.safetensors", metadata={"format": "pt"})
        save_file(stored(tensors), aside / "state.safetensors")
        (aside / "state.json").write_text(json.dumps(encoded, allow_nan=False))
        files = {name: _describe(aside / name) for name in _FILES}
        for name in _FILES:
            _sync(aside / name)
        body = {"format": FORMAT, "update": update, "files": files}
        (aside / MANIFEST).write_text(json.dumps({**body, "sha256": _digest_of(body)}, indent=1))
        _sync(aside / MANIFEST)
        _sync(aside)
        _swap_in(aside, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(f"cannot write the checkpoint {final}: {error}") from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def read(directory: str | Path) -> Checkpoint:
    """Verify a checkpoint and return what it holds.

    Raises:
        CheckpointError: it is incomplete or damaged; it names the file and what is wrong with it.
    """
    folder = Path(directory)
    restore_moved(folder)
    manifest = verify(folder)
    weights = load_file(folder / "model.safetensors")
    tensors = load_file(folder / "state.safetensors")
    state = decode(json.loads((folder / "state.json").read_text()), tensors)
    for name, stored_as in state.pop("tied").items():
        weights[name] = weights[stored_as]
    return Checkpoint(weights, state, manifest["update"])


def verify(directory: str | Path) -> dict[str, Any]:
    """Check every byte of a checkpoint against its manifest, and return the manifest.

    Raises:
        CheckpointError: something is missing, extra, or not what was written.
    """
    folder = Path(directory)
    manifest = _read_manifest(folder)
    present = {entry.name for entry in os.scandir(folder)} - {MANIFEST}
    if present != set(_FILES):
        missing, extra = sorted(set(_FILES) - present), sorted(present - set(_FILES))
        raise CheckpointError(f"{folder}: missing files {missing or 'none'}, unlisted files {extra or 'none'}")
    for name, expected in manifest["files"].items():
        found = _describe(folder / name)
        if found != expected:
            raise CheckpointError(f"{folder / name} is damaged: {found} instead of {expected}")
    return manifest


def find_newest(directory: str | Path) -> tuple[Path | None, list[CheckpointError]]:
    """Return the newest checkpoint in a folder that is whole, and what is wrong with newer ones.

    Raises:
        CheckpointError: there are checkpoints, but none is whole; a fresh start would hide that.
    """
    found: list[tuple[int, Path]] = []
    problems: list[CheckpointError] = []
    for path in _folders(directory):
        try:
            found.append((_read_manifest(path)["update"], path))
        except CheckpointError as error:
            problems.append(error)
    for _, path in sorted(found, reverse=True):
        try:
            verify(path)
            return path, problems
        except CheckpointError as error:
            problems.append(error)
    if problems:
        raise CheckpointError(
            "no checkpoint can be trusted: "
            + "; ".join(str(problem) for problem in problems)
            + ". Move them away to start from scratch."
        )
    return None, problems


def has_checkpoints(directory: str | Path) -> bool:
    """Whether a folder holds anything that claims to be a checkpoint."""
    return bool(_folders(directory))


def prune(directory: str | Path, keep_last: int, protected: Path | None = None) -> None:
    """Remove all but the newest `keep_last` checkpoints of a folder, never the protected one."""
    found = []
    for path in Path(directory).glob("step-*"):
        try:
            found.append((_read_manifest(path)["update"], path))
        except CheckpointError:
            continue  # never counted, never removed: it may be the only evidence of what went wrong
    for _, path in sorted(found)[: -max(keep_last, 1)]:
        if protected is None or path.resolve() != protected.resolve():
            doomed = path.with_name(f".del-{path.name}-{uuid.uuid4().hex[:8]}")
            os.rename(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def write_file(path: str | Path, write_to: Any) -> None:
    """Write one file through a function that is given a temporary name, then sync and rename it into place."""
    final = Path(path)
    aside = final.with_name(f".tmp-{final.name}-{uuid.uuid4().hex[:8]}")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        write_to(aside)
        _sync(aside)
        os.replace(aside, final)
        _sync(final.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _folders(directory: str | Path) -> list[Path]:
    """Return the sub-folders with a manifest; hidden ones are being written or removed."""
    folder = Path(directory)
    if not folder.is_dir():
        return []
    for moved in folder.glob(".old-*"):
        restore_moved(folder / moved.name.removeprefix(".old-"))
    return [path for path in folder.iterdir() if not path.name.startswith(".") and (path / MANIFEST).exists()]


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        digest = manifest.pop("sha256")
        damaged = digest != _digest_of(manifest)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {error}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {error}") from error
    if damaged:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: its own sha256 does not match")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{folder} has format {manifest['format']}, this version reads {FORMAT}")
    result: dict[str, Any] = manifest
    return result


def stored(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors as safetensors takes them: contiguous, and none sharing memory with another.

    Raises:
        CheckpointError: one of them is of a kind that safetensors does not know; it names it.
    """
    result: dict[str, torch.Tensor] = {}
    memories: set[tuple[torch.device, int]] = set()
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.dtype in _UNSAVABLE:
            raise CheckpointError(f"{name} is a {tensor.layout} {tensor.dtype} on {tensor.device}: cannot be saved")
        storage = tensor.untyped_storage()
        memory = (tensor.device, storage.data_ptr())
        # A view, and what another name has already, gets memory of its own: safetensors refuses to share it.
        if storage.nbytes() != tensor.nbytes or memory in memories:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        memories.add(memory)
        result[name] = tensor.detach().contiguous()
    return result


def _describe(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def _digest_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap_in(aside: Path, final: Path) -> None:
    old = final.with_name(f".old-{final.name}")
    restore_moved(final)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    try:
        os.rename(aside, final)
    except BaseException:
        restore_moved(final)
        raise
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore_moved(final: Path) -> None:
    """Put back a checkpoint that was moved aside for a new one which was then not put in its place."""
    old = final.with_name(f".old-{final.name}")
    if not final.exists() and old.exists():
        os.rename(old, final)
