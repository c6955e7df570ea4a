"""A net that detects objects by their centres, and, with prototypes, their masks.

Each class has a map with a peak at the centre of each object (Zhou et al. 2019); at a peak the net also predicts the
object's size and the centre's offset in its cell. With prototypes the net predicts a few mask images per image, and
each object's coefficients for them (Bolya et al. 2019).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright.errors import ConfigError, DataError
from loopwright.models.base import ModelOutput, SmallModel
from loopwright.models.conv_nets import Encoder, Merge, conv_block
from loopwright.models.losses import sigmoid_focal, weighted_mean

STRIDE = 4  # pixels of the image per cell of the maps
# A peak of 1 in 100 at the start, so that the first updates do not go into turning every cell off.
_START = -math.log(99.0)
_SIZE_WEIGHT, _OFFSET_WEIGHT, _MASK_WEIGHT = 1.0, 1.0, 2.0


@dataclass
class DetectionOutput(ModelOutput):
    """Maps of cells: `logits` (images, classes, rows, columns) are the peaks.

    Attributes:
        places: (images, 4, rows, columns): log of width and height in cells, and the centre's offset in the cell.
        coefficients: (images, prototypes, rows, columns); None without prototypes.
        prototypes: (images, prototypes, 2 * rows, 2 * columns); None without.
        image_size: height and width of the images.
        image_losses: the losses of the images; None in training, and without labels.
    """

    places: Tensor | None = None
    coefficients: Tensor | None = None
    prototypes: Tensor | None = None
    image_size: tuple[int, int] = (0, 0)
    image_losses: Tensor | None = None


class CenterPoint(SmallModel):
    """A detector of objects, or of objects and their masks.

    Args:
        num_labels: the number of classes, without a background class.
        width: channels after the first halving.
        num_prototypes: of masks; 0 for boxes only, 8 is enough for small images.
    """

    name = "center_point"

    def __init__(self, *, num_labels: int, num_channels: int = 3, width: int = 32, num_prototypes: int = 0) -> None:
        super().__init__(num_labels=num_labels, num_channels=num_channels, width=width, num_prototypes=num_prototypes)
        if num_prototypes < 0:
            raise ConfigError(f"num_prototypes of the model {self.name!r} must be 0 or more, got {num_prototypes}")
        self.encoder = Encoder(num_channels, (width, 2 * width, 4 * width))
        self.merge_quarter = Merge(4 * width, 2 * width)
        self.neck = conv_block(2 * width, 2 * width)
        self.peak_head = nn.Conv2d(2 * width, num_labels, 1)
        nn.init.constant_(self.peak_head.bias, _START)  # type: ignore[arg-type]
        self.place_head = nn.Conv2d(2 * width, 4, 1)
        if num_prototypes:
            self.coefficient_head = nn.Conv2d(2 * width, num_prototypes, 1)
            self.merge_half = Merge(2 * width, width)
            self.prototype_head = nn.Sequential(conv_block(width, width), nn.Conv2d(width, num_prototypes, 1))

    def forward(self, pixel_values: Tensor, labels: Sequence[Mapping[str, Tensor]] | None = None) -> DetectionOutput:
        """Return the maps, and with labels the loss, a mean over images.

        Args:
            pixel_values: images of any size (images, channels, height, width).
            labels: for each image "class_labels" (objects,), "boxes" (objects, 4) as centre, width and height relative
                to the image, and with prototypes "masks" (objects, height, width).
        """
        half, quarter, eighth = self.encoder(pixel_values)
        merged = self.merge_quarter(eighth, quarter)
        features = self.neck(merged)
        height, width = pixel_values.shape[-2:]
        output = DetectionOutput(
            logits=self.peak_head(features), places=self.place_head(features), image_size=(height, width)
        )
        if self.config["num_prototypes"]:
            output.coefficients = self.coefficient_head(features)
            output.prototypes = self.prototype_head(self.merge_half(merged, half))
        if labels is not None:
            self._set_loss(output, labels)
        return output

    def _set_loss(self, output: DetectionOutput, labels: Sequence[Mapping[str, Tensor]]) -> None:
        assert output.logits is not None and output.places is not None
        peaks = output.logits
        num_images, _, rows, columns = peaks.shape
        # Each object's terms are divided by the objects of its image and the images of the batch.
        owners = [
            (index, 1 / (len(each["boxes"]) * num_images)) for index, each in enumerate(labels) for _ in each["boxes"]
        ]
        images = _on(peaks, torch.tensor([index for index, _ in owners], dtype=torch.long))
        shares = _on(peaks, torch.tensor([share for _, share in owners], dtype=torch.float32))
        height, width = output.image_size
        scale = _on(peaks, torch.tensor([width, height, width, height]) / STRIDE)
        boxes = _on(peaks, torch.cat([each["boxes"] for each in labels]).float()) * scale
        classes = _on(peaks, torch.cat([each["class_labels"] for each in labels]))
        centers, sizes = boxes[:, :2], boxes[:, 2:].clamp(min=0.25)
        column = centers[:, 0].long().clamp(0, columns - 1)
        row = centers[:, 1].long().clamp(0, rows - 1)
        of_peaks = sigmoid_focal(peaks, heatmap(peaks.shape, images, classes, row, column, sizes))
        found = output.places.float()[images, :, row, column]  # (objects, 4)
        offsets = centers - torch.stack([column, row], dim=1)
        terms = _SIZE_WEIGHT * (found[:, :2] - sizes.log()).abs().sum(dim=1)
        terms = terms + _OFFSET_WEIGHT * (found[:, 2:] - offsets).abs().sum(dim=1)
        if output.prototypes is not None and output.coefficients is not None:
            coefficients = output.coefficients[images, :, row, column]
            masks = _on(peaks, torch.cat([each["masks"] for each in labels])).float()
            logits = mask_logits(coefficients, output.prototypes[images])
            terms = terms + _MASK_WEIGHT * mask_terms(logits, masks, torch.cat([centers, sizes], dim=1) * STRIDE)
        terms = terms * shares
        output.loss = weighted_mean(of_peaks, torch.ones_like(of_peaks)).loss + terms.sum()
        if not self.training:
            is_own = images == torch.arange(num_images, device=peaks.device)[:, None]  # (images, objects)
            output.image_losses = of_peaks + torch.where(is_own, terms * num_images, 0.0).sum(dim=1)

    @torch.no_grad()
    def decode(
        self, outputs: DetectionOutput, threshold: float = 0.05, max_detections: int = 100
    ) -> list[dict[str, Tensor]]:
        """Return the objects found in each image, most confident first; called with the output of `forward`.

        Returns:
            "boxes" (objects, 4) as left, top, right, bottom in pixels of the images given to `forward`, "scores",
            "classes", and with prototypes "masks" (objects, height, width) of booleans.
        """
        assert outputs.logits is not None and outputs.places is not None
        chances = outputs.logits.float().sigmoid()
        # A cell counts if no neighbour has a higher score for this class.
        chances = torch.where(F.max_pool2d(chances, 3, stride=1, padding=1) == chances, chances, 0.0)
        scores, places = chances.flatten(1).topk(min(max_detections, chances[0].numel()), dim=1)
        return [
            self._decode_image(outputs, index, scores[index][is_sure], places[index][is_sure])
            for index, is_sure in enumerate(scores > threshold)
        ]

    def _decode_image(self, outputs: DetectionOutput, index: int, scores: Tensor, places: Tensor) -> dict[str, Tensor]:
        assert outputs.places is not None
        height, width = outputs.image_size
        rows, columns = outputs.places.shape[-2:]
        cells = places % (rows * columns)
        found = outputs.places[index].float().flatten(1)[:, cells]  # (4, objects)
        centers = torch.stack([cells % columns, cells // columns]) + found[2:]
        halves = found[:2].clamp(max=12.0).exp() / 2
        corners = torch.cat([centers - halves, centers + halves]) * STRIDE
        limits = torch.tensor([width, height, width, height], device=corners.device)
        boxes = torch.minimum(corners.T.clamp(min=0.0), limits)
        result = {"boxes": boxes, "scores": scores, "classes": places // (rows * columns)}
        if outputs.prototypes is not None and outputs.coefficients is not None:
            coefficients = outputs.coefficients[index].flatten(1)[:, cells].T
            logits = mask_logits(coefficients, outputs.prototypes[index].expand(len(cells), -1, -1, -1))
            full = full_size(logits, height, width)
            centered = torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], dim=1)
            result["masks"] = (full > 0) & inside(centered, height, width)
        return result


def _on(like: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor on the device of another, without a host sync."""
    return tensor.to(like.device, non_blocking=True)


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
    """Return each object's mask cross-entropy and 1 - overlap, inside its box; masks have the size of the images."""
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
