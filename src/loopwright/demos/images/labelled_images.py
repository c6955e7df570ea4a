"""Images with one label each, for demos of image classification."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class LabelledImages:
    """Images of one size, each of one class; the first ones are for training, the rest for validation."""

    images: npt.NDArray[np.uint8]  # (n, H, W): light ink on black
    labels: npt.NDArray[np.int64]  # (n,): class ids
    names: tuple[str, ...]  # by id
    num_train: int
    source: str
    licence: str

    def positions(self, split: str) -> range:
        return range(self.num_train) if split == "train" else range(self.num_train, len(self.images))
