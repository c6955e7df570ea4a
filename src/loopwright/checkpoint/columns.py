"""Long values as a few tensors: numbers, texts, lists and dicts take no JSON of their own, however many they are.

Values are split by type, and dicts with the same keys by key. Each value takes 8 bytes or more of a tensor that is used
once, so reading never takes more than a small multiple of the file's size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from types import NoneType
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_MOST_ITEMS = 1000  # of a value in JSON; eight characters count as one
_MOST_KEYS = 1000  # that are columns
_NUMBERS: dict[Any, Any] = {float: np.float64, int: np.int64, bool: np.int64}
_TYPES = {*_NUMBERS, NoneType, str, bytes, list, tuple, dict}


def is_long(value: Any) -> bool:
    """Whether a value has many items or characters, and its first ones fit into columns."""
    found, count = [value], 0
    for each in found:  # which grows
        if type(each) in (str, bytes):
            count += len(each) // 8
        elif type(each) in (dict, list, tuple):
            count += len(each)
            found += [] if count > _MOST_ITEMS else each.values() if type(each) is dict else each
        elif type(each) not in _TYPES and not isinstance(each, np.generic):
            return False
        if count > _MOST_ITEMS:
            return True
    return False


def pack(values: Sequence[Any], add: Callable[[Array], str]) -> list[Any]:
    """Return values as JSON with the names that `add` gives to arrays; raise a TypeError or OverflowError if it cannot.

    Numbers of numpy become Python's.
    """
    found = set(map(type, values))
    if any(issubclass(kind, np.generic) for kind in found):
        return pack([each.item() if isinstance(each, np.generic) else each for each in values], add)
    if not found <= _TYPES:
        raise TypeError(f"no column holds {found - _TYPES}")
    if len(found) == 1 and not found & {NoneType, dict}:
        return _column(found.pop(), values, add)
    kinds: list[Any] = [tuple(each) if type(each) is dict else type(each) for each in values]
    keys = [key for kind in set(kinds) if type(kind) is tuple for key in kind]
    most = min(sum(len(kind) for kind in kinds if type(kind) is tuple) // 8, _MOST_KEYS)
    if len(keys) > most or not all(type(key) is str for key in keys):
        kinds = list(map(type, values))  # the keys are values too
    groups = defaultdict(list)
    for kind, each in zip(kinds, values, strict=True):
        groups[kind].append(each)
    if len(groups) == 1 and not groups.keys() & {NoneType, ()}:
        return _column(kinds[0], values, add)
    numbers = {kind: number for number, kind in enumerate(groups)}
    split = add(np.fromiter(map(numbers.__getitem__, kinds), np.int64, len(kinds)))
    return ["mixed", split, [_column(kind, each, add) for kind, each in groups.items()]]


def _column(kind: Any, values: Sequence[Any], add: Callable[[Array], str]) -> list[Any]:
    """Return values of one type, or dicts with these keys."""
    if kind is NoneType:
        return ["None"]
    if type(kind) is tuple:
        return ["record", list(kind), [pack([each[key] for each in values], add) for key in kind]]
    if kind in _NUMBERS:
        return [kind.__name__, add(np.fromiter(values, _NUMBERS[kind], len(values)))]
    lengths = add(np.fromiter(map(len, values), np.int64, len(values)))
    if kind in (str, bytes):
        data = b"".join(values) if kind is bytes else "".join(values).encode("utf-8", "surrogatepass")
        return [kind.__name__, lengths, add(np.frombuffer(bytearray(data), np.uint8))]
    parts = [values] if kind is not dict else [values, list(map(dict.values, values))]
    flat = (list(chain.from_iterable(each) if len(each) > 1 else each[0]) for each in parts)
    return [kind.__name__, lengths, *(pack(each, add) for each in flat)]


def unpack(node: Any, take: Callable[[str], Array], count: int | None = None) -> list[Any]:
    """Invert `pack`; `take` returns each array once. `count` is known for values that have no array."""
    kind, *rest = node
    if kind == "None":
        return [None] * count  # type: ignore[operator]
    if kind in ("float", "int", "bool"):
        numbers: list[Any] = take(rest[0]).tolist()
        return list(map(bool, numbers)) if kind == "bool" else numbers
    if kind == "record":
        keys, columns = rest[0], [unpack(each, take) for each in rest[1]]
        rows = zip(*columns, strict=True) if columns else [()] * count  # type: ignore[operator]
        return [dict(zip(keys, row, strict=True)) for row in rows]
    if kind == "mixed":
        split = take(rest[0])
        counts = np.bincount(np.clip(split, -1, len(rest[1])), minlength=len(rest[1])).tolist()
        parts = [unpack(each, take, size) for each, size in zip(rest[1], counts, strict=True)]
        if list(map(len, parts)) != counts:
            raise ValueError("its parts have other lengths than counted")
        left = list(map(iter, parts))
        return [next(left[number]) for number in split.tolist()]
    ends = [0, *accumulate(lengths := take(rest[0]).tolist())]
    if kind in ("str", "bytes"):
        data = take(rest[1]).tobytes()
        flat: Any = data.decode("utf-8", "surrogatepass") if kind == "str" else data
    else:
        flat, *more = (unpack(each, take) for each in rest[1:])
        flat = list(zip(flat, more[0], strict=True)) if kind == "dict" else flat
    if min(lengths, default=0) < 0 or ends[-1] != len(flat):
        raise ValueError("its lengths do not add up")
    make: Any = {"str": str, "bytes": bytes, "list": list, "tuple": tuple, "dict": dict}[kind]
    return [make(flat[first:end]) for first, end in pairwise(ends)]
