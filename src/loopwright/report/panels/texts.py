"""Panels of texts: tags, answers, generated texts, language models, similarities, numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from loopwright.report.blocks import Block, Example, Examples, Facts, Piece, Table
from loopwright.report.formats import cut, metric, percent
from loopwright.report.panels.classes import confused, scores_table
from loopwright.report.panels.collectors import Chosen, Collector, Values, histogram, label_counts
from loopwright.report.panels.sample import Sample, differing, is_right, same_answer

_RANKS: Final = (1, 3, 5, 10, 50)
_MOST_NUMBERS: Final = 20_000
_MOST_EVALUATIONS: Final = 6
_MOST_TEXTS: Final = 5


class Tags(Collector):
    """Token classification: entities, or the tags themselves if there are none."""

    title = "Entities"
    score_name = "token accuracy"

    def __init__(self) -> None:
        self._spans: dict[str, list[int]] = {}
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._right, self._wrong = Chosen(), Chosen()
        self._has_spans = False

    def add(self, sample: Sample) -> None:
        for predicted, true in zip(sample["prediction"], sample["reference"], strict=False):
            self._pairs[str(true), str(predicted)] += 1
        if "expected" in sample:
            self._has_spans = True
            found, expected = (
                {(span["label"], span["start"], span["end"]) for span in sample[key]}
                for key in ("entities", "expected")
            )
            for place, spans in enumerate((found & expected, found, expected)):
                for label, _, _ in spans:
                    self._spans.setdefault(str(label), [0, 0, 0])[place] += 1
        (self._right if sample["prediction"] == sample["reference"] else self._wrong).add(sample)

    def score(self, sample: Sample) -> float | None:
        return _share_right(sample)

    def blocks(self) -> list[Block]:
        if self._has_spans:
            table = scores_table("By entity", sorted(self._spans.items()), "entities")
        else:
            table = scores_table("By tag", sorted(label_counts(self._pairs).items()), "tokens")
        examples = self._wrong.block("Sentences with mistakes"), self._right.block("Sentences without")
        return [table, confused(self._pairs, "tokens"), *examples]


class Answers(Collector):
    """Question answering: hits and misses."""

    title = "Answers"
    score_name = "exact match"

    def __init__(self) -> None:
        self._hits, self._misses = Chosen(), Chosen()
        self._num = self._num_right = self._num_within = self._num_empty = 0

    def add(self, sample: Sample) -> None:
        right = bool(is_right(sample))
        self._num += 1
        self._num_right += right
        text = str(sample.get("prediction") or "")
        self._num_empty += not text
        if not right and text:
            answers = [str(answer) for answer in sample.get("reference") or []]
            self._num_within += any(answer and (answer in text or text in answer) for answer in answers)
        (self._hits if right else self._misses).add(sample)

    def score(self, sample: Sample) -> float | None:
        return float(bool(is_right(sample)))

    def blocks(self) -> list[Block]:
        facts = [
            ("hit", _of_all(self._num_right, self._num)),
            ("missed, but the answer overlaps", f"{self._num_within:,}"),
            ("left without an answer", f"{self._num_empty:,}"),
        ]
        return [Facts("Questions", facts), self._misses.block("Misses"), self._hits.block("Hits")]


class Written(Collector):
    """Summarization, translation, and other text generation: samples, exact matches, lengths."""

    title = "Written texts"
    score_name = "exact match"

    def __init__(self) -> None:
        self._num = self._num_exact = self._num_written = self._num_wanted = 0
        self._right, self._wrong = Chosen(), Chosen()

    def add(self, sample: Sample) -> None:
        exact = same_answer(sample["prediction"], sample["reference"])
        self._num += 1
        self._num_exact += exact
        self._num_written += len(str(sample["prediction"]).split())
        self._num_wanted += len(str(sample["reference"]).split())
        (self._right if exact else self._wrong).add(sample)

    def score(self, sample: Sample) -> float | None:
        return float(same_answer(sample["prediction"], sample["reference"]))

    def blocks(self) -> list[Block]:
        facts = [
            ("exactly right", _of_all(self._num_exact, self._num)),
            ("words written, on average", metric(self._num_written / max(self._num, 1))),
            ("words wanted, on average", metric(self._num_wanted / max(self._num, 1))),
        ]
        samples = self._wrong.block("Samples that differ"), self._right.block("Samples that are right")
        return [Facts("Texts", facts), *samples]


class Language(Collector):
    """Causal language models: how well each part of the text was predicted."""

    title = "Text"

    def __init__(self) -> None:
        self._losses = Values()
        self._unit = "mean loss of a part"
        self._chosen = Chosen(4)

    def add(self, sample: Sample) -> None:
        if isinstance(sample.get("bits_per_byte"), float):
            self._unit = "bits per byte of a part"
        self._losses.add(sample.get("bits_per_byte", sample.get("loss")))
        self._chosen.add(sample)

    def blocks(self) -> list[Block]:
        spread = histogram("How hard the parts are", {"parts": self._losses}, self._unit)
        return [spread, self._chosen.block("Samples")]


class Masked(Collector):
    """Masked language models: which tokens were predicted correctly."""

    title = "Masked tokens"
    score_name = "masked accuracy"

    def __init__(self) -> None:
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._chosen = Chosen()

    def add(self, sample: Sample) -> None:
        for predicted, true in zip(sample["prediction"], sample["reference"], strict=False):
            self._pairs[repr(true), repr(predicted)] += 1
        self._chosen.add(sample)

    def score(self, sample: Sample) -> float | None:
        return _share_right(sample)

    def blocks(self) -> list[Block]:
        totals: Counter[str] = Counter()
        for (true, _), count in self._pairs.items():
            totals[true] += count
        rows = [[token, num, metric(self._pairs[token, token] / num)] for token, num in totals.most_common(15)]
        table = Table("Most frequent tokens", ["token", "masked", "guessed"], rows, bar=2)
        return [table, confused(self._pairs, "tokens"), self._chosen.block("Samples")]


class Retrieval(Collector):
    """Sentence embeddings of pairs: the rank at which the other text of a pair was found."""

    title = "Retrieval"
    score_name = "found first"

    def __init__(self) -> None:
        self._ranks: Counter[int] = Counter()
        self._partners, self._others = Values(), Values()
        self._hits, self._misses = Chosen(), Chosen()

    def add(self, sample: Sample) -> None:
        self._ranks[int(sample["rank"])] += 1
        self._partners.add(sample.get("similarity"))
        self._others.add(sample.get("nearest_other"))
        (self._hits if sample["rank"] == 1 else self._misses).add(sample)

    def score(self, sample: Sample) -> float | None:
        return float(sample["rank"] == 1)

    def blocks(self) -> list[Block]:
        rows = []
        for most in _RANKS:
            found = sum(count for rank, count in self._ranks.items() if rank <= most)
            rows.append([f"within the first {most}", found, metric(found / (self._ranks.total() or 1))])
        groups = {"its partner": self._partners, "the nearest other text": self._others}
        return [
            histogram("Similarity of the pairs", groups, "cosine of a text with its partner, and with its best rival"),
            Table("Where the other text was found", ["rank", "pairs", "share"], rows, bar=2),
            self._misses.block("Not found first"),
            self._hits.block("Found first"),
        ]


class Numbers(Collector):
    """Texts with a number: similarity scores and other regression."""

    title = "Predicted numbers"

    def __init__(self) -> None:
        self._errors = Values()
        self._pairs: list[tuple[float, float]] = []
        self._chosen = Chosen()

    def add(self, sample: Sample) -> None:
        predicted, true = float(sample["prediction"]), float(sample["reference"])
        self._errors.add(predicted - true)
        self._pairs.append((true, predicted))
        if len(self._pairs) > _MOST_NUMBERS:
            self._pairs = self._pairs[::2]
        self._chosen.add(sample)

    def blocks(self) -> list[Block]:
        ordered = sorted(true for true, _ in self._pairs)
        middle = ordered[len(ordered) // 2] if ordered else 0.0
        low, high = Values(), Values()
        for true, predicted in self._pairs:
            (high if true >= middle else low).add(predicted)
        return [
            histogram(
                "Predicted values", {f"true below {metric(middle)}": low, f"true {metric(middle)} and above": high}
            ),
            histogram("Predicted minus true", {"samples": self._errors}),
            self._chosen.block("Samples"),
        ]


class Losses(Collector):
    """Any other task: the loss distribution."""

    def __init__(self) -> None:
        self._losses = Values()

    def add(self, sample: Sample) -> None:
        self._losses.add(sample.get("masked_mse", sample.get("loss")))

    def blocks(self) -> list[Block]:
        return [histogram("Loss by sample", {"samples": self._losses})]


def generations(lines: Iterable[Sample]) -> Examples:
    """Return the texts generated at up to six evaluations, including the first and the last, of eval/samples.jsonl."""
    found = [line for line in lines if isinstance(line.get("samples"), list) and line["samples"]]
    if len(found) > 1 and found[-1]["samples"] == found[-2]["samples"]:
        found.pop()  # the last evaluation was the best
    last = len(found) - 1
    places = {index * last // (_MOST_EVALUATIONS - 1) for index in range(_MOST_EVALUATIONS)} if found else ()
    items = [_generation(found[place]) for place in sorted(places)]
    note = "" if len(items) == len(found) else f"{len(items)} of {len(found):,} evaluations"
    return Examples("What it writes, at each evaluation", items, note)


def _generation(line: Sample) -> Example:
    update = line.get("update")
    fields: list[tuple[str, list[Piece]]] = []
    for sample in line["samples"][:_MOST_TEXTS]:
        if "start" in sample:
            written = _on_few_lines(cut(sample.get("written", "")))
            fields.append(("text", [Piece(str(sample["start"])), Piece(written, "new")]))
        else:
            fields.append(("source", [Piece(cut(sample.get("source", ""), 240))]))
            fields += differing(str(sample.get("written", "")), str(sample.get("true", "")))
    return Example("the best model, at the end" if update is None else f"update {update:,}", fields)


def _on_few_lines(text: str) -> str:
    """Return a text without its empty lines, of which a barely trained model writes many."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines) if lines else "(empty lines only)" if text else "(nothing)"


def _share_right(sample: Sample) -> float | None:
    pairs = list(zip(sample["prediction"], sample["reference"], strict=False))
    return sum(predicted == true for predicted, true in pairs) / len(pairs) if pairs else None


def _of_all(num: int, total: int) -> str:
    return f"{num:,} of {total:,} ({percent(num / max(total, 1))})"
