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
"exact_match" (translation), "retrieval", "cosine_spearman" (sentence-embedding), and "ece" of all that predict
probabilities. Metrics of the image tasks: "top_k_accuracy" (image-classification), "mean_iou" (semantic-segmentation),
"coco_ap" (object-detection, instance-segmentation), "reconstruction_error" (masked-image-modeling). Metrics with a
table of labels have a method `table`; call it before `compute`. The direction is `greater_is_better`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from loopwright.errors import ConfigError, nearest
from loopwright.metrics.base import Combined, CountingMetric, Metric, Options
from loopwright.metrics.bootstrap import Bootstrap
from loopwright.metrics.classification import (
    F1,
    Accuracy,
    ConfusionMatrix,
    ExpectedCalibrationError,
    MatthewsCorrelation,
    MultiLabel,
    Precision,
    Recall,
    RocAuc,
)
from loopwright.metrics.detection import CocoAP
from loopwright.metrics.images import MeanIoU, ReconstructionError, TopKAccuracy
from loopwright.metrics.intervals import Intervals
from loopwright.metrics.means import BitsPerByte, MeanLoss, Perplexity
from loopwright.metrics.question_answering import Squad, SquadV2
from loopwright.metrics.regression import (
    R2,
    MeanAbsoluteError,
    MeanSquaredError,
    PearsonCorrelation,
    SpearmanCorrelation,
)
from loopwright.metrics.retrieval import CosineSpearman, Retrieval, similarity_rows
from loopwright.metrics.spans import Entities, TokenAccuracy
from loopwright.metrics.texts import Bleu, ChrF, ExactMatch, Rouge

__all__ = ["GLUE", "METRICS", "TASK_METRICS", "VISION_METRICS", "combine", "load", "similarity_rows"]
__all__ += ["Bootstrap", "Combined", "CountingMetric", "Intervals", "Metric"]
__all__ += ["F1", "Accuracy", "ConfusionMatrix", "MatthewsCorrelation", "MultiLabel", "Precision", "Recall"]
__all__ += ["ExpectedCalibrationError", "RocAuc", "TopKAccuracy", "TokenAccuracy", "Entities"]
__all__ += ["R2", "MeanAbsoluteError", "MeanSquaredError", "PearsonCorrelation", "SpearmanCorrelation"]
__all__ += ["BitsPerByte", "MeanLoss", "Perplexity", "Bleu", "ChrF", "ExactMatch", "Rouge", "Squad", "SquadV2"]
__all__ += ["CosineSpearman", "Retrieval", "CocoAP", "MeanIoU", "ReconstructionError"]


def _by_name(*groups: tuple[type[Metric], ...]) -> Mapping[str, type[Metric]]:
    return MappingProxyType({kind.name: kind for group in groups for kind in group})


METRICS: Mapping[str, type[Metric]] = _by_name(
    (Accuracy, F1, Precision, Recall, MatthewsCorrelation),
    (PearsonCorrelation, SpearmanCorrelation, MeanSquaredError, MeanAbsoluteError, R2),
    (ExactMatch, MeanLoss, Perplexity),
)
"""Every metric of single values, by name: one label, number or text for each sample."""

TASK_METRICS: Mapping[str, type[Metric]] = _by_name(
    (Squad, SquadV2, Entities, TokenAccuracy, Rouge, Bleu, ChrF),
    (Retrieval, CosineSpearman, BitsPerByte, MultiLabel, ConfusionMatrix, ExpectedCalibrationError, RocAuc),
)
"""Every metric of a task with more to a sample, by name: answers, sequences, rows, texts with several references."""

VISION_METRICS: Mapping[str, type[Metric]] = _by_name((TopKAccuracy, MeanIoU, CocoAP, ReconstructionError))
"""Every metric of images, by name."""


class _GluePearson(PearsonCorrelation):
    """Pearson's correlation under the name that GLUE's STS-B gives it."""

    def result(self, options: Options) -> dict[str, Any]:
        return {"pearson": super().result(options)["pearsonr"]}


GLUE: Mapping[str, Callable[[], Metric]] = MappingProxyType(
    {
        **dict.fromkeys(("sst2", "mnli", "mnli_matched", "mnli_mismatched", "qnli", "rte", "wnli", "hans"), Accuracy),
        "cola": MatthewsCorrelation,
        "mrpc": lambda: Combined([Accuracy(), F1()]),
        "qqp": lambda: Combined([Accuracy(), F1()]),
        "stsb": lambda: Combined([_GluePearson(), SpearmanCorrelation()]),
    }
)
"""The metrics of the GLUE benchmark's tasks."""

# Metrics of evaluate that have another name here.
_OTHER_NAMES = {"seqeval": "entities", "bleu": "sacrebleu", "poseval": "token_accuracy"}

# Arguments of evaluate.load about where files are kept. There are no files here, so they change nothing.
_ABOUT_FILES = frozenset({"cache_dir", "experiment_id", "keep_in_memory", "download_config", "revision"})


def load(path: str, config_name: str | None = None, **options: Any) -> Metric:
    """Return a new metric by its name.

    Args:
        path: a key of `METRICS`, `TASK_METRICS` or `VISION_METRICS`, or "glue".
        config_name: the task of "glue", a key of `GLUE`; other metrics have none.
        options: options of the metric, such as `average` of "f1". Arguments of `evaluate.load` about downloads and
            caches are accepted and change nothing.

    Raises:
        ConfigError: the name, the task or an option is unknown.
        InputError: a package that the metric needs is not installed.
    """
    options = {name: value for name, value in options.items() if name not in _ABOUT_FILES}
    if path == "glue":
        if config_name is None:
            raise ConfigError(f"load('glue') needs a task as its second argument: {', '.join(GLUE)}")
        _check_name("GLUE task", config_name, GLUE)
        if options:
            raise ConfigError(f"the metrics of GLUE have no options, got {', '.join(options)}")
        return GLUE[config_name]()
    kinds = {**METRICS, **TASK_METRICS, **VISION_METRICS}
    _check_name("metric", path, [*kinds, "glue"])
    if config_name is not None:
        raise ConfigError(f"the metric {path!r} has no configurations, got {config_name!r}; only 'glue' has")
    return kinds[path](**options)


def combine(metrics: Iterable[str | Metric]) -> Combined:
    """Return one metric made of several, given by name or as instances: `combine(["accuracy", "f1"])`."""
    return Combined([load(each) if isinstance(each, str) else each for each in metrics])


def _check_name(kind: str, name: str, known: Iterable[str]) -> None:
    known = list(known)
    if name not in known:
        near = nearest(_OTHER_NAMES.get(name, str(name)), known)
        hint = f"did you mean {near!r}? " if near else ""
        raise ConfigError(f"there is no {kind} {name!r}: {hint}There are {', '.join(known)}")
