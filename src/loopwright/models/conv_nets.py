"""Convolutional nets that classify images (`ConvNet`) and pixels (`UNet`, after Ronneberger et al. 2015)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright.errors import ConfigError
from loopwright.models.base import ModelOutput, SmallModel
from loopwright.models.blocks import Encoder, Merge, conv_block
from loopwright.models.losses import create_loss


class ConvNet(SmallModel):
    """Three convolution blocks, the first two followed by pooling, then the mean and the maximum of each feature.

    Args:
        width: channels after the first block; doubled by each of the next.
        loss: "ce" or "focal".
    """

    name = "conv_net"

    def __init__(self, *, num_labels: int, num_channels: int = 3, width: int = 32, loss: str = "ce") -> None:
        super().__init__(num_labels=num_labels, num_channels=num_channels, width=width, loss=loss)
        self.blocks = nn.Sequential(
            conv_block(num_channels, width),
            nn.MaxPool2d(2, ceil_mode=True),
            conv_block(width, 2 * width),
            nn.MaxPool2d(2, ceil_mode=True),
            conv_block(2 * width, 4 * width),
        )
        self.head = nn.Linear(8 * width, num_labels)
        self._loss = create_loss(loss)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ModelOutput:
        """Return the class scores, and with labels (samples,) the loss; -100 is ignored."""
        features = self.blocks(pixel_values)
        logits = self.head(torch.cat([features.mean(dim=(2, 3)), features.amax(dim=(2, 3))], dim=1))
        return ModelOutput.of(logits, labels, self._loss)


class UNet(SmallModel):
    """Three halvings, two doublings with skip connections, and a last doubling in the head.

    The first convolution already halves the image, which makes the net four times as fast.

    Args:
        num_labels: the number of classes, the background included.
        width: channels after the first halving; doubled by each of the next.
        loss: a name of `loopwright.models.losses`.
        class_weights: the weight of each class in the loss; give a common background a small one.
    """

    name = "u_net"

    def __init__(
        self,
        *,
        num_labels: int,
        num_channels: int = 3,
        width: int = 32,
        loss: str = "ce+dice",
        ignore_index: int = 255,
        class_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__(
            num_labels=num_labels,
            num_channels=num_channels,
            width=width,
            loss=loss,
            ignore_index=ignore_index,
            class_weights=None if class_weights is None else [float(weight) for weight in class_weights],
        )
        if class_weights is not None and len(class_weights) != num_labels:
            raise ConfigError(f"class_weights are one for each of the {num_labels} classes, got {len(class_weights)}")
        self.encoder = Encoder(num_channels, (width, 2 * width, 4 * width))
        self.merge_quarter = Merge(4 * width, 2 * width)
        self.merge_half = Merge(2 * width, width)
        # Four pixels for each feature position.
        self.head = nn.Conv2d(width, 4 * num_labels, 1)
        self._loss = create_loss(loss, ignore_index, class_weights)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ModelOutput:
        """Return scores (images, classes, height, width) of images of any size, and with labels the loss."""
        height, width = pixel_values.shape[-2:]
        half, quarter, eighth = self.encoder(pixel_values)
        features = self.merge_half(self.merge_quarter(eighth, quarter), half)
        logits = F.pixel_shuffle(self.head(features), 2)[..., :height, :width]
        return ModelOutput.of(logits, None if labels is None else labels.long(), self._loss)
