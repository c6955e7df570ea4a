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
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loopwright.data.images.scene import Scene
from loopwright.data.images.transforms import Compose, Transform
from loopwright.data.vision_extra import pillow
from loopwright.errors import DataError, InputError

Row = Mapping[str, Any]


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

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        position = operator.index(index)
        rng = np.random.default_rng(np.random.randint(0, 2**63, dtype=np.int64))
        row = self.rows[position]
        try:
            scene = self.load_scene(row)
        except InputError:
            raise  # a missing package affects every sample
        except DataError as error:
            raise UnreadableSampleError(str(error)) from error
        return {**self.to_features(self.transform(scene, rng), row), "position": position}


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
