"""Metrics: updated batch by batch, computed once, merged exactly over processes, with intervals.

Only numpy is imported. ROUGE, BLEU, chrF and entities import a package of the extra `text` when they are created,
COCO's average precision one of the extra `vision`.

metric = metrics.load("glue", "mrpc")
for batch in batches:
    metric.add_batch(predictions=predict(batch), references=batch["labels"])
metric.compute()    # {"accuracy": ..., "f1": ...}

Metrics of the text tasks: "accuracy", "f1", "confusion_matrix", "multilabel" (text-classification), "entities"
(token-classification), "squad", "squad_v2" (question-answering), "bits_per_byte", "perplexity" (causal-lm), the latter
and "token_accuracy" (masked-lm), "accuracy" (multiple-choice), "rouge" (summarization), "sacrebleu", "chrf",
"exact_match" (translation), "retrieval", "cosine_spearman" (sentence-embedding). Metrics of the image tasks:
"top_k_accuracy" (image-classification), "mean_iou" (semantic-segmentation), "coco_ap" (object-detection,
instance-segmentation), "reconstruction_error" (masked-image-modeling). Metrics with a table of labels have a
method `table`; call it before `compute`. The direction is `greater_is_better`.
"""

from __future__ import annotations

from loopwright.metrics.base import Combined, CountingMetric, Metric
from loopwright.metrics.bootstrap import Bootstrap
from loopwright.metrics.classification import F1, Accuracy, MatthewsCorrelation, Precision, Recall
from loopwright.metrics.detection import CocoAP
from loopwright.metrics.generation import Bleu, ChrF, Rouge
from loopwright.metrics.images import MeanIoU, ReconstructionError, TopKAccuracy
from loopwright.metrics.labels import ConfusionMatrix, MultiLabel
from loopwright.metrics.language import BitsPerByte
from loopwright.metrics.mean_loss import MeanLoss, Perplexity
from loopwright.metrics.question_answering import Squad, SquadV2
from loopwright.metrics.registry import GLUE, METRICS, TASK_METRICS, VISION_METRICS, combine, load
from loopwright.metrics.regression import (
    MeanAbsoluteError,
    MeanSquaredError,
    PearsonCorrelation,
    SpearmanCorrelation,
)
from loopwright.metrics.retrieval import CosineSpearman, Retrieval, similarity_rows
from loopwright.metrics.spans import Entities, TokenAccuracy
from loopwright.metrics.text import ExactMatch

__all__ = [
    "F1",
    "GLUE",
    "METRICS",
    "TASK_METRICS",
    "VISION_METRICS",
    "Accuracy",
    "BitsPerByte",
    "Bleu",
    "Bootstrap",
    "ChrF",
    "CocoAP",
    "Combined",
    "ConfusionMatrix",
    "CosineSpearman",
    "CountingMetric",
    "Entities",
    "ExactMatch",
    "MatthewsCorrelation",
    "MeanAbsoluteError",
    "MeanIoU",
    "MeanLoss",
    "MeanSquaredError",
    "Metric",
    "MultiLabel",
    "PearsonCorrelation",
    "Perplexity",
    "Precision",
    "Recall",
    "ReconstructionError",
    "Retrieval",
    "Rouge",
    "SpearmanCorrelation",
    "Squad",
    "SquadV2",
    "TokenAccuracy",
    "TopKAccuracy",
    "combine",
    "load",
    "similarity_rows",
]
