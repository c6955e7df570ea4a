"""Defer the import of a slow module that another module imports for one function, until that function is called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any


class _StandIn(ModuleType):
    """Has the one function; any other attribute is the real module's, and imports it."""

    def __init__(self, name: str, function: str) -> None:
        super().__init__(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(self.real(), function)(*args, **kwargs)

        setattr(self, function, call)

    def real(self) -> ModuleType:
        self.leave()
        return import_module(self.__name__)

    def leave(self) -> None:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks for `__path__`
            raise AttributeError(name)
        return getattr(self.real(), name)


@contextmanager
def deferred_import(module: str, function: str) -> Iterator[None]:
    """Let `from module import function` in the block import nothing: the function does it when it is called."""
    if module in sys.modules:
        yield
        return
    stand_in = sys.modules[module] = _StandIn(module, function)
    try:
        yield
    finally:
        stand_in.leave()
