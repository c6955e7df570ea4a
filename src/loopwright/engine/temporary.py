"""Temporary values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(held: MutableMapping[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """Replace values of a mapping within a block, and restore them afterwards."""
    before = {name: held[name] for name in values if name in held}
    held.update(values)
    try:
        yield
    finally:
        for name in values.keys() - before.keys():
            held.pop(name, None)
        held.update(before)
