"""Several labels per sample, and what is confused with what."""

import numpy as np
import pytest
import sklearn.metrics
from tests.metrics.samples import columns_of

from loopwright import metrics
from loopwright.errors import ConfigError, DataError


@pytest.mark.parametrize("seed", range(3))
def test_scores_of_several_labels_match_scikit_learn(seed):
    columns = columns_of("multilabel", 80, seed)
    predictions, references = columns["predictions"].copy(), columns["references"].copy()
    predictions[:, 3] = references[:, 3] = 0  # A label that never occurs counts as 0 in the mean.
    metric = metrics.load("multilabel")
    metric.add_batch(predictions=predictions, references=references)
    table = metric.table()
    theirs = sklearn.metrics
    assert metric.compute() == {
        "f1_micro": theirs.f1_score(references, predictions, average="micro", zero_division=0),
        "f1_macro": pytest.approx(theirs.f1_score(references, predictions, average="macro", zero_division=0)),
        "subset_accuracy": theirs.accuracy_score(references, predictions),
    }
    expected = theirs.precision_recall_fscore_support(references, predictions, zero_division=0)
    for row, precision, recall, f1, support in zip(table, *expected, strict=True):
        assert (row["precision"], row["recall"], row["num_references"]) == (precision, recall, support)
        assert row["f1"] == pytest.approx(f1, rel=1e-14)


def test_scores_become_labels_by_a_threshold_and_columns_have_names_and_a_fixed_number():
    metric = metrics.load("multilabel", threshold=0.5, labels=["red", "blue"])
    metric.add_batch(predictions=[[0.9, 0.5], [0.6, 0.7]], references=[[1, 0], [0, 1]])
    assert [(row["label"], row["num_predictions"]) for row in metric.table()] == [("red", 2), ("blue", 1)]
    assert metric.compute() == {"f1_micro": 4 / 5, "f1_macro": (2 / 3 + 1) / 2, "subset_accuracy": 0.5}
    metric = metrics.load("multilabel")
    metric.add_batch(predictions=[[1, 0]], references=[[1, 0]])
    with pytest.raises(DataError, match="predictions of multilabel must have 2 columns"):
        metric.add_batch(predictions=[[1, 0, 1]], references=[[1, 0, 1]])
    assert metric.compute()["f1_micro"] == 1.0


def test_the_confusion_matrix_matches_scikit_learn_and_names_the_most_confused_pairs():
    columns = columns_of("confusion_matrix", 100)
    result = metrics.load("confusion_matrix").compute(**columns)
    expected = sklearn.metrics.confusion_matrix(columns["references"], columns["predictions"])
    assert result == {"confusion_matrix": expected.tolist(), "labels": [0, 1, 2, 3]}
    ordered = metrics.load("confusion_matrix", labels=np.asarray([3, 9, 0, 1, 2])).compute(**columns)
    expected = sklearn.metrics.confusion_matrix(columns["references"], columns["predictions"], labels=[3, 9, 0, 1, 2])
    assert ordered == {"confusion_matrix": expected.tolist(), "labels": [3, 9, 0, 1, 2]}
    metric = metrics.load("confusion_matrix")
    predictions = ["dog", "dog", "cat", "cat", "dog", "dog"]
    metric.add_batch(predictions=predictions, references=["cat", "cat", "cat", "dog", "dog", "ant"])
    assert metric.most_confused(2) == [
        {"reference": "cat", "prediction": "dog", "count": 2, "share": 2 / 3},
        {"reference": "ant", "prediction": "dog", "count": 1, "share": 1.0},
    ]
    assert [row["label"] for row in metric.table()] == ["ant", "cat", "dog"]
    scores = {"precision": 1 / 4, "recall": 1 / 2, "f1": 2 / 6}
    assert metric.table()[2] == {"label": "dog", **scores, "num_references": 2, "num_predictions": 4}
    with pytest.raises(DataError, match="must all be numbers or all be texts"):
        metric.add_batch(references=[1], predictions=[1])
    with pytest.raises(ConfigError, match="labels of confusion_matrix lack 'ant', which occur"):
        metric.compute(labels=["cat", "dog"])
