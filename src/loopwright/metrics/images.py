"""Metrics of image classification, semantic segmentation and masked image modeling.

metric = metrics.load("top_k_accuracy", ks=(1, 5))
metric.add_batch(predictions=scores, references=labels)                    # (samples, classes), (samples,)

metric = metrics.load("mean_iou", labels=["sky", "tree"], ignore_index=255)
metric.add_batch(predictions=class_maps, references=class_maps)            # (height, width) for each image

metric = metrics.load("reconstruction_error", mean_image=mean_of_train)
metric.add_batch(predictions=rebuilt, references=images, masks=hidden)     # masks: which pixels were hidden
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np

from loopwright.errors import DataError
from loopwright.metrics import base
from loopwright.metrics.classification import sums_by_kind, sums_of_matrix
from loopwright.metrics.means import MeanLoss
from loopwright.metrics.sums import Counts, Numbers, Totals


class TopKAccuracy(base.ShareMetric):
    """The share of samples whose class is among the k with the highest scores, for each k of the option `ks`.

    Predictions are one row of scores per sample, one column per class; references are classes. The result for 1 is
    called "accuracy", the others "top_5_accuracy". Ties favour the lower class, and nan ranks before all others, so a
    diverged model is never right. With at most k classes only nan scores are wrong.
    """

    name = "top_k_accuracy"
    forms: ClassVar = {"predictions": base.as_matrix, "references": base.as_integers}
    options_apply_early = True
    defaults: ClassVar[base.Options] = {"ks": (1, 5)}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple("accuracy" if k == 1 else f"top_{k}_accuracy" for k in self.options["ks"])

    def _known(self, options: base.Options) -> dict[str, Any]:
        return base.as_ks(self.name, super()._known(options))

    def hits(self, columns: base.Columns) -> list[base.Column]:
        scores, classes = columns["predictions"], columns["references"]
        num_classes = scores.shape[1]
        is_wrong = (classes < 0) | (classes >= num_classes)
        if is_wrong.any():
            wrong = classes[is_wrong][0]
            raise DataError(f"references of {self.name} are classes in rows of {num_classes}, got {wrong}")
        own = scores[np.arange(len(classes)), classes][:, None]
        is_before = ~(scores <= own) | ((scores == own) & (np.arange(num_classes) < classes[:, None]))
        ranks = is_before.sum(axis=1)
        return [ranks < min(k, num_classes) for k in self.options["ks"]]


class MeanIoU(base.CountingMetric):
    """The intersection over union of predicted and true pixels, averaged over the classes.

    Predictions and references are the class of each pixel, (height, width) for each image; images may differ in size.
    Pixels whose reference is the option `ignore_index` are left out on both sides. `mean_accuracy` is the mean recall
    of the classes, and `overall_accuracy` the share of correct pixels. A class without references and predictions is
    left out of the means.

    The option `labels` names the classes, in the table and in errors. Only the confusion matrix of pixels is kept.
    """

    name = "mean_iou"
    state = partial(Totals, num_dimensions=2)  # pixels by reference and prediction
    limits = (0.0, 1.0)
    forms: ClassVar = {"predictions": base.as_items, "references": base.as_items}
    options_apply_early = True
    defaults: ClassVar[base.Options] = {"labels": None, "ignore_index": 255}

    def update(self, columns: base.Columns) -> None:
        for matrix in self._matrices(columns):
            self._state.add(1, matrix)

    def result(self, options: base.Options) -> dict[str, Any]:
        return {name: float(value) for name, value in self._scores(*sums_of_matrix(self._state.sums)).items()}

    def count(self, columns: base.Columns) -> Counts:
        """Return four numbers per class for each image: pixels right, predicted, referred to, and whether any were."""
        rows = [np.stack(sums_of_matrix(matrix), axis=-1) for matrix in self._matrices(columns)]
        counted = np.zeros((len(rows), max(map(len, rows), default=0), 4), dtype=np.int64)
        for place, row in zip(counted, rows, strict=True):
            place[: len(row)] = np.column_stack([row, row[:, 2] > 0])
        return counted.reshape(len(rows), -1)

    def score(self, totals: Counts, options: base.Options) -> base.Scores:
        return self._scores(*sums_by_kind(totals, 4)[:3])

    def _scores(self, right: Counts, predicted: Counts, referred: Counts) -> base.Scores:
        union = predicted + referred - right
        return {
            "mean_iou": _mean_of_some(right, union),
            "mean_accuracy": _mean_of_some(right, referred),
            "overall_accuracy": base.ratio(right.sum(axis=-1), referred.sum(axis=-1), np.nan),
        }

    def num_parts(self, totals: Counts) -> base.Scores:
        return {"overall_accuracy": sums_by_kind(totals, 4)[2].sum(axis=-1).astype(np.float64)}

    def num_per_class(self, totals: Counts) -> Counts:
        _, predicted, referred, num_images = sums_by_kind(totals, 4)
        return np.asarray(num_images[predicted + referred > 0])

    def table(self) -> list[dict[str, Any]]:
        """Return one row per class; call it before `compute`, which resets the metric."""
        sums = np.stack(sums_of_matrix(self._state.sums), axis=-1).tolist()
        labels = range(len(sums)) if self.options["labels"] is None else self.options["labels"]
        return [
            {
                "label": label,
                "iou": right / (predicted + referred - right) if predicted + referred else None,
                "accuracy": right / referred if referred else None,
                "num_references": referred,
                "num_predictions": predicted,
            }
            for label, (right, predicted, referred) in zip(labels, sums, strict=False)
        ]

    def confusion_matrix(self) -> list[list[int]]:
        """Return pixel counts, a row per true class, a column per predicted one; call it before `compute`."""
        matrix: list[list[int]] = self._state.sums.tolist()
        return matrix

    def _matrices(self, columns: base.Columns) -> list[Counts]:
        """Return how often each class was predicted for each true class, for each image."""
        matrices = []
        pairs = zip(columns["predictions"], columns["references"], strict=True)
        for index, (prediction, reference) in enumerate(pairs):
            predicted, referred = np.asarray(prediction), np.asarray(reference)
            if predicted.shape != referred.shape:
                raise DataError(
                    f"sample {index} of {self.name} has a prediction of shape {predicted.shape} and a reference of "
                    f"shape {referred.shape} (scores of classes? resize them, then take the argmax)"
                )
            for each in (predicted, referred):
                if each.dtype.kind not in "iu":
                    raise DataError(f"a sample of {self.name} is the class of each pixel, got the type {each.dtype}")
            is_counted = referred != self.options["ignore_index"]
            predicted, referred = (each[is_counted].astype(np.int64) for each in (predicted, referred))
            largest = max(predicted.max(initial=-1), referred.max(initial=-1))
            lowest = min(predicted.min(initial=0), referred.min(initial=0))
            size = int(largest) + 1 if self.options["labels"] is None else len(self.options["labels"])
            if lowest < 0 or largest >= size:
                wrong = lowest if lowest < 0 else largest
                raise DataError(
                    f"{self.name} got the class {wrong}, expected 0 to {size - 1} or, for pixels that do not count, "
                    f"{self.options['ignore_index']}: is ignore_index right?"
                )
            matrices.append(np.bincount(referred * size + predicted, minlength=size * size).reshape(size, size))
        return matrices


class ReconstructionError(MeanLoss):
    """The mean squared error over hidden pixels, next to the error of the mean image.

    Predictions and references are images of one shape, masks mark the hidden pixels; a mask may lack the channel
    dimension if it is the first. With the option `mean_image`, the mean of the training images or of their channels,
    `mean_image_mse` is the error of always predicting it: a model above it has learned nothing.
    """

    name = "reconstruction_error"
    options_apply_early = True
    columns = ("predictions", "references", "masks")
    forms: ClassVar = dict.fromkeys(columns, base.as_items)
    terms = ("sums", "counts", "baseline_sums")
    defaults: ClassVar[base.Options] = {"mean_image": None}

    def _known(self, options: base.Options) -> dict[str, Any]:
        known = super()._known(options)
        if known.get("mean_image") is not None:
            # As lists: options are compared when metrics are merged.
            known["mean_image"] = np.asarray(base.without_torch(known["mean_image"]), dtype=np.float64).tolist()
        return known

    def as_columns(self, columns: Mapping[str, Any]) -> dict[str, base.Column]:
        """Return each sample's sum of squares, the mean image's sum, and the number of hidden pixels."""
        arrays = super().as_columns(columns)
        mean = self.options["mean_image"]
        sums, counts, baseline_sums = [], [], []
        for index, (prediction, reference, mask) in enumerate(zip(*arrays.values(), strict=True)):
            predicted, referred = np.asarray(prediction, dtype=np.float64), np.asarray(reference, dtype=np.float64)
            if predicted.shape != referred.shape or np.shape(mask) not in (referred.shape, referred.shape[1:]):
                raise DataError(
                    f"sample {index} of {self.name} has images of shape {predicted.shape} and {referred.shape}, and a "
                    f"mask of shape {np.shape(mask)}: give images of one shape, and a mask of height and width"
                )
            is_hidden = np.broadcast_to(np.asarray(mask, dtype=np.bool_), referred.shape)
            sums.append(np.square(predicted - referred)[is_hidden].sum())
            counts.append(is_hidden.sum())
            baseline = referred if mean is None else self._mean_like(referred)
            baseline_sums.append(np.square(baseline - referred)[is_hidden].sum())
        return {name: np.asarray(each) for name, each in zip(self.terms, (sums, counts, baseline_sums), strict=True)}

    def results(self, loss: Any) -> dict[str, Any]:
        return {"masked_mse": loss}

    def result(self, options: base.Options) -> dict[str, Any]:
        if self.options["mean_image"] is None:
            return super().result(options)
        return {**super().result(options), "mean_image_mse": self.mean("baseline_sums", "counts")}

    def _mean_like(self, image: Numbers) -> Numbers:
        mean = np.asarray(self.options["mean_image"], dtype=np.float64)
        if mean.ndim == 1:  # one value per channel
            mean = mean.reshape(-1, *([1] * (image.ndim - 1)))
        try:
            return np.broadcast_to(mean, image.shape)
        except ValueError:
            shapes = f"the shape {mean.shape}, images have {image.shape}"
            raise DataError(f"the mean_image of {self.name} has {shapes}") from None


def _mean_of_some(numerators: Counts, denominators: Counts) -> Numbers:
    """Return the mean ratio over the classes, without zero denominators."""
    sums = base.ratio(numerators, denominators, 0.0).sum(axis=-1)
    return base.ratio(sums, (denominators != 0).sum(axis=-1), np.nan)
