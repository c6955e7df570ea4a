"""Quantities as people read them, on the screen and in reports."""

from __future__ import annotations

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def size(num_bytes: float) -> str:
    """Return bytes in the most readable unit: 512 bytes, 1.7 kB, 24.3 GB."""
    value = float(num_bytes)
    for unit in _UNITS[:-1]:
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} {_UNITS[-1]}"
