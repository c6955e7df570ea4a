"""Baselines that a result must beat: predictions that need no model.

Each baseline learns from the training rows, some at a time, and predicts. `score` passes its predictions to the metric
of the task, so that its numbers are comparable to the model's.

    baseline = WordCounts()
    for texts, labels in training_batches:
        baseline.learn(texts, labels)
    score(baseline, validation_batches, metrics.load("accuracy"))    # {"accuracy": ...}

Memory does not grow with the number of rows, except for the median. numpy and the standard library only.
"""

from __future__ import annotations

import functools
import hashlib
import lzma
import math
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loopwright.errors import ConfigError, DataError
from loopwright.metrics.words import count_words, first_words, sentences, terms

# Rarer answers and words are dropped beyond this many distinct ones.
_MOST_KEPT = 100_000
# The number of answers to search for in a context.
_MOST_TRIED = 1000
# The numbers of targets that `UsualTarget` tries, and of those it compares them with.
_MOST_CANDIDATES, _MOST_COMPARED = 8, 32


class Predictor(Protocol):
    """A baseline, as `score` uses it."""

    def predict(self, inputs: Sequence[Any]) -> Any:
        """Return one prediction for each input."""


class Scorer(Protocol):
    """A metric, as `score` uses it; implemented by all of `loopwright.metrics`."""

    def add_batch(self, **columns: Any) -> None:
        """Add samples."""

    def compute(self) -> dict[str, Any]:
        """Return the result."""


def score(baseline: Predictor, batches: Iterable[tuple[Sequence[Any], Any]], metric: Scorer) -> dict[str, Any]:
    """Return the metric's result for a fitted baseline, on batches of inputs and references."""
    for inputs, references in batches:
        metric.add_batch(predictions=baseline.predict(inputs), references=references)
    return metric.compute()


class MostFrequent:
    """Predicts the most frequent target of the training rows: a label, or the row of labels of a multi-label task."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()

    def learn(self, inputs: Iterable[Any], targets: Any) -> None:
        self._counts.update(
            tuple(each) if isinstance(each, list | tuple | np.ndarray) else each for each in _plain(targets)
        )

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the most frequent target for each input; ties go to the one that sorts first."""
        _check_learnt(self, bool(self._counts))
        best = _most_frequent(self._counts)
        return [list(best) if isinstance(best, tuple) else best for _ in inputs]


class Constant:
    """Predicts one given value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        return [self.value for _ in inputs]


class FrequentLabels:
    """Predicts the set of labels with the best micro-averaged F1 on the training rows; targets are rows of 0 and 1."""

    def __init__(self) -> None:
        self._rows: list[NDArray[np.int64]] = []  # of each batch, the number of rows and of each label

    def learn(self, inputs: Iterable[Any], targets: Any) -> None:
        self._rows.append(np.sum([[1, *row] for row in _plain(targets)], axis=0))

    def predict(self, inputs: Sequence[Any]) -> list[list[int]]:
        _check_learnt(self, bool(self._rows))
        num_rows, *counts = np.sum(self._rows, axis=0).tolist()
        order = sorted(range(len(counts)), key=lambda label: -counts[label])
        right = np.cumsum([counts[label] for label in order])  # by the k most frequent labels, the best k there are
        size = int(np.argmax(2 * right / (np.arange(1, len(order) + 1) * num_rows + max(1, sum(counts))))) + 1
        return [[int(label in order[:size]) for label in range(len(counts))] for _ in inputs]


class UsualTarget:
    """Predicts one of the most frequent targets of the training rows: the one that scores best against the others.

    Args:
        create_metric: makes the metric of predictions and references.
        name: the result to maximize.
    """

    def __init__(self, create_metric: Callable[[], Scorer], name: str) -> None:
        self._create_metric, self._name = create_metric, name
        self._counts: Counter[Any] = Counter()

    def learn(self, inputs: Iterable[Any], targets: Any) -> None:
        self._counts.update(_plain(targets))

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        _check_learnt(self, bool(self._counts))
        return [self._best for _ in inputs]

    @functools.cached_property
    def _best(self) -> Any:
        usual, scores = [target for target, _ in self._counts.most_common(_MOST_COMPARED)], []
        for target in usual[:_MOST_CANDIDATES]:
            metric = self._create_metric()
            metric.add_batch(predictions=[target] * len(usual), references=usual)
            scores.append(metric.compute()[self._name])
        return usual[int(np.argmax(scores))]


class WordCounts:
    """Naive Bayes over the words of a text: the label under which its words are likeliest, in any order.

    Inputs are texts, or pairs of texts, whose words are counted separately; targets are labels, or rows of 0 and 1 for
    a text with several labels, each of which is judged by itself. Words are hashed into `num_buckets`, which bounds the
    memory; `smoothing` is added to each count of a bucket seen in training, and words in no such bucket are ignored.
    """

    def __init__(self, num_buckets: int = 1 << 20, smoothing: float = 0.5) -> None:
        if num_buckets < 1 or smoothing <= 0:
            what = f"word counts need at least 1 bucket and a smoothing above 0, got {num_buckets} and {smoothing}"
            raise ConfigError(what)
        self.num_buckets = num_buckets
        self.smoothing = smoothing
        # By label, or by the index of one of several labels; None for all texts.
        self._rows: Counter[Any] = Counter()
        self._words: Counter[Any] = Counter()
        self._buckets: dict[int, Counter[Any]] = {}
        self._evidence: dict[int, tuple[float, list[int], NDArray[np.float64]]] = {}
        self._num_labels = 0  # if there may be several per text

    def learn(self, inputs: Iterable[Any], targets: Any) -> None:
        self._evidence.clear()
        for text, target in zip(inputs, _plain(targets), strict=True):
            labels = [target, None]
            if isinstance(target, list | tuple):
                self._num_labels, labels = len(target), [*np.flatnonzero(target).tolist(), None]
            found = Counter(_hashes(text, self.num_buckets))
            for label in labels:
                self._rows[label] += 1
                self._words[label] += found.total()
            for bucket, count in found.items():
                counts = self._buckets.setdefault(bucket, Counter())
                for label in labels:
                    counts[label] += count

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the likeliest label of each input; ties go to the one that sorts first."""
        _check_learnt(self, bool(self._rows))
        labels = list(range(self._num_labels)) or sorted(self._rows.keys() - {None}, key=_sorting_key)
        places, unseen = {label: place for place, label in enumerate(labels)}, self.smoothing * len(self._buckets)
        rows, words = (np.array([counts[label] for label in labels]) for counts in (self._rows, self._words))
        with np.errstate(divide="ignore"):  # one of several labels that no text has, or every text
            priors, totals = np.log(rows), np.log(words + unseen)
            if self._num_labels:  # a label against its absence
                priors -= np.log(self._rows[None] - rows)
                totals -= np.log(self._words[None] - words + unseen)
        predictions: list[Any] = []
        for text in inputs:
            known = [each for each in _hashes(text, self.num_buckets) if each in self._buckets]
            scores = priors - len(known) * totals
            for bucket in known:
                base, indices, gains = self._evidence.get(bucket) or self._weigh(bucket, places)
                scores += base
                scores[indices] += gains
            predictions.append((scores > 0).astype(int).tolist() if self._num_labels else labels[np.argmax(scores)])
        return predictions

    def _weigh(self, bucket: int, places: Mapping[Any, int]) -> tuple[float, list[int], NDArray[np.float64]]:
        """Return the evidence of a word for all labels, and for the labels that had it, what it adds to that."""
        counts = {places[label]: count for label, count in self._buckets[bucket].items() if label is not None}
        base, gains = 0.0, np.log1p(np.array(list(counts.values())) / self.smoothing)
        if self._num_labels:
            most = self._buckets[bucket][None] + self.smoothing
            base = math.log(self.smoothing / most)
            gains -= np.log1p(-np.array(list(counts.values())) / most)
        self._evidence[bucket] = base, list(counts), gains
        return self._evidence[bucket]


class WordRegression:
    """Ridge regression on the words of a text, its length, and the words that a pair of texts has in common.

    The frequencies of words are hashed into `num_buckets`. `penalty` is the one of their weights.
    """

    def __init__(self, num_buckets: int = 512, penalty: float = 1.0) -> None:
        self.num_buckets, self.penalty = num_buckets, penalty
        size = num_buckets + 4
        self._products, self._sums = np.zeros((size, size)), np.zeros(size)

    def learn(self, inputs: Iterable[Any], targets: Any) -> None:
        features = np.stack([self._features(text) for text in inputs])
        self._products += features.T @ features
        self._sums += features.T @ np.asarray(_plain(targets), dtype=np.float64)
        self.__dict__.pop("_weights", None)

    def predict(self, inputs: Sequence[Any]) -> list[float]:
        _check_learnt(self, bool(self._products[-1, -1]))
        return [float(self._features(text) @ self._weights) for text in inputs]

    @functools.cached_property
    def _weights(self) -> NDArray[np.floating[Any]]:
        penalties = np.full(len(self._sums), self.penalty)
        penalties[-1] = 1e-9  # of the constant
        return np.linalg.solve(self._products + np.diag(penalties), self._sums)

    def _features(self, text: Any) -> NDArray[np.float64]:
        counts = np.bincount(np.array(_hashes(text, self.num_buckets), dtype=int), minlength=self.num_buckets)
        first, second = (set(terms(part)) for part in ((text, "") if isinstance(text, str) else list(text)[:2]))
        common = 2 * len(first & second) / max(1, len(first) + len(second))
        number = counts.sum()
        return np.array([*(counts / math.sqrt(max(1, number))), math.log1p(number), common, common**2, 1.0])


def _hashes(text: Any, num_buckets: int) -> list[int]:
    parts = [text] if isinstance(text, str) else list(text)
    return [_hash(f"{place} {term}") % num_buckets for place, part in enumerate(parts) for term in terms(part)]


@functools.lru_cache(1 << 16)
def _hash(term: str) -> int:
    """Return a hash: not Python's own, which differs between processes, nor a CRC, by which similar words collide."""
    return int.from_bytes(hashlib.blake2b(term.encode(errors="replace"), digest_size=8).digest())


class MeanValue:
    """Predicts the mean of the training rows' numbers."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0

    def learn(self, inputs: Iterable[Any], targets: Any) -> None:
        numbers = [float(each) for each in _plain(targets)]
        self._sum = math.fsum([self._sum, *numbers])
        self._count += len(numbers)

    def predict(self, inputs: Sequence[Any]) -> list[float]:
        _check_learnt(self, self._count > 0)
        return [self._sum / self._count for _ in inputs]


class MedianValue:
    """Predicts the median of the training rows' numbers, which it keeps."""

    def __init__(self) -> None:
        self._numbers: list[float] = []

    def learn(self, inputs: Iterable[Any], targets: Any) -> None:
        self._numbers += [float(each) for each in _plain(targets)]

    def predict(self, inputs: Sequence[Any]) -> list[float]:
        _check_learnt(self, bool(self._numbers))
        return [float(np.median(self._numbers)) for _ in inputs]


class MostFrequentTags:
    """Predicts for each word or token the tag it had most often in training; for unknown ones the most frequent tag.

    Inputs are sequences of words or of token ids, targets sequences of tags of the same length. For a masked language
    model all masked inputs are the mask token, so the prediction is the most frequent token.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index
        self._all: Counter[Any] = Counter()
        self._of_word: dict[Any, Counter[Any]] = {}

    def learn(self, inputs: Iterable[Any], targets: Any) -> None:
        for words, tags in zip(inputs, _plain(targets), strict=True):
            for word, tag in zip(_plain(words), _plain(tags), strict=True):
                if tag == self.ignore_index:
                    continue
                self._all[tag] += 1
                if word in self._of_word or len(self._of_word) < _MOST_KEPT:
                    self._of_word.setdefault(word, Counter())[tag] += 1

    def predict(self, inputs: Sequence[Any]) -> list[list[Any]]:
        _check_learnt(self, bool(self._all))
        usual = _most_frequent(self._all)
        best = {word: _most_frequent(counts) for word, counts in self._of_word.items()}
        return [[best.get(word, usual) for word in _plain(words)] for words in inputs]


class MostFrequentAnswer:
    """Predicts the most frequent answer of the training rows that occurs in the context, or else its first words.

    Inputs are the contexts, targets the answers: texts, lists of texts, or SQuAD's `{"text": [...]}`. The number of
    first words is the average answer length. If most questions have no answer, the prediction is the empty text.
    """

    def __init__(self) -> None:
        self._answers: Counter[str] = Counter()
        self._num_words = self._num_answers = self._num_questions = self._num_unanswered = 0

    def learn(self, inputs: Iterable[Any], targets: Iterable[Any]) -> None:
        for target in targets:
            given = target["text"] if isinstance(target, Mapping) else target
            texts = [given] if isinstance(given, str) else list(given)
            self._num_questions += 1
            self._num_unanswered += not any(texts)
            for text in texts:
                self._answers[text] += 1
                self._num_words += count_words(text)
                self._num_answers += 1
        if len(self._answers) > 2 * _MOST_KEPT:
            self._answers = Counter(dict(self._answers.most_common(_MOST_KEPT)))

    def predict(self, inputs: Sequence[str]) -> list[str]:
        _check_learnt(self, self._num_questions > 0)
        if 2 * self._num_unanswered > self._num_questions:
            return ["" for _ in inputs]
        ordered = sorted(self._answers, key=lambda text: (-self._answers[text], text))[:_MOST_TRIED]
        num_words = max(1, round(self._num_words / self._num_answers))
        return [
            next((text for text in ordered if text and text in context), first_words(context, num_words))
            for context in inputs
        ]


class CopyInput:
    """Predicts the input itself: the baseline of a translation."""

    def predict(self, inputs: Sequence[str]) -> list[str]:
        return list(inputs)


class Lead:
    """Predicts the first `num_sentences` sentences of the input: the baseline of a summary."""

    def __init__(self, num_sentences: int = 1) -> None:
        if num_sentences < 1:
            raise ConfigError(f"a lead has at least 1 sentence, got {num_sentences}")
        self.num_sentences = num_sentences

    def predict(self, inputs: Sequence[str]) -> list[str]:
        """Return the first sentences of each input, one on each line."""
        return ["\n".join(sentences(text)[: self.num_sentences]) for text in inputs]


def chance_accuracy(num_choices: Iterable[int]) -> dict[str, float]:
    """Return the expected accuracy of a random choice, given the number of choices of each sample."""
    shares = [1.0 / each for each in num_choices]
    if not shares:
        raise DataError("chance has no samples: give the number of choices of each")
    return {"accuracy": math.fsum(shares) / len(shares)}


def compressed_bits_per_byte(texts: Iterable[str | bytes], method: str = "gzip") -> dict[str, float]:
    """Return the bits per byte of a compressor fed with the texts in order; separators must be part of a text.

    "gzip" sees the last 32 KiB of the text, "lzma" the last 8 MiB.
    """
    if method not in ("gzip", "lzma"):
        raise ConfigError(f"there is no compressor {method!r}: use 'gzip' or 'lzma'")
    compressor: Any = lzma.LZMACompressor(preset=6)
    if method == "gzip":  # the window bits of its file are 16 more than its zlib stream's
        compressor = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    num_bytes = num_compressed = 0
    for text in texts:
        piece = text.encode() if isinstance(text, str) else text
        num_bytes += len(piece)
        num_compressed += len(compressor.compress(piece))
    num_compressed += len(compressor.flush())
    if num_bytes == 0:
        raise DataError("bits per byte need a text of at least 1 byte")
    return {"bits_per_byte": 8 * num_compressed / num_bytes}


def _plain(values: Any) -> list[Any]:
    return list(values.tolist()) if hasattr(values, "tolist") else list(values)


def _sorting_key(value: Any) -> tuple[bool, Any]:
    return isinstance(value, str), value


def _most_frequent(counts: Counter[Any]) -> Any:
    most = max(counts.values())
    return min((value for value, count in counts.items() if count == most), key=_sorting_key)


def _check_learnt(baseline: Any, has_learnt: bool) -> None:
    if not has_learnt:
        raise DataError(f"{type(baseline).__name__} has learnt nothing: give it training rows first")
