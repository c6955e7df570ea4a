"""Which rows are for training and which are held out.

Without a validation file a hash of a row's content alone decides its side: not the order of the file, other rows, or a
seed. Equal rows are on the same side.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loopwright.errors import InputError

Hashes = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]


def is_held_back(split_key: Hashes, ratio: float) -> Mask:
    """Return which rows go to validation: those with the lowest hashes, at least one on each side."""
    if not 0 < ratio < 1:
        what = f"--validation_ratio {ratio} is not between 0 and 1"
        raise InputError("args.value", what, fix="--validation_ratio 0.2")
    held_back: Mask = split_key < np.uint64(int(ratio * 2**64))
    if held_back.any() and not held_back.all():
        return held_back
    if len(np.unique(split_key)) < 2:
        is_one = len(split_key) == 1
        what = f"{len(split_key)} row{'' if is_one else 's'} cannot be split into training and validation"
        saw = [] if is_one else ["all rows are the same"]
        raise InputError("data.split", what, saw=saw, fix="give more rows, or --validation_file")
    smallest: Mask = split_key == split_key.min()
    return smallest


def keep_classes_in_training(held_back: Mask, codes: npt.NDArray[np.int32]) -> list[int]:
    """Move classes whose rows are all held out into training, in place; return their codes."""
    in_training = np.unique(codes[~held_back])
    only_held_back = np.setdiff1d(codes[held_back], in_training)
    held_back[np.isin(codes, only_held_back)] = False
    return [int(code) for code in only_held_back]


def duplicated_in(content: Hashes, training: Hashes) -> Mask:
    ordered = np.unique(training)
    places = np.minimum(np.searchsorted(ordered, content), max(len(ordered) - 1, 0))
    found: Mask = ordered[places] == content if len(ordered) else np.zeros(len(content), np.bool_)
    return found
