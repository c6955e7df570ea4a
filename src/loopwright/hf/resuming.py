"""Which checkpoint a run resumes, and what happens to an earlier run's checkpoints in the same folder."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from loopwright.checkpoint import store
from loopwright.errors import CheckpointError, ConfigError
from loopwright.hf.outputs import get_last_checkpoint
from loopwright.hf.state import STATE_FILE

_logger = logging.getLogger("loopwright.hf")


def resume_source(resume_from_checkpoint: Any, output_dir: str) -> str | None:
    """Return the checkpoint to resume from: a folder, "auto" for the newest complete checkpoint, or None.

    Raises:
        ConfigError: there is no such folder, or no checkpoint.
        CheckpointError: it was written by transformers.
    """
    if resume_from_checkpoint is None or resume_from_checkpoint is False:
        return None
    if resume_from_checkpoint is True:
        if store.has_checkpoints(output_dir):
            return "auto"
        last = get_last_checkpoint(output_dir)
        if last is None:
            raise ConfigError(
                f"resume_from_checkpoint=True, but {output_dir} holds no checkpoint: leave it out for a first run"
            )
        raise _of_transformers(Path(last))
    folder = Path(resume_from_checkpoint)
    if not folder.is_dir():
        raise ConfigError(f"resume_from_checkpoint={str(folder)!r} is not a folder. {_whole_ones(output_dir)}")
    if not (folder / store.MANIFEST).exists():
        if (folder / STATE_FILE).exists():
            raise _of_transformers(folder)
        if not store.has_checkpoints(folder):
            raise ConfigError(
                f"resume_from_checkpoint={str(folder)!r} holds no checkpoint: there is no {store.MANIFEST} in it, nor "
                f"in a folder below it. {_whole_ones(output_dir)}"
            )
    return str(folder)


def _whole_ones(output_dir: str) -> str:
    """List the checkpoints in the run's folder, for an error message."""
    names = sorted((path.name for path in store.checkpoint_folders(output_dir)), key=lambda name: (len(name), name))
    if not names:
        return f"There is no checkpoint in {output_dir} either: leave it out for a first run."
    return f"In {output_dir} there are {', '.join(names)}; True takes the newest."


def _of_transformers(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder} was written by transformers, or its {store.MANIFEST} is lost: its optimizer state is a pickle, "
        "which is not read here, and nothing says whether it is complete. Load its weights with from_pretrained "
        "and start a new run from them."
    )


def prepare_folder(output_dir: Path) -> None:
    """Make room for a new run: move the previous run's checkpoints aside, and remove older ones."""
    found = store.checkpoint_folders(output_dir)
    if not found:
        return
    for old in output_dir.glob(".superseded-*"):
        shutil.rmtree(old, ignore_errors=True)
    moved = store.set_aside_newer(output_dir, -1)
    (output_dir / "best.json").unlink(missing_ok=True)
    _logger.warning(
        "a new run starts in %s: the checkpoints of the run before (%s) are set aside as .superseded-*. "
        "train(resume_from_checkpoint=True) would have continued it.",
        output_dir,
        ", ".join(sorted(path.name for path in moved)),
    )
