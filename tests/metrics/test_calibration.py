"""The expected calibration error against torchmetrics, and what it does with other forms and bad input."""

import math

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import multiclass_calibration_error

from loopwright import metrics
from loopwright.errors import ConfigError, DataError


def ece(predictions, references, **options):
    return metrics.load("ece", **options).compute(predictions=predictions, references=references)["ece"]


@pytest.mark.parametrize(("num_classes", "bins"), [(2, 1), (2, 15), (3, 10), (12, 15)])
def test_it_matches_torchmetrics(num_classes, bins):
    draw = np.random.default_rng(num_classes)
    shares, classes = draw.dirichlet(np.ones(num_classes), 500), draw.integers(0, num_classes, 500)
    expected = multiclass_calibration_error(torch.tensor(shares), torch.tensor(classes), num_classes, bins, "l1")
    assert ece(shares, classes, bins=bins) == pytest.approx(float(expected), rel=1e-5)  # it computes in 32 bits
    result = metrics.load("ece").compute(predictions=shares, references=classes, bins=bins)
    assert result == {"ece": ece(shares, classes, bins=bins)}


def test_one_probability_is_that_of_class_1_each_label_counts_and_an_edge_belongs_to_the_lower_bin():
    draw = np.random.default_rng(0)
    shares, true = draw.random((90, 4)), draw.integers(0, 2, (90, 4))
    flat, flags = shares.reshape(-1), true.reshape(-1)
    both = np.stack([1 - flat, flat], axis=-1)
    assert ece(shares, true) == ece(flat, flags) == ece(both, flags) == ece(flat[:, None], flags[:, None])
    assert ece([0.75, 1.0], [0, 1], bins=4) == (0.75 + 0.0) / 2 and ece([0.75, 0.8], [0, 1], bins=4) == (0.75 + 0.2) / 2
    assert math.isnan(ece([[0.5, 0.5], [math.nan, 0.5]], [0, 1]))


def test_bad_input_gets_a_sentence():
    cases = [
        ([[3.0, -1.0]], [0], "are probabilities from 0 to 1, got 3: apply a softmax"),
        ([[0.5, 0.5]], [2], "classes from 0 to 1, got 2"),
        ([[0.5, 0.5]], [[1, 0, 0]], r"shape \(1, 2\) and references of shape \(1, 3\)"),
        ([0.5], [0.3], "classes from 0 to 1, got 0.3"),
        (["a"], [0], "must be numbers"),
    ]
    for predictions, references, message in cases:
        with pytest.raises(DataError, match=message):
            ece(predictions, references)
    for bins in (0, 1.5, True):
        with pytest.raises(ConfigError, match="bins of ece is a whole number from 1"):
            metrics.load("ece", bins=bins)
