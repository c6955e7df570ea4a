"""object-detection and instance-segmentation: the objects of an image, each with a class and a box or a mask.

A detector sees images fitted into a square. Its objects are mapped back to the image of the file before they are
scored, printed or drawn; `predicted_objects` does that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from loopwright.errors import InputError
from loopwright.metrics import load as load_metric
from loopwright.metrics.paired import rows_of
from loopwright.run_folder import RunFolder, write_json
from loopwright.sources import Role
from loopwright.tasks.arguments import TaskTrainingArguments, flag
from loopwright.tasks.base import Job, Origin
from loopwright.tasks.data import RunData
from loopwright.tasks.scoring import BaselineScores, JointScorer, LossInterval, MetricScorer, Scorer
from loopwright.tasks.vision import predicted_objects as results
from loopwright.tasks.vision.base import (
    BAD_ANNOTATIONS,
    IMAGE,
    IMAGE_ID,
    VISION_DEFAULTS,
    Features,
    VisionArguments,
    VisionTask,
)

if TYPE_CHECKING:
    from loopwright.data.images import Scene, Transform
    from loopwright.demos import DemoFiles

_LEAST_SCORE = 0.01  # of scored objects: average precision covers every threshold
_THRESHOLD, _SMALL_THRESHOLD = 0.5, 0.4  # the small net has lower peaks
_SIZES = ("small", "medium", "large")


@dataclass
class DetectionArguments(VisionArguments):
    objects_column: str | None = flag(None, "Column of the objects, if the data is a table.")
    bad_annotations: str = flag("refuse", BAD_ANNOTATIONS, choices=("refuse", "drop"))
    threshold: float | None = flag(
        None,
        "Lowest score to print and draw an object; 0.5, or 0.4 for the small net, if unset.",
        at_least=0,
        at_most=1,
    )
    max_detections: int = flag(100, "Maximum number of objects of an image.", at_least=1)


class DetectionTask(VisionTask):
    has_masks: ClassVar[bool] = False
    predicted = ("image", "objects")
    arguments = DetectionArguments
    defaults = {**VISION_DEFAULTS, "learning_rate": 5e-5, "per_device_train_batch_size": 8}
    needs = {"PIL": "vision", "scipy": "vision", "faster_coco_eval": "vision"}
    prediction_flags = ("overlays", "threshold", "max_detections")
    # There is no "pixel_mask": boxes are fractions of the square, and with a mask the DETR family would read them as
    # fractions of the image inside it.
    not_inputs = ("position", "reference", "full_size", "matrix")
    demo: ClassVar[Mapping[str, Any]] = {
        **{"augmentation": "light", "flip": False, "epochs": 10, "batch": 8, "lr": 3e-3, "weight_decay": 0.01},
        **{"warmup_steps": 0.2, "lr_scheduler_type": "cosine", "threads": 1},
        "max_detections": 20,  # a scene has at most four digits, and every detection costs scoring time
    }
    sheet_columns = 3
    sheet_size = 576

    def demo_files(self, variant: str | None = None, source: str | Path | None = None) -> DemoFiles:
        from loopwright.demos.images.image_files import coco_files

        return coco_files(num_train=1000, has_masks=self.has_masks)

    def baselines(self, job: Job) -> Mapping[str, Mapping[str, float]]:
        names, rows = list(self._directions())[:3], rows_of([0.0] * len(job.eval_dataset))
        return {"nothing": BaselineScores(dict.fromkeys(names, 0.0), dict.fromkeys(names, rows))}

    def train_transform(self, job: Job) -> Transform:
        from loopwright.data.images import Compose, detection_train

        moved = detection_train(self.form(job).height, job.args.augmentation, job.args.flip)
        return Compose([*squeezing(job.processor), *moved.transforms])

    def eval_transform(self, job: Job) -> Transform:
        """Return the whole image fitted into a square, or squeezed into it if the model's processor does that."""
        from loopwright.data.images import Compose, detection_eval

        return Compose([*squeezing(job.processor), *detection_eval(self.form(job).height).transforms])

    def load_scene(self, job: Job, is_labelled: bool) -> Callable[[Mapping[str, Any]], Scene]:
        from loopwright.data.images import load_scene

        return partial(load_scene, with_masks=self.has_masks) if is_labelled else super().load_scene(job, is_labelled)

    def to_features(self, job: Job, is_labelled: bool) -> Features:
        form = self.form(job)
        return partial(_object_features, form.mean, form.std, is_labelled, self.has_masks)

    def kept_at_full_size(self) -> Callable[[Scene], dict[str, Any]]:
        return results.reference_of

    def build(self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin) -> Job:
        from loopwright.models import SmallModel

        small = {"num_prototypes": 8 if self.has_masks else 0}
        job = self.load_job(data, args, training, origin, small="center_point", small_config=lambda side: small)
        job.processor = in_square(job.processor, args.image_size)
        check_detector(job.model, job.processor, self.has_masks)
        if args.threshold is None:
            args.threshold = _SMALL_THRESHOLD if isinstance(job.model, SmallModel) else _THRESHOLD
        return job

    def inputs_for(self, job: Job, batch: Mapping[str, Any]) -> dict[str, Any]:
        inputs = super().inputs_for(job, batch)
        if "labels" in inputs and "mask_labels" in forward_parameters(job.model):
            labels = inputs.pop("labels")
            inputs["mask_labels"] = [each["masks"] for each in labels]
            inputs["class_labels"] = [each["class_labels"] for each in labels]
        return inputs

    def _directions(self) -> dict[str, bool]:
        prefix = "mask_" if self.has_masks else ""
        names = [f"{prefix}{name}" for name in ("map", "map_50", "map_75", "mar_100")]
        return dict.fromkeys([*names, *(["map", "map_50"] if self.has_masks else [])], True)

    def create_scorer(self, job: Job) -> Scorer:
        scorer = DetectionScorer(lambda: self._metric(job), self._directions(), drops_columns=True)
        return JointScorer([LossInterval("image_loss"), scorer])

    def _metric(self, job: Job) -> Any:
        kinds = ("segm", "bbox") if self.has_masks else ("bbox",)
        return load_metric("coco_ap", iou_types=kinds, labels=list(job.label_names))

    def score_batch(self, job: Job, batch: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
        """The "loss" is 1 - F1, which ranks the worst; "image_loss" the training loss, if there is one per image."""
        samples: list[dict[str, Any]] = []
        found = self.found(job, outputs, batch, _LEAST_SCORE)
        references = batch.get("reference")
        if references is None:  # training data is scored as the model sees it
            size = tuple(batch["pixel_values"].shape[-2:])
            references = [results.seen_objects(labels, size) for labels in batch["labels"]]
        for position, prediction, reference in zip(batch["position"].tolist(), found, references, strict=True):
            shown = results.taken(prediction, prediction["scores"] >= job.args.threshold)
            counts = results.count_hits(shown, reference)
            f1 = results.f1_of(counts)
            sample = {"position": position, "prediction": prediction, "reference": reference}
            sample |= {"objects": results.plain(prediction), "truth": results.plain(reference), "counts": counts}
            samples.append({**sample, "f1": f1, "loss": 1 - f1})
        losses = getattr(outputs, "image_losses", None)
        for sample, loss in zip(samples, [] if losses is None else losses.tolist(), strict=False):
            sample["image_loss"] = loss
        return samples

    def readable(self, job: Job, sample: Mapping[str, Any], row: Mapping[str, Any] | None) -> dict[str, Any]:
        names = job.label_names
        shown = {**sample, "counts": {names[int(number)]: counts for number, counts in sample["counts"].items()}}
        return shown | {side: results.named(sample[side], names) for side in ("objects", "truth")}

    def found(self, job: Job, outputs: Any, batch: Mapping[str, Any], threshold: float) -> list[results.Found]:
        """Return the objects found in each image, in pixels of the file, or of the model's input in training."""
        size: tuple[int, int] = tuple(batch["pixel_values"].shape[-2:])
        raw = results.found_objects(job.model, job.processor, outputs, size, threshold, job.args.max_detections)
        if "full_size" not in batch:
            return [results.in_file(each, np.eye(3), size) for each in raw]
        matrices = batch["matrix"].cpu().numpy()
        return [
            results.in_file(each, matrix, (int(full_size[0]), int(full_size[1])))
            for each, matrix, full_size in zip(raw, matrices, batch["full_size"], strict=True)
        ]

    def predict_batch(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        outputs = model(**self.inputs_for(job, batch))
        return [
            {"objects": results.named(results.rounded(results.plain(found)), job.label_names), "_found": found}
            for found in self.found(job, outputs, batch, job.args.threshold)
        ]

    def draw(self, job: Job, row: Mapping[str, Any], prediction: Mapping[str, Any]) -> tuple[Any, str]:
        from loopwright.data.images import load_scene
        from loopwright.data.pictures import side_by_side
        from loopwright.tasks.vision.base import load_image

        scene = load_scene(row, with_masks=self.has_masks) if row.get("objects") is not None else load_image(row)
        found = prediction["_found"]
        names, caption = job.label_names, f"{len(found['boxes'])} found"
        if scene.boxes is None:
            return results.draw_objects(scene.image, found, names, found["scores"]), caption
        picture = results.draw_objects(scene.image, found, names, found["scores"], most=self.sheet_size // 2)
        single = scene if scene.crowd is None else scene.with_objects(~scene.crowd)
        truth = results.draw_objects(scene.image, vars(single), names, most=self.sheet_size // 2)
        return side_by_side(truth, picture), f"{caption}, {single.num_objects} there"

    def draw_sample(self, job: Job, batch: Mapping[str, Any], index: int) -> tuple[Any, str]:
        picture, _ = super().draw_sample(job, batch, index)
        seen = results.seen_objects(batch["labels"][index], picture.shape[:2])
        return results.draw_objects(picture, seen, job.label_names), ""

    def illustrate(self, job: Job, run: RunFolder, worst: Sequence[Mapping[str, Any]]) -> list[Path]:
        written = super().illustrate(job, run, worst)
        written.append(run.evaluation / "classes.json")
        table = results.class_table(run.evaluation / "predictions.jsonl", job.label_names, self._metric(job))
        write_json(written[-1], table)
        return written


class ObjectDetection(DetectionTask):
    name = "object-detection"
    summary = "the objects of an image, each with a class and a box"
    roles = (
        IMAGE,
        Role("objects", "objects", names=("objects", "annotations"), is_input=False, may_be_empty=True),
        IMAGE_ID,
    )
    explanation = {
        "data": "A folder with COCO's train.json and validation.json beside the images; YOLO's images and labels "
        'folders with data.yaml or classes.txt; json, jsonl or parquet with a column "objects" of {"bbox": [[left, '
        'top, width, height]], "category": [...]}; or a Hub id.',
        "boxes": "Boxes are clipped to their image. Those outside it or without an area are dropped and counted.",
        "models": "By default a small net that finds centres. Else a folder or Hub id of transformers (the DETR "
        "family), or package.module:function that returns a module with a loss and a decode method.",
        "metric": "COCO's average precision and recall, at the size of the images. eval/classes.json has the hits and "
        "misses of each class.",
        "predict": "lw predict RUN a.jpg b.png photos/ --threshold 0.5 --overlays drawn/",
    }
    example = "lw train object-detection --data scenes/ --model ./detr --epochs 20 --batch 8 --lr 5e-5"
    pretrained, pretrained_megabytes = "hustvl/yolos-tiny", 26
    scratch_updates = 1_000
    auto_class = "AutoModelForObjectDetection"
    demo_note = "digits on photos, found by a small net: mAP 0.65 (nothing found 0), 105 s"


class InstanceSegmentation(DetectionTask):
    name = "instance-segmentation"
    summary = "the objects of an image, each with a class and a mask"
    roles = (
        IMAGE,
        Role(
            "objects",
            "objects",
            names=("objects", "annotations", "annotation", "mask"),
            is_input=False,
            may_be_empty=True,
            has_outlines=True,
        ),
        IMAGE_ID,
    )
    explanation = {
        "data": "A folder with COCO's train.json and validation.json (polygons or run lengths) beside the images; "
        'YOLO\'s images and labels folders with polygons; json, jsonl or parquet with a column "objects" that has '
        '"segmentation", or "annotation" with class and object in two channels; or a Hub id.',
        "models": "By default a small net that finds centres and mixes masks. Else a folder or Hub id of transformers "
        "(Mask2Former, MaskFormer), or package.module:function that returns a module with a loss and a decode method.",
        "metric": "COCO's average precision and recall of masks, and of their boxes, at the size of the images. "
        "eval/classes.json has the hits and misses of each class.",
        "predict": "lw predict RUN a.jpg b.png photos/ --overlays drawn/ (masks as run lengths)",
    }
    example = "lw train instance-segmentation --data scenes/ --model ./mask2former --epochs 20 --lr 5e-5"
    pretrained, pretrained_megabytes = "facebook/mask2former-swin-tiny-coco-instance", 190
    scratch_updates = 1_000
    auto_class = "AutoModelForUniversalSegmentation"
    has_masks = True
    demo_note = "digits on photos, found and outlined by a small net: mask mAP 0.72 (nothing found 0), 140 s"


class DetectionScorer(MetricScorer):
    """Scores by average precision; a sample's boxes and masks are dropped once the metric has them."""

    def compute(self) -> dict[str, float]:
        first = next(iter(self.directions))
        shown = {*self.directions, *(f"{first}_{size}" for size in _SIZES)}
        return {name: value for name, value in super().compute().items() if name in shown}


def _object_features(
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    is_labelled: bool,
    has_masks: bool,
    scene: Scene,
    row: Mapping[str, Any],
) -> dict[str, Any]:
    """Return "pixel_values", "matrix" (from the file to the square), and "labels" in DETR's format; called in workers.

    Crowds are not targets.
    """
    import torch

    from loopwright.data.images import normalize, to_tensor

    features: dict[str, Any] = {
        "pixel_values": normalize(to_tensor(scene.image), mean, std),
        "matrix": torch.from_numpy(scene.matrix.copy()),
    }
    if not is_labelled:
        return features
    assert scene.boxes is not None and scene.classes is not None, "the row has objects"
    kept = scene.with_objects(~scene.crowd) if scene.crowd is not None else scene
    height, width = kept.size
    boxes = np.asarray(kept.boxes, dtype=np.float32).reshape(-1, 4)
    shares = np.concatenate([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], axis=1)
    shares = shares / np.array([width, height, width, height], dtype=np.float32)
    labels = {
        "class_labels": torch.from_numpy(np.array(kept.classes, dtype=np.int64)),
        "boxes": torch.from_numpy(shares.astype(np.float32)),
    }
    if has_masks:
        labels["masks"] = torch.from_numpy(np.array(kept.masks, dtype=np.float32).reshape(-1, height, width))
    return {**features, "labels": labels}


def forward_parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inspect.signature(inner.forward).parameters


def check_detector(model: Any, processor: Any, has_masks: bool) -> None:
    if results.decoder_of(model) is not None:
        return
    takes = forward_parameters(model)
    if has_masks and "mask_labels" in takes and "task_inputs" not in takes:
        return
    if not has_masks and hasattr(processor, "post_process_object_detection"):
        return
    inner = getattr(model, "module", model)
    kinds = "Mask2Former, MaskFormer and EoMT" if has_masks else "DETR and its family"
    parts = "boxes, scores, classes and masks" if has_masks else "boxes, scores and classes"
    what = f"{type(inner).__name__} has no known way to return the objects that it finds"
    fix = f"give a module a method decode(outputs, threshold, max_detections) that returns {parts} of each image"
    raise InputError("model.task", what, saw=[f"transformers models for this task: {kinds}"], fix=fix)


def in_square(processor: Any, side: int) -> Any:
    """Return a transformers processor set to the training format: images fitted into a square."""
    if not hasattr(processor, "to_dict"):
        return processor
    values = processor.to_dict()
    values["size"] = {name: side for name, length in dict(values["size"]).items() if length}
    return type(processor).from_dict(values)


def squeezing(processor: Any) -> list[Any]:
    """Return a resize to a square for a processor that squeezes images, like RT-DETR's; else nothing."""
    from loopwright.data.images import Resize

    size = dict(getattr(processor, "size", None) or {})
    is_squeezed = bool(size.get("height")) and not getattr(processor, "do_pad", False)
    return [Resize(exact=int(size["height"]))] if is_squeezed else []
