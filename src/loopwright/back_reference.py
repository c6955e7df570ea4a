"""References from a part to its owner that do not keep the owner alive."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class BackReference(Generic[T]):
    """An attribute of a part that holds its owner weakly.

    A trainer holds its run and a run holds its parts; with strong references back, `del trainer` would free the model's
    memory only at the next garbage collection.
    """

    def __set_name__(self, kind: type, name: str) -> None:
        self._name = name

    def __get__(self, part: Any, kind: type | None = None) -> T:
        owner: T = part.__dict__[self._name]()
        return owner

    def __set__(self, part: Any, owner: T) -> None:
        part.__dict__[self._name] = weakref.ref(owner)
