"""loopwright: the training loop you can read on one screen, as fast as the hardware, that never loses a run.

Importing this package imports nothing else: every name is looked up when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import notebook_launcher
    from accelerate.utils import set_seed

    from loopwright.api import Run, check, evaluate, predict, resume, train
    from loopwright.checkpoint import Checkpointing
    from loopwright.errors import LoopwrightError, StopTrainingError
    from loopwright.timm_trainer import TrainerWithTimmScheduler
    from loopwright.trainer import Trainer, TrainerPlaceholderValues

_HOMES = {
    **dict.fromkeys(("Run", "check", "evaluate", "predict", "resume", "train"), "loopwright.api"),
    **dict.fromkeys(("LoopwrightError", "StopTrainingError"), "loopwright.errors"),
    "Checkpointing": "loopwright.checkpoint",
    "Trainer": "loopwright.trainer",
    "TrainerPlaceholderValues": "loopwright.schedulers",
    "TrainerWithTimmScheduler": "loopwright.timm_trainer",
    "notebook_launcher": "accelerate",
    "set_seed": "accelerate.utils",
}

__all__ = [
    "Checkpointing",
    "LoopwrightError",
    "Run",
    "StopTrainingError",
    "Trainer",
    "TrainerPlaceholderValues",
    "TrainerWithTimmScheduler",
    "__version__",
    "check",
    "evaluate",
    "logger",
    "notebook_launcher",
    "predict",
    "resume",
    "set_seed",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "__version__":
        from loopwright.version import package_version

        return package_version()
    if name == "logger":
        import logging

        return logging.getLogger("loopwright")
    raise AttributeError(f"module 'loopwright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
