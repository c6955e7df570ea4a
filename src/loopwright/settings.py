"""The settings of a run, and checks of all arguments of `train` before anything is touched.

Only real objects are checked (modules, optimizers, sized datasets): stand-ins in a user's tests pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sized
from dataclasses import dataclass, fields
from functools import partial
from numbers import Integral, Real
from types import FunctionType, GeneratorType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from loopwright.checkpoint import Checkpointing
from loopwright.engine.sharding import Sharding
from loopwright.errors import ConfigError, ConfigTypeError, DataError, nearest
from loopwright.quantities import counted
from loopwright.schedulers import SchedulerBase

STEP_MODES = ("auto", "eager", "compile", "graph")
PADDINGS = ("auto", "free", "keep")
NAN_POLICIES = ("stop", "skip")
BAD_SAMPLE_POLICIES = ("raise", "skip")
_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "step_mode": STEP_MODES,
    "padding": PADDINGS,
    "nan": NAN_POLICIES,
    "bad_samples": BAD_SAMPLE_POLICIES,
    "reduction": ("fast", "exact"),
    "oom": ("stop", "split"),
    "mixed_precision": (None, "no", "fp16", "bf16", "fp8"),
}
_COUNTS = ("num_epochs", "per_device_batch_size", "max_num_train_steps", "gradient_accumulation_steps", "log_every")


@dataclass(frozen=True)
class Interval:
    """A number of updates or epochs between two events."""

    count: int
    unit: str

    @classmethod
    def parse(cls, value: int | str | None) -> Interval:
        """Parse `evaluate_every`: None is every epoch, a number counts updates, or "2 epochs" and "500 updates"."""
        if value is None:
            return cls(1, "epoch")
        count, _, unit = str(value).partition(" ")
        unit = unit.strip().removesuffix("s") or "update"
        if not count.isdigit() or int(count) < 1 or unit not in ("update", "epoch"):
            raise ConfigError(f'evaluate_every must be a number of updates, "N updates" or "N epochs", got {value!r}')
        return cls(int(count), unit)

    def is_due(self, count: int, unit: str) -> bool:
        """Whether that many updates or epochs are a multiple of this interval."""
        return unit == self.unit and count % self.count == 0


@dataclass(frozen=True)
class RunSettings:
    """The checked arguments of `train`; creating it raises a ConfigError that names the invalid argument."""

    num_epochs: int = 1
    per_device_batch_size: int = 8
    max_num_train_steps: int | None = None
    gradient_accumulation_steps: int = 1
    gradient_clip_value: float | None = None
    gradient_clip_norm: float | None = None
    mixed_precision: str | None = None
    step_mode: str = "auto"
    padding: str = "auto"
    checkpoints: Checkpointing | None = None
    log_every: int = 50
    evaluate_every: Interval = Interval(1, "epoch")
    nan: str = "stop"
    bad_samples: str = "raise"
    reduction: str = "fast"
    sharding: Any = None
    oom: str = "stop"

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is None and name == "max_num_train_steps":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                is_data = name == "num_epochs" and isinstance(value, Sized) and not isinstance(value, str)
                hint = ". Write train(TensorDataset(inputs, targets), num_epochs=..., eval_dataset=...)"
                text = f"{name} must be a whole number of at least 1, got {value!r:.60}{hint if is_data else ''}"
                raise ConfigError(text, given=value)
        for name in ("gradient_clip_value", "gradient_clip_norm"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0):
                raise ConfigError(f"{name} must be a number above 0, or None for no clipping, got {value!r}")
        if self.checkpoints is not None and not isinstance(self.checkpoints, Checkpointing):
            raise ConfigTypeError(f"checkpoints must be a Checkpointing(directory, ...), got {self.checkpoints!r}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                *others, last = [f'"{choice}"' for choice in allowed if choice is not None]
                raise ConfigError(f"{name} must be {', '.join(others)} or {last}, got {getattr(self, name)!r}")
        Sharding.parse(self.sharding)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> RunSettings:
        """Return the settings among the arguments of `train`."""
        if not isinstance(arguments["seed"], Integral | None):
            raise ConfigTypeError(f"seed must be a whole number or None, got {arguments['seed']!r:.60}")
        given = {field.name: arguments[field.name] for field in fields(cls)}
        return cls(**{**given, "evaluate_every": Interval.parse(given["evaluate_every"])})

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self.gradient_clip_value is not None or self.gradient_clip_norm is not None


def check_is_idle(is_running: bool) -> None:
    """Raise a ConfigError if a run is started inside another one of the same trainer."""
    if is_running:
        raise ConfigError(
            "this trainer is in the middle of a training run, which another run would break. "
            "Inside a run use request_evaluation() or evaluate_copy(), or a separate trainer."
        )


def check_scheduler_factory(create_scheduler_fn: Any) -> None:
    """Raise a ConfigTypeError for a scheduler that is already created, or anything else that cannot be called."""
    if isinstance(create_scheduler_fn, (torch.optim.lr_scheduler.LRScheduler, SchedulerBase)):
        name = type(create_scheduler_fn).__name__
        raise ConfigTypeError(
            f"create_scheduler_fn must be a function that takes the optimizer and returns a scheduler, got a {name} "
            f"that is already created. Pass functools.partial({name}, ...) without the optimizer."
        )
    if create_scheduler_fn is not None and not callable(create_scheduler_fn):
        raise ConfigTypeError(f"create_scheduler_fn is not callable: {create_scheduler_fn!r}")


def check_order(model: Any, loss_func: Any, optimizer: Any) -> None:
    """Raise a ConfigTypeError for arguments of a Trainer that are in another order."""
    given = {"model": model, "loss_func": loss_func, "optimizer": optimizer}
    misplaced = [name for name in ("model", "loss_func") if isinstance(given[name], torch.optim.Optimizer)]
    misplaced += ["model"] if type(model).__module__ == "torch.nn.modules.loss" else []
    misplaced += ["optimizer"] if isinstance(optimizer, nn.Module) and not hasattr(optimizer, "step") else []
    if misplaced:
        kinds = ", ".join(f"{name} is of type {type(given[name]).__name__}" for name in misplaced)
        order = "Trainer(model, loss_func, optimizer)"
        raise ConfigTypeError(f"the arguments are in another order: {kinds}. Write {order}, or pass them by name.")


def check_parameters(model: Any, optimizer: Any, loss_func: Any = None) -> None:
    """Raise a ConfigError for classes in place of objects, a model with nothing to train, or a foreign optimizer."""
    for name, given, kind in (
        ("model", model, nn.Module),
        ("loss_func", loss_func, nn.Module),
        ("optimizer", optimizer, torch.optim.Optimizer),
    ):
        if isinstance(given, type) and issubclass(given, kind):
            made = f"{given.__name__}({'model.parameters(), ...' if name == 'optimizer' else '...'})"
            raise ConfigTypeError(f"{name} is the class {given.__name__} itself. Pass an instance: {made}.")
    if isinstance(optimizer, (str, FunctionType, GeneratorType, partial)):
        found = type(optimizer).__name__
        raise ConfigTypeError(
            f"optimizer is a {found}. Pass an optimizer: torch.optim.AdamW(model.parameters(), lr=...)."
        )
    if isinstance(model, FunctionType):
        raise ConfigTypeError("model is a function. Pass an nn.Module: its parameters are trained.")
    if not isinstance(model, nn.Module):
        return
    parameters = list(model.parameters())
    if not parameters:
        raise ConfigError(f"{type(model).__name__} has no parameters, so there is nothing to train")
    if not any(parameter.requires_grad for parameter in parameters):
        raise ConfigError(
            f"{type(model).__name__} has no trainable parameters: requires_grad is False on all {len(parameters)}. "
            "Unfreeze some, or use evaluate()."
        )
    if optimizer is None:
        raise ConfigError("the trainer has no optimizer, so it can evaluate and predict but not train")
    if isinstance(optimizer, torch.optim.Optimizer) and not holds_parameters(optimizer, model):
        raise ConfigError(
            f"the optimizer holds none of the parameters of {type(model).__name__}. It was probably created for "
            "another model, or before this one was replaced; create it from model.parameters()."
        )


def holds_parameters(optimizer: Any, model: nn.Module) -> bool:
    """Whether an optimizer holds at least one parameter of a model."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in held for parameter in model.parameters())


def check_dataset(dataset: Any, name: str, kwargs: dict[str, Any], batch_size: int) -> None:
    """Raise a ConfigTypeError for data or loader arguments of a wrong kind, and a DataError for no single batch."""
    arguments = name.replace("dataset", "dataloader_kwargs")
    if not isinstance(kwargs, Mapping):
        raise ConfigTypeError(f"{arguments} must be a dict of DataLoader's arguments, got {kwargs!r:.60}")
    known = inspect.signature(DataLoader.__init__).parameters
    if unknown := [each for each in kwargs if each not in known]:
        text = f"{arguments} has {unknown[0]!r}, which is not an argument of DataLoader"
        raise ConfigTypeError(text, given=unknown[0], choices=known, nearest=nearest(str(unknown[0]), known))
    if dataset is None and name != "train_dataset":
        return
    is_read = hasattr(type(dataset), "__getitem__") and (isinstance(dataset, Sized) or "sampler" in " ".join(kwargs))
    is_other = isinstance(dataset, (str, type)) or type(dataset).__name__ in ("DataFrame", "LazyFrame", "Series")
    is_other |= isinstance(dataset, Mapping) and 0 not in dataset
    if is_other or not (is_read or isinstance(dataset, (DataLoader, IterableDataset))):
        kind = "a class" if isinstance(dataset, type) else f"of type {type(dataset).__name__}"
        raise ConfigTypeError(
            f"{name} is {kind}, which has no samples by number. Pass TensorDataset(inputs, targets), a list of "
            "(input, target) pairs, an instance of a Dataset (__len__, __getitem__), an IterableDataset, a DataLoader."
        )
    is_pair = isinstance(dataset, (list, tuple)) and len(dataset) == 2
    is_pair = is_pair and all(isinstance(each, torch.Tensor) and each.dim() for each in dataset)
    if is_pair and len(dataset[0]) == len(dataset[1]) > 2:
        kind = type(dataset).__name__
        raise ConfigTypeError(f"{name} is a {kind} of tensors: pass TensorDataset(inputs, targets)")
    if isinstance(dataset, DataLoader):
        if not isinstance(dataset.dataset, IterableDataset) and len(dataset) == 0:
            raise DataError(f"{name} is a DataLoader without a batch: too few samples, or none. Check its dataset.")
        return
    if not isinstance(dataset, Sized):
        return
    size = len(dataset)
    if size == 0:
        raise DataError(f"{name} is empty: it has no samples")
    batch_size = kwargs.get("batch_size") or batch_size
    if kwargs.get("drop_last") and size < batch_size:
        raise DataError(
            f"{name} has {counted(size, 'sample')}, fewer than one batch of {batch_size}, and drop_last=True drops the "
            "only one. Lower the batch size or pass drop_last=False."
        )


def is_overridden(instance: Any, base: type, method: str) -> bool:
    """Whether an instance's method is not the base class's own."""
    return inspect.getattr_static(type(instance), method) is not inspect.getattr_static(base, method)
