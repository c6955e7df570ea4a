"""text-classification: a class, several classes or a number for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from loopwright import baselines
from loopwright.metrics import Combined, Metric
from loopwright.metrics import load as load_metric
from loopwright.sources import DataPlan, Labels, Role, Schema
from loopwright.tasks import scoring
from loopwright.tasks.arguments import ShortName, TaskArguments, TaskTrainingArguments, flag, flag_list
from loopwright.tasks.base import COMMON_DEFAULTS, Job, Origin, Rows, Task
from loopwright.tasks.class_options import weighed, weighted_loss
from loopwright.tasks.data import RowDataset, RunData
from loopwright.tasks.text import models as text

AUTO_CLASS = "AutoModelForSequenceClassification"
_PROBLEM_TYPES = {"class": "single_label_classification", "multi": "multi_label_classification", "float": "regression"}
_LABEL_NAMES = "label labels class category target stars rating sentiment score topic y"
# The columns of GLUE's tasks: the text and, if there is one, the second text.
_PAIR = ("sentence1", "sentence2")
_GLUE_COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("cola", "sst2"), ("sentence",)),
        **dict.fromkeys(("mrpc", "stsb", "rte", "wnli"), _PAIR),
        "qqp": ("question1", "question2"),
        "mnli": ("premise", "hypothesis"),
        "qnli": ("question", "sentence"),
    }
)


@dataclass
class TextClassificationArguments(TaskArguments):
    text_column: str | None = flag(None, "Column of the text; inferred if unset.")
    text_pair_column: str | None = flag(None, "Column of the second text of a pair.")
    label_column: str | None = flag(None, "Column of the label; inferred if unset.")
    label_kind: str | None = flag(
        None, "Kind of the labels: class, multi or float; inferred if unset.", choices=("class", "multi", "float")
    )
    label_columns: list[str] = flag_list("Columns of 0 and 1, one for each class, if rows have several: toxic,insult.")
    label_separator: str | None = flag(
        None, "Separator of the classes of a row that has several; given, rows have several, and an empty cell none."
    )
    class_weights: list[str] = flag_list(
        "Weight of each class in the training loss: balanced, which favours rare classes, or A=2,B=0.5 (others: 1)."
    )
    glue: str | None = flag(None, "Use the columns and metrics of this GLUE task.", choices=tuple(_GLUE_COLUMNS))
    max_length: int | None = flag(None, "Maximum number of tokens of a text; chosen from the data if unset.")

    task_name = ShortName("glue", str)
    max_seq_length = ShortName("max_length", int)


class TextClassification(Task):
    name = "text-classification"
    summary = "a label, several labels or a number for a text or a pair of texts"
    roles = (
        Role("text", names=text.TEXT_NAMES),
        Role("text_pair", names=text.TEXT_PAIR_NAMES, is_required=False),
        Role("label", "label", names=tuple(_LABEL_NAMES.split()), is_input=False),
    )
    explanation = {
        "data": "csv, tsv, json, jsonl or parquet with a column of texts and a column of labels. For pairs of texts, "
        "two columns.",
        "labels": "Words or whole numbers are classes. Lists, texts with a --label_separator, and --label_columns of 0 "
        "and 1 are several classes per row. Numbers with a decimal point are values to predict. --label_kind overrides "
        "this. --label_names fixes names and order; --label_map, --drop_labels and --class_weights change classes.",
        "columns": "--text_column, --text_pair_column and --label_column; inferred if they are clear.",
        "GLUE": "--glue mrpc (or cola, sst2, qqp, stsb, mnli, qnli, rte, wnli) uses its columns and metrics.",
        "metric": "Accuracy and F1 (macro-averaged for more than two classes). For several classes per row "
        "micro-averaged F1, for values Pearson's and Spearman's correlation. The calibration error (ECE) of classes.",
    }
    example = "lw train text-classification --data reviews.csv --model ./minilm --epochs 3 --batch 16 --lr 5e-5"
    pretrained, pretrained_megabytes = "distilbert/distilbert-base-uncased", 268
    arguments = TextClassificationArguments
    defaults = {**COMMON_DEFAULTS, "learning_rate": 5e-5, "per_device_train_batch_size": 16}
    adapter_kind = "SEQ_CLS"
    kept_flags = ("glue",)
    weighs_classes = True
    demo = {"freeze": "4", "max_length": 24, "epochs": 2, "batch": 16, "lr": 5e-4, "warmup_steps": 0.1, "threads": 1}
    demo_model = "minilm"
    demo_rows = ("text_rows", "area_rows", "csv")
    demo_note = "which of 12 parts of Python's library a docstring is from: accuracy 0.79 (chance 0.08), 55 s"

    def schema(self, args: Any) -> Schema:
        schema = super().schema(args)
        if args.glue is None:
            return schema
        roles = zip(("text", "text_pair"), _GLUE_COLUMNS[args.glue], strict=False)
        return schema.with_names({role: (column,) for role, column in roles})

    def schema_of_model(self, schema: Schema, plan: DataPlan) -> Schema:
        is_pair = "text_pair" in plan.columns
        roles = (replace(role, is_required=is_pair) if role.name == "text_pair" else role for role in schema.roles)
        return replace(schema, roles=tuple(roles))

    def predicted_for(self, plan: DataPlan) -> tuple[str, ...]:
        return {"float": ("value",), "multi": ("labels", "scores")}.get(_labels(plan).kind, ("label", "score"))

    def rows_of_texts(self, plan: DataPlan, texts: Sequence[str]) -> list[dict[str, Any]]:
        if "text_pair" not in plan.columns:
            return [{"text": each} for each in texts]
        fix = "give two texts for each pair, or one with a tab between them"
        pairs = text.pairs_of(texts, "the model takes pairs of texts", fix)
        return [{"text": first, "text_pair": second} for first, second in pairs]

    def baselines(self, job: Job) -> Mapping[str, Mapping[str, float]]:
        labels = _labels(job.plan)
        rivals: dict[str, Any] = {"majority": baselines.MostFrequent()}
        if labels.kind == "float":
            rivals = {"mean": baselines.MeanValue(), "median": baselines.MedianValue()}
            rivals["word-regression"] = baselines.WordRegression()
        elif labels.kind == "multi":  # the constants with the best subset accuracy, micro F1 and macro F1
            rivals["frequent-labels"] = baselines.FrequentLabels()
            rivals["all-labels"] = baselines.Constant([1] * len(labels.names))
        elif len(labels.names) == 2:  # the constant with the best F1
            rivals[f"always {labels.names[1]}"] = baselines.Constant(1)
        if labels.kind != "float":
            rivals["word-count"] = baselines.WordCounts()

        def inputs(row: Mapping[str, Any]) -> Any:
            pair = _pair(row)
            return pair[0] if len(pair) == 1 else pair

        def target(row: Mapping[str, Any]) -> Any:
            found = _target(labels, row)
            return list(map(int, found)) if labels.kind == "multi" else found

        create = partial(_create_metric, labels.kind, len(labels.names), job.args.glue)
        return scoring.score_baselines(job.data, rivals, inputs, target, create)

    def build(self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin) -> Job:
        from loopwright.data.collators import DataCollatorWithPadding

        labels = _labels(data.plan)
        changes = text.label_config(labels.names or ["value"])
        texts = (each for row in data.each_row("train") for each in _pair(row))
        loaded = text.load_or_build(origin, AUTO_CLASS, texts, problem_type=_PROBLEM_TYPES[labels.kind], **changes)
        tokenizer, notes = loaded.processor, []
        if not origin.is_run:
            rows = data.rows("train")
            notes.append(text.settle_length(args, loaded, rows, lambda row: len(tokenizer(*_pair(row))["input_ids"])))
        collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=text.padding_multiple(training))
        return Job(self, data, args, training, loaded.model, tokenizer, collator, notes, loaded.new)

    def create_dataset(self, job: Job, rows: Rows, *, is_labelled: bool, is_training: bool = False) -> Any:
        target = partial(_target, _labels(job.plan)) if is_labelled else None
        encode = partial(text.encode, job.processor, job.args.max_length, _pair, target)
        return RowDataset(rows, weighed(job, encode, is_training))

    def compute_loss(self, job: Job, model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        loss, outputs = super().compute_loss(job, model, batch)
        weighted = weighted_loss(job, batch, outputs.logits)
        return loss if weighted is None else weighted, outputs

    def create_scorer(self, job: Job) -> scoring.Scorer:
        kind, num_labels, glue = _labels(job.plan).kind, len(_labels(job.plan).names), job.args.glue
        directions = {name: name != "mse" for name in _result_names(kind, glue)}
        scorer = scoring.MetricScorer(lambda: _create_metric(kind, num_labels, glue), directions)
        calibration = [] if kind == "float" else [scoring.CalibrationScorer()]
        return scoring.JointScorer([scorer, *calibration, scoring.LossInterval()])

    def score_batch(self, job: Job, batch: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
        from torch.nn import functional

        logits, labels, kind = outputs.logits.float(), batch["labels"], _labels(job.plan).kind
        confidences: dict[str, Any] = {}
        if kind == "float":
            predicted = logits.squeeze(-1)
            losses = (predicted - labels.float()).square()
        elif kind == "multi":
            losses = functional.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(-1)
            predicted, labels = (logits > 0).long(), labels.long()
            confidences["confidences"] = logits.abs().sigmoid()  # that each label is there, or that it is not
        else:
            losses = functional.cross_entropy(logits, labels, reduction="none")
            confidences["confidence"], predicted = logits.softmax(-1).max(-1)
        columns = {"position": batch["position"], "prediction": predicted, "reference": labels, "loss": losses}
        samples = scoring.samples_of(**columns, **confidences)
        return scoring.mark_suspects(samples) if kind == "class" else samples

    def readable(self, job: Job, sample: Mapping[str, Any], row: Mapping[str, Any] | None) -> dict[str, Any]:
        labels, shown = _labels(job.plan), dict(sample)
        names = labels.names
        if labels.kind == "class":
            shown |= {key: names[sample[key]] for key in ("prediction", "reference")}
        elif labels.kind == "multi":
            for key in ("prediction", "reference"):
                shown[key] = [name for name, is_on in zip(names, sample[key], strict=True) if is_on]
            shown["confidences"] = dict(zip(names, sample["confidences"], strict=True))
        return shown

    def predict_batch(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        logits = model(**self.model_inputs(batch)).logits.float()
        kind, names = _labels(job.plan).kind, _labels(job.plan).names
        if kind == "float":
            return [{"value": value} for value in logits.squeeze(-1).tolist()]
        if kind == "multi":
            rows = [dict(zip(names, row, strict=True)) for row in logits.sigmoid().tolist()]
            chosen = [[name for name, share in row.items() if share > 0.5] for row in rows]
            scores = [{name: round(share, 6) for name, share in row.items()} for row in rows]
            return scoring.samples_of(labels=chosen, scores=scores)
        confidences, predicted = logits.softmax(-1).max(-1)
        pairs = zip(predicted.tolist(), confidences.tolist(), strict=True)
        return [{"label": names[number], "score": round(share, 6)} for number, share in pairs]


def _labels(plan: DataPlan) -> Labels:
    assert plan.labels is not None, "the schema has a label"
    return plan.labels


def _pair(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (row["text"],) if row.get("text_pair") is None else (row["text"], row["text_pair"])


def _target(labels: Labels, row: Mapping[str, Any]) -> Any:
    label = row["label"]
    return [float(number in label) for number in range(len(labels.names))] if labels.kind == "multi" else label


def _create_metric(kind: str, num_labels: int, glue: str | None) -> Metric:
    if glue is not None:
        return load_metric("glue", glue)
    if kind == "float":
        return Combined([load_metric("pearsonr"), load_metric("spearmanr"), load_metric("mse")])
    if kind == "multi":
        return load_metric("multilabel")
    return scoring.class_metric(num_labels)


def _result_names(kind: str, glue: str | None) -> list[str]:
    """Return the names of the results of `_create_metric`, the decisive one first."""
    if glue is not None:
        named = {"cola": ["matthews_correlation"], "stsb": ["pearson", "spearmanr"]}
        return named.get(glue, ["accuracy", "f1"] if glue in ("mrpc", "qqp") else ["accuracy"])
    if kind == "float":
        return ["pearsonr", "spearmanr", "mse"]
    return ["f1_micro", "f1_macro", "subset_accuracy"] if kind == "multi" else ["accuracy", "f1"]
