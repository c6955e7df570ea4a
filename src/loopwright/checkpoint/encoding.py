"""State as JSON plus tensors, and back, without pickle.

`encode` replaces every tensor by a reference to its key path and tags what JSON does not have (tuples,
sets, bytes, dicts with keys that are not strings, nan). Long values become tensors too (`columns.py`), so that the JSON
stays small. What it cannot keep it refuses by key path.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from loopwright.checkpoint.columns import is_long, pack, unpack
from loopwright.errors import CheckpointError

_TAG = "$"


def encode(value: Any, tensors: dict[str, torch.Tensor], path: str = "state") -> Any:
    """Return the value as JSON types, its tensors in `tensors`; a CheckpointError names what cannot be saved."""
    if isinstance(value, np.generic):
        value = value.item()
    if (packed := _packed(value, tensors, path)) is not None:
        return packed
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "v": repr(float(value))}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _encode_array(value, tensors, path)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, bytes):
        return {_TAG: "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, path)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        kind = next(name for name, cls in _SEQUENCES.items() if isinstance(value, cls))
        ordered = sorted(value, key=repr) if kind in ("set", "frozenset") else list(value)
        items = _packed(ordered, tensors, path) or [
            encode(item, tensors, f"{path}.{index}") for index, item in enumerate(ordered)
        ]
        if isinstance(value, deque):
            return {_TAG: kind, "v": items, "maxlen": value.maxlen}
        return items if kind == "list" else {_TAG: kind, "v": items}
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved. "
        "Saved state holds tensors, arrays, numbers, strings, bytes, None, and lists, tuples, sets and dicts of them."
    )


def decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Invert `encode`."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {name: decode(item, tensors) for name, item in value.items()}
    payload = value["v"]
    if kind == "packed":
        return unpack(payload, lambda name: tensors.pop(name).reshape(-1).numpy())[0]
    if kind == "tensor":
        return tensors[payload]
    if kind == "ndarray":
        return tensors[payload].numpy()
    if kind == "float":
        return float(payload)
    if kind == "bytes":
        return base64.b64decode(payload)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind](dict(decode(payload, tensors)))
    if kind == "deque":
        return deque(decode(payload, tensors), value["maxlen"])
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(payload, tensors))
    raise CheckpointError(f"saved state holds an unknown kind {kind!r}; it was written by a newer version")


_SEQUENCES: dict[str, Any] = {each.__name__: each for each in (list, tuple, set, frozenset, deque)}
_MAPPINGS: dict[str, Any] = {each.__name__: each for each in (dict, OrderedDict, Counter)}


def _encode_array(value: torch.Tensor | np.ndarray[Any, Any], tensors: dict[str, torch.Tensor], path: str) -> Any:
    kind = "tensor"
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
            raise CheckpointError(f"{path} is a numpy array of {value.dtype}, which cannot be saved")
        # Copied, since torch rejects foreign byte orders and negative strides, and warns about read-only arrays.
        kind, value = "ndarray", torch.from_numpy(np.array(value, value.dtype.newbyteorder("="), order="C"))
    return {_TAG: kind, "v": _add(value.detach(), tensors, path)}


def _add(tensor: torch.Tensor, tensors: dict[str, torch.Tensor], path: str) -> str:
    """Add a tensor, and return its name: two key paths may read the same, {"a.b": x, "a": {"b": y}}."""
    name, copies = path, 1
    while name in tensors:
        copies += 1
        name = f"{path}#{copies}"
    tensors[name] = tensor
    return name


def _packed(value: Any, tensors: dict[str, torch.Tensor], path: str) -> dict[str, Any] | None:
    """Return a long value as columns; None for a short one, or one that does not fit into columns."""
    if not is_long(value):
        return None
    before = set(tensors)
    try:
        return {_TAG: "packed", "v": pack([value], lambda array: _add(torch.from_numpy(array), tensors, path))}
    except (TypeError, OverflowError, RecursionError):
        for name in tensors.keys() - before:
            del tensors[name]
        return None


def _encode_mapping(value: Mapping[Any, Any], tensors: dict[str, torch.Tensor], path: str) -> Any:
    kind = type(value).__name__ if isinstance(value, (Counter, OrderedDict)) else "dict"
    if kind == "dict" and type(value) is not dict and (packed := _packed(dict(value), tensors, path)) is not None:
        return packed
    if kind == "dict" and all(isinstance(name, str) for name in value) and _TAG not in value:
        return {name: encode(item, tensors, f"{path}.{name}") for name, item in value.items()}
    pairs = _packed([list(pair) for pair in value.items()], tensors, path) or [
        [encode(name, tensors, f"{path}.key"), encode(item, tensors, f"{path}.{name}")] for name, item in value.items()
    ]
    return {_TAG: kind if kind in _MAPPINGS else "dict", "v": pairs}
