"""The arguments of a run as inert data, from Python, a command line, YAML or JSON: no torch, no side effects."""

from __future__ import annotations

from loopwright.config.choices import IntervalStrategy, ParallelMode, SaveStrategy, SchedulerType
from loopwright.config.old_names import OldNameWarning
from loopwright.config.parser import HfArg, HfArgumentParser
from loopwright.config.training_arguments import Seq2SeqTrainingArguments, TrainingArguments

__all__ = [
    "HfArg",
    "HfArgumentParser",
    "IntervalStrategy",
    "OldNameWarning",
    "ParallelMode",
    "SaveStrategy",
    "SchedulerType",
    "Seq2SeqTrainingArguments",
    "TrainingArguments",
]
