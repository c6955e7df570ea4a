"""A U-shaped net that classifies each pixel (after Ronneberger et al. 2015)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from loopwright.errors import ConfigError
from loopwright.models.base import ModelOutput, SmallModel
from loopwright.models.blocks import Encoder, Merge
from loopwright.models.losses import create_loss


class UNet(SmallModel):
    """Three halvings, two doublings with skip connections, and a last doubling in the head.

    The first convolution already halves the image, which makes the net four times as fast.

    Args:
        num_labels: the number of classes, the background included.
        num_channels: of the images.
        width: channels after the first halving; doubled by each of the next.
        loss: a name of `loopwright.models.losses`.
        ignore_index: the label of ignored pixels.
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
        """Return scores (images, classes, height, width), and with labels (images, height, width) the loss.

        Args:
            pixel_values: images of any size (images, channels, height, width).
            labels: the class of each pixel.
        """
        height, width = pixel_values.shape[-2:]
        half, quarter, eighth = self.encoder(pixel_values)
        features = self.merge_half(self.merge_quarter(eighth, quarter), half)
        logits = F.pixel_shuffle(self.head(features), 2)[..., :height, :width]
        if labels is None:
            return ModelOutput(logits=logits)
        loss, num_items = self._loss(logits, labels.long())
        return ModelOutput(loss=loss, num_items=num_items, logits=logits)
