"""multiple-choice: which of several texts continues or answers a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from loopwright.baselines import MostFrequent, chance_accuracy
from loopwright.errors import InputError
from loopwright.metrics import load as load_metric
from loopwright.metrics.paired import rows_of
from loopwright.sources import DataPlan, Role
from loopwright.tasks import scoring
from loopwright.tasks.arguments import ShortName, TaskArguments, TaskTrainingArguments, flag
from loopwright.tasks.base import COMMON_DEFAULTS, Job, Origin, Rows, Task
from loopwright.tasks.data import RowDataset, RunData
from loopwright.tasks.text import models as text

AUTO_CLASS = "AutoModelForMultipleChoice"


@dataclass
class MultipleChoiceArguments(TaskArguments):
    context_column: str | None = flag(None, "Column of the text before the choices; inferred if unset.")
    start_column: str | None = flag(None, "Column of the common beginning of a row's choices, as SWAG's sent2.")
    choices_column: str | None = flag(None, "Column with lists of choices, or a column for each, separated by commas.")
    label_column: str | None = flag(None, "Column of the number of the right choice, from 0.")
    max_length: int | None = flag(
        None, "Maximum number of tokens of a text with a choice; chosen from the data if unset."
    )

    max_seq_length = ShortName("max_length", int)


class MultipleChoice(Task):
    name = "multiple-choice"
    summary = "which of several texts continues or answers a text"
    roles = (
        Role("context", names=("sent1", "context", "question", "startphrase", "prompt")),
        Role("start", names=("sent2",), is_required=False, may_be_empty=True),
        Role("choices", "texts", names=("ending*", "choice*", "option*", "choices", "endings", "options")),
        Role(
            "label",
            "position",
            names=("label", "answer", "gold", "correct", "correct_answer", "answerkey"),
            is_input=False,
        ),
    )
    explanation = {
        "data": "csv, tsv, json, jsonl or parquet with a text, its choices, and the number of the right one, from 0.",
        "choices": "A column for each (ending0 ending1 ..., choice_a choice_b ...), or one column with lists. Rows "
        "may have different numbers of choices.",
        "columns": "--context_column, --start_column, --choices_column, --label_column; inferred if they are clear.",
        "SWAG": "sent1, sent2, ending0 to ending3 and label are recognised.",
        "labels": "Letters become numbers with --label_map A=0 B=1 C=2 D=3.",
        "metric": "Accuracy, compared with chance, and the expected calibration error (ECE).",
        "predict": 'lw predict RUN "text" "choice" "choice", or lines with tabs between the text and its choices.',
    }
    example = "lw train multiple-choice --data swag.csv --model ./minilm --epochs 3 --batch 16 --lr 5e-5"
    pretrained, pretrained_megabytes = "distilbert/distilbert-base-uncased", 268
    scratch_updates = 500
    predicted = ("choice", "text", "score", "scores")
    arguments = MultipleChoiceArguments
    defaults = {**COMMON_DEFAULTS, "learning_rate": 5e-5, "per_device_train_batch_size": 16}
    adapter_kind = "SEQ_CLS"  # peft's kind that also trains the head "classifier"
    not_inputs = ("position", "is_text", "labels")  # the loss is computed here: samples may have fewer choices
    demo = {"freeze": "4", "max_length": 32, "epochs": 1, "batch": 8, "lr": 4e-4, "warmup_steps": 0.1, "threads": 1}
    demo_model = "minilm"
    demo_rows = ("function_rows", "choice_rows", "csv")
    demo_note = "which of four functions a docstring is about: accuracy 0.75 (chance 0.25), 85 s"

    def preflight(self, args: Any, say: Any = None) -> DataPlan:
        plan = super().preflight(args, say)
        if isinstance(plan.columns["choices"], str):  # lists may differ in length; columns do not
            for split in plan.splits:
                rows = plan.rows(split)
                for index in range(len(rows)):
                    _check_row(rows[index], rows.place(index))
        return plan

    def rows_of_texts(self, plan: DataPlan, texts: Sequence[str]) -> list[dict[str, Any]]:
        groups = [each.split("\t") for each in texts] if any("\t" in each for each in texts) else [list(texts)]
        if max(map(len, groups)) < 3:
            what = f"the model chooses among texts: it needs at least 2 choices, got {max(0, len(texts) - 1)}"
            fix = 'give a text and its choices: "text" "choice" "choice", or one line with tabs between them'
            raise InputError("args.value", what, saw=[repr(each)[:80] for each in texts], fix=fix)
        return [{"context": context, "choices": choices} for context, *choices in groups]

    def baselines(self, job: Job) -> Mapping[str, Mapping[str, float]]:
        counts = [len(row["choices"]) for row in job.data.each_row("validation")]
        usual = {"majority": MostFrequent()}
        scores = scoring.score_baselines(job.data, usual, "context", "label", lambda: load_metric("accuracy"))
        expected = rows_of(1 / np.asarray(counts))
        return {"chance": scoring.BaselineScores(chance_accuracy(counts), {"accuracy": expected}), **scores}

    def build(self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin) -> Job:
        texts = (each for row in data.each_row("train") for each in (row["context"], *_pairs(row)[1]))
        loaded = text.load_or_build(origin, AUTO_CLASS, texts)
        tokenizer, notes = loaded.processor, []

        def count(row: Mapping[str, Any]) -> int:
            return max(map(len, tokenizer(*_pairs(row))["input_ids"]))

        if not origin.is_run:
            notes.append(text.settle_length(args, loaded, data.rows("train"), count))
        collator = text.GroupCollator(tokenizer, text.padding_multiple(training))
        return Job(self, data, args, training, loaded.model, tokenizer, collator, notes, loaded.new)

    def create_dataset(self, job: Job, rows: Rows, *, is_labelled: bool, is_training: bool = False) -> Any:
        target = itemgetter("label") if is_labelled else None
        return RowDataset(rows, partial(text.encode, job.processor, job.args.max_length, _checked_pairs, target))

    def compute_loss(self, job: Job, model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        from torch.nn import functional

        logits = self._logits(model, batch)
        return functional.cross_entropy(logits, batch["labels"]), logits

    def _logits(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """Return (samples, choices), with minus infinity for padding choices."""
        return model(**self.model_inputs(batch)).logits.float().masked_fill(~batch["is_text"], -float("inf"))

    def create_scorer(self, job: Job) -> scoring.Scorer:
        scorer = scoring.MetricScorer(lambda: load_metric("accuracy"), {"accuracy": True})
        return scoring.JointScorer([scorer, scoring.CalibrationScorer(), scoring.LossInterval()])

    def score_batch(self, job: Job, batch: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
        from torch.nn import functional

        losses = functional.cross_entropy(outputs, batch["labels"], reduction="none")
        confidence, predicted = outputs.softmax(-1).max(-1)
        columns = {"position": batch["position"], "prediction": predicted, "reference": batch["labels"]}
        return scoring.mark_suspects(scoring.samples_of(**columns, loss=losses, confidence=confidence))

    def predict_batch(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        shares = self._logits(model, batch).softmax(-1).tolist()
        counts = batch["is_text"].sum(-1).tolist()
        found = []
        for row, count in zip(shares, counts, strict=True):
            scores = [round(share, 6) for share in row[:count]]
            choice = max(range(count), key=row.__getitem__)
            found.append({"choice": choice, "score": scores[choice], "scores": scores})
        return found

    def predict_rows(self, job: Job, rows: Rows) -> Iterator[dict[str, Any]]:
        for index, found in enumerate(super().predict_rows(job, rows)):
            if "error" not in found:
                found = {"choice": found["choice"], "text": rows[index]["choices"][found["choice"]], **found}
            yield found


def _checked_pairs(row: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    _check_row(row, "a row")
    return _pairs(row)


def _pairs(row: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    start = row.get("start") or ""
    return [row["context"]] * len(row["choices"]), [f"{start} {choice}".strip() for choice in row["choices"]]


def _check_row(row: Mapping[str, Any], place: str) -> None:
    count, label = len(row["choices"]), row.get("label")
    if count < 2:
        what = f"{place} has {count} choice{'' if count == 1 else 's'}: at least two are needed"
        fix = "give each row at least two choices, or remove it"
        raise InputError("data.value", what, saw=[repr(row["choices"])[:120]], fix=fix)
    if label is not None and label >= count:
        raise InputError(
            "data.value",
            f"{place} has {count} choices, and its label is {label}",
            saw=[f"labels are numbers from 0: {', '.join(map(str, range(count)))}"],
            fix=f"--label_map {' '.join(f'{place + 1}={place}' for place in range(count))}",
        )
