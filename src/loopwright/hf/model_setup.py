"""Preparing a model for a run or an evaluation, as the arguments ask for it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from loopwright.errors import ConfigError
from loopwright.hf.files import align_special_tokens
from loopwright.hf.loss import base_model

if TYPE_CHECKING:
    from loopwright.hf.trainer import Trainer

# Keys of gradient_checkpointing_kwargs for the model itself: the recomputed layers, and where their inputs are kept.
_OF_MODEL = ("every_n_layers", "offload")


def prepare_model(trainer: Trainer) -> None:
    """Apply the arguments about the model itself, before its optimizer is created."""
    model, args = trainer.model, trainer.args
    if args.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32
    if args.gradient_checkpointing:
        if not callable(getattr(model, "gradient_checkpointing_enable", None)):
            raise ConfigError(
                "gradient_checkpointing=True needs a model with gradient_checkpointing_enable(), and "
                f"{type(model).__name__} has none. Use torch.utils.checkpoint in its forward instead."
            )
        given: dict[str, Any] = dict(args.gradient_checkpointing_kwargs or {})  # type: ignore[arg-type] # settled
        options = {name: given.pop(name) for name in _OF_MODEL if name in given}
        if given:  # for torch's checkpoint function
            options["gradient_checkpointing_kwargs"] = given
        model.gradient_checkpointing_enable(**options)
    if args.use_liger_kernel:
        _apply_liger_kernel(base_model(model), args.liger_kernel_config or {})
    if trainer.processing_class is not None:
        align_special_tokens(model, trainer.processing_class)


def _apply_liger_kernel(model: Any, options: Any) -> None:
    try:
        package = importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        raise ConfigError(
            "use_liger_kernel=True needs the package liger-kernel: pip install -U liger-kernel"
        ) from error
    if not hasattr(getattr(model, "config", None), "model_type"):
        raise ConfigError(f"use_liger_kernel=True needs a model of transformers, got a {type(model).__name__}")
    package._apply_liger_kernel_to_instance(model=model, **options)  # transformers calls it too; none is public


@contextmanager
def noisy_embeddings(model: Any, alpha: float | None) -> Iterator[None]:
    """Add NEFTune's uniform noise to the input embeddings in training mode; an alpha of None adds none.

    It comes from torch's generator of the device, which is seeded for every micro-batch.
    """
    if alpha is None:
        yield
        return
    embeddings = getattr(base_model(model), "get_input_embeddings", lambda: None)()
    if embeddings is None:
        raise ConfigError(f"neftune_noise_alpha={alpha} needs get_input_embeddings(): {type(model).__name__} has none")

    def add_noise(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        bound = alpha / math.sqrt(output.size(1) * output.size(2))
        return output + torch.empty_like(output).uniform_(-bound, bound) if module.training else output

    handle = embeddings.register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def cast_weights(model: nn.Module, args: Any) -> Iterator[None]:
    """Evaluate with weights and buffers of another type if asked; then the model has its own again, bit for bit."""
    dtype = torch.bfloat16 if args.bf16_full_eval else torch.float16 if args.fp16_full_eval else None
    tensors = (*model.parameters(), *model.buffers()) if dtype is not None else ()
    kept = [(each, each.data) for each in tensors if each.is_floating_point()]
    for each, own in kept:
        each.data = own.to(dtype)
    try:
        yield
    finally:
        for each, own in kept:
            each.data = own
