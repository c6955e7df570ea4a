"""`RunJob`: a run between its settings and its trainer. It builds the model, and knows the arguments of the Trainer."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from loopwright.callbacks import EarlyStoppingCallback, ProfileCallback, TrackerCallback
from loopwright.checkpoint import Checkpointing
from loopwright.checkpoint.fingerprint import Change
from loopwright.config import start_clock
from loopwright.config.secrets import is_secret
from loopwright.data.buckets import (
    LengthGroupedSampler,
    chosen_lengths,
    loop_padding,
    may_be_graphs,
    sample_lengths,
    with_buckets,
)
from loopwright.engine.seeding import seed_generators, use_deterministic_algorithms
from loopwright.engine.trackers import resolve_trackers
from loopwright.errors import ConfigError, InputError
from loopwright.lr_finder import print_nothing
from loopwright.metrics.paired import RowScores
from loopwright.optimizers import create_optimizer
from loopwright.run_folder import RunFolder, read_json
from loopwright.run_folder.parent import SUPERVISED_VARIABLE
from loopwright.runs.clock import RunLength
from loopwright.runs.console.screen import Screen
from loopwright.runs.console.start import print_model, print_notice
from loopwright.runs.deferred_import import deferred_import
from loopwright.runs.model_sums import BASE, check_sums, find_base, identify_base
from loopwright.runs.ownership import Ownership
from loopwright.runs.settings import Settings, settle
from loopwright.runs.trainer import LENGTH_FLAGS, HeedStop, TaskTrainer, loader_options
from loopwright.schedulers import get_scheduler
from loopwright.stepping.graphs import check_graphs
from loopwright.tasks.adapters import add_adapters, four_bits, freeze, keeps_half, leave_out_base, set_dropout
from loopwright.tasks.arguments import MODEL_FLAGS, NOT_FOLLOWED, START, TaskArguments
from loopwright.tasks.base import Job, Origin, Task
from loopwright.tasks.consent import check_foreign
from loopwright.tasks.data import RunData
from loopwright.tasks.pretrained import consenting, finding_base
from loopwright.tasks.scoring import finite
from loopwright.tasks.text.models import load_config
from loopwright.training.resume import stored_window

_LENGTHS = "lengths.bin"
# What decides learning rates and the order of rows, and is no setting of a Trainer.
_RATES_AND_ORDER = {"lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "train_sampling_strategy"}
_FINETUNING_UPDATES = 100
_MOST_EPOCHS, _MOST_FINETUNING_EPOCHS = 100, 10  # that are chosen without being asked for
_SPARE_SECONDS = 1.0  # between saves of a supervised run, if they are fast


class BestMetric(NamedTuple):
    """The metric that selects the best model, as named in the history, and "min" or "max"."""

    name: str
    direction: str

    @property
    def short_name(self) -> str:
        return self.name.removeprefix("eval_")


@dataclass
class RunJob:
    """A run from its settings to its end: `build` creates the model, `measure` the trainer and the length."""

    task: Task
    settings: Settings
    data: RunData
    screen: Screen
    folder: RunFolder | None = None  # None before there is one
    checkpoint: Path | None = None  # the one to resume from; None for a new run, or if none was saved
    owner: Ownership = field(default_factory=Ownership)
    job: Job = field(init=False)  # what the task gets: model, processor and datasets
    trainer: TaskTrainer = field(init=False)
    window: int = field(init=False)  # micro-batches of an update over all processes
    length: RunLength = field(init=False)  # its updates, epochs, evaluations and saves
    best: BestMetric = field(init=False)
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)
    baseline_rows: dict[str, RowScores] = field(default_factory=dict)  # by "baseline:metric"
    update_seconds: float | None = None
    evaluation_seconds: float | None = None
    save_seconds: float = 0.0
    end_seconds: float = 0.0
    notes: dict[str, str] = field(default_factory=dict)  # lines of the start block that run.json keeps for the report

    @property
    def args(self) -> Any:
        return self.settings.args

    @property
    def training(self) -> Any:
        return self.settings.training

    @property
    def path(self) -> Path:
        assert self.folder is not None
        return self.folder.path

    def build(self, origin: Origin | None = None) -> None:
        training = self.training
        resolve_trackers(training.report_to)
        check_graphs(training.step_mode, training.device)
        if training.optim.startswith("schedule_free"):
            raise ConfigError(f"optim={training.optim!r} has its own weights for evaluation: it is for loopwright.hf")
        for name, (values, instead) in NOT_FOLLOWED.items():
            if getattr(training, name) not in values:
                what = f"{name}={getattr(training, name)!r} is not supported by the tasks: {instead}"
                raise ConfigError(what, flag=name)
        self._import_libraries()
        self.screen.clock.lap("import")
        prepare_torch(self.settings)
        origin = given_origin(self.task, self.settings) if origin is None else origin
        with self.data.watched(self.screen, "preparing the rows"):
            self.job = build_job(self.task, self.data, self.settings, origin)
            self.job.folder = None if self.folder is None else self.folder.path
            self.screen.clock.lap("model")
            load_data(self.job)
            self.screen.clock.lap("rows")
        print_model(self)

    def _import_libraries(self) -> None:
        """Import what the trainer, the optimizer and the model will, so that it counts as importing."""
        self.screen.clock.import_modules("torch._dynamo")  # the optimizers of torch import it
        import_module("accelerate")
        if "transformers" in self.task.needs:
            with deferred_import("scipy.optimize", "linear_sum_assignment"):  # for losses of detection models alone
                self.screen.clock.import_modules("transformers.modeling_utils")
            _ = import_module("transformers").PreTrainedTokenizerFast  # imported on first use
            self.screen.clock.lap("import transformers")
        start_clock.collect_as_usual()

    def score_baselines(self) -> None:
        """Score the baselines on the validation rows and, named "test_...", on the test rows if they have labels."""
        self._score_baselines("", self.job, self.args.max_eval_samples)
        if self.num_test_rows():
            data, limit = self.data.with_test(), self.args.max_test_samples
            dataset = self.task.create_dataset(self.job, data.first_rows("validation", limit), is_labelled=True)
            args = copy(self.args)
            args.max_eval_samples = limit
            self._score_baselines("test_", replace(self.job, data=data, args=args, eval_dataset=dataset), limit)

    def _score_baselines(self, prefix: str, job: Job, limit: int | None) -> None:
        limits = {"train": self.args.max_train_samples, "validation": limit}
        with job.data.watched(self.screen, "scoring the baselines"), job.data.limited(**limits):
            for baseline, scores in self.task.baselines(job).items():
                named = {f"{prefix}{name}": value for name, value in finite(scores).items()}
                self.baselines.setdefault(baseline, {}).update(named)
                for name, rows in getattr(scores, "rows", {}).items():
                    self.baseline_rows[f"{baseline}:{prefix}{name}"] = rows

    @property
    def directions(self) -> dict[str, bool]:
        """Whether higher is better, by metric, the decisive one first."""
        name, is_more = self.best.short_name, self.best.direction == "max"
        directions = {name: is_more, **self.task.create_scorer(self.job).directions, "loss": False}
        return {**directions, name: is_more}

    def measure(self) -> None:
        self.trainer = self.create_trainer()
        stored = None if self.checkpoint is None else stored_window(self.checkpoint)
        self.window = stored or self.training.gradient_accumulation_steps * self.trainer.num_processes
        if self.checkpoint is None and self.settings.sources.get("num_train_epochs") in ("default", "task"):
            self._choose_epochs()
        self.length = self.length_of()
        self.best = self._best_metric()

    @property
    def is_from_scratch(self) -> bool:
        return self.args.model is None and self.settings.module is None

    @property
    def needed_updates(self) -> int:
        """The updates after which a model like this one has usually learnt something, by experience."""
        return self.task.scratch_updates if self.is_from_scratch else _FINETUNING_UPDATES

    def _choose_epochs(self) -> None:
        """Replace the default number of epochs by a larger one if the data is small."""
        most = _MOST_EPOCHS if self.is_from_scratch else _MOST_FINETUNING_EPOCHS
        epochs = min(math.ceil(self.needed_updates / self.length_of(1).updates_per_epoch), most)
        if epochs > self.training.num_train_epochs:
            self.training.num_train_epochs, self.settings.sources["num_train_epochs"] = float(epochs), "data"

    def create_trainer(self, callbacks: Iterable[Any] = (), *, is_trial: bool = False) -> TaskTrainer:
        """Return a trainer with a new optimizer; in a trial it prints nothing and leaves out the training data."""
        report = print_nothing if is_trial else functools.partial(print_notice, self)
        callbacks = [*callbacks, *([HeedStop(self.owner)] if is_trial else [])]
        trainer = TaskTrainer(self.job, make_optimizer(self.job), callbacks, report=report, is_rehearsal=is_trial)
        own = {each.name for each in fields(self.args)} - {each.name for each in fields(TaskArguments)}
        trainer.changed_arguments = self._changes((own | MODEL_FLAGS | _RATES_AND_ORDER) & self.settings.given)
        return trainer

    def length_of(self, num_updates: int | None = None) -> RunLength:
        training = self.training
        per_window = training.train_batch_size * self.window
        num_samples = len(self.job.train_dataset)
        per_epoch = num_samples // per_window if training.dataloader_drop_last else math.ceil(num_samples / per_window)
        if per_epoch == 0:
            raise InputError(
                "data.split",
                f"{num_samples} training rows are fewer than one batch of {per_window}, and the last batch is dropped",
                fix="--dataloader_drop_last false",
            )
        num_trained = len(self.data.first_rows("train", self.args.max_train_samples))
        num_validated = len(self.data.first_rows("validation", self.args.max_eval_samples))
        limit = training.max_steps if num_updates is None else num_updates
        if limit > 0:
            updates, epochs = limit, math.ceil(limit / per_epoch)
        else:
            epochs, updates = (math.ceil(training.num_train_epochs * each) for each in (1, per_epoch))
        return RunLength(
            updates,
            epochs,
            limit=updates if limit > 0 or updates != epochs * per_epoch else None,
            per_epoch=per_epoch,
            evaluates=training.eval_strategy != "no",
            evaluate_every=steps_of(training.eval_steps, updates) if training.eval_strategy == "steps" else None,
            save_every=steps_of(training.save_steps, updates) if training.save_strategy == "steps" else None,
            saves_epochs=training.save_strategy == "epoch",
            update_seconds=self.update_seconds,
            evaluation_seconds=self.evaluation_seconds,
            test_evaluations=self.num_test_rows() / num_validated,
            train_evaluations=num_trained / num_validated if self.args.eval_on_train else 0.0,
            save_seconds=self.save_seconds,
            end_seconds=self.end_seconds,
        )

    def num_test_rows(self) -> int:
        """Return the number of rows of the test data that are scored at the end."""
        if not self.data.has("test") or self.data.missing_roles("test", self.task.schema(self.args)):
            return 0
        return len(self.data.first_rows("test", self.args.max_test_samples))

    def _best_metric(self) -> BestMetric:
        settings = self.settings
        directions = {**self.task.create_scorer(self.job).directions, "loss": False}
        asked = self.training.metric_for_best_model if settings.is_given("metric_for_best_model") else None
        name = next(iter(directions)) if asked is None else asked.removeprefix("eval_")
        if name not in directions:
            what = f"--metric_for_best_model {asked}: the evaluation has no such metric"
            fix = f"--metric_for_best_model {next(iter(directions))}"
            raise InputError("args.metric", what, saw=[f"it has {', '.join(directions)}"], fix=fix)
        is_more_better = directions[name]
        if settings.is_given("greater_is_better") and self.training.greater_is_better is not None:
            is_more_better = self.training.greater_is_better
        return BestMetric(f"eval_{name}", "max" if is_more_better else "min")

    def update_arguments(self) -> dict[str, Any]:
        """Return the arguments of `train` and `find_lr` that say what an update is."""
        training = self.training
        return {
            "per_device_batch_size": training.train_batch_size,
            "gradient_accumulation_steps": training.gradient_accumulation_steps,
            "gradient_clip_norm": training.max_grad_norm or None,
            "collate_fn": self.job.collate_fn,
            "seed": training.seed,
            "mixed_precision": training.mixed_precision,
        }

    def loop_arguments(self) -> dict[str, Any]:
        """Return the arguments of `train` that say how updates and evaluations are run, as in the run itself."""
        training = self.training
        return {
            **self.update_arguments(),
            "train_dataloader_kwargs": self.loader_arguments(),
            "eval_dataloader_kwargs": {**loader_options(training), "batch_size": training.eval_batch_size},
            "step_mode": "compile" if training.torch_compile else training.step_mode,
            "padding": loop_padding(training.padding),
            "nan": training.nan,
            "bad_samples": training.bad_samples,
            "reduction": training.reduction,
            "oom": "split" if training.auto_find_batch_size else self.args.oom,
        }

    def train_arguments(self) -> dict[str, Any]:
        training, length = self.training, self.length
        logs = steps_of(training.logging_steps, length.updates)
        return {
            **self.loop_arguments(),
            "num_epochs": length.epochs,
            "eval_dataset": self.job.eval_dataset if length.evaluates else None,
            "max_num_train_steps": length.limit,
            "create_scheduler_fn": functools.partial(_schedule, training=training, num_updates=length.updates),
            "resume_from": "auto",
            "checkpoints": Checkpointing(
                self.path / "checkpoints",
                every_updates=length.save_every,
                every_epochs=1 if length.saves_epochs else None,
                keep_last=training.save_total_limit or 3,
                keep_best=(self.best.name, self.best.direction, "eval_loss"),
                run_folder=self.path,
                allow_changed_data=self.args.allow_changed_data,
                spare_seconds=_SPARE_SECONDS if SUPERVISED_VARIABLE in os.environ else None,
                allow_changed_model=self.args.allow_changed_model or self._changes_model(),
            ),
            "log_every": logs if training.logging_strategy == "steps" else sys.maxsize,
            "evaluate_every": length.evaluate_every,
        }

    def _changes_model(self) -> bool:
        """Whether a setting that decides how the model is built is another one than in the checkpoint to resume."""
        if self._kept_settings() is None:
            return not MODEL_FLAGS.isdisjoint(self.settings.given)
        return bool(self._changes(MODEL_FLAGS))

    def _kept_settings(self) -> Path | None:
        copy = None if self.checkpoint is None else self.checkpoint / "config.yaml"
        return copy if copy is not None and copy.is_file() else None

    def _changes(self, names: Iterable[str]) -> list[Change]:
        """Return those of some arguments that have other values than in the checkpoint to resume."""
        copy = self._kept_settings()
        then, now = {} if copy is None else settle(self.task, config=copy).values(), self.settings.values()
        differing = [each for each in sorted(names) if each in then and then[each] != now[each]]
        return [Change(each, then[each], now[each]) for each in differing]

    def loader_arguments(self) -> dict[str, Any]:
        job, training, args, trainer = self.job, self.training, self.args, self.trainer
        options = {**loader_options(training), "drop_last": training.dataloader_drop_last}
        if options["num_workers"] and not self.settings.is_given("dataloader_persistent_workers"):
            options["persistent_workers"] = True  # they read ahead into the next epoch; no hook changes these datasets
        longest = next((getattr(args, name) for name in LENGTH_FLAGS if getattr(args, name, None)), None)
        lengths = chosen_lengths(
            training.length_buckets,
            longest,
            may_graph=may_be_graphs(training, trainer.device, trainer.num_processes),
            most=4 if hasattr(args, "max_target_length") else 12,  # each pair of lengths is a graph there
        )
        options["collate_fn"] = with_buckets(job.collate_fn, lengths)
        if training.length_buckets not in ("auto", "off") and not hasattr(job.collate_fn, "bucket_lengths"):
            given = f"length_buckets={training.length_buckets!r}"
            raise ConfigError(f"{given} has no effect for {job.task.name}: leave it out", flag="length_buckets")
        if training.train_sampling_strategy == "sequential":
            options["shuffle"] = False
        elif training.train_sampling_strategy == "group_by_length":
            cache = self.path / _LENGTHS if trainer.is_first and self.folder is not None else None
            name = training.length_column_name
            found = sample_lengths(job.train_dataset, name, function=num_tokens, cache=cache, watch=iter)
            options["sampler"] = LengthGroupedSampler(found, training.train_batch_size)
        return options

    def callbacks(self) -> list[Any]:
        args, training = self.args, self.training
        found: list[Any] = []
        assert self.folder is not None
        if args.early_stopping_patience is not None:
            threshold = args.early_stopping_threshold
            is_more_better = self.best.direction == "max"
            patience = args.early_stopping_patience
            found.append(EarlyStoppingCallback(patience, threshold, self.best.name, is_more_better))
        if training.report_to:
            project = {} if training.project == type(training).project else {"project": training.project}
            name, values = training.run_name or self.folder.id, {**vars(args), **training.to_dict()}
            values = {each: value for each, value in values.items() if each != "typed" and not is_secret(each)}
            found.append(TrackerCallback(training.report_to, self.path / "trackers", name, values, **project))
        if args.profile not in (None, START):
            found.append(ProfileCallback(int(args.profile), self.path / "profile"))
        return [*found, *self.task.callbacks(self.job, self.folder)]


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
    if settings.module is not None or settings.args.model is None:
        return Origin(None, module=settings.module)
    if ":" not in settings.args.model:  # a Python object, which needs another consent
        check_foreign(settings, settings.args.model)
    name = task.find_model(settings.args.model)
    with consenting(settings.args):
        task.check_model(name)
    return Origin(name)


def build_job(task: Task, data: RunData, settings: Settings, origin: Origin) -> Job:
    args, training = settings.args, settings.training
    before = dict(vars(args))
    if origin.path is not None and origin.module is None:
        check_sums(Path(origin.path))
    # Of a run with adapters, if its checkpoints leave the base model out.
    base = read_json(Path(str(origin.path)) / BASE, {}) or None if args.lora and origin.is_run else None
    if base is not None:
        origin = replace(origin, base=find_base(_base_path(task, settings), base))
    origin = replace(origin, keeps_half=keeps_half(args, training))
    if args.load_in is not None and not origin.is_empty:
        origin = replace(origin, quantization=four_bits(training.bf16))
    with consenting(args):
        job = task.build(data, args, training, origin)
    if args.load_in is not None and not (origin.is_empty or getattr(job.model, "is_loaded_in_4bit", False)):
        what = f"--load_in {args.load_in} is for pretrained models of transformers"
        saw = [f"this is a {type(job.model).__name__}{'' if args.model else ' from scratch'}"]
        raise InputError("args.value", what, saw=saw, fix="leave out --load_in", flag="--load_in")
    for name, value in vars(args).items():
        if before[name] != value:
            settings.sources[name] = "data"
    if args.dropout is not None:
        set_dropout(job.model, args.dropout)
    if args.freeze is not None:
        num_frozen = freeze(job.model, args.freeze)
        job.notes.append(f"frozen: {num_frozen:,} parameters (--freeze {args.freeze})")
    if args.lora:
        if not origin.is_run and origin.path and hasattr(job.model, "config_class") and not training.fsdp:
            base = identify_base(origin.path)
        job.base = base
        new = [] if base is None else [*job.new_weights, *resized_embeddings(job, origin.base or origin.path)]
        job.model = add_adapters(job.model, args, job.adapter_kind or task.adapter_kind)
        task.finish_adapters(job)
        for each in job.model.parameters() if origin.keeps_half and not args.load_in else ():
            if each.requires_grad:  # a head, say: peft casts its own weights alone
                each.data = each.data.float()
        if base is not None:
            leave_out_base(job.model, new)
    if training.gradient_checkpointing:
        options: Any = training.gradient_checkpointing_kwargs or {}
        if getattr(getattr(job.model, "config", None), "use_cache", False) and not job.model.can_generate():
            job.model.config.use_cache = False  # a cache is of no use, and transformers warns that it is left out
        job.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **options})
    return job


def _base_path(task: Task, settings: Settings) -> str:
    with finding_base(settings.args.model, "its checkpoints hold the adapters alone"):
        return str(given_origin(task, settings).path)


def resized_embeddings(job: Job, path: Any) -> list[str]:
    """Return the names of the embeddings if they have another number of rows than in the files of the model."""
    with consenting(job.args):
        configs = [load_config(path), job.model.config]
    sizes = {getattr(config.get_text_config(), "vocab_size", None) for config in configs}
    modules = [job.model.get_input_embeddings(), job.model.get_output_embeddings()] if len(sizes) > 1 else []
    weights = {id(weight) for module in modules if module is not None for weight in module.parameters()}
    return [name for name, each in job.model.named_parameters(remove_duplicate=False) if id(each) in weights]


def load_data(job: Job) -> None:
    args, data, task = job.args, job.data, job.task
    rows = data.first_rows("train", args.max_train_samples)
    job.train_dataset = task.create_dataset(job, rows, is_labelled=True, is_training=True)
    rows = data.first_rows("validation", args.max_eval_samples)
    job.eval_dataset = task.create_dataset(job, rows, is_labelled=True)
    if (note := task.cache_samples(job)) is not None:
        job.notes.append(note)


def make_optimizer(job: Job) -> Any:
    training = job.training
    try:
        return create_optimizer(
            training.optim,
            job.task.parameter_groups(job),
            lr=training.learning_rate,
            adam_betas=(training.adam_beta1, training.adam_beta2),
            adam_eps=training.adam_epsilon,
            optim_args=training.optim_args,
        )
    except ConfigError as error:
        if error.flag != "optim":
            raise
        fix = f"--optim {error.nearest or 'adamw_torch'}"
        raise InputError("args.value", error.what, fix=fix, flag="--optim") from error


def steps_of(value: float | None, num_updates: int) -> int:
    """Return a number of updates, which may be given as a fraction of all."""
    return max(1, math.ceil((value or 0) * num_updates) if (value or 0) < 1 else int(value or 0))


def num_tokens(sample: Any) -> int:
    """Return the tokens of a sample; with several texts, such as choices, the longest length times their number."""
    if "input_ids" not in sample:
        what = "train_sampling_strategy='group_by_length' is for texts: leave it out"
        raise ConfigError(what, flag="train_sampling_strategy")
    ids = sample["input_ids"]
    is_several = len(ids) > 0 and isinstance(ids[0], (list, tuple))
    return len(ids) * max(map(len, ids)) if is_several else len(ids)


def _schedule(optimizer: Any, *, training: Any, num_updates: int) -> Any:
    return get_scheduler(
        str(training.lr_scheduler_type),
        optimizer,
        num_warmup_steps=training.get_warmup_steps(num_updates),
        num_training_steps=num_updates,
        scheduler_specific_kwargs=training.lr_scheduler_kwargs,
    )
