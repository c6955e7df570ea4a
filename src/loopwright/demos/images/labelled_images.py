"""Images with one label each, for demos of image classification."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class LabelledImages:
    """Images of one size, each of one class; the first ones are for training, the rest for validation.

    Attributes:
        images: uint8, shape (n, H, W); light ink on black.
        labels: class ids, shape (n,).
        names: the names of the classes, by id.
        num_train: the number of training images.
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    names: tuple[str, ...]
    num_train: int
    source: str
    licence: str

    def positions(self, split: str) -> range:
        """Return the indexes of the images of "train" or "validation"."""
        return range(self.num_train) if split == "train" else range(self.num_train, len(self.images))
