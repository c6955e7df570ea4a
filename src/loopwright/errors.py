"""The exceptions loopwright raises on purpose.

`ConfigError` and `DataError` are also ValueErrors, so code that catches ValueError keeps working.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class LoopwrightError(Exception):
    """Base of every error that loopwright raises on purpose.

    The command line and `--json` show its fields; `str()` joins them.

    Attributes:
        code: the kind of error, such as "data.column" (`lw explain errors` lists them); None if it has none.
        what: the problem.
        saw: lines of evidence.
        fix: the nearest fix.
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
