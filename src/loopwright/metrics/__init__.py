"""Metrics: fed batch by batch, asked once, merged exactly over processes, with intervals. numpy only.

metric = metrics.load("glue", "mrpc")
for batch in batches:
    metric.add_batch(predictions=predict(batch), references=batch["labels"])
metric.compute()    # {"accuracy": ..., "f1": ...}
"""

from __future__ import annotations

from loopwright.metrics.base import Combined, CountingMetric, Metric
from loopwright.metrics.bootstrap import Bootstrap
from loopwright.metrics.classification import F1, Accuracy, MatthewsCorrelation, Precision, Recall
from loopwright.metrics.mean_loss import MeanLoss, Perplexity
from loopwright.metrics.registry import GLUE, METRICS, combine, load
from loopwright.metrics.regression import (
    MeanAbsoluteError,
    MeanSquaredError,
    PearsonCorrelation,
    SpearmanCorrelation,
)
from loopwright.metrics.text import ExactMatch

__all__ = [
    "F1",
    "GLUE",
    "METRICS",
    "Accuracy",
    "Bootstrap",
    "Combined",
    "CountingMetric",
    "ExactMatch",
    "MatthewsCorrelation",
    "MeanAbsoluteError",
    "MeanLoss",
    "MeanSquaredError",
    "Metric",
    "PearsonCorrelation",
    "Perplexity",
    "Precision",
    "Recall",
    "SpearmanCorrelation",
    "combine",
    "load",
]
