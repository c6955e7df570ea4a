"""A convolutional net that classifies images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loopwright.models.base import ModelOutput, SmallModel
from loopwright.models.blocks import conv_block
from loopwright.models.losses import create_loss


class ConvNet(SmallModel):
    """Three convolution blocks, the first two followed by pooling, then the mean and the maximum of each feature.

    Args:
        num_labels: the number of classes.
        num_channels: of the images.
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
        if labels is None:
            return ModelOutput(logits=logits)
        loss, num_items = self._loss(logits, labels)
        return ModelOutput(loss=loss, num_items=num_items, logits=logits)
