"""The interface of a task: a module with a subclass of `Task` and `TASK = ThatClass()`; see docs/tasks/index.md.

A task is stateless: the state of a run is in a `Job`. The methods that need torch or a model library import them, so
that importing a task is cheap.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from loopwright.errors import DataError, InputError
from loopwright.run_folder import RunFolder, write_atomically
from loopwright.run_folder.files import give_usual_mode
from loopwright.sources import DataOptions, DataPlan, Role, Schema, preflight
from loopwright.tasks.arguments import TaskArguments, TaskTrainingArguments
from loopwright.tasks.class_options import label_map, listed_names, settle_weights
from loopwright.tasks.data import RunData
from loopwright.tasks.pretrained import opening
from loopwright.tasks.scoring import Scorer

if TYPE_CHECKING:
    from loopwright.demos import DemoData, DemoFiles

Rows = Any
"""Rows by number, each a dict by role with encoded labels: a split of a plan, or a list."""

_WEIGHTS = "model.safetensors"
COMMON_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_total_limit": 3,
        "logging_steps": 50,
        "per_device_eval_batch_size": 32,
    }
)
"""The defaults of `TrainingArguments` for every task; files and flags override them."""


@dataclass(frozen=True)
class Origin:
    """The source of a model."""

    path: str | None  # a folder or a Hub id; None builds a small model for the data
    is_run: bool = False  # the `model` folder of a run, whose weights come from a checkpoint unless they are there
    module: Any = None  # passed in Python, for a task with `takes_modules`; it overrides the path
    quantization: Any = None  # of the weights, as transformers takes it
    keeps_half: bool = False  # keep 16-bit weights in their type; a run's model always has the type in its config
    is_empty: bool = False  # build the model without reading its weights
    base: str | None = None  # a folder with the weights of a run whose checkpoints hold adapters alone

    def load_weights(self, module: Any) -> Any:
        """Return a plain module, with the weights of a finished run that `Task.save` wrote, if there are any."""
        if self.is_run and (Path(str(self.path)) / _WEIGHTS).is_file():
            from safetensors.torch import load_file

            with opening(str(self.path), _WEIGHTS):
                module.load_state_dict(load_file(Path(str(self.path)) / _WEIGHTS))
        return module


@dataclass
class Job:
    """The state of one run: `Task.build` makes it, and the datasets are added if data is needed."""

    task: Task
    data: RunData
    args: Any
    training: TaskTrainingArguments
    model: Any
    processor: Any  # the tokenizer or image processor, saved beside the model
    collate_fn: Callable[[Sequence[Any]], Any]  # from features to a batch with "position", the indices of its samples
    notes: list[str] = field(default_factory=list)  # lines for the start block
    new_weights: list[str] = field(default_factory=list)  # the names of weights that are in no file
    adapter_kind: str | None = None  # peft's name of this job, if it differs from the task's
    base: dict[str, Any] | None = None  # the base model that its checkpoints leave out: see `identify_base`
    folder: Path | None = None  # of the run, where a task may keep what it derived; None before it exists
    train_dataset: Any = None
    eval_dataset: Any = None

    @property
    def plan(self) -> DataPlan:
        """The plan of the data."""
        return self.data.plan

    @property
    def label_names(self) -> Sequence[str]:
        """The names of the labels by number."""
        return self.plan.label_names


class Task(ABC):
    """One task: its data, its model and its scores."""

    name: ClassVar[str]
    summary: ClassVar[str]  # its line in the table of `lw tasks`
    explanation: ClassVar[Mapping[str, str]] = MappingProxyType({})  # for `lw explain`: a text by topic
    example: ClassVar[str]  # a command line that works
    roles: ClassVar[tuple[Role, ...]] = ()  # the values of a row, each read from a column
    split_by: ClassVar[tuple[str, ...]] = ()  # the roles whose content splits rows; all inputs if empty
    arguments: ClassVar[type[TaskArguments]] = TaskArguments  # the dataclass of its flags
    defaults: ClassVar[Mapping[str, Any]] = COMMON_DEFAULTS  # for `TrainingArguments` and its own flags
    scratch_updates: ClassVar[int] = 300  # that a model from scratch takes at least, for the default number of epochs
    pretrained: ClassVar[str] = ""  # the Hub id of a small model to start from
    pretrained_megabytes: ClassVar[int] = 0
    adapter_kind: ClassVar[str | None] = None  # peft's name of the task
    # Modules that must be installed, each with the extra that has it; checked before anything is read.
    needs: ClassVar[Mapping[str, str]] = MappingProxyType({"transformers": "text"})
    not_inputs: ClassVar[tuple[str, ...]] = ("position", "num_items")  # keys of a batch that the model does not take
    predicted: ClassVar[tuple[str, ...]] = ()  # the fields of a prediction, for inputs that are all unusable
    keeps_generation: ClassVar[bool] = False  # a resumed run generates with the settings that its model has now
    dialogue: ClassVar[Callable[..., Any] | None] = None  # for `lw chat`: a class, called with a job and a system turn
    logs_samples: ClassVar[bool] = False  # the samples of each evaluation are also printed
    samples_at_end: ClassVar[bool] = False  # the best model writes samples too
    repeated: ClassVar[tuple[str, ...]] = ()  # the fields of a prediction that repeat its input
    prediction_flags: ClassVar[tuple[str, ...]] = ()  # its own flags that `predict` and `evaluate` accept
    kept_flags: ClassVar[tuple[str, ...]] = ()  # that a resumed run keeps: they decide what is counted, or its samples
    counts_labels: ClassVar[bool] = False  # the batch loss averages over the labels that are not ignored
    weighs_classes: ClassVar[bool] = False  # it has the flag class_weights, by class of a row or a token
    takes_modules: ClassVar[bool] = False  # a model may be an `nn.Module`, passed in or "package.module:function"
    demo: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # the flags of its demo
    demo_variants: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})  # other flags for other data
    # Of `loopwright.demos`: a module, its function, and the kind of file for rows made of docs; None for its own data.
    demo_rows: ClassVar[tuple[str, str, str | None] | None] = None
    demo_model: ClassVar[str] = ""  # "minilm", a task whose model is trained first, or a model from scratch
    demo_first: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # the flags of that task; data within the demo's
    demo_note: ClassVar[str] = ""  # what the demo shows, and how long it takes

    def schema(self, args: Any) -> Schema:
        """Return the schema of the rows, which flags may change; called before the files are opened."""
        return Schema(self.name, self.roles, self.split_by)

    def schema_of_model(self, schema: Schema, plan: DataPlan) -> Schema:
        """Return the schema that other files must match for a trained model; called before evaluation or prediction.

        Override it if an optional role becomes required once a model has been trained with it, by the `plan`.
        """
        return schema

    def columns(self, args: Any) -> dict[str, Any]:
        """Return the columns named by the user, by role: every `<role>_column` flag that is set."""
        named = {name: value for name, value in vars(args).items() if name.endswith("_column")}
        if several := listed_names("label_columns", getattr(args, "label_columns", ())):
            if named["label_column"] is not None:
                what = "--label_column and --label_columns exclude each other"
                raise InputError("args.value", what, fix="leave out --label_column   or   leave out --label_columns")
            named["label_column"] = several
        return {name.removesuffix("_column"): value for name, value in named.items() if value is not None}

    def check_installed(self) -> None:
        """Check that the required packages are installed."""
        for module, extra in self.needs.items():
            if find_spec(module) is None:
                what = f"{self.name} needs the package {module}, which is not installed"
                raise InputError("install.extra", what, fix=f"pip install 'loopwright[{extra}]'")

    def preflight(self, args: Any, say: Callable[[Any], None] | None = None) -> DataPlan:
        """Open and check the data files, and return the run's data plan; does not import torch."""
        plan = preflight(
            self.schema(args),
            data=args.data,
            train_file=args.train_file,
            validation_file=args.validation_file,
            test_file=args.test_file,
            columns=self.columns(args),
            options=self.data_options(args),
            say=say,
        )
        return settle_weights(args, plan, self) if self.weighs_classes and "train" in plan.splits else plan

    def find_model(self, name: str) -> str:
        """Resolve `--model` to a folder or a Hub id, or raise `InputError`; does not import torch."""
        from loopwright.tasks.text.models import find_model

        return find_model(name)

    def is_input(self, path: str) -> bool:
        """Whether a path given to `predict` is itself the input, such as an image, and not a file of rows."""
        return False

    def data_options(self, args: Any) -> DataOptions:
        """Return the options for reading the data: every flag that is an option of `DataOptions`."""
        named = {field.name: getattr(args, field.name) for field in fields(DataOptions) if hasattr(args, field.name)}
        lists = {
            name: listed_names(name, getattr(args, name)) for name in ("label_names", "drop_labels", "column_names")
        }
        named |= {**lists, "label_names": lists["label_names"] or None, "label_map": label_map(args.label_map)}
        return DataOptions(**named)

    def baselines(self, job: Job) -> Mapping[str, Mapping[str, float]]:
        """Return the scores of the trivial baselines, as metrics by baseline.

        Use `score_baselines` or `score_rows`: they keep the scores of each row, which the verdict on the model needs.
        Called once, when a new run begins, before its model is trained; baselines.json keeps them for a resumed run.
        A baseline that uses the model leaves its weights, its mode and the generators unchanged.
        """
        return {}

    def demo_data(self) -> DemoData:
        """Return the rows of the demo, for `lw demo`; raise `DataError` if there are none."""
        from loopwright.demos import stdlib_docs

        if self.demo_rows is None:
            raise DataError(f"{self.name} has no demo data")
        module, function, kind = self.demo_rows
        make = getattr(import_module(f"loopwright.demos.{module}"), function)
        found: DemoData = make() if kind is None else stdlib_docs.demo(self.name, make, kind)
        return found

    def demo_files(self, variant: str | None = None, source: str | Path | None = None) -> DemoFiles:
        """Return the files of the demo, made from its rows. Override it for data that is not rows or has variants."""
        return self.demo_data().files()

    def describe_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parts of a row, by role, to write beside its prediction: its inputs."""
        shown = [role for role in self.roles if role.is_input and role.name in row]
        return {role.name: row[role.name] for role in shown if role.is_required or row[role.name]}

    def check_model(self, name: str) -> None:
        """Refuse a model that cannot be opened; called with the result of `find_model`, before anything is created."""
        from loopwright.tasks.text.models import load_config

        load_config(name)

    @abstractmethod
    def build(self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin) -> Job:
        """Build the model and the collator; the generators are already seeded.

        Settings chosen from the data, such as `max_length`, are written into `args`: config.yaml keeps them. For the
        model of a run (`origin.is_run`) the data is not inspected.
        """

    @abstractmethod
    def create_dataset(self, job: Job, rows: Rows, *, is_labelled: bool, is_training: bool = False) -> Any:
        """Return a dataset of rows, dicts by role, as features; its items have a "position".

        `is_labelled` is False for `predict`. Random draws are repeated each time only if `is_training`.
        """

    def cache_samples(self, job: Job) -> str | None:
        """Keep in memory or on disk what the datasets of a run read again in each epoch; return a note about it."""
        return None

    def predicted_for(self, plan: DataPlan) -> tuple[str, ...]:
        """Return the fields of a prediction of a run with this plan. Override it if the labels decide."""
        return self.predicted

    def rows_of_texts(self, plan: DataPlan, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Return rows, by role, for the inputs typed after `lw predict RUN`: a row per text, as its first role."""
        role = self.roles[0]
        return [{role.name: each if role.kind == "text" else each.split()} for each in texts]

    def parameter_groups(self, job: Job) -> list[dict[str, Any]]:
        """Return the trainable weights as groups for the optimizer; each may have its own "lr"."""
        from loopwright.optimizers import weight_decay_groups

        return weight_decay_groups(job.model, job.training.weight_decay)

    def finish_adapters(self, job: Job) -> None:  # noqa: B027 - most tasks train nothing else
        """Choose what else is trained; called when adapters were added, and all other weights are frozen."""

    def example_input(self, job: Job, text: str) -> str:
        """Return a text of the validation data as an input for `lw predict`."""
        return text

    def model_card_lines(self, job: Job) -> list[str]:
        """Return a description of the model's inputs for the model card."""
        return []

    def callbacks(self, job: Job, run: RunFolder) -> list[Any]:
        """Return the callbacks that a run of this task needs; called when it begins and when it resumes."""
        from loopwright.tasks.text.callbacks import FirstBatch, SamplesAtEvaluations
        from loopwright.tasks.text.samples import FIRST_BATCH, write_batch

        first = FirstBatch(job, run.path / "samples" / FIRST_BATCH, partial(write_batch, job))
        return [first, SamplesAtEvaluations(job, run)]

    def describe_sample(self, job: Job, batch: Mapping[str, Any], index: int) -> list[tuple[str, str]]:
        """Return (name, text) pairs that describe a sample of a training batch; called for a few of the first batch.

        The batch has "input_ids": (samples, tokens), or (samples, texts, tokens).
        """
        from loopwright.tasks.text.samples import target_of, tokens_of

        if batch["input_ids"].dim() > 2:
            numbers = range(batch["input_ids"].shape[1])
            fields = [(f"text {number}", tokens_of(job, batch, index, number)) for number in numbers]
        else:
            fields = [("text", tokens_of(job, batch, index))]
        return fields + ([("label", target_of(job, batch["labels"][index]))] if "labels" in batch else [])

    def preview(self, job: Job) -> list[tuple[str, bool]]:
        """Return the first training row as text for `lw check`, in pieces, each with whether its tokens are trained."""
        return []

    def written_samples(self, job: Job, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return some texts that the model writes now, for the report; called after each evaluation.

        It leaves the weights, the mode and the generators unchanged. A sample has "start" and "written", or "source",
        "written" and "true". `samples` are the first ones of the evaluation, as returned by the scorer.
        """
        return []

    def compute_loss(self, job: Job, model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the mean loss of a batch and the model's outputs; called for training and evaluation."""
        outputs = model(**self.model_inputs(batch))
        return outputs.loss, outputs

    def model_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model inputs of a batch."""
        return {name: value for name, value in batch.items() if name not in self.not_inputs}

    def count_items(self, batch: Mapping[str, Any]) -> float | None:
        """Return the number of items that the batch loss averages over; None if these are its samples."""
        if "num_items" in batch:
            return float(batch["num_items"].sum())
        from loopwright.tasks.text.models import IGNORED

        return float((batch["labels"] != IGNORED).sum()) if self.counts_labels and "labels" in batch else None

    def why_not_cut(self, job: Job) -> str | None:
        """Return why a batch must not be split to fit into memory; None unless its loss compares its samples."""
        return None

    @abstractmethod
    def create_scorer(self, job: Job) -> Scorer:
        """Return a scorer for the metrics of one evaluation."""

    @abstractmethod
    def score_batch(self, job: Job, batch: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
        """Return one dict per sample of an evaluation batch, on the host; called without gradients.

        It has "position", the scorer's inputs (such as "prediction" and "reference"), "loss" if samples have one, which
        ranks the worst, and "sure" (from 0 to 1) if the model is sure that the label is wrong. For an interval of the
        training loss it has the keys that `LossInterval` looks for. With `--group_column` the trainer adds "group", a
        number for the value in that column.
        """

    @abstractmethod
    def predict_batch(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a prediction per sample of an unlabelled batch, as it is printed and written."""

    def predict_rows(self, job: Job, rows: Rows) -> Iterator[dict[str, Any]]:
        """Yield a prediction for each unlabelled row, in order; called with the model in evaluation mode.

        A row without features, because of a ValueError, has {"error": the exception} as its prediction. Override it if
        a row becomes several features.
        """
        import torch

        from loopwright.engine.nested import to_device

        dataset = self.create_dataset(job, rows, is_labelled=False)
        size, device = job.training.eval_batch_size, next(job.model.parameters()).device
        for start in range(0, len(dataset), size):
            features: list[Any] = [_feature(dataset, index) for index in range(start, min(start + size, len(dataset)))]
            usable = [each for each in features if not isinstance(each, Exception)]
            found: Iterator[dict[str, Any]] = iter(())
            if usable:
                with torch.inference_mode():
                    found = iter(self.predict_batch(job, job.model, to_device(job.collate_fn(usable), device)))
            yield from ({"error": each} if isinstance(each, Exception) else next(found) for each in features)

    def readable(self, job: Job, sample: Mapping[str, Any], row: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return a scored sample as it is written to files, with names instead of numbers.

        `sample` is as returned by the scorer; `row` is None if the dataset has no `rows`.
        """
        return dict(sample)

    def illustrate(self, job: Job, run: RunFolder, worst: Sequence[Mapping[str, Any]]) -> list[Path]:
        """Write pictures and tables into the run folder, and return the files; called at the end of a run.

        The model is unsharded and has the best weights, `eval/predictions.jsonl` exists, and `worst` is `readable`.
        """
        if self.samples_at_end:
            from loopwright.tasks.text.samples import SAMPLES, add_samples

            add_samples(run.evaluation / SAMPLES, None, self.written_samples(job, []))
        return []

    def save(self, job: Job, folder: Path) -> None:
        """Write the best model and its processor in transformers' format, or the weights of a plain module."""
        if not hasattr(job.model, "save_pretrained"):
            from safetensors.torch import save

            weights = {name: value.detach().cpu().contiguous() for name, value in job.model.state_dict().items()}
            write_atomically(folder / _WEIGHTS, save(weights, metadata={"format": "pt"}))
            return
        from loopwright.tasks.text.models import quiet

        with quiet():
            job.model.save_pretrained(folder)
        give_usual_mode(folder)
        save_processor(job.processor, folder)

    def save_skeleton(self, job: Job, folder: Path) -> None:
        """Write the config and tokenizer, to rebuild the model before loading weights; nothing for a plain module."""
        if not hasattr(job.model, "save_pretrained"):
            return
        inner = job.model.get_base_model() if job.args.lora else job.model
        inner.config.architectures = [type(inner).__name__]
        config = copy.deepcopy(inner.config)
        if job.args.load_in:
            del config.quantization_config  # a resumed run quantizes its base again
        config.save_pretrained(folder)
        if self.keeps_generation:
            inner.generation_config.save_pretrained(folder)
        save_processor(job.processor, folder)


def _feature(dataset: Any, index: int) -> Any:
    """Return the features of a row, or the error that it is unusable; a missing package concerns all rows."""
    try:
        return dataset[index]
    except ValueError as error:
        if isinstance(error, InputError) and str(error.code).startswith("install."):
            raise
        return error


def save_processor(processor: Any, folder: Path) -> None:
    """Write a tokenizer as it was made, without the truncation of its last call and the place it was opened from."""
    if getattr(processor, "is_fast", False):
        processor.backend_tokenizer.no_truncation()
        processor.backend_tokenizer.no_padding()
    for name in ("is_local", "local_files_only"):
        getattr(processor, "init_kwargs", {}).pop(name, None)
    processor.save_pretrained(folder)
