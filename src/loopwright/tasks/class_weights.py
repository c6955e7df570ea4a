"""Class weights of the semantic-segmentation loss: given, or balanced. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from loopwright.errors import InputError
from loopwright.sources.images.masks import count_classes
from loopwright.tasks.data import RunData

MODEL_LOSS = "model"
_BALANCED = "balanced"


def settle_weights(args: Any, data: RunData) -> list[str]:
    """Return the class weights as kept in the settings, balanced ones as numbers.

    A balanced weight is proportional to 1 / sqrt(share of the training pixels): a class with a hundredth of the pixels
    of another counts ten times as much per pixel. Their mean is 1.
    """
    assert data.plan.labels is not None, "the schema has a mask"
    names, given = data.plan.labels.names, list(args.class_weights)
    if given == [_BALANCED]:
        with data.limited(train=args.max_train_samples):
            roots = [math.sqrt(number) for number in pixels_by_class(args, data, "train")]
        raw = [1 / root if root else 0.0 for root in roots] if any(roots) else [1.0] * len(roots)
        return [f"{weight * len(raw) / sum(raw):.6g}" for weight in raw]
    if given and (len(given) != len(names) or not all(map(_is_weight, given)) or not any(map(float, given))):
        raise InputError(
            "args.value",
            f"--class_weights {' '.join(given)} is not a number, 0 or more, for each of the {len(names)} classes",
            saw=[f"the classes are {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"],
            fix=f"--class_weights {' '.join(['1'] * min(len(names), 12))}   or   --class_weights {_BALANCED}",
        )
    return given


def pixels_by_class(args: Any, data: RunData, split: str) -> list[int]:
    """Count the pixels of each class in the masks of a split that the run uses."""
    assert data.plan.labels is not None, "the schema has a mask"
    names = data.plan.labels.names
    if data.num_used(split) == len(data.plan.splits[split]):
        return [data.plan.counts[split].get(name, 0) for name in names]
    from loopwright.data.images import decode_mask

    found = [0] * len(names)
    for row in (row for rows in data.batches(split) for row in rows):
        of_mask = count_classes(decode_mask(row["mask"]), len(names), args.ignore_index, args.reduce_labels)
        found = [sum(pair) for pair in zip(found, of_mask, strict=True)]
    return found


def check_weights(args: Any) -> None:
    """Refuse weights that the loss would ignore."""
    if args.class_weights and args.loss in (MODEL_LOSS, "dice"):
        raise InputError(
            "args.value",
            f"--loss {args.loss} does not use --class_weights",
            fix="--loss ce   or   leave --class_weights out",
        )


def numbers_of(weights: Sequence[str]) -> tuple[float, ...] | None:
    """Return the class weights as numbers; None without weights."""
    return tuple(map(float, weights)) or None


def _is_weight(word: str) -> bool:
    try:
        return 0 <= float(word) < math.inf
    except ValueError:
        return False
