"""Which rows are for training and which are held out.

Without a validation file a hash of a row's content decides its side: not the order of the file or a seed. Equal rows,
and rows that differ only in case, blanks and punctuation, are on the same side; so are the rows of a group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from loopwright.errors import InputError

Hashes = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]
_ROUNDED_BITS = 11  # JSON readers with 64-bit floats keep the other 53 exactly


def hash_texts(texts: Iterable[str]) -> bytes:
    # JSON allows lone surrogates, which other encodings reject.
    return b"".join([hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts])


def group_number(value: str) -> int:
    """Return the number of a group, which depends on its value alone."""
    return int.from_bytes(hash_texts([value.strip()]), "little") >> _ROUNDED_BITS


def split_keys(exact: Hashes, near: Hashes) -> Hashes:
    """Return the hash that decides the side of each row: `near` for rows with a near-duplicate, else `exact`."""
    first, _ = pairs_that_differ(near, exact)
    return np.where(np.isin(near, near[first]), near, exact)


def pairs_that_differ(keys: Hashes, others: Hashes) -> tuple[Rows, Rows]:
    """Return two rows for each key whose rows differ in `others`, sorted by the first of the two."""
    order = np.lexsort((others, keys))
    ends = np.flatnonzero((keys[order[1:]] == keys[order[:-1]]) & (others[order[1:]] != others[order[:-1]]))
    _, firsts = np.unique(keys[order[ends]], return_index=True)
    pairs = np.sort(np.stack([order[ends[firsts]], order[ends[firsts] + 1]]), axis=0)
    pairs = pairs[:, np.argsort(pairs[0], kind="stable")]
    return pairs[0], pairs[1]


def is_held_back(split_key: Hashes, ratio: float) -> Mask:
    """Return which rows go to validation: those with the lowest hashes, at least two, or half of the ratio."""
    _check_ratio(ratio)
    least = min(max(2, round(ratio * len(split_key) / 2)), len(split_key) // 2)
    lowest: Mask = np.isin(split_key, np.sort(split_key)[:least])
    for held_back in ((split_key < np.uint64(int(ratio * 2**64))) | lowest, lowest, split_key == split_key.min()):
        if held_back.any() and not held_back.all():
            return held_back
    is_one = len(split_key) == 1
    what = f"{len(split_key)} row{'' if is_one else 's'} cannot be split into training and validation"
    saw = [] if is_one else ["all rows are the same, except for case, blanks and punctuation"]
    raise InputError("data.split", what, saw=saw, fix="add rows with other texts")


def are_groups_held_back(groups: Hashes, ratio: float) -> Mask:
    """Return which rows go to validation: whole groups, by ascending hash, if they bring the share of rows closer."""
    _check_ratio(ratio)
    _, places, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    assert len(sizes) > 1, "the caller refuses a single group"
    is_chosen, left = np.zeros(len(sizes), np.bool_), ratio * len(groups)
    for number, size in enumerate(sizes.tolist()):
        if abs(left - size) < abs(left):
            is_chosen[number], left = True, left - size
    if not is_chosen.any() or is_chosen.all():
        is_chosen[sizes.argmin()] ^= True
    return is_chosen[places]


def _check_ratio(ratio: float) -> None:
    if not 0 < ratio < 1:
        what = f"--validation_ratio {ratio} is not between 0 and 1"
        raise InputError("args.value", what, fix="--validation_ratio 0.2")


def keep_classes_in_training(held_back: Mask, codes: npt.NDArray[np.int32], keys: Hashes) -> list[int]:
    """Move classes that are held out as a whole into training, in place, with all rows of the same key."""
    in_training = np.unique(codes[~held_back])
    only_held_back = np.setdiff1d(codes[held_back], in_training)
    held_back[np.isin(keys, keys[np.isin(codes, only_held_back)])] = False
    return [int(code) for code in only_held_back]


def duplicated_in(content: Hashes, training: Hashes) -> Mask:
    ordered = np.unique(training)
    places = np.minimum(np.searchsorted(ordered, content), max(len(ordered) - 1, 0))
    found: Mask = ordered[places] == content if len(ordered) else np.zeros(len(content), np.bool_)
    return found
