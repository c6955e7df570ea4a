"""Classification losses, each with its number of items.

Means of several micro-batches can only be combined with their numbers of items. Nothing here waits for the device, so
the numbers are tensors.

    loss, num_items = create_loss("ce+dice", ignore_index=255)(logits, labels)
    losses, num_items = sample_losses("ce+dice", logits, labels, ignore_index=255)    # of each sample

| name | what | items |
|---|---|---|
| ce | cross-entropy | labels that are not ignored: samples, or pixels |
| focal | cross-entropy that looks away from what is easy (Lin et al. 2017) | the same |
| dice | 1 - the overlap of classes, a mean over the classes of an image | images with a label that is not ignored |
| a+b | the sum of both, each of them a mean over the image first | the same images |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from loopwright.errors import ConfigError

LOSS_NAMES = ("ce", "focal", "dice", "ce+dice", "focal+dice")
# Keeps a division by zero items at 0, and changes nothing else.
_TINY = 1e-6


class ItemLoss(NamedTuple):
    """A mean over items, and their number; 0 and 0 without items."""

    loss: Tensor
    num_items: Tensor


Loss = Callable[[Tensor, Tensor], ItemLoss]


def create_loss(name: str, ignore_index: int = -100, class_weights: Sequence[float] | None = None) -> Loss:
    """Return the named loss, called with logits (samples, classes, ...) and labels (samples, ...).

    Args:
        name: one of `LOSS_NAMES`.
        class_weights: the weight of each class in "ce" and "focal"; the number of items is then the sum of the labels'
            weights.
    """
    if name not in LOSS_NAMES:
        raise ConfigError(f"there is no loss {name!r}: use {', '.join(LOSS_NAMES)}")
    return lambda logits, labels: weighted_mean(*_weighted_terms(name, logits, labels, ignore_index, class_weights))


def sample_losses(
    name: str, logits: Tensor, labels: Tensor, ignore_index: int = -100, class_weights: Sequence[float] | None = None
) -> ItemLoss:
    """Return the named loss and the number of items of each sample.

    Their mean, weighted by items, is the loss of the batch, which `create_loss` returns.
    """
    terms, weights = _weighted_terms(name, logits, labels, ignore_index, class_weights)
    num_items = weights.double().reshape(len(labels), -1).sum(dim=1)
    sums = (terms * weights).double().reshape(len(labels), -1).sum(dim=1)
    return ItemLoss(sums / num_items.clamp(min=_TINY), num_items)


def _weighted_terms(
    name: str, logits: Tensor, labels: Tensor, ignore_index: int, class_weights: Sequence[float] | None
) -> tuple[Tensor, Tensor]:
    """Return the terms of the named loss and their weights, per label or per image."""
    parts = name.split("+")
    logits = logits.float()  # 16 bits are too few for sums over pixels
    weights = label_weights(labels, ignore_index, class_weights)
    if parts in (["ce"], ["focal"]):
        return label_terms(parts[0], logits, labels, ignore_index), weights
    has_labels = (labels != ignore_index).flatten(1).any(dim=1)
    values = torch.zeros(len(labels), device=logits.device)
    for part in parts:
        if part == "dice":
            values = values + soft_dice(logits, labels, ignore_index)
        else:
            terms = label_terms(part, logits, labels, ignore_index) * weights
            values = values + terms.flatten(1).sum(dim=1) / weights.flatten(1).sum(dim=1).clamp(min=_TINY)
    return values, has_labels.float()


def label_weights(labels: Tensor, ignore_index: int, class_weights: Sequence[float] | None) -> Tensor:
    """Return the weight of each label; 0 for ignored ones."""
    is_counted = labels != ignore_index
    if class_weights is None:
        return is_counted.float()
    weights = torch.tensor(class_weights, dtype=torch.float32).to(labels.device, non_blocking=True)
    return weights[torch.where(is_counted, labels, 0)] * is_counted


def label_terms(name: str, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Return "ce" or "focal" of every label, 0 for ignored ones."""
    terms = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none")
    return (1.0 - torch.exp(-terms)) ** 2 * terms if name == "focal" else terms


def soft_dice(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Return each image's mean of 1 - overlap over the classes in its labels; 0 without labels."""
    is_counted = (labels != ignore_index).flatten(1)
    classes = torch.arange(logits.shape[1], device=logits.device)
    target = (labels.flatten(1)[:, None] == classes[:, None]) & is_counted[:, None]  # (images, classes, pixels)
    chances = logits.softmax(dim=1).flatten(2) * is_counted[:, None]
    both = (chances * target).sum(dim=2)
    sizes = chances.sum(dim=2) + target.sum(dim=2)
    is_present = target.any(dim=2)
    missed = (1.0 - 2.0 * both / sizes.clamp(min=_TINY)) * is_present
    return missed.sum(dim=1) / is_present.sum(dim=1).clamp(min=1)


def sigmoid_focal(logits: Tensor, targets: Tensor, gamma: float = 2.0, beta: float = 4.0) -> Tensor:
    """Return the focal loss of independent binary decisions, for each sample.

    A target of 1 is a positive, 0 a negative. In between, near a positive, false positives are penalized less, by
    (1 - target) ** beta (Law and Deng 2018). A sample's terms are summed and divided by its positives, at least 1.
    """
    logits = logits.float()
    is_hit = targets == 1
    chances = logits.sigmoid()
    found = (1 - chances) ** gamma * F.logsigmoid(logits)
    passed = (1 - targets) ** beta * chances**gamma * F.logsigmoid(-logits)
    sums = -torch.where(is_hit, found, passed).flatten(1).sum(dim=1)
    return sums / is_hit.flatten(1).sum(dim=1).clamp(min=1)


def weighted_mean(values: Tensor, weights: Tensor) -> ItemLoss:
    """Return the weighted mean of values, and the sum of the weights."""
    num_items = weights.sum()
    return ItemLoss((values * weights).sum() / num_items.clamp(min=_TINY), num_items)
