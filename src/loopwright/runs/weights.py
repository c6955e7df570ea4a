"""The weights of a run: which checkpoint to load them from, and a job with them."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from loopwright.checkpoint import find_newest, read
from loopwright.checkpoint.hidden_state import HiddenState
from loopwright.checkpoint.store import has_checkpoints, refusing_damage
from loopwright.engine import sharding
from loopwright.errors import CheckpointError
from loopwright.run_folder import RunFolder, read_json
from loopwright.tasks.base import Job
from loopwright.tasks.weight_average import average_in

_NONE = "checkpoint.none"


def newest_checkpoint(run: RunFolder) -> Path | None:
    if not has_checkpoints(run.checkpoints):
        return None
    try:
        return find_newest(run.checkpoints)[0]
    except CheckpointError as error:
        raise _unusable(run, error) from error


def best_checkpoint(run: RunFolder) -> Path | None:
    """Return the checkpoint of the best model, else the newest one; None if there is none."""
    named = read_json(run.checkpoints / "best.json", {}).get("checkpoint")
    if named and (run.checkpoints / named).is_dir():
        return run.checkpoints / str(named)
    return newest_checkpoint(run)


def load_weights(job: Job, run: RunFolder) -> Path:
    """Load the best weights of a run into a job's model, averaged if the run averages, and return their checkpoint."""
    path = best_checkpoint(run)
    if path is None:
        what = f"{run.path} has no checkpoint yet: its model has learnt nothing"
        raise CheckpointError(what, code=_NONE, fix=f"lw resume {quote(str(run.path))}")
    try:
        saved = read(path)
        with refusing_damage(path):
            weights = average_in(saved.state) or {**saved.model, **saved.state["model_extra"]}
            sharding.load_weights(job.model, weights)
            hidden = {"by_rank": [], **saved.state.get("hidden", {})}
            values = {**hidden.get("common", {}), **(hidden["by_rank"] or [{}])[0]}
            HiddenState(model=job.model).restore(values, next(job.model.parameters()).device)
    except CheckpointError as error:
        raise _unusable(run, error) from error
    return path


def _unusable(run: RunFolder, error: CheckpointError) -> CheckpointError:
    path = quote(str(run.path))
    saw = [f"lw verify {path} lists what is wrong with each checkpoint"]
    return CheckpointError(error.what, code=_NONE, saw=saw, fix=f"lw train {path}")
