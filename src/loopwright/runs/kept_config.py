"""A copy of a run's settings in each checkpoint, in case config.yaml is truncated. Imports torch only then."""

from __future__ import annotations

from pathlib import Path

from loopwright.errors import CheckpointError
from loopwright.run_folder import RunFolder
from loopwright.run_folder.config_file import is_cut_off


def kept_config(run: RunFolder) -> dict[str, bytes]:
    """Return config.yaml by name for a checkpoint; empty if it is missing or truncated."""
    return {} if is_cut_off(run.config) else {run.config.name: run.config.read_bytes()}


def config_of(run: RunFolder) -> Path:
    """Return config.yaml of a run or, if that is truncated, the copy in its newest checkpoint, if there is one."""
    if not is_cut_off(run.config):
        return run.config
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
    return max(found)[1] if found else run.config
