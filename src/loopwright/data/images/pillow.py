"""The one door to Pillow, which is an extra: nothing is imported before an image is touched."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from loopwright.errors import InputError


@cache
def pillow(module: str = "Image") -> Any:
    """Return a module of Pillow, called whenever one is used.

    Raises:
        InputError: Pillow is not installed ("install.extra"); its fix is the line that installs it.
    """
    return extra_module(f"PIL.{module}", "pillow", "reading images")


def extra_module(module: str, package: str, use: str) -> Any:
    """Return a module of the extra `vision`; `use` says what needs it.

    Raises:
        InputError: the package is not installed ("install.extra").
    """
    if find_spec(module.partition(".")[0]) is None:
        raise InputError("install.extra", f"{use} needs the package {package}", fix="pip install 'loopwright[vision]'")
    return import_module(module)
