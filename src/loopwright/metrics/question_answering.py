"""Exact match and F1 of answers, as SQuAD 1.1 and 2.0 score them: between 0 and 100.

metric = metrics.load("squad")
metric.add_batch(predictions=["the Normans"], references=[["Normans", "the Norman people"]])
metric.compute()    # {"exact_match": 100.0, "f1": 100.0}

If an answer is in a script without spaces, its characters take the place of words (`loopwright.metrics.words`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np

from loopwright.errors import ConfigError, DataError
from loopwright.metrics.base import Column, Columns, CountingMetric, Options, Scores, as_column, as_items, ratio
from loopwright.metrics.means import UNITS_PER_ONE, MeanMetric
from loopwright.metrics.sums import Counts, ExactSum, Numbers, Rows
from loopwright.metrics.words import answer_words, script_of

_KEPT = ("no_answer_scores", "has_answer", "is_answered", "exact", "f1")


def answer_scores(prediction: str, answers: list[str], *, is_v2: bool = True) -> tuple[float, float]:
    """Return (is an exact match, F1 of the words), each against its best answer.

    If neither the prediction nor the answer has a word, F1 is 1 in SQuAD 2.0 and 0 in SQuAD 1.1.
    """
    exact = f1 = 0.0
    for answer in answers:
        script = script_of([answer]) or script_of([prediction])  # a number has none
        predicted, expected = answer_words(prediction, script), answer_words(answer, script)
        exact = max(exact, float(predicted == expected))
        num_shared, num_words = (Counter(predicted) & Counter(expected)).total(), len(predicted) + len(expected)
        f1 = max(f1, 2 * num_shared / num_words if num_words else float(is_v2))
    return exact, f1


def as_predictions(name: str, values: Any) -> Column:
    """Return the predicted texts; rows in the form of `evaluate` have them as "prediction_text"."""
    rows = as_items(name, values)
    for index, row in enumerate(rows):
        rows[index] = row.get("prediction_text") if isinstance(row, Mapping) else row
        if not isinstance(rows[index], str):
            raise DataError(f"{name} must be texts, got {row!r:.80}")
    return rows


def as_answers(name: str, values: Any) -> Column:
    """Return the answers to each question as a list of texts."""
    rows = as_items(name, values)
    for index, row in enumerate(rows):
        given: Any = row.get("answers", row) if isinstance(row, Mapping) else row
        given = given.get("text") if isinstance(given, Mapping) else given
        rows[index] = [given] if isinstance(given, str) or not hasattr(given, "__iter__") else list(given)
        if given == "":
            rows[index] = []  # a text that is not in a list: there is no answer
        if not all(isinstance(each, str) for each in rows[index]):
            raise DataError(f"{name} must be the answers to a question, as texts, got {row!r:.80}")
    return rows


def as_scores(name: str, values: Any) -> Numbers:
    """Return the scores as doubles."""
    scores = as_column(name, values)
    if scores.dtype.kind not in "biuf" or np.isnan(scores.astype(np.float64)).any():
        raise DataError(f"{name} must be numbers, one for each prediction")
    return scores.astype(np.float64)


class Squad(MeanMetric):
    """Exact match and F1 of SQuAD 1.1, where every question has an answer.

    Predictions are texts. References are the answers to a question: a text, a list of texts, or SQuAD's own
    `{"text": [...], "answer_start": [...]}`. The rows of `evaluate` work too:
    `{"id": ..., "prediction_text": ...}` and `{"id": ..., "answers": ...}`. A prediction without a word, such as "the",
    matches an answer without a word, but the official F1 of the two is 0.
    """

    name = "squad"
    limits = (0.0, 100.0)
    names = ("exact_match", "f1")
    token_names = ("f1",)
    forms: ClassVar = {"predictions": as_predictions, "references": as_answers}

    def as_columns(self, columns: Mapping[str, Any]) -> dict[str, Column]:
        """Return the columns; rows that name their question must match."""
        return super().as_columns(_of_the_same_questions(self.name, columns))

    def update(self, columns: Columns) -> None:
        super().update(columns)
        self.scripts.update(map(script_of, columns["references"]))

    def values(self, columns: Columns) -> Numbers:
        for index, answers in enumerate(columns["references"]):
            if not answers:
                raise DataError(f"sample {index} of squad has no answer: use squad_v2 for questions without one")
        pairs = zip(columns["predictions"], columns["references"], strict=True)
        scores = [answer_scores(prediction, answers, is_v2=False) for prediction, answers in pairs]
        return np.asarray(scores, dtype=np.float64).reshape(-1, 2)


class SquadV2(CountingMetric):
    """Exact match and F1 of SQuAD 2.0, where some questions have no answer, and the best no-answer threshold.

    Predictions and references are as for `squad`; a question without an answer has no reference answers, and the right
    prediction is the empty text. `no_answer_scores` are the model's confidence that there is no answer, 0 by default. A
    question whose score is above the option `no_answer_threshold` counts as unanswered. The result also has the best
    thresholds for exact match and for F1; a threshold never separates equal scores. It keeps five numbers per sample.

    As in the official script, reference answers without a word are not compared with, but the question counts as one
    with an answer; and for the best thresholds any prediction that is not empty answers the question.
    """

    name = "squad_v2"
    state = partial(Rows, *_KEPT)
    token_names = ("f1", "HasAns_f1", "best_f1")
    columns = ("predictions", "references", "no_answer_scores")
    forms: ClassVar = {"predictions": as_predictions, "references": as_answers, "no_answer_scores": as_scores}
    limits = (0.0, 100.0)
    defaults: ClassVar[Options] = {"no_answer_threshold": 1.0}

    def as_columns(self, columns: Mapping[str, Any]) -> dict[str, Column]:
        """Return the columns; missing scores come from the predictions' rows, or are 0."""
        columns = _of_the_same_questions(self.name, columns)
        if "no_answer_scores" not in columns and "predictions" in columns:
            rows = as_items("predictions", columns["predictions"])
            scores = [row.get("no_answer_probability", 0.0) if isinstance(row, Mapping) else 0.0 for row in rows]
            columns = {**columns, "no_answer_scores": np.asarray(scores, dtype=np.float64)}
        return super().as_columns(columns)

    def update(self, columns: Columns) -> None:
        self._state.add(self._samples(columns))
        self.scripts.update(script_of(answers) for answers in columns["references"] if answers)

    def result(self, options: Options) -> dict[str, Any]:
        """Return the scores, also separately for questions with and without an answer, and the best thresholds."""
        samples = self._state.table
        exact, f1 = _thresholded(samples, options["no_answer_threshold"])
        has_answer = samples[:, 1] == 1
        result: dict[str, Any] = {}
        for prefix, chosen in (("", np.ones_like(has_answer)), ("HasAns_", has_answer), ("NoAns_", ~has_answer)):
            if chosen.any():
                for name, values in (("exact", exact), ("f1", f1)):
                    result[prefix + name] = _percentage(values[chosen])
                result[prefix + "total"] = int(chosen.sum())
        for name, column in (("exact", 3), ("f1", 4)):
            result[f"best_{name}"], result[f"best_{name}_thresh"] = _best_threshold(samples, column)
        return result

    def count(self, columns: Columns) -> Counts:
        """Return exact match, F1 and 1 of each sample, separately for those with and without an answer."""
        samples = self._samples(columns)
        exact, f1 = _thresholded(samples, self.options["no_answer_threshold"])
        units = np.rint(np.stack([exact, f1, np.ones_like(exact)], axis=-1) * UNITS_PER_ONE).astype(np.int64)
        has_answer = samples[:, 1:2].astype(np.int64)
        return np.concatenate([units * has_answer, units * (1 - has_answer)], axis=-1)

    def score(self, totals: Counts, options: Options) -> Scores:
        scores = {}
        parts = {"": totals[..., :3] + totals[..., 3:], "HasAns_": totals[..., :3], "NoAns_": totals[..., 3:]}
        for prefix, each in parts.items():
            for index, name in enumerate(("exact", "f1")):
                scores[prefix + name] = 100.0 * ratio(each[..., index], each[..., 2], np.nan)
        return scores

    def num_parts(self, totals: Counts) -> Scores:
        """Return the numbers of all questions, of those with an answer, and of those without."""
        counts = totals[..., [2, 5]] / UNITS_PER_ONE
        sizes = {"": counts.sum(axis=-1), "HasAns_": counts[..., 0], "NoAns_": counts[..., 1]}
        return {prefix + name: size for prefix, size in sizes.items() for name in ("exact", "f1")}

    def _samples(self, columns: Columns) -> Numbers:
        """Return the numbers of each sample, for any threshold."""
        rows = []
        for prediction, answers, score in zip(*(columns[name] for name in self.columns), strict=True):
            usable = [each for each in answers if answer_words(each, script_of([each]))]
            rows.append((score, bool(answers), bool(prediction), *answer_scores(prediction, usable or [""])))
        return np.asarray(rows, dtype=np.float64).reshape(-1, len(_KEPT))


def _of_the_same_questions(metric: str, columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the columns, with predictions and references as arrays of rows; raise if their orders differ."""
    if not {"predictions", "references"} <= columns.keys():
        return columns
    rows = {name: as_items(name, columns[name]) for name in ("predictions", "references")}
    for index, pair in enumerate(zip(*rows.values(), strict=False)):
        predicted, asked = (row.get("id") if isinstance(row, Mapping) else None for row in pair)
        if predicted is not None and asked is not None and predicted != asked:
            raise DataError(
                f"sample {index} of {metric}: the prediction is of question {predicted!r}, the reference of {asked!r}. "
                "Give both in the same order."
            )
    return {**columns, **rows}


def _thresholded(samples: Numbers, threshold: Any) -> tuple[Numbers, Numbers]:
    """Return exact match and F1 if questions with a score above the threshold are left unanswered."""
    if isinstance(threshold, bool) or not isinstance(threshold, int | float):
        raise ConfigError(f"no_answer_threshold of squad_v2 must be a number, got {threshold!r}")
    scores, has_answer, _, exact, f1 = samples.T
    is_unanswered = scores > threshold
    return np.where(is_unanswered, 1 - has_answer, exact), np.where(is_unanswered, 1 - has_answer, f1)


def _percentage(values: Numbers) -> float:
    total = ExactSum()
    total.add(values)
    return total.mean(len(values), 100)


def _best_threshold(samples: Numbers, column: int) -> tuple[float, float]:
    """Return the best mean, between 0 and 100, and its threshold; the lowest if there are several.

    A threshold below all scores leaves every question unanswered.
    """
    has_answer, is_answered = samples[:, 1] == 1, samples[:, 2]
    gains = np.where(has_answer, samples[:, column], -is_answered)  # of a question that is no longer left unanswered
    # Sorted by all summands, so that the sums have the same bits for every order of the samples.
    order = np.lexsort((gains, samples[:, 0]))
    scores, num_without_answer = samples[order, 0], float((~has_answer).sum())
    sums = num_without_answer + np.cumsum(gains[order])
    is_last_of_score = np.append(scores[1:] != scores[:-1], True)
    thresholds = np.append(scores[0] - 1.0, scores[is_last_of_score])
    sums = np.append(num_without_answer, sums[is_last_of_score])
    best = int(np.argmax(sums))
    return 100.0 * float(sums[best]) / len(samples), float(thresholds[best])
