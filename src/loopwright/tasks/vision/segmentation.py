"""semantic-segmentation: the class of each pixel of an image."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopwright.errors import DataError, InputError
from loopwright.metrics import load as load_metric
from loopwright.run_folder import RunFolder, write_atomically, write_json
from loopwright.run_folder.files import read_json_lines
from loopwright.sources import Role
from loopwright.sources.images.masks import count_classes, read_values
from loopwright.tasks.arguments import TaskTrainingArguments, flag, flag_list
from loopwright.tasks.base import Job, Origin, Rows
from loopwright.tasks.class_options import BALANCED, numbers_of, weights_by_class
from loopwright.tasks.data import RunData
from loopwright.tasks.scoring import JointScorer, LossInterval, MetricScorer, Scorer, score_rows
from loopwright.tasks.vision.base import (
    BAD_ANNOTATIONS,
    IMAGE,
    VISION_DEFAULTS,
    Features,
    VisionArguments,
    VisionTask,
)

if TYPE_CHECKING:
    from loopwright.data.images import Scene, Transform
    from loopwright.demos import DemoFiles

MODEL_LOSS = "model"
_LOSSES = (MODEL_LOSS, "ce", "dice", "focal", "ce+dice", "focal+dice")
_SMALL_LOSS = "ce+dice"
_BACKGROUND = "background"
_MASKS = "masks"  # the folder of predicted masks within the overlays folder
_NUM_NAMED = 3  # classes in the caption of a picture

ClassMap = NDArray[Any]
"""The class of each pixel: whole numbers, (height, width)."""
Pairs = list[tuple[int, int, int]]
"""True class, predicted class, and the number of pixels of an image with both."""


@dataclass
class SemanticSegmentationArguments(VisionArguments):
    mask_column: str | None = flag(None, "Column of the masks, if the data is a table.")
    id2label: str | None = flag(None, "File with the names of the classes by number; id2label.json if unset.")
    ignore_index: int = flag(255, "Value in masks that is not a class: such pixels are ignored.")
    mask_values: list[str] = flag_list(
        "Values of the classes in masks that do not hold class ids: 0,255, 0=sky,255=road, colours as 000000,ff0000, a "
        "json file of colours by name, or auto for all that are found; other pixels take the nearest."
    )
    bad_annotations: str = flag("refuse", BAD_ANNOTATIONS, choices=("refuse", "drop"))
    reduce_labels: bool = flag(False, "Ignore 0 in masks, and subtract 1 from the other values.")
    loss: str | None = flag(
        None, "Loss; the model's own, or ce+dice for the small model from scratch, if unset.", choices=_LOSSES
    )
    class_weights: list[str] = flag_list(
        "Weight of a pixel of each class in ce and focal: a number per class, or balanced, which favours rare classes."
    )


class SemanticSegmentation(VisionTask):
    name = "semantic-segmentation"
    summary = "the class of each pixel of an image"
    roles = (
        IMAGE,
        Role(
            "mask",
            "mask",
            names=("mask", "annotation", "label", "labels", "segmentation", "mask_path", "segmentation_mask"),
            is_input=False,
        ),
    )
    explanation = {
        "data": "A folder with images and masks folders, or with train and validation folders of these, matched by "
        "name; csv, tsv, json, jsonl or parquet with columns of image and mask paths; or a Hub id.",
        "masks": "PNGs with a class id per pixel, grey or with a palette; 255 is ignored (--ignore_index). "
        "--mask_values 0,255, or auto, for other values and for colours. "
        'id2label.json names the classes: {"0": "sky", "1": "tree"}. --reduce_labels if 0 is not a class.',
        "models": "By default a small U-shaped net. Else a folder or Hub id of transformers (SegFormer, UperNet, "
        "BEiT, ...), or package.module:function that returns any PyTorch module.",
        "loss": "--loss model, ce, dice, focal, ce+dice or focal+dice; --class_weights balanced, or a number per "
        "class.",
        "metric": "Mean IoU and mean accuracy of the classes, and overall pixel accuracy, all at the size of the "
        "masks. eval/classes.json has the IoU of each class.",
        "predict": "lw predict RUN a.jpg b.png photos/ --overlays drawn/ (masks go to drawn/masks/)",
    }
    example = "lw train semantic-segmentation --data scenes/ --model ./segformer --epochs 20 --batch 8 --lr 6e-5"
    pretrained, pretrained_megabytes = "nvidia/segformer-b0-finetuned-ade-512-512", 15
    auto_class = "AutoModelForSemanticSegmentation"
    predicted = ("image", "classes")
    arguments = SemanticSegmentationArguments
    defaults = {**VISION_DEFAULTS, "learning_rate": 6e-5, "per_device_train_batch_size": 8}
    demo = {
        **{"epochs": 16, "batch": 4, "lr": 3e-3, "lr_scheduler_type": "cosine", "warmup_steps": 0.2},
        **{"weight_decay": 0.2, "ema": 0.99, "augmentation": "none", "class_weights": ["0.2", *["1"] * 10]},
        "threads": 1,
    }
    demo_note = "which pixels of a photo belong to which digit: mean IoU 0.71 (most common class 0.08), 125 s"
    not_inputs = ("position", "num_items", "full_size", "full_mask")
    sheet_columns = 4
    sheet_size = 320

    def demo_files(self, variant: str | None = None, source: str | Path | None = None) -> DemoFiles:
        from loopwright.demos.images.image_files import mask_folders

        return mask_folders(num_train=800)

    def baselines(self, job: Job) -> Mapping[str, Mapping[str, float]]:
        learnt, scored = (_pixels_by_class(job.args, job.data, split) for split in ("train", "validation"))
        if not sum(scored):
            return {}
        majority = max(range(len(learnt)), key=learnt.__getitem__)

        def batches() -> Iterator[dict[str, Any]]:
            for counts in _counts_by_image(job.args, job.data, "validation"):
                pixels = np.repeat(np.arange(len(counts)), counts)
                yield {"predictions": [np.full_like(pixels, majority)], "references": [pixels]}

        return {"majority": score_rows(partial(_create_metric, job), batches())}

    def train_transform(self, job: Job) -> Transform:
        from loopwright.data.images import segmentation_train

        form, args = self.form(job), job.args
        return segmentation_train((form.height, form.width), args.augmentation, args.flip, args.ignore_index)

    def eval_transform(self, job: Job) -> Transform:
        from loopwright.data.images import segmentation_eval

        form = self.form(job)
        return segmentation_eval((form.height, form.width))

    def load_scene(self, job: Job, is_labelled: bool) -> Callable[[Mapping[str, Any]], Scene]:
        return _reader(job) if is_labelled else super().load_scene(job, is_labelled)

    def to_features(self, job: Job, is_labelled: bool) -> Features:
        features = super().to_features(job, is_labelled)
        if not is_labelled:
            return features
        args = job.args
        return partial(_mask_features, features, args.ignore_index, "dice" in args.loss, numbers_of(args.class_weights))

    def kept_at_full_size(self) -> Callable[[Scene], dict[str, Any]]:
        return _full_mask

    def build(self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin) -> Job:
        from loopwright.models import SmallModel

        if not origin.is_run:
            args.mask_values = list(data.plan.images.get("mask_values", ()))
            args.class_weights = _settle_weights(args, data)
        weights = numbers_of(args.class_weights)
        small_loss = _SMALL_LOSS if args.loss in (None, MODEL_LOSS) else args.loss
        ignored = args.ignore_index
        small = {"loss": small_loss, "ignore_index": ignored, "class_weights": weights}
        own: dict[str, Any] = dict.fromkeys(("semantic_loss_ignore_index", "loss_ignore_index"), ignored)
        own |= {"small_config": lambda side: small, "criterion": partial(_cross_entropy, ignored)}
        job = self.load_job(data, args, training, origin, small="u_net", **own)
        if isinstance(job.model, SmallModel):
            args.loss = small_loss
        elif args.loss is None:
            args.loss = "ce" if weights else MODEL_LOSS
        if args.class_weights and args.loss in (MODEL_LOSS, "dice"):
            what = f"--loss {args.loss} does not use --class_weights"
            raise InputError("args.value", what, fix="--loss ce   or   leave out --class_weights")
        return job

    def compute_loss(self, job: Job, model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        import torch

        from loopwright.models import create_loss

        args, inputs = job.args, self.inputs_for(job, batch)
        if args.loss == MODEL_LOSS:
            # A mean over no pixels is NaN. Such a batch has zero weight, so any labels will do.
            has_items = batch["num_items"].sum() > 0
            inputs["labels"] = torch.where(has_items, inputs["labels"], 0)
            outputs = model(**inputs)
            return outputs.loss, outputs
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = create_loss(args.loss, args.ignore_index, numbers_of(args.class_weights))
        return loss(enlarged(outputs.logits, labels.shape[-2:]), labels).loss, outputs

    def create_scorer(self, job: Job) -> Scorer:
        directions = {"mean_iou": True, "mean_accuracy": True, "overall_accuracy": True}
        scorer = MetricScorer(lambda: _create_metric(job), directions, drops_columns=True)
        return JointScorer([LossInterval("image_loss", "num_items"), scorer])

    def score_batch(self, job: Job, batch: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
        """The "loss" is 1 - IoU; "image_loss" is the training loss, and "num_items" the image's weight in it."""
        references = batch["full_mask"] if "full_mask" in batch else batch["labels"].cpu().numpy()
        lists = [each.tolist() for each in (batch["position"], _image_losses(job, batch, outputs), batch["num_items"])]
        samples = []
        for position, loss, num_items, scores, reference in zip(*lists, outputs.logits, references, strict=True):
            prediction = class_map(scores, reference.shape)
            pixels = count_pairs(reference, prediction, job.args.ignore_index)
            sample = {"position": position, "prediction": prediction, "reference": reference, "pixels": pixels}
            sample |= {"image_loss": loss, "num_items": num_items}
            iou = image_iou(pixels)
            samples.append(sample if iou is None else {**sample, "iou": iou, "loss": 1 - iou})
        return samples

    def readable(self, job: Job, sample: Mapping[str, Any], row: Mapping[str, Any] | None) -> dict[str, Any]:
        names = job.label_names
        pixels: dict[str, dict[str, int]] = {}
        for true, predicted, count in sample["pixels"]:
            pixels.setdefault(names[true], {})[names[predicted]] = count
        return {**sample, "pixels": pixels}

    def predict_batch(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        names = job.label_names
        logits = model(**self.inputs_for(job, batch)).logits
        found = []
        for scores, size in zip(logits, batch["full_size"], strict=True):
            prediction = class_map(scores, size)
            counts = np.bincount(prediction.ravel(), minlength=len(names))
            shares = {
                names[number]: round(float(counts[number]) / prediction.size, 6) for number in np.argsort(-counts)
            }
            found.append({"classes": {name: share for name, share in shares.items() if share}, "_map": prediction})
        return found

    def predict_rows(self, job: Job, rows: Rows) -> Iterator[dict[str, Any]]:
        for shown in super().predict_rows(job, rows):
            if "overlay" in shown:
                shown["mask"] = str(_mask_beside(Path(shown["overlay"])))
            yield shown

    def draw(self, job: Job, row: Mapping[str, Any], prediction: Mapping[str, Any]) -> tuple[Any, str]:
        from loopwright.data.images import decode_image
        from loopwright.data.pictures import drawable_names

        image = np.asarray(decode_image(row["image"]))
        names = dict(zip(job.label_names, drawable_names(job.label_names), strict=True))
        shares = [(names[name], share) for name, share in prediction["classes"].items() if name != _BACKGROUND]
        caption = ", ".join(f"{name} {100 * share:.3g} %" for name, share in shares[:_NUM_NAMED]) or "nothing"
        painted = _painted(job, image, prediction["_map"])
        if row.get("mask") is None:
            return painted, caption
        truth = _reader(job)(row).semantic
        assert truth is not None, "the reader has made sure"
        iou = image_iou(count_pairs(truth, prediction["_map"], job.args.ignore_index))
        gap = np.full((image.shape[0], max(2, image.shape[1] // 32), 3), 255, np.uint8)
        both = np.concatenate([np.asarray(_painted(job, image, truth)), gap, np.asarray(painted)], axis=1)
        return both, caption if iou is None else f"IoU {iou:.2f}: {caption}"

    def draw_sample(self, job: Job, batch: Mapping[str, Any], index: int) -> tuple[Any, str]:
        picture, _ = super().draw_sample(job, batch, index)
        return _painted(job, picture, batch["labels"][index].cpu().numpy()), ""

    def save_overlay(self, job: Job, row: Mapping[str, Any], prediction: Mapping[str, Any], path: Path) -> None:
        super().save_overlay(job, row, prediction, path)
        mask = _mask_beside(path)
        mask.parent.mkdir(exist_ok=True)
        values = read_values(tuple(job.args.mask_values))
        numbers = prediction["_map"].astype(np.int32) + int(job.args.reduce_labels)
        numbers = numbers if values is None else np.array(values.numbers, np.int32)[numbers]
        write_atomically(mask, mask_file(numbers, are_colors=values is not None and values.are_colors))

    def illustrate(self, job: Job, run: RunFolder, worst: Sequence[Mapping[str, Any]]) -> list[Path]:
        from loopwright.tasks.vision.pictures import write_confusion

        written = super().illustrate(job, run, worst)
        names = list(job.label_names)
        matrix = confusion(run.evaluation / "predictions.jsonl", names)
        written.append(run.evaluation / "classes.json")
        metric = _create_metric(job)
        metric.load_state_dict({"num_samples": 1, "totals": matrix.tolist()})
        write_json(written[-1], metric.table())
        return [*written, *write_confusion(run, names, matrix.tolist())]


@dataclass(frozen=True)
class MaskReader:
    """Makes a scene of a row with an image and a mask; used in loader workers."""

    num_classes: int
    reduce_labels: bool  # 0 in masks is not a class, other numbers are one too high
    ignore_index: int
    mask_values: tuple[str, ...] = ()

    def __call__(self, row: Mapping[str, Any]) -> Scene:
        from loopwright.data.images import load_scene

        values = self.mask_values
        scene = load_scene(row, reduce_labels=self.reduce_labels, ignore_index=self.ignore_index, mask_values=values)
        assert scene.semantic is not None, "the row has a mask"
        is_wrong = ((scene.semantic < 0) | (scene.semantic >= self.num_classes)) & (scene.semantic != self.ignore_index)
        if is_wrong.any():
            named = row["mask"] if isinstance(row["mask"], str) else "of an image"
            number = int(scene.semantic[is_wrong][0]) + int(self.reduce_labels)
            raise DataError(
                f"the mask {named} has the class {number}, but only {self.num_classes} classes are known, and "
                f"{self.ignore_index} is ignored. Fix the mask, or name the class in id2label.json."
            )
        return scene


def _mask_features(
    features: Features,
    ignore_index: int,
    is_of_images: bool,  # the loss is a mean over images, not over pixels
    weights: tuple[float, ...] | None,  # of the pixels, by class
    scene: Scene,
    row: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the tensors of a scene, with its weight in the mean loss as "num_items"; called in loader workers."""
    assert scene.semantic is not None, "the row has a mask"
    classes = scene.semantic[scene.semantic != ignore_index]
    if is_of_images:
        num_items = float(classes.size > 0)
    else:
        num_items = float(classes.size if weights is None else np.take(weights, classes).sum())
    return {**features(scene, row), "num_items": num_items}


def _full_mask(scene: Scene) -> dict[str, ClassMap]:
    """Return the mask of a scene, if it has one; as bytes if they fit: batches of whole masks are large."""
    classes = scene.semantic
    if classes is None:
        return {}
    are_bytes = classes.size and classes.min() >= 0 and classes.max() < 256
    return {"full_mask": classes.astype(np.uint8) if are_bytes else classes}


def _cross_entropy(ignore_index: int, logits: Any, labels: Any) -> Any:
    """Return the loss for a module that has none of its own."""
    from loopwright.models import create_loss

    return create_loss("ce", ignore_index)(enlarged(logits, labels.shape[-2:]), labels).loss


def _image_losses(job: Job, batch: Mapping[str, Any], outputs: Any) -> Any:
    """Return the loss of each image; the model's own loss is taken as a mean over its pixels."""
    from loopwright.models import sample_losses

    args, labels = job.args, batch["labels"]
    name = "ce" if args.loss == MODEL_LOSS else args.loss
    scores = enlarged(outputs.logits, labels.shape[-2:])
    return sample_losses(name, scores, labels, args.ignore_index, numbers_of(args.class_weights)).loss


def enlarged(logits: Any, size: Sequence[int]) -> Any:
    from torch.nn import functional

    if tuple(logits.shape[-2:]) == tuple(size):
        return logits
    return functional.interpolate(logits.float(), size=tuple(size), mode="bilinear", align_corners=False)


def class_map(logits: Any, size: Sequence[int]) -> ClassMap:
    import torch

    classes = enlarged(logits[None], size)[0].argmax(dim=0)
    return np.asarray(classes.to(torch.uint8 if logits.shape[0] <= 256 else torch.int32).cpu().numpy())


def count_pairs(reference: ClassMap, prediction: ClassMap, ignore_index: int) -> Pairs:
    """Count the pixels of an image for each pair of a true and a predicted class that occurs."""
    is_counted = reference != ignore_index
    true, predicted = reference[is_counted].astype(np.int64), prediction[is_counted].astype(np.int64)
    width = int(max(true.max(initial=0), predicted.max(initial=0))) + 1
    keys, counts = np.unique(true * width + predicted, return_counts=True)
    return [(key // width, key % width, count) for key, count in zip(keys.tolist(), counts.tolist(), strict=True)]


def image_iou(pairs: Pairs) -> float | None:
    """Return the mean IoU of the true or predicted classes of an image; None if all pixels are ignored."""
    sizes: Counter[int] = Counter()
    right: Counter[int] = Counter()
    for true, predicted, count in pairs:
        sizes.update(dict.fromkeys({true, predicted}, count))
        if true == predicted:
            right[true] = count
    return sum(right[number] / size for number, size in sizes.items()) / len(sizes) if sizes else None


def confusion(predictions: Path, names: Sequence[str]) -> NDArray[np.int64]:
    """Return the confusion matrix of a predictions file: a row per true class, a column per predicted one."""
    numbers = {name: number for number, name in enumerate(names)}
    matrix = np.zeros((len(names), len(names)), dtype=np.int64)
    for sample in read_json_lines(predictions):
        for true, row in sample["pixels"].items():
            for predicted, count in row.items():
                matrix[numbers[true], numbers[predicted]] += count
    return matrix


def _create_metric(job: Job) -> Any:
    return load_metric("mean_iou", labels=list(job.label_names), ignore_index=job.args.ignore_index)


def _settle_weights(args: Any, data: RunData) -> list[str]:
    """Return the class weights; balanced ones are proportional to 1 / sqrt(share of the training pixels), mean 1."""
    names, given = data.plan.label_names, list(args.class_weights)
    if given == [BALANCED]:
        with data.limited(train=args.max_train_samples):
            roots = [math.sqrt(number) for number in _pixels_by_class(args, data, "train")]
        raw = [1 / root if root else 0.0 for root in roots] if any(roots) else [1.0] * len(roots)
        return [f"{weight * len(raw) / sum(raw):.6g}" for weight in raw]
    return weights_by_class(given, names) if given else given


def _pixels_by_class(args: Any, data: RunData, split: str) -> list[int]:
    if data.num_used(split) == len(data.plan.splits[split]):
        return [data.plan.counts[split].get(name, 0) for name in data.plan.label_names]
    return [sum(each) for each in zip(*_counts_by_image(args, data, split), strict=True)]


def _counts_by_image(args: Any, data: RunData, split: str) -> Iterator[Sequence[int]]:
    from loopwright.data.images import decode_mask

    for row in data.each_row(split):
        ids = decode_mask(row["mask"], args.mask_values, args.ignore_index)
        yield count_classes(ids, len(data.plan.label_names), args.ignore_index, args.reduce_labels)


def mask_file(classes: ClassMap, are_colors: bool = False) -> bytes:
    from loopwright.data.pictures import palette
    from loopwright.data.vision_extra import pillow

    if are_colors:
        image = pillow().fromarray(np.stack([classes >> 16, classes >> 8 & 255, classes & 255], 2).astype(np.uint8))
    elif classes.max(initial=0) < 256:
        image = pillow().fromarray(classes.astype(np.uint8))
        image.putpalette(np.resize(palette(), (256, 3)).ravel().tolist())
    else:
        image = pillow().fromarray(classes.astype(np.uint16))
    content = io.BytesIO()
    image.save(content, "PNG", optimize=True)
    return content.getvalue()


def _reader(job: Job) -> MaskReader:
    args = job.args
    return MaskReader(len(job.label_names), args.reduce_labels, args.ignore_index, tuple(args.mask_values))


def _mask_beside(overlay: Path) -> Path:
    return overlay.parent / _MASKS / overlay.name


def _painted(job: Job, image: Any, classes: ClassMap) -> Any:
    from loopwright.data.pictures import draw_semantic

    names = job.label_names
    unpainted = {job.args.ignore_index, *(number for number, name in enumerate(names) if name == _BACKGROUND)}
    return draw_semantic(image, classes, unpainted=unpainted)
