"""Metrics of texts: exact match; ROUGE, BLEU and chrF from the packages rouge-score and sacrebleu (the extra `text`).

Only sums are kept, never texts, so batches and processes are merged exactly. A reference is a text, or a list of
alternatives. ROUGE knows only the letters a to z and digits: texts in other scripts score 0.
"""

from __future__ import annotations

import re
import string
from abc import abstractmethod
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from loopwright.errors import ConfigError, DataError
from loopwright.metrics.base import (
    Column,
    Columns,
    CountingMetric,
    Options,
    Scores,
    ShareMetric,
    as_items,
    extra_module,
)
from loopwright.metrics.means import MeanMetric
from loopwright.metrics.sums import Counts, Numbers

# Other tokenizers of sacrebleu download a model, or need an extra package.
_TOKENIZERS = ("13a", "intl", "zh", "char", "none")
_SMOOTHING = ("exp", "floor", "add-k", "none")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def as_texts(name: str, values: Any) -> Column:
    """Return predictions as texts, references as texts or lists of texts."""
    rows = as_items(name, values)
    for row in rows:
        texts = [row] if name == "predictions" else references_of(row)
        if not texts or not all(isinstance(each, str) for each in texts):
            raise DataError(f"{name} must be texts, got {row!r:.80}")
    return rows


def references_of(row: Any) -> list[Any]:
    """Return the references of a sample as a list."""
    return list(row) if isinstance(row, list | tuple | np.ndarray) else [row]


class ExactMatch(ShareMetric):
    """The share of texts that equal the reference, between 0 and 1.

    Options: `regexes_to_ignore` are patterns whose matches are removed from both texts first; `ignore_case`,
    `ignore_punctuation`, `ignore_numbers`. Texts are compared when they are added, so pass the options to `load`, or
    to a `compute` that gets all the texts.
    """

    name = "exact_match"
    names = ("exact_match",)
    options_apply_early = True
    defaults: ClassVar[Options] = MappingProxyType(
        {"regexes_to_ignore": None, "ignore_case": False, "ignore_punctuation": False, "ignore_numbers": False}
    )

    def hits(self, columns: Columns) -> list[Column]:
        predictions, references = (self._cleaned(name, columns[name]) for name in ("predictions", "references"))
        return [
            np.asarray([mine == theirs for mine, theirs in zip(predictions, references, strict=True)], dtype=np.bool_)
        ]

    def _cleaned(self, name: str, texts: Column) -> list[str]:
        cleaned: list[str] = texts.tolist()
        for each in cleaned:
            if not isinstance(each, str):
                raise DataError(f"{name} of exact_match must be texts, got {each!r}: use accuracy for labels")
        for pattern in self.options["regexes_to_ignore"] or []:
            cleaned = [re.sub(pattern, "", each) for each in cleaned]
        if self.options["ignore_case"]:
            cleaned = [each.lower() for each in cleaned]
        ignored = string.punctuation * bool(self.options["ignore_punctuation"])
        ignored += string.digits * bool(self.options["ignore_numbers"])
        if ignored:
            table = str.maketrans("", "", ignored)
            cleaned = [each.translate(table) for each in cleaned]
        return cleaned


class Rouge(MeanMetric):
    """The mean F-measures rouge1, rouge2, rougeL and rougeLsum, between 0 and 1.

    rougeLsum compares sentence by sentence: a text is split at its newlines, or, without any, after full stops,
    exclamation marks and question marks. The option `use_stemmer` compares English words by their stems.
    """

    name = "rouge"
    forms: ClassVar = {"predictions": as_texts, "references": as_texts}
    options_apply_early = True
    names = ("rouge1", "rouge2", "rougeL", "rougeLsum")
    defaults: ClassVar[Options] = MappingProxyType({"use_stemmer": False})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._module = extra_module("rouge_score.rouge_scorer", "rouge-score", self.name)

    def values(self, columns: Columns) -> Numbers:
        scorer = self._module.RougeScorer(list(self.names), use_stemmer=self.options["use_stemmer"])
        rows = []
        for prediction, reference in zip(columns["predictions"], columns["references"], strict=True):
            scores = scorer.score_multi(list(map(in_sentences, references_of(reference))), in_sentences(prediction))
            rows.append([scores[name].fmeasure for name in self.names])
        return np.asarray(rows, dtype=np.float64).reshape(-1, len(self.names))


class CorpusMetric(CountingMetric):
    """A score of sacrebleu, between 0 and 100, that is a function of sums over all samples."""

    options_apply_early = True
    forms: ClassVar = {"predictions": as_texts, "references": as_texts}
    limits = (0.0, 100.0)
    result_name: ClassVar[str]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._module = extra_module("sacrebleu.metrics", "sacrebleu", self.name)

    @abstractmethod
    def scorer(self) -> Any:
        """Return sacrebleu's scorer with this metric's options."""

    def count(self, columns: Columns) -> Counts:
        scorer = self.scorer()
        rows = [
            # sacrebleu has no public name for the sums of one text; a test compares them with its corpus_score.
            scorer._extract_corpus_statistics([prediction], [[each] for each in references_of(reference)])[0]
            for prediction, reference in zip(columns["predictions"], columns["references"], strict=True)
        ]
        return np.asarray(rows, dtype=np.int64).reshape(len(rows), len(rows[0]) if rows else 0)

    def score(self, totals: Counts, options: Options) -> Scores:
        scorer = self.scorer()
        rows = totals.reshape(-1, totals.shape[-1]).tolist()
        scores = [scorer._compute_score_from_stats(row).score for row in rows]  # the only way back from sums
        return {self.result_name: np.asarray(scores, dtype=np.float64).reshape(totals.shape[:-1])}


class Bleu(CorpusMetric):
    """BLEU as sacrebleu computes it, between 0 and 100.

    Options: `tokenize` is "13a", "intl", "zh", "char" or "none"; `lowercase`; `smooth_method` is "exp", "floor",
    "add-k" or "none".
    """

    name = "sacrebleu"
    result_name = "bleu"
    defaults: ClassVar[Options] = MappingProxyType({"tokenize": "13a", "lowercase": False, "smooth_method": "exp"})

    def _known(self, options: Options) -> dict[str, Any]:
        for name, allowed in (("tokenize", _TOKENIZERS), ("smooth_method", _SMOOTHING)):
            if options.get(name, allowed[0]) not in allowed:
                raise ConfigError(f"{name}={options[name]!r} of {self.name} is not known: use {', '.join(allowed)}")
        return super()._known(options)

    def scorer(self) -> Any:
        return self._module.BLEU(**self.options)


class ChrF(CorpusMetric):
    """chrF, the F-score of character n-grams, as sacrebleu computes it, between 0 and 100.

    Options: `word_order` 2 makes it chrF++; `lowercase`.
    """

    name = "chrf"
    result_name = "chrf"
    defaults: ClassVar[Options] = MappingProxyType({"word_order": 0, "lowercase": False})

    def scorer(self) -> Any:
        return self._module.CHRF(**self.options)


def in_sentences(text: str) -> str:
    """Return the text with one sentence on each line."""
    return text if "\n" in text.strip() else "\n".join(_SENTENCE_END.split(text.strip()))
