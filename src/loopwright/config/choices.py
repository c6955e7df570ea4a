"""Named values of fields. They are strings: `args.eval_strategy == "steps"` holds."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, TypeVar

from loopwright.config.secrets import is_secret
from loopwright.errors import ConfigError, nearest

Kind = TypeVar("Kind", bound=Enum)


class NamedChoice(str, Enum):
    """A choice that compares, prints and is stored as a string."""

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, specification: str) -> str:
        return format(self.value, specification)


class IntervalStrategy(NamedChoice):
    """How often something happens: never, every so many updates, or after each epoch."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


class SaveStrategy(NamedChoice):
    """When checkpoints are written; `BEST` means after each evaluation that is the best so far."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"


class SchedulerType(NamedChoice):
    """The named learning rate schedules."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    INVERSE_SQRT = "inverse_sqrt"
    REDUCE_ON_PLATEAU = "reduce_lr_on_plateau"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    COSINE_WARMUP_WITH_MIN_LR = "cosine_warmup_with_min_lr"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"
    GREEDY = "greedy"


class ParallelMode(NamedChoice):
    """Whether this process is one of several; several devices in one process are not supported."""

    NOT_PARALLEL = "not_parallel"
    NOT_DISTRIBUTED = "not_distributed"
    DISTRIBUTED = "distributed"


def shown(name: str, value: Any) -> str:
    """Return the value of a field for a message: a token only by its name."""
    return f"<{name.upper()}>" if is_secret(name) else repr(value)


def choose(kind: type[Kind], name: str, value: Any) -> Kind:
    """Return the choice of this kind that matches a string or another library's enum."""
    text = value.value if isinstance(value, Enum) else value
    try:
        return kind(text)
    except ValueError:
        raise not_among(f"{name} must be", text, [member.value for member in kind], flag=name) from None


def not_among(subject: str, given: Any, choices: Iterable[Any], **fields: Any) -> ConfigError:
    """Return the error about a value that is not among the choices."""
    known = [str(choice) for choice in choices]
    what = f"{subject} one of {', '.join(known)}, got {given!r}"
    return ConfigError(what, given=given, choices=known, nearest=nearest(str(given), known), **fields)


def must_be(name: str, expected: str, given: Any, more: str = "", **fields: Any) -> ConfigError:
    """Return the error about the value of a field."""
    return ConfigError(f"{name} must be {expected}, got {given!r}{more}", flag=name, given=given, **fields)
