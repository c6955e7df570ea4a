"""image-classification: a class for an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from loopwright.baselines import Constant, MostFrequent, Predictor
from loopwright.errors import ConfigError
from loopwright.metrics import load as load_metric
from loopwright.run_folder import RunFolder
from loopwright.run_folder.files import read_json_lines
from loopwright.sources import Role
from loopwright.tasks import scoring
from loopwright.tasks.arguments import TaskTrainingArguments, flag, flag_list
from loopwright.tasks.base import Job, Origin
from loopwright.tasks.class_options import weighted_loss
from loopwright.tasks.data import RunData
from loopwright.tasks.vision.base import IMAGE, VISION_DEFAULTS, VisionArguments, VisionTask

_NUM_SHOWN = 5  # classes of a prediction


@dataclass
class ImageClassificationArguments(VisionArguments):
    label_column: str | None = flag(None, "Column of the class, if the data is a table.")
    loss: str = flag("ce", "Cross-entropy, or focal loss, which down-weights easy samples.", choices=("ce", "focal"))
    label_smoothing: float = flag(0.0, "Fraction of the target to spread over all classes.", at_least=0, below=1)

    class_weights: list[str] = flag_list(
        "Weight of each class in the training loss: balanced, which favours rare classes, or A=2,B=0.5 (others: 1)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing and self.class_weights:
            raise ConfigError(f"label_smoothing={self.label_smoothing} and class_weights exclude each other")
        if self.label_smoothing and self.loss != "ce":
            raise ConfigError(f"label_smoothing={self.label_smoothing} needs loss='ce', got {self.loss!r}")


class ImageClassification(VisionTask):
    name = "image-classification"
    summary = "a class for an image"
    roles = (IMAGE, Role("label", "class", names=("label", "labels", "class", "category", "target"), is_input=False))
    explanation = {
        "data": "A folder with a folder per class, or with train and validation folders of these; csv, tsv, json, "
        "jsonl or parquet with a column of paths and a column of classes; or a Hub id.",
        "models": "By default a small convolutional net. Else a folder or Hub id of transformers (ViT, Swin, ResNet, "
        "...), or package.module:function that returns any PyTorch module.",
        "metric": "Accuracy, top-5 accuracy, F1 (macro-averaged for more than two classes), calibration error.",
        "predict": "lw predict RUN a.jpg b.png photos/ --overlays drawn/",
    }
    example = "lw train image-classification --data photos/ --model ./vit --epochs 3 --batch 32 --lr 5e-5"
    pretrained, pretrained_megabytes = "microsoft/resnet-18", 47
    auto_class = "AutoModelForImageClassification"
    has_plain_scenes = True
    augmented_by = "classification_train"
    weighs_classes = True
    predicted = ("image", "label", "score", "scores")
    arguments = ImageClassificationArguments
    defaults = {**VISION_DEFAULTS, "learning_rate": 5e-5}
    demo = {
        **{"augmentation": "none", "epochs": 6, "batch": 64, "lr": 3e-3, "weight_decay": 0.01, "threads": 1},
        **{"warmup_steps": 0.1, "lr_scheduler_type": "cosine"},
    }
    demo_variants = {"fashion": MappingProxyType({"epochs": 2, "per_device_eval_batch_size": 256})}
    demo_note = "digits of writers that training has not seen, by a small net: accuracy 0.97 (chance 0.10), 9 s"

    def baselines(self, job: Job) -> Mapping[str, Mapping[str, float]]:
        names = job.label_names
        rivals: dict[str, Predictor] = {"majority": MostFrequent()}
        if len(names) == 2:  # the constant with the best F1
            rivals[f"always {names[1]}"] = Constant(1)
        return scoring.score_baselines(job.data, rivals, "label", "label", partial(scoring.class_metric, len(names)))

    def build(self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin) -> Job:
        return self.load_job(data, args, training, origin, small="conv_net", criterion=_cross_entropy)

    def compute_loss(self, job: Job, model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        if _is_plain(job.args) and "num_items" not in batch:
            return super().compute_loss(job, model, batch)
        from torch.nn import functional

        from loopwright.models import create_loss

        inputs = self.inputs_for(job, batch)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        if (weighted := weighted_loss(job, batch, outputs.logits, job.args.loss)) is not None:
            return weighted, outputs
        if job.args.loss == "focal":
            return create_loss("focal")(outputs.logits, labels).loss, outputs
        smoothing = job.args.label_smoothing
        return functional.cross_entropy(outputs.logits.float(), labels, label_smoothing=smoothing), outputs

    def create_scorer(self, job: Job) -> scoring.Scorer:
        number = len(job.label_names)
        create = partial(scoring.class_metric, number)
        parts: list[scoring.Scorer] = [scoring.MetricScorer(create, {"accuracy": True, "f1": True})]
        if number > _NUM_SHOWN:
            accuracy = scoring.MetricScorer(partial(load_metric, "accuracy"), {"accuracy": True})
            parts.append(scoring.PartScorer(accuracy, "top_5_accuracy", _as_hit))
        parts += [scoring.CalibrationScorer(), scoring.LossInterval("loss" if _is_plain(job.args) else "image_loss")]
        return scoring.JointScorer(parts)

    def score_batch(self, job: Job, batch: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
        """The "loss" is the plain cross-entropy; if another loss is trained on, that is "image_loss"."""
        from torch.nn import functional

        from loopwright.models import sample_losses

        args, logits, labels = job.args, outputs.logits.float(), batch["labels"]
        losses = partial(functional.cross_entropy, logits, labels, reduction="none")
        confidence, predicted = logits.softmax(-1).max(-1)
        columns = {
            "position": batch["position"],
            "prediction": predicted,
            "reference": labels,
            "loss": losses(),
            "confidence": confidence,
            "rank": _ranks(logits, labels),
        }
        if args.loss == "focal":
            columns["image_loss"] = sample_losses("focal", logits, labels).loss
        elif not _is_plain(args):
            columns["image_loss"] = losses(label_smoothing=args.label_smoothing)
        return scoring.mark_suspects(scoring.samples_of(**columns))

    def readable(self, job: Job, sample: Mapping[str, Any], row: Mapping[str, Any] | None) -> dict[str, Any]:
        names = job.label_names
        return {**sample, **{key: names[sample[key]] for key in ("prediction", "reference")}}

    def predict_batch(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        logits = model(**self.inputs_for(job, batch)).logits.float()
        names = job.label_names
        shares, numbers = logits.softmax(-1).topk(min(_NUM_SHOWN, len(names)))
        found = []
        for row_shares, row_numbers in zip(shares.tolist(), numbers.tolist(), strict=True):
            scores = {names[number]: round(share, 6) for number, share in zip(row_numbers, row_shares, strict=True)}
            found.append({"label": names[row_numbers[0]], "score": round(row_shares[0], 6), "scores": scores})
        return found

    def model_card_lines(self, job: Job) -> list[str]:
        from loopwright.tasks.vision.models import ImageForm

        form = job.processor
        if not isinstance(form, ImageForm):
            return []
        part = "all of each image" if form.crop_share is None else f"the middle of each image ({form.crop_share:.0%})"
        mean, std = (f"({', '.join(f'{value:g}' for value in values)})" for values in (form.mean, form.std))
        return [
            f"It takes RGB images as float32 of shape (images, 3, {form.height}, {form.width}): {part}, resized, with "
            f"pixels from 0 to 1, minus {mean}, divided by {std}. preprocessor_config.json says the same."
        ]

    def draw(self, job: Job, row: Mapping[str, Any], prediction: Mapping[str, Any]) -> tuple[Any, str]:
        from loopwright.data.pictures import drawable_names

        picture, _ = super().draw(job, row, prediction)
        names, shown = job.label_names, drawable_names(job.label_names)
        caption = f"{shown[names.index(prediction['label'])]} {prediction['score']:.2f}"
        is_right = row.get("label") is None or names[row["label"]] == prediction["label"]
        return picture, caption if is_right else f"{caption}\nnot {shown[row['label']]}"

    def draw_sample(self, job: Job, batch: Mapping[str, Any], index: int) -> tuple[Any, str]:
        from loopwright.data.pictures import drawable_names

        picture, _ = super().draw_sample(job, batch, index)
        return picture, drawable_names(job.label_names)[int(batch["labels"][index])]

    def illustrate(self, job: Job, run: RunFolder, worst: Sequence[Mapping[str, Any]]) -> list[Path]:
        from loopwright.tasks.vision.pictures import write_confusion

        written = super().illustrate(job, run, worst)
        names = list(job.label_names)
        matrix = confusion(run.evaluation / "predictions.jsonl", names)
        return [*written, *write_confusion(run, names, matrix)]


def _as_hit(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Count a sample as right if few classes come before the right one."""
    return {**sample, "prediction": int(sample["rank"] < _NUM_SHOWN), "reference": 1}


def confusion(predictions: Path, names: Sequence[str]) -> list[list[int]]:
    """Return the confusion matrix of a predictions file: a row per true class, a column per predicted one."""
    numbers = {name: number for number, name in enumerate(names)}
    matrix = [[0] * len(names) for _ in names]
    for sample in read_json_lines(predictions):
        matrix[numbers[sample["reference"]]][numbers[sample["prediction"]]] += 1
    return matrix


def _ranks(logits: Any, labels: Any) -> Any:
    """Return the number of classes before the right one; ties go to the lower index, NaN counts all of them."""
    import torch

    own = logits.gather(1, labels[:, None])
    numbers = torch.arange(logits.shape[1], device=logits.device)
    return (~(logits <= own) | ((logits == own) & (numbers < labels[:, None]))).sum(1)


def _is_plain(args: Any) -> bool:
    """Whether the loss is the cross-entropy, or the model's equivalent."""
    return bool(args.loss == "ce" and not args.label_smoothing)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(logits.float(), labels)
