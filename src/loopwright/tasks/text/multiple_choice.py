"""multiple-choice: which of several texts continues or answers a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from loopwright.baselines import MostFrequent, chance_accuracy, score
from loopwright.errors import InputError
from loopwright.metrics import load as load_metric
from loopwright.sources import DataPlan, Role
from loopwright.tasks.arguments import ShortName, TaskArguments, TaskTrainingArguments, flag
from loopwright.tasks.base import COMMON_DEFAULTS, Job, Origin, Rows, Task
from loopwright.tasks.data import RowDataset, RunData
from loopwright.tasks.scoring import JointScorer, LossInterval, MetricScorer, Scorer
from loopwright.tasks.text import models as text
from loopwright.tasks.text.groups import GroupCollator

if TYPE_CHECKING:
    from loopwright.demos import DemoData

AUTO_CLASS = "AutoModelForMultipleChoice"
_SURE = 0.9  # confidence above which a contradicted label is suspected


@dataclass
class MultipleChoiceArguments(TaskArguments):
    """The flags of multiple-choice."""

    context_column: str | None = flag(None, "Column of the text before the choices; guessed where there is no doubt.")
    start_column: str | None = flag(None, "Column of what all choices of a row begin with, as SWAG's sent2.")
    choices_column: str | None = flag(None, "Column with a list of choices, or a column for each with commas between.")
    label_column: str | None = flag(None, "Column of the right choice's number, from 0.")
    max_length: int | None = flag(None, "Tokens of a text with a choice that are kept; unset looks at the data.")

    max_seq_length = ShortName("max_length", int)


class MultipleChoice(Task):
    """Fine-tunes a model that gives each choice a score."""

    name = "multiple-choice"
    summary = "which of several texts goes on from a text, or answers it"
    roles = (
        Role("context", names=("sent1", "context", "question", "startphrase", "prompt")),
        Role("start", names=("sent2",), is_required=False, may_be_empty=True),
        Role("choices", "texts", names=("ending*", "choice*", "option*", "choices", "endings", "options")),
        Role("label", "position", names=("label", "answer", "gold", "correct"), is_input=False),
    )
    explanation = (
        "data      csv, tsv, json, jsonl or parquet: a text, its choices, and the number of the right one, from 0",
        "choices   a column for each (ending0 ending1 ..., choice_a choice_b ...), or one column with lists;",
        "          rows may differ in how many they have",
        "columns   --context_column --start_column --choices_column --label_column; guessed where there is no doubt",
        "SWAG      sent1, sent2, ending0 to ending3 and label are found by themselves",
        "labels    letters: --label_map A=0 B=1 C=2 D=3",
        "metric    accuracy, beside that of chance",
        'predict   lw predict RUN "text" "choice" "choice", or lines with a tab between text and choices',
    )
    example = "lw train multiple-choice --data swag.csv --model ./minilm --epochs 3 --batch 16 --lr 5e-5"
    arguments = MultipleChoiceArguments
    defaults = MappingProxyType({**COMMON_DEFAULTS, "learning_rate": 5e-5, "per_device_train_batch_size": 16})
    adapter_kind = "SEQ_CLS"  # peft's kind that also trains the head "classifier"
    demo = MappingProxyType(
        {"freeze": "4", "max_length": 32, "epochs": 1, "batch": 8, "lr": 4e-4, "warmup_steps": 0.1, "threads": 1}
    )
    demo_model = "minilm"
    demo_note = "which of four functions a docstring is about: accuracy 0.75 (chance 0.25), 85 s"

    # --- data ---------------------------------------------------------------------------------------------------

    def demo_data(self) -> DemoData:
        """Return rows of docstrings."""
        from loopwright.demos import function_rows, stdlib_docs

        return stdlib_docs.demo(self.name, function_rows.choice_rows, "csv")

    def preflight(self, args: Any, say: Any = None) -> DataPlan:
        """Check the data files, and that every list of choices contains the labelled one."""
        plan = super().preflight(args, say)
        if isinstance(plan.columns["choices"], str):  # lists may differ in length; columns do not
            for split in plan.splits:
                rows = plan.rows(split)
                for index in range(len(rows)):
                    _check_row(rows[index], rows.place(index))
        return plan

    def rows_of_texts(self, plan: DataPlan, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Return a row of a text and the choices after it; or a row per text with tabs in it."""
        groups = [each.split("\t") for each in texts] if any("\t" in each for each in texts) else [list(texts)]
        for group in groups:
            if len(group) < 3:
                raise InputError(
                    "args.value",
                    f"the model chooses among texts, got {max(0, len(group) - 1)} to choose from",
                    saw=[repr(each)[:80] for each in group],
                    fix='give a text and its choices: "text" "choice" "choice", or one line with tabs between them',
                )
        return [{"context": context, "choices": choices} for context, *choices in groups]

    def baselines(self, job: Job) -> dict[str, dict[str, float]]:
        """Score chance and the most frequent position."""
        data, usual = job.data, MostFrequent()
        for rows in data.batches("train"):
            usual.learn(rows, [row["label"] for row in rows])
        pairs = ((rows, [row["label"] for row in rows]) for rows in data.batches("validation"))
        return {
            "chance": chance_accuracy(len(row["choices"]) for rows in data.batches("validation") for row in rows),
            "majority": {name: float(value) for name, value in score(usual, pairs, load_metric("accuracy")).items()},
        }

    # --- model --------------------------------------------------------------------------------------------------

    def build(self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin) -> Job:
        """Load or build a model with one output per text and choice."""
        if origin.path is None:
            tokenizer = text.train_tokenizer(_flat_texts(data))
            loaded = text.small_encoder(AUTO_CLASS, tokenizer)
        else:
            tokenizer = text.load_tokenizer(origin.path)
            loaded = text.load_model(origin, AUTO_CLASS)
        text.match_pad_token(loaded.model, tokenizer)
        notes = []
        if not origin.is_run:
            limit = text.longest_allowed(tokenizer, loaded.model.config)
            lengths = text.choose_length(
                args.max_length,
                lambda row: max(map(len, tokenizer(*_pairs(row))["input_ids"])),
                data.rows("train"),
                limit,
            )
            args.max_length = lengths.max_length
            notes.append(lengths.note)
        collator = GroupCollator(tokenizer, 8 if training.fp16 or training.bf16 else None)
        return Job(self, data, args, training, loaded.model, tokenizer, collator, notes, loaded.new)

    def create_dataset(
        self, job: Job, rows: Rows, *, is_labelled: bool, is_training: bool = False, limit: int | None = None
    ) -> Any:
        """Return the tokenised rows, the text once with each choice."""
        return RowDataset(rows, Encoder(job.processor, job.args.max_length, is_labelled), limit)

    def model_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model inputs; the loss is computed here, as samples may have fewer choices than others."""
        return {name: value for name, value in batch.items() if name not in ("position", "is_text", "labels")}

    def compute_loss(self, job: Job, model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the mean cross-entropy over the choices of each sample, and the logits."""
        from torch.nn import functional

        logits = self._logits(model, batch)
        return functional.cross_entropy(logits, batch["labels"]), logits

    def _logits(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """Return (samples, choices), with minus infinity for padding choices."""
        return model(**self.model_inputs(batch)).logits.float().masked_fill(~batch["is_text"], -float("inf"))

    # --- scoring ------------------------------------------------------------------------------------------------

    def create_scorer(self, job: Job) -> Scorer:
        """Return an accuracy scorer."""
        scorer = MetricScorer(lambda: load_metric("accuracy"), {"accuracy": True})
        return JointScorer([scorer, LossInterval()])

    def score_batch(self, job: Job, batch: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
        """Return prediction, label, loss and the confidence in a different choice, if high."""
        from torch.nn import functional

        losses = functional.cross_entropy(outputs, batch["labels"], reduction="none")
        confidence, predicted = outputs.softmax(-1).max(-1)
        columns = (batch["position"], predicted, batch["labels"], losses, confidence)
        names = ("position", "prediction", "reference", "loss", "confidence")
        samples = [
            dict(zip(names, values, strict=True)) for values in zip(*(each.tolist() for each in columns), strict=True)
        ]
        for sample in samples:
            if sample["prediction"] != sample["reference"] and sample["confidence"] >= _SURE:
                sample["sure"] = sample["confidence"]
        return samples

    def predict_batch(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the index of the chosen text of each row, from 0, and the share of each choice."""
        shares = self._logits(model, batch).softmax(-1).tolist()
        counts = batch["is_text"].sum(-1).tolist()
        found = []
        for row, count in zip(shares, counts, strict=True):
            scores = [round(share, 6) for share in row[:count]]
            choice = max(range(count), key=row.__getitem__)
            found.append({"choice": choice, "score": scores[choice], "scores": scores})
        return found

    def predict_rows(self, job: Job, rows: Rows) -> Iterator[dict[str, Any]]:
        """Yield for each row the chosen text, its index and its score."""
        for index, found in enumerate(super().predict_rows(job, rows)):
            yield {"choice": found["choice"], "text": rows[index]["choices"][found["choice"]], **found}


class Encoder:
    """Encodes a row in loader workers, each text with a choice cut to `max_length` tokens."""

    def __init__(self, tokenizer: Any, max_length: int, is_labelled: bool) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._is_labelled = is_labelled

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tokens of the text with each choice, and the label."""
        _check_row(row, "a row")
        features = dict(self._tokenizer(*_pairs(row), truncation=True, max_length=self._max_length))
        if self._is_labelled:
            features["labels"] = row["label"]
        return features


def _pairs(row: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the text once per choice, and the choices, each after their common beginning."""
    start = row.get("start") or ""
    return [row["context"]] * len(row["choices"]), [f"{start} {choice}".strip() for choice in row["choices"]]


def _check_row(row: Mapping[str, Any], place: str) -> None:
    count, label = len(row["choices"]), row.get("label")
    if count < 2:
        raise InputError(
            "data.value",
            f"{place} has {count} choice{'' if count == 1 else 's'}: there is nothing to choose",
            saw=[repr(row["choices"])[:120]],
            fix="give each row two choices or more, or leave it out",
        )
    if label is not None and label >= count:
        raise InputError(
            "data.value",
            f"{place} has {count} choices, and its label is {label}",
            saw=[f"labels are numbers from 0: {', '.join(map(str, range(count)))}"],
            fix="count from 0, or --label_map 1=0 2=1 3=2 ... if the labels count from 1",
        )


def _flat_texts(data: RunData) -> Iterator[str]:
    for rows in data.batches("train"):
        for row in rows:
            yield from (row["context"], *_pairs(row)[1])
