"""Panels of texts: tags, answers, generated texts, language models, similarities, numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from loopwright.metrics.words import count_words, same_answer
from loopwright.report.blocks import Block, Example, Examples, Facts, Piece, Table
from loopwright.report.formats import cut, metric, percent
from loopwright.report.panels.classes import confused, scores_table
from loopwright.report.panels.collectors import Collector, label_counts
from loopwright.report.panels.sample import Sample, differing, is_right

_RANKS: Final = (1, 3, 5, 10, 50)
_MOST_NUMBERS: Final = 20_000
_MOST_EVALUATIONS: Final = 6
_MOST_TEXTS: Final = 5


def _share_right(sample: Sample) -> float | None:
    pairs = list(zip(sample["prediction"], sample["reference"], strict=False))
    return sum(predicted == true for predicted, true in pairs) / len(pairs) if pairs else None


class Tags(Collector):
    """Token classification: entities, or the tags themselves if there are none."""

    title = "Entities"
    score_name = "token accuracy"
    score_of = staticmethod(_share_right)

    def add(self, sample: Sample) -> None:
        for predicted, true in zip(sample["prediction"], sample["reference"], strict=False):
            self.pairs[str(true), str(predicted)] += 1
        columns = (sample.get(name, ()) for name in ("confidences", "prediction", "reference"))
        for confidence, predicted, true in zip(*columns, strict=False):
            self.calibration.add(confidence, predicted == true)
        if "expected" in sample:
            self.numbers["spans"] += 1
            both = (sample["entities"], sample["expected"])
            found, expected = ({(span["label"], span["start"], span["end"]) for span in spans} for spans in both)
            for place, spans in enumerate((found & expected, found, expected)):
                for label, _, _ in spans:
                    self.counts.setdefault(str(label), [0, 0, 0])[place] += 1
        self.keep(sample, sample["prediction"] == sample["reference"])

    def blocks(self) -> list[Block]:
        if self.numbers["spans"]:
            table = scores_table("By entity", sorted(item for item in self.counts.items() if any(item[1])), "entities")
        else:
            table = scores_table("By tag", sorted(label_counts(self.pairs).items()), "tokens")
        examples = self.misses.block("Sentences with mistakes"), self.hits.block("Sentences without")
        return [table, confused(self.pairs, "tokens"), self.calibration.block(), *examples]


class Answers(Collector):
    """Question answering: hits and misses."""

    title = "Answers"
    score_name = "exact match"
    score_of = staticmethod(is_right)

    def add(self, sample: Sample) -> None:
        right, text = bool(is_right(sample)), str(sample.get("prediction") or "")
        answers = [str(answer) for answer in sample.get("reference") or []]
        overlaps = any(answer and (answer in text or text in answer) for answer in answers)
        self.numbers.update(all=1, right=right, overlapping=bool(text) and not right and overlaps, empty=not text)
        self.keep(sample, right)

    def blocks(self) -> list[Block]:
        facts = [
            ("hits", _of_all(self.numbers["right"], self.numbers["all"])),
            ("missed, but the answer overlaps", f"{self.numbers['overlapping']:,}"),
            ("unanswered", f"{self.numbers['empty']:,}"),
        ]
        return [Facts("Questions", facts), self.misses.block("Misses"), self.hits.block("Hits")]


class Written(Collector):
    """Summarization, translation, and other text generation: samples, exact matches, lengths."""

    title = "Generated texts"
    score_name = "exact match"
    score_of = staticmethod(lambda sample: same_answer(str(sample["prediction"]), str(sample["reference"])))

    def add(self, sample: Sample) -> None:
        texts = [str(sample[key]) for key in ("prediction", "reference")]
        exact, (written, wanted) = same_answer(*texts), map(count_words, texts)
        self.numbers.update(all=1, exact=exact, written=written, wanted=wanted)
        self.keep(sample, exact)

    def blocks(self) -> list[Block]:
        num = max(self.numbers["all"], 1)
        facts = [
            ("exact matches", _of_all(self.numbers["exact"], self.numbers["all"])),
            ("words generated, on average", metric(self.numbers["written"] / num)),
            ("words expected, on average", metric(self.numbers["wanted"] / num)),
        ]
        samples = self.misses.block("Samples that differ"), self.hits.block("Samples that are right")
        return [Facts("Texts", facts), *samples]


class Language(Collector):
    """Causal language models: how well each part of the text was predicted."""

    title = "Text"
    num_shown = 4

    def add(self, sample: Sample) -> None:
        self.numbers["in bits"] += isinstance(sample.get("bits_per_byte"), float)
        self.values["parts"].add(sample.get("bits_per_byte", sample.get("loss")))
        self.hits.add(sample)

    def blocks(self) -> list[Block]:
        note = "bits per byte of a part" if self.numbers["in bits"] else "mean loss of a part"
        return [self.histogram("Difficulty of the parts", "parts", note=note), self.hits.block("Samples")]


class Masked(Collector):
    """Masked language models: which tokens were predicted correctly."""

    title = "Masked tokens"
    score_name = "masked accuracy"
    score_of = staticmethod(_share_right)

    def add(self, sample: Sample) -> None:
        for predicted, true in zip(sample["prediction"], sample["reference"], strict=False):
            self.pairs[repr(true), repr(predicted)] += 1
        self.hits.add(sample)

    def blocks(self) -> list[Block]:
        totals: Counter[str] = Counter()
        for (true, _), count in self.pairs.items():
            totals[true] += count
        rows = [[token, num, metric(self.pairs[token, token] / num)] for token, num in totals.most_common(15)]
        table = Table("Most frequent tokens", ["token", "masked", "accuracy"], rows, bar=2)
        return [table, confused(self.pairs, "tokens"), self.hits.block("Samples")]


class Retrieval(Collector):
    """Sentence embeddings of pairs: the rank at which the other text of a pair was found."""

    title = "Retrieval"
    score_name = "ranked first"
    score_of = staticmethod(is_right)

    def add(self, sample: Sample) -> None:
        rank = int(sample["rank"])
        self.numbers["all"] += 1
        for most in _RANKS:
            self.numbers[str(most)] += rank <= most
        self.values["its partner"].add(sample.get("similarity"))
        self.values["the nearest other text"].add(sample.get("nearest_other"))
        self.keep(sample, sample["rank"] == 1)

    def blocks(self) -> list[Block]:
        found, total = {most: self.numbers[str(most)] for most in _RANKS}, self.numbers["all"] or 1
        rows = [[f"within the first {most}", num, metric(num / total)] for most, num in found.items()]
        note = "cosine of a text with its partner, and with its best rival"
        return [
            self.histogram("Similarity of the pairs", "its partner", "the nearest other text", note=note),
            Table("Rank of the matching text", ["rank", "pairs", "share"], rows, bar=2),
            self.misses.block("Not ranked first"),
            self.hits.block("Ranked first"),
        ]


class Numbers(Collector):
    """Texts with a number: similarity scores and other regression."""

    title = "Predicted numbers"

    def __init__(self, labels: Sequence[str] = ()) -> None:
        super().__init__(labels)
        self._points: list[tuple[float, float]] = []

    def add(self, sample: Sample) -> None:
        predicted, true = float(sample["prediction"]), float(sample["reference"])
        self.values["samples"].add(predicted - true)
        self._points.append((true, predicted))
        if len(self._points) > _MOST_NUMBERS:
            self._points = self._points[::2]
        self.hits.add(sample)

    def blocks(self) -> list[Block]:
        ordered = sorted(true for true, _ in self._points)
        middle = ordered[len(ordered) // 2] if ordered else 0.0
        groups = f"true below {metric(middle)}", f"true {metric(middle)} and above"
        for true, predicted in self._points:
            self.values[groups[true >= middle]].add(predicted)
        return [
            self.histogram("Predicted values", *groups),
            self.histogram("Predicted minus true", "samples"),
            self.hits.block("Samples"),
        ]


class Losses(Collector):
    """Any other task: the loss distribution."""

    def add(self, sample: Sample) -> None:
        self.values["samples"].add(sample.get("masked_mse", sample.get("loss")))

    def blocks(self) -> list[Block]:
        return [self.histogram("Loss by sample", "samples")]


def generations(lines: Iterable[Sample]) -> Examples:
    """Return the texts generated at up to six evaluations, including the first and the last, of eval/samples.jsonl."""
    found = [line for line in lines if isinstance(line.get("samples"), list) and line["samples"]]
    if len(found) > 1 and found[-1]["samples"] == found[-2]["samples"]:
        found.pop()  # the last evaluation was the best
    last = len(found) - 1
    places = {index * last // (_MOST_EVALUATIONS - 1) for index in range(_MOST_EVALUATIONS)} if found else ()
    items = [_generation(found[place]) for place in sorted(places)]
    note = "" if len(items) == len(found) else f"{len(items)} of {len(found):,} evaluations"
    return Examples("Generated texts at each evaluation", items, note)


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


def _of_all(num: int, total: int) -> str:
    return f"{num:,} of {total:,} ({percent(num / max(total, 1))})"
