"""Panels of texts: tags, answers, generated texts, language models, similarities, numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from loopwright.report.blocks import Block, Facts, Table
from loopwright.report.formatting import metric, percent
from loopwright.report.panels.classes import confused, scores_table
from loopwright.report.panels.collectors import Chosen, Collector, Values, histogram
from loopwright.report.panels.sample import is_right, same_answer

_RANKS: Final = (1, 3, 5, 10, 50)


class Tags(Collector):
    """Token classification: entities, or the tags themselves if there are none."""

    title = "Entities"
    score_name = "token accuracy"

    def __init__(self) -> None:
        self._spans: dict[str, list[int]] = {}
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._shown, self._wrong = Chosen(), Chosen()
        self._has_spans = False

    def add(self, sample: Mapping[str, Any]) -> None:
        """Count the entities and the tags of a sentence."""
        for predicted, true in zip(sample["prediction"], sample["reference"], strict=False):
            self._pairs[str(true), str(predicted)] += 1
        if "expected" in sample:
            self._has_spans = True
            found = {(span["label"], span["start"], span["end"]) for span in sample["entities"]}
            expected = {(span["label"], span["start"], span["end"]) for span in sample["expected"]}
            for spans, place in ((found & expected, 0), (found, 1), (expected, 2)):
                for label, _, _ in spans:
                    self._spans.setdefault(str(label), [0, 0, 0])[place] += 1
        (self._shown if sample["prediction"] == sample["reference"] else self._wrong).add(sample)

    def score(self, sample: Mapping[str, Any]) -> float | None:
        """Return the share of tags that are right."""
        pairs = list(zip(sample["prediction"], sample["reference"], strict=False))
        return sum(predicted == true for predicted, true in pairs) / len(pairs) if pairs else None

    def blocks(self) -> list[Block]:
        """Return the table by entity, the tags that were confused, and sentences."""
        if self._has_spans:
            counts = [(label, entry[0], entry[1], entry[2]) for label, entry in sorted(self._spans.items())]
            table = scores_table("By entity", counts, "entities")
        else:
            labels = sorted({label for pair in self._pairs for label in pair})
            table = scores_table("By tag", [(label, *self._counts_of(label)) for label in labels], "tokens")
        examples = [*self._wrong.block("Sentences with mistakes"), *self._shown.block("Sentences without")]
        return [*table, *confused(self._pairs, "tokens"), *examples]

    def _counts_of(self, label: str) -> tuple[int, int, int]:
        predicted = sum(count for (_, right), count in self._pairs.items() if right == label)
        true = sum(count for (left, _), count in self._pairs.items() if left == label)
        return self._pairs.get((label, label), 0), predicted, true


class Answers(Collector):
    """Question answering: hits and misses."""

    title = "Answers"
    score_name = "exact match"

    def __init__(self) -> None:
        self._hits, self._misses = Chosen(), Chosen()
        self._num = self._num_right = self._num_within = self._num_empty = 0

    def add(self, sample: Mapping[str, Any]) -> None:
        """Sort a question into hits and misses."""
        right = bool(is_right(sample))
        self._num += 1
        self._num_right += right
        text = str(sample.get("prediction") or "")
        self._num_empty += not text
        if not right and text:
            answers = [str(answer) for answer in sample.get("reference") or []]
            self._num_within += any(answer and (answer in text or text in answer) for answer in answers)
        (self._hits if right else self._misses).add(sample)

    def score(self, sample: Mapping[str, Any]) -> float | None:
        """Return 1 for a hit."""
        return float(bool(is_right(sample)))

    def blocks(self) -> list[Block]:
        """Return the number of hits, and examples of both kinds."""
        num = max(self._num, 1)
        facts: list[tuple[str, Any]] = [
            ("hit", f"{self._num_right:,} of {self._num:,} ({percent(self._num_right / num)})"),
            ("missed, but the answer overlaps", f"{self._num_within:,}"),
            ("left without an answer", f"{self._num_empty:,}"),
        ]
        return [Facts("Questions", facts), *self._misses.block("Misses"), *self._hits.block("Hits")]


class Written(Collector):
    """Summarization, translation, and other text generation: samples, exact matches, lengths."""

    title = "Written texts"
    score_name = "exact match"

    def __init__(self) -> None:
        self._num = self._num_exact = 0
        self._words = [0, 0]
        self._shown, self._wrong = Chosen(), Chosen()

    def add(self, sample: Mapping[str, Any]) -> None:
        """Compare the generated with the expected text."""
        exact = same_answer(sample["prediction"], sample["reference"])
        self._num += 1
        self._num_exact += exact
        self._words[0] += len(str(sample["prediction"]).split())
        self._words[1] += len(str(sample["reference"]).split())
        (self._shown if exact else self._wrong).add(sample)

    def score(self, sample: Mapping[str, Any]) -> float | None:
        """Return 1 for an exact match."""
        return float(same_answer(sample["prediction"], sample["reference"]))

    def blocks(self) -> list[Block]:
        """Return the figures, and texts of both kinds."""
        num = max(self._num, 1)
        facts: list[tuple[str, Any]] = [
            ("exactly right", f"{self._num_exact:,} of {self._num:,} ({percent(self._num_exact / num)})"),
            ("words written, on average", metric(self._words[0] / num)),
            ("words wanted, on average", metric(self._words[1] / num)),
        ]
        differing = self._wrong.block("Samples that differ")
        return [Facts("Texts", facts), *differing, *self._shown.block("Samples that are right")]


class Language(Collector):
    """Causal language models: how well each part of the text was predicted."""

    title = "Text"

    def __init__(self) -> None:
        self._losses = Values()
        self._unit = "mean loss of a part"
        self._shown = Chosen(4)

    def add(self, sample: Mapping[str, Any]) -> None:
        """Add a part of the text."""
        if isinstance(sample.get("bits_per_byte"), float):
            self._unit = "bits per byte of a part"
        self._losses.add(sample.get("bits_per_byte", sample.get("loss")))
        self._shown.add(sample)

    def blocks(self) -> list[Block]:
        """Return the spread and samples."""
        spread = histogram("How hard the parts are", [("parts", self._losses)], self._unit)
        return [*spread, *self._shown.block("Samples")]


class Masked(Collector):
    """Masked language models: which tokens were predicted correctly."""

    title = "Masked tokens"
    score_name = "masked accuracy"

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._right: Counter[str] = Counter()
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._shown = Chosen()

    def add(self, sample: Mapping[str, Any]) -> None:
        """Count the tokens of a sample."""
        for predicted, true in zip(sample["prediction"], sample["reference"], strict=False):
            self._tokens[repr(true)] += 1
            self._right[repr(true)] += predicted == true
            self._pairs[repr(true), repr(predicted)] += 1
        self._shown.add(sample)

    def score(self, sample: Mapping[str, Any]) -> float | None:
        """Return the share of correct tokens."""
        pairs = list(zip(sample["prediction"], sample["reference"], strict=False))
        return sum(predicted == true for predicted, true in pairs) / len(pairs) if pairs else None

    def blocks(self) -> list[Block]:
        """Return the most frequent tokens, the confused ones, and samples."""
        rows = [[token, count, metric(self._right[token] / count)] for token, count in self._tokens.most_common(15)]
        table = [Table("Most frequent tokens", ["token", "masked", "guessed"], rows, bar=2)] if rows else []
        return [*table, *confused(self._pairs, "tokens"), *self._shown.block("Samples")]


class Retrieval(Collector):
    """Sentence embeddings of pairs: the rank at which the other text of a pair was found."""

    title = "Retrieval"
    score_name = "found first"

    def __init__(self) -> None:
        self._ranks: Counter[int] = Counter()
        self._partners, self._others = Values(), Values()
        self._hits, self._misses = Chosen(), Chosen()

    def add(self, sample: Mapping[str, Any]) -> None:
        """Add a pair."""
        is_first = sample["rank"] == 1
        self._ranks[int(sample["rank"])] += 1
        self._partners.add(sample.get("similarity"))
        self._others.add(sample.get("nearest_other"))
        (self._hits if is_first else self._misses).add(sample)

    def score(self, sample: Mapping[str, Any]) -> float | None:
        """Return 1 if the other text was found first."""
        return float(sample["rank"] == 1)

    def blocks(self) -> list[Block]:
        """Return similarities, ranks, hits and misses."""
        total = sum(self._ranks.values()) or 1
        rows = []
        for most in _RANKS:
            found = sum(count for rank, count in self._ranks.items() if rank <= most)
            rows.append([f"within the first {most}", found, metric(found / total)])
        groups = [("its partner", self._partners), ("the nearest other text", self._others)]
        return [
            *histogram("Similarity of the pairs", groups, "cosine of a text with its partner, and with its best rival"),
            Table("Where the other text was found", ["rank", "pairs", "share"], rows, bar=2),
            *self._misses.block("Not found first"),
            *self._hits.block("Found first"),
        ]


class Numbers(Collector):
    """Texts with a number: similarity scores and other regression."""

    title = "Predicted numbers"

    def __init__(self) -> None:
        self._errors = Values()
        self._low, self._high = Values(), Values()
        self._pairs: list[tuple[float, float]] = []
        self._shown = Chosen()

    def add(self, sample: Mapping[str, Any]) -> None:
        """Add a prediction."""
        predicted, true = float(sample["prediction"]), float(sample["reference"])
        self._errors.add(predicted - true)
        self._pairs.append((true, predicted))
        if len(self._pairs) > 20_000:
            self._pairs = self._pairs[::2]
        self._shown.add(sample)

    def blocks(self) -> list[Block]:
        """Return the predictions for low and high truths, and samples."""
        ordered = sorted(true for true, _ in self._pairs)
        middle = ordered[len(ordered) // 2] if ordered else 0.0
        for true, predicted in self._pairs:
            (self._high if true >= middle else self._low).add(predicted)
        groups = [(f"true below {metric(middle)}", self._low), (f"true {metric(middle)} and above", self._high)]
        spread = histogram("Predicted values", groups)
        return [*spread, *histogram("Predicted minus true", [("samples", self._errors)]), *self._shown.block("Samples")]


class Losses(Collector):
    """Any other task: the loss distribution, and samples."""

    def __init__(self) -> None:
        self._losses = Values()
        self._shown = Chosen()

    def add(self, sample: Mapping[str, Any]) -> None:
        """Add a sample."""
        self._losses.add(sample.get("masked_mse", sample.get("loss")))
        self._shown.add(sample)

    def blocks(self) -> list[Block]:
        """Return the loss distribution."""
        return histogram("Loss by sample", [("samples", self._losses)])
