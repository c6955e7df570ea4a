"""Small models for images, in plain PyTorch: easy to read, and trained on a CPU in a minute.

model = models.create("conv_net", labels=["cat", "dog"])
output = model(pixel_values, labels=labels)    # output.loss, output.num_items, output.logits
model.save_pretrained("folder")
model = models.load("folder")

"conv_net" (image-classification), "u_net" (semantic-segmentation), "center_point" (object-detection; with
`num_prototypes=8` instance-segmentation), "masked_vit" (masked-image-modeling). They have the
call signature and outputs of transformers' models. `create_loss` has losses by name, for these models and for others.
"""

from __future__ import annotations

from loopwright.models.base import ModelOutput, SmallModel
from loopwright.models.center_point import CenterPoint, DetectionOutput
from loopwright.models.conv_net import ConvNet
from loopwright.models.losses import LOSS_NAMES, ItemLoss, create_loss, sample_losses
from loopwright.models.masked_vit import MaskedViT, ReconstructionOutput
from loopwright.models.registry import MODELS, create, holds_model, load
from loopwright.models.u_net import UNet

__all__ = [
    "LOSS_NAMES",
    "MODELS",
    "CenterPoint",
    "ConvNet",
    "DetectionOutput",
    "ItemLoss",
    "MaskedViT",
    "ModelOutput",
    "ReconstructionOutput",
    "SmallModel",
    "UNet",
    "create",
    "create_loss",
    "holds_model",
    "load",
    "sample_losses",
]
