"""1,797 digits of 8 x 8 pixels: scikit-learn's handwritten ones, or drawn ones without scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loopwright.data.pictures.text import font
from loopwright.data.vision_extra import pillow
from loopwright.keys import key

NUM_DIGITS, NUM_TRAIN = 1797, 1437
_SIDE = 8
_NAMES = tuple("0123456789")
# Digits are drawn in this size, then averaged over squares.
_LARGE = 64
_FONT_SIZES, _STROKES, _MOST_SHIFT, _MOST_DEGREES = (60, 76), (2, 4), 5, 15


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


def has_scikit_learn() -> bool:
    return find_spec("sklearn") is not None


def load_digits() -> LabelledImages:
    """Return the digits, in scikit-learn's order: 1,437 for training, 360 for validation, no two alike."""
    if not has_scikit_learn():
        return drawn_digits()
    # Read as it is: importing scikit-learn would take longer than the rest of the demo's start.
    spec = find_spec("sklearn")
    file = Path(str(spec and spec.origin)).parent / "datasets" / "data" / "digits.csv.gz"
    found = np.loadtxt(file, delimiter=",") if file.is_file() else _from_scikit_learn()
    # Their ink ranges from 0 to 16.
    images = np.rint(found[:, :-1].reshape(-1, _SIDE, _SIDE) * (255 / 16)).astype(np.uint8)
    source = "handwritten digits of scikit-learn (UCI Optical Recognition of Handwritten Digits, test set)"
    licence = "Creative Commons Attribution 4.0 (E. Alpaydin and C. Kaynak, 1998)"
    return LabelledImages(images, found[:, -1].astype(np.int64), _NAMES, NUM_TRAIN, source, licence)


def _from_scikit_learn() -> npt.NDArray[np.float64]:
    found = import_module("sklearn.datasets").load_digits()
    return np.column_stack([found.data, found.target])


def drawn_digits() -> LabelledImages:
    """Return as many digits of the same size, drawn with Pillow's built-in font, slightly rotated and moved."""
    labels = np.arange(NUM_DIGITS, dtype=np.int64) % len(_NAMES)
    images = np.stack([_draw(_NAMES[label], key(0, "drawn digits", index)) for index, label in enumerate(labels)])
    source = "digits drawn with Pillow's built-in font"
    return LabelledImages(images, labels, _NAMES, NUM_TRAIN, source, "none needed: generated")


def _draw(digit: str, seed: int) -> npt.NDArray[np.uint8]:
    images = pillow()
    rng = np.random.default_rng(seed)
    canvas = images.new("L", (_LARGE, _LARGE))
    x, y = (_LARGE / 2 + shift for shift in rng.uniform(-_MOST_SHIFT, _MOST_SHIFT, 2))
    size = int(rng.integers(_FONT_SIZES[0], _FONT_SIZES[1] + 1))
    stroke = int(rng.integers(_STROKES[0], _STROKES[1] + 1))
    pillow("ImageDraw").Draw(canvas).text((x, y), digit, fill=255, font=font(size), anchor="mm", stroke_width=stroke)
    turned = canvas.rotate(float(rng.uniform(-_MOST_DEGREES, _MOST_DEGREES)), images.Resampling.BICUBIC)
    small = np.asarray(turned.resize((_SIDE, _SIDE), images.Resampling.BOX), np.float64)
    stretched: npt.NDArray[np.uint8] = np.rint(small * (255 / small.max())).astype(np.uint8)
    return stretched
