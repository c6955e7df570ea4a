"""summarization: a short text for a long one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loopwright.baselines import Lead
from loopwright.metrics import Metric
from loopwright.metrics import load as load_metric
from loopwright.sources import Role
from loopwright.tasks.arguments import ShortName, flag
from loopwright.tasks.base import COMMON_DEFAULTS
from loopwright.tasks.text.seq2seq import SequenceToSequence, SequenceToSequenceArguments


@dataclass
class SummarizationArguments(SequenceToSequenceArguments):
    use_stemmer: bool = flag(True, "Compare English words by their stems in ROUGE.")

    text_column = ShortName("source_column", str)
    summary_column = ShortName("target_column", str)


class Summarization(SequenceToSequence):
    name = "summarization"
    summary = "a short text for a long one"
    roles = (
        Role("source", names=("document", "article", "text", "dialogue", "source", "content", "body")),
        Role("target", names=("summary", "highlights", "target", "title", "abstract", "headline"), is_input=False),
    )
    explanation = {
        "data": "csv, tsv, json, jsonl or parquet with a column of documents and a column of summaries.",
        "columns": "--source_column and --target_column, or --text_column and --summary_column; inferred if clear.",
        "lengths": "--max_source_length and --max_target_length; chosen from the data, and truncation is reported.",
        "generate": "--num_beams, --generation_max_length; --source_prefix 'summarize: ' for a T5.",
        "metric": "ROUGE-1, -2, -L and -Lsum of generated texts, from 0 to 1, compared with the first sentence (lead).",
    }
    example = "lw train summarization --data articles.jsonl --model ./t5-small --epochs 3 --batch 8 --lr 1e-4"
    pretrained, pretrained_megabytes = "google-t5/t5-small", 242
    arguments = SummarizationArguments
    kept_flags = ("use_stemmer",)
    defaults = {**COMMON_DEFAULTS, "learning_rate": 1e-4, "per_device_train_batch_size": 8}
    predicted = ("summary",)
    params_of_model = "summarization"
    rivals = {"lead": Lead(1), "lead-3": Lead(3)}
    directions = {"rougeL": True, "rouge1": True, "rouge2": True, "rougeLsum": True}
    demo = {"vocabulary_size": 600, "epochs": 2, "batch": 32, "lr": 3e-3, "warmup_steps": 0.1, "threads": 1}
    demo_rows = ("text_rows", "summary_rows", "jsonl")
    demo_note = "notes of a review, and whether and when it took place: ROUGE-L 0.80 (first sentence 0.17), 75 s"

    def create_metric(self, args: Any) -> Metric:
        return load_metric("rouge", use_stemmer=args.use_stemmer)
