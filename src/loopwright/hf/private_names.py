"""Undocumented names of transformers' Trainer that users' methods rely on.

Methods copied from transformers and edited read these names. Each has the value that keeps such a copy correct.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from loopwright.config import TrainingArguments
from loopwright.engine.nested import to_device
from loopwright.errors import ConfigError
from loopwright.hf.loss import forward_parameters
from loopwright.optimizers import optimizer_class_and_options


def optimizer_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the options of `optimizers.create_optimizer` that the arguments set."""
    betas = (args.adam_beta1, args.adam_beta2)
    return {"adam_betas": betas, "adam_eps": args.adam_epsilon, "optim_args": args.optim_args}


def created_optimizer(kind: Any, options: dict[str, Any], model: nn.Module, groups: list[dict[str, Any]]) -> Any:
    """Create the optimizer of `optimizer_cls_and_kwargs`: from a class, or by a factory that takes the model."""
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
        return kind(groups, **options)
    makes_factories = isinstance(kind, type) and any("__call__" in vars(each) for each in kind.__mro__)
    factory = kind() if makes_factories else kind
    return factory(model, **options)


class PrivateNames:
    """The part of `Trainer` that exists only for code written for transformers.

    Attributes:
        current_gradient_accumulation_steps: the divisor in a copied `training_step`; 1, since
            `accelerator.backward` weights the loss.
        model_accepts_loss_kwargs: whether a copied `compute_loss` passes `num_items_in_batch` to the model; never.
        graph_safe: whether an overridden `compute_loss` or `training_step` may be captured as a CUDA graph.
    """

    model: Any
    args: TrainingArguments
    core: Any
    processing_class: Any
    label_names: list[str]
    optimizer: Any
    current_gradient_accumulation_steps = 1
    model_accepts_loss_kwargs = False
    graph_safe = False

    @property
    def tokenizer(self) -> Any:
        """Old name of `processing_class`."""
        return self.processing_class

    @property
    def is_deepspeed_enabled(self) -> bool:
        """Whether accelerate's configuration asks for DeepSpeed."""
        return getattr(self.core.accelerator.state, "deepspeed_plugin", None) is not None

    @property
    def is_fsdp_enabled(self) -> bool:
        """Whether accelerate's configuration asks for FSDP."""
        return getattr(self.core.accelerator.state, "fsdp_plugin", None) is not None

    @property
    def _train_batch_size(self) -> int:
        return self.args.train_batch_size

    def autocast_smart_context_manager(self, cache_enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
        """Old name of `compute_loss_context_manager`; the core applies autocast."""
        return contextlib.nullcontext()

    def _prepare_input(self, data: Any) -> Any:
        return to_device(data, self.core.device)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move an extra model, such as a teacher; the loop moves the trained one."""
        model.to(device)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Return a Hugging Face dataset without the columns that the model's forward does not take."""
        if not self.args.remove_unused_columns:
            return dataset
        wanted = {*forward_parameters(self.model), *self.label_names, "label", "label_ids"}
        return dataset.remove_columns([name for name in dataset.column_names or () if name not in wanted])

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """Return the optimizer class that the arguments name, and its keyword arguments."""
        kind, options = optimizer_class_and_options(args.optim, **optimizer_options(args))
        return kind, {"lr": args.learning_rate, **options}

    def get_optimizer_group(self, param: Any = None) -> Any:
        """Return the optimizer group of a parameter or its name; without one, the parameters of every group."""
        if self.optimizer is None:
            raise ConfigError("there is no optimizer yet: train() creates it")
        groups = self.optimizer.param_groups
        if param is None:
            return [group["params"] for group in groups]
        wanted = dict(self.model.named_parameters()).get(param) if isinstance(param, str) else param
        for group in groups:
            if any(each is wanted for each in group["params"]):
                return group
        named = repr(param) if isinstance(param, str) else f"a parameter of shape {tuple(param.shape)}"
        raise ConfigError(f"the optimizer has no group with {named}: it is not a parameter of the model, or is frozen")

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: loopwright uploads nothing."""
        raise ConfigError("push_to_hub is not supported: call save_model() and upload the folder with huggingface_hub")

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: write a search as a loop over trainers."""
        raise ConfigError(
            "hyperparameter_search is not supported: create a Trainer with model_init for every set of arguments, in "
            "your own loop or in an objective function of optuna"
        )
