"""From spans that a model has scored in the windows of a context to the answer of a row. No torch.

A long context is read in windows that overlap. What the model says about one window is a dict: "position" (of the row),
"window" (its number), "num_windows" (of the row), "context", "spans" (score, first character, end; the best first),
"null_score" (of "there is no answer in this window") and, of rows with answers, "reference" and "loss".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loopwright.metrics.question_answering import answer_scores
from loopwright.tasks.scoring import MetricScorer, Scorer

_SURE = 0.9  # how sure a model has to be of an answer that shares no word with those of the data to suspect these
_NO_SPAN = 1e4  # how sure of no answer a row is in which nothing can be one


@dataclass(frozen=True)
class AnswerRules:
    """How the answer of a row is chosen.

    Attributes:
        n_best: how many answers are kept.
        may_be_unanswered: whether a question may have no answer (SQuAD 2).
        threshold: how much larger the score of no answer must be than that of the best span.
    """

    n_best: int
    may_be_unanswered: bool
    threshold: float

    def is_unanswered(self, no_answer_score: float) -> bool:
        """Whether a question is left unanswered."""
        return self.may_be_unanswered and no_answer_score > self.threshold


class WindowCollector:
    """Holds the windows of rows until all of a row have come."""

    def __init__(self) -> None:
        self._pending: dict[int, dict[int, dict[str, Any]]] = {}

    def add(self, windows: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Take in windows; return those of each row that is complete now, in order."""
        complete = []
        for window in windows:
            held = self._pending.setdefault(window["position"], {})
            held[window["window"]] = window
            if len(held) == window["num_windows"]:
                complete.append(_in_order(self._pending.pop(window["position"])))
        return complete

    def take_rest(self) -> list[list[dict[str, Any]]]:
        """Return the windows of the rows that are not complete, and forget them."""
        rest = [_in_order(self._pending[position]) for position in sorted(self._pending)]
        self._pending = {}
        return rest


def _in_order(held: Mapping[int, dict[str, Any]]) -> list[dict[str, Any]]:
    return [held[number] for number in sorted(held)]


def best_answers(windows: Sequence[Mapping[str, Any]], rules: AnswerRules) -> tuple[list[dict[str, Any]], float]:
    """Return the best answers of a row, and how much larger the score of no answer is than that of the best.

    A span that several windows hold counts once, with its best score. Blanks at its ends are cut off. The shares of the
    answers add up to 1, together with that of no answer where there may be none. The score of no answer is the least
    over the windows: one window with an answer is enough.

    Returns:
        A list of {"text", "score", "start", "end"}, the best first; and the difference.
    """
    context = windows[0]["context"]
    scores: dict[tuple[int, int], float] = {}
    for window in windows:
        for score, start, end in window["spans"]:
            place = _without_blanks(context, start, end)
            if math.isfinite(score) and place[0] < place[1]:
                scores[place] = max(score, scores.get(place, -math.inf))
    best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))[: rules.n_best]
    null_score = min(window["null_score"] for window in windows)
    if not best:
        return [], _NO_SPAN
    logits = [score for _, score in best]
    shares = _softmax([*logits, null_score] if rules.may_be_unanswered else logits)
    answers = [
        {"text": context[start:end], "score": round(share, 6), "start": start, "end": end}
        for ((start, end), _), share in zip(best, shares, strict=False)
    ]
    return answers, null_score - logits[0]


def scored_row(windows: Sequence[Mapping[str, Any]], rules: AnswerRules) -> dict[str, Any]:
    """Return what is scored and written about a row.

    Its "prediction" is the best span even if "no_answer_score" says that there is none: the metric decides that, since
    it also looks for the best threshold.
    """
    answers, difference = best_answers(windows, rules)
    first = windows[0]
    row: dict[str, Any] = {
        "position": first["position"],
        "prediction": answers[0]["text"] if answers else "",
        "reference": list(first["reference"]),
        "loss": sum(window["loss"] for window in windows) / len(windows),
        "n_best": answers,
    }
    if rules.may_be_unanswered:
        row["no_answer_score"] = difference
    is_unanswered = rules.is_unanswered(difference)
    if answers and not is_unanswered and answers[0]["score"] >= _SURE:
        _, shared = answer_scores(row["prediction"], row["reference"] or [""])
        if not shared:
            row["sure"] = answers[0]["score"]
    return row


def predicted_row(windows: Sequence[Mapping[str, Any]], rules: AnswerRules) -> dict[str, Any]:
    """Return the prediction for a row: the answer, its share and place, and the next best ones."""
    answers, difference = best_answers(windows, rules)
    is_unanswered = not answers or rules.is_unanswered(difference)
    best = {"text": "", "start": None, "end": None} if is_unanswered else answers[0]
    prediction: dict[str, Any] = {"answer": best["text"], "start": best["start"], "end": best["end"]}
    if "score" in best:
        prediction["score"] = best["score"]
    if rules.may_be_unanswered:
        prediction["no_answer_score"] = round(difference, 6)
    return {**prediction, "n_best": answers}


class AnsweredRows(MetricScorer):
    """Scores rows by their answers."""

    def compute(self) -> dict[str, float]:
        """Return the scores; how many questions there are of each kind is no score."""
        return {name: value for name, value in super().compute().items() if not name.endswith("total")}


class AnswerScorer(Scorer):
    """Scores rows once all of their windows have come.

    Args:
        rows: scores whole rows.
        rules: how the answer of a row is chosen.
    """

    def __init__(self, rows: AnsweredRows, rules: AnswerRules) -> None:
        self.directions = rows.directions
        self._rows = rows
        self._rules = rules
        self._collector = WindowCollector()

    def add(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take in windows; return the rows that are complete."""
        return self._score(self._collector.add(samples))

    def finish(self) -> list[dict[str, Any]]:
        """Score the rows whose windows different processes have seen, or of which some were left out."""
        from torch import distributed

        from loopwright.engine.processes import gather_objects, is_distributed

        everyone = gather_objects(self._collector.take_rest())
        if is_distributed() and distributed.get_rank() != 0:
            return []
        windows = [window for rows in everyone for row in rows for window in row]
        complete = self._collector.add(windows)
        return self._score([*complete, *self._collector.take_rest()])

    def compute(self) -> dict[str, float]:
        """Return the metric's results."""
        return self._rows.compute()

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return the intervals of the metric's results."""
        return self._rows.intervals()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of what was scored; called after `finish`, so that no window is waiting."""
        return self._rows.state_dict()

    def merge_state(self, state: Mapping[str, Any]) -> None:
        """Take in the rows that another process has scored."""
        self._rows.merge_state(state)

    def _score(self, rows: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        return self._rows.add([scored_row(windows, self._rules) for windows in rows])


def _without_blanks(context: str, start: int, end: int) -> tuple[int, int]:
    text = context[start:end]
    return start + len(text) - len(text.lstrip()), end - (len(text) - len(text.rstrip()))


def _softmax(logits: Sequence[float]) -> list[float]:
    largest = max(logits)
    weights = [math.exp(logit - largest) for logit in logits]
    total = sum(weights)
    return [weight / total for weight in weights]
