"""Maps and masks of `CenterPoint`: Gaussian peaks at object centres, and masks made of prototypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from loopwright.errors import DataError


def heatmap(
    shape: Sequence[int], images: Tensor, classes: Tensor, row: Tensor, column: Tensor, sizes: Tensor
) -> Tensor:
    """Return maps of this shape with a Gaussian of height 1 for each object; its sigma is a sixth of the size."""
    num_images, num_classes, num_rows, num_columns = shape
    spread = (sizes / 6).clamp(min=0.5)
    across = (torch.arange(num_columns, device=sizes.device) - column[:, None]) / spread[:, :1]
    down = (torch.arange(num_rows, device=sizes.device) - row[:, None]) / spread[:, 1:]
    hills = torch.exp(-(across[:, None, :] ** 2 + down[:, :, None] ** 2) / 2)  # (objects, rows, columns)
    places = (images * num_classes + classes)[:, None].expand(-1, num_rows * num_columns)
    maps = torch.zeros(num_images * num_classes, num_rows * num_columns, device=sizes.device)
    maps = maps.scatter_reduce(0, places, hills.flatten(1), "amax")
    return maps.view(num_images, num_classes, num_rows, num_columns)


def mask_logits(coefficients: Tensor, prototypes: Tensor) -> Tensor:
    """Return (objects, rows, columns) from (objects, prototypes) and (objects, prototypes, rows, columns)."""
    return torch.einsum("op,ophw->ohw", coefficients.float(), prototypes.float())


def inside(boxes: Tensor, height: int, width: int) -> Tensor:
    """Return which pixels lie in each box (centre, width, height): (objects, height, width)."""
    across = (torch.arange(width, device=boxes.device) + 0.5 - boxes[:, :1]).abs() <= boxes[:, 2:3] / 2
    down = (torch.arange(height, device=boxes.device) + 0.5 - boxes[:, 1:2]).abs() <= boxes[:, 3:] / 2
    return down[:, :, None] & across[:, None, :]


def full_size(logits: Tensor, height: int, width: int) -> Tensor:
    """Return half-size logits (objects, rows, columns) upsampled to the size of the images."""
    doubled = F.interpolate(logits[:, None], scale_factor=2.0, mode="bilinear", align_corners=False)
    return doubled[:, 0, :height, :width]


def mask_terms(logits: Tensor, masks: Tensor, boxes: Tensor) -> Tensor:
    """Return each object's mask cross-entropy and 1 - overlap, inside its box.

    Raises:
        DataError: masks and images differ in size.
    """
    height, width = masks.shape[-2:]
    full = full_size(logits, height, width)
    if full.shape != masks.shape:
        raise DataError(f"masks of shape {tuple(masks.shape)} do not fit images of shape {tuple(full.shape[-2:])}")
    is_inside = inside(boxes, height, width).float()
    entropies = F.binary_cross_entropy_with_logits(full, masks, weight=is_inside, reduction="none").sum(dim=(1, 2))
    entropies = entropies / is_inside.sum(dim=(1, 2)).clamp(min=1)
    chances, target = full.sigmoid() * is_inside, masks * is_inside
    sizes = chances.sum(dim=(1, 2)) + target.sum(dim=(1, 2))
    return entropies + 1.0 - 2.0 * (chances * target).sum(dim=(1, 2)) / sizes.clamp(min=1e-6)
