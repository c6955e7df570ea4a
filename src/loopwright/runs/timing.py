"""Timing a run before it begins, for `--time`: real updates, an evaluation and a save, and then everything put back.

The updates are those of the run: its order, its loader, its precision, its step mode. Their learning rate is zero, so
that none of them can diverge. The clock is read here, before the first update, and never after.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from loopwright.callbacks import TrainerCallback
from loopwright.checkpoint import Checkpointing
from loopwright.checkpoint.store import read_manifest, update_of
from loopwright.durations import seconds_of
from loopwright.engine.processes import gather_objects, world_process_zero_only
from loopwright.lr_finder import print_nothing
from loopwright.protocols import TrainerLike
from loopwright.run_folder import RunFolder
from loopwright.runs.auto.time_budget import Costs, check_fits, planned_updates, told_plan
from loopwright.runs.clock import Course
from loopwright.runs.console.screen import Screen
from loopwright.runs.rehearsal import LapClock, Rehearsal, put_back
from loopwright.runs.settings import Settings
from loopwright.runs.trainer import TaskTrainer, loader_options
from loopwright.tasks.base import Job

_NOT_COUNTED = 3  # updates at the start: they make everything warm
_LEAST_COUNTED = 5
_MANY = 100  # updates or evaluation batches, whose mean is good enough
_LEAST_SECONDS, _MOST_SECONDS = 3.0, 60.0  # of those that are counted; the most where they are fewer
_SHARE = 0.01  # of the budget, between these bounds
_MOST_SHARE = 0.05
_GIVE_UP_SHARE = 0.25  # of the budget: then a single update that counts is enough
_LEAST_EVALUATION_BATCHES = 2
_NEVER = 10**6  # epochs
_REPORT_SECONDS = 1.0  # of the pictures and the report at the end, which cannot be tried without a run


def plan_time(
    job: Job,
    settings: Settings,
    make_optimizer: Callable[[Job], Any],
    train_options: Mapping[str, Any],
    run: RunFolder,
    screen: Screen,
    rehearsed: Rehearsal | None,
    newest: Path | None,
    course_of: Callable[[int], Course],
) -> Course:
    """Set the number of updates to what fits into `--time`, say so, and return what the run has before it.

    Called once everything else is settled. From then on the number counts, and no clock.

    Args:
        job: with its datasets.
        settings: of the run; they have the number afterwards.
        make_optimizer: makes an optimizer for the job.
        train_options: the arguments of the training loader.
        run: the folder; what is written there is removed again.
        screen: what is said; it knows when the command began.
        rehearsed: what the rehearsal has found; None without one.
        newest: the checkpoint that the run goes on from; None for a new run.
        course_of: returns the course of a run of so many updates.

    Raises:
        InputError: the time is too short for one update.
    """
    given: str = job.args.time
    costs = time_run(job, make_optimizer, train_options, run, screen, rehearsed)
    position = 0 if newest is None else update_of(read_manifest(newest))
    check_fits(given, costs, course_of(position + 1), position)
    planned = planned_updates(seconds_of(given), costs, course_of, position)
    settings.training.max_steps, settings.sources["max_steps"] = planned, "auto"
    course = replace(course_of(planned), update_seconds=costs.update, evaluation_seconds=costs.evaluation)
    screen.block("time", told_plan(given, costs, course, position))
    return course


def time_run(
    job: Job,
    make_optimizer: Callable[[Job], Any],
    train_options: Mapping[str, Any],
    run: RunFolder,
    screen: Screen,
    rehearsed: Rehearsal | None,
) -> Costs:
    """Return what the parts of a run take, and leave everything as it was; called once its settings are settled.

    On several processes all of them take part, and all return what the first one has measured.

    Args:
        job: with its datasets, and a time in its arguments.
        make_optimizer: makes an optimizer for the job.
        train_options: the arguments of the training loader.
        run: the folder; what is written there is removed again.
        screen: shows how far it is; it knows when the command began.
        rehearsed: says how many evaluation batches can be timed; None for a few.
    """
    budget = seconds_of(job.args.time)
    least = min(_LEAST_SECONDS, _MOST_SHARE * budget)
    seconds = max(min(_SHARE * budget, _MOST_SECONDS), least)
    num_batches, num_timed = _evaluation_batches(job, seconds, rehearsed)
    folder = run.path / ".timing"
    remove = world_process_zero_only(shutil.rmtree)
    remove(folder, ignore_errors=True)  # of a process that was killed while it timed
    with screen.waiting("timing updates") as waiting:
        watch = _Watch(least, seconds, _GIVE_UP_SHARE * budget, num_timed, waiting.to)
        trainer = TaskTrainer(job, make_optimizer(job), [watch], say=print_nothing, is_rehearsal=True)
        trainer.around_saves = watch.saving
        with put_back(job, trainer.device):
            try:
                _train(job, trainer, train_options, folder)
            finally:
                remove(folder, ignore_errors=True)
    evaluation = watch.evaluation_seconds * num_batches / num_timed
    per_row = evaluation / len(job.eval_dataset)
    test_rows = len(job.data.rows("test")) if job.data.has("test") else 0
    mine = Costs(
        start=time.monotonic() - screen.began,
        warm_up=watch.warm_up_seconds,
        update=watch.update_seconds,
        evaluation=evaluation,
        training_evaluation=len(job.train_dataset) * per_row if job.args.eval_on_train else 0.0,
        save=watch.save_seconds,
        end=test_rows * per_row + watch.save_seconds + _REPORT_SECONDS,
    )
    first: Costs = gather_objects(mine)[0]
    return first


def _evaluation_batches(job: Job, seconds: float, rehearsed: Rehearsal | None) -> tuple[int, int]:
    """Return how many batches an evaluation has on this process, and how many of them are timed."""
    per_batch = job.training.eval_batch_size * TaskTrainer(job).num_processes
    num_batches = -(-len(job.eval_dataset) // per_batch)
    affordable = 0
    if rehearsed is not None and rehearsed.evaluation_seconds > 0:
        affordable = min(int(seconds / rehearsed.evaluation_seconds * num_batches), _MANY)
    num_timed: int = gather_objects(min(num_batches, max(affordable, _LEAST_EVALUATION_BATCHES)))[0]
    return num_batches, num_timed


def _train(job: Job, trainer: TaskTrainer, train_options: Mapping[str, Any], folder: Any) -> None:
    """Train as the run will, until the watch has seen enough; it asks for an evaluation then, and the end is saved."""
    training = job.training
    trainer.train(
        job.train_dataset,
        num_epochs=_NEVER,
        eval_dataset=job.eval_dataset,
        per_device_batch_size=training.train_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        gradient_clip_norm=training.max_grad_norm or None,
        train_dataloader_kwargs=dict(train_options),
        eval_dataloader_kwargs={**loader_options(training), "batch_size": training.eval_batch_size},
        collate_fn=job.collate_fn,
        seed=training.seed,
        mixed_precision=training.mixed_precision,
        step_mode="compile" if training.torch_compile else training.step_mode,
        evaluate_every=f"{_NEVER} epochs",
        nan=training.nan,
        bad_samples=training.bad_samples,
        reduction=training.reduction,
        oom="split" if training.auto_find_batch_size else job.args.oom,
        checkpoints=Checkpointing(folder, keep_best=None, asynchronous=False),
    )


class _Watch(TrainerCallback):
    """Times updates, and ends the run with an evaluation and a save once it has seen enough of them.

    Args:
        least_seconds: that updates are timed for, if these are many.
        seconds: that they are timed for, if they are a few.
        give_up_seconds: after so many a single update is enough.
        num_evaluation_batches: that an evaluation ends after.
        on_update: called after each update with how many are done.

    Attributes:
        evaluation_seconds: of the evaluation.
        save_seconds: of the save.
    """

    def __init__(
        self,
        least_seconds: float,
        seconds: float,
        give_up_seconds: float,
        num_evaluation_batches: int,
        on_update: Callable[[int], None],
    ) -> None:
        self.evaluation_seconds = 0.0
        self.save_seconds = 0.0
        self._least_seconds = least_seconds
        self._seconds = seconds
        self._give_up_seconds = give_up_seconds
        self._num_evaluation_batches = num_evaluation_batches
        self._tell = on_update
        self._laps: list[float] = []
        self._warm_ups: list[float] = []
        self._num_graphs = 0
        self._clock = LapClock()

    @property
    def update_seconds(self) -> float:
        """Of an update, once everything is warm: the mean, since rows differ in length."""
        laps = self._laps or self._warm_ups  # there are no laps where a loss that is not finite has ended it
        return max(sum(laps) / max(len(laps), 1), 1e-6)

    @property
    def warm_up_seconds(self) -> float:
        """Of the updates that do not count, beyond what they would take if they did."""
        return max(sum(self._warm_ups) - len(self._warm_ups) * self.update_seconds, 0.0)

    def batch_limit(self, trainer: TrainerLike, training: bool, is_intermediate: bool = False) -> int | None:
        """Return how many evaluation batches are timed."""
        return None if training else self._num_evaluation_batches

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Set the learning rates to zero, and start."""
        for group in trainer.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].zero_()
            else:
                group["lr"] = 0.0
        self._clock.start()

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Note how long an update took; after enough of them ask for an evaluation, and to stop."""
        took = self._clock.lap(trainer.device)
        num_graphs = trainer.num_graphs  # type: ignore[attr-defined] # a TaskTrainer
        is_warm = len(self._warm_ups) >= _NOT_COUNTED and num_graphs == self._num_graphs
        self._num_graphs = num_graphs
        (self._laps if is_warm else self._warm_ups).append(took)
        self._tell(trainer.progress.update)
        count, counted = len(self._laps), sum(self._laps)
        is_enough = count >= _LEAST_COUNTED and counted >= (self._least_seconds if count >= _MANY else self._seconds)
        has_no_time = count > 0 and counted + sum(self._warm_ups) >= self._give_up_seconds
        if is_enough or has_no_time:
            trainer.request_evaluation()
            trainer.request_stop("enough updates are timed")

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Start again."""
        self._clock.lap(trainer.device)

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Note how long the evaluation took, its metrics included."""
        self.evaluation_seconds = self._clock.lap(trainer.device)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time a save; the trainer makes each in this."""
        began = time.monotonic()
        yield
        self.save_seconds = time.monotonic() - began
