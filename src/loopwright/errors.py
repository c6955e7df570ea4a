"""The exceptions loopwright raises on purpose.

`ConfigError` and `DataError` are also ValueErrors, so code that catches ValueError keeps working. Their messages
contain the given value, the expected one, and the nearest fix.
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
    """Unusable input from the user (a file, a column, a label, an option), found before training starts.

    `code` names the kind of error ("data.column"); `loopwright.sources.CODES` describes each. `what` is the problem,
    `saw` lines of evidence, `fix` the nearest fix. `str()` joins them.
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
    """Rebuild an InputError in another process: exceptions are unpickled from positional arguments only."""
    return kind(code, what, saw=saw, fix=fix)


class MemoryLimitError(LoopwrightError):
    """Memory ran out, and nothing smaller could be tried.

    If torch has its own error for that (`torch.OutOfMemoryError`), this is a subclass of it too. `code` is
    "memory.train" or "memory.eval"; `what`, `saw` and `fix` are as in `InputError`.
    """

    def __init__(self, code: str, what: str, *, saw: Iterable[str] = (), fix: str) -> None:
        self.code = code
        self.what = what
        self.saw = tuple(saw)
        self.fix = fix
        super().__init__("\n".join([f"error[{code}]: {what}", *(f"  {line}" for line in self.saw), f"  fix: {fix}"]))


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
