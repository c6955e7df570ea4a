"""Progress: all the state the loop itself has. Requests: what callbacks asked of it."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from types import CellType
from typing import Any

# How far an epoch is. A state saved by an epoch-end event knows by it what a resumed run must not do twice.
TRAINING, TRAINED, EVALUATED, FINISHED = range(4)


@dataclass(slots=True)
class Progress:
    """Where a run stands, always at an update boundary."""

    epoch: int = 0  # epochs finished
    update: int = 0  # optimizer updates finished, over the whole run
    samples: int = 0  # position in the current epoch: samples that its finished updates consumed, over all processes
    batch: int = 0  # micro-batches of the current epoch consumed by this process
    total_batches: int = 0  # micro-batches consumed by this process over the whole run
    reported: int = 0  # the update after which an epoch was last reported, whole or cut short by a limit
    stage: int = TRAINING  # of the current epoch: TRAINING, TRAINED (all of it), EVALUATED or FINISHED

    def advance(self, batches: int, samples: int) -> None:
        """Count one finished update of so many micro-batches (here) and samples (everywhere)."""
        self.update += 1
        self.samples += samples
        self.batch += batches
        self.total_batches += batches

    def end_epoch(self) -> None:
        """Count the epoch and go back to position 0."""
        self.epoch += 1
        self.samples = 0
        self.batch = 0
        self.stage = TRAINING

    def state_dict(self) -> dict[str, int]:
        """Return the integers by name."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        for name in self.state_dict():
            setattr(self, name, int(state[name]))


@dataclass(slots=True)
class Parts:
    """The number of parts that batches are cut into since memory ran out; saved with the run, and kept on a resume."""

    train: int = 1
    evaluation: int = 1


class StopKind(Enum):
    """What stopped a run early."""

    REQUEST = "request"  # a callback or a hook
    FILE = "file"  # a stop file in the run folder
    SIGNAL = "signal"
    NOT_FINITE = "not finite"  # a loss or a gradient
    OTHER_PROCESS = "other process"


class StopReason(str):
    """Why a run was stopped early: a text for people, with its `kind` for programs."""

    kind: StopKind
    rule: dict[str, Any] | None = None  # of the callback or trainer that decided it; see `Boundary.rule_of`

    def __new__(cls, text: str, kind: StopKind = StopKind.REQUEST) -> StopReason:  # noqa: D102
        reason = super().__new__(cls, text)
        reason.kind = kind
        return reason

    @classmethod
    def of(cls, cause: BaseException | str) -> StopReason:
        """Return the reason that an error carries, or the text of the error or of a request as one."""
        given = cause.args[0] if isinstance(cause, BaseException) and cause.args else cause
        return given if isinstance(given, cls) else cls(str(cause))


def rule_of(decider: Any) -> dict[str, str]:
    """Return the rule by which a callback or trainer stops a run: its class, plain attributes, and numbers in its code.

    Our own code is left out, and so are paths and long numbers: nobody types these, they come from a clock.
    """
    users = [base for base in type(decider).__mro__ if base.__module__.split(".")[0] not in ("loopwright", "builtins")]
    held = {name: each for base in reversed(users) for name, each in vars(base).items()}
    held |= getattr(decider, "__dict__", {})
    for name, function in [(name, getattr(each, "__func__", each)) for name, each in held.items()]:
        if inspect.isfunction(function):
            codes = [function.__code__]
            for code in codes:
                codes += filter(inspect.iscode, code.co_consts)  # lambdas within
            cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
            values = [*(each for code in codes for each in code.co_consts), *cells, *(function.__defaults__ or ())]
            held |= {f"{name}.{index}": each for index, each in enumerate(values) if not isinstance(each, str)}
    plain = {name: each for name, each in held.items() if isinstance(each, (bool, int, float, str)) and name[-1] != "_"}
    is_typed = {name: "/" not in each if isinstance(each, str) else len(str(each)) < 10 for name, each in plain.items()}
    return {"class": type(decider).__name__, **{name: repr(each) for name, each in plain.items() if is_typed[name]}}


@dataclass(slots=True)
class Requests:
    """What was asked of the loop, to be served at the next update boundary."""

    log: bool = False  # write a log
    evaluate: bool = False  # run an intermediate evaluation
    load: Path | None = None  # a checkpoint file to load when the run is over
    saves: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)  # of training states: folder and metadata
    stop: StopReason | None = None  # end the run, for this reason

    def any(self) -> bool:
        """Whether anything is asked for."""
        return bool(self.log or self.evaluate or self.saves or self.stop is not None)
