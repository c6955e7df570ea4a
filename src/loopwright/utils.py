"""Re-exports under the module name that users of pytorch-accelerated know."""

from loopwright.callbacks.ema import ModelEma
from loopwright.data.defaults import LIMIT_BATCHES_ENV_VAR, DataLoaderSlice, LimitBatches, worker_init_fn
from loopwright.engine.nested import remove_padding
from loopwright.engine.processes import (
    local_process_zero_first,
    local_process_zero_only,
    world_process_zero_only,
)

__all__ = [
    "LIMIT_BATCHES_ENV_VAR",
    "DataLoaderSlice",
    "LimitBatches",
    "ModelEma",
    "local_process_zero_first",
    "local_process_zero_only",
    "remove_padding",
    "worker_init_fn",
    "world_process_zero_only",
]
