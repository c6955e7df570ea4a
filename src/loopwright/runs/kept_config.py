"""The copy of a run's settings in each of its checkpoints, for a config.yaml that was cut off. No torch before that."""

from __future__ import annotations

from pathlib import Path

from loopwright.errors import CheckpointError
from loopwright.run_folder import RunFolder
from loopwright.run_folder.config_file import is_cut_off


def kept_config(run: RunFolder) -> dict[str, bytes]:
    """Return config.yaml by name, as a checkpoint keeps it; nothing if there is none, or it was cut off meanwhile."""
    return {} if is_cut_off(run.config) else {run.config.name: run.config.read_bytes()}


def config_of(run: RunFolder) -> Path:
    """Return the file of a run's settings: config.yaml, or if that was cut off, the copy in its newest checkpoint.

    If no checkpoint has a copy, it is config.yaml all the same: whoever reads it says what is wrong with it.
    """
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
            continue  # a bad one is dealt with where weights are read
    return max(found)[1] if found else run.config
