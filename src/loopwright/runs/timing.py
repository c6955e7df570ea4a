"""Time a run before it begins, for `--time`: real updates, an evaluation and a save; then all state is restored.

The updates use the run's order, loader, precision and step mode. Their learning rate is zero, so they cannot diverge.
The clock is read only here, before the first update, and never afterwards.
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

_NOT_COUNTED = 3  # warm-up updates
_LEAST_COUNTED = 5
_MANY = 100  # updates or evaluation batches: enough for a good mean
_LEAST_SECONDS, _MOST_SECONDS = 3.0, 60.0  # of timed updates; the maximum applies if they are few
_SHARE = 0.01  # of the budget, between these bounds
_MOST_SHARE = 0.05
_GIVE_UP_SHARE = 0.25  # of the budget: from then on a single timed update is enough
_LEAST_EVALUATION_BATCHES = 2
_NEVER = 10**6  # epochs
_REPORT_SECONDS = 1.0  # for the pictures and the report at the end, which cannot be timed without a run


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
    """Set the number of updates that fit into `--time`, print it, and return the course of the run.

    Called once everything else is settled. From then on only the number counts, not the clock.

    Args:
        job: with its datasets.
        settings: of the run; they get the number.
        make_optimizer: makes an optimizer for the job.
        train_options: the arguments of the training loader.
        run: the run folder; files written there are removed again.
        screen: prints the plan; it knows when the command began.
        rehearsed: the findings of the rehearsal; None without one.
        newest: the checkpoint to resume from; None for a new run.
        course_of: returns the course of a run with this many updates.

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
    """Return the cost of each part of a run, and restore all state; called once its settings are settled.

    All processes take part, and all return the measurements of rank 0.

    Args:
        job: with its datasets, and a time in its arguments.
        make_optimizer: makes an optimizer for the job.
        train_options: the arguments of the training loader.
        run: the run folder; files written there are removed again.
        screen: shows the progress; it knows when the command began.
        rehearsed: limits the evaluation batches to time; None for a few.
    """
    budget = seconds_of(job.args.time)
    least = min(_LEAST_SECONDS, _MOST_SHARE * budget)
    seconds = max(min(_SHARE * budget, _MOST_SECONDS), least)
    num_batches, num_timed = _evaluation_batches(job, seconds, rehearsed)
    folder = run.path / ".timing"
    remove = world_process_zero_only(shutil.rmtree)
    remove(folder, ignore_errors=True)  # stale, from a process killed while timing
    with screen.waiting("timing updates") as waiting:
        watch = _Watch(least, seconds, _GIVE_UP_SHARE * budget, num_timed, waiting.to)
        trainer = TaskTrainer(job, make_optimizer(job), [watch], report=print_nothing, is_rehearsal=True)
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
    """Return the batches of an evaluation on this process, and how many of them to time."""
    per_batch = job.training.eval_batch_size * TaskTrainer(job).num_processes
    num_batches = -(-len(job.eval_dataset) // per_batch)
    affordable = 0
    if rehearsed is not None and rehearsed.evaluation_seconds > 0:
        affordable = min(int(seconds / rehearsed.evaluation_seconds * num_batches), _MANY)
    num_timed: int = gather_objects(min(num_batches, max(affordable, _LEAST_EVALUATION_BATCHES)))[0]
    return num_batches, num_timed


def _train(job: Job, trainer: TaskTrainer, train_options: Mapping[str, Any], folder: Any) -> None:
    """Train like the run until the watch has seen enough, then evaluate and save."""
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
    """Times updates, and ends the run with an evaluation and a save once it has seen enough.

    Args:
        least_seconds: minimum time for updates, if there are many.
        seconds: minimum time for updates, if there are few.
        give_up_seconds: after this time a single update is enough.
        num_evaluation_batches: the length of the evaluation.
        on_update: called after each update with the number done.

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
        """The mean over the timed updates, since rows differ in length."""
        laps = self._laps or self._warm_ups  # there are no laps if a non-finite loss ended the run
        return max(sum(laps) / max(len(laps), 1), 1e-6)

    @property
    def warm_up_seconds(self) -> float:
        """Extra time of the warm-up updates."""
        return max(sum(self._warm_ups) - len(self._warm_ups) * self.update_seconds, 0.0)

    def batch_limit(self, trainer: TrainerLike, training: bool, is_intermediate: bool = False) -> int | None:
        return None if training else self._num_evaluation_batches

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        for group in trainer.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].zero_()
            else:
                group["lr"] = 0.0
        self._clock.start()

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Record the duration of an update; after enough of them, request an evaluation and stop."""
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
        self._clock.lap(trainer.device)

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.evaluation_seconds = self._clock.lap(trainer.device)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time a save; the trainer wraps every save in this."""
        began = time.monotonic()
        yield
        self.save_seconds = time.monotonic() - began
