"""The exceptions loopwright raises on purpose.

`ConfigError` and `DataError` are also ValueErrors, so code that catches ValueError keeps working.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from loopwright.terminal import user_traceback

P = ParamSpec("P")
R = TypeVar("R")
_OF_THE_OPTIMIZER = ("lr", "learning_rate", "weight_decay", "momentum", "betas")
# Arguments as other libraries call them.
_OTHER_ARGUMENTS = {
    **dict.fromkeys(("epochs", "n_epochs", "max_epochs", "num_train_epochs"), "num_epochs"),
    **dict.fromkeys(("batch_size", "bs", "per_device_train_batch_size"), "per_device_batch_size"),
    **dict.fromkeys(
        ("val_dataset", "valid_dataset", "validation_dataset", "validation_data", "val_data"), "eval_dataset"
    ),
    **dict.fromkeys(("train_data", "train_ds", "training_data", "data"), "train_dataset"),
    **dict.fromkeys(("loss", "loss_fn", "criterion", "loss_function"), "loss_func"),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "create_scheduler_fn"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "clip_grad", "clip_grad_norm"), "gradient_clip_norm"),
    **dict.fromkeys(("accumulate_grad_batches", "accumulation_steps", "grad_accum"), "gradient_accumulation_steps"),
    **dict.fromkeys(("precision", "fp16", "bf16", "amp"), "mixed_precision"),
    **dict.fromkeys(("num_workers", "shuffle", "drop_last", "pin_memory"), "train_dataloader_kwargs"),
    **dict.fromkeys(("eval_steps", "eval_every", "val_check_interval"), "evaluate_every"),
    **dict.fromkeys(("save_dir", "output_dir", "checkpoint_dir"), "checkpoints"),
    **{"patience": "early_stopping_patience", "min_delta": "early_stopping_threshold", "monitor": "watch_metric"},
    **{"path": "save_path", "filepath": "save_path", "mode": "greater_is_better", "logging_steps": "log_every"},
    **{"opt": "optimizer", "max_steps": "max_num_train_steps", "resume": "resume_from", "compute_metrics": "metrics"},
}


def near_names(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return the known names of the same kind that were probably meant, nearest first: a few letters differ at most.

    A name that begins with the word, or the other way round, counts as near.
    """
    found = []
    for name in dict.fromkeys(known):
        one, other = (each.casefold().replace("-", "_") for each in (word, name))
        limit = min(max(1, max(len(one), len(other)) // 4), min(len(one), len(other)) - 1)
        begins = min(len(one), len(other)) >= 3 and (one.startswith(other) or other.startswith(one))
        edits = abs(len(one) - len(other)) if begins or one == other else _edits(one, other, limit)
        if begins or edits <= max(limit, 0):
            found.append((edits, name))
    return [name for _, name in sorted(found, key=lambda each: each[0])][:most]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant; None if none is near."""
    return next(iter(near_names(word, known, 1)), None)


def _edits(one: str, other: str, limit: int) -> int:
    """Return how many letters are added, left out, replaced or swapped; more than `limit` if they are more."""
    if abs(len(one) - len(other)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for place, letter in enumerate(one, 1):
        last, before, row = before, row, [place]
        for at, its in enumerate(other, 1):
            cost = min(before[at] + 1, row[-1] + 1, before[at - 1] + (letter != its))
            if place > 1 and at > 1 and letter == other[at - 2] and its == one[place - 2]:
                cost = min(cost, last[at - 2] + 1)
            row.append(cost)
        if min(row) > limit:
            return limit + 1
    return row[-1]


class LoopwrightError(Exception):
    """Base of every error that loopwright raises on purpose.

    The command line and `--json` show its fields; `str()` joins them.

    Attributes:
        code: the kind of error, such as "data.column" (`lw explain errors` lists them); None if it has none.
        what: the problem.
        saw: lines of evidence.
        fix: the nearest fix, which can be followed as it is: flags for the same command, `NEW instead of OLD`,
            `leave out FLAG`, a shell command, or an edit. Alternatives have "   or   " between them.
        flag: the argument at fault.
    """

    nearest: str | None = None

    def __init__(
        self,
        what: str = "",
        *,
        code: str | None = None,
        saw: Iterable[str] = (),
        fix: str | None = None,
        flag: str | None = None,
    ) -> None:
        super().__init__(what)
        self.code, self.what, self.saw, self.fix, self.flag = code, what, tuple(saw), fix, flag

    def __str__(self) -> str:
        head = self.what if self.code is None else f"error[{self.code}]: {self.what}"
        hint = f": did you mean {self.nearest}?" if self.nearest is not None else ""
        fix = [] if self.fix is None else [f"  fix: {self.fix}"]
        return "\n".join([head + hint, *(f"  {line}" for line in self.saw), *fix])

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the message first, then the user's own frames."""
        return user_traceback(self, (os.path.dirname(__file__),))

    def __reduce__(self) -> tuple[Callable[..., LoopwrightError], tuple[Any, ...]]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[LoopwrightError], args: tuple[Any, ...], fields: dict[str, Any]) -> LoopwrightError:
    """Rebuild an error in another process, whatever the arguments of its constructor are."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class ConfigError(LoopwrightError, ValueError):
    """An argument that cannot work, found before training starts.

    Attributes:
        given: the value of the argument, as it was given.
        choices: the values that it may have, if they are few.
        nearest: the choice, or the known name, that is most similar to the given one.
    """

    def __init__(
        self,
        what: str = "",
        *,
        given: Any = None,
        choices: Iterable[str] = (),
        nearest: str | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(what, **fields)
        self.given, self.choices, self.nearest = given, tuple(choices), nearest


class ConfigTypeError(ConfigError, TypeError):
    """An argument of the wrong kind, found before training starts; also a TypeError."""


class ConfigRuntimeError(ConfigError, RuntimeError):
    """Arguments of `hf.Trainer` that exclude each other; also a RuntimeError, as in transformers."""


class DataError(LoopwrightError, ValueError):
    """A dataset, loader or batch that cannot be trained on."""


class InputError(DataError):
    """Unusable input from the user (a file, a column, a label, an option), found before training starts.

    It always has a code, one of `loopwright.sources.CODES`, and a fix.
    """

    def __init__(self, code: str, what: str, *, saw: Iterable[str] = (), fix: str, flag: str | None = None) -> None:
        super().__init__(what, code=code, saw=saw, fix=fix, flag=flag)


class MemoryLimitError(LoopwrightError):
    """Memory ran out, and nothing smaller could be tried.

    If torch has its own error for that (`torch.OutOfMemoryError`), this is a subclass of it too. `code` is
    "memory.train" or "memory.eval".
    """

    def __init__(self, code: str, what: str, *, saw: Iterable[str] = (), fix: str) -> None:
        super().__init__(what, code=code, saw=saw, fix=fix)


class BatchLossError(LoopwrightError, ValueError):
    """A batch-loss method returned a value that cannot be used as a loss."""


class CheckpointError(LoopwrightError):
    """A checkpoint that cannot be written, or cannot be trusted."""


class AnotherProcessError(LoopwrightError):
    """Another process of the run has failed, and this one stops with it; the message has its rank and error."""


class StopTrainingError(Exception):
    """Raise it in any callback or hook to end the run at once; its message is printed as the reason.

    The run-end hooks and events still run, and `train()` returns normally.
    """


class Preempted(LoopwrightError):
    """A signal (SIGTERM, SIGUSR1, SIGHUP) stopped the run; its state is saved and can be resumed.

    `train()` raises it after the run-end events; Ctrl-C raises KeyboardInterrupt instead.

    Attributes:
        signal_name: such as "SIGTERM".
    """

    signal_name: str = "a signal"


class CallbackMethodNotImplementedError(Exception):
    """A callback that does not implement an event may raise this from it to be skipped.

    Kept for compatibility: a callback that simply lacks the method is skipped without it.
    """


def explains_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function name the right argument where it is called with a wrong one."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            raise explained(error, function, args, kwargs) from None

    return wrapper


def explained(error: Exception, function: Callable[..., Any], args: Any, kwargs: Any) -> Exception:
    """Return an error of a method as users get it: arguments named, and in a notebook without our frames."""
    if isinstance(error, TypeError) and not isinstance(error, LoopwrightError):
        signature = inspect.signature(function)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as misfit:
            return _wrong_arguments(str(misfit), function, signature, args[0], kwargs)
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and not hasattr(error, "_render_traceback_"):
        error._render_traceback_ = lambda: user_traceback(error, (os.path.dirname(__file__),))  # type: ignore[attr-defined]
    return error


def _wrong_arguments(
    misfit: str, function: Callable[..., Any], signature: inspect.Signature, owner: Any, kwargs: Any
) -> ConfigTypeError:
    own = [name for name in signature.parameters if name != "self"]
    name = function.__qualname__.split(".")[-2] if function.__name__ == "__init__" else function.__name__
    for given in [each for each in kwargs if each not in own]:
        if given in _OF_THE_OPTIMIZER:
            made = f"torch.optim.AdamW(model.parameters(), {'lr' if given == 'learning_rate' else given}=...)"
            what = f"{name}() has no argument {given!r}: it belongs to the optimizer, {made}"
            return ConfigTypeError(what, given=given)
        meant = _OTHER_ARGUMENTS.get(given, given)
        near = meant if meant in own else nearest(given, own)
        others = {"Trainer": type(owner).__init__, "train": getattr(owner, "train", None)}
        for other, method in others.items():
            if near is None and method is not None and meant in inspect.signature(method).parameters:
                return ConfigTypeError(
                    f"{name}() has no argument {given!r}: pass {meant}= to {other}(...)", given=given
                )
        listed = "" if near else f"; it has {', '.join(own)}"
        return ConfigTypeError(f"{name}() has no argument {given!r}{listed}", given=given, choices=own, nearest=near)
    return ConfigTypeError(f"{name}(): {misfit}. Its arguments are {', '.join(own)}.")
