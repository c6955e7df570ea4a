"""Checkpoints in transformers' shape: `checkpoint-<step>` folders, adapters without their base model, resuming."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from loopwright.checkpoint import Checkpoint, store
from loopwright.checkpoint.hidden_state import Attributes
from loopwright.checkpoint.saver import Captured
from loopwright.engine.buffers import is_of_library
from loopwright.engine.processes import world_process_zero_only
from loopwright.errors import CheckpointError, ConfigError
from loopwright.hf.boundary import owner_of
from loopwright.hf.files import WEIGHTS, base_digest, changing, completed, holds_exactly, is_adapter
from loopwright.hf.transformers_checkpoint import foreign_checkpoints, is_foreign, read_foreign
from loopwright.training.checkpoints import RunCheckpoints

_logger = logging.getLogger("loopwright.hf")


class HfCheckpoints(RunCheckpoints):
    """Saves a run of an `hf.Trainer`."""

    _base: str | None = None
    _is_rehearsal = False

    def find(self, resume_from: str | Path | None) -> Path | None:
        """Move the checkpoints of an earlier run aside before a new one begins; this run already owns the folder."""
        policy = self.run.settings.checkpoints
        if resume_from is None and policy is not None:
            world_process_zero_only(prepare_folder)(Path(policy.directory))
        if resume_from is not None and is_foreign(Path(resume_from)):
            return Path(resume_from)
        return super().find(resume_from)

    def describe(self) -> None:
        super().describe()
        args = owner_of(self.run).args
        if args.ignore_data_skip:
            self.metadata |= {"tier": "T3", "guarantee": "ignore_data_skip: a resumed run begins its epoch again"}
        if args.save_only_model:
            self.metadata |= {"tier": "T3", "guarantee": "save_only_model: a checkpoint holds the model alone"}
            self.metadata["model_only"] = True

    def state_holders(self) -> dict[str, Attributes]:
        """Return the owner and its callbacks: libraries keep counters, buffered batches and averaged weights there."""
        owner = owner_of(self.run)
        foreign = [each for each in owner.callback_handler.callbacks if not is_of_library(each)]
        callbacks = {f"callbacks.{i}.{type(each).__name__}": Attributes(each, ()) for i, each in enumerate(foreign)}
        return {"trainer": Attributes(owner, owner.core.own_names), **callbacks}

    def read(self, path: str | Path) -> Checkpoint:
        if not is_foreign(Path(path)):
            return super().read(path)
        self.run.trainer.run_history.reset()
        return read_foreign(Path(path), self.run, super().capture({})[1])

    def set_aside_newer(self, directory: str | Path, update: int) -> list[Path]:
        newer = [path for saved, path in foreign_checkpoints(directory) if saved > update]
        # Beside a checkpoint of transformers, our own ones are of another run.
        is_other = self.resumed_from is not None and is_foreign(self.resumed_from)
        return store.set_aside_newer(directory, -1 if is_other else update, newer)

    def rehearse(self) -> None:
        self._is_rehearsal = True
        if owner_of(self.run).args.save_total_limit is not None:
            super().rehearse()
        elif self.saver is not None:
            world_process_zero_only(store.check_savable)(*self.capture({}))
        self._is_rehearsal = False

    def serve(self) -> None:
        """Save through the owner's `_save_checkpoint`, which may be overridden."""
        run, owner = self.run, owner_of(self.run)
        if not run.requests.saves or run.is_torn:
            super().serve()
            return
        owner._save_checkpoint(owner.core.model, trial=owner.core.hf_run.trial)
        for directory, _ in run.requests.saves:
            text = f"Not saving {directory}: {type(owner).__name__}._save_checkpoint never called super()"
            run.trainer.notify("checkpoint.unsaved", text, path=directory)
        run.requests.saves = []

    def write(self) -> None:
        """Write the checkpoints that are due; without any, one of the current update."""
        if not self.run.requests.saves:
            self.run.trainer.request_save(owner_of(self.run).core.hf_run.checkpoint_path(self.run.progress.update))
        super().serve()
        shutil.rmtree(self._aside, ignore_errors=True)

    @property
    def _aside(self) -> Path:
        """Where an overridden `_save` writes the files of a checkpoint first."""
        return Path(owner_of(self.run).core.hf_run.folder) / f".tmp-model-{self.run.progress.update}"

    def _saved_by_owner(self, weights: Mapping[str, Tensor]) -> dict[str, Path]:
        """Return the files that the owner's `save_model` writes; its weights only if they differ from these."""
        world_process_zero_only(shutil.rmtree)(self._aside, ignore_errors=True)
        owner_of(self.run).save_model(str(self._aside), _internal_call=True)
        found = {path.relative_to(self._aside).as_posix(): path for path in self._aside.rglob("*") if path.is_file()}
        for name in list(found):
            try:
                store.check_file_names([name])
            except CheckpointError as error:  # known only now: no reason to lose the run
                del found[name]
                _logger.warning("%s is left out: %s", name, error)
        if WEIGHTS in found and holds_exactly(found[WEIGHTS], weights):
            del found[WEIGHTS]
        return found

    def request(self, directory: str | Path, metadata: dict[str, Any] | None = None) -> None:
        run = self.run
        if run.is_ending:
            is_cut_short = run.signals.received is not None or run.stop_reason is not None
            if not is_cut_short or owner_of(run).core.hf_run.last_saved == run.progress.update:
                return
        if all(path != Path(directory) for path, _ in run.requests.saves):
            super().request(directory, metadata)

    def capture(self, metadata: dict[str, Any]) -> Captured:
        owner = owner_of(self.run)
        owner.core.switch_optimizer("eval")
        owner.core.hf_run.counters.store()
        if not owner.args.save_only_model:
            model, state, files = super().capture(metadata)
        else:
            model, extra = self.weights()
            state, files = {"model_extra": extra}, owner.core.checkpoint_files()
        if is_adapter(owner.model):
            self._base = self._base or base_digest(owner.model)
            model, state["adapter_base"] = changing(owner.model, model), self._base
        if owner.core.hf_run.owner_saves and not self._is_rehearsal:
            files = {**files, **self._saved_by_owner(model)}
        return model, state, files

    def restore(self, checkpoint: Checkpoint, path: Path | None = None) -> None:
        owner = owner_of(self.run)
        if path is not None and not owner.uses_default("_load_from_checkpoint"):
            owner._load_from_checkpoint(str(path))
        super().restore(completed(owner.model, checkpoint), path)
        if path is not None:
            owner._load_optimizer_and_scheduler(str(path))


def resume_source(resume_from_checkpoint: Any, output_dir: str) -> str | None:
    """Return the checkpoint to resume from: a folder, "auto" for the newest complete checkpoint, or None."""
    if resume_from_checkpoint is None or resume_from_checkpoint is False:
        return None
    if resume_from_checkpoint is True:
        has_own, foreign = store.has_checkpoints(output_dir), foreign_checkpoints(output_dir)
        if foreign and (not has_own or foreign[-1][0] > _newest_update(output_dir)):
            return str(foreign[-1][1])
        if has_own:
            return "auto"
        raise ConfigError(
            f"resume_from_checkpoint=True, but {output_dir} holds no checkpoint: leave it out for a first run"
        )
    folder = Path(resume_from_checkpoint)
    is_checkpoint = (folder / store.MANIFEST).exists() or is_foreign(folder)
    if not is_checkpoint and not store.has_checkpoints(folder):
        problem = "is not a folder"
        if folder.is_dir():
            problem = f"holds no checkpoint: there is no {store.MANIFEST} in it, nor in a folder below it"
        names = sorted((path.name for path in store.checkpoint_folders(output_dir)), key=lambda name: (len(name), name))
        others = f"There is no checkpoint in {output_dir} either: leave it out for a first run."
        if names:
            others = f"In {output_dir} there are {', '.join(names)}; True takes the newest."
        raise ConfigError(f"resume_from_checkpoint={str(folder)!r} {problem}. {others}")
    return str(folder)


def _newest_update(output_dir: str) -> int:
    """Return the update of the newest intact checkpoint of ours; -1 if all are damaged."""
    with suppress(CheckpointError):
        return store.update_of(store.read_manifest(str(store.find_newest(output_dir)[0])))
    return -1


def prepare_folder(output_dir: Path) -> None:
    """Make room for a new run: move the previous run's checkpoints aside, and remove older ones."""
    foreign = [path for _, path in foreign_checkpoints(output_dir)]
    if not foreign and not store.has_checkpoints(output_dir):
        return
    for old in output_dir.glob(".superseded-*"):
        shutil.rmtree(old, ignore_errors=True)
    moved = store.set_aside_newer(output_dir, -1, foreign)
    (output_dir / "best.json").unlink(missing_ok=True)
    _logger.warning(
        "a new run starts in %s: the checkpoints of the previous run (%s) are set aside as .superseded-*. "
        "To continue that run instead, call train(resume_from_checkpoint=True).",
        output_dir,
        ", ".join(sorted(path.name for path in moved)),
    )
