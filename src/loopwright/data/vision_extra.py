"""The only importer of Pillow and the other packages of the extra `vision`, all lazily."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from loopwright.errors import InputError


def pillow(module: str = "Image", purpose: str = "work with images") -> Any:
    """Return a module of Pillow; raise an InputError ("install.extra") with the install command if it is missing."""
    return vision_module(f"PIL.{module}", "pillow", purpose)


def vision_module(module: str, package: str, purpose: str) -> Any:
    """Return a module of the extra `vision`; raise an InputError ("install.extra") with its `purpose` if missing."""
    try:
        import_module(module.partition(".")[0])
    except ImportError as error:
        fix = "pip install 'loopwright[vision]'"
        raise InputError("install.extra", f"{purpose} needs the package {package}", fix=fix) from error
    return import_module(module)
