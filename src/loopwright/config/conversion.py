"""Convert the values of files and the words of a command line to the types that a dataclass declares.

YAML reads `3e-4` as a text and `no` as False; both are converted to the field's type.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import types
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from loopwright.config.choices import not_among
from loopwright.config.old_names import AcceptsOldNames, OldName
from loopwright.errors import ConfigError, nearest

T = TypeVar("T")

TRUE_WORDS = ("yes", "true", "t", "y", "1", "on")
FALSE_WORDS = ("no", "false", "f", "n", "0", "off")
_NUMBER_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def field_types(kind: type) -> dict[str, Any]:
    """Return the types of the constructor's fields of a dataclass, in order."""
    try:
        hints = get_type_hints(kind)
    except NameError as error:
        raise ConfigError(
            f"the types of {kind.__name__} cannot be read: {error}. Declare the class, and what its types name, at the "
            "top level of a module"
        ) from error
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def old_names_of(kind: type) -> Mapping[str, OldName]:
    """Return the old names that a class accepts in addition to its fields."""
    return kind.old_names() if isinstance(kind, AcceptsOldNames) else {}


def build(kind: type[T], values: Mapping[str, Any]) -> T:
    """Make a dataclass from the values of a file, each converted to its field's type."""
    hints = {**{name: old.hint for name, old in old_names_of(kind).items()}, **field_types(kind)}
    for name in values:
        if name not in hints:
            raise ConfigError(f"{kind.__name__} has no field {name!r}", flag=name, nearest=nearest(name, hints))
    return kind(**{name: convert_named(name, value, hints[name]) for name, value in values.items()})


def convert_named(name: str, value: Any, hint: Any) -> Any:
    """Return a file's value, converted to its type."""
    try:
        return convert(value, hint)
    except ConfigError as error:
        fields = {"given": value, "choices": error.choices, "nearest": error.nearest}
        raise ConfigError(f"{name}: {error.what}", flag=name, **fields) from error


def members(hint: Any) -> list[Any]:
    """Return the types that a hint allows, without None."""
    if get_origin(hint) in (Union, types.UnionType):
        return [member for each in get_args(hint) for member in members(each)]
    return [] if hint is type(None) else [hint]


def is_optional(hint: Any) -> bool:
    """Whether a hint allows None."""
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


def is_list(hint: Any) -> bool:
    """Whether a hint is a list, a tuple or a set."""
    return (get_origin(hint) or hint) in (list, tuple, set, frozenset)


def convert(value: Any, hint: Any) -> Any:
    """Return a file's value, converted to its type. A value that already has one of the types is unchanged."""
    if value is None:
        return None
    allowed = members(hint)
    if any(member in (bool, int, float, str) and type(value) is member for member in allowed):
        return value
    return _first_that_fits(value, sorted(allowed, key=lambda member: member is str))


def convert_text(text: str, hint: Any) -> Any:
    """Return a word of the command line, converted to its type: a string only if nothing else fits."""
    allowed = sorted(members(hint), key=lambda member: member is str)
    if is_optional(hint) and str not in allowed and text.lower() in ("none", "null"):
        return None
    return _first_that_fits(text, allowed)


def _first_that_fits(value: Any, allowed: list[Any]) -> Any:
    problems = []
    for member in allowed:
        try:
            return _convert_to(value, member)
        except ConfigError as problem:
            problems.append(problem)
    if not problems:
        return value
    raise problems[0]


def _convert_to(value: Any, hint: Any) -> Any:
    origin = get_origin(hint) or hint
    if hint is Any:
        return value
    if origin is Literal:
        return _choice(value, [(choice, choice) for choice in get_args(hint)])
    if inspect.isclass(origin) and issubclass(origin, Enum):
        return _choice(value, [(member.value, member) for member in origin])
    if is_list(hint):
        return _list(value, origin, get_args(hint))
    if origin is dict or (inspect.isclass(origin) and issubclass(origin, Mapping)):
        return _dict(value)
    if origin in _SIMPLE:
        return _SIMPLE[origin](value)
    if isinstance(origin, type) and dataclasses.is_dataclass(origin):
        return build(origin, value) if isinstance(value, Mapping) else value
    if inspect.isclass(origin) and isinstance(value, str):
        return _made(value, origin)
    return value


def _bool(value: Any) -> bool:
    word = str(value).lower()
    if word in TRUE_WORDS or word in FALSE_WORDS:
        return word in TRUE_WORDS
    raise ConfigError(f"expected true or false, got {value!r}")


def _int(value: Any) -> int:
    number = _float(value, is_whole=True)
    if isinstance(value, str) and value.strip().lstrip("+-").isdigit():
        return int(value)  # A float would round large ones.
    if isinstance(value, int):
        return value
    if not math.isfinite(number) or number != int(number):
        near = None if number != number or abs(number) == math.inf else str(round(number))
        raise ConfigError(f"expected a whole number, got {value!r}", given=value, nearest=near)
    return int(number)


def _float(value: Any, is_whole: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigError(f"expected a number, got {value!r}")
    try:
        return float(value)
    except ValueError as error:
        near = _number_meant(str(value), is_whole)
        raise ConfigError(f"expected a number, got {value!r}", given=value, nearest=near) from error


def _number_meant(text: str, is_whole: bool) -> str | None:
    """Return the number that a text probably stands for: 0,001 is 0.001, three is 3, 20% is 0.2, 10k is 10000."""
    word = text.strip().lower().replace(" ", "")
    if word in _NUMBER_WORDS:
        return str(_NUMBER_WORDS.index(word))
    if "," in word and "." in word:  # the last one is before the decimals
        word = word.replace("." if word.rfind(",") > word.rfind(".") else ",", "")
    elif re.fullmatch(r"[1-9]\d{,2}(,\d{3})+", word):
        word = word.replace(",", "")
    found = re.match(r"x?([+-]?(?:\d+[.]?\d*|[.]\d+)(?:e[+-]?\d+)?)([%km]?)", word.replace(",", "."))
    if found is None:
        return None
    scale = {"%": 1.0 if is_whole else 0.01, "k": 1e3, "m": 1e6}.get(found[2], 1.0)
    number = float(found[1]) * scale
    if not math.isfinite(number):
        return None
    return str(round(number)) if is_whole else found[1] if scale == 1 else f"{number:.10g}"


def _str(value: Any) -> str:
    if isinstance(value, bool):
        raise ConfigError(f"expected a text, got {value!r}: YAML reads yes, no, on and off so, put quotes around it")
    if isinstance(value, (int, float, str, Path)):
        return str(value)
    raise ConfigError(f"expected a text, got {value!r}")


def _dict(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    try:
        read = json.loads(value) if isinstance(value, str) else None
    except json.JSONDecodeError as error:
        raise ConfigError(f'expected JSON such as {{"name": 1}}, got {value!r}: {error}') from error
    if isinstance(read, dict):
        return read
    raise ConfigError(f'expected JSON such as {{"name": 1}}, got {value!r}')


def _list(value: Any, kind: Any, arguments: tuple[Any, ...]) -> Any:
    values = list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]
    if kind is tuple and arguments and Ellipsis not in arguments:
        if len(values) != len(arguments):
            raise ConfigError(f"expected {len(arguments)} values, got {values!r}")
        return tuple(convert(each, hint) for each, hint in zip(values, arguments, strict=True))
    return kind(convert(each, arguments[0] if arguments else Any) for each in values)


def _choice(value: Any, choices: list[tuple[Any, Any]]) -> Any:
    """Return the meaning of a matching choice; not by a dict, in which 1 and True would be equal."""
    if isinstance(value, Enum):
        value = value.value
    for choice, meant in choices:
        if value == choice and isinstance(value, bool) == isinstance(choice, bool):
            return meant
    words = {str(choice): meant for choice, meant in choices}
    # YAML reads no and off as False, yes and on as True.
    spellings = [str(value)] if not isinstance(value, bool) else ["yes", "on"] if value else ["no", "off"]
    for word in spellings:
        if word in words:
            return words[word]
    raise not_among("expected", value, words)


def _made(value: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"expected a {getattr(kind, '__name__', kind)}, got {value!r}: {error}") from error


_SIMPLE: Mapping[Any, Callable[[Any], Any]] = {bool: _bool, int: _int, float: _float, str: _str}
