"""`TrainingArguments`: what a run is to do, as inert data, with the names and defaults of transformers.

Creating one touches no device, file or environment, and does not import torch. Machine-dependent values (`device`,
`world_size`, `should_save`, ...) are looked up on access. The fields are in `fields`, their checks in `validation`,
their old names in `old_names`.

Example:
    >>> args = TrainingArguments("runs/first", learning_rate=1e-4, eval_strategy="epoch")
    >>> args.eval_strategy == "epoch", args.do_eval, args.get_warmup_steps(100)
    (True, True, 0)
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import math
import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from loopwright.config import processes
from loopwright.config.choices import ParallelMode
from loopwright.config.conversion import build
from loopwright.config.fields import TrainingFields, honoured, refused
from loopwright.config.files import plain, read_mapping
from loopwright.config.old_names import OldNameWarning
from loopwright.config.secrets import is_secret
from loopwright.config.validation import check_refused, check_whole, settle
from loopwright.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

# Fields that transformers fills in itself, so their values do not show what the user wanted.
_FILLED_IN = ("logging_nan_inf_filter", "logging_dir", "fsdp_config")


def _setter(doc: str, always: Mapping[str, Any] | None = None, /, **arguments: tuple[str, Any]) -> Any:
    """Return a method that sets several fields; each of its arguments has a field and a default."""
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name, (_, default) in arguments.items():
        parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))
    signature = inspect.Signature(parameters)

    def set_fields(self: TrainingArguments, *args: Any, **kwargs: Any) -> TrainingArguments:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        fields = {arguments[name][0]: value for name, value in given.arguments.items() if name != "self"}
        for name, value in {**(always or {}), **fields}.items():
            setattr(self, name, value)
        self.validate()
        return self

    set_fields.__doc__ = doc
    set_fields.__signature__ = signature  # type: ignore[attr-defined] # for help and editors
    return set_fields


def _of_process(args: TrainingFields, size: int) -> int:
    """Return a batch size of this process: a share of the given one with `split_batches`."""
    count = processes.world_size() if getattr(args.accelerator_config, "split_batches", False) else 1
    if size % count:
        raise ConfigError(
            f"split_batches=True divides a batch of {size} by {count} processes: set a multiple of {count}"
        )
    return size // count


@dataclass(repr=False)
class TrainingArguments(TrainingFields):
    """The arguments of a run. Derive a dataclass from it to add your own; every field has a default.

    Raises:
        ConfigError: on making it; it names the field, what it was given and what is expected.
    """

    # Set by `hf.install()`: libraries use accelerate's logger, which needs its state, before they create a trainer.
    creates_state: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.validate()
        if self.creates_state:
            processes.accelerate_state(self.use_cpu)
        if self.logging_dir is not None:
            notice = "logging_dir is an old name, and still says where TensorBoard's files go"
            warnings.warn(notice, OldNameWarning, stacklevel=4)
        if self.overwrite_output_dir:
            notice = "overwrite_output_dir is an old name: nothing has to be asked for, your script may still read it"
            warnings.warn(notice, OldNameWarning, stacklevel=4)

    def validate(self) -> None:
        """Check the fields, and fill in dependent ones. Call it again after setting some.

        Raises:
            ConfigError: it names the field, what it was given and what is expected.
        """
        settle(self)

    def __repr__(self) -> str:
        usual = TrainingArguments().to_dict()
        shown = [
            f"{name}={value!r}"
            for name, value in self.to_dict().items()
            if name == "output_dir" or name not in usual or value != usual[name]
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def train_batch_size(self) -> int:
        """Training batch size of this process, which has one device."""
        return _of_process(self, self.per_device_train_batch_size)

    @property
    def eval_batch_size(self) -> int:
        """Evaluation batch size of this process, which has one device."""
        return _of_process(self, self.per_device_eval_batch_size)

    @property
    def mixed_precision(self) -> str:
        """The precision of autocast, "fp16", "bf16" or "no"; by default, the setting of accelerate's launcher."""
        if self.fp16 or self.bf16:
            return "fp16" if self.fp16 else "bf16"
        return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")

    @property
    def ddp_options(self) -> dict[str, Any]:
        """The options of torch's DistributedDataParallel that are set, by torch's names."""
        options = {
            "find_unused_parameters": self.ddp_find_unused_parameters,
            "bucket_cap_mb": self.ddp_bucket_cap_mb,
            "broadcast_buffers": self.ddp_broadcast_buffers,
            "static_graph": self.ddp_static_graph,
        }
        return {name: value for name, value in options.items() if value is not None}

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the warmup updates of a run of `num_training_steps` updates."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    def get_process_log_level(self) -> int:
        """Return this process's log level as a number of `logging`; "passive" keeps the current one."""
        level = self.log_level if self.should_log else self.log_level_replica
        if level == "passive":
            return logging.getLogger("loopwright").getEffectiveLevel()
        return int(getattr(logging, level.upper()))

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return processes.device(self.use_cpu)

    @property
    def n_gpu(self) -> int:
        """GPUs of this process: one or none. Several are used by starting several processes."""
        return 0 if self.device.type == "cpu" else 1

    @property
    def distributed_state(self) -> Any:
        """accelerate's state of this process, created on access."""
        return processes.accelerate_state(self.use_cpu)

    @property
    def deepspeed_plugin(self) -> None:
        """None: DeepSpeed is not supported."""
        return None

    @property
    def world_size(self) -> int:
        """The number of processes of the run."""
        return processes.world_size()

    @property
    def process_index(self) -> int:
        """The rank of this process among all."""
        return processes.process_index()

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its node."""
        return processes.local_process_index()

    @property
    def parallel_mode(self) -> ParallelMode:
        """Whether this process is one of several."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def should_log(self) -> bool:
        """Whether this process logs."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes files."""
        return self.process_index == 0

    def main_process_first(self, local: bool = True, desc: str = "work") -> AbstractContextManager[None]:
        """Run a block on the main process first, then on the others.

        Args:
            local: the first process of each node, rather than of the first node alone.
            desc: a description of the block for the debug log.
        """
        logging.getLogger(__name__).debug("process %d: %s, main process first", self.process_index, desc)
        index = self.local_process_index if local else self.process_index
        return processes.first(index == 0)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON and YAML can hold them; a token is replaced by its name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}
        return {
            name: f"<{name.upper()}>" if is_secret(name) and value is not None else plain(value)
            for name, value in values.items()
        }

    def to_json_string(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return all fields and the batch sizes for trackers: numbers, bools and texts only."""
        sizes = {"train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        values = {**self.to_dict(), **sizes}
        return {name: value if type(value) in (bool, int, float, str) else str(value) for name, value in values.items()}

    def to_yaml(self) -> str:
        """Return all fields as YAML."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Create arguments from such a dict, old names included; an unknown name or bad value raises a ConfigError."""
        return build(cls, values)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Self:
        """Create arguments from a JSON file as `from_dict` does; an unreadable file raises a ConfigError."""
        return cls.from_dict(read_mapping(path, "JSON"))

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> Self:
        """Create arguments from a YAML file as `from_dict` does; an unreadable file raises a ConfigError."""
        return cls.from_dict(read_mapping(path, "YAML"))

    @classmethod
    def from_transformers(cls, args: Any) -> TrainingArguments:
        """Create arguments from those of transformers; a ConfigError if they set something that is refused here."""
        kind = Seq2SeqTrainingArguments if hasattr(args, "predict_with_generate") else cls
        names = {field.name for field in dataclasses.fields(kind) if field.init}.difference(_FILLED_IN)
        names.update(name for name, old in kind.old_names().items() if old.new and getattr(args, name, None))
        created = kind(**{name: getattr(args, name) for name in names if hasattr(args, name)})
        # A derived class may have extra fields or attributes, which its trainer reads.
        for name, value in vars(args).items():
            if not name.startswith("_") and not hasattr(created, name):
                setattr(created, name, value)
        return created

    set_training = _setter(
        "Set the main training options, and `do_train`; return these arguments.",
        {"do_train": True},
        learning_rate=("learning_rate", 5e-5),
        batch_size=("per_device_train_batch_size", 8),
        weight_decay=("weight_decay", 0),
        num_epochs=("num_train_epochs", 3),
        max_steps=("max_steps", -1),
        gradient_accumulation_steps=("gradient_accumulation_steps", 1),
        seed=("seed", 42),
        gradient_checkpointing=("gradient_checkpointing", False),
    )
    set_evaluate = _setter(
        "Set when and how to evaluate; return these arguments.",
        {"do_eval": False},  # on again with a strategy
        strategy=("eval_strategy", "no"),
        steps=("eval_steps", 500),
        batch_size=("per_device_eval_batch_size", 8),
        accumulation_steps=("eval_accumulation_steps", None),
        delay=("eval_delay", None),
        loss_only=("prediction_loss_only", False),
    )
    set_testing = _setter(
        "Set how to predict, and `do_predict`; return these arguments.",
        {"do_predict": True},
        batch_size=("per_device_eval_batch_size", 8),
        loss_only=("prediction_loss_only", False),
    )
    set_save = _setter(
        "Set when to save and how many checkpoints to keep; return these arguments.",
        strategy=("save_strategy", "steps"),
        steps=("save_steps", 500),
        total_limit=("save_total_limit", None),
        on_each_node=("save_on_each_node", False),
    )
    set_logging = _setter(
        "Set when and where to log; return these arguments.",
        strategy=("logging_strategy", "steps"),
        steps=("logging_steps", 500),
        report_to=("report_to", "none"),
        level=("log_level", "passive"),
        first_step=("logging_first_step", False),
        nan_inf_filter=("logging_nan_inf_filter", False),
        on_each_node=("log_on_each_node", False),
        replica_level=("log_level_replica", "passive"),
    )
    set_optimizer = _setter(
        "Set the optimizer; return these arguments.",
        name=("optim", "adamw_torch"),
        learning_rate=("learning_rate", 5e-5),
        weight_decay=("weight_decay", 0),
        beta1=("adam_beta1", 0.9),
        beta2=("adam_beta2", 0.999),
        epsilon=("adam_epsilon", 1e-8),
        args=("optim_args", None),
    )
    set_lr_scheduler = _setter(
        "Set the learning rate schedule and its length; return these arguments.",
        name=("lr_scheduler_type", "linear"),
        num_epochs=("num_train_epochs", 3.0),
        max_steps=("max_steps", -1),
        warmup_steps=("warmup_steps", 0),
    )
    set_dataloader = _setter(
        "Set how data is loaded; return these arguments.",
        train_batch_size=("per_device_train_batch_size", 8),
        eval_batch_size=("per_device_eval_batch_size", 8),
        drop_last=("dataloader_drop_last", False),
        num_workers=("dataloader_num_workers", 0),
        pin_memory=("dataloader_pin_memory", True),
        persistent_workers=("dataloader_persistent_workers", False),
        prefetch_factor=("dataloader_prefetch_factor", None),
        multiprocessing_context=("dataloader_multiprocessing_context", None),
        in_order=("dataloader_in_order", True),
        auto_find_batch_size=("auto_find_batch_size", False),
        ignore_data_skip=("ignore_data_skip", False),
        sampler_seed=("data_seed", None),
    )
    set_push_to_hub = _setter(
        "Set what to upload to the Hub, and where; return these arguments.",
        {"push_to_hub": True},
        model_id=("hub_model_id", inspect.Parameter.empty),
        strategy=("hub_strategy", "every_save"),
        token=("hub_token", None),
        private_repo=("hub_private_repo", None),
        always_push=("hub_always_push", False),
        revision=("hub_revision", None),
    )


@dataclass(repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """The arguments of a run whose evaluation generates text."""

    sortish_sampler: bool = refused(False, 'train_sampling_strategy="group_by_length" puts like lengths together')
    predict_with_generate: bool = honoured(False, "Generate in evaluation and prediction, for metrics of text.")
    generation_max_length: int | None = honoured(None, "Longest text to generate; unset is the model's own.")
    generation_num_beams: int | None = honoured(None, "Beams to generate with; unset is the model's own.")
    generation_config: None | str | Any = honoured(None, "A GenerationConfig, or the folder or name of one.")

    def validate(self) -> None:
        """Check the fields as `TrainingArguments.validate` does, those of the generation included."""
        super().validate()
        check_refused(self, Seq2SeqTrainingArguments)
        check_whole(self, ["generation_max_length", "generation_num_beams"], 1, is_optional=True)
