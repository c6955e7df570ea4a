"""From settings to a finished run folder: the order in which things are done, for every task."""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loopwright.callbacks import EarlyStoppingCallback, TerminateOnNaNCallback
from loopwright.checkpoint import Checkpointing
from loopwright.data.buckets import LengthGroupedSampler, chosen_lengths, may_be_graphs, sample_lengths, with_buckets
from loopwright.engine.processes import gather_objects
from loopwright.engine.seeding import seed_generators
from loopwright.errors import ConfigError, InputError
from loopwright.optimizers import create_optimizer
from loopwright.report import LiveReport
from loopwright.results import TrainResult
from loopwright.resuming import stored_window
from loopwright.run_folder import RunFolder, note_in_index, read_json, runs_root, write_json
from loopwright.schedulers import get_scheduler
from loopwright.services import STOPPED_BY_FILE
from loopwright.tasks.adapting import add_adapters, freeze
from loopwright.tasks.base import Job, Origin, Task
from loopwright.tasks.data import RunData
from loopwright.tasks.finishing import finish
from loopwright.tasks.rehearsal import num_tokens, rehearse
from loopwright.tasks.reporting import ReportProgress
from loopwright.tasks.restoring import newest_checkpoint
from loopwright.tasks.scoring import finite
from loopwright.tasks.screen import Screen, metrics_text
from loopwright.tasks.settings import Settings
from loopwright.tasks.trainer import TaskTrainer, loader_options

_FLOORS = "baselines.json"
_LENGTHS = "lengths.bin"
_LENGTH_FLAGS = ("max_length", "block_size", "max_source_length")
# Settings of TrainingArguments that a task does not follow; another value than this is refused, not ignored.
_NOT_FOLLOWED: Mapping[str, tuple[Any, str]] = {
    "eval_delay": (0, "evaluations begin with the first one that is due"),
    "eval_on_start": (False, "run `loopwright evaluate` on an earlier run instead"),
    "label_smoothing_factor": (0.0, "the loss is the model's own"),
    "data_seed": (None, "set --seed"),
    "report_to": ([], "metrics.jsonl has everything; trackers are used through loopwright.Trainer"),
    "prediction_loss_only": (False, "leave it out"),
}


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        run: its folder.
        state: "done", "stopped" (by a file, to be resumed) or "diverged".
        result: what `train` returned.
    """

    run: RunFolder
    state: str
    result: TrainResult | None


@dataclass(frozen=True)
class Length:
    """How long a run is: updates, epochs, and the limit that the core is given, if there is one."""

    updates: int
    epochs: int
    limit: int | None


# --------------------------------------------------------------------------------------------------- preparing


def check_followed(training: Any) -> None:
    """Refuse settings that would change nothing.

    Raises:
        ConfigError: it names the first.
    """
    for name, (value, instead) in _NOT_FOLLOWED.items():
        if getattr(training, name) != value:
            raise ConfigError(f"{name}={getattr(training, name)!r} is not supported by the tasks: {instead}")


def prepare_torch(settings: Settings) -> None:
    """Set threads, precision and determinism of this process, and seed its generators, before a model is made."""
    args, training = settings.args, settings.training
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    else:
        args.threads = torch.get_num_threads()
        settings.sources["threads"] = "machine"
    if training.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = training.tf32
    if training.full_determinism:
        torch.use_deterministic_algorithms(True)
    seed_generators(training.seed)


def given_origin(task: Task, settings: Settings) -> Origin:
    """Return where the model of a new run comes from.

    Raises:
        InputError: `--model` is neither a folder with a model, nor in the Hub's cache, nor on the Hub.
    """
    if settings.module is not None or settings.args.model is None:
        return Origin(None, module=settings.module)
    name = task.find_model(settings.args.model)
    task.check_model(name)
    return Origin(name)


def build_job(task: Task, data: RunData, settings: Settings, origin: Origin) -> Job:
    """Make a model ready to be trained, or to be given the weights of a checkpoint."""
    args, training = settings.args, settings.training
    before = dict(vars(args))
    job = task.build(data, args, training, origin)
    for name, value in vars(args).items():
        if before[name] != value:
            settings.sources[name] = "data"
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
    """Add the datasets of training and validation to a job."""
    args, data, task = job.args, job.data, job.task
    job.train_dataset = task.create_dataset(
        job, data.rows("train"), is_labelled=True, is_training=True, limit=args.max_train_samples
    )
    job.eval_dataset = task.create_dataset(job, data.rows("validation"), is_labelled=True, limit=args.max_eval_samples)


def _floors(job: Job) -> dict[str, dict[str, float]]:
    return {name: finite(values) for name, values in job.task.baselines(job).items()}


def window_of(training: Any, num_processes: int, newest: Path | None) -> int:
    """Return how many micro-batches an update has over all processes: as many as when the run began."""
    stored = None if newest is None else stored_window(newest)
    return stored or training.gradient_accumulation_steps * num_processes


def measure(job: Job, window: int) -> Length:
    """Return how long the run is.

    Args:
        job: of the run.
        window: micro-batches of an update, over all processes.
    """
    training = job.training
    per_window = training.train_batch_size * window
    num_samples = len(job.train_dataset)
    per_epoch = num_samples // per_window if training.dataloader_drop_last else math.ceil(num_samples / per_window)
    if per_epoch == 0:
        raise InputError(
            "data.split",
            f"{num_samples} training rows are fewer than one batch of {per_window}, and the last batch is dropped",
            fix="--no_dataloader_drop_last   or   a smaller --batch",
        )
    if training.max_steps > 0:
        return Length(training.max_steps, math.ceil(training.max_steps / per_epoch), training.max_steps)
    updates = math.ceil(training.num_train_epochs * per_epoch)
    epochs = math.ceil(training.num_train_epochs)
    return Length(updates, epochs, None if updates == epochs * per_epoch else updates)


def best_metric(job: Job, settings: Settings) -> tuple[str, str]:
    """Return the metric that decides which model is best, as the history has it, and "min" or "max".

    Raises:
        InputError: the one asked for is not among the task's.
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
    """Return the optimizer that the settings name, over the weights that are trained."""
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
    """Train in a new run folder, or go on in one.

    Args:
        task: the task.
        settings: of the run.
        data: checked.
        screen: what is said.
        run: the folder of the run that goes on; None for a new run.
        make_run: called without arguments for the folder of a new run, when everything is ready.
    """
    check_followed(settings.training)
    prepare_torch(settings)
    newest = None if run is None else newest_checkpoint(run)
    if run is not None and newest is not None:
        origin = Origin(str(run.model), is_run=True, module=settings.module)
    else:
        origin = given_origin(task, settings)
    job = build_job(task, data, settings, origin)
    load_data(job)
    _say_model(job, screen)
    floors = _floors(job) if run is None or newest is None else read_json(run.path / _FLOORS, {})
    trainer = TaskTrainer(job, make_optimizer(job), say=screen.say)
    window = window_of(settings.training, trainer.num_processes, newest)
    length = measure(job, window)
    best = best_metric(job, settings)
    _say_batch(job, length, screen, trainer.num_processes, window)
    _say_floors(floors, screen)
    is_new = run is None
    folder: RunFolder = gather_objects(make_run() if run is None and trainer.is_first else run)[0]
    with _removed_on_failure(folder, is_new and trainer.is_first):
        if trainer.is_first:
            settings.write(folder)
            if newest is None:
                write_json(folder.path / _FLOORS, floors)
                folder.model.mkdir(exist_ok=True)
                task.save_skeleton(job, folder.model)
        if settings.args.rehearsal and newest is None:
            rehearse(job, make_optimizer, folder, screen, settings.training.save_total_limit or 3)
            trainer = TaskTrainer(job, make_optimizer(job), say=screen.say)
    screen.attach(folder)
    if trainer.is_first:
        metric, direction = best[0].removeprefix("eval_"), best[1]
        note_in_index(folder, task=task.name, state="running", metric=metric, direction=direction)
    return _run(job, trainer, length, best, folder, floors, screen)


def rehearse_only(task: Task, settings: Settings, data: RunData, folder: RunFolder, screen: Screen) -> None:
    """Do what comes before the first update, and stop there; called by `check` with a folder that it removes."""
    check_followed(settings.training)
    prepare_torch(settings)
    job = build_job(task, data, settings, given_origin(task, settings))
    load_data(job)
    _say_model(job, screen)
    num_processes = TaskTrainer(job).num_processes
    best_metric(job, settings)
    window = window_of(settings.training, num_processes, None)
    _say_batch(job, measure(job, window), screen, num_processes, window)
    _say_floors(_floors(job), screen)
    rehearse(job, make_optimizer, folder, screen, settings.training.save_total_limit or 3)


def _run(
    job: Job,
    trainer: TaskTrainer,
    length: Length,
    best: tuple[str, str],
    run: RunFolder,
    floors: Mapping[str, Mapping[str, float]],
    screen: Screen,
) -> Outcome:
    training, args = job.training, job.args
    watch = TerminateOnNaNCallback()
    live = LiveReport(run.path) if trainer.is_first else None
    callbacks: list[Any] = [watch, ReportProgress(screen.say, length.updates, training.logging_first_step, live)]
    if args.early_stopping_patience is not None:
        callbacks.append(
            EarlyStoppingCallback(
                args.early_stopping_patience, args.early_stopping_threshold, best[0], best[1] == "max"
            )
        )
    trainer.callback_handler.add_callbacks([*callbacks, *job.task.callbacks(job, run)])
    evaluates = training.eval_strategy != "no"
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
            train_dataloader_kwargs=_training_options(job, trainer, run),
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
        )
        reason = result.stop_reason or ""
        state = "stopped" if reason == STOPPED_BY_FILE else "done"
        if watch.triggered or "not finite" in reason:
            state = "diverged"
        if state == "done":
            finish(job, run, best, result, floors, screen)
    finally:
        if trainer.is_first:
            told = run.read_result().get("metrics", {}).get(best[0].removeprefix("eval_"))
            ended = state if state != "failed" else run.status.get("state", state)
            note_in_index(run, state=ended, value=told)
    return Outcome(run, state, result)


def _training_options(job: Job, trainer: TaskTrainer, run: RunFolder) -> dict[str, Any]:
    """Return the arguments of the training loader: workers, the order of the rows, and the lengths of batches."""
    training, args = job.training, job.args
    options = {**loader_options(training), "drop_last": training.dataloader_drop_last}
    longest = next((getattr(args, name) for name in _LENGTH_FLAGS if getattr(args, name, None)), None)
    lengths = chosen_lengths(
        training.length_buckets,
        longest,
        may_graph=may_be_graphs(training, trainer.device, trainer.num_processes),
        most=4 if hasattr(args, "max_target_length") else 12,  # pairs of lengths are graphs there
    )
    options["collate_fn"] = with_buckets(job.collate_fn, lengths)
    if training.length_buckets not in ("auto", "off") and not hasattr(job.collate_fn, "bucket_lengths"):
        raise ConfigError(f"length_buckets={training.length_buckets!r} has no effect for {job.task.name}: leave it out")
    if training.train_sampling_strategy == "sequential":
        options["shuffle"] = False
    elif training.train_sampling_strategy == "group_by_length":
        cache = run.path / _LENGTHS if trainer.is_first else None
        found = sample_lengths(job.train_dataset, training.length_column_name, function=num_tokens, cache=cache)
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


# ------------------------------------------------------------------------------------------------------ saying


def _say_model(job: Job, screen: Screen) -> None:
    parameters = list(job.model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    new = f"  new: {', '.join(job.new_weights[:4])}" if job.new_weights else ""
    more = f" and {len(job.new_weights) - 4} more" if len(job.new_weights) > 4 else ""
    name = job.args.model or "a small model from scratch"
    screen.block(
        "model", f"{name}  {total / 1e6:.1f} M parameters, {trained / 1e6:.1f} M trained{new}{more}", *job.notes
    )


def _say_batch(job: Job, length: Length, screen: Screen, num_processes: int, window: int) -> None:
    training = job.training
    batch = training.train_batch_size
    screen.block(
        "batch",
        f"{batch} × accum {window // num_processes} × {num_processes} device{'s' if num_processes > 1 else ''} = "
        f"{batch * window} · {length.updates} steps in {length.epochs} "
        f"epoch{'s' if length.epochs > 1 else ''} · lr {training.learning_rate:g} {training.lr_scheduler_type}, "
        f"warmup {training.get_warmup_steps(length.updates)} · seed {training.seed}",
    )


def _say_floors(floors: Mapping[str, Mapping[str, float]], screen: Screen) -> None:
    if floors:
        screen.block("floor", " · ".join(f"{name} {metrics_text(values, {})}" for name, values in floors.items()))


@contextlib.contextmanager
def _removed_on_failure(run: RunFolder, is_ours: bool) -> Iterator[None]:
    """Leave no folder behind of a run that did not come to its first update."""
    try:
        yield
    except BaseException:
        if is_ours:
            shutil.rmtree(run.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                runs_root().rmdir()  # if it is empty: this was the first run
        raise
