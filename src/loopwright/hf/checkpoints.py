"""Checkpoints in transformers' shape: `checkpoint-<step>` folders, adapters without their base model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopwright.checkpoint import Checkpoint
from loopwright.checkpoint.saver import Captured
from loopwright.checkpoint.store import check_savable
from loopwright.engine.processes import world_process_zero_only
from loopwright.hf.adapters import base_digest, changing, completed, is_adapter
from loopwright.hf.resuming import prepare_folder
from loopwright.training.checkpoints import RunCheckpoints
from loopwright.training.run import TrainingRun

if TYPE_CHECKING:
    from loopwright.hf.trainer import Trainer


class HfCheckpoints(RunCheckpoints):
    """Saves a run of an `hf.Trainer`."""

    def __init__(self, run: TrainingRun, owner: Trainer) -> None:
        super().__init__(run)
        self._owner = owner
        self._base: str | None = None

    def find(self, resume_from: str | Path | None) -> Path | None:
        """Move the checkpoints of an earlier run aside before a new one begins; this run already owns the folder."""
        policy = self.run.settings.checkpoints
        if resume_from is None and policy is not None:
            world_process_zero_only(prepare_folder)(Path(policy.directory))
        return super().find(resume_from)

    def rehearse(self) -> None:
        """Check that everything can be saved; without a limit, disk space is not checked."""
        if self._owner.args.save_total_limit is not None:
            super().rehearse()
        elif self.saver is not None:
            world_process_zero_only(check_savable)(*self.capture({}))

    def request(self, directory: str | Path, metadata: dict[str, Any] | None = None) -> None:
        """Request a checkpoint, once; the final one only if the run is cut short."""
        run = self.run
        if run.is_ending:
            is_cut_short = run.signals.received is not None or run.stop_reason is not None
            if not is_cut_short or self._owner.core.hf_run.last_saved == run.progress.update:
                return
        if all(path != Path(directory) for path, _ in run.requests.saves):
            super().request(directory, metadata)

    def capture(self, metadata: dict[str, Any]) -> Captured:
        """Capture the weights used for evaluation; for an adapter, only the trained ones."""
        owner = self._owner
        owner.core.switch_optimizer("eval")
        model, state, files = super().capture(metadata)
        if is_adapter(owner.model):
            self._base = base_digest(owner.model) if self._base is None else self._base
            model, state["adapter_base"] = changing(owner.model, model), self._base
        return model, state, files

    def restore(self, checkpoint: Checkpoint) -> None:
        super().restore(completed(self._owner.model, checkpoint))
