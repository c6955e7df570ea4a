"""From scenes to tensors, and from samples to batches.

`SceneFeatures` makes the features of one sample, `collate_images` a batch of them. Everything before works on uint8.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Number
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from loopwright.data.images.device import DrawnImage
from loopwright.data.images.scene import IGNORED_CLASS, Scene
from loopwright.errors import DataError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_OF_OBJECTS = ("boxes", "classes", "masks", "crowd")


def to_tensor(image: NDArray[np.uint8]) -> Tensor:
    """Return an image as float32 between 0 and 1, with the shape (3, height, width)."""
    return torch.from_numpy(np.array(image.transpose(2, 0, 1), order="C")).float().div_(255)


def normalize(pixels: Tensor, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD) -> Tensor:
    """Return (..., 3, height, width) pixels minus the mean, over the standard deviation, of each channel."""
    return (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


def denormalize(
    pixels: Tensor, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD
) -> NDArray[np.uint8]:
    """Invert `normalize(to_tensor(image))` for display: uint8, (..., height, width, 3)."""
    values = pixels.detach().cpu().float() * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
    return np.asarray(values.mul(255).round().clamp(0, 255).byte().movedim(-3, -1).numpy())


@dataclass(frozen=True)
class SceneFeatures:
    """Makes the features of a sample from its scene and row: a `to_features` of `ImageDataset`.

    Called with the transformed scene and the row, it returns a dict with "pixel_values" (float32, 3 x height x width),
    "labels" (the "label" of the row, or the class of each pixel), and the scene's "boxes", "classes", "masks" and
    "crowd" if present. With objects it also has "matrix", which maps from the coordinates of the file.
    """

    mean: tuple[float, float, float] = IMAGENET_MEAN  # of each channel
    std: tuple[float, float, float] = IMAGENET_STD  # of each channel

    def pixels(self, images: NDArray[np.uint8]) -> Tensor:
        """Return the "pixel_values" of images (..., height, width, 3): `normalize(to_tensor(image))`, by a table."""
        *outer, height, width, _ = images.shape
        values = np.empty((*outer, 3, height, width), np.float32)
        for channel, table in enumerate(_normalized_levels(self.mean, self.std)):
            np.take(table, images[..., channel], out=values[..., channel, :, :], mode="clip")  # raise would copy
        return torch.from_numpy(values)

    def __call__(self, scene: Scene, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the features of a sample."""
        features: dict[str, Any] = {"pixel_values": self.pixels(scene.image)}
        if scene.semantic is not None:
            features["labels"] = torch.from_numpy(scene.semantic.astype(np.int64))
        elif row.get("label") is not None:
            features["labels"] = int(row["label"])
        for name in _OF_OBJECTS:
            value = getattr(scene, name)
            if value is not None:
                features[name] = torch.from_numpy(np.array(value, order="C"))
        if scene.boxes is not None:
            features["matrix"] = torch.from_numpy(scene.matrix.copy())
        return features


@cache
def _normalized_levels(mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    """Return the value of each channel and each of the 256 levels, normalized as an image would be: (3, 256)."""
    levels = np.repeat(np.arange(256, dtype=np.uint8)[:, None, None], 3, axis=2)
    return np.asarray(normalize(to_tensor(levels), mean, std)[..., 0].numpy())


def from_bytes(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return uint8 images (images, height, width, 3) as `SceneFeatures` does, with the same bits on any device."""
    levels = _levels_on(mean, std, images.device)
    numbers = images.permute(0, 3, 1, 2).contiguous().long()
    return levels[numbers + torch.arange(0, 768, 256, device=images.device).view(3, 1, 1)]


@cache
def _levels_on(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # an evaluation may come first
        return torch.from_numpy(_normalized_levels(mean, std).reshape(-1)).to(device)


class Samples(list[dict[str, Any]]):
    """Samples whose "pixel_values" are the parts of one tensor."""

    pixel_values: Tensor


class KnownSamples(Sequence[dict[str, Any]]):
    """Samples that are collated already; a single one is taken out of its `batch`."""

    def __init__(self, batch: dict[str, Any]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["pixel_values"])

    def __getitem__(self, index: Any) -> Any:
        values = {name: column[operator.index(index)] for name, column in self.batch.items()}
        return {name: value.item() if value.dim() == 0 else value for name, value in values.items()}


def collate_images(
    samples: Sequence[Mapping[str, Any]], is_padded: bool = False, multiple: int = 1, ignore_index: int = IGNORED_CLASS
) -> dict[str, Any]:
    """Return a batch of samples from `SceneFeatures` or similar.

    Numbers and tensors are stacked: "pixel_values", "labels", "position". Values of objects ("boxes", "classes",
    "masks", "crowd") and of other types become a list with one entry per sample. The batch of a dataset that augments
    on the device is an `ImageBatch`.

    Args:
        is_padded: images may differ in size: images and masks are padded with zeros at the right and bottom, labels
            with `ignore_index`. The batch then has "pixel_mask": int64, 1 for real pixels.
        multiple: sides of padded images are rounded up to it.
    """
    if isinstance(samples, KnownSamples):
        return samples.batch
    batch: dict[str, Any] = {}
    names = list(samples[0])
    if isinstance(drawn := samples[0].get("pixel_values"), DrawnImage):
        batch = drawn.augmentation.batch([sample["pixel_values"] for sample in samples])
        names.remove("pixel_values")
    if is_padded:
        sizes = [tuple(sample["pixel_values"].shape[-2:]) for sample in samples]
        height, width = (-(-max(sides) // multiple) * multiple for sides in zip(*sizes, strict=True))
        samples = [_padded(sample, height, width, ignore_index) for sample in samples]
        batch["pixel_mask"] = torch.zeros(len(samples), height, width, dtype=torch.int64)
        for own, (own_height, own_width) in zip(batch["pixel_mask"], sizes, strict=True):
            own[:own_height, :own_width] = 1
    for name in names:
        if name == "pixel_values" and isinstance(samples, Samples):
            batch[name] = samples.pixel_values
            continue
        values = batch[name] = [sample[name] for sample in samples]
        if name not in _OF_OBJECTS and all(isinstance(value, Tensor) for value in values):
            shapes = {tuple(value.shape) for value in values}
            if len(shapes) > 1:
                raise DataError(
                    f"{name!r} cannot be stacked: the shapes are {sorted(shapes)}. Let the transform return one size "
                    "(Resize(exact=...), PadTo), or collate with is_padded=True."
                )
            batch[name] = torch.stack(values)
        elif name not in _OF_OBJECTS and all(isinstance(value, Number) for value in values):
            batch[name] = torch.tensor(values)
    return batch


def _padded(sample: Mapping[str, Any], height: int, width: int, ignore_index: int) -> dict[str, Any]:
    size = sample["pixel_values"].shape[-2:]
    missing = (0, width - size[1], 0, height - size[0])
    padded = dict(sample)
    for name, fill in (("pixel_values", 0), ("masks", 0), ("labels", ignore_index)):
        value = sample.get(name)
        if isinstance(value, Tensor) and value.shape[-2:] == size:
            padded[name] = pad(value, missing, value=fill)
    return padded
