"""translation: a text in other words, such as another language."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loopwright.baselines import CopyInput
from loopwright.errors import InputError, nearest
from loopwright.metrics import Combined, Metric
from loopwright.metrics import load as load_metric
from loopwright.metrics.texts import TOKENIZERS
from loopwright.sources import DataPlan, Role, Schema
from loopwright.tasks.arguments import flag
from loopwright.tasks.base import COMMON_DEFAULTS
from loopwright.tasks.text.seq2seq import SequenceToSequence, SequenceToSequenceArguments


@dataclass
class TranslationArguments(SequenceToSequenceArguments):
    source_lang: str | None = flag(None, "Language to read: its column, and its code in a multilingual model.")
    target_lang: str | None = flag(None, "Language to write.")
    bleu_tokenize: str = flag(
        "auto", "Tokenizer of BLEU; auto chooses by the script of the references.", choices=TOKENIZERS
    )


class Translation(SequenceToSequence):
    name = "translation"
    summary = "a text in another language or form"
    roles = (
        Role("source", names=("source", "src", "source_text"), has_language=True),
        Role("target", names=("target", "tgt", "target_text"), is_input=False, has_language=True),
    )
    explanation = {
        "data": "csv, tsv, json, jsonl or parquet with a column of sources and a column of targets; or jsonl with "
        '{"translation": {"en": ..., "ro": ...}} and --source_lang en --target_lang ro.',
        "columns": "--source_column and --target_column, or columns named after the languages; inferred if clear.",
        "lengths": "--max_source_length and --max_target_length; chosen from the data, and truncation is reported.",
        "generate": "--num_beams, --generation_max_length; --source_prefix 'translate English to Romanian: ' for a T5.",
        "metric": "BLEU and chrF (0 to 100) and exact match (0 to 1) of generated texts, compared with the source "
        "copied unchanged.",
    }
    example = "lw train translation --data wmt.jsonl --source_lang en --target_lang ro --model ./t5-small --epochs 3"
    pretrained, pretrained_megabytes = "google-t5/t5-small", 242
    arguments = TranslationArguments
    kept_flags = ("bleu_tokenize",)
    defaults = {**COMMON_DEFAULTS, "learning_rate": 1e-4, "per_device_train_batch_size": 16}
    predicted = ("translation",)
    rivals = {"copy": CopyInput()}
    params_of_model = "translation_{source_lang}_to_{target_lang}"
    directions = {"bleu": True, "chrf": True, "exact_match": True}
    demo = {
        **{"tokenizer_unit": "characters", "metric_for_best_model": "exact_match"},
        **{"epochs": 2, "batch": 64, "lr": 3e-3, "warmup_steps": 0.1, "threads": 1},
    }
    demo_rows = ("dates", "date_demo", None)
    demo_note = "dates in eight written forms to ISO form, character by character: exact match 0.99 (copied 0), 70 s"

    def schema(self, args: Any) -> Schema:
        """Return the roles; language names are column names, also within a column `translation`."""
        known = {role.name: role.names for role in self.roles}
        named = {
            role: (*_columns_of_language(language), *known[role])
            for role, language in (("source", args.source_lang), ("target", args.target_lang))
            if language is not None
        }
        return super().schema(args).with_names(named)

    def preflight(self, args: Any, say: Callable[[Any], None] | None = None) -> DataPlan:
        plan = super().preflight(args, say)
        roles = {role.name: role.names for role in self.roles}
        for role, language in (("source", args.source_lang), ("target", args.target_lang)):
            column = str(plan.columns[role])
            if language is None or getattr(args, f"{role}_column") is not None:
                continue
            if column.lower() not in (*_columns_of_language(language), *roles[role]):
                raise InputError(
                    "data.column",
                    f"--{role}_lang {language}: there is no column for this language",
                    saw=[f"the only column left for the {role} is {column!r}"],
                    fix=f"--{role}_lang {column.rpartition('.')[2]}   or   --{role}_column {column}",
                )
        return plan

    def create_metric(self, args: Any) -> Metric:
        parts = [load_metric("sacrebleu", tokenize=args.bleu_tokenize), load_metric("chrf"), load_metric("exact_match")]
        return Combined(parts)

    def set_languages(self, model: Any, tokenizer: Any, args: Any) -> None:
        if not hasattr(tokenizer, "src_lang"):
            return
        if args.source_lang is None or args.target_lang is None:
            what = "the model is multilingual: name the languages to read and to write"
            fix = "--source_lang {} --target_lang {}".format(*_codes(tokenizer))
            raise InputError("args.value", what, saw=[f"its tokenizer is a {type(tokenizer).__name__}"], fix=fix)
        first = {language: _language_token(tokenizer, language) for language in (args.source_lang, args.target_lang)}
        tokenizer.src_lang, tokenizer.tgt_lang = args.source_lang, args.target_lang
        model.generation_config.forced_bos_token_id = first[args.target_lang]
        if getattr(model.config, "decoder_start_token_id", None) is None:  # mBART begins with the language token itself
            model.config.decoder_start_token_id = first[args.target_lang]
            model.generation_config.decoder_start_token_id = first[args.target_lang]


def _columns_of_language(language: str) -> tuple[str, ...]:
    """Return the possible columns of a language in lower case; en_XX is also tried as en."""
    codes = dict.fromkeys((language.lower(), language.lower().partition("_")[0]))
    return (*(f"translation.{code}" for code in codes), *codes)


def _codes(tokenizer: Any, most: int = 2) -> list[str]:
    """Return language codes of a multilingual tokenizer: mBART has en_XX among its special tokens, M2M100 __en__."""
    special = [str(token).strip("_") for token in tokenizer.all_special_tokens]
    return [code for code in special if re.fullmatch(r"[a-z]{2,3}([_-]\w+)?", code)][:most] or ["en_XX", "ro_RO"]


def _language_token(tokenizer: Any, language: str) -> int:
    """Return the token of a language; M2M100 writes __en__ for en_XX."""
    for token in (language, f"__{language}__"):
        number = tokenizer.convert_tokens_to_ids(token)
        if number is not None and number != tokenizer.unk_token_id:
            return int(number)
    raise InputError(
        "args.value",
        f"the tokenizer has no language {language!r}",
        saw=[f"it is a {type(tokenizer).__name__}, with tokens such as {', '.join(tokenizer.all_special_tokens[-5:])}"],
        fix=f"{nearest(language, _codes(tokenizer, 999)) or _codes(tokenizer)[0]} instead of {language}",
    )
