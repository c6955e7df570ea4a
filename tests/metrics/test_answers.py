"""Answers to questions: the numbers of SQuAD's own rules, of torchmetrics, and worked out by hand."""

import re
import string
from collections import Counter
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.metrics.samples import columns_of

from loopwright import metrics
from loopwright.errors import ConfigError, DataError
from loopwright.metrics.question_answering import answer_scores
from loopwright.metrics.words import normalized_answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Normans!", "normans"),
        ("An apple, a day", "apple day"),
        ("U.S.A.", "usa"),
        ("theatre at  the\tend\n", "theatre at end"),
        ("the", ""),
        ("10th-century", "10thcentury"),
    ],
)
def test_an_answer_is_normalised_as_in_squad(text, expected):
    assert normalized_answer(text) == expected


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("The Normans", ["Normans"], (1.0, 1.0)),
        ("in the 10th century", ["10th century"], (0.0, 4 / 5)),
        ("in the 10th century", ["11th", "10th century", "in 10th"], (0.0, 4 / 5)),
        ("cat cat dog", ["cat dog dog dog"], (0.0, 4 / 7)),
        ("", ["Normans"], (0.0, 0.0)),
        ("", [""], (1.0, 1.0)),
        ("a", ["the"], (1.0, 1.0)),
        ("Danes", ["Normans"], (0.0, 0.0)),
        ("中华人民共和国", ["中华人民共和国。"], (1.0, 1.0)),
        ("中华人民", ["中华人民共和国"], (0.0, 2 * 4 / 11)),
        ("2008年", ["在2008年8月"], (0.0, 2 * 2 / 7)),
        ("2008年", ["2008"], (0.0, 2 / 3)),
        ("東京", ["東京タワー"], (0.0, 2 * 2 / 7)),
        ("กรุงเทพ", ["กรุงเทพมหานคร"], (0.0, 2 * 6 / 18)),
        ("서울", ["서울 특별시"], (0.0, 2 / 3)),
        ("the city of Beijing", ["city of Beijing (北京)"], (0.0, 2 * 3 / 7)),
    ],
)
def test_scores_of_an_answer_by_hand(prediction, answers, expected):
    assert answer_scores(prediction, answers) == expected


def test_scores_are_between_0_and_100_and_take_rows_of_evaluate():
    metric = metrics.load("squad")
    metric.add_batch(predictions=["the Normans", "in the 10th century"], references=["Normans", ["10th century"]])
    metric.add(prediction="Danes", reference=["Normans"])
    assert metric.compute() == {"exact_match": 100 / 3, "f1": 60.0}
    mixed = metrics.load("squad")
    mixed.add_batch(predictions=["北", "in Rome"], references=[["北京"], ["Rome"]])
    assert mixed.tokens == {"f1": "Chinese characters, words in 1 of 2 rows"}
    assert mixed.compute() == {"exact_match": 0.0, "f1": pytest.approx(200 / 3)} and mixed.tokens == {}
    predictions = [{"id": "1", "prediction_text": "Normandy"}, {"id": "2", "prediction_text": "x"}]
    answers = [{"text": ["Normandy"], "answer_start": [3]}, {"text": ["y"], "answer_start": [5]}]
    references = [{"id": "1", "answers": answers[0]}, {"id": "2", "answers": answers[1]}]
    expected = {"exact_match": 50.0, "f1": 50.0}
    assert metrics.load("squad").compute(predictions=predictions, references=references) == expected
    assert metrics.load("squad").compute(predictions=["Normandy", "x"], references=answers) == expected
    rows = [{**row, "no_answer_probability": 0.25} for row in predictions]
    second = metrics.load("squad_v2").compute(predictions=rows, references=references)
    assert (second["exact"], second["best_exact"], second["best_exact_thresh"]) == (50.0, 50.0, 0.25)


@pytest.mark.parametrize("name", ["squad", "squad_v2"])
def test_rows_of_questions_in_different_orders_are_refused(name):
    predictions = [{"id": each, "prediction_text": "x"} for each in "12"]
    references = [{"id": each, "answers": {"text": ["y"], "answer_start": [0]}} for each in "21"]
    metric = metrics.load(name)
    with pytest.raises(DataError, match="sample 0 of squad.*: the prediction is of question '1', the reference of '2'"):
        metric.add_batch(predictions=predictions, references=references)
    assert metric.num_samples == 0


def test_questions_without_an_answer_by_hand_and_by_a_threshold():
    columns = {
        "predictions": ["Normandy", "France", "", "", "red cat"],
        "references": [["Normandy"], [], [], ["Rollo"], ["the cat"]],
    }
    result = metrics.load("squad_v2").compute(**columns)
    assert result == {
        "exact": 40.0,
        "f1": pytest.approx(100 * (2 + 2 / 3) / 5, rel=1e-15),
        "total": 5,
        "HasAns_exact": 100 / 3,
        "HasAns_f1": pytest.approx(100 * (1 + 2 / 3) / 3, rel=1e-15),
        "HasAns_total": 3,
        "NoAns_exact": 50.0,
        "NoAns_f1": 50.0,
        "NoAns_total": 2,
        # All scores are 0: either every question is left unanswered, or none is.
        "best_exact": 40.0,
        "best_exact_thresh": -1.0,
        "best_f1": pytest.approx(100 * (2 + 2 / 3) / 5, rel=1e-15),
        "best_f1_thresh": 0.0,
    }
    only = metrics.load("squad_v2").compute(predictions=["a b"], references=["a b"])
    assert "NoAns_exact" not in only and only["HasAns_total"] == 1
    columns = {
        "predictions": ["Normandy", "France", "Rollo"],
        "references": [["Normandy"], [], ["Rollo"]],
        "no_answer_scores": [0.1, 0.8, 0.9],
    }
    for threshold, expected in [(1.0, 200 / 3), (0.85, 100 / 3), (0.5, 200 / 3), (0.0, 100 / 3)]:
        metric = metrics.load("squad_v2", no_answer_threshold=threshold)
        assert metric.compute(**columns)["exact"] == expected
    assert metrics.load("squad_v2").compute(**columns, no_answer_threshold=0.0)["exact"] == 100 / 3
    with pytest.raises(ConfigError, match="no_answer_threshold of squad_v2 must be a number, got 'x'"):
        metrics.load("squad_v2").compute(**columns, no_answer_threshold="x")


@pytest.mark.parametrize("seed", range(4))
def test_the_best_threshold_is_the_best_of_all_that_can_be_tried(seed):
    columns = columns_of("squad_v2", 60, seed)
    result = metrics.load("squad_v2").compute(**columns)
    tried = [-1.0, *np.unique(columns["no_answer_scores"]).tolist()]
    for name in ("exact", "f1"):
        reached = [metrics.load("squad_v2", no_answer_threshold=each).compute(**columns)[name] for each in tried]
        assert result[f"best_{name}"] == pytest.approx(max(reached), rel=1e-12)
        chosen = metrics.load("squad_v2", no_answer_threshold=result[f"best_{name}_thresh"]).compute(**columns)
        assert chosen[name] == pytest.approx(max(reached), rel=1e-12)


def plain(text):
    bare = "".join(each for each in text.lower() if each not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def word_f1(prediction, gold, is_v2):
    mine, theirs = plain(prediction), plain(gold)
    if is_v2 and not (mine and theirs):
        return float(mine == theirs)
    shared = sum(min(count, Counter(theirs)[word]) for word, count in Counter(mine).items())
    precision, recall = shared / max(len(mine), 1), shared / max(len(theirs), 1)
    return 2 * precision * recall / (precision + recall) if shared else 0.0


def official_v1(rows):
    exact = [max(plain(text) == plain(gold) for gold in golds) for text, golds, _ in rows]
    f1 = [max(word_f1(text, gold, is_v2=False) for gold in golds) for text, golds, _ in rows]
    return {"exact_match": 100 * sum(exact) / len(rows), "f1": 100 * sum(f1) / len(rows)}


def official_v2(rows, threshold):
    """Return the results without thresholds; no two rows have the same no-answer score."""
    found = {}
    for name in ("exact", "f1"):
        scored = []
        for text, golds, score in sorted(rows, key=lambda row: row[2]):
            usable = [gold for gold in golds if plain(gold)] or [""]
            same = max(float(plain(text) == plain(gold)) for gold in usable)
            reached = same if name == "exact" else max(word_f1(text, gold, is_v2=True) for gold in usable)
            final = float(not golds) if score > threshold else reached
            scored.append((bool(golds), final, reached if golds else -bool(text)))
        for prefix, chosen in (("", (True, False)), ("HasAns_", (True,)), ("NoAns_", (False,))):
            if part := [final for has_answer, final, _ in scored if has_answer in chosen]:
                found |= {f"{prefix}{name}": 100 * sum(part) / len(part), f"{prefix}total": len(part)}
        gains = [sum(not has_answer for has_answer, _, _ in scored), *(gain for _, _, gain in scored)]
        found[f"best_{name}"] = 100 * max(accumulate(gains)) / len(rows)
    return found


WORDS = st.sampled_from(["the", "A", "an.", "!", "--", "", " ", "cat", "Cat,", "dog", "b", "münchen", "мир", "2.5"])
ANSWERS = st.lists(WORDS, max_size=4).map(" ".join)


@given(st.lists(st.tuples(ANSWERS, st.lists(ANSWERS, max_size=3)), min_size=1, max_size=8), st.integers(-1, 9))
def test_any_answers_score_as_in_the_official_scripts(pairs, threshold):
    rows = [(text, golds, float(place * 5 % 11)) for place, (text, golds) in enumerate(pairs)]
    columns = {"predictions": [row[0] for row in rows], "references": [row[1] for row in rows]}
    result = metrics.load("squad_v2").compute(
        **columns, no_answer_scores=[row[2] for row in rows], no_answer_threshold=threshold
    )
    expected = official_v2(rows, threshold)
    assert {name: result[name] for name in result if "thresh" not in name} == pytest.approx(expected, rel=1e-12)
    if all(golds for _, golds, _ in rows):
        assert metrics.load("squad").compute(**columns) == pytest.approx(official_v1(rows), rel=1e-12)
