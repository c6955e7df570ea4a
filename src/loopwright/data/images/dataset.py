"""A map-style dataset of images: rows in, features out.

`ImageDataset` loads the scene of a row, transforms it with its own generator, and makes features of it. The generator
is seeded from numpy's global one, which loopwright's loaders seed from (seed, epoch, position), so workers, processes
and restarts change no pixel.

Example:
    dataset = ImageDataset(plan.rows("train"), load_scene, classification_train(224), SceneFeatures())
    loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2, collate_fn=collate_images)
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loopwright.data.images.cache import PixelCache
from loopwright.data.images.device import DeviceAugmentation, device_augmentation
from loopwright.data.images.scene import Scene
from loopwright.data.images.tensors import KnownSamples, Samples
from loopwright.data.images.transforms import CenterCrop, Compose, PadTo, Resize, Transform
from loopwright.data.vision_extra import pillow
from loopwright.errors import DataError, InputError

Row = Mapping[str, Any]
_NO_IMAGE = np.zeros((1, 1, 3), np.uint8)
_COLUMNS = {int: np.dtype(np.int64), float: np.dtype(np.float64)}
_MOST_KNOWN = 10_000_000  # samples whose features besides the pixels are kept, about 30 bytes each


class UnreadableSampleError(ValueError):
    """Replaces a DataError of `load_scene` inside a dataset.

    For a loader a DataError concerns the whole run, and is never skipped. This one concerns a single sample:
    bad_samples="skip" leaves it out, and "raise" turns it into a DataError that names the sample.
    """

    code = "data.image"


class ImageDataset:
    """Samples of images, each a dict of features, with the row number as "position".

    `load_scene` returns the scene of a row; its DataErrors make a sample skippable. The transform gets the scene and a
    generator (see `as_transform`), and `to_features` the transformed scene and the row.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        load_scene: Callable[[Row], Scene],
        transform: Callable[..., Any] | None,
        to_features: Callable[[Scene, Row], dict[str, Any]],
    ) -> None:
        self.rows = rows
        self.load_scene = load_scene
        self.transform = as_transform(transform)
        self.to_features = to_features
        self.sends_bytes = False  # batches of cached images have uint8 pixels, to be converted by `from_bytes`
        self._augmentation: DeviceAugmentation | None = None
        self._cache: PixelCache | None = None
        self._fixed: Transform | None = None
        self._known: KnownFeatures | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def keep(self, cache: PixelCache, fixed: Compose | None = None) -> None:
        """Keep the decoded images in a cache, after the fixed part that `fixed_part` split from the transform.

        With a fixed part scenes have an image alone.
        """
        self._cache = cache
        if fixed is not None:
            rest = _parts(self.transform)[len(fixed.transforms) :]
            self._fixed, self.transform = fixed, Compose(rest)
            is_constant = not rest and hasattr(self.to_features, "pixels")
            self._known = KnownFeatures(len(self.rows)) if is_constant and len(self.rows) <= _MOST_KNOWN else None

    @property
    def augments_on_device(self) -> bool:
        """Whether batches are augmented on the device: their pixels are not those of the CPU."""
        return self._augmentation is not None

    def augment_on_device(self) -> str | None:
        """Send parts of images and what was drawn, to be augmented in batches; return why that is impossible, or None.

        What is drawn is the same. Scenes have an image alone. `collate_images` returns an `ImageBatch`, which trainers
        finish on their device.
        """
        found = device_augmentation(self.transform)
        if isinstance(found, str):
            return found
        self._augmentation = found
        return None

    def warm(self) -> None:
        """Decode all images into the cache now; one that cannot be read is left for when its turn comes.

        Nothing is drawn. Without randomness, batches are later gathered without work per sample.
        """
        for position in range(len(self.rows) if self._cache is not None else 0):
            row = self.rows[position]
            with suppress(UnreadableSampleError):
                scene = self._scene(position, row, np.random.default_rng(0))  # which only a fixed part gets
                if self._known is not None:
                    self._known.add(position, self._features(scene, row, position))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._read(operator.index(index))[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[dict[str, Any]]:
        """Return samples; if scenes are images alone, these are converted at once."""
        positions = [operator.index(index) for index in indices]
        if not positions or self._augmentation or self._fixed is None or not hasattr(self.to_features, "pixels"):
            return [self[position] for position in positions]
        known = self._known_samples(positions)
        if known is not None:
            return known
        read = [self._read(position, is_converted=False) for position in positions]
        others = [features for features, _ in read]
        if len({image.shape for _, image in read}) > 1:
            return [{**each, "pixel_values": self.to_features.pixels(image)} for each, image in read]
        pixels = self._pixels(np.stack([image for _, image in read]))
        parts = zip(others, pixels.unbind(), strict=True)
        samples = Samples({**features, "pixel_values": own} for features, own in parts)
        samples.pixel_values = pixels
        return samples

    def _read(self, position: int, is_converted: bool = True) -> tuple[dict[str, Any], NDArray[np.uint8]]:
        """Return the features and the transformed image; the caller makes "pixel_values" unless it `is_converted`."""
        rng = np.random.default_rng(np.random.randint(0, 2**63, dtype=np.int64))
        row = self.rows[position]
        scene = self._scene(position, row, rng)
        if self._augmentation is not None:
            if scene.boxes is not None or scene.semantic is not None:
                raise DataError("boxes and masks do not move with images that are augmented on the device")
            drawn = self._augmentation.draw(scene.image, rng)
            return {**self._features(scene, row, position), "pixel_values": drawn}, scene.image
        scene = self.transform(scene, rng)
        features = self._features(scene, row, position, is_converted)
        if self._known is not None:
            self._known.add(position, features)
        return features, scene.image

    def _features(self, scene: Scene, row: Row, position: int, is_converted: bool = False) -> dict[str, Any]:
        shown = scene if is_converted else replace(scene, image=_NO_IMAGE)
        return {**self.to_features(shown, row), "position": position}

    def _pixels(self, images: NDArray[np.uint8]) -> torch.Tensor:
        pixels: torch.Tensor = torch.from_numpy(images) if self.sends_bytes else self.to_features.pixels(images)  # type: ignore[attr-defined]
        return pixels

    def _known_samples(self, positions: list[int]) -> KnownSamples | None:
        """Return samples without randomness, if all were read before: nothing is done per sample."""
        numbers = np.array(positions)
        batch = None if self._known is None or self._cache is None else self._known.batch(numbers)
        images = None if batch is None or self._cache is None else self._cache.gather(numbers)
        if batch is None or images is None:
            return None
        np.random.randint(0, 2**63, len(positions), dtype=np.int64)  # later draws are those of single samples
        return KnownSamples({**batch, "pixel_values": self._pixels(images)})

    def _scene(self, position: int, row: Row, rng: np.random.Generator) -> Scene:
        image = None if self._cache is None else self._cache.get(position)
        try:
            scene = self.load_scene(row if image is None else {**row, "image": image})
        except InputError:
            raise  # a missing package affects every sample
        except DataError as error:
            raise UnreadableSampleError(str(error)) from error
        if image is None and self._fixed is not None:
            scene = self._fixed(scene, rng)
        if image is None and self._cache is not None:
            self._cache.put(position, scene.image)
        return scene


class KnownFeatures:
    """The features besides the pixels of samples without randomness, by name, for those that were read."""

    def __init__(self, num_samples: int) -> None:
        self._is_known = np.zeros(num_samples, np.bool_)
        self._columns: dict[str, NDArray[Any]] | None = {}
        self._names: tuple[str, ...] = ()

    def add(self, position: int, features: Mapping[str, Any]) -> None:
        """Keep the features of a sample; ones that are not numbers, or have other names or types, end all keeping."""
        if self._columns is None or self._is_known[position]:
            return
        kinds = {name: _COLUMNS.get(type(value)) for name, value in features.items() if name != "pixel_values"}
        if not self._names:
            self._names = tuple(features)
            self._columns = {name: np.zeros(len(self._is_known), kind) for name, kind in kinds.items() if kind}
        if {name: column.dtype for name, column in self._columns.items()} != kinds:
            self._columns, self._is_known[:] = None, False
            return
        for name, column in self._columns.items():
            column[position] = features[name]
        self._is_known[position] = True

    def batch(self, positions: NDArray[np.int64]) -> dict[str, Any] | None:
        """Return the collated features of samples, with None for their pixels; None if one was not read."""
        if self._columns is None or not self._is_known[positions].all():
            return None
        batch: dict[str, Any] = dict.fromkeys(self._names)
        for name, column in self._columns.items():
            values = torch.from_numpy(column[positions])
            batch[name] = values.to(torch.get_default_dtype()) if values.is_floating_point() else values
        return batch


def fixed_part(transform: Transform) -> Compose:
    """Return the transforms at the beginning of one that draw nothing and depend on the image alone."""
    parts = itertools.takewhile(lambda part: type(part) in (Resize, CenterCrop, PadTo), _parts(transform))
    return Compose(tuple(parts))


def _parts(transform: Transform) -> Sequence[Transform]:
    return transform.transforms if isinstance(transform, Compose) else (transform,)


def as_transform(function: Callable[..., Any] | None) -> Transform:
    """Return a transform for a function of (scene, rng), or of an image alone (`ImageOnly`); None is the identity."""
    if function is None:
        return Compose(())
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function written in C has no signature
        parameters = []
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if len(positional) >= 2 and positional[1].default is inspect.Parameter.empty:
        return function
    takes_array = bool(positional) and "ndarray" in str(positional[0].annotation).lower()
    return ImageOnly(function, takes_array)


@dataclass(frozen=True)
class ImageOnly:
    """A transform from a function of the image alone: for classification, without boxes and masks.

    It may return a Pillow image, an array (height, width, 3) or a tensor (3, height, width), as uint8 or as floats
    between 0 and 1. It should use the global generators of torch, numpy or Python, which loaders seed.
    """

    function: Callable[[Any], Any]  # called with the image
    takes_array: bool = False  # it takes a uint8 array (height, width, 3) instead of a Pillow image

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Scene:
        """Return the scene with the new image; DataError if it has boxes or masks, or the result is not an image."""
        if scene.num_objects or scene.semantic is not None:
            raise DataError(
                f"{self._name} takes only an image, and would not move the boxes and masks of the sample. Pass a "
                "transform that takes (scene, rng) and moves them too."
            )
        image = np.array(scene.image, order="C")  # a copy: the function may modify it
        result = self.function(image if self.takes_array else pillow().fromarray(image))
        return replace(scene, image=self._as_bytes(result))

    @property
    def _name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def _as_bytes(self, result: Any) -> NDArray[np.uint8]:
        values: NDArray[Any]
        if isinstance(result, torch.Tensor):
            values = result.detach().cpu().movedim(0, -1).numpy() if result.dim() == 3 else result.numpy()
        else:
            values = np.asarray(result.convert("RGB") if hasattr(result, "convert") else result)
        if values.ndim == 3 and values.shape[2] == 3:
            if values.dtype == np.uint8:
                return np.asarray(values, dtype=np.uint8)
            if values.dtype.kind == "f" and values.size and values.min() >= 0 and values.max() <= 1:
                return np.asarray(np.rint(values * 255), dtype=np.uint8)
        raise DataError(
            f"{self._name} returned {values.dtype} of shape {values.shape}; expected a Pillow image, an array (height, "
            "width, 3) or a tensor (3, height, width), as uint8 or as floats between 0 and 1. Remove its last step: "
            "images are normalized after the transform."
        )
