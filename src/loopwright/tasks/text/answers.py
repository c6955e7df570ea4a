"""From the spans that a model has scored in the windows of a context to the answer of a row. No torch.

A long context is read in overlapping windows. The model's output for one window is a dict: "position" (of the row),
"window" (its number), "num_windows" (of the row), "context", "spans" (score, first character, end; best first),
"null_score" (of "there is no answer in this window") and, for rows with answers, "reference" and "loss".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loopwright.metrics.question_answering import answer_scores
from loopwright.tasks.scoring import MetricScorer

_SURE = 0.9  # confidence above which an answer that shares no word with the references makes them suspect
_NO_SPAN = 1e4  # no-answer score of a row without any possible span


@dataclass(frozen=True)
class AnswerRules:
    n_best: int
    may_be_unanswered: bool  # as in SQuAD 2
    threshold: float  # the margin by which the no-answer score must exceed the best span's

    def is_unanswered(self, no_answer_score: float) -> bool:
        return self.may_be_unanswered and no_answer_score > self.threshold


class WindowCollector:
    """Buffers windows until all windows of a row are there."""

    def __init__(self) -> None:
        self._pending: dict[int, dict[int, dict[str, Any]]] = {}

    def add(self, windows: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Add windows; return the windows of each row that is now complete, in order."""
        complete = []
        for window in windows:
            held = self._pending.setdefault(window["position"], {})
            held[window["window"]] = window
            if len(held) == window["num_windows"]:
                complete.append(_in_order(self._pending.pop(window["position"])))
        return complete

    def take_rest(self) -> list[list[dict[str, Any]]]:
        rest = [_in_order(self._pending[position]) for position in sorted(self._pending)]
        self._pending = {}
        return rest


def _in_order(held: Mapping[int, dict[str, Any]]) -> list[dict[str, Any]]:
    return [held[number] for number in sorted(held)]


def best_answers(windows: Sequence[Mapping[str, Any]], rules: AnswerRules) -> tuple[list[dict[str, Any]], float]:
    """Return the best answers of a row, and the margin of the no-answer score over the best one.

    A span found in several windows counts once, with its best score. Its surrounding whitespace is cut off. The shares
    of the answers add up to 1, including no answer if that is allowed. The no-answer score is the minimum over the
    windows: one window with an answer is enough.
    """
    context = windows[0]["context"]
    scores: dict[tuple[int, int], float] = {}
    for window in windows:
        for score, start, end in window["spans"]:
            text = context[start:end]
            place = start + len(text) - len(text.lstrip()), end - (len(text) - len(text.rstrip()))
            if math.isfinite(score) and place[0] < place[1]:
                scores[place] = max(score, scores.get(place, -math.inf))
    best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))[: rules.n_best]
    null_scores = (window["null_score"] for window in windows)
    null_score = min(filter(math.isfinite, null_scores), default=-math.inf)
    if not best:
        return [], _NO_SPAN
    logits = [score for _, score in best] + ([null_score] if rules.may_be_unanswered else [])
    largest = max(logits)
    weights = [math.exp(logit - largest) for logit in logits]
    total = sum(weights)
    answers = [
        {"text": context[start:end], "score": round(weight / total, 6), "start": start, "end": end}
        for ((start, end), _), weight in zip(best, weights, strict=False)
    ]
    return answers, null_score - logits[0]


def scored_row(windows: Sequence[Mapping[str, Any]], rules: AnswerRules) -> dict[str, Any]:
    """Return the scored sample of a row, always with the best span: the metric decides between it and no answer."""
    answers, difference = best_answers(windows, rules)
    first = windows[0]
    row: dict[str, Any] = {
        "position": first["position"],
        "prediction": answers[0]["text"] if answers else "",
        "reference": list(first["reference"]),
        "loss": sum(window["loss"] for window in windows) / len(windows),
        "num_windows": len(windows),
        "n_best": answers,
    }
    if "group" in first:
        row["group"] = first["group"]
    if any("batch_loss" in window for window in windows):
        row["batch_loss"] = sum(window.get("batch_loss", window["loss"]) for window in windows) / len(windows)
    if rules.may_be_unanswered:
        row["no_answer_score"] = difference
    is_unanswered = rules.is_unanswered(difference)
    if answers and not is_unanswered and answers[0]["score"] >= _SURE:
        _, shared = answer_scores(row["prediction"], row["reference"] or [""])
        if not shared:
            row["sure"] = answers[0]["score"]
    return row


def predicted_row(windows: Sequence[Mapping[str, Any]], rules: AnswerRules) -> dict[str, Any]:
    answers, difference = best_answers(windows, rules)
    is_unanswered = not answers or rules.is_unanswered(difference)
    best = {"text": "", "start": None, "end": None} if is_unanswered else answers[0]
    prediction: dict[str, Any] = {"answer": best["text"], "start": best["start"], "end": best["end"]}
    if "score" in best:
        prediction["score"] = best["score"]
    if rules.may_be_unanswered:
        prediction["no_answer_score"] = round(difference, 6)
    return {**prediction, "n_best": answers}


class AnswerScorer(MetricScorer):
    """Scores rows by their answers: with rules, once all of their windows are there."""

    def __init__(self, make: Any, directions: Mapping[str, bool], rules: AnswerRules | None) -> None:
        super().__init__(make, directions)
        self._rules = rules
        self._collector = WindowCollector()

    def add(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return super().add(samples) if self._rules is None else self._score(self._collector.add(samples))

    def compute(self) -> dict[str, float]:
        return {name: value for name, value in super().compute().items() if not name.endswith("total")}

    def finish(self) -> list[dict[str, Any]]:
        if self._rules is None:
            return []
        from torch import distributed

        from loopwright.engine.processes import gather_objects, is_distributed

        everyone = gather_objects(self._collector.take_rest())
        if is_distributed() and distributed.get_rank() != 0:
            return []
        windows = [window for rows in everyone for row in rows for window in row]
        complete = self._collector.add(windows)
        return self._score([*complete, *self._collector.take_rest()])

    def _score(self, rows: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        assert self._rules is not None, "windows come with rules"
        return super().add([scored_row(windows, self._rules) for windows in rows])
