"""Put loopwright's trainer in the place of transformers' own, for libraries that subclass it.

import loopwright.hf
loopwright.hf.install()
from trl import SFTTrainer          # now a subclass of loopwright.hf.Trainer
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from loopwright.config import TrainingArguments
from loopwright.errors import ConfigError

# The modules of transformers that define the replaced classes.
_HOMES = ["trainer", "training_args", "trainer_seq2seq", "training_args_seq2seq", "trainer_callback", "trainer_utils"]
_SUBCLASSED = ("Trainer", "TrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments")
_REPLACED = (
    *_SUBCLASSED,
    *("TrainerCallback", "CallbackHandler", "DefaultFlowCallback", "PrinterCallback", "ProgressCallback"),
    *("EarlyStoppingCallback", "ExportableState", "TrainerControl", "TrainerState"),
    *("EvalPrediction", "EvalLoopOutput", "PredictionOutput", "TrainOutput"),
    *("IntervalStrategy", "SaveStrategy", "SchedulerType", "ParallelMode"),
)

_replaced: list[tuple[Any, str, Any]] = []  # module, name, and the object it had


def install() -> None:
    """Replace transformers' Trainer, TrainingArguments, callbacks and outputs in every module that exports them.

    Call it before the import of a library that subclasses the Trainer. A second call is a no-op.

    Raises:
        ConfigError: transformers is missing, or a module already uses one of its classes.
    """
    if _replaced:
        return
    try:
        homes = [importlib.import_module(f"transformers.{name}") for name in _HOMES]
    except ImportError as error:
        fix = "pip install 'loopwright[hf]'"
        raise ConfigError(f"install() needs transformers: {error}", code="install.transformers", fix=fix) from error
    originals = {name: next(vars(home)[name] for home in homes if name in vars(home)) for name in _REPLACED}
    for user, library in _users(originals):
        raise ConfigError(
            f"install() comes too late: {user} is transformers' own class, or a subclass of it",
            code="install.late",
            fix=f"call loopwright.hf.install() before the first import from {library}",
        )
    own = importlib.import_module("loopwright.hf")
    TrainingArguments.creates_state = True
    ours = {id(original): getattr(own, name) for name, original in originals.items()}
    modules = _of_transformers()
    for package in modules:
        if package.__name__ == "transformers":
            for name in originals:
                getattr(package, name, None)  # it loads its classes on access
    for module in modules:
        for name, value in list(vars(module).items()):
            if id(value) in ours:
                _replaced.append((module, name, value))
                setattr(module, name, ours[id(value)])


def uninstall() -> None:
    """Undo `install`. Classes that were derived in between keep loopwright's as their base."""
    TrainingArguments.creates_state = False
    while _replaced:
        module, name, original = _replaced.pop()
        setattr(module, name, original)


def _loaded() -> list[tuple[str, Any]]:
    return [(key, module) for key, module in sys.modules.items() if isinstance(module, type(sys))]


def _of_transformers() -> list[Any]:
    """Return transformers' modules; others may hold a package that its own import has replaced in `sys.modules`."""
    held = [value for _, module in _loaded() for value in list(vars(module).values())]
    modules = [each for each in (*sys.modules.values(), *held) if issubclass(type(each), type(sys))]
    found = {id(each): each for each in modules if str(vars(each).get("__name__")).partition(".")[0] == "transformers"}
    return list(found.values())


def _users(originals: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names by which other modules already hold transformers' classes or subclasses, and whose they are."""
    taken = tuple(originals[name] for name in _SUBCLASSED)
    others = [each for each in _loaded() if each[0].partition(".")[0] not in ("transformers", "loopwright")]
    for key, module in others:
        for name, value in list(vars(module).items()):
            if issubclass(type(value), type) and issubclass(value, taken):  # isinstance would ask the value
                library = value.__module__.partition(".")[0]
                yield f"{key}.{name}", "transformers" if library == "__main__" else library
