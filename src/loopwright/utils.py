"""Re-exports under the module name that users of pytorch-accelerated know."""

from __future__ import annotations

import importlib
from typing import Any

from loopwright.callbacks.ema import ModelEma
from loopwright.data.defaults import LIMIT_BATCHES_ENV_VAR, DataLoaderSlice, LimitBatches, worker_init_fn
from loopwright.engine.nested import remove_padding
from loopwright.engine.processes import local_process_zero_first, local_process_zero_only, world_process_zero_only

__all__ = [
    "LIMIT_BATCHES_ENV_VAR",
    "DataLoaderSlice",
    "LimitBatches",
    "ModelEma",
    "local_process_zero_first",
    "local_process_zero_only",
    "notebook_launcher",  # noqa: F822 - see __getattr__
    "remove_padding",
    "worker_init_fn",
    "world_process_zero_only",
]


def __getattr__(name: str) -> Any:
    if name == "notebook_launcher":  # accelerate's, which is imported when it is asked for
        return importlib.import_module("loopwright").notebook_launcher
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
