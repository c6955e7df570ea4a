"""The expected calibration error against torchmetrics, and what it does with other forms and bad input."""

import math

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import multiclass_calibration_error

from loopwright import metrics
from loopwright.errors import ConfigError, DataError


@pytest.mark.parametrize("bins", [1, 10, 15])
@pytest.mark.parametrize("num_classes", [2, 3, 12])
def test_it_matches_torchmetrics_and_its_table_gives_it(num_classes, bins):
    draw = np.random.default_rng(num_classes)
    shares, classes = draw.dirichlet(np.ones(num_classes), 500), draw.integers(0, num_classes, 500)
    expected = multiclass_calibration_error(torch.tensor(shares), torch.tensor(classes), num_classes, bins, "l1")
    metric = metrics.load("ece", bins=bins)
    metric.add_batch(predictions=shares, references=classes)
    rows = [row for row in metric.table() if row["count"]]
    by_hand = sum(row["count"] * abs(row["accuracy"] - row["confidence"]) for row in rows) / 500
    result = metric.compute()
    assert result == {"ece": pytest.approx(by_hand, rel=1e-12)}
    assert result["ece"] == pytest.approx(float(expected), rel=1e-5)  # torchmetrics computes in 32 bits
    assert all(row["low"] < row["confidence"] <= row["high"] for row in rows)
    assert metrics.load("ece").compute(predictions=shares, references=classes, bins=bins) == result


def test_one_probability_is_that_of_class_1_and_each_of_several_labels_counts():
    draw = np.random.default_rng(0)
    shares, true = draw.random((90, 4)), draw.integers(0, 2, (90, 4))
    of_labels = metrics.load("ece").compute(predictions=shares, references=true)
    flat, both = shares.reshape(-1), np.stack([1 - shares.reshape(-1), shares.reshape(-1)], axis=-1)
    assert metrics.load("ece").compute(predictions=flat, references=true.reshape(-1)) == of_labels
    assert metrics.load("ece").compute(predictions=both, references=true.reshape(-1)) == of_labels
    assert metrics.load("ece").compute(predictions=flat[:, None], references=true.reshape(-1, 1)) == of_labels
    edges = metrics.load("ece", bins=5)  # on an edge: the lower bin
    edges.add_batch(predictions=[0.6, 0.8, 1.0, 0.5, 0.0], references=[1, 1, 0, 0, 0])
    assert [row["count"] for row in edges.table()] == [0, 0, 2, 1, 2]


def test_what_is_no_number_makes_the_result_so_and_bad_input_gets_a_sentence():
    shares = [[0.5, 0.5], [math.nan, 0.5]]
    assert math.isnan(metrics.load("ece").compute(predictions=shares, references=[0, 1])["ece"])
    cases = [
        ([[3.0, -1.0]], [0], "are probabilities from 0 to 1, got 3: apply a softmax"),
        ([[0.5, 0.5]], [2], "classes from 0 to 1, got 2"),
        ([[0.5, 0.5]], [[1, 0, 0]], r"shape \(1, 2\) and references of shape \(1, 3\)"),
        ([0.5], [0.3], "classes from 0 to 1, got 0.3"),
        (["a"], [0], "must be numbers"),
    ]
    for predictions, references, message in cases:
        with pytest.raises(DataError, match=message):
            metrics.load("ece").compute(predictions=predictions, references=references)
    for bins in (0, 1.5, True):
        with pytest.raises(ConfigError, match="bins of ece is a whole number from 1"):
            metrics.load("ece", bins=bins)
