"""A vision transformer that reconstructs the hidden patches of an image (after Xie et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright.errors import ConfigError, DataError
from loopwright.models.base import ModelOutput, SmallModel


@dataclass
class ReconstructionOutput(ModelOutput):
    """The output of `MaskedViT`: the reconstructed images (images, channels, height, width), and no logits."""

    reconstruction: Tensor | None = None


class MaskedViT(SmallModel):
    """A transformer over patches; hidden patches are replaced by a learned one, and all are decoded to pixels.

    `image_size` must be a multiple of `patch_size`, and `width`, the transformer's, a multiple of `num_heads`.
    """

    name = "masked_vit"
    sizes = ("image_size", "patch_size", "num_channels", "width", "num_layers", "num_heads")

    def __init__(
        self,
        *,
        image_size: int = 8,
        patch_size: int = 2,
        num_channels: int = 3,
        width: int = 96,
        num_layers: int = 4,
        num_heads: int = 4,
    ) -> None:
        config: dict[str, Any] = {"image_size": image_size, "patch_size": patch_size, "num_channels": num_channels}
        super().__init__(**config, width=width, num_layers=num_layers, num_heads=num_heads)
        for whole, part in (("image_size", "patch_size"), ("width", "num_heads")):
            if self.config[whole] % self.config[part]:
                got = f"{self.config[whole]} and {self.config[part]}"
                raise ConfigError(f"{whole} of the model {self.name!r} must be a multiple of {part}, got {got}")
        self.num_patches = (image_size // patch_size) ** 2
        num_values = num_channels * patch_size**2
        self.embed = nn.Linear(num_values, width)
        self.hidden_patch = nn.Parameter(torch.zeros(width))
        self.positions = nn.Parameter(torch.randn(self.num_patches, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, num_heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, num_values)

    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor | None = None) -> ReconstructionOutput:
        """Return the reconstructed images; with hidden patches also the mean squared error of their pixels.

        Args:
            bool_masked_pos: which patches are hidden (images, patches), row by row; None for none.
        """
        size, patch_size = self.config["image_size"], self.config["patch_size"]
        if pixel_values.shape[-2:] != (size, size):
            raise DataError(f"the model takes images of {size} x {size}, got {tuple(pixel_values.shape[-2:])}")
        patches = F.unfold(pixel_values, patch_size, stride=patch_size).transpose(1, 2)  # (images, patches, values)
        embedded = self.embed(patches)
        if bool_masked_pos is not None:
            embedded = torch.where(bool_masked_pos[..., None], self.hidden_patch.to(embedded.dtype), embedded)
        filled = self.head(self.layers(embedded + self.positions))
        reconstruction = F.fold(filled.transpose(1, 2), (size, size), patch_size, stride=patch_size)
        output = ReconstructionOutput(reconstruction=reconstruction)
        if bool_masked_pos is not None:
            errors = F.mse_loss(filled.float(), patches.float(), reduction="none").mean(dim=2)
            output.num_items = bool_masked_pos.sum()
            output.loss = (errors * bool_masked_pos).sum() / output.num_items.clamp(min=1)
        return output
