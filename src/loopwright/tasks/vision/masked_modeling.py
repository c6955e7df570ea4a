"""masked-image-modeling: a model that fills in hidden parts of images, trained without labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.errors import InputError
from loopwright.metrics import load as load_metric
from loopwright.tasks.arguments import TaskTrainingArguments, flag
from loopwright.tasks.base import Job, Origin, Rows
from loopwright.tasks.data import RowDataset, RunData
from loopwright.tasks.optional_imports import is_object_name
from loopwright.tasks.scoring import JointScorer, LossInterval, MetricScorer, Scorer, score_rows
from loopwright.tasks.vision.base import IMAGE, VISION_DEFAULTS, VisionArguments, VisionTask

_EVALUATION_SEED = 20_230_611
_MOST_PATCHES = 16  # along a side, of a small model
_MOST_UNITS = 6  # along a side: larger areas are hidden than single patches of a large image
_MEAN_IMAGES = 2_000


@dataclass
class MaskedImageArguments(VisionArguments):
    mask_ratio: float = flag(0.6, "Fraction of an image to hide.", above=0, below=1)
    mask_patch_size: int | None = flag(
        None, "Side of the hidden squares in pixels, a multiple of the patch size; chosen if unset.", at_least=1
    )
    patch_size: int | None = flag(
        None, "Side of the patches of a small model; chosen from the images if unset.", at_least=1
    )


class MaskedImageModeling(VisionTask):
    name = "masked-image-modeling"
    summary = "a model that fills in hidden parts of images, without labels"
    roles = (IMAGE,)
    explanation = {
        "data": "Any folder of images, or a table with a column of them; classes are ignored.",
        "models": "By default a small vision transformer. Else a folder or Hub id of transformers (ViT, DeiT, Swin, "
        "...).",
        "masks": "--mask_ratio of an image is hidden, in squares of --mask_patch_size pixels; new ones each time in "
        "training, always the same in evaluations.",
        "metric": "masked_mse, the squared error of hidden pixels (from 0 to 1), compared with the mean image.",
    }
    example = "lw train masked-image-modeling --data photos/ --epochs 100 --batch 64 --lr 1e-3"
    pretrained, pretrained_megabytes = "microsoft/swin-tiny-patch4-window7-224", 113
    scratch_updates = 500
    kept_flags = ("mask_ratio",)
    auto_class = "AutoModelForMaskedImageModeling"
    predicted = ("image", "masked_mse")
    arguments = MaskedImageArguments
    defaults = {**VISION_DEFAULTS, "learning_rate": 5e-4}
    demo = {
        **{"mask_ratio": 0.5, "augmentation": "none", "epochs": 25, "batch": 32, "lr": 2e-3, "threads": 1},
        **{"weight_decay": 0.01, "warmup_steps": 0.1, "lr_scheduler_type": "cosine"},
    }
    demo_variants = {"fashion": MappingProxyType({"epochs": 1, "batch": 64})}
    demo_note = "half of each digit filled in: squared error 0.045 (that of the mean image 0.074), 70 s"
    has_plain_scenes = True
    augmented_by = "masked_image_train"
    sheet_columns = 2
    sheet_size = 3 * 160

    def create_dataset(self, job: Job, rows: Rows, *, is_labelled: bool, is_training: bool = False) -> Any:
        images = super().create_dataset(job, rows, is_labelled=False, is_training=is_training)
        return MaskedImages(images, _masking(job), is_training)

    def baselines(self, job: Job) -> Mapping[str, Mapping[str, float]]:
        from loopwright.engine.seeding import preserved_generators

        with preserved_generators():
            number = job.data.num_used("train")
            images = VisionTask.create_dataset(self, job, job.data.rows("train"), is_labelled=False)
            places = range(0, number, -(-number // _MEAN_IMAGES))
            mean = np.zeros(images[0]["pixel_values"].shape)
            for place in places:
                mean += self._pixels(job, images[place]["pixel_values"]) / len(places)
            masking = _masking(job)

            def batches() -> Iterator[dict[str, Any]]:
                for position in range(len(job.eval_dataset)):
                    features = job.eval_dataset[position]
                    yield {
                        "predictions": [mean],
                        "references": [self._pixels(job, features["pixel_values"])],
                        "masks": [masking.pixels(features["bool_masked_pos"].numpy())],
                    }

            return {"mean image": score_rows(partial(load_metric, "reconstruction_error"), batches())}

    def build(self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin) -> Job:
        options = {"small_config": lambda side: small_sizes(side, args.patch_size), **_config_changes(origin, args)}
        job = self.load_job(data, args, training, origin, small="masked_vit", **options)
        if not origin.is_run:
            args.patch_size = _patch_size(job.model, args)
            args.mask_patch_size = _unit(args)
        job.notes.append(f"hides {args.mask_ratio:.0%} of each image in squares of {args.mask_patch_size} pixels")
        return job

    def create_scorer(self, job: Job) -> Scorer:
        make = partial(load_metric, "reconstruction_error")
        scorer = MetricScorer(make, {"masked_mse": False}, drops_columns=True)
        return JointScorer([LossInterval("image_loss"), scorer])

    def score_batch(self, job: Job, batch: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
        masking = _masking(job)
        masks = np.stack([masking.pixels(hidden) for hidden in batch["bool_masked_pos"].cpu().numpy()])
        samples = []
        for position, loss, pixels, rebuilt, mask in zip(
            batch["position"].tolist(),
            _image_losses(job, batch, outputs, masks),
            self._pixels(job, batch["pixel_values"]),
            self._pixels(job, outputs.reconstruction),
            masks,
            strict=True,
        ):
            error = float(np.square(rebuilt.astype(np.float64) - pixels)[:, mask].mean())
            sample = {"position": position, "prediction": rebuilt, "reference": pixels, "mask": mask}
            samples.append({**sample, "loss": error, "image_loss": loss, "num_hidden": int(mask.sum())})
        return samples

    def readable(self, job: Job, sample: Mapping[str, Any], row: Mapping[str, Any] | None) -> dict[str, Any]:
        return {"masked_mse": sample["loss"], **sample}

    def predict_batch(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        outputs = model(**self.inputs_for(job, batch))
        found = []
        for sample in self.score_batch(job, batch, outputs):
            whole, mask = sample["reference"], sample["mask"]
            pictures = {"_image": whole, "_rebuilt": np.where(mask, sample["prediction"], whole)}
            shown = {name: np.moveaxis(picture.clip(0, 1), 0, -1) for name, picture in pictures.items()}
            found.append({"masked_mse": round(sample["loss"], 6), "_mask": mask, **shown})
        return found

    def draw(self, job: Job, row: Mapping[str, Any], prediction: Mapping[str, Any]) -> tuple[Any, str]:
        from loopwright.data.pictures import reconstruction_row

        captions = ("image", "seen", f"error {prediction['masked_mse']:.4f}")
        return reconstruction_row(prediction["_image"], prediction["_mask"], prediction["_rebuilt"], captions), ""

    def draw_sample(self, job: Job, batch: Mapping[str, Any], index: int) -> tuple[Any, str]:
        picture, caption = super().draw_sample(job, batch, index)
        hidden = _masking(job).pixels(batch["bool_masked_pos"][index].cpu().numpy())
        return np.where(hidden[..., None], np.uint8(128), picture), caption

    def _pixels(self, job: Job, values: Any) -> npt.NDArray[np.float32]:
        """Return denormalised images with values from 0 to 1, on the host."""
        form = self.form(job)
        mean, std = (np.asarray(each, np.float32)[:, None, None] for each in (form.mean, form.std))
        return np.asarray(values.detach().float().cpu().numpy() * std + mean)


class Masking:
    """Chooses the hidden part of an image: squares of `unit` pixels, made of patches; at least one stays visible."""

    def __init__(self, side: int, patch: int, unit: int, ratio: float) -> None:
        self._patch = patch
        self._scale = unit // patch
        self._num_units = side // unit
        total = self._num_units**2
        self._num_hidden = min(max(1, round(ratio * total)), max(1, total - 1))

    def draw(self, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
        hidden = np.zeros(self._num_units**2, np.bool_)
        hidden[rng.permutation(len(hidden))[: self._num_hidden]] = True
        return _enlarged(hidden.reshape(self._num_units, -1), self._scale).reshape(-1)

    def pixels(self, hidden: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        return _enlarged(hidden.reshape(self._num_units * self._scale, -1), self._patch)


class MaskedImages(RowDataset):
    """Images with hidden patches: new ones each time in training, otherwise fixed."""

    def __init__(self, images: Any, masking: Masking, is_training: bool) -> None:
        super().__init__(images.rows)
        self.images = images
        self._masking = masking
        self._is_training = is_training

    @property
    def augments_on_device(self) -> bool:
        return bool(self.images.augments_on_device)

    def features(self, position: int) -> dict[str, Any]:
        import torch

        features = self.images[position]
        # Loaders seed numpy's generator for each micro-batch.
        seed = np.random.randint(0, 2**63, dtype=np.int64) if self._is_training else (_EVALUATION_SEED, position)
        hidden = self._masking.draw(np.random.default_rng(seed))
        return {**features, "bool_masked_pos": torch.from_numpy(hidden)}


def small_sizes(side: int, patch: int | None) -> dict[str, int]:
    if patch is None:
        patch = 2
        while side > _MOST_PATCHES * patch:
            patch *= 2
    return {"image_size": max(patch, side - side % patch), "patch_size": patch}


def _config_changes(origin: Origin, args: Any) -> dict[str, Any]:
    """Return the changes of a transformers config: images keep the size that the model was made for."""
    from loopwright.tasks.text.models import load_config
    from loopwright.tasks.vision.models import is_ours

    if origin.path is None or origin.module is not None or is_object_name(origin.path) or is_ours(origin.path):
        return {}
    if args.image_size is None:
        own = getattr(load_config(origin.path), "image_size", None)
        args.image_size = own if isinstance(own, int) else None
    return {} if args.image_size is None else {"image_size": args.image_size}


def _patch_size(model: Any, args: Any) -> int:
    config = model.config
    own = config.get("patch_size") if isinstance(config, Mapping) else getattr(config, "patch_size", None)
    patch = own if isinstance(own, int) else args.patch_size
    if patch is None or args.image_size % patch:
        what = f"images of {args.image_size} pixels cannot be cut into patches of {patch}"
        fix = "leave out --patch_size" if patch is None else f"--image_size {max(1, args.image_size // patch) * patch}"
        raise InputError("args.value", what, fix=fix)
    return int(patch)


def _unit(args: Any) -> int:
    side, patch, unit = args.image_size, args.patch_size, args.mask_patch_size
    if unit is None:
        fitting = [size for size in range(patch, max(patch, side // _MOST_UNITS) + 1, patch) if side % size == 0]
        return int(fitting[-1])
    if unit % patch or side % unit:
        what = f"--mask_patch_size {unit}: such squares do not consist of whole patches, or do not tile the image"
        fix = f"--mask_patch_size {patch}"
        raise InputError("args.value", what, saw=[f"patches of {patch} pixels, images of {side}"], fix=fix)
    return int(unit)


def _image_losses(
    job: Job, batch: Mapping[str, Any], outputs: Any, masks: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Return the mean error of each image's hidden pixels: squared for the small model, absolute for transformers'."""
    from loopwright.models import SmallModel

    differences = outputs.reconstruction.float() - batch["pixel_values"].float()
    errors = differences.square() if isinstance(job.model, SmallModel) else differences.abs()
    return np.asarray(errors.mean(dim=1).double().cpu().numpy().mean(axis=(1, 2), where=masks))


def _masking(job: Job) -> Masking:
    args = job.args
    return Masking(args.image_size, args.patch_size, args.mask_patch_size, args.mask_ratio)


def _enlarged(values: npt.NDArray[np.bool_], factor: int) -> npt.NDArray[np.bool_]:
    return values.repeat(factor, axis=0).repeat(factor, axis=1)
