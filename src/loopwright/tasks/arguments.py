"""The flags of every task: about the model and the data, and those of `TrainingArguments` with their short names.

A value comes from a flag, else from a file, else from the task, else from its field. Making these imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from loopwright.config import TrainingArguments
from loopwright.config.choices import must_be
from loopwright.config.old_names import AcceptsOldNames, OldName
from loopwright.durations import seconds_of
from loopwright.errors import ConfigError

T = TypeVar("T")

# TrainingArguments that tasks do not support: any other value is refused, not ignored.
NOT_FOLLOWED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "eval_delay": ((0,), "evaluations begin with the first one that is due"),
    "eval_on_start": ((False,), "run `lw evaluate` on an earlier run instead"),
    "label_smoothing_factor": ((0.0,), "the loss is the model's own"),
    "data_seed": ((None,), "set --seed"),
    "prediction_loss_only": ((False,), "leave it out"),
    "resume_from_checkpoint": ((None,), "`lw resume RUN` goes on with a run"),
    "logging_dir": ((None,), "trackers write into the folder trackers of the run"),
    "torch_compile_backend": ((None, "inductor"), "--torch_compile compiles with inductor"),
    "torch_compile_mode": ((None,), "leave it out"),
    "include_for_metrics": (([],), "the metrics are the task's own"),
    "batch_eval_metrics": ((False,), "the metrics are the task's own, and stream"),
    "ddp_bucket_cap_mb": ((None,), "leave it out"),
    "ddp_broadcast_buffers": ((None,), "leave it out"),
    "ddp_static_graph": ((None, False), "leave it out"),
}
# Accepted because scripts and settings files have them, but without effect in a task.
NO_EFFECT: Final = frozenset(
    (
        *("do_train", "do_eval", "do_predict", "local_rank", "overwrite_output_dir", "load_best_model_at_end"),
        *("log_level", "log_level_replica", "log_on_each_node", "eval_do_concat_batches", "eval_accumulation_steps"),
        *("enable_jit_checkpoint", "restore_callback_states_from_checkpoint", "remove_unused_columns", "label_names"),
        *("use_cache", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    )
)
# `--help` texts of arguments that mean something else here than in a script.
OWN_HELP: Final[Mapping[str, str]] = {
    "output_dir": "Folder of the run; unset makes one in runs.",
    "metric_for_best_model": "Metric that says which model is best; unset is the task's first one.",
    "greater_is_better": "Whether more is better; unset is what the task says of the metric.",
    "run_name": "Name of the run, for trackers; unset is its id.",
    "learning_rate": "Peak learning rate; unset is 0.001 without --model, for a model from scratch.",
}


def flag(default: T, help_text: str, **metadata: Any) -> T:
    """Declare a flag of a task, with its default and its `--help` text."""
    return field(default=default, metadata={"help": help_text, **metadata})


def flag_list(help_text: str) -> list[str]:
    """Declare a flag that takes several words and is empty by default."""
    return field(default_factory=list, metadata={"help": help_text})


class ShortName(OldName):
    """Another name of a field, as good as its own: no notice is given.

    Args:
        new: the field.
        hint: the type of its values.
        spread: from a value to the values of several fields, where one name means more than one.
    """

    def __init__(self, new: str, hint: Any, spread: Callable[[Any], dict[str, Any]] | None = None) -> None:
        super().__init__(new, hint)
        self._spread = spread

    def translate(self, value: Any, given: Mapping[str, Any], stacklevel: int) -> dict[str, Any]:
        """Return the fields that are meant.

        Raises:
            ConfigError: a field is given under both names, with two values.
        """
        if value is None:
            return {}
        meant = {str(self.new): value} if self._spread is None else self._spread(value)
        for name, each in meant.items():
            if name in given and given[name] != each:
                raise ConfigError(
                    f"{self.name}={value!r} and {name}={given[name]!r} contradict each other, and the first is another "
                    f"name of the second: give only {name}"
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
    """What every task takes beside `TrainingArguments`; a task derives from it to add its own.

    Attributes:
        auto: the training arguments that were given as "auto" and are still to be found; no flag of its own.
    """

    task: str = flag("", "The task; the first word after the verb.", is_hidden=True)

    model: str | None = flag(None, "Model: a folder, a run, or a Hub id; unset trains a small one from scratch.")
    data: str | None = flag(None, "Data: a file, a folder with train and validation files, or a Hub id.")
    train_file: str | None = flag(None, "File of the training data, instead of --data.")
    validation_file: str | None = flag(None, "File of the validation data; unset splits the training data.")
    test_file: str | None = flag(None, "File of the test data, evaluated once at the end.")
    validation_ratio: float = flag(0.2, "Share of the training data that is validated on where there is no file of it.")
    keep_duplicates: bool = flag(False, "Leave rows of the validation data where they are if training has them too.")
    label_map: list[str] = flag_list("Labels to be read as others: positive=pos negative=neg.")
    unknown_labels: str = flag("refuse", "What is done about labels that training has not.", choices=("refuse", "drop"))
    missing_values: str = flag("refuse", "What is done about rows without a value.", choices=("refuse", "drop"))
    file_kind: str | None = flag(None, "Kind of the files, where their names do not say it: csv, json, jsonl, txt, ...")
    delimiter: str | None = flag(None, "What stands between two fields of a csv file; unset looks at it.")
    allow_changed_data: bool = flag(False, "Go on with data that has changed since the run began.")
    max_train_samples: int | None = flag(None, "Train on so many rows at most.")
    max_eval_samples: int | None = flag(None, "Evaluate on so many rows at most.")

    freeze: str | None = flag(
        None, "What stays as it is: N (the embeddings and the lowest N layers), backbone, or patterns of names."
    )
    dropout: float | None = flag(None, "Dropout everywhere in the model while it is trained; unset is the model's own.")
    lora: bool = flag(False, "Train low-rank adapters instead of all weights (extra: lora).")
    lora_rank: int = flag(8, "Rank of the adapters.")
    lora_alpha: int = flag(16, "Scale of the adapters.")
    lora_dropout: float = flag(0.0, "Dropout of the adapters.")
    lora_target: list[str] = flag_list("Names of the layers that get adapters; unset is every linear one.")

    time: str | None = flag(
        None, "Train as long as that: 90s, 30m, 2h, 1h30m, 1:30:00, instead of --epochs or --max_steps."
    )
    eval_on_train: bool = flag(False, "After each epoch tell the metrics on the training data too.")
    early_stopping_patience: int | None = flag(None, "End after so many epochs without improvement of the metric.")
    early_stopping_threshold: float = flag(0.0, "How much counts as an improvement.")
    effective_batch: int | None = flag(None, "Samples of an update; --batch auto keeps to it. Unset is the task's own.")
    oom: str = flag(
        "split", "When memory runs out: run the update in smaller parts, or stop.", choices=("split", "stop")
    )
    seeds: int = flag(1, "Train so many times, with --seed and the seeds after it: a run each, and their spread.")
    rehearsal: bool = flag(True, "Before the first update try an update, an evaluation, a save and a load.")
    profile: int | None = flag(None, "Profile so many updates: where their time goes, the top operators, a trace.")
    threads: int | None = flag(None, "CPU threads; a resumed run takes as many as before.")
    auto: list[str] = field(default_factory=list, init=False)

    model_name_or_path = ShortName("model", str)
    dataset_name = ShortName("data", str)

    def __post_init__(self) -> None:
        if not 0 < self.validation_ratio < 1:
            raise must_be("validation_ratio", "between 0 and 1", self.validation_ratio)
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise must_be("dropout", "at least 0 and below 1", self.dropout)
        if self.time is not None:
            seconds_of(self.time)
        for name in (
            "max_train_samples",
            "max_eval_samples",
            "early_stopping_patience",
            "threads",
            "lora_rank",
            "effective_batch",
            "profile",
            "seeds",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise must_be(name, "at least 1", value)
