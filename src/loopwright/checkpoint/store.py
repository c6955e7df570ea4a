"""Checkpoints on disk: written aside, hashed, synced, renamed; verified before they are read.

A checkpoint is a folder:

    model.safetensors   the weights under their own names, each tied weight once
    state.safetensors   every other tensor
    state.json          everything else, as tagged JSON
    ...                 further files that the run wants beside its weights, such as a config.json; one of them may be a
                        model.safetensors with other names, and then the weights are in weights.safetensors
    MANIFEST.json       written last: size and sha256 of the other files, its own sha256, the update, the run's id,
                        and what the run is about: its fingerprint, settings, data

The checkpoint of a sharded model has shard-*.safetensors and shards.json in place of model.safetensors
(`sharded_checkpoint.py`).

It exists once its manifest does. Every file names its run, update and attempt, so a foreign file is detected. Nothing
here can run code from a file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from loopwright.checkpoint import tensor_file
from loopwright.checkpoint import tensor_shards as shards
from loopwright.checkpoint.atomic_replace import OLD, put_in_place, read_steadily, steady
from loopwright.checkpoint.encoding import decode, encode
from loopwright.checkpoint.files import TOO_LARGE, HashedFile, describe, open_regular, within
from loopwright.checkpoint.staging import Staging
from loopwright.checkpoint.state_by_name import untied
from loopwright.checkpoint.tensor_file import check_header, check_kind, check_parsable, parse_json, write_tensors
from loopwright.engine.joint_failure import is_of_another_process
from loopwright.engine.memory import is_out_of_memory
from loopwright.errors import CheckpointError, LoopwrightError
from loopwright.failpoints import failpoint
from loopwright.run_folder.files import fsync_folder, give_usual_mode, make_folder, sealed
from loopwright.run_folder.lease import LeaseError

FORMAT = 1
SHARDED_FORMAT = 2
MANIFEST = "MANIFEST.json"
MODEL = "model/"  # prefix of weight names among other tensors
_FILES = ("model.safetensors", "state.safetensors", "state.json")
_SHARDED_FILES = ("state.safetensors", "state.json", shards.TABLE)
_OWN_WEIGHTS = "weights.safetensors"
_DEEPEST = 4  # folders around a further file
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}"
_FILE_NAME = re.compile(rf"{_PART}(/{_PART}){{0,{_DEEPEST}}}")
SPARE = "is_spare"  # of a manifest's metadata: saved by `spare_seconds`
_NUM_SPARE = 2
_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, SafetensorError)
_DICTS = ("fingerprint", "settings", "data", "best")  # of a manifest's values for the run
_LARGEST_MANIFEST_BYTES = 1_000_000
_LARGEST_STATE_BYTES = 200_000_000


Files = Mapping[str, bytes | Path]  # further files by their names in the checkpoint: contents, or files to copy


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        model: the weights by name, tied ones under each of their names.
        about: the manifest's values for the run: fingerprint, settings, data.
    """

    model: dict[str, torch.Tensor]
    state: dict[str, Any]
    update: int
    about: dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at an update boundary, ready to be written by any thread."""

    model: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]
    encoded: Any
    update: int
    files: Files

    @property
    def num_bytes(self) -> int:
        """The size of all tensors and extra files."""
        tensors = sum(tensor.nbytes for tensor in (*self.model.values(), *self.tensors.values()))
        sizes = (len(each) if isinstance(each, bytes) else each.stat().st_size for each in self.files.values())
        return tensors + sum(sizes)


def take_snapshot(
    model: Mapping[str, torch.Tensor],
    state: dict[str, Any],
    update: int,
    staging: Staging | None = None,
    files: Files | None = None,
) -> Snapshot:
    """Encode a state; copy its tensors into staging memory if training continues while it is written."""
    weights, tensors, encoded = _encoded(model, state, files or ())
    if staging is None:
        weights, tensors = stored(weights), stored(tensors)
    else:
        weights, tensors = staging.copy("model/", weights), staging.copy("state/", tensors)
    failpoint("after_snapshot")
    return Snapshot(weights, tensors, encoded, update, dict(files or {}))


def check_savable(model: Mapping[str, torch.Tensor], state: dict[str, Any], files: Iterable[str] = ()) -> int:
    """Encode a state without copying or writing it, and return the bytes of its tensors; called before training."""
    weights, tensors, encoded = _encoded(model, state, files)
    for name, tensor in (*weights.items(), *tensors.items()):
        check_kind(name, tensor)
    num_bytes = sum(tensor.nbytes for tensor in (*weights.values(), *tensors.values()))
    headers = tensor_file.header_text(weights, {}), tensor_file.header_text(tensors, {})
    _json_text("state.json", {"state": encoded}, num_bytes + sum(map(len, headers)))
    return num_bytes


def _encoded(
    model: Mapping[str, torch.Tensor], state: dict[str, Any], files: Iterable[str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
    """Return the weights, all other tensors, and the rest of the state as JSON."""
    check_file_names(files)
    weights, tied = untied(model)
    tensors: dict[str, torch.Tensor] = {}
    return weights, tensors, encode({**state, "tied": tied}, tensors)


def nonfinite_weights(model: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of the weights and buffers that contain nan or inf."""
    weights = {name: weight for name, weight in model.items() if weight.is_floating_point() and weight.numel()}
    # A finite sum proves that all values are finite, and costs half of checking each; but it may overflow.
    suspects = [name for name, weight in weights.items() if not bool(weight.sum(dtype=torch.float32).isfinite())]
    return {name for name in suspects if not bool(weights[name].isfinite().all())}


class Label(NamedTuple):
    """What a manifest records about its run, and who may write it."""

    run_id: str = ""
    metadata: Mapping[str, Any] | None = None  # plain values, readable without the rest
    is_open: bool = False  # others may add files to the folder later; they are never read
    # Called first and right before the rename: whether this process still owns the folder; a LeaseError if it is gone.
    is_ours: Callable[[], bool] = lambda: True


@dataclass(frozen=True)
class Draft:
    """A checkpoint written to a temporary folder, until `seal` renames it; every file carries its identity."""

    final: Path  # the folder that it becomes
    identity: Mapping[str, str]
    files: dict[str, Any] = field(default_factory=dict)  # the size and sha256 of each file written so far, by name

    @property
    def folder(self) -> Path:
        """The temporary folder."""
        return self.final.with_name(f".tmp-{self.final.name}-{self.identity['attempt']}")

    def create(self, num_bytes: int, label: Label) -> None:
        """Create the temporary folder; raise an OSError if the disk has too little space."""
        label.is_ours()  # raises if the run folder was moved: nothing is created in its old place
        make_folder(self.final.parent)
        free = shutil.disk_usage(self.final.parent).free
        if free < 1.05 * num_bytes:
            raise OSError(errno.ENOSPC, f"{free} bytes are free, the checkpoint takes {num_bytes}")
        self.folder.mkdir()

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write one file of tensors."""
        with HashedFile(self.folder / name) as file:
            write_tensors(file, tensors, {"format": "pt", **self.identity})
        self.files[name] = file.describe()

    def write_file(self, name: str, content: bytes | Path) -> None:
        """Write one file: a content, or a copy of another file."""
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        with HashedFile(self.folder / name) as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                file.copy(content)
        self.files[name] = file.describe()

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file that names its checkpoint."""
        self.write_file(name, _json_text(name, {"identity": self.identity, **content}, _tensor_bytes(self.files)))

    def write_rest(self, snapshot: Snapshot) -> None:
        """Write everything but the weights."""
        self.write_tensors("state.safetensors", snapshot.tensors)
        for name, content in snapshot.files.items():
            self.write_file(name, content)
        self.write_json("state.json", {"state": snapshot.encoded})

    def seal(self, kind: int, label: Label) -> None:
        """Write the manifest of the complete folder, and rename it into place."""
        failpoint("pre_manifest")
        about = {"about": dict(label.metadata or {}), "is_open": label.is_open}
        content = _canonical({"format": kind, "identity": self.identity, "files": self.files, **about})
        with HashedFile(self.folder / MANIFEST) as file:
            file.write(within(content, _LARGEST_MANIFEST_BYTES, MANIFEST))
        for folder in {(self.folder / name).parent for name in self.files}:
            fsync_folder(folder)
        failpoint("pre_rename")
        if not label.is_ours():
            raise LeaseError(f"not committing {self.final}: another process has taken over the run folder")
        put_in_place(self.folder, self.final)


def identify(run_id: str, update: int) -> dict[str, str]:
    """Return the identity that every file of a new checkpoint carries."""
    return {"run_id": run_id, "update": str(update), "attempt": uuid.uuid4().hex[:8]}


def commit(snapshot: Snapshot, directory: str | Path, label: Label) -> Path:
    """Write a snapshot to a temporary folder and rename it into place; the rename makes it a checkpoint."""
    draft = Draft(Path(directory), identify(label.run_id, snapshot.update))
    try:
        draft.create(snapshot.num_bytes, label)
        draft.write_tensors(_OWN_WEIGHTS if _FILES[0] in snapshot.files else _FILES[0], snapshot.model)
        draft.write_rest(snapshot)
        draft.seal(FORMAT, label)
    except BaseException as error:
        shutil.rmtree(draft.folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot write the checkpoint {draft.final}: {error}") from error
        raise
    failpoint("after_commit")
    return draft.final


def write(
    directory: str | Path,
    model: Mapping[str, torch.Tensor],
    state: dict[str, Any],
    update: int,
    *,
    run_id: str = "",
    about: Mapping[str, Any] | None = None,
    files: Files | None = None,
    is_open: bool = False,
) -> Path:
    """Write a checkpoint at once; an older one of the same name stays intact until the new one is.

    Args:
        about: plain values for the manifest, readable without the rest.
        files: extra files, by name.
        is_open: others may add files to the folder later; they are never read.

    Raises:
        CheckpointError: a value cannot be saved, or writing failed.
    """
    return commit(take_snapshot(model, state, update, files=files), directory, Label(run_id, about, is_open))


@steady
def read(directory: str | Path, mesh: Any = None, share: tuple[int, int] = (0, 1)) -> Checkpoint:
    """Verify a checkpoint and return its content.

    A sharded checkpoint is split over the processes of a mesh; None reads whole tensors. `share` is as in `verify`,
    which raises a CheckpointError for a checkpoint that is incomplete or damaged.
    """
    folder = Path(directory)
    manifest = verify(folder, share)
    failpoint("mid_load")
    content = _read_own(folder, "state.json", manifest)
    with refusing_damage(folder):
        tensors = load_file(folder / "state.safetensors")
        if manifest["format"] == SHARDED_FORMAT:
            tensors.update(shards.read_split(folder, read_table(folder, manifest), mesh))
            weights = {name.removeprefix(MODEL): tensors.pop(name) for name in list(tensors) if name.startswith(MODEL)}
        else:
            weights = load_file(folder / _weights_file(manifest))
        state = decode(content["state"], tensors)
        for name, stored_as in state.pop("tied").items():
            weights[name] = weights[stored_as]
    return Checkpoint(weights, state, update_of(manifest), manifest["about"])


@contextlib.contextmanager
def refusing_damage(folder: Path | None) -> Iterator[None]:
    """Turn what a state of unexpected types raises into a CheckpointError."""
    try:
        yield
    except _DAMAGE as error:
        if isinstance(error, LoopwrightError) or is_out_of_memory(error) or is_of_another_process(error):
            raise
        raise CheckpointError(f"{folder} cannot be restored: {type(error).__name__}: {str(error)[:500]}") from error


def read_table(folder: Path, manifest: Mapping[str, Any]) -> shards.Table:
    """Return the location of each part of each tensor of a sharded checkpoint."""
    table = _read_own(folder, shards.TABLE, manifest).get("tensors")
    if not isinstance(table, dict):
        raise CheckpointError(f"{folder / shards.TABLE} is damaged: it names no tensors")
    return table


def _json_text(name: str, content: Mapping[str, Any], tensor_bytes: int) -> bytes:
    """Return a JSON file; raise a CheckpointError with its largest part if reading would refuse it."""
    text = json.dumps(content, allow_nan=False).encode()
    try:
        check_parsable(text, name, tensor_bytes)
        return within(text, _LARGEST_STATE_BYTES, name)
    except CheckpointError as error:
        items: Any = content
        keys: list[str] = []
        while len(keys) < 4 and isinstance(items, (dict, list)) and items:
            entries = items.items() if isinstance(items, dict) else enumerate(items)
            key, items = max(entries, key=lambda entry: len(json.dumps(entry[1])))
            keys.append(str(key)[:80])
        raise CheckpointError(f"{error}; its largest part is {'.'.join(keys)}", code=TOO_LARGE) from None


def _tensor_bytes(files: Mapping[str, Any]) -> int:
    return sum(entry["size"] for name, entry in files.items() if name.endswith(".safetensors"))


def _read_own(folder: Path, name: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    path = folder / name
    content = parse_json(_read_bytes(path, _LARGEST_STATE_BYTES), path, _tensor_bytes(manifest["files"]))
    if content.get("identity") != manifest["identity"]:
        raise CheckpointError(f"{path} belongs to another checkpoint")
    return content


@steady
def verify(directory: str | Path, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Check every byte of a checkpoint against its manifest, and return the manifest.

    `share` is rank and world size, if each process reads a part of the files. A CheckpointError names a file that is
    missing, extra or changed.
    """
    folder = Path(directory)
    manifest = read_manifest(folder)
    present = _present(folder) - {MANIFEST}
    listed = set(manifest["files"])
    if listed - present or (present - listed and not manifest["is_open"]):
        missing, extra = sorted(listed - present), sorted(present - listed)
        raise CheckpointError(f"{folder}: missing files {missing or 'none'}, unlisted files {extra or 'none'}")
    for name in {"state.json", shards.TABLE} & listed:
        check_parsable(manifest["files"][name]["size"], folder / name, _tensor_bytes(manifest["files"]))
    index, count = share
    for name in sorted(listed)[index::count]:
        found, expected = describe(folder / name), manifest["files"][name]
        if found != expected:
            sizes = [f"{each['size']} bytes with sha256 {str(each['sha256'])[:12]}..." for each in (found, expected)]
            raise CheckpointError(f"{folder / name} is damaged: {sizes[0]} instead of {sizes[1]}")
    is_sharded = manifest["format"] == SHARDED_FORMAT
    own = sorted(filter(shards.is_shard_file, listed)) if is_sharded else [_weights_file(manifest)]
    written = [*own, "state.safetensors"]
    headers = {name: check_header(folder / name, {"format": "pt", **manifest["identity"]}) for name in written}
    if is_sharded:
        del headers["state.safetensors"]
        shards.check_table(read_table(folder, manifest), headers, folder / shards.TABLE)
    return manifest


def _present(folder: Path, prefix: str = "") -> set[str]:
    """Return the files in a folder by their relative names; a link or an empty folder counts as a file."""
    found: set[str] = set()
    for entry in os.scandir(folder):
        is_searched = prefix.count("/") < _DEEPEST and entry.is_dir(follow_symlinks=False)
        inner = _present(folder / entry.name, f"{prefix}{entry.name}/") if is_searched else None
        found |= inner or {prefix + entry.name}
    return found


def _weights_file(manifest: Mapping[str, Any]) -> str:
    return _OWN_WEIGHTS if _OWN_WEIGHTS in manifest["files"] else _FILES[0]


@steady
def read_manifest(directory: str | Path) -> dict[str, Any]:
    """Return a checkpoint's manifest, checked against its own hash, without reading the other files."""
    folder = Path(directory)
    path = folder / MANIFEST
    if not os.path.lexists(path):
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}")
    content = _read_bytes(path, _LARGEST_MANIFEST_BYTES)
    manifest = parse_json(content, path)
    manifest.pop("sha256", None)
    kind = manifest.get("format")
    if type(kind) is not int or kind not in (FORMAT, SHARDED_FORMAT):
        raise CheckpointError(f"{folder} has format {kind}, this version reads formats {FORMAT} and {SHARDED_FORMAT}")
    if _canonical(manifest) != content:
        raise CheckpointError(f"{path} is damaged: its own sha256 does not match")
    about = manifest.setdefault("about", {})
    if not (_is_identity(manifest.get("identity")) and isinstance(manifest.get("is_open"), bool)):
        raise CheckpointError(f"{path} does not name its run and update")
    if not isinstance(about, dict) or not all(isinstance(about.get(name) or {}, dict) for name in _DICTS):
        raise CheckpointError(f"{path} is damaged: its entries about the run have unexpected types")
    listed, needed = manifest.get("files"), _SHARDED_FILES if kind == SHARDED_FORMAT else _FILES
    if (
        not isinstance(listed, dict)
        or not set(needed) <= set(listed)
        or not all(_FILE_NAME.fullmatch(name) and _is_description(entry) for name, entry in listed.items())
    ):
        listed = list(listed)[:20] if isinstance(listed, dict) else listed
        raise CheckpointError(f"{path} lists {listed}; it must list {sorted(needed)}, and plain names only")
    return manifest


def _is_description(value: Any) -> bool:
    """Whether this is the size and sha256 of a file."""
    is_dict = isinstance(value, dict) and type(value.get("size")) is int and value["size"] >= 0
    return is_dict and isinstance(value.get("sha256"), str)


def _is_identity(value: Any) -> bool:
    names = ("run_id", "update", "attempt")
    is_whole = isinstance(value, dict) and all(isinstance(value.get(name), str) for name in names)
    return is_whole and re.fullmatch(r"[0-9]{1,18}", value["update"]) is not None


def update_of(manifest: Mapping[str, Any]) -> int:
    """Return the update of a checkpoint from its manifest."""
    return int(manifest["identity"]["update"])


def find_newest(directory: str | Path, quarantine: bool = False) -> tuple[Path | None, list[CheckpointError]]:
    """Return the newest intact checkpoint in a folder, and the errors of newer ones.

    Any sub-folder with a manifest counts, ordered by update. Damaged ones are renamed to `.bad-...` to `quarantine`
    them. If none is intact, a CheckpointError is raised: a fresh start would hide that.
    """
    found, bad = _by_update(checkpoint_folders(directory))
    newest = None
    for _, path in reversed(found):
        try:
            verify(path)
            newest = path
            break
        except CheckpointError as error:
            bad.append((path, error))
    problems = [error for _, error in bad]
    if newest is None and problems:
        listed = "; ".join(str(problem) for problem in problems)
        raise CheckpointError(f"no checkpoint can be trusted: {listed}. Move them away to start from scratch.")
    for path, _ in bad if quarantine else ():
        failpoint("mid_quarantine")
        os.rename(path, path.with_name(f".bad-{path.name}-{uuid.uuid4().hex[:8]}"))
    return newest, problems


def set_aside_newer(directory: str | Path, update: int, others: Iterable[Path] = ()) -> list[Path]:
    """Rename checkpoints newer than an update, and others, to `.superseded-...`; return their old names."""
    newer = [path for saved, path in _by_update(checkpoint_folders(directory))[0] if saved > update] + [*others]
    for path in newer:
        os.rename(path, path.with_name(f".superseded-{path.name}-{uuid.uuid4().hex[:8]}"))
    return newer


def _by_update(paths: Iterable[Path]) -> tuple[list[tuple[int, Path]], list[tuple[Path, CheckpointError]]]:
    """Return the checkpoints with their updates, oldest first, and the damaged ones with their errors."""
    found, bad = [], []
    for path in paths:
        try:
            found.append((update_of(read_manifest(path)), path))
        except CheckpointError as error:
            bad.append((path, error))
    return sorted(found), bad


def has_checkpoints(directory: str | Path) -> bool:
    """Whether a folder holds anything that claims to be a checkpoint."""
    return bool(checkpoint_folders(directory))


def prune(directory: str | Path, keep_last: int, protected: Iterable[Path] = (), pattern: str = "step-*") -> None:
    """Remove all but the newest `keep_last` checkpoints (at least one) whose names match, never a protected one.

    Spare ones are not counted: they are kept while they are one of the newest two.
    """
    kept = {Path(path).resolve() for path in protected}
    found, _ = _by_update(Path(directory).glob(pattern))  # a damaged one stays: it may be the only evidence
    spare = [path for _, path in found if read_manifest(path).get("about", {}).get(SPARE)]
    regular = [path for _, path in found if path not in spare]
    newest = [path for _, path in found[-_NUM_SPARE:]]
    for path in (*regular[: -max(keep_last, 1)], *spare):
        if path.resolve() not in kept and not (path in spare and path in newest):
            doomed = path.with_name(f".del-{path.name}-{uuid.uuid4().hex[:8]}")
            os.rename(path, doomed)
            failpoint("mid_prune")
            shutil.rmtree(doomed, ignore_errors=True)


def clean(directory: str | Path) -> None:
    """Remove the partial files of a dead process; only for the owner of the folder."""
    for pattern in (".tmp-*", ".del-*"):
        for path in Path(directory).glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    for moved in Path(directory).glob(f"{OLD}*"):
        with contextlib.suppress(CheckpointError):  # then the folder moved aside is better than its replacement
            verify(moved.with_name(moved.name.removeprefix(OLD)))
            shutil.rmtree(moved, ignore_errors=True)


def write_file(path: str | Path, write_to: Any) -> None:
    """Write one file under a temporary name through a function, then sync and rename it into place."""
    final = Path(path)
    # torch rejects a file name whose only dot is its first letter.
    aside = final.with_name(f".tmp-{final.name}-{uuid.uuid4().hex[:8]}{'' if final.suffix else '.part'}")
    try:
        make_folder(final.parent)
        write_to(aside)
        give_usual_mode(aside)
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, final)
        fsync_folder(final.parent)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, (RuntimeError, SafetensorError)):  # raised for a full or failing disk
            raise OSError(errno.EIO, f"cannot be written, maybe the disk is full: {error}", str(final)) from error
        raise


def stored(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors ready to write: on the host, contiguous, none sharing memory with another."""
    result: dict[str, torch.Tensor] = {}
    memories: set[int] = set()
    for name, tensor in tensors.items():
        check_kind(name, tensor)
        plain = tensor.detach().cpu().contiguous()
        memory = plain.untyped_storage().data_ptr()
        if plain.untyped_storage().nbytes() != plain.nbytes or memory in memories:
            plain = plain.clone()
        memories.add(memory)
        result[name] = plain
    return result


def checkpoint_folders(directory: str | Path) -> list[Path]:
    """Return the sub-folders with a manifest; hidden ones are being written or removed."""
    folder = Path(directory)
    if not folder.is_dir():
        return []
    names = dict.fromkeys(name.removeprefix(OLD) for name in os.listdir(folder))
    return [folder / name for name in names if not name.startswith(".") and _is_checkpoint(folder / name)]


def _is_checkpoint(path: Path) -> bool:
    try:
        read_steadily(path, lambda: os.lstat(path / MANIFEST))
    except OSError:
        return False
    return True


def check_file_names(names: Iterable[str]) -> None:
    """Raise a CheckpointError for extra files with names that a checkpoint reserves."""
    for name in names:
        is_taken = name in (_OWN_WEIGHTS, *_FILES[1:], shards.TABLE, MANIFEST) or shards.is_shard_file(name)
        if is_taken or not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"a checkpoint cannot hold a further file called {name!r}: it must be a plain name")


def _read_bytes(path: Path, largest: int) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > largest:
            raise CheckpointError(f"{path} is damaged: it is larger than {largest} bytes")
        return file.read()


def _canonical(body: Mapping[str, Any]) -> bytes:
    """Return a manifest's bytes in canonical form, so that every changed byte is noticed."""
    return json.dumps(sealed(body), sort_keys=True, indent=1).encode()
