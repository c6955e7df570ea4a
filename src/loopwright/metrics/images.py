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
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopwright.errors import ConfigError, DataError
from loopwright.metrics.base import (
    Column,
    CountingMetric,
    OptionsWhenAdding,
    as_column,
    as_items,
    as_matrix,
    as_number,
    ratio,
    without_torch,
)
from loopwright.metrics.mean_loss import MeanLoss


class TopKAccuracy(OptionsWhenAdding, CountingMetric):
    """The share of samples whose class is among the k with the highest scores, for each k of the option `ks`.

    Predictions are one row of scores per sample, one column per class; references are classes. The result for 1 is
    called "accuracy", the others "top_5_accuracy". Ties favour the lower class, and nan ranks before all others, so a
    diverged model is never right. With at most k classes only nan scores are wrong.
    """

    name = "top_k_accuracy"
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"ks": (1, 5)})

    def _known(self, options: Mapping[str, Any]) -> dict[str, Any]:
        known = super()._known(options)
        if "ks" in known:
            ks = known["ks"] = tuple(known["ks"]) if hasattr(known["ks"], "__iter__") else (known["ks"],)
            if not ks or any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in ks):
                raise ConfigError(f"ks of {self.name} are whole numbers from 1, such as (1, 5), got {ks}")
        return known

    def column(self, name: str, values: Any) -> Column:
        """Return the scores as rows, the references as integers."""
        if name == "predictions":
            return as_matrix(name, values)
        classes = as_column(name, values)
        if len(classes) and classes.dtype.kind not in "iu":
            raise DataError(f"references of {self.name} must be classes, got an array of type {classes.dtype}")
        return classes.astype(np.int64)

    def count(self, columns: Mapping[str, Column]) -> NDArray[np.int64]:
        """Return whether each sample's class is among the first k, and 1."""
        scores, classes = columns["predictions"], columns["references"]
        num_classes = scores.shape[1]
        is_wrong = (classes < 0) | (classes >= num_classes)
        if is_wrong.any():
            raise DataError(
                f"references of {self.name} are classes in rows of {num_classes}, got {classes[is_wrong][0]}"
            )
        own = scores[np.arange(len(classes)), classes][:, None]
        is_before = ~(scores <= own) | ((scores == own) & (np.arange(num_classes) < classes[:, None]))
        ranks = is_before.sum(axis=1)
        hits = [ranks < min(k, num_classes) for k in self.options["ks"]]
        return np.stack([*hits, np.ones(len(ranks), dtype=np.bool_)], axis=-1).astype(np.int64)

    def score(self, totals: NDArray[np.int64], options: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
        """Return the shares."""
        names = ["accuracy" if k == 1 else f"top_{k}_accuracy" for k in self.options["ks"]]
        return {name: ratio(totals[..., index], totals[..., -1], np.nan) for index, name in enumerate(names)}


class MeanIoU(OptionsWhenAdding, CountingMetric):
    """The intersection over union of predicted and true pixels, averaged over the classes.

    Predictions and references are the class of each pixel, (height, width) for each image; images may differ in size.
    Pixels whose reference is the option `ignore_index` are left out on both sides. `mean_accuracy` is the mean recall
    of the classes, and `overall_accuracy` the share of correct pixels. A class without references and predictions is
    left out of the means.

    The option `labels` names the classes, in the table and in errors. Only the confusion matrix of pixels is kept.
    """

    name = "mean_iou"
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"labels": None, "ignore_index": 255})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._matrix = np.zeros((0, 0), dtype=np.int64)

    def column(self, name: str, values: Any) -> Column:
        """Return one map of classes per sample."""
        return as_items(name, values)

    def update(self, columns: Mapping[str, Column]) -> None:
        """Count pixels by reference and prediction."""
        matrices = [self._matrix_of(*pair) for pair in self._pairs(columns)]
        for matrix in matrices:
            self._add(matrix)
        self._num_samples += len(matrices)

    def result(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the means."""
        return {name: as_number(value) for name, value in self.score(_three_sums(self._matrix), options).items()}

    def count(self, columns: Mapping[str, Column]) -> NDArray[np.int64]:
        """Return three numbers per class for each image: pixels that are right, predicted, referred to."""
        rows = [_three_sums(self._matrix_of(*pair)) for pair in self._pairs(columns)]
        counted = np.zeros((len(rows), max([len(row) for row in rows], default=0)), dtype=np.int64)
        for place, row in zip(counted, rows, strict=True):
            place[: len(row)] = row
        return counted

    def score(self, totals: NDArray[np.int64], options: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
        """Return the means; nan if no pixel counts."""
        right, predicted, referred = np.moveaxis(totals.reshape(*totals.shape[:-1], -1, 3), -1, 0)
        union = predicted + referred - right
        return {
            "mean_iou": _mean_of_some(right, union),
            "mean_accuracy": _mean_of_some(right, referred),
            "overall_accuracy": ratio(right.sum(axis=-1), referred.sum(axis=-1), np.nan),
        }

    def table(self) -> list[dict[str, Any]]:
        """Return one row per class; call it before `compute`, which resets the metric."""
        rows = []
        for index, (right, predicted, referred) in enumerate(_three_sums(self._matrix).reshape(-1, 3).tolist()):
            union = predicted + referred - right
            names = self.options["labels"]
            rows.append(
                {
                    "label": index if names is None else names[index],
                    "iou": right / union if union else None,
                    "accuracy": right / referred if referred else None,
                    "num_references": referred,
                    "num_predictions": predicted,
                }
            )
        return rows

    def confusion_matrix(self) -> list[list[int]]:
        """Return pixel counts, a row per true class, a column per predicted one; call it before `compute`."""
        matrix: list[list[int]] = self._matrix.tolist()
        return matrix

    def reset(self) -> None:
        """Forget every sample."""
        super().reset()
        self._matrix = np.zeros((0, 0), dtype=np.int64)

    def merge(self, other: Any) -> None:
        """Merge another metric of the same kind."""
        super().merge(other)
        self._add(other._matrix)

    def state_dict(self) -> dict[str, Any]:
        """Return the confusion matrix."""
        return {"num_samples": self._num_samples, "matrix": self._matrix.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a confusion matrix."""
        self._num_samples = int(state["num_samples"])
        size = len(state["matrix"])
        self._matrix = np.asarray(state["matrix"], dtype=np.int64).reshape(size, size)

    def _add(self, matrix: NDArray[np.int64]) -> None:
        smaller, larger = sorted((self._matrix, matrix), key=len)
        total = larger.copy()
        total[: len(smaller), : len(smaller)] += smaller
        self._matrix = total

    def _pairs(self, columns: Mapping[str, Column]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return the predicted and true classes of the counted pixels of each image."""
        pairs = []
        for index, (prediction, reference) in enumerate(
            zip(columns["predictions"], columns["references"], strict=True)
        ):
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
            pairs.append((predicted[is_counted].astype(np.int64), referred[is_counted].astype(np.int64)))
        return pairs

    def _matrix_of(self, predicted: NDArray[np.int64], referred: NDArray[np.int64]) -> NDArray[np.int64]:
        names = self.options["labels"]
        largest = max(predicted.max(initial=-1), referred.max(initial=-1))
        lowest = min(predicted.min(initial=0), referred.min(initial=0))
        size = int(largest) + 1 if names is None else len(names)
        if lowest < 0 or largest >= size:
            wrong = lowest if lowest < 0 else largest
            raise DataError(
                f"{self.name} got the class {wrong}, expected 0 to {size - 1} or, for pixels that do not count, "
                f"{self.options['ignore_index']}: is ignore_index right?"
            )
        return np.bincount(referred * size + predicted, minlength=size * size).reshape(size, size)


class ReconstructionError(OptionsWhenAdding, MeanLoss):
    """The mean squared error over hidden pixels, next to the error of the mean image.

    Predictions and references are images of one shape, masks mark the hidden pixels; a mask may lack the channel
    dimension if it is the first. With the option `mean_image`, the mean of the training images or of their channels,
    `mean_image_mse` is the error of always predicting it: a model above it has learned nothing.
    """

    name = "reconstruction_error"
    columns = ("predictions", "references", "masks")
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"mean_image": None})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._floor = MeanLoss()

    def _known(self, options: Mapping[str, Any]) -> dict[str, Any]:
        known = super()._known(options)
        if known.get("mean_image") is not None:
            # As lists: options are compared when metrics are merged.
            known["mean_image"] = np.asarray(without_torch(known["mean_image"]), dtype=np.float64).tolist()
        return known

    def column(self, name: str, values: Any) -> Column:
        """Return one image per sample."""
        return as_items(name, values)

    def as_columns(self, columns: Mapping[str, Any]) -> dict[str, Column]:
        """Return each sample's sum of squares, the mean image's sum, and the number of hidden pixels."""
        arrays = super().as_columns(columns)
        mean = self.options["mean_image"]
        sums, floors, counts = [], [], []
        for index, (prediction, reference, mask) in enumerate(
            zip(*(arrays[name] for name in self.columns), strict=True)
        ):
            predicted, referred = np.asarray(prediction, dtype=np.float64), np.asarray(reference, dtype=np.float64)
            if predicted.shape != referred.shape or np.shape(mask) not in (referred.shape, referred.shape[1:]):
                raise DataError(
                    f"sample {index} of {self.name} has images of shape {predicted.shape} and {referred.shape}, and a "
                    f"mask of shape {np.shape(mask)}: give images of one shape, and a mask of height and width"
                )
            is_hidden = np.broadcast_to(np.asarray(mask, dtype=np.bool_), referred.shape)
            sums.append(np.square(predicted - referred)[is_hidden].sum())
            floors.append(0.0 if mean is None else np.square(self._mean_like(referred) - referred)[is_hidden].sum())
            counts.append(is_hidden.sum())
        return {
            "sums": np.asarray(sums, dtype=np.float64),
            "floors": np.asarray(floors, dtype=np.float64),
            "counts": np.asarray(counts, dtype=np.int64),
        }

    def update(self, columns: Mapping[str, Column]) -> None:
        """Add the sums and the counts."""
        super().update(columns)
        self._floor.update({"sums": columns["floors"], "counts": columns["counts"]})

    def result(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the error, and the mean image's error if there is one."""
        found = {"masked_mse": super().result(options)["loss"]}
        if self.options["mean_image"] is not None:
            found["mean_image_mse"] = self._floor.result(options)["loss"]
        return found

    def score(self, totals: NDArray[np.int64], options: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
        """Return the error; the mean image needs no interval."""
        return {"masked_mse": super().score(totals, options)["loss"]}

    def reset(self) -> None:
        """Forget every sample."""
        super().reset()
        self._floor = MeanLoss()

    def merge(self, other: Any) -> None:
        """Merge another metric of the same kind."""
        super().merge(other)
        self._floor.merge(other._floor)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and the counts."""
        return {**super().state_dict(), "floor": self._floor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums and the counts."""
        super().load_state_dict(state)
        self._floor.load_state_dict(state["floor"])

    def _mean_like(self, image: NDArray[np.float64]) -> NDArray[np.float64]:
        mean = np.asarray(self.options["mean_image"], dtype=np.float64)
        if mean.ndim == 1:  # one value per channel
            mean = mean.reshape(-1, *([1] * (image.ndim - 1)))
        try:
            return np.broadcast_to(mean, image.shape)
        except ValueError:
            raise DataError(
                f"the mean_image of {self.name} has the shape {mean.shape}, images have {image.shape}"
            ) from None


def _three_sums(matrix: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack([np.diag(matrix), matrix.sum(axis=0), matrix.sum(axis=1)], axis=-1).reshape(-1)


def _mean_of_some(numerators: NDArray[np.int64], denominators: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the mean ratio over the classes, without zero denominators."""
    sums = ratio(numerators, denominators, 0.0).sum(axis=-1)
    return ratio(sums, (denominators != 0).sum(axis=-1), np.nan)
