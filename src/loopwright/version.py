"""Which version of loopwright this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Return the installed version; "unknown" when the sources are used without being installed."""
    try:
        return version("loopwright")
    except PackageNotFoundError:
        return "unknown"
