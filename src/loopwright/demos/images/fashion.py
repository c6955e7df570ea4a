"""Fashion-MNIST from the files of Debian's package `dataset-fashion-mnist`, or another folder.

The four files are gzipped IDX: two zero bytes, a type (8: bytes), the number of dimensions, each size as four
big-endian bytes, then the values.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loopwright.demos.images.digits import LabelledImages
from loopwright.errors import DataError

FOLDER = Path("/usr/share/datasets/fashion-mnist")
_NAMES = (*("T-shirt", "trouser", "pullover", "dress", "coat"), *("sandal", "shirt", "sneaker", "bag", "ankle boot"))
# The file names identify the part; t10k are the 10,000 held out.
_PARTS = ("train", "t10k")
_IMAGES, _LABELS = "{}-images-idx3-ubyte.gz", "{}-labels-idx1-ubyte.gz"


def load_fashion(folder: str | Path = FOLDER) -> LabelledImages:
    """Return 60,000 images of 28 x 28 pixels for training and 10,000 for validation, of ten kinds of clothing."""
    place = Path(folder)
    names = [name.format(part) for part in _PARTS for name in (_IMAGES, _LABELS)]
    missing = [name for name in names if not (place / name).is_file()]
    if missing:
        raise DataError(
            f"{place} has no {missing[0]}. Install Debian's package dataset-fashion-mnist, give the folder that holds "
            "the four gz files of Fashion-MNIST, or use the demo without a variant."
        )
    parts = [(read_idx(place / _IMAGES.format(part)), read_idx(place / _LABELS.format(part))) for part in _PARTS]
    for part, (images, labels) in zip(_PARTS, parts, strict=True):
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise DataError(
                f"{place} has {part} images of the shape {images.shape} and labels of the shape {labels.shape}; "
                "expected (n, height, width) and (n,)"
            )
        if labels.size and labels.max() >= len(_NAMES):
            raise DataError(f"{place} has a {part} label {labels.max()}; expected 0 to {len(_NAMES) - 1}")
    images, labels = (np.concatenate([part[which] for part in parts]) for which in (0, 1))
    source, licence = "Fashion-MNIST (Zalando Research)", "MIT"
    return LabelledImages(images, labels.astype(np.int64), _NAMES, len(parts[0][0]), source, licence)


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Return the array in a gzipped IDX file of bytes; raise a DataError if it is damaged or of another type."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. Get the file again.") from None
    num_dimensions = content[3] if len(content) > 3 else 0
    start = 4 + 4 * num_dimensions
    if content[:3] != b"\0\0\x08" or len(content) < start:
        raise DataError(f"{path} is not an IDX file of bytes: it begins with {content[:4].hex(' ')}, expected 00 00 08")
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4))
    values = np.frombuffer(content, np.uint8, offset=start)
    if values.size != np.prod(shape, dtype=np.int64):
        raise DataError(f"{path} holds {values.size} values; its header says {shape}. Get the file again.")
    return values.reshape(shape)
