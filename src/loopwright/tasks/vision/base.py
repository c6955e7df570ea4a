"""Shared code of the image tasks: flags, image loading, datasets, pictures. `VisionTask` is their base class.

A task module adds its own `build` (with `models.load_vision_model`), transforms (`train_transform`,
`eval_transform`), features if `SceneFeatures` are not enough, scoring, `predict_batch`, and `draw`, a picture of one
prediction. torch, Pillow and transformers are imported inside the functions that need them.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from loopwright.errors import DataError, InputError
from loopwright.run_folder import RunFolder
from loopwright.sources import DataPlan, Role
from loopwright.sources.images.folders import list_images
from loopwright.sources.images.image_file import IMAGE_ENDINGS, UNREAD_ENDINGS
from loopwright.tasks.arguments import ShortName, TaskArguments, TaskTrainingArguments, flag
from loopwright.tasks.base import COMMON_DEFAULTS, Job, Origin, Rows, Task
from loopwright.tasks.class_options import weighed
from loopwright.tasks.data import RunData
from loopwright.tasks.optional_imports import import_object, is_object_name

if TYPE_CHECKING:
    from loopwright.data.images import Scene, Transform
    from loopwright.demos import DemoData, DemoFiles
    from loopwright.tasks.vision.models import ImageForm

_logger = logging.getLogger("loopwright")
IMAGE = Role(
    "image",
    "image",
    names=("image", "image_path", "file_name", "filename", "img", "path", "file", "image_file", "pixel_values"),
)
IMAGE_ID = Role("image_id", names=("image_id",), is_required=False, is_input=False, may_be_empty=True)
Features = Callable[[Any, Mapping[str, Any]], dict[str, Any]]
"""From a scene and its row to the features of a sample."""
BAD_ANNOTATIONS = "What to do with annotations that do not match their images, or have an invalid format."
STRENGTHS = ("none", "light", "standard", "strong")
HANDED_OVER = "python:"
"""Prefix of `model` in config.yaml for a module passed in Python."""
VISION_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {**COMMON_DEFAULTS, "per_device_train_batch_size": 32, "warmup_steps": 0.05}
)
# Smaller images are decoded faster than a worker process can transfer them.
_LEAST_SIDE_FOR_WORKERS = 128
_MOST_WORKERS = 8
_MOST_WARMED = 20_000  # images that are decoded before the first update: some seconds


@dataclass
class VisionArguments(TaskArguments):
    image_column: str | None = flag(None, "Column of the images, if the data is a table.")
    image_dir: str | None = flag(None, "Folder that the paths in a data file are relative to; the file's if unset.")
    bad_images: str = flag("refuse", "What to do with missing or damaged images.", choices=("refuse", "drop"))
    image_size: int | None = flag(
        None, "Height and width of the model's input; depends on the model and the data if unset.", at_least=1
    )
    augmentation: str = flag("standard", "Strength of the augmentation of training images.", choices=STRENGTHS)
    flip: bool = flag(True, "Mirror training images; switch it off if left and right matter, as in digits.")
    augment_with: str | None = flag(
        None, "package.module:function that augments training images instead: of (scene, rng), or of an image."
    )
    workers: int | None = flag(
        None, "Processes that decode images; depends on the images and the cores if unset.", at_least=0
    )
    cache: str = flag(
        "auto",
        "Decode each image once and keep its pixels: in memory, on disk in TMPDIR, or neither; auto takes what fits.",
        choices=("auto", "ram", "disk", "off"),
    )
    augment_on: str = flag(
        "auto",
        "Where training images are augmented: in loader workers, or in batches on the device; auto: there on a GPU.",
        choices=("auto", "cpu", "device"),
    )
    channels_last: bool | None = flag(None, "Use the channels-last memory format; on a GPU if unset.")
    ema: float | None = flag(
        None, "Evaluate and keep a moving average of the weights with this decay, such as 0.999.", above=0, below=1
    )
    backbone_lr_factor: float = flag(
        1.0, "Learning rate below the head, as a fraction of the head's; --freeze backbone for 0.", above=0
    )
    overlays: str | None = flag(None, "predict: a folder to draw the predictions into, an image each.")

    train_dir = ShortName("train_file", str)
    validation_dir = ShortName("validation_file", str)


class VisionTask(Task):
    auto_class: ClassVar[str]  # of transformers
    arguments = VisionArguments
    defaults = VISION_DEFAULTS
    needs = {"PIL": "vision"}
    prediction_flags: ClassVar[tuple[str, ...]] = ("overlays",)
    repeated = ("image", "image_id")
    takes_modules = True
    augmented_by: ClassVar[str | None] = None  # the function of `loopwright.data.images` for `train_transform`, if any
    has_plain_scenes = False  # a scene is an image without boxes and masks
    sheet_columns = 6  # pictures side by side on samples/predictions.png
    sheet_size = 160  # the longer side of a picture there

    def find_model(self, name: str) -> str:
        if name.startswith(HANDED_OVER):
            raise handed_over(name)
        return name if is_object_name(name) else super().find_model(name)

    def check_model(self, name: str) -> None:
        if is_object_name(name):
            return  # `build` imports it
        from loopwright.tasks.vision.models import is_ours

        if not is_ours(name):
            super().check_model(name)

    def is_input(self, path: str) -> bool:
        return Path(path).suffix.lower() in (*IMAGE_ENDINGS, *UNREAD_ENDINGS)

    def rows_of_texts(self, plan: DataPlan, texts: Sequence[str]) -> list[dict[str, Any]]:
        return [{"image": path} for text in texts for path in self._images_at(text)]

    def _images_at(self, text: str) -> list[str]:
        """Return an image, which need not exist, or all images of a folder, even those in unsupported formats."""
        path = Path(text).expanduser()
        if not text.strip() or path.is_file() or self.is_input(text) and not path.is_dir():
            return [str(path.absolute()) if text.strip() else ""]
        if not path.is_dir():
            what, fix = f"{text} does not exist", "give the path of an image or of a folder of them"
            raise InputError("data.file", what, fix=fix)
        files = [file for file in path.rglob("[!.]*") if file.is_file() and "__MACOSX" not in file.parts]
        unread = [str(file.relative_to(path)) for file in files if file.suffix.lower() in UNREAD_ENDINGS]
        found = sorted([*list_images(path)[0], *unread])
        if not found:
            what, saw = f"{text} contains no images", [f"looked for {', '.join(IMAGE_ENDINGS)}"]
            raise InputError("data.folder", what, saw=saw, fix="give a folder with images")
        if num_ignored := sum(not self.is_input(file.name) for file in files):
            _logger.warning("files of %s that are not images, and are ignored: %d", text, num_ignored)
        return [str((path / name).absolute()) for name in found]

    def demo_data(self) -> DemoData:
        raise DataError(f"the demo of {self.name} is made of images, not of rows: write_demo writes them as files")

    def demo_files(self, variant: str | None = None, source: str | Path | None = None) -> DemoFiles:
        from loopwright.demos.images.image_files import class_folders

        return class_folders(variant, source)

    def describe_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        shown = {"image": row["image"]} if isinstance(row.get("image"), str) else {}
        return shown | ({"image_id": row["image_id"]} if row.get("image_id") else {})

    def form(self, job: Job) -> ImageForm:
        from loopwright.tasks.vision.models import form_of

        return form_of(job.processor)

    def load_job(
        self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin, **options: Any
    ) -> Job:
        """Return the job of the model of an origin; the options are those of `load_vision_model`."""
        from loopwright.data.images import collate_images
        from loopwright.tasks.vision.models import load_vision_model

        options["labels"] = None if data.plan.labels is None else data.plan.labels.names
        loaded = load_vision_model(origin, args, training, data.plan, auto_class=self.auto_class, **options)
        if args.augment_on == "auto":  # a run without the setting is of an earlier version
            is_possible = self.has_plain_scenes and training.device.type == "cuda" and not origin.is_run
            args.augment_on = "device" if is_possible else "cpu"
        return Job(self, data, args, training, loaded.model, loaded.processor, collate_images, [], loaded.new)

    def train_transform(self, job: Job) -> Transform:
        """Return the training transform, at the strength of `--augmentation`, unless that is none; override it."""
        from loopwright.data import images

        if self.augmented_by is None:
            return self.eval_transform(job)
        form, create = self.form(job), getattr(images, self.augmented_by)
        found: Transform = create((form.height, form.width), job.args.augmentation, job.args.flip)
        return found

    def eval_transform(self, job: Job) -> Transform:
        return self.form(job).eval_transform()

    def load_scene(self, job: Job, is_labelled: bool) -> Callable[[Mapping[str, Any]], Scene]:
        """Return a picklable function from a row to a scene; without labels it reads only the image."""
        from loopwright.data.images import load_scene

        return load_scene if is_labelled else load_image

    def to_features(self, job: Job, is_labelled: bool) -> Features:
        """Return a picklable function from a transformed scene and its row to features."""
        from loopwright.data.images import SceneFeatures

        form = self.form(job)
        features = SceneFeatures(form.mean, form.std)
        return features if is_labelled else ImageFeatures(features)

    def create_dataset(self, job: Job, rows: Rows, *, is_labelled: bool, is_training: bool = False) -> Any:
        from loopwright.data.images import Compose, ImageDataset, as_transform

        transform = self.eval_transform(job)
        if is_training and job.args.augment_with is not None:
            own = as_transform(import_object(job.args.augment_with, "augment_with", job.args))
            transform = Compose([own, transform])
        elif is_training and self._augments(job):
            transform = self.train_transform(job)
        features = self.to_features(job, is_labelled)
        if self.weighs_classes:
            features = weighed(job, features, is_training)
        keep = None if is_training else self.kept_at_full_size()
        if keep is not None:
            features, transform = partial(_full_size_features, transform, features, keep), as_transform(None)
        dataset = ImageDataset(rows, self.load_scene(job, is_labelled), transform, features)
        if is_training and job.args.augment_on == "device" and self._augments(job):
            with_objects = "boxes and masks move with their images there"
            reason = dataset.augment_on_device() if self.has_plain_scenes else with_objects
            where = "in batches on the device" if reason is None else f"on the CPU: {reason}"
            job.notes.append(f"training images are augmented {where} (--augment_on device)")
        return dataset

    def _augments(self, job: Job) -> bool:
        return bool(job.args.augment_with is not None or job.args.augmentation != "none")

    def cache_samples(self, job: Job) -> str:
        """Let the datasets of a run keep decoded images, as `--cache` asks; return the choice and the reason."""
        from loopwright.data.images import CacheChoice, PixelCache, choose_cache, fixed_part

        datasets = [getattr(dataset, "images", dataset) for dataset in (job.train_dataset, job.eval_dataset)]
        parts = [fixed_part(dataset.transform) if self.has_plain_scenes else None for dataset in datasets]
        sides = job.plan.images["sizes"].values()
        decoded, form = 3 * math.prod(side["p50"] for side in sides), self.form(job)
        sizes = [3 * form.height * form.width if part and part.transforms else decoded for part in parts]
        num_bytes = sum(len(dataset) * each for dataset, each in zip(datasets, sizes, strict=True))
        choice = choose_cache(job.args.cache, num_bytes)
        caches: list[PixelCache] = []
        try:
            for dataset, each in zip(datasets, sizes, strict=True) if choice.kind != "off" else ():
                limit = choice.limit * len(dataset) * each // num_bytes
                caches.append(PixelCache(len(dataset), choice._replace(limit=limit)))
        except OSError as error:
            choice = CacheChoice("off", f"images are decoded each time: {error.strerror} (--cache {choice.kind})")
        for dataset, part, cache in zip(datasets, parts, caches, strict=True) if choice.kind != "off" else ():
            dataset.keep(cache, part)
            dataset.sends_bytes = self.sends_bytes(job)
        is_small = len(datasets[0]) <= _MOST_WARMED and not job.args.workers
        if is_small and choice.kind != "off" and job.training.device.type == "cuda":
            datasets[0].warm()  # a GPU would wait for every image of the first epoch
        return choice.reason

    def kept_at_full_size(self) -> Callable[[Scene], dict[str, Any]] | None:
        """Return a function from a scene to features to keep, if a task evaluates at the size of the files."""
        return None

    def inputs_for(self, job: Job, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return `model_inputs` in the form this model expects; use it wherever the model is called."""
        from loopwright.tasks.vision.models import forward_options

        inputs = {**self.model_inputs(batch), **forward_options(job.model, self.form(job))}
        inputs["pixel_values"] = self._normalized(job, inputs["pixel_values"])
        if job.args.channels_last:
            import torch

            inputs["pixel_values"] = inputs["pixel_values"].contiguous(memory_format=torch.channels_last)
        return inputs

    def _normalized(self, job: Job, pixels: Any) -> Any:
        """Convert a batch of bytes, on the device where they are; anything else is unchanged."""
        import torch

        from loopwright.data.images import from_bytes

        form = self.form(job)
        return from_bytes(pixels, form.mean, form.std) if pixels.dtype == torch.uint8 else pixels

    def sends_bytes(self, job: Job) -> bool:
        """Whether workers send images as bytes, a quarter of their size as floats, to be converted on the device."""
        return self.has_plain_scenes and bool(job.training.device.type == "cuda")

    def compute_loss(self, job: Job, model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        outputs = model(**self.inputs_for(job, batch))
        return outputs.loss, outputs

    def parameter_groups(self, job: Job) -> list[dict[str, Any]]:
        from loopwright.tasks.vision.models import backbone_groups

        groups = super().parameter_groups(job)
        factor = job.args.backbone_lr_factor
        return groups if factor == 1 else backbone_groups(job.model, groups, job.training.learning_rate, factor)

    def callbacks(self, job: Job, run: RunFolder) -> list[Any]:
        from loopwright.tasks.text.callbacks import FirstBatch
        from loopwright.tasks.vision.pictures import write_batch
        from loopwright.tasks.weight_average import AverageWeights

        averages = [] if job.args.ema is None else [AverageWeights(job.args.ema)]
        return [*averages, FirstBatch(job, run.path / "samples" / "train_batch0.png", partial(write_batch, self, job))]

    def save(self, job: Job, folder: Path) -> None:
        from loopwright.tasks.vision.models import save_model

        save_model(job.model, folder)
        job.processor.save_pretrained(folder)

    def save_skeleton(self, job: Job, folder: Path) -> None:
        from loopwright.tasks.vision.models import save_config

        save_config(job.model, folder)
        job.processor.save_pretrained(folder)

    def predict_rows(self, job: Job, rows: Rows) -> Iterator[dict[str, Any]]:
        folder = None if job.args.overlays is None else Path(job.args.overlays)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        taken: set[str] = set()
        for index, prediction in enumerate(super().predict_rows(job, rows)):
            row = rows[index]
            shown = self.describe_row(row)
            shown |= {name: value for name, value in prediction.items() if not name.startswith("_")}
            if folder is not None and "error" not in prediction:
                path = folder / f"{_name_of(row, index, taken)}.png"
                self.save_overlay(job, row, prediction, path)
                shown["overlay"] = str(path)
            yield shown

    def save_overlay(self, job: Job, row: Mapping[str, Any], prediction: Mapping[str, Any], path: Path) -> None:
        from loopwright.data.pictures import encode, sheet
        from loopwright.run_folder import write_atomically

        picture, caption = self.draw(job, row, prediction)
        write_atomically(path, encode(sheet([picture], [caption], size=max(224, *picture.size))))

    def draw(self, job: Job, row: Mapping[str, Any], prediction: Mapping[str, Any]) -> tuple[Any, str]:
        """Return a picture of a prediction, beside the truth if the row has it, and a caption; override it."""
        from loopwright.data.images import decode_image

        return decode_image(row["image"]), ""

    def draw_sample(self, job: Job, batch: Mapping[str, Any], index: int) -> tuple[Any, str]:
        """Return a picture of one sample of a training batch, as the model sees it, and a caption; override it."""
        from loopwright.data.images import denormalize

        form = self.form(job)
        pixels = self._normalized(job, batch["pixel_values"][index : index + 1])
        return denormalize(pixels[0], form.mean, form.std), ""

    def illustrate(self, job: Job, run: RunFolder, worst: Sequence[Mapping[str, Any]]) -> list[Path]:
        from loopwright.tasks.vision.pictures import write_prediction_sheets

        return write_prediction_sheets(self, job, run, worst)


@dataclass(frozen=True)
class ImageFeatures:
    features: Callable[[Any, Mapping[str, Any]], dict[str, Any]]

    @property
    def pixels(self) -> Any:
        return self.features.pixels  # type: ignore[attr-defined]

    def __call__(self, scene: Any, row: Mapping[str, Any]) -> dict[str, Any]:
        return self.features(scene, {})


def _full_size_features(
    transform: Transform,
    features: Features,
    keep: Callable[[Scene], dict[str, Any]],
    scene: Scene,
    row: Mapping[str, Any],
) -> dict[str, Any]:
    """Return features of a scene at the model's input size, and its original size and annotations."""
    found = features(transform(scene, np.random.default_rng(0)), row)
    return {**found, "full_size": scene.size, **keep(scene)}


def load_image(row: Mapping[str, Any]) -> Scene:
    from loopwright.data.images import load_scene

    return load_scene({"image": row["image"]})


def choose_workers(args: Any, training: Any, plan: DataPlan) -> None:
    if args.workers is None:
        args.workers = training.dataloader_num_workers
        if args.workers == 0 and image_side(plan) >= _LEAST_SIDE_FOR_WORKERS:
            cores = (os.cpu_count() or 1) // max(1, int(os.environ.get("WORLD_SIZE", "1")))
            args.workers = min(_MOST_WORKERS, max(0, cores - 1))
    training.dataloader_num_workers = args.workers


def image_side(plan: DataPlan) -> int:
    """Return the shorter side of the typical image in the data."""
    return min((side["p50"] for side in plan.images["sizes"].values()), default=1)


def handed_over(name: str) -> InputError:
    """Return the error for a model that was passed as a module and is now needed again."""
    kind = name.removeprefix(HANDED_OVER)
    what = f"the run's model was passed as a Python module ({kind}), which no file can recreate"
    fix = "pass it again: loopwright.resume(run, model=module); the same for predict and evaluate"
    return InputError("model.folder", what, fix=fix)


def _name_of(row: Mapping[str, Any], index: int, taken: set[str]) -> str:
    image = row.get("image")
    stem = Path(image).stem if isinstance(image, str) else str(row.get("image_id") or f"{index:06}")
    name = stem.replace("/", "_")
    if name in taken:
        name = f"{name}_{index:06}"
    taken.add(name)
    return name
