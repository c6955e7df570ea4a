"""Values that hold for a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(held: MutableMapping[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """Run a block with other values in a mapping, and put back afterwards what it held of these names."""
    before = {name: held[name] for name in values if name in held}
    held.update(values)
    try:
        yield
    finally:
        for name in values.keys() - before.keys():
            held.pop(name, None)
        held.update(before)
