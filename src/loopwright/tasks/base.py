"""What a task is. A new task is one module with a subclass of `Task` and `TASK = ThatClass()`; see docs/tasks.md.

A task is stateless: what one run needs is in a `Job`. No torch and no model library at the top level of a task's
module: they are imported inside the methods that need them, so that looking at a task costs nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from loopwright.errors import InputError
from loopwright.run_folder import RunFolder
from loopwright.run_folder.files import give_usual_mode
from loopwright.sources import SCHEMAS, DataOptions, DataPlan, Schema, preflight
from loopwright.tasks.arguments import TaskArguments, TaskTrainingArguments
from loopwright.tasks.data import RunData
from loopwright.tasks.scoring import Scorer

Rows = Any
"""Rows by number, each a dict by role, labels encoded: a split of a plan, or a list."""

COMMON_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_total_limit": 3,
        "logging_steps": 50,
        "per_device_eval_batch_size": 32,
    }
)
"""What every task sets in `TrainingArguments`, unless a file or a flag says otherwise."""


@dataclass(frozen=True)
class Origin:
    """Where a model comes from.

    Attributes:
        path: a folder or a Hub id; None builds a small model for the data.
        is_run: whether it is the `model` folder of the run that goes on: its tokenizer and its config hold, and the
            weights are loaded from a checkpoint unless they are there.
        module: a module that was handed over in Python, for a task with `takes_modules`; it wins over the path.
    """

    path: str | None
    is_run: bool = False
    module: Any = None


@dataclass
class Job:
    """Everything one run needs: `Task.build` makes it, and `datasets` are added where data is needed.

    Attributes:
        task: the task.
        data: the plan of the data, and its rows.
        args: the task's settings.
        training: the settings of the training.
        model: the model.
        processor: the tokenizer, to be saved beside the model.
        collate_fn: from features to a batch; a batch holds "position", the place of each sample in its dataset.
        notes: lines for the start block.
        new_weights: the names of weights that no file had.
        adapter_kind: what peft calls this job, where that is not the task's own `adapter_kind`.
        train_dataset: rows to train on, as features by position.
        eval_dataset: rows to evaluate on.
    """

    task: Task
    data: RunData
    args: Any
    training: TaskTrainingArguments
    model: Any
    processor: Any
    collate_fn: Callable[[Sequence[Any]], Any]
    notes: list[str] = field(default_factory=list)
    new_weights: list[str] = field(default_factory=list)
    adapter_kind: str | None = None
    train_dataset: Any = None
    eval_dataset: Any = None

    @property
    def plan(self) -> DataPlan:
        """The plan of the data."""
        return self.data.plan


class Task(ABC):
    """One task: what data it takes, how a model is made and scored.

    Attributes:
        name: on the command line.
        summary: one line.
        explanation: what `lw explain` says about its data, as lines.
        example: a command line that works.
        arguments: the dataclass of its flags.
        defaults: values of `TrainingArguments` and of its own flags that are right for it.
        adapter_kind: what peft calls the task.
        needs: modules that must be installed, each with the extra that has it; asked for before anything is read.
        prediction_flags: names of its own flags that `predict` and `evaluate` take, such as "num_beams".
        takes_modules: whether a model may be a module of PyTorch, handed over or made by "package.module:function".
        demo: the flags of its demo.
        demo_variants: of demos on other data: the flags that differ, by the name of the variant.
        demo_model: "minilm", or "" for one made from scratch.
        demo_note: what the demo shows, and how long it takes.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    explanation: ClassVar[tuple[str, ...]] = ()
    example: ClassVar[str]
    arguments: ClassVar[type[TaskArguments]] = TaskArguments
    defaults: ClassVar[Mapping[str, Any]] = COMMON_DEFAULTS
    adapter_kind: ClassVar[str | None] = None
    needs: ClassVar[Mapping[str, str]] = MappingProxyType({"transformers": "text"})
    prediction_flags: ClassVar[tuple[str, ...]] = ()
    takes_modules: ClassVar[bool] = False
    demo: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    demo_variants: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    demo_model: ClassVar[str] = "minilm"
    demo_note: ClassVar[str] = ""

    # --- before torch is imported -------------------------------------------------------------------------------

    def schema(self, args: Any) -> Schema:
        """Return the roles of the columns; called before the files are opened."""
        return SCHEMAS[self.name]

    def schema_of_model(self, schema: Schema, plan: DataPlan) -> Schema:
        """Return what rows of other files must have for a model; called before it evaluates or predicts them.

        Override it where a role that is not required is, once a model has been trained with it.

        Args:
            schema: of these rows.
            plan: of the data that the model was trained on.
        """
        return schema

    def columns(self, args: Any) -> dict[str, str]:
        """Return the columns that the user has named, by role: every flag `<role>_column` that is set."""
        named = {}
        for name in vars(args):
            if name.endswith("_column") and getattr(args, name) is not None:
                named[name.removesuffix("_column")] = getattr(args, name)
        return named

    def check_installed(self) -> None:
        """Refuse to begin where a package is missing.

        Raises:
            InputError: it says how to install it.
        """
        for module, extra in self.needs.items():
            if find_spec(module) is None:
                raise InputError(
                    "install.extra",
                    f"{self.name} needs the package {module}, which is not installed",
                    fix=f"pip install 'loopwright[{extra}]'",
                )

    def preflight(self, args: Any, say: Callable[[Any], None] | None = None) -> DataPlan:
        """Open and check the data files, and return the plan of the run's data; imports no torch.

        Raises:
            InputError: the data cannot be trained on; it says why and what to do.
        """
        return preflight(
            self.schema(args),
            data=args.data,
            train_file=args.train_file,
            validation_file=args.validation_file,
            test_file=args.test_file,
            columns=self.columns(args),
            options=self.data_options(args),
            say=say,
        )

    def find_model(self, name: str) -> str:
        """Return the folder or Hub id that a `--model` means; imports no torch.

        Raises:
            InputError: there can be no such model.
        """
        from loopwright.tasks.text.models import find_model

        return find_model(name)

    def is_input(self, path: str) -> bool:
        """Whether a path given to `predict` is itself what is predicted for, such as an image, and no file of rows."""
        return False

    def data_options(self, args: Any) -> DataOptions:
        """Return how the data is read: every flag that is an option of `DataOptions`."""
        named = {field.name: getattr(args, field.name) for field in fields(DataOptions) if hasattr(args, field.name)}
        return DataOptions(**{**named, "label_map": label_map(args.label_map)})

    def baselines(self, job: Job) -> dict[str, dict[str, float]]:
        """Return what trivial methods reach, as metrics by the method's name.

        Called once, when a new run begins, before its model is trained; baselines.json keeps it for a resumed run.
        A method that uses the model leaves its weights, its mode and the generators as they were.
        """
        return {}

    @abstractmethod
    def describe_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return what of a row, by role, is written beside its prediction."""

    # --- with torch ---------------------------------------------------------------------------------------------

    def check_model(self, name: str) -> None:
        """Refuse a model that cannot be opened; called with what `find_model` returned, before anything is made.

        Raises:
            InputError: it says why and what to do.
        """
        from loopwright.tasks.text.models import load_config

        load_config(name)

    @abstractmethod
    def build(self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin) -> Job:
        """Make the model and the collator; the generators are seeded before it is called.

        Whatever it chooses by looking at the data, such as `max_length`, it writes into `args`: config.yaml keeps it,
        and for the model of a run (`origin.is_run`) no data is looked at.

        Raises:
            InputError: the model does not fit; it says why and what to do.
        """

    @abstractmethod
    def create_dataset(
        self, job: Job, rows: Rows, *, is_labelled: bool, is_training: bool = False, limit: int | None = None
    ) -> Any:
        """Return a dataset of rows as features; its items have a "position".

        Args:
            job: as `build` made it.
            rows: dicts by role, by number.
            is_labelled: False for `predict`.
            is_training: whether they are trained on; what is drawn anew each time is drawn for these only.
            limit: take so many rows only.
        """

    @abstractmethod
    def rows_of_texts(self, plan: DataPlan, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Return rows, by role, of what was typed after `lw predict RUN`."""

    def parameter_groups(self, job: Job) -> list[dict[str, Any]]:
        """Return the weights that are trained, as groups for the optimizer; each may have an "lr" of its own."""
        from loopwright.optimizers import weight_decay_groups

        return weight_decay_groups(job.model, job.training.weight_decay)

    def callbacks(self, job: Job, run: RunFolder) -> list[Any]:
        """Return callbacks of the core that a run of this task needs; called when it begins and when it goes on."""
        from loopwright.tasks.text.callbacks import FirstBatchText, SamplesAtEvaluations

        return [FirstBatchText(job, run), SamplesAtEvaluations(job, run)]

    def describe_sample(self, job: Job, batch: Mapping[str, Any], index: int) -> list[tuple[str, str]]:
        """Return (name, text) of what is in a training batch for a sample; called for a few of the first batch.

        Args:
            job: of the run.
            batch: with "input_ids": (samples, tokens), or (samples, texts, tokens).
            index: of the sample in the batch.
        """
        from loopwright.tasks.text.samples import target_of, tokens_of

        texts = range(batch["input_ids"].shape[1]) if batch["input_ids"].dim() > 2 else None
        fields = (
            [("text", tokens_of(job, batch, index))]
            if texts is None
            else [(f"text {number}", tokens_of(job, batch, index, number)) for number in texts]
        )
        return fields + ([("label", target_of(job, batch["labels"][index]))] if "labels" in batch else [])

    def written_samples(self, job: Job, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return some texts that the model writes now, to be shown in the report; called after each evaluation.

        It leaves the weights, the mode and the generators as they were. A sample has "start" and "written", or
        "source", "written" and "true".

        Args:
            job: of the run.
            samples: the first ones of the evaluation, as the scorer gave them back.
        """
        return []

    def compute_loss(self, job: Job, model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the mean loss of a batch and the model's outputs; called for training and evaluation."""
        outputs = model(**self.model_inputs(batch))
        return outputs.loss, outputs

    def model_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return what of a batch the model takes: everything but the positions."""
        return {name: value for name, value in batch.items() if name != "position"}

    def count_items(self, batch: Mapping[str, Any]) -> float | None:
        """Return how many items the loss of a batch is a mean of; None if they are its samples."""
        return None

    def why_not_cut(self, job: Job) -> str | None:
        """Return why a batch may not be run in parts where it does not fit into memory; None if it may.

        Override it where the loss compares the samples of a batch with each other.
        """
        return None

    @abstractmethod
    def create_scorer(self, job: Job) -> Scorer:
        """Return what collects the metrics of one evaluation."""

    @abstractmethod
    def score_batch(self, job: Job, batch: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
        """Return one dict per sample of an evaluation batch, on the host; called without gradients.

        It has "position", what the scorer takes (such as "prediction" and "reference"), "loss" if samples have one,
        by which the worst are found, and "sure" (from 0 to 1) if the model is sure that the label is wrong. For an
        interval of the loss that is trained on it has what `LossInterval` is told to look for.
        """

    @abstractmethod
    def predict_batch(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a prediction per sample of a batch without labels, as it is printed and written."""

    def predict_rows(self, job: Job, rows: Rows) -> Iterator[dict[str, Any]]:
        """Yield a prediction for each row without a label, in order; called with the model in evaluation mode.

        Override it where a row becomes several features.
        """
        import torch

        from loopwright.engine.nested import to_device

        dataset = self.create_dataset(job, rows, is_labelled=False)
        size, device = job.training.eval_batch_size, next(job.model.parameters()).device
        for start in range(0, len(dataset), size):
            features = [dataset[index] for index in range(start, min(start + size, len(dataset)))]
            with torch.inference_mode():
                yield from self.predict_batch(job, job.model, to_device(job.collate_fn(features), device))

    def readable(self, job: Job, sample: Mapping[str, Any], row: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return a scored sample as it is written to files: with names instead of numbers.

        Args:
            job: of the run.
            sample: as the scorer gave it back.
            row: of the sample, by role; None where the dataset has no `rows`.
        """
        return dict(sample)

    def illustrate(self, job: Job, run: RunFolder, worst: Sequence[Mapping[str, Any]]) -> list[Path]:
        """Write pictures and tables into the run folder, and return the files; called at the end of a run.

        Args:
            job: of the run; its model is whole and has the best weights.
            run: the folder; `eval/predictions.jsonl` is written.
            worst: the worst samples, as `readable` gave them back.
        """
        return []

    def save(self, job: Job, folder: Path) -> None:
        """Write the model and its tokenizer so that transformers opens them; called with the best weights."""
        from loopwright.tasks.text.models import quiet

        with quiet():
            job.model.save_pretrained(folder)
        give_usual_mode(folder)
        job.processor.save_pretrained(folder)

    def save_skeleton(self, job: Job, folder: Path) -> None:
        """Write what a run needs to make its model again before the weights are loaded: config and tokenizer."""
        inner = job.model.get_base_model() if job.args.lora else job.model
        inner.config.architectures = [type(inner).__name__]
        inner.config.save_pretrained(folder)
        job.processor.save_pretrained(folder)


def label_map(words: Sequence[str]) -> dict[str, str]:
    """Return `--label_map positive=pos negative=neg` as a dict.

    Raises:
        InputError: a word has no equals sign.
    """
    pairs = [word.partition("=") for word in words]
    for word, (_, equals, _) in zip(words, pairs, strict=True):
        if not equals:
            raise InputError("args.value", f"--label_map {word!r} says nothing", fix="--label_map positive=pos")
    return {old.strip(): new.strip() for old, _, new in pairs}
