"""Entities and tokens: nervaluate's numbers, every way to write tags, indices with places that are left out."""

import numpy as np
import pytest
import torch
from nervaluate import Evaluator
from tests.metrics.samples import TAGS, columns_of

from loopwright import metrics
from loopwright.metrics.spans import as_iob2
from sample_data import sample_rows


def strict_scores(references, predictions):
    overall = Evaluator(references, predictions, tags=["PER", "LOC", "ORG", "MISC"], loader="list").evaluate()
    return overall["overall"]["strict"], {kind: each["strict"] for kind, each in overall["entities"].items()}


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_the_strict_ones_of_nervaluate_also_for_odd_sequences(seed):
    columns = columns_of("entities", 60, seed)
    metric = metrics.load("entities")
    metric.add_batch(**columns)
    table = metric.table()
    result = metric.compute()
    overall, kinds = strict_scores(columns["references"], columns["predictions"])
    assert (result["precision"], result["recall"]) == (overall.precision, overall.recall)
    assert result["f1"] == pytest.approx(overall.f1, rel=1e-14) and 0.1 < result["f1"] < 0.9
    assert [row["label"] for row in table] == sorted(kinds) == ["LOC", "PER"]
    for row in table:
        theirs = kinds[row["label"]]
        assert (row["precision"], row["recall"]) == (theirs.precision, theirs.recall)
        assert row["f1"] == pytest.approx(theirs.f1, rel=1e-14)
        assert (row["num_references"], row["num_predictions"]) == (theirs.possible, theirs.actual)


def test_entities_by_hand_from_tags_of_any_form_and_from_indices():
    metric = metrics.load("entities")
    metric.add_batch(
        predictions=[["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-LOC", "I-LOC"]],
        references=[["B-PER", "I-PER", "O", "B-ORG"], ["O", "B-LOC", "O"]],
    )
    assert metric.table() == [
        {"label": "LOC", "precision": 0.0, "recall": 0.0, "f1": 0.0, "num_references": 1, "num_predictions": 2},
        {"label": "ORG", "precision": 0.0, "recall": 0.0, "f1": 0.0, "num_references": 1, "num_predictions": 0},
        {"label": "PER", "precision": 1.0, "recall": 1.0, "f1": 1.0, "num_references": 1, "num_predictions": 1},
    ]
    assert metric.compute() == {"precision": 1 / 3, "recall": 1 / 3, "f1": 1 / 3, "accuracy": 5 / 7}
    nothing = metric.compute(predictions=[["O"]], references=[["O"]])
    assert nothing == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "accuracy": 1.0}
    converted = as_iob2(["PER", "PER", "O", "B-top-level", "E-top-level", "I-top-level"])
    assert converted == ["I-PER", "I-PER", "O", "B-top-level", "I-top-level", "B-top-level"]
    result = metrics.load("entities").compute(predictions=[["PER", "PER", "O"]], references=[["B-PER", "I-PER", "O"]])
    assert result["f1"] == 1.0
    references = torch.tensor([[-100, 1, 2, -100, 0], [-100, 3, -100, -100, -100]])
    predictions = torch.tensor([[3, 1, 2, 4, 0], [0, 3, 4, 1, 1]])
    result = metrics.load("entities", labels=TAGS).compute(predictions=predictions, references=references)
    assert result == {"precision": 1.0, "recall": 1.0, "f1": 1.0, "accuracy": 1.0}
    accuracy = metrics.load("token_accuracy")
    assert accuracy.compute(predictions=predictions, references=references) == {"token_accuracy": 1.0}


@pytest.mark.parametrize(
    ("scheme", "tags"),
    [
        ("IOB2", ["B-PER", "I-PER", "B-PER", "O", "B-LOC", "B-PER", "B-PER"]),
        ("IOB1", ["I-PER", "I-PER", "B-PER", "O", "I-LOC", "I-PER", "B-PER"]),
        ("BIOES", ["B-PER", "E-PER", "S-PER", "O", "S-LOC", "S-PER", "S-PER"]),
        ("BILOU", ["B-PER", "L-PER", "U-PER", "O", "U-LOC", "U-PER", "U-PER"]),
    ],
)
def test_every_scheme_of_tags_means_the_same_entities(scheme, tags):
    expected = ["B-PER", "I-PER", "B-PER", "O", "B-LOC", "B-PER", "B-PER"]
    result = metrics.load("entities").compute(predictions=[tags], references=[expected])
    assert (result["precision"], result["recall"]) == (1.0, 1.0), scheme


def test_the_accuracy_of_tokens_counts_every_token_once():
    metric = metrics.load("token_accuracy")
    metric.add_batch(predictions=[[1, 2, 3], [1]], references=[[1, 2, -100], [2]])
    metric.add_batch(predictions=np.asarray([[7, 7]]), references=np.asarray([[7, 8]]))
    metric.add_batch(predictions=[5, 6], references=[5, -100])
    metric.add_batch(predictions=[["a", "b"]], references=[["a", "c"]])
    assert metric.compute() == {"token_accuracy": 5 / 8}
    none = metrics.load("token_accuracy").compute(predictions=[[1]], references=[[-100]])
    assert np.isnan(none["token_accuracy"])


def test_real_sentences_agree_with_nervaluate():
    rows = [row["ner"] for row in sample_rows("conll/sample.json")]
    predictions = [["O", *row[:-1]] for row in rows]
    overall, kinds = strict_scores(rows, predictions)
    metric = metrics.load("entities")
    metric.add_batch(predictions=predictions, references=rows)
    assert [row["num_references"] for row in metric.table()] == [kinds[kind].possible for kind in sorted(kinds)]
    assert metric.compute()["recall"] == overall.recall
    whole = metrics.load("entities").compute(predictions=rows, references=rows)
    assert whole == {"precision": 1.0, "recall": 1.0, "f1": 1.0, "accuracy": 1.0}
