"""Try a run before its first update, then restore all state: the rehearsal, and the timing for `--time`.

The rehearsal does everything once, on the longest rows: an update, two evaluation batches with the metric, a save, a
load, and a bitwise comparison. A fault shows up here, within seconds, and not after the first epoch.

For `--time` real updates follow, with the run's order, loader, precision and step mode. Their learning rate is zero,
so they cannot diverge. The clock is read only here, and never after the first update.
"""

from __future__ import annotations

import copy
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from loopwright.callbacks import TrainerCallback
from loopwright.checkpoint import Checkpointing, read
from loopwright.checkpoint.hidden_state import HiddenState
from loopwright.checkpoint.state_by_name import optimizer_state, parameter_names
from loopwright.checkpoint.store import read_manifest, update_of
from loopwright.config.durations import seconds_of
from loopwright.data.images import ImageDataset
from loopwright.engine.memory import release_memory
from loopwright.engine.nested import iter_tensors, map_tensors
from loopwright.engine.processes import gather_objects, world_process_zero_only
from loopwright.engine.seeding import generator_states, restore_generator_states
from loopwright.engine.sharding import load_weights, local, split_like, whole_state
from loopwright.errors import CheckpointError, Preempted
from loopwright.protocols import TrainerLike
from loopwright.quantities import size
from loopwright.runs.auto.time_budget import Costs, check_fits, plan_text, planned_updates
from loopwright.runs.job import RunJob, num_tokens
from loopwright.runs.ownership import TRIALS
from loopwright.runs.trainer import TaskTrainer, loader_options
from loopwright.tasks.base import Job
from loopwright.training.run import run_of

_ROWS_LOOKED_AT = 512
_EVAL_BATCHES = 2
_UPDATES = 2
_LARGE = 1_000_000  # parameters; before training such a model on the CPU, an eighth of its rows must do
_NOT_COUNTED = 3  # warm-up updates
_LEAST_COUNTED = 5
_MANY = 100  # updates or evaluation batches: enough for a good mean
_LEAST_SECONDS, _MOST_SECONDS = 3.0, 60.0  # of timed updates; the maximum applies if they are few
_SHARE = 0.01  # of the budget, between these bounds
_MOST_SHARE = 0.05
_GIVE_UP_SHARE = 0.25  # of the budget: from then on a single timed update is enough
_NEVER = 10**6  # epochs
_REPORT_SECONDS = 1.0  # for the pictures and the report at the end, which cannot be timed without a run


@dataclass(frozen=True)
class Rehearsal:
    """The findings of a rehearsal."""

    seconds: float
    loss: float  # of the one update
    memory: int  # peak bytes in use, on the device if there is one, else of the process
    checkpoint_bytes: int
    free_bytes: int  # on the disk of the run
    update_seconds: float  # of long rows, once warm
    evaluation_seconds: float  # extrapolated from its first batches


class _Stopwatch(TrainerCallback):
    """Times a trial, synchronizing with the device; learning rates are zero in the first `num_idle` updates."""

    asks_alike = True

    def __init__(self, num_eval_batches: int, num_idle: int = _NEVER) -> None:
        self.updates: list[float] = []
        self.batches: list[float] = []
        self.evaluation = self.scoring = 0.0
        self._num_eval_batches = num_eval_batches
        self._num_idle = num_idle
        self._rates: list[Any] = []
        self._began = 0.0

    def lap(self, device: torch.device) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.monotonic()
        took, self._began = now - self._began, now
        return took

    def batch_limit(self, trainer: TrainerLike, training: bool, is_intermediate: bool = False) -> int | None:
        return None if training else self._num_eval_batches

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        groups = trainer.optimizer.param_groups
        if not self._rates:
            self._rates = [rate.clone() if isinstance(rate := group["lr"], torch.Tensor) else rate for group in groups]
            for group in groups:
                group["lr"] = group["lr"].zero_() if isinstance(group["lr"], torch.Tensor) else 0.0
            self.lap(trainer.device)

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.updates.append(self.lap(trainer.device))
        if len(self.updates) == self._num_idle:
            for group, rate in zip(trainer.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.batches = []
        self.lap(trainer.device)

    def on_eval_step_end(self, trainer: TrainerLike, *args: Any, step: int = 0, **kwargs: Any) -> None:
        self.batches += [0.0] * (step + 1 - len(self.batches))
        self.batches[step] += self.lap(trainer.device)

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.scoring = self.lap(trainer.device)
        self.evaluation = sum(self.batches) + self.scoring


class _EnoughUpdates(TrainerCallback):
    """Ends the timing with an evaluation and a save once it has seen enough updates for a run of `budget` seconds."""

    def __init__(self, watch: _Stopwatch, budget: float, on_update: Callable[[int], None]) -> None:
        self._watch = watch
        self._least_seconds = min(_LEAST_SECONDS, _MOST_SHARE * budget)
        self._seconds = _timed_seconds(budget)
        self._give_up_seconds = _GIVE_UP_SHARE * budget
        self._on_update = on_update
        self._warm_ups: list[float] = []
        self._num_graphs = 0

    @property
    def update_seconds(self) -> float:
        """The mean over the timed updates, since rows differ in length."""
        laps = self._watch.updates or self._warm_ups  # there are none if a non-finite loss ended the run
        return max(sum(laps) / max(len(laps), 1), 1e-6)

    @property
    def warm_up_seconds(self) -> float:
        return max(sum(self._warm_ups) - len(self._warm_ups) * self.update_seconds, 0.0)

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        updates = self._watch.updates
        num_graphs = trainer.num_graphs  # type: ignore[attr-defined] # a TaskTrainer
        if len(self._warm_ups) < _NOT_COUNTED or num_graphs != self._num_graphs:
            self._num_graphs = num_graphs
            self._warm_ups.append(updates.pop())
        self._on_update(trainer.progress.update)
        count, counted = len(updates), sum(updates)
        is_enough = count >= _LEAST_COUNTED and counted >= (self._least_seconds if count >= _MANY else self._seconds)
        has_no_time = count > 0 and counted + sum(self._warm_ups) >= self._give_up_seconds
        if is_enough or has_no_time:
            trainer.request_evaluation()
            trainer.request_stop("enough updates are timed")


def _timed_seconds(budget: float) -> float:
    return max(min(_SHARE * budget, _MOST_SECONDS), min(_LEAST_SECONDS, _MOST_SHARE * budget))


@contextmanager
def _trial(run: RunJob, watch: _Stopwatch, *callbacks: TrainerCallback) -> Iterator[tuple[TaskTrainer, Path]]:
    """Yield a trainer that the stopwatch times, and a folder for a checkpoint; then restore and remove everything."""
    folder = run.path / f"{TRIALS}{gather_objects(os.urandom(4).hex())[0]}"  # a killed trial may have left another one
    remove = world_process_zero_only(shutil.rmtree)
    trainer = run.create_trainer([watch, *callbacks], is_trial=True)
    with put_back(run.job, trainer.device):
        try:
            yield trainer, folder
        finally:
            remove(folder, ignore_errors=True)


@contextmanager
def put_back(job: Job, device: torch.device) -> Iterator[None]:
    """Run a block that trains, then restore weights, attributes of modules, modes and generators bit by bit."""
    state = copy.deepcopy(
        {name: each for name, each in job.model.state_dict().items() if not isinstance(each, torch.Tensor)}
    )
    kept = map_tensors({**whole_state(job.model), **state}, lambda tensor: tensor.detach().to("cpu", copy=True))
    modes = [(part, part.training) for part in job.model.modules()]
    hidden = HiddenState(model=job.model)
    hidden.keep()
    generators = generator_states(device)
    try:
        yield
    except Preempted as error:  # a trial is not a run: there is nothing to resume
        raise Preempted(f"ended by {error.signal_name}") from None
    finally:
        load_weights(job.model, kept)
        hidden.put_back(device)
        for part, mode in modes:
            part.training = mode
        for parameter in job.model.parameters():
            parameter.grad = None
        restore_generator_states(generators, device)
        release_memory(device)


# ----------------------------------------------------------------------------------------------------- rehearsal


def rehearse(run: RunJob, *, is_check: bool = False) -> Rehearsal:
    started, job, training = time.monotonic(), run.job, run.training
    is_large = sum(each.numel() for each in job.model.parameters()) > _LARGE
    is_slow = is_large and training.device.type == "cpu" and not is_check
    watch = _Stopwatch(1 if is_slow else _EVAL_BATCHES, num_idle=1)
    with _trial(run, watch) as (trainer, folder):
        device = trainer.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        train_rows, eval_rows = training.train_batch_size, training.eval_batch_size
        if is_slow:
            train_rows, eval_rows = (min(each, max(each // 8, 2)) for each in (train_rows, eval_rows))
        num_rows = train_rows * training.gradient_accumulation_steps * trainer.num_processes
        options = loader_options(training, has_workers=False)
        result = trainer.train(
            # The same rows twice: the first pass is the warm-up, the second is timed.
            Subset(job.train_dataset, longest_rows(job.train_dataset, num_rows) * _UPDATES),
            **{**run.update_arguments(), "per_device_batch_size": train_rows},
            num_epochs=1,
            max_num_train_steps=_UPDATES,
            eval_dataset=job.eval_dataset,
            train_dataloader_kwargs=options,
            eval_dataloader_kwargs={**options, "batch_size": eval_rows},
            step_mode="eager",
            oom=run.args.oom,
            checkpoints=Checkpointing(folder, keep_best=None, asynchronous=False),
        )
        num_bytes = world_process_zero_only(_compare)(job, trainer, folder / f"step-{trainer.progress.update:010d}")
    num_eval_batches = _num_batches(len(job.eval_dataset), eval_rows * trainer.num_processes)
    found = Rehearsal(
        seconds=time.monotonic() - started,
        loss=float(result.metrics["train_loss_epoch"]),
        memory=_memory(device),
        checkpoint_bytes=int(num_bytes or 0),
        free_bytes=shutil.disk_usage(run.path).free,
        update_seconds=min(watch.updates) * training.train_batch_size / train_rows,
        evaluation_seconds=min(watch.batches, default=0.0) * num_eval_batches + watch.scoring,
    )
    run.update_seconds, run.evaluation_seconds = found.update_seconds, found.evaluation_seconds
    run.save_seconds = run_of(trainer).logbook.stopwatch.read()["save"]
    run.end_seconds = run.save_seconds + _REPORT_SECONDS
    _print_rehearsal(run, found, trainer)
    return found


def _print_rehearsal(run: RunJob, found: Rehearsal, trainer: TaskTrainer) -> None:
    num_saved, num_bytes = (run.training.save_total_limit or 3) + 2, found.checkpoint_bytes
    where = "on the GPU" if trainer.device.type == "cuda" else "of this process"
    lines = [
        f"{size(found.memory)} {where} · disk {num_saved} checkpoints × {size(num_bytes)} = "
        f"{size(num_saved * num_bytes)} of {size(found.free_bytes)} free"
    ]
    if trainer.num_parts > 1:
        lines.append(f"micro-batches of {run.training.train_batch_size} do not fit: {trainer.num_parts} parts each")
    run.screen.block("memory", *lines)
    text = (
        f"1 step (loss {found.loss:.4g}), evaluate, save, load, compare: bit for bit the same · {found.seconds:.1f} s"
    )
    run.screen.block("check", text)
    run.notes["rehearsal"] = text


def _num_batches(num_rows: int, batch_size: int) -> int:
    return -(-num_rows // batch_size)


def _compare(job: Job, trainer: TaskTrainer, path: Path) -> int:
    """Compare a checkpoint with the state in memory, and return its size."""
    saved = read(path)
    weights = {**saved.model, **saved.state["model_extra"]}
    states = job.model.state_dict().items()
    differing = [name for name, tensor in states if name in weights and not _are_same(tensor, weights[name])]
    current = list(iter_tensors(optimizer_state(trainer.optimizer, parameter_names(model=job.model))))
    loaded = list(iter_tensors(saved.state["optimizer"]))
    if len(current) != len(loaded) or not all(map(_are_same, current, loaded)):
        differing.append("the optimizer")
    if differing:
        fault = "the disk or memory is at fault"
        raise CheckpointError(f"the rehearsal saved {differing[0]} and loaded something else: {fault}")
    return sum(file.stat().st_size for file in path.iterdir())


def _are_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(local(first.detach()).cpu(), local(split_like(second, first)).cpu())


def longest_rows(dataset: Any, count: int) -> list[int]:
    """Return up to `count` long rows near the start of the data; for images, all of one size, the first ones."""
    if isinstance(dataset, ImageDataset) or "input_ids" not in dataset[0]:
        return list(range(min(count, len(dataset))))
    looked_at = range(min(len(dataset), max(_ROWS_LOOKED_AT, count)))
    lengths = [(num_tokens(dataset[index]), -index) for index in looked_at]
    return [-index for _, index in sorted(lengths, reverse=True)[:count]]


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import psutil

    return int(psutil.Process().memory_info().rss)


# -------------------------------------------------------------------------------------------------------- timing


def plan_time(run: RunJob) -> None:
    """Set and print the number of updates that fit into `--time`; from then on the clock no longer counts."""
    given: str = run.args.time
    costs = time_run(run)
    position = 0 if run.checkpoint is None else update_of(read_manifest(run.checkpoint))
    check_fits(given, costs, run.length_of(position + 1), position)
    planned = planned_updates(seconds_of(given), costs, run.length_of, position)
    run.training.max_steps, run.settings.sources["max_steps"] = planned, "auto"
    run.update_seconds, run.evaluation_seconds, run.save_seconds = costs.update, costs.evaluation, costs.save
    run.end_seconds = costs.save + _REPORT_SECONDS
    run.length = run.length_of(planned)
    run.screen.block("time", plan_text(given, costs, run.length, position))


def time_run(run: RunJob) -> Costs:
    """Return the cost of each part of a run, as measured by rank 0, and restore all state; all processes take part."""
    job, budget = run.job, seconds_of(run.args.time)
    num_batches = _num_batches(len(job.eval_dataset), job.training.eval_batch_size * run.trainer.num_processes)
    affordable = 0
    if run.evaluation_seconds:
        affordable = min(int(_timed_seconds(budget) / run.evaluation_seconds * num_batches), _MANY)
    num_timed: int = gather_objects(min(num_batches, max(affordable, _EVAL_BATCHES)))[0]
    with run.screen.waiting("timing updates") as waiting:
        watch = _Stopwatch(num_timed)
        updates = _EnoughUpdates(watch, budget, waiting.to)
        with _trial(run, watch, updates) as (trainer, folder):
            trainer.train(
                job.train_dataset,
                **run.loop_arguments(),
                num_epochs=_NEVER,
                eval_dataset=job.eval_dataset,
                evaluate_every=f"{_NEVER} epochs",
                checkpoints=Checkpointing(folder, keep_best=None, asynchronous=False),
            )
            save = run_of(trainer).logbook.stopwatch.read()["save"]
    evaluation = watch.evaluation * num_batches / num_timed
    mine = Costs(
        start=time.monotonic() - run.screen.began,
        warm_up=updates.warm_up_seconds,
        update=updates.update_seconds,
        evaluation=evaluation,
        training_evaluation=run.length.train_evaluations * evaluation,
        save=save,
        end=run.length.test_evaluations * evaluation + save + _REPORT_SECONDS,
    )
    first: Costs = gather_objects(mine)[0]
    return first
