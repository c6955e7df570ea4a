"""The API of transformers' Trainer on loopwright's loop: change the import, keep the script.

    from loopwright.hf import Trainer, TrainingArguments

transformers itself is needed only for tokenizers and pretrained models.
"""

from __future__ import annotations

from loopwright.config import (
    HfArg,
    HfArgumentParser,
    IntervalStrategy,
    ParallelMode,
    SaveStrategy,
    SchedulerType,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)
from loopwright.data.collators import (
    DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    DefaultDataCollator,
    default_data_collator,
)
from loopwright.hf.callbacks import (
    CallbackHandler,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)
from loopwright.hf.loaders import DataCollator
from loopwright.hf.outputs import (
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    TrainOutput,
    get_last_checkpoint,
    set_seed,
    speed_metrics,
)
from loopwright.hf.replacement import install, uninstall
from loopwright.hf.search import BestRun
from loopwright.hf.seq2seq import Seq2SeqTrainer
from loopwright.hf.state import ExportableState, TrainerControl, TrainerState
from loopwright.hf.trainer import Trainer
from loopwright.schedulers import get_scheduler

__all__ = [
    "BestRun",
    "CallbackHandler",
    "DataCollator",
    "DataCollatorForLanguageModeling",
    "DataCollatorForMultipleChoice",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorWithFlattening",
    "DataCollatorWithPadding",
    "DefaultDataCollator",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "EvalLoopOutput",
    "EvalPrediction",
    "ExportableState",
    "HfArg",
    "HfArgumentParser",
    "IntervalStrategy",
    "ParallelMode",
    "PredictionOutput",
    "PrinterCallback",
    "ProgressCallback",
    "SaveStrategy",
    "SchedulerType",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "default_data_collator",
    "get_last_checkpoint",
    "get_scheduler",
    "install",
    "set_seed",
    "speed_metrics",
    "uninstall",
]
