"""The one door to Pillow, and to what else images need of the extra `vision`: nothing is imported before it is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from loopwright.errors import InputError


def pillow(module: str = "Image", purpose: str = "work with images") -> Any:
    """Return a module of Pillow; called whenever one is used.

    Raises:
        InputError: Pillow is not installed ("install.extra"); its fix is the line that installs it.
    """
    return vision_module(f"PIL.{module}", "pillow", purpose)


def vision_module(module: str, package: str, purpose: str) -> Any:
    """Return a module of a package of the extra `vision`; `purpose` says what needs it.

    Raises:
        InputError: the package is not installed ("install.extra"); its fix is the line that installs it.
    """
    try:
        import_module(module.partition(".")[0])
    except ImportError as error:
        fix = "pip install 'loopwright[vision]'"
        raise InputError("install.extra", f"{purpose} needs the package {package}", fix=fix) from error
    return import_module(module)
