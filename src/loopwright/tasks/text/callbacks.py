"""Callbacks that write into the run folder: the first training batch, and samples of the model's output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from loopwright.callbacks import TrainerCallback
from loopwright.engine.memory import forget_frames, is_out_of_memory, release_memory
from loopwright.protocols import TrainerLike
from loopwright.run_folder import RunFolder
from loopwright.tasks.base import Job
from loopwright.tasks.scoring import write_lines
from loopwright.tasks.text.samples import SAMPLES, add_samples, cut, read

_MOST_LOGGED = 100  # characters


class FirstBatch(TrainerCallback):
    """Writes the first training batch of a run, as a text or a picture, unless the file exists."""

    def __init__(self, job: Job, path: Path, write: Callable[[Path, Mapping[str, Any]], None]) -> None:
        self._job = job
        self._path = path
        self._write = write

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if trainer.progress.update == 0 and not self._path.exists() and self._job.training.process_index == 0:
            # Listening to every step would keep the outputs of all of them.
            trainer.look_at_first_batch = partial(self._write, self._path)  # type: ignore[attr-defined] # a TaskTrainer


class SamplesAtEvaluations(TrainerCallback):
    """Appends samples of the model's output to eval/samples.jsonl at evaluations; an error is logged, not raised."""

    def __init__(self, job: Job, run: RunFolder) -> None:
        self._job = job
        self._path = run.evaluation / SAMPLES
        self._has_told = False

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Drop samples newer than the checkpoint that the run resumes from."""
        if self._job.training.process_index == 0 and self._path.exists():
            done = trainer.progress.update
            lines = read(self._path)  # samples of the best model, written at the end of a run, have no update
            kept = [line for line in lines if isinstance(line["update"], int) and line["update"] <= done]
            write_lines(self._path, kept)

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self._job.training.process_index != 0:
            return
        kept = trainer.first_samples  # type: ignore[attr-defined] # a TaskTrainer
        try:
            written = self._job.task.written_samples(self._job, kept)
            add_samples(self._path, trainer.progress.update, written)
            for sample in written if self._job.task.logs_samples else ():
                shown = (cut(str(sample[name]), _MOST_LOGGED) for name in ("source", "written", "true"))
                trainer.notify("samples.written", "{!r} -> {!r}   true: {!r}".format(*shown))
        except Exception as error:  # noqa: BLE001 - a model that generates may raise anything
            forget_frames(error)
            if is_out_of_memory(error):
                release_memory(trainer.device)
            if not self._has_told:
                self._has_told = True
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                text = f"no samples of the model's output ({reason}): the run continues"
                trainer.notify("samples.failed", text, error=error)
