"""Numbers that only the Trainer knows, and arithmetic on them before they are known.

A placeholder in a `functools.partial` represents a count of the coming run. Arithmetic on placeholders
builds an immutable expression; `replace_trainer_placeholder_values` turns expressions into numbers once
the run is known. Only objects of this module are ever evaluated, never text.

Epochs times updates per epoch are at most `max_num_train_steps`, whether an expression multiplies the two placeholders
or a function that gets both as arguments, as here:

Example:
    create_scheduler_fn = partial(
        OneCycleLR,
        max_lr=0.1,
        epochs=TrainerPlaceholderValues.NUM_EPOCHS,
        steps_per_epoch=TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH,
    )
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from numbers import Real
from typing import Any, TypeAlias

from loopwright.errors import ConfigError
from loopwright.protocols import TrainerLike

Number: TypeAlias = "int | float"
Operand: TypeAlias = "int | float | Expression"


def _binary(symbol: str) -> tuple[Callable[[Any, Operand], Operation], Callable[[Any, Operand], Operation]]:
    """Return an operator as a method of its left operand, and of its right one."""
    return (lambda self, other: _operation(symbol, self, other), lambda self, other: _operation(symbol, other, self))


def _unary(name: str) -> Callable[[Any], Operation]:
    return lambda self: _operation(name, self)


class Expression:
    """A number that is known once the run is: a placeholder, or arithmetic on placeholders."""

    __add__, __radd__ = _binary("+")
    __sub__, __rsub__ = _binary("-")
    __mul__, __rmul__ = _binary("*")
    __truediv__, __rtruediv__ = _binary("/")
    __floordiv__, __rfloordiv__ = _binary("//")
    __mod__, __rmod__ = _binary("%")
    __pow__, __rpow__ = _binary("**")
    __neg__, __pos__, __abs__, __floor__, __ceil__ = map(_unary, ("neg", "pos", "abs", "floor", "ceil"))

    def __round__(self, num_digits: int | None = None) -> Operation:
        return _operation("round", self) if num_digits is None else _operation("round", self, num_digits)


class TrainerPlaceholderValues(Expression, Enum):
    """The counts that a scheduler function may leave to the Trainer.

    Both update counts are the updates that a scheduler sees, so they are equal for any number of
    processes; both names are kept for compatibility.
    """

    NUM_EPOCHS = "epochs of the run"
    NUM_UPDATE_STEPS_PER_EPOCH = "optimizer updates per epoch"
    PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH = "optimizer updates per epoch, by its other name"
    TRAIN_DATALOADER_LEN = "micro-batches per epoch of the train loader"
    EVAL_DATALOADER_LEN = "micro-batches of the evaluation loader"

    @classmethod
    def placeholder_set(cls) -> set[str]:
        """Return the names of all placeholders."""
        return {placeholder.name for placeholder in cls}


@dataclass(frozen=True, repr=False)
class Operation(Expression):
    """An operator (a key of `_OPERATORS`) and its operands: numbers, placeholders and other operations."""

    operator: str
    operands: tuple[Operand, ...]

    @property
    def name(self) -> str:
        """The name of its only placeholder, or with several the whole expression in words."""
        names = {placeholder.name for placeholder in _placeholders(self)}
        return names.pop() if len(names) == 1 else repr(self)

    def __repr__(self) -> str:
        texts = [each.name if isinstance(each, TrainerPlaceholderValues) else repr(each) for each in self.operands]
        if self.operator.isalpha():
            return f"{self.operator}({', '.join(texts)})"
        return f"({texts[0]} {self.operator} {texts[1]})"


def resolve(trainer: TrainerLike, value: Any) -> Any:
    """Return the value with every expression in it replaced by a number of this trainer's run.

    It searches partials, lists, tuples and dictionaries. A value without expressions is returned as the same object. A
    ConfigError is raised if an expression needs something that this run does not have.
    """
    if isinstance(value, Expression):
        return _number(trainer, value)
    if isinstance(value, partial):
        value = _with_factors(trainer, value)
        parts = (value.func, value.args, value.keywords)
        function, args, keywords = resolved = tuple(resolve(trainer, part) for part in parts)
        return value if _are_same(resolved, parts) else partial(function, *args, **keywords)
    if isinstance(value, tuple):
        items = tuple(resolve(trainer, item) for item in value)
        if _are_same(items, value):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else items
    if isinstance(value, list | dict):
        keyed = list(value.items() if isinstance(value, dict) else enumerate(value))
        replaced = {key: new for key, item in keyed if (new := resolve(trainer, item)) is not item}
        changed: Any = copy.copy(value) if replaced else value
        for key, item in replaced.items():
            changed[key] = item
        return changed
    return value


def replace_trainer_placeholder_values(trainer: TrainerLike, instance: Any) -> Any:
    """Return a new partial with this trainer's numbers for its placeholders; anything else unchanged."""
    if not isinstance(instance, partial):
        return instance
    resolved = resolve(trainer, instance)
    return partial(resolved.func, *resolved.args, **resolved.keywords)


def _number(trainer: TrainerLike, value: Operand) -> Number:
    if isinstance(value, TrainerPlaceholderValues):
        count = _count(trainer, value)
        if count is None:
            raise ConfigError(
                f"{value.name} is not known for this run, whose train loader has no length: give the scheduler a "
                "number instead"
            )
        return count
    if isinstance(value, Operation):
        limit = _limit(trainer)
        if limit is not None and (bounded := _bounded_product(trainer, value, limit)) is not None:
            return bounded
        result: Number = _OPERATORS[value.operator](*(_number(trainer, operand) for operand in value.operands))
        return result
    assert not isinstance(value, Expression)
    return value


class _Factor(int):
    """The epochs of a run, or its updates per epoch: their product is at most the limit."""

    limit: int
    is_updates: bool

    def __mul__(self, other: Any) -> Any:
        is_total = isinstance(other, _Factor) and other.is_updates != self.is_updates
        return min(int(self) * int(other), self.limit) if is_total else int(self) * other

    __rmul__ = __mul__


def _with_factors(trainer: TrainerLike, value: partial[Any]) -> partial[Any]:
    """Return a partial that gets both the epochs and the updates per epoch with numbers whose product is bounded."""
    given = {each for each in (*value.args, *value.keywords.values()) if isinstance(each, TrainerPlaceholderValues)}
    limit = None if _EPOCHS not in given or given.isdisjoint(_UPDATES) else _limit(trainer)
    if limit is None:
        return value
    factors: dict[Any, _Factor] = {}
    for each in given & {_EPOCHS, *_UPDATES}:
        factors[each] = _Factor(_number(trainer, each))
        factors[each].limit, factors[each].is_updates = limit, each in _UPDATES

    def bounded(each: Any) -> Any:
        return factors.get(each, each) if isinstance(each, TrainerPlaceholderValues) else each

    return partial(
        value.func, *map(bounded, value.args), **{name: bounded(each) for name, each in value.keywords.items()}
    )


def _limit(trainer: TrainerLike) -> int | None:
    """Return `max_num_train_steps` if it ends the run before its epochs do."""
    limit: int | None = getattr(trainer.run_config, "max_num_train_steps", None)
    total = trainer.run_config.num_epochs * (_updates_per_epoch(trainer) or 0)
    return limit if isinstance(limit, int) and limit < total else None


def _bounded_product(trainer: TrainerLike, value: Operation, limit: int) -> Number | None:
    """Return a product with the epochs and the updates per epoch among its factors, these two bounded; else None."""
    factors, divisors = _factors(value)
    updates = next((each for each in factors if each in _UPDATES), None)
    if updates is None or _EPOCHS not in factors:
        return None
    factors.remove(_EPOCHS)
    factors.remove(updates)
    product: Number = math.prod((_number(trainer, factor) for factor in factors), start=limit)
    for divisor in divisors:
        product /= _number(trainer, divisor)
    return product


def _factors(value: Operand) -> tuple[list[Operand], list[Operand]]:
    """Return the factors and the divisors of an expression; anything but a product is its own only factor."""
    if not isinstance(value, Operation) or value.operator not in ("*", "/"):
        return [value], []
    (factors, divisors), (above, below) = map(_factors, value.operands)
    if value.operator == "/":
        above, below = below, above
    return factors + above, divisors + below


def _operation(symbol: str, *operands: Operand) -> Operation:
    for operand in operands:
        if not isinstance(operand, Expression | Real):
            raise TypeError(
                f"placeholders combine with numbers and other placeholders, not with {type(operand).__name__}"
            )
    return Operation(symbol, operands)


def _placeholders(value: Operand) -> set[TrainerPlaceholderValues]:
    if isinstance(value, TrainerPlaceholderValues):
        return {value}
    return set().union(*map(_placeholders, value.operands)) if isinstance(value, Operation) else set()


def _are_same(new: tuple[Any, ...], old: tuple[Any, ...]) -> bool:
    return all(ours is theirs for ours, theirs in zip(new, old, strict=True))


def _count(trainer: TrainerLike, value: TrainerPlaceholderValues) -> int | None:
    if value is _EPOCHS:
        epochs: int = trainer.run_config.num_epochs
        return epochs
    if value in _UPDATES:
        return _updates_per_epoch(trainer)
    loader, owner = trainer._train_dataloader, "train loader"
    if value is TrainerPlaceholderValues.EVAL_DATALOADER_LEN:
        loader, owner = trainer._eval_dataloader, "evaluation loader"
    if loader is None:
        raise ConfigError(f"{value.name} is used, but this run has no {owner}: pass one, or give a number")
    try:
        return len(loader)
    except TypeError as error:
        raise ConfigError(f"{value.name} is used, but the {owner} has no length: give a number") from error


def _updates_per_epoch(trainer: TrainerLike) -> int | None:
    # The run config has 0 if the train loader has no length.
    is_known = getattr(trainer._train_dataloader, "num_batches", 0) is not None
    return trainer.run_config.num_local_update_steps_per_epoch if is_known else None


_EPOCHS = TrainerPlaceholderValues.NUM_EPOCHS
_UPDATES = (
    TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH,
    TrainerPlaceholderValues.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH,
)
_OPERATORS: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
}
