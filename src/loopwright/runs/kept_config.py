"""A copy of a run's settings in each checkpoint, in case config.yaml is truncated or changed; then it imports torch."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from loopwright.config.config_file import is_cut_off
from loopwright.config.files import read_mapping
from loopwright.errors import CheckpointError, LoopwrightError
from loopwright.run_folder import RunFolder
from loopwright.run_folder.files import read_bytes, warn_once

DIGEST = "config_sha256"  # of config.yaml, in run.json


def kept_config(run: RunFolder) -> dict[str, bytes]:
    """Return config.yaml by name for a checkpoint; empty if it is missing, truncated, or not as the run wrote it."""
    with contextlib.suppress(LoopwrightError, OSError):
        if is_cut_off(run.config) or run.metadata.get(DIGEST) not in (None, digest_of(run)):
            return {}
    return {run.config.name: read_bytes(run.config)}


def config_of(run: RunFolder) -> Path:
    """Return config.yaml of a run or, if that is truncated, the copy in its newest checkpoint, if there is one.

    A file that is not the one that the run wrote is used, and its changes are reported.
    """
    if is_cut_off(run.config):
        copy = _copy_of(run)
        if copy is None:
            with contextlib.suppress(FileNotFoundError):
                read_bytes(run.config)  # a pipe would be waited for
        return copy or run.config
    known = run.metadata.get(DIGEST)
    if known is not None and known != digest_of(run):
        config, copy = run.config, _copy_of(run)
        if copy is None:
            what = "was edited or damaged since the run wrote it (its values are used)"
            warn_once(f"{config} {what}: which settings differ is unknown, as no checkpoint has a copy of it")
        else:
            then, now = read_mapping(copy), read_mapping(config)
            changed = [name for name in {**then, **now} if then.get(name) != now.get(name)]
            listed = [f"{name}: {then.get(name)!r} -> {now.get(name)!r}" for name in changed] or ["no setting differs"]
            what = f"was edited or damaged since {copy.parent.name} (its values are used)"
            warn_once(f"{config} {what}: {'; '.join(listed)}")
    return run.config


def digest_of(run: RunFolder) -> str:
    return hashlib.sha256(read_bytes(run.config)).hexdigest()


def _copy_of(run: RunFolder) -> Path | None:
    from loopwright.checkpoint.files import describe
    from loopwright.checkpoint.store import checkpoint_folders, read_manifest, update_of

    found = []
    for folder in checkpoint_folders(run.checkpoints):
        copy = folder / run.config.name
        try:
            manifest = read_manifest(folder)
            if manifest["files"].get(copy.name) == describe(copy):
                found.append((update_of(manifest), copy))
        except CheckpointError:
            continue  # bad checkpoints are reported where weights are loaded
    return max(found)[1] if found else None
