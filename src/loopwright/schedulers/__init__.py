"""Learning rate schedules as functions of the update, and placeholders for counts that only the Trainer knows.

Three ways to define one: the classes (`CosineLrScheduler`, `WSDLrScheduler`), the schedules by name (`get_scheduler`),
and your own subclass of `StatefulSchedulerBase`. Any torch scheduler works with the Trainer too.
"""

from __future__ import annotations

from loopwright.schedulers.cosine_scheduler import CosineLrScheduler
from loopwright.schedulers.named import (
    SCHEDULES,
    GreedyLR,
    constant,
    constant_with_warmup,
    cosine,
    cosine_warmup_with_min_lr,
    cosine_with_min_lr,
    cosine_with_restarts,
    get_scheduler,
    inverse_sqrt,
    linear,
    polynomial,
    warmup_stable_decay,
)
from loopwright.schedulers.placeholders import TrainerPlaceholderValues, replace_trainer_placeholder_values, resolve
from loopwright.schedulers.scheduler_base import SchedulerBase, StatefulSchedulerBase
from loopwright.schedulers.wsd_scheduler import WSDLrScheduler, estimate_checkpoint_steps

__all__ = [
    "SCHEDULES",
    "CosineLrScheduler",
    "GreedyLR",
    "SchedulerBase",
    "StatefulSchedulerBase",
    "TrainerPlaceholderValues",
    "WSDLrScheduler",
    "constant",
    "constant_with_warmup",
    "cosine",
    "cosine_warmup_with_min_lr",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "estimate_checkpoint_steps",
    "get_scheduler",
    "inverse_sqrt",
    "linear",
    "polynomial",
    "replace_trainer_placeholder_values",
    "resolve",
    "warmup_stable_decay",
]
