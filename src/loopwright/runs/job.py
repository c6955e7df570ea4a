"""From settings to a finished run folder: the sequence of steps, for every task."""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from loopwright.callbacks import EarlyStoppingCallback, ProfileCallback, TerminateOnNaNCallback, TrackerCallback
from loopwright.checkpoint import Checkpointing
from loopwright.data.buckets import LengthGroupedSampler, chosen_lengths, may_be_graphs, sample_lengths, with_buckets
from loopwright.engine.processes import gather_objects
from loopwright.engine.seeding import seed_generators, use_deterministic_algorithms
from loopwright.engine.trackers import resolve_trackers
from loopwright.errors import ConfigError, InputError, Preempted
from loopwright.optimizers import create_optimizer
from loopwright.progress import StopKind
from loopwright.report import LiveReport
from loopwright.results import LearningRateCurve, TrainResult
from loopwright.run_folder import RunFolder, note_in_index, read_json, runs_root, write_json
from loopwright.runs.auto.batch_size import choose_batch
from loopwright.runs.auto.learning_rate import Search, choose_rate, find_rate
from loopwright.runs.clock import Course, Pace, TimeSpent
from loopwright.runs.console import start as start_block
from loopwright.runs.console.progress import ReportProgress
from loopwright.runs.console.screen import Screen
from loopwright.runs.finish import finish
from loopwright.runs.provenance import place_facts, run_facts
from loopwright.runs.rehearsal import Rehearsal, num_tokens, rehearse
from loopwright.runs.settings import Settings
from loopwright.runs.timing import plan_time
from loopwright.runs.trainer import LENGTH_FLAGS, TaskTrainer, loader_options
from loopwright.runs.weights import newest_checkpoint
from loopwright.schedulers import get_scheduler
from loopwright.stepping.graphs import check_graphs
from loopwright.tasks.adapters import add_adapters, freeze, set_dropout
from loopwright.tasks.arguments import NOT_FOLLOWED
from loopwright.tasks.base import Job, Origin, Task
from loopwright.tasks.data import RunData
from loopwright.tasks.scoring import finite
from loopwright.training.resume import stored_window

_FLOORS = "baselines.json"
_LENGTHS = "lengths.bin"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        run: its folder.
        state: "done", "stopped" (by a file, resumable) or "diverged".
        result: the result of `train`.
    """

    run: RunFolder
    state: str
    result: TrainResult | None


@dataclass(frozen=True)
class Length:
    """The length of a run: updates, epochs, the limit passed to the core, if any; updates per epoch."""

    updates: int
    epochs: int
    limit: int | None
    per_epoch: int


# --------------------------------------------------------------------------------------------------- preparing


def check_followed(training: Any) -> None:
    """Refuse settings without effect, and trackers and graphs that are unavailable.

    Raises:
        ConfigError: it names the first.
    """
    resolve_trackers(training.report_to)
    check_graphs(training.step_mode, training.device)
    for name, (values, instead) in NOT_FOLLOWED.items():
        if getattr(training, name) not in values:
            raise ConfigError(f"{name}={getattr(training, name)!r} is not supported by the tasks: {instead}")


def prepare_torch(settings: Settings) -> None:
    """Set the threads, precision and determinism of this process, and seed its generators, before a model is built."""
    args, training = settings.args, settings.training
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    else:
        args.threads = torch.get_num_threads()
        settings.sources["threads"] = "machine"
    if training.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = training.tf32
    if training.full_determinism:
        use_deterministic_algorithms()
    seed_generators(training.seed)


def given_origin(task: Task, settings: Settings) -> Origin:
    """Return the origin of a new run's model.

    Raises:
        InputError: `--model` is not a model folder, and is neither in the Hub's cache nor on the Hub.
    """
    if settings.module is not None or settings.args.model is None:
        return Origin(None, module=settings.module)
    name = task.find_model(settings.args.model)
    task.check_model(name)
    return Origin(name)


def build_job(task: Task, data: RunData, settings: Settings, origin: Origin) -> Job:
    """Build a model that is ready to train, or to load the weights of a checkpoint."""
    args, training = settings.args, settings.training
    before = dict(vars(args))
    job = task.build(data, args, training, origin)
    for name, value in vars(args).items():
        if before[name] != value:
            settings.sources[name] = "data"
    if args.dropout is not None:
        set_dropout(job.model, args.dropout)
    if args.freeze is not None:
        num_frozen = freeze(job.model, args.freeze)
        job.notes.append(f"frozen: {num_frozen:,} parameters (--freeze {args.freeze})")
    if args.lora:
        job.model = add_adapters(job.model, args, job.adapter_kind or task.adapter_kind)
    if training.gradient_checkpointing:
        options: Any = training.gradient_checkpointing_kwargs or {}
        job.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **options})
    return job


def load_data(job: Job) -> None:
    """Add the training and validation datasets to a job."""
    args, data, task = job.args, job.data, job.task
    job.train_dataset = task.create_dataset(
        job, data.rows("train"), is_labelled=True, is_training=True, limit=args.max_train_samples
    )
    job.eval_dataset = task.create_dataset(job, data.rows("validation"), is_labelled=True, limit=args.max_eval_samples)


def _floors(job: Job) -> dict[str, dict[str, float]]:
    """Score the trivial baselines on the same training and validation rows as the run."""
    with job.data.limited(train=job.args.max_train_samples, validation=job.args.max_eval_samples):
        return {name: finite(values) for name, values in job.task.baselines(job).items()}


def window_of(training: Any, num_processes: int, newest: Path | None) -> int:
    """Return the micro-batches of an update over all processes, unchanged since the run began."""
    stored = None if newest is None else stored_window(newest)
    return stored or training.gradient_accumulation_steps * num_processes


def measure(job: Job, window: int, num_updates: int | None = None) -> Length:
    """Return the length of the run.

    Args:
        job: of the run.
        window: micro-batches of an update, over all processes.
        num_updates: overrides the settings.
    """
    training = job.training
    num_updates = training.max_steps if num_updates is None else num_updates
    per_window = training.train_batch_size * window
    num_samples = len(job.train_dataset)
    per_epoch = num_samples // per_window if training.dataloader_drop_last else math.ceil(num_samples / per_window)
    if per_epoch == 0:
        raise InputError(
            "data.split",
            f"{num_samples} training rows are fewer than one batch of {per_window}, and the last batch is dropped",
            fix="--no_dataloader_drop_last   or   a smaller --batch",
        )
    if num_updates > 0:
        return Length(num_updates, math.ceil(num_updates / per_epoch), num_updates, per_epoch)
    updates = math.ceil(training.num_train_epochs * per_epoch)
    epochs = math.ceil(training.num_train_epochs)
    return Length(updates, epochs, None if updates == epochs * per_epoch else updates, per_epoch)


def best_metric(job: Job, settings: Settings) -> tuple[str, str]:
    """Return the metric that selects the best model, as named in the history, and "min" or "max".

    Raises:
        InputError: the task does not have the requested metric.
    """
    directions = {**job.task.create_scorer(job).directions, "loss": False}
    asked = settings.training.metric_for_best_model if settings.is_given("metric_for_best_model") else None
    name = next(iter(directions)) if asked is None else asked.removeprefix("eval_")
    if name not in directions:
        raise InputError(
            "args.metric",
            f"--metric_for_best_model {asked}: the evaluation has no such metric",
            saw=[f"it has {', '.join(directions)}"],
            fix=f"--metric_for_best_model {next(iter(directions))}",
        )
    is_more_better = directions[name]
    if settings.is_given("greater_is_better") and settings.training.greater_is_better is not None:
        is_more_better = settings.training.greater_is_better
    return f"eval_{name}", "max" if is_more_better else "min"


def make_optimizer(job: Job) -> Any:
    """Return the configured optimizer over the trainable weights."""
    training = job.training
    return create_optimizer(
        training.optim,
        job.task.parameter_groups(job),
        lr=training.learning_rate,
        adam_betas=(training.adam_beta1, training.adam_beta2),
        adam_eps=training.adam_epsilon,
        optim_args=training.optim_args,
    )


def steps_of(value: float | None, num_updates: int) -> int:
    """Return a number of updates, which may be given as a fraction of all."""
    return max(1, math.ceil((value or 0) * num_updates) if (value or 0) < 1 else int(value or 0))


# ----------------------------------------------------------------------------------------------------- running


def train(
    task: Task, settings: Settings, data: RunData, screen: Screen, run: RunFolder | None, make_run: Any
) -> Outcome:
    """Train in a new run folder, or resume in an existing one.

    Args:
        task: the task.
        settings: of the run.
        data: checked.
        screen: prints the lines.
        run: the folder of the run to resume; None for a new run.
        make_run: called without arguments to create the folder of a new run, when everything is ready.
    """
    check_followed(settings.training)
    prepare_torch(settings)
    with screen.waiting("verifying the newest checkpoint", is_one_step=True):
        newest = None if run is None else newest_checkpoint(run)
    if newest is not None:
        _check_not_auto(settings)
    if run is not None and newest is not None:
        origin = Origin(str(run.model), is_run=True, module=settings.module)
    else:
        origin = given_origin(task, settings)
    with data.watched(screen, "preparing the rows"):
        job = build_job(task, data, settings, origin)
        load_data(job)
    start_block.say_model(job, screen)
    with data.watched(screen, "working out the floors"):
        floors = _floors(job) if run is None or newest is None else read_json(run.path / _FLOORS, {})
    if newest is None:
        choose_batch(job, settings, make_optimizer, screen)
    trainer = _make_trainer(job, screen)
    window = window_of(settings.training, trainer.num_processes, newest)
    length = measure(job, window)
    best = best_metric(job, settings)
    course = _course(job, length)
    start_block.say_device(job, trainer, screen)
    is_planned = settings.is_planned_by_time(run is not None)
    if not is_planned:
        start_block.say_batch(job, course, screen, trainer.num_processes, window)
    start_block.say_floors(floors, screen)
    is_new = run is None
    folder: RunFolder = gather_objects(make_run() if run is None and trainer.is_first else run)[0]
    with _removed_on_failure(folder, is_new and trainer.is_first):
        if trainer.is_first and (newest is None or not is_planned):
            settings.write(folder)
        if trainer.is_first and newest is None:
            write_json(folder.path / _FLOORS, floors)
            folder.model.mkdir(exist_ok=True)
            task.save_skeleton(job, folder.model)
        found = None
        if settings.args.rehearsal and newest is None:
            found = rehearse(job, make_optimizer, folder, screen, settings.training.save_total_limit or 3)
            course = _course(job, length, found)
            trainer = _make_trainer(job, screen)
        if "learning_rate" in settings.args.auto:
            options = _training_options(job, trainer, folder)
            choose_rate(job, settings, make_optimizer, options, folder if trainer.is_first else None, screen)
            trainer = _make_trainer(job, screen)
        if is_planned:
            course = _plan(job, settings, trainer, window, folder, screen, found, newest)
            length = measure(job, window)
            if trainer.is_first:
                settings.write(folder)
            trainer = _make_trainer(job, screen)
    screen.attach(folder)
    if newest is None and not is_planned:
        start_block.say_time(course, screen)
    start_block.say_run(folder, screen)
    if trainer.is_first:
        metric, direction = best[0].removeprefix("eval_"), best[1]
        note_in_index(folder, task=task.name, state="running", metric=metric, direction=direction)
    batch = settings.training.train_batch_size * window
    facts = run_facts(job, course, best, batch, trainer.num_processes, floors)
    screen.add("start", **place_facts(folder), **facts)
    return _run(job, trainer, length, course, best, folder, floors, screen)


def rehearse_only(task: Task, settings: Settings, data: RunData, folder: RunFolder, screen: Screen) -> None:
    """Do everything up to the first update, then stop; called by `check` with a temporary folder."""
    job = _new_job(task, settings, data, screen)
    trainer = TaskTrainer(job)
    best = best_metric(job, settings)
    window = window_of(settings.training, trainer.num_processes, None)
    length = measure(job, window)
    start_block.say_device(job, trainer, screen)
    is_planned = settings.is_planned_by_time(is_begun=False)
    if not is_planned:
        start_block.say_batch(job, _course(job, length), screen, trainer.num_processes, window)
    floors = _floors(job)
    start_block.say_floors(floors, screen)
    found = rehearse(job, make_optimizer, folder, screen, settings.training.save_total_limit or 3)
    course = _course(job, length, found)
    if is_planned:
        course = _plan(job, settings, trainer, window, folder, screen, found, None)
    else:
        start_block.say_time(course, screen)
    facts = run_facts(job, course, best, settings.training.train_batch_size * window, trainer.num_processes, floors)
    screen.tell("check", **facts, rehearsal=asdict(found))


def find_rate_only(task: Task, settings: Settings, data: RunData, screen: Screen, search: Search) -> LearningRateCurve:
    """Find a learning rate without writing anything; called by `lw find-lr`."""
    job = _new_job(task, settings, data, screen)
    trainer = TaskTrainer(job)
    measure(job, window_of(settings.training, trainer.num_processes, None))
    start_block.say_device(job, trainer, screen)
    return find_rate(job, make_optimizer, _training_options(job, trainer, None), screen, search)


def _new_job(task: Task, settings: Settings, data: RunData, screen: Screen) -> Job:
    """Return a throwaway job with its data loaded and its batch size chosen."""
    check_followed(settings.training)
    prepare_torch(settings)
    with data.watched(screen, "preparing the rows"):
        job = build_job(task, data, settings, given_origin(task, settings))
        load_data(job)
    start_block.say_model(job, screen)
    choose_batch(job, settings, make_optimizer, screen)
    return job


def _check_not_auto(settings: Settings) -> None:
    """Refuse "auto" for a run that has already begun with a value."""
    for name in settings.args.auto:
        raise InputError(
            "args.value",
            f"--{name} auto: the run has begun with {getattr(settings.training, name):g}",
            fix=f"--{name} NUMBER   or   leave it out to keep {getattr(settings.training, name):g}",
        )


def _plan(
    job: Job,
    settings: Settings,
    trainer: TaskTrainer,
    window: int,
    run: RunFolder,
    screen: Screen,
    rehearsed: Rehearsal | None,
    newest: Path | None,
) -> Course:
    """Set the number of updates that fit into `--time`, print it, and return the course of the run."""

    def course_of(num_updates: int) -> Course:
        return _course(job, measure(job, window, num_updates), rehearsed)

    options = _training_options(job, trainer, run)
    course = plan_time(job, settings, make_optimizer, options, run, screen, rehearsed, newest, course_of)
    start_block.say_batch(job, course, screen, trainer.num_processes, window)
    return course


def _run(
    job: Job,
    trainer: TaskTrainer,
    length: Length,
    course: Course,
    best: tuple[str, str],
    run: RunFolder,
    floors: Mapping[str, Mapping[str, float]],
    screen: Screen,
) -> Outcome:
    training, args = job.training, job.args
    watch = TerminateOnNaNCallback()
    live = LiveReport(run.path) if trainer.is_first else None
    pace = Pace(course, TimeSpent(start=time.monotonic() - screen.began))
    decisive = best[0].removeprefix("eval_")
    callbacks: list[Any] = [watch, ReportProgress(screen, pace, decisive, training.logging_first_step, live)]
    if args.early_stopping_patience is not None:
        callbacks.append(
            EarlyStoppingCallback(
                args.early_stopping_patience, args.early_stopping_threshold, best[0], best[1] == "max"
            )
        )
    if training.report_to:
        callbacks.append(_tracking(job, run))
    trainer.around_saves = pace.saving
    trainer.on_record = None if screen.events is None else screen.events.hear
    if args.profile is not None:
        callbacks.append(ProfileCallback(args.profile, run.path / "profile"))
    trainer.callback_handler.add_callbacks([*callbacks, *job.task.callbacks(job, run)])
    evaluates = training.eval_strategy != "no"
    with job.data.watched(screen, "measuring the lengths of the rows"):
        options = _training_options(job, trainer, run)
    state = "failed"
    try:
        result = trainer.train(
            job.train_dataset,
            num_epochs=length.epochs,
            eval_dataset=job.eval_dataset if evaluates else None,
            per_device_batch_size=training.train_batch_size,
            max_num_train_steps=length.limit,
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            gradient_clip_norm=training.max_grad_norm or None,
            create_scheduler_fn=functools.partial(_schedule, training=training, num_updates=length.updates),
            train_dataloader_kwargs=options,
            eval_dataloader_kwargs={**loader_options(training), "batch_size": training.eval_batch_size},
            collate_fn=job.collate_fn,
            resume_from="auto",
            seed=training.seed,
            mixed_precision=training.mixed_precision,
            step_mode="compile" if training.torch_compile else training.step_mode,
            checkpoints=_checkpointing(job, length, best, run),
            log_every=steps_of(training.logging_steps, length.updates)
            if training.logging_strategy == "steps"
            else sys.maxsize,
            evaluate_every=steps_of(training.eval_steps, length.updates) if training.eval_strategy == "steps" else None,
            nan=training.nan,
            bad_samples=training.bad_samples,
            reduction=training.reduction,
            oom="split" if training.auto_find_batch_size else args.oom,
        )
        pace.end_saves()
        # Only rank 0 checks for the stop file; the other ranks learn of it here.
        kind = getattr(gather_objects(result.stop_reason)[0], "kind", None)
        state = "stopped" if kind is StopKind.FILE else "done"
        if watch.triggered or kind is StopKind.NOT_FINITE:
            state = "diverged"
        if state == "done":
            finish(job, run, best, result, floors, screen, pace.spent)
    except (KeyboardInterrupt, Preempted) as interruption:
        told = start_block.say_saved(run, pace.end_saves(), screen)
        interruption.__notes__ = [told]  # like add_note, which needs Python 3.11
        raise
    finally:
        screen.close_line()
        if trainer.is_first:
            told = run.read_result().get("metrics", {}).get(best[0].removeprefix("eval_"))
            ended = state if state != "failed" else run.status.get("state", state)
            note_in_index(run, state=ended, value=told)
    return Outcome(run, state, result)


def _make_trainer(job: Job, screen: Screen) -> TaskTrainer:
    return TaskTrainer(job, make_optimizer(job), report=functools.partial(start_block.print_notice, screen))


def _course(job: Job, length: Length, rehearsed: Rehearsal | None = None) -> Course:
    training = job.training
    return Course(
        length.updates,
        length.epochs,
        evaluates=training.eval_strategy != "no",
        evaluate_every=steps_of(training.eval_steps, length.updates) if training.eval_strategy == "steps" else None,
        update_seconds=None if rehearsed is None else rehearsed.update_seconds,
        evaluation_seconds=None if rehearsed is None else rehearsed.evaluation_seconds,
        per_epoch=length.per_epoch,
        save_every=steps_of(training.save_steps, length.updates) if training.save_strategy == "steps" else None,
        saves_epochs=training.save_strategy == "epoch",
    )


def _training_options(job: Job, trainer: TaskTrainer, run: RunFolder | None) -> dict[str, Any]:
    """Return the arguments of the training loader: workers, row order, and batch lengths."""
    training, args = job.training, job.args
    options = {**loader_options(training), "drop_last": training.dataloader_drop_last}
    longest = next((getattr(args, name) for name in LENGTH_FLAGS if getattr(args, name, None)), None)
    lengths = chosen_lengths(
        training.length_buckets,
        longest,
        may_graph=may_be_graphs(training, trainer.device, trainer.num_processes),
        most=4 if hasattr(args, "max_target_length") else 12,  # each pair of lengths is a graph there
    )
    options["collate_fn"] = with_buckets(job.collate_fn, lengths)
    if training.length_buckets not in ("auto", "off") and not hasattr(job.collate_fn, "bucket_lengths"):
        raise ConfigError(f"length_buckets={training.length_buckets!r} has no effect for {job.task.name}: leave it out")
    if training.train_sampling_strategy == "sequential":
        options["shuffle"] = False
    elif training.train_sampling_strategy == "group_by_length":
        cache = run.path / _LENGTHS if trainer.is_first and run is not None else None
        found = sample_lengths(
            job.train_dataset, training.length_column_name, function=num_tokens, cache=cache, watch=iter
        )
        options["sampler"] = LengthGroupedSampler(found, training.train_batch_size)
    return options


def _schedule(optimizer: Any, *, training: Any, num_updates: int) -> Any:
    return get_scheduler(
        str(training.lr_scheduler_type),
        optimizer,
        num_warmup_steps=training.get_warmup_steps(num_updates),
        num_training_steps=num_updates,
        scheduler_specific_kwargs=training.lr_scheduler_kwargs,
    )


def _tracking(job: Job, run: RunFolder) -> TrackerCallback:
    training = job.training
    project = {} if training.project == type(training).project else {"project": training.project}
    return TrackerCallback(
        training.report_to,
        run.path / "trackers",
        training.run_name or run.id,
        {**vars(job.args), **training.to_dict()},
        **project,
    )


def _checkpointing(job: Job, length: Length, best: tuple[str, str], run: RunFolder) -> Checkpointing:
    training = job.training
    return Checkpointing(
        run.checkpoints,
        every_updates=steps_of(training.save_steps, length.updates) if training.save_strategy == "steps" else None,
        every_epochs=1 if training.save_strategy == "epoch" else None,
        keep_last=training.save_total_limit or 3,
        keep_best=best,
        run_folder=run.path,
        allow_changed_data=job.args.allow_changed_data,
    )


@contextlib.contextmanager
def _removed_on_failure(run: RunFolder, is_ours: bool) -> Iterator[None]:
    """Remove the folder of a run that did not reach its first update."""
    try:
        yield
    except BaseException:
        if is_ours:
            shutil.rmtree(run.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                runs_root().rmdir()  # if empty: this was the first run
        raise
