"""Callbacks: code that runs around the loop, without touching it."""

from loopwright.callbacks.base import EVENTS, CallbackHandler, TrainerCallback
from loopwright.callbacks.checkpoints import SaveBestModelCallback, SaveTrainingStateCallback, WSDCheckpointCallback
from loopwright.callbacks.console import LogMetricsCallback, PrintMetricsCallback, PrintProgressCallback
from loopwright.callbacks.devices import ConvertSyncBatchNormCallback, MoveModulesToDeviceCallback
from loopwright.callbacks.ema import ModelEma, ModelEmaCallback
from loopwright.callbacks.evaluation import LimitBatchesCallback, LimitEvalStepsCallback, StepBasedEvaluationCallback
from loopwright.callbacks.extra_state import KeepStateCallback
from loopwright.callbacks.metrics import MetricsCallback
from loopwright.callbacks.profiling import ProfileCallback
from loopwright.callbacks.progress import ProgressBarCallback
from loopwright.callbacks.stopping import EarlyStoppingCallback, TerminateOnNaNCallback
from loopwright.callbacks.table import EpochTableCallback
from loopwright.callbacks.trackers import TrackerCallback
from loopwright.errors import CallbackMethodNotImplementedError, StopTrainingError

DEFAULT_CALLBACKS: tuple[type[TrainerCallback], ...] = (
    MoveModulesToDeviceCallback,
    TerminateOnNaNCallback,
    PrintProgressCallback,
    ProgressBarCallback,
    LogMetricsCallback,
)
CONSOLE_CALLBACKS: tuple[type[TrainerCallback], ...] = (*DEFAULT_CALLBACKS[:2], EpochTableCallback)
"""The callbacks of a trainer that is given none."""


def get_default_callbacks(progress_bar: bool = True) -> tuple[type[TrainerCallback], ...]:
    """Return `DEFAULT_CALLBACKS`, with or without the progress bar."""
    return tuple(cls for cls in DEFAULT_CALLBACKS if progress_bar or cls is not ProgressBarCallback)


__all__ = [
    "CONSOLE_CALLBACKS",
    "DEFAULT_CALLBACKS",
    "EVENTS",
    "CallbackHandler",
    "CallbackMethodNotImplementedError",
    "ConvertSyncBatchNormCallback",
    "EarlyStoppingCallback",
    "EpochTableCallback",
    "KeepStateCallback",
    "LimitBatchesCallback",
    "LimitEvalStepsCallback",
    "LogMetricsCallback",
    "MetricsCallback",
    "ModelEma",
    "ModelEmaCallback",
    "MoveModulesToDeviceCallback",
    "PrintMetricsCallback",
    "PrintProgressCallback",
    "ProfileCallback",
    "ProgressBarCallback",
    "SaveBestModelCallback",
    "SaveTrainingStateCallback",
    "StepBasedEvaluationCallback",
    "StopTrainingError",
    "TerminateOnNaNCallback",
    "TrackerCallback",
    "TrainerCallback",
    "WSDCheckpointCallback",
    "get_default_callbacks",
]
