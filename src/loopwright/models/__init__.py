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

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from loopwright.config.model_limits import BuildLimitError, limited
from loopwright.errors import CheckpointError, ConfigError, InputError, nearest
from loopwright.models.base import CONFIG_FILE, NAME_KEY, WEIGHTS_FILE, ModelOutput, SmallModel
from loopwright.models.center_point import CenterPoint, DetectionOutput
from loopwright.models.conv_nets import ConvNet, UNet
from loopwright.models.losses import LOSS_NAMES, ItemLoss, create_loss, sample_losses
from loopwright.models.masked_vit import MaskedViT, ReconstructionOutput
from loopwright.sources.files import open_data, read_data

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
    "load",
    "sample_losses",
]

MODELS: Mapping[str, type[SmallModel]] = MappingProxyType(
    {kind.name: kind for kind in (ConvNet, UNet, CenterPoint, MaskedViT)}
)
"""Every small model by name."""


def create(name: str, labels: Sequence[str] | None = None, **config: Any) -> SmallModel:
    """Return a new model, its weights drawn from torch's generator.

    Args:
        name: a key of `MODELS`.
        labels: the class names; they replace `num_labels`.
        config: the model's other constructor arguments.

    Raises:
        ConfigError: there is no such model, or it does not accept these arguments.
    """
    if name not in MODELS:
        near = nearest(str(name), MODELS)
        hint = f"did you mean {near!r}? " if near else ""
        raise ConfigError(f"there is no model {name!r}: {hint}There are {', '.join(MODELS)}")
    kind = MODELS[name]
    takes = inspect.signature(kind).parameters
    if labels is not None and "num_labels" in takes:
        config.setdefault("num_labels", len(labels))
    unknown = [key for key in config if key not in takes]
    if unknown:
        raise ConfigError(f"the model {name!r} does not know {', '.join(unknown)}: it takes {', '.join(takes)}")
    missing = [key for key, value in takes.items() if value.default is value.empty and key not in config]
    if missing:
        raise ConfigError(f"the model {name!r} needs {', '.join(missing)}")
    model = kind(**config)
    if labels is not None:
        model.set_labels(labels)
    return model


def load(folder: str | Path) -> SmallModel:
    """Return the model that `save_pretrained` wrote to this folder, on the CPU and in evaluation mode.

    Raises:
        CheckpointError: the folder has no small model, or a damaged one.
    """
    source = Path(folder)
    path = source / CONFIG_FILE
    try:
        config = json.loads(read_data(path))
    except (OSError, ValueError, RecursionError, InputError) as error:
        raise CheckpointError(f"there is no model in {folder}: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is damaged: it holds a {type(config).__name__} instead of an object")
    if NAME_KEY not in config:
        raise CheckpointError(f"{source / CONFIG_FILE} does not describe a small model: it has no {NAME_KEY!r}")
    try:
        name, labels = config.pop(NAME_KEY), config.pop("labels", None)
        with limited(), torch.device("meta"):
            create(name, labels, **config)
        model = create(name, labels, **config)
        os.close(open_data(source / WEIGHTS_FILE))  # load_file would wait for a pipe
        model.load_state_dict(load_file(source / WEIGHTS_FILE))
    except (OSError, SafetensorError, RuntimeError, ConfigError, TypeError, BuildLimitError, InputError) as error:
        raise CheckpointError(f"the model in {source} is damaged: {error}") from error
    return model.eval()
