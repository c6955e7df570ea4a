"""The run config: the read-only numbers of one run, as resolved by the trainer."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from loopwright.errors import nearest

# A sampler holds its dataset, and often a generator that cannot be copied.
_KEPT_BY_REFERENCE = frozenset({"sampler", "batch_sampler"})


@dataclass(frozen=True)
class TrainerRunConfig:
    """The resolved numbers of the current run, as attributes or by name: `run_config["num_epochs"]`."""

    num_epochs: int  # epochs of the run
    train_per_device_batch_size: int  # samples of a training micro-batch
    train_dl_kwargs: dict[str, Any] | None  # arguments of the training loader; None without one
    eval_per_device_batch_size: int  # samples of an evaluation micro-batch
    eval_dl_kwargs: dict[str, Any] | None  # arguments of the evaluation loader; None without one
    gradient_accumulation_steps: int  # micro-batches per update on each process
    gradient_clip_value: float | None  # bound of each gradient element; None does not clip
    train_total_batch_size: int  # samples of an update over all processes
    eval_total_batch_size: int  # samples that all processes evaluate at a time
    num_update_steps_per_epoch: int  # micro-batches of all processes per epoch over the accumulation
    num_local_update_steps_per_epoch: int  # updates per epoch of each process
    max_num_train_steps: int | None  # the given bound on updates, or a number that no run reaches
    is_local_process_zero: bool  # whether this is rank 0 of its machine
    is_world_process_zero: bool  # whether this is rank 0
    is_distributed: bool  # whether several processes may take part
    mixed_precision: str  # "no", "fp16", "bf16" or another type known to the engine
    num_processes: int

    def __getitem__(self, name: str) -> Any:
        names = list(self)
        if name not in names:
            near = nearest(str(name), names)
            hint = f"the nearest name is {near!r}" if near else f"its names are {', '.join(names)}"
            raise KeyError(f"the run config has no {name!r}; {hint}")
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, as a dict does; this also implements `name in run_config`."""
        return (field.name for field in fields(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the values in a dict that can be changed freely; loader arguments are deep copies where possible."""
        return {name: _detached(getattr(self, name)) for name in self}


def _detached(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: each if name in _KEPT_BY_REFERENCE else _copied(each) for name, each in value.items()}
    return value


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    # Raised by foreign objects that refuse to be copied.
    except (TypeError, ValueError, AttributeError, RuntimeError, copy.Error):
        return value


def create_run_config(
    run: Any,
    per_device_batch_size: int,
    num_epochs: int,
    gradient_accumulation_steps: int,
    max_num_train_steps: int | None,
    gradient_clip_value: float | None,
) -> TrainerRunConfig:
    """Compute the numbers of a run from its loaders and the arguments of `train`; 0 updates if a length is unknown."""
    train_batch_size = _batch_size(run.train_loader, run.train_loader_kwargs) or per_device_batch_size
    eval_batch_size = _batch_size(run.eval_loader, run.eval_loader_kwargs) or per_device_batch_size
    accelerator, processes = run.accelerator, run.accelerator.num_processes
    try:
        batches = len(run.train_loader)
    except TypeError:  # there is none, or its length is not known
        batches = 0
    updates = math.ceil(batches / gradient_accumulation_steps)
    updates_of_all = math.ceil(batches * processes / gradient_accumulation_steps)
    if max_num_train_steps is not None and updates:
        num_epochs = min(num_epochs, math.ceil(max_num_train_steps / updates))
    return TrainerRunConfig(
        num_epochs=num_epochs,
        train_per_device_batch_size=train_batch_size,
        train_dl_kwargs=run.train_loader_kwargs,
        eval_per_device_batch_size=eval_batch_size,
        eval_dl_kwargs=run.eval_loader_kwargs,
        gradient_accumulation_steps=gradient_accumulation_steps,
        gradient_clip_value=gradient_clip_value,
        train_total_batch_size=train_batch_size * processes * gradient_accumulation_steps,
        eval_total_batch_size=eval_batch_size * processes,
        num_update_steps_per_epoch=updates_of_all,
        num_local_update_steps_per_epoch=updates,
        max_num_train_steps=num_epochs * updates_of_all + 1 if max_num_train_steps is None else max_num_train_steps,
        is_local_process_zero=accelerator.is_local_main_process,
        is_world_process_zero=accelerator.is_main_process,
        is_distributed=str(accelerator.distributed_type.value) != "NO",
        mixed_precision=accelerator.mixed_precision,
        num_processes=processes,
    )


def _batch_size(loader: Any, kwargs: Mapping[str, Any] | None) -> int | None:
    batches = getattr(loader, "batch_sampler", None)
    told = (getattr(loader, "batch_size", None), getattr(batches, "batch_size", None), (kwargs or {}).get("batch_size"))
    return next((size for size in told if isinstance(size, int) and size > 0), None)
