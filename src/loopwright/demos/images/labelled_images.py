"""Images with one label each: what demos of image classification are made of."""

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
        num_train: how many of them are for training.
        source: what they are.
        licence: under which licence.
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    names: tuple[str, ...]
    num_train: int
    source: str
    licence: str

    def positions(self, split: str) -> range:
        """Return where the images of "train" or "validation" are."""
        return range(self.num_train) if split == "train" else range(self.num_train, len(self.images))
