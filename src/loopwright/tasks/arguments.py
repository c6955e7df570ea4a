"""The flags of every task: model, data, and those of `TrainingArguments` with their short names. No torch.

A value comes from a flag, else from a file, else from the task, else from its field.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final, TypeVar

from loopwright.config import TrainingArguments
from loopwright.config.accelerator import AcceleratorConfig
from loopwright.config.choices import must_be
from loopwright.config.durations import seconds_of
from loopwright.config.old_names import AcceptsOldNames, OldName
from loopwright.errors import ConfigError, InputError, nearest
from loopwright.tasks.adapters import lora_options

START: Final = "start"  # of --profile
T = TypeVar("T")

# Settings that decide how a model is built: changed on a resume, they explain why it differs from the saved one.
MODEL_FLAGS: Final = frozenset(
    (
        *("dropout", "freeze", "load_in", "lora", "lora_alpha", "lora_dropout", "lora_rank", "lora_target"),
        *("loss", "label_smoothing", "class_weights", "ignore_index", "mask_values", "image_size", "mask_ratio"),
        *("mask_patch_size", "patch_size", "max_length", "block_size", "temperature", "objective"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs", "max_target_length", "generation_max_length"),
        *("num_beams", "source_lang", "target_lang"),
    )
)

# TrainingArguments that tasks do not support: any other value is refused, not ignored.
NOT_FOLLOWED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "eval_delay": ((0,), "evaluations begin with the first one that is due"),
    "eval_on_start": ((False,), "run `lw evaluate` on an earlier run instead"),
    "label_smoothing_factor": ((0.0,), "the loss is the model's own"),
    "data_seed": ((None,), "set --seed"),
    "prediction_loss_only": ((False,), "leave it out"),
    "resume_from_checkpoint": ((None,), "`lw resume RUN` resumes a run"),
    "logging_dir": ((None,), "trackers write into the folder trackers of the run"),
    "torch_compile_backend": ((None, "inductor"), "--torch_compile compiles with inductor"),
    "torch_compile_mode": ((None,), "leave it out"),
    "include_for_metrics": (([],), "the metrics are the task's own"),
    "batch_eval_metrics": ((False,), "the metrics are the task's own, and stream"),
    "ddp_bucket_cap_mb": ((None,), "leave it out"),
    "ddp_broadcast_buffers": ((None,), "leave it out"),
    "ddp_static_graph": ((None, False), "leave it out"),
    **dict.fromkeys(
        ("optim_target_modules", "bf16_full_eval", "fp16_full_eval", "use_liger_kernel", "liger_kernel_config")
        + ("neftune_noise_alpha", "torch_empty_cache_steps", "include_num_input_tokens_seen", "save_only_model")
        + ("eval_use_gather_object", "ignore_data_skip", "accelerator_config"),
        ((None, False, "no", AcceleratorConfig()), "it is for loopwright.hf"),
    ),
}
# Accepted because scripts and settings files have them, but without effect in a task.
NO_EFFECT: Final = frozenset(
    (
        *("do_train", "do_eval", "do_predict", "local_rank", "overwrite_output_dir", "load_best_model_at_end"),
        *("log_level", "log_level_replica", "log_on_each_node", "eval_do_concat_batches", "eval_accumulation_steps"),
        *("enable_jit_checkpoint", "restore_callback_states_from_checkpoint", "remove_unused_columns"),
        *("use_cache", "dataloader_in_order", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    )
)
# `--help` texts of arguments that mean something else here than in a script.
OWN_HELP: Final[Mapping[str, str]] = {
    "output_dir": "Folder of the run; a new one in runs if unset.",
    "metric_for_best_model": "Metric that selects the best model; the task's first one if unset.",
    "greater_is_better": "Whether a larger metric is better; the task knows its own if unset.",
    "run_name": "Name of the run in trackers; its id if unset.",
    "num_train_epochs": "Number of epochs, which may be fractional; more than the default if the data is small.",
    "label_names": "Names of all classes in the order of their ids: neg,pos; numbers from 0 in the data get them too.",
    "dataloader_persistent_workers": "Keep workers alive between epochs; if unset, only those that read training data.",
    "learning_rate": "Peak learning rate; 0.001 for a model from scratch if unset.",
}


_BOUNDS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}


def flag(default: T, help_text: str, **metadata: Any) -> T:
    """Declare a flag of a task: its default, its `--help` text, its `choices`, and its bounds.

    Bounds are `at_least`, `at_most`, `above` and `below`; None is always allowed.
    """
    return field(default=default, metadata={"help": help_text, **metadata})


def flag_list(help_text: str) -> list[str]:
    """Declare a flag that takes several words and is empty by default."""
    return field(default_factory=list, metadata={"help": help_text})


class ShortName(OldName):
    """Another name of a field, as good as its own: no notice is given."""

    def __init__(self, new: str, hint: Any, spread: Callable[[Any], dict[str, Any]] | None = None) -> None:
        super().__init__(new, hint)
        self._spread = spread

    def translate(self, value: Any, given: Mapping[str, Any], stacklevel: int) -> dict[str, Any]:
        """Return the fields that are meant."""
        if value is None:
            return {}
        meant = {str(self.new): value} if self._spread is None else self._spread(value)
        for name, each in meant.items():
            if name in given and given[name] != each:
                raise ConfigError(
                    f"{self.name}={value!r} and {name}={given[name]!r} contradict each other: the first is another "
                    f"name for the second, so give only {name}"
                )
        return meant


def _saving(value: Any) -> dict[str, Any]:
    """Parse `--checkpointing_steps`: a number of updates, or "epoch"."""
    if str(value) == "epoch":
        return {"save_strategy": "epoch"}
    if not str(value).isdigit() or int(value) < 1:
        raise must_be("checkpointing_steps", "a number of updates or 'epoch'", value)
    return {"save_strategy": "steps", "save_steps": int(value)}


@dataclass(repr=False)
class TaskTrainingArguments(TrainingArguments):
    """`TrainingArguments` with short names, and with those of the no_trainer scripts."""

    lr = ShortName("learning_rate", float)
    epochs = ShortName("num_train_epochs", float)
    batch = ShortName("per_device_train_batch_size", int)
    out = ShortName("output_dir", str)
    max_train_steps = ShortName("max_steps", int)
    num_warmup_steps = ShortName("warmup_steps", float)
    checkpointing_steps = ShortName("save_steps", str, _saving)


@dataclass
class TaskArguments(metaclass=AcceptsOldNames):
    """The flags of every task besides `TrainingArguments`; a task derives from it to add its own."""

    negates_unset: ClassVar[bool] = True  # --no_NAME also for a bool | None, which transformers' parser does not have

    task: str = flag("", "The task; the first word after the verb.", is_hidden=True)

    model: str | None = flag(None, "Model: a folder, a run, or a Hub id; a small one is trained from scratch if unset.")
    trust_remote_code: bool = flag(
        False, "Run the Python code that comes with --model, with your rights; give it again to resume or predict."
    )
    allow_pickle: bool = flag(
        False, "Load --model also from pickles (pytorch_model.bin), which can hold code; torch checks them."
    )
    allow_code: bool = flag(
        False, "Import the package.module:function that a settings file, a run or a model folder names; remembered."
    )
    trust_run: bool = flag(False, "Follow the links, Hub names and trackers of a run from elsewhere; remembered.")
    data: str | None = flag(None, "Data: a file, a folder with train and validation files, or a Hub id.")
    train_file: str | None = flag(None, "File of the training data, instead of --data.")
    validation_file: str | None = flag(None, "File of the validation data; the training data is split if unset.")
    test_file: str | None = flag(None, "File of the test data, evaluated once at the end.")
    validation_ratio: float = flag(
        0.2, "Fraction of the training data held out for validation if no file is given.", above=0, below=1
    )
    group_column: str | None = flag(None, "Column of groups: rows of the same value stay in the same split.")
    keep_duplicates: bool = flag(False, "Keep validation rows that are also in the training data.")
    label_map: list[str] = flag_list("Labels to read as others: positive=pos,negative=neg, or JSON, or a JSON file.")
    drop_labels: list[str] = flag_list("Labels whose rows are left out; of several per row, the label alone: spam,ads.")
    unknown_labels: str = flag(
        "refuse", "What to do with labels that the training data does not have.", choices=("refuse", "drop")
    )
    missing_values: str = flag("refuse", "What to do with rows that lack a value.", choices=("refuse", "drop"))
    bad_rows: str = flag("refuse", "What to do with rows that cannot be read or used.", choices=("refuse", "drop"))
    file_kind: str | None = flag(None, "Format of the files if their names do not tell: csv, json, jsonl, txt, ...")
    encoding: str | None = flag(
        None, "Encoding of the files: utf-8, gb18030, cp1252, ..., or utf-8,cp1252 line by line; detected if unset."
    )
    decimal: str | None = flag(
        None, "Sign before the decimals of numbers to predict; detected if unset.", choices=("comma", "point")
    )
    sheet: str | None = flag(None, "Sheet of an xlsx file; the first one if unset.")
    delimiter: str | None = flag(None, "Delimiter of a csv file; detected if unset.")
    quoting: str | None = flag(
        None,
        "Quotes of a csv file: none if they are ordinary characters; detected if unset.",
        choices=("minimal", "none", "single", "backslash"),
    )
    column_names: list[str] = flag_list("Names of the columns of a csv or xlsx file without a header: text,label.")
    allow_changed_data: bool = flag(False, "Resume even if the data has changed since the run began.")
    allow_changed_model: bool = flag(False, "Resume even if the model is built differently than when the run began.")
    max_train_samples: int | None = flag(None, "Maximum number of rows to train on.", at_least=1)
    max_eval_samples: int | None = flag(None, "Maximum number of rows to evaluate on.", at_least=1)
    max_test_samples: int | None = flag(None, "Maximum number of rows of the test data to evaluate on.", at_least=1)

    freeze: str | None = flag(
        None, "What to freeze: N (the embeddings and the lowest N layers), backbone, or patterns of parameter names."
    )
    dropout: float | None = flag(
        None, "Dropout everywhere in the model while it trains; the model's own if unset.", at_least=0, below=1
    )
    lora: bool | str = flag(
        False,
        "Train low-rank adapters instead of all weights (extra: lora): alone, a rank, or "
        "r=16,alpha=32,dropout=0.05,targets=all-linear,dora=true,rslora=true.",
        nargs="?",
        const=True,
    )
    load_in: str | None = flag(
        None, "With --lora: load the frozen base weights in 4 bits (nf4; extra: qlora).", choices=("4bit",)
    )
    lora_rank: int = flag(8, "Rank of the adapters.", at_least=1)
    lora_alpha: int = flag(16, "Scale of the adapters.")
    lora_dropout: float = flag(0.0, "Dropout of the adapters.")
    lora_target: list[str] = flag_list("Names of the layers that get adapters; every linear layer if unset.")

    time: str | None = flag(
        None, "Train for this long: 90s, 30m, 2h, 1h30m, 1:30:00; instead of --epochs or --max_steps."
    )
    eval_on_train: bool = flag(False, "Also report the metrics on the training data after each epoch.")
    early_stopping_patience: int | None = flag(
        None, "Stop after this many epochs without an improvement of the metric.", at_least=1
    )
    early_stopping_threshold: float = flag(0.0, "Smallest change of the metric that counts as an improvement.")
    effective_batch: int | None = flag(
        None, "Samples per update, which --batch auto keeps; the task's default if unset.", at_least=1
    )
    oom: str = flag("split", "If memory runs out: run the update in smaller parts, or stop.", choices=("split", "stop"))
    seeds: int = flag(
        1, "Train this many runs, with --seed and the seeds after it, and report their spread.", at_least=1
    )
    rehearsal: bool = flag(True, "Try an update, an evaluation, a save and a load before the first update.")
    profile: str | None = flag(
        None, "Profile this many updates: where their time goes, a trace; or 'start': the time until the first update."
    )
    safe_csv: bool = flag(False, "Put ' before csv cells that a spreadsheet would run as a formula (= + - @ first).")
    threads: int | None = flag(None, "CPU threads; a resumed run uses as many as before.", at_least=1)
    auto: list[str] = field(default_factory=list, init=False)  # arguments given as "auto" and not yet chosen; no flag

    label_names: list[str] = field(default_factory=list, init=False)  # those of `TrainingArguments`; no flag

    typed: list[str] = field(default_factory=list, init=False)  # the words of this call; no flag

    model_name_or_path = ShortName("model", str)
    dataset_name = ShortName("data", str)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            bounds = {name: each.metadata[name] for name in _BOUNDS if name in each.metadata}
            if value is not None and not all(_BOUNDS[name](value, bound) for name, bound in bounds.items()):
                raise must_be(each.name, _expected(bounds), value)
        if self.lora:
            lora_options(self)
        elif self.load_in is not None:
            what = f"--load_in {self.load_in} needs --lora: weights in 4 bits are frozen, and adapters are trained"
            raise InputError("args.value", what, fix="--lora   or   leave out --load_in", flag="--load_in")
        if self.time is not None:
            seconds_of(self.time)
        if self.profile not in (None, START) and not (str(self.profile).isdecimal() and int(str(self.profile))):
            near = nearest(str(self.profile), [START])
            raise must_be("profile", f"a number of updates or {START!r}", self.profile, nearest=near)


def _expected(bounds: Mapping[str, float]) -> str:
    if len(bounds) == 2 and {"above", "at_most"} & set(bounds):
        word, joint = ("between", "and") if "above" in bounds else ("from", "to")
        return f"{word} {f' {joint} '.join(map(str, bounds.values()))}"
    return " and ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in bounds.items())
