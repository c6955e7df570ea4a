"""Which tags may follow which: the inside of an entity comes after its beginning.

In IOB2, BIOES and BILOU a tag such as I-PER may only follow B-PER or I-PER. A model that gives each word its own
likeliest tag ignores that, and a lone I-PER counts as a separate entity. `likeliest` finds the likeliest valid
sequence of tags. IOB1, where entities begin with I-, has no such rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_INSIDE = ("I", "M", "E", "L")
_GOES_ON = ("B", "I", "M")


def may_follow(before: str, tag: str) -> bool:
    """Whether a tag may follow another: an inside tag only continues an entity of its type."""
    letter, hyphen, kind = tag.partition("-")
    if not hyphen or letter not in _INSIDE:
        return True
    return before in [f"{each}-{kind}" for each in _GOES_ON]


def is_in_order(rows: Iterable[Sequence[str]]) -> bool:
    """Whether all entities in these rows of tags have a beginning; called with the training tags."""
    return all(may_follow(before, tag) for tags in rows for before, tag in zip(["", *tags], tags, strict=False))


def likeliest(scores: NDArray[np.float64], names: Sequence[str]) -> list[int]:
    """Return the indices of the likeliest valid sequence of tags (Viterbi 1967).

    The first word may have any tag: the context before it is unknown if a long text is tagged in pieces.
    """
    best: list[int] = scores.argmax(-1).tolist()
    if all(may_follow(names[before], names[tag]) for before, tag in zip(best, best[1:], strict=False)):
        return best
    is_allowed = np.array([[may_follow(before, tag) for tag in names] for before in names])
    sums = scores[0]
    sources: list[NDArray[np.int64]] = []
    for row in scores[1:]:
        paths = np.where(is_allowed, sums[:, None], -np.inf)  # (tag before, tag)
        sources.append(paths.argmax(0))
        sums = paths.max(0) + row
    path = [int(sums.argmax())]
    for source in reversed(sources):
        path.append(int(source[path[-1]]))
    return path[::-1]
