"""Packages that only some metrics need, imported when such a metric is created."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from loopwright.errors import InputError


def extra_module(module: str, package: str, metric: str, extra: str = "text") -> Any:
    """Return a module of an extra.

    Args:
        module: the dotted name to import.
        package: its name for pip.
        metric: the metric that needs it, for the error.
        extra: the extra of loopwright that has the package.

    Raises:
        InputError: the package is not installed ("install.extra"); its fix is the install line.
    """
    if find_spec(module.partition(".")[0]) is None:
        raise InputError(
            "install.extra",
            f"the metric {metric!r} needs the package {package}",
            fix=f"pip install 'loopwright[{extra}]'",
        )
    return import_module(module)
