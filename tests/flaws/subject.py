"""The package under test, and the small things the flaw tests train.

`LOOPWRIGHT_FLAWS_SUBJECT` names the package (default: loopwright). Its modules and names are looked up on
first use, so a package that lacks one fails only the tests that need it:

    subject.Trainer, subject.callbacks.EarlyStoppingCallback, subject.module("tracking").LossTracker
"""

import functools
import importlib
import os

import torch

import toys
from toys import data, fit, network, weights  # noqa: F401 - for the tests beside this file

PACKAGE = os.environ.get("LOOPWRIGHT_FLAWS_SUBJECT", "loopwright")
MODULES = ("trainer", "callbacks", "tracking", "run_config", "schedulers", "finetuning", "utils", "errors")

torch.set_num_threads(1)  # the thread count changes the last bits of a sum


def module(name: str = ""):
    return importlib.import_module(f"{PACKAGE}.{name}" if name else PACKAGE)


def __getattr__(name: str):
    if name.startswith("_"):
        raise AttributeError(name)
    return module(name) if name in MODULES else getattr(module(), name)


def callback(**events):
    """A callback made of functions, as `toys.callback` makes one."""
    return toys.callback(module("callbacks").TrainerCallback, **events)


def stop_at(event: str, reason: str = "enough"):
    """A callback that ends the run at an event."""

    def stop(trainer, **kwargs):
        raise module("callbacks").StopTrainingError(reason)

    return callback(**{event: stop})


@functools.cache
def recording_trainer_class():
    """The package's Trainer, writing down what its loop does."""
    return type("RecordingTrainer", (toys.Recording, module("trainer").Trainer), {})


def trainer(callbacks=(), model=None, cls=None, **kwargs):
    """A trainer of a small model with SGD; a recording one unless `cls` says otherwise."""
    return toys.trainer_of(callbacks, model, cls=cls or recording_trainer_class(), **kwargs)
