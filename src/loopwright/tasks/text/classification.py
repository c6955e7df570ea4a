"""text-classification: a class, several classes or a number for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from loopwright.baselines import MeanValue, MostFrequent, WordCounts, score
from loopwright.metrics import Combined, Metric
from loopwright.metrics import load as load_metric
from loopwright.sources import DataPlan, Labels, Role, Schema
from loopwright.tasks.arguments import ShortName, TaskArguments, TaskTrainingArguments, flag
from loopwright.tasks.base import COMMON_DEFAULTS, Job, Origin, Rows, Task
from loopwright.tasks.data import RowDataset, RunData
from loopwright.tasks.scoring import JointScorer, LossInterval, MetricScorer, Scorer
from loopwright.tasks.text import models as text

if TYPE_CHECKING:
    from loopwright.demos import DemoData

AUTO_CLASS = "AutoModelForSequenceClassification"
_SURE = 0.9  # confidence above which a contradicted label is suspected
_PROBLEM_TYPES = {
    "class": "single_label_classification",
    "multi": "multi_label_classification",
    "float": "regression",
}
# The columns of GLUE's tasks: the text and, if there is one, the second text.
_GLUE_COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cola": ("sentence",),
        "sst2": ("sentence",),
        "mrpc": ("sentence1", "sentence2"),
        "qqp": ("question1", "question2"),
        "stsb": ("sentence1", "sentence2"),
        "mnli": ("premise", "hypothesis"),
        "qnli": ("question", "sentence"),
        "rte": ("sentence1", "sentence2"),
        "wnli": ("sentence1", "sentence2"),
    }
)


@dataclass
class TextClassificationArguments(TaskArguments):
    """The flags of text-classification."""

    text_column: str | None = flag(None, "Column of the text; guessed where there is no doubt.")
    text_pair_column: str | None = flag(None, "Column of the second text of a pair.")
    label_column: str | None = flag(None, "Column of the label.")
    label_kind: str | None = flag(
        None, "What labels are: class, multi or float; unset looks at them.", choices=("class", "multi", "float")
    )
    label_separator: str = flag("|", "What stands between the classes of a row that has several.")
    glue: str | None = flag(None, "Columns and metrics of this task of GLUE.", choices=tuple(_GLUE_COLUMNS))
    max_length: int | None = flag(None, "Tokens of a text that are kept; unset looks at the data.")

    task_name = ShortName("glue", str)
    max_seq_length = ShortName("max_length", int)


class TextClassification(Task):
    """Fine-tunes a sequence classifier."""

    name = "text-classification"
    summary = "a label, several labels or a number for a text or a pair of texts"
    roles = (
        Role("text", names=text.TEXT_NAMES),
        Role("text_pair", names=text.TEXT_PAIR_NAMES, is_required=False),
        Role(
            "label",
            "label",
            names=(
                *("label", "labels", "class", "category", "target", "stars", "rating", "sentiment", "score", "topic"),
                "y",
            ),
            is_input=False,
        ),
    )
    explanation = (
        "data      csv, tsv, json, jsonl or parquet: a column of text, a column of labels; for pairs two of text",
        "labels    words or whole numbers: classes; lists, or words with | between them: several classes per row;",
        "          numbers with a point: a number to predict (--label_kind says it outright)",
        "columns   --text_column --text_pair_column --label_column; guessed where there is no doubt",
        "GLUE      --glue mrpc (cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli): its columns and metrics",
        "metric    accuracy and F1 (macro for more than two classes); F1 micro; Pearson's correlation",
    )
    example = "lw train text-classification --data reviews.csv --model ./minilm --epochs 3 --batch 16 --lr 5e-5"
    arguments = TextClassificationArguments
    defaults = MappingProxyType({**COMMON_DEFAULTS, "learning_rate": 5e-5, "per_device_train_batch_size": 16})
    adapter_kind = "SEQ_CLS"
    demo = MappingProxyType(
        {"freeze": "4", "max_length": 24, "epochs": 2, "batch": 16, "lr": 5e-4, "warmup_steps": 0.1, "threads": 1}
    )
    demo_model = "minilm"
    demo_note = "which of 12 parts of Python's library a docstring is from: accuracy 0.79 (chance 0.08), 55 s"

    # --- data ---------------------------------------------------------------------------------------------------

    def demo_data(self) -> DemoData:
        """Return rows of docstrings."""
        from loopwright.demos import stdlib_docs, text_rows

        return stdlib_docs.demo(self.name, text_rows.area_rows, "csv")

    def schema(self, args: Any) -> Schema:
        """Return the roles; a GLUE task has its own column names."""
        schema = super().schema(args)
        if args.glue is None:
            return schema
        roles = zip(("text", "text_pair"), _GLUE_COLUMNS[args.glue], strict=False)
        return schema.with_names({role: (column,) for role, column in roles})

    def schema_of_model(self, schema: Schema, plan: DataPlan) -> Schema:
        """Require the second text if the model was trained on pairs."""
        is_pair = "text_pair" in plan.columns
        roles = (replace(role, is_required=is_pair) if role.name == "text_pair" else role for role in schema.roles)
        return replace(schema, roles=tuple(roles))

    def rows_of_texts(self, plan: DataPlan, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Return a row per text; for pairs, a row per two texts, or per text with a tab in it."""
        if "text_pair" not in plan.columns:
            return [{"text": each} for each in texts]
        fix = "give two texts for each pair, or one with a tab between them"
        pairs = text.pairs_of(texts, "the model takes pairs of texts", fix)
        return [{"text": first, "text_pair": second} for first, second in pairs]

    def baselines(self, job: Job) -> dict[str, dict[str, float]]:
        """Score the most frequent class and word counts, or the mean of numbers."""
        data, labels = job.data, _labels(job.plan)
        rivals: dict[str, Any] = {"majority": MostFrequent()}
        if labels.kind == "float":
            rivals = {"mean": MeanValue()}
        elif labels.kind == "class":
            rivals["word-count"] = WordCounts()
        for rows in data.batches("train"):
            for rival in rivals.values():
                rival.learn(_texts(rows), _targets(labels, rows))
        found = {}
        for name, rival in rivals.items():
            pairs = ((_texts(rows), _targets(labels, rows)) for rows in data.batches("validation"))
            scores = score(rival, pairs, _create_metric(labels.kind, len(labels.names), job.args.glue))
            found[name] = {key: float(value) for key, value in scores.items() if value == value}
        return found

    # --- model --------------------------------------------------------------------------------------------------

    def build(self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin) -> Job:
        """Load or build a classifier with one output per label."""
        from loopwright.data.collators import DataCollatorWithPadding

        labels = _labels(data.plan)
        names = list(labels.names) or ["value"]
        changes = {
            "num_labels": len(names),
            "id2label": dict(enumerate(names)),
            "label2id": {name: number for number, name in enumerate(names)},
            "problem_type": _PROBLEM_TYPES[labels.kind],
        }
        if origin.path is None:
            tokenizer = text.train_tokenizer(_flat_texts(data))
            loaded = text.small_encoder(AUTO_CLASS, tokenizer, **changes)
        else:
            tokenizer = text.load_tokenizer(origin.path)
            loaded = text.load_model(origin, AUTO_CLASS, **changes)
        text.match_pad_token(loaded.model, tokenizer)
        notes = []
        if not origin.is_run:
            limit = text.longest_allowed(tokenizer, loaded.model.config)
            lengths = text.choose_length(
                args.max_length, lambda row: len(tokenizer(*_pair(row))["input_ids"]), data.rows("train"), limit
            )
            args.max_length = lengths.max_length
            notes.append(lengths.note)
        multiple = 8 if training.fp16 or training.bf16 else None
        collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)
        return Job(self, data, args, training, loaded.model, tokenizer, collator, notes, loaded.new)

    def create_dataset(
        self, job: Job, rows: Rows, *, is_labelled: bool, is_training: bool = False, limit: int | None = None
    ) -> Any:
        """Return the tokenised rows, with their labels."""
        labels = _labels(job.plan) if is_labelled else None
        return RowDataset(rows, Encoder(job.processor, job.args.max_length, labels), limit)

    # --- scoring ------------------------------------------------------------------------------------------------

    def create_scorer(self, job: Job) -> Scorer:
        """Return a scorer for the kind of labels or the GLUE task."""
        kind, num_labels, glue = _labels(job.plan).kind, len(_labels(job.plan).names), job.args.glue
        directions = {name: True for name in _result_names(kind, glue)}
        if "mse" in directions:
            directions["mse"] = False
        scorer = MetricScorer(lambda: _create_metric(kind, num_labels, glue), directions)
        return JointScorer([scorer, LossInterval()])

    def score_batch(self, job: Job, batch: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
        """Return prediction, label, loss and the confidence in a different label, if high."""
        from torch.nn import functional

        logits, labels, kind = outputs.logits.float(), batch["labels"], _labels(job.plan).kind
        if kind == "float":
            values = logits.squeeze(-1)
            losses = (values - labels.float()).square()
            columns = {"prediction": values, "reference": labels, "loss": losses}
            return _samples(batch, columns)
        if kind == "multi":
            losses = functional.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(-1)
            columns = {"prediction": (logits > 0).long(), "reference": labels.long(), "loss": losses}
            return _samples(batch, columns)
        losses = functional.cross_entropy(logits, labels, reduction="none")
        confidence, predicted = logits.softmax(-1).max(-1)
        columns = {"prediction": predicted, "reference": labels, "loss": losses, "confidence": confidence}
        samples = _samples(batch, columns)
        for sample in samples:
            if sample["prediction"] != sample["reference"] and sample["confidence"] >= _SURE:
                sample["sure"] = sample["confidence"]
        return samples

    def readable(self, job: Job, sample: Mapping[str, Any], row: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the sample with the names of its labels."""
        labels, shown = _labels(job.plan), dict(sample)
        names = labels.names
        if labels.kind == "class":
            shown |= {key: names[sample[key]] for key in ("prediction", "reference")}
        elif labels.kind == "multi":
            for key in ("prediction", "reference"):
                shown[key] = [name for name, is_on in zip(names, sample[key], strict=True) if is_on]
        return shown

    def predict_batch(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the label and its score, the labels and their scores, or the number of each row."""
        logits = model(**self.model_inputs(batch)).logits.float()
        kind, names = _labels(job.plan).kind, _labels(job.plan).names
        if kind == "float":
            return [{"value": value} for value in logits.squeeze(-1).tolist()]
        if kind == "multi":
            return [
                {
                    "labels": [name for name, share in zip(names, row, strict=True) if share > 0.5],
                    "scores": {name: round(share, 6) for name, share in zip(names, row, strict=True)},
                }
                for row in logits.sigmoid().tolist()
            ]
        scores, predicted = logits.softmax(-1).max(-1)
        pairs = zip(predicted.tolist(), scores.tolist(), strict=True)
        return [{"label": names[number], "score": round(share, 6)} for number, share in pairs]


class Encoder:
    """Encodes a row in loader workers; `labels` is None for rows without labels."""

    def __init__(self, tokenizer: Any, max_length: int, labels: Any) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._labels = labels

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tokens of the texts, and the label."""
        features = dict(self._tokenizer(*_pair(row), truncation=True, max_length=self._max_length))
        if self._labels is not None:
            features["labels"] = _target(self._labels, row["label"])
        return features


def _labels(plan: DataPlan) -> Labels:
    assert plan.labels is not None, "the schema has a label"
    return plan.labels


def _pair(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (row["text"],) if row.get("text_pair") is None else (row["text"], row["text_pair"])


def _target(labels: Labels, label: Any) -> Any:
    """Return an encoded label as a training target; several labels become a 0/1 vector."""
    return [float(number in label) for number in range(len(labels.names))] if labels.kind == "multi" else label


def _texts(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [pair[0] if len(pair) == 1 else pair for pair in map(_pair, rows)]


def _targets(labels: Labels, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    targets = [_target(labels, row["label"]) for row in rows]
    return [[int(each) for each in target] for target in targets] if labels.kind == "multi" else targets


def _flat_texts(data: RunData) -> Iterator[str]:
    for rows in data.batches("train"):
        for row in rows:
            yield from _pair(row)


def _samples(batch: Mapping[str, Any], columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one dict per sample from columns that are still on the device."""
    lists = {"position": batch["position"].tolist(), **{name: column.tolist() for name, column in columns.items()}}
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def _create_metric(kind: str, num_labels: int, glue: str | None) -> Metric:
    if glue is not None:
        return load_metric("glue", glue)
    if kind == "float":
        return Combined([load_metric("pearsonr"), load_metric("spearmanr"), load_metric("mse")])
    if kind == "multi":
        return load_metric("multilabel")
    f1 = load_metric("f1") if num_labels == 2 else load_metric("f1", average="macro")
    return Combined([load_metric("accuracy"), f1])


def _result_names(kind: str, glue: str | None) -> list[str]:
    """Return the names of the results of `_create_metric`, the decisive one first."""
    if glue is not None:
        named = {"cola": ["matthews_correlation"], "stsb": ["pearson", "spearmanr"]}
        return named.get(glue, ["accuracy", "f1"] if glue in ("mrpc", "qqp") else ["accuracy"])
    if kind == "float":
        return ["pearsonr", "spearmanr", "mse"]
    return ["f1_micro", "f1_macro", "subset_accuracy"] if kind == "multi" else ["accuracy", "f1"]
