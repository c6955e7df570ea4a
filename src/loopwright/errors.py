"""The exceptions loopwright raises on purpose.

`ConfigError` and `DataError` are also ValueErrors, so code that catches ValueError goes on working.
Their texts say what was given, what was expected, and the nearest fix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class LoopwrightError(Exception):
    """Base of every error that loopwright raises on purpose."""


class ConfigError(LoopwrightError, ValueError):
    """An argument that cannot work, found before training starts."""


class ConfigTypeError(ConfigError, TypeError):
    """An argument of the wrong kind, found before training starts; also a TypeError."""


class DataError(LoopwrightError, ValueError):
    """A dataset, loader or batch that cannot be trained on."""


class InputError(DataError):
    """Something the user gave (a file, a column, a label, an option) that cannot work, found before training starts.

    `code` names the kind of error ("data.column"); `loopwright.sources.CODES` has a sentence for each. `what` says what
    is wrong, `saw` holds lines of evidence, `fix` the nearest thing to do. `str()` puts them under each other.
    """

    def __init__(self, code: str, what: str, *, saw: Iterable[str] = (), fix: str) -> None:
        self.code = code
        self.what = what
        self.saw = tuple(saw)
        self.fix = fix
        super().__init__("\n".join([f"error[{code}]: {what}", *(f"  {line}" for line in self.saw), f"  fix: {fix}"]))

    def __reduce__(self) -> tuple[Callable[..., InputError], tuple[type[InputError], str, str, tuple[str, ...], str]]:
        return _rebuild_input_error, (type(self), self.code, self.what, self.saw, self.fix)


def _rebuild_input_error(kind: type[InputError], code: str, what: str, saw: tuple[str, ...], fix: str) -> InputError:
    """Make an InputError again in another process: exceptions are rebuilt from positional arguments only."""
    return kind(code, what, saw=saw, fix=fix)


class MemoryLimitError(LoopwrightError):
    """Memory ran out where nothing smaller could be tried.

    Where torch raises its own errors for that, this is one of them too (`torch.OutOfMemoryError`). `code` is
    "memory.train" or "memory.eval"; `what`, `saw` and `fix` are as of an `InputError`.
    """

    def __init__(self, code: str, what: str, *, saw: Iterable[str] = (), fix: str) -> None:
        self.code = code
        self.what = what
        self.saw = tuple(saw)
        self.fix = fix
        super().__init__("\n".join([f"error[{code}]: {what}", *(f"  {line}" for line in self.saw), f"  fix: {fix}"]))


class BatchLossError(LoopwrightError, ValueError):
    """What a batch-loss method returned cannot be used as a loss."""


class CheckpointError(LoopwrightError):
    """A checkpoint that cannot be written, or cannot be trusted."""


class AnotherProcessError(LoopwrightError):
    """Another process of the run has failed, and this one ends with it; the text says which and why."""


class StopTrainingError(Exception):
    """Raise it in any callback or hook to end the run at once; its text is printed as the reason.

    The run-end hooks and events still run, and `train()` returns normally.
    """


class Preempted(LoopwrightError):
    """The run was asked to end by a signal (SIGTERM, SIGUSR1, SIGHUP), has saved itself and can be resumed.

    `train()` raises it after the run-end events; Ctrl-C raises KeyboardInterrupt instead.

    Attributes:
        signal_name: such as "SIGTERM".
    """

    signal_name: str = "a signal"


class CallbackMethodNotImplementedError(Exception):
    """A callback that does not implement an event may raise this from it to be skipped.

    Kept for compatibility: a callback that simply lacks the method is skipped without it.
    """
