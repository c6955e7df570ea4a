"""Checkpoints of peft models: the trained weights, without the frozen base model."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from loopwright.checkpoint import Checkpoint
from loopwright.errors import CheckpointError

# Values sampled from each frozen tensor to identify the base model.
_PROBED = 256


def is_adapter(model: Any) -> bool:
    """Whether a model is a peft model, whose `save_pretrained` writes the adapter alone."""
    return hasattr(model, "peft_config") and callable(getattr(model, "get_base_model", None))


def changing(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that training changes: trained parameters and buffers."""
    trained = {name for name, value in model.named_parameters(remove_duplicate=False) if value.requires_grad}
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {name: value for name, value in weights.items() if name in trained or name in buffers}


def base_digest(model: Any) -> str:
    """Return a digest of the frozen parameters, computed from a few values of each."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            values = parameter.detach().flatten()
            probed = values[:: max(1, values.numel() // _PROBED)][:_PROBED].contiguous().cpu()
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            digest.update(probed.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def completed(model: Any, checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint completed with the model's own frozen weights, which must be the ones it was trained on."""
    saved = checkpoint.state.get("adapter_base")
    if saved is None or not is_adapter(model):
        return checkpoint
    if saved != base_digest(model):
        raise CheckpointError(
            "the checkpoint holds an adapter that was trained on another base model: the frozen weights differ. "
            "Load the base model that the run was started with."
        )
    current = model.state_dict()
    frozen = current.keys() - changing(model, current).keys()
    own = {name: value for name, value in current.items() if name in frozen and isinstance(value, Tensor)}
    return dataclasses.replace(checkpoint, model={**own, **checkpoint.model})
