"""Numbers, durations and texts as the report shows them."""

from __future__ import annotations

import math
from typing import Any


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with this many significant digits: 0.7967, 93.42, 1.2e-05, 12,345; a dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    size = abs(value)
    if size < 1e-3 or size >= 1e9:
        return f"{value:.{digits - 2}e}"
    if size >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    whole = max(len(str(int(size))), 1) if size >= 1 else 0
    return f"{value:.{max(digits - whole, 0)}f}"


def metric(value: float | None) -> str:
    """Return a metric: four decimals below 10, two above."""
    if value is None or not math.isfinite(value):
        return number(value)
    if value and abs(value) < 1e-3:
        return f"{value:.2e}"
    if abs(value) >= 1e9:
        return number(value)
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.2f}"


def percent(share: float | None) -> str:
    if share is None:
        return "–"
    return f"{100 * share:.1f} %" if 0 < share < 0.1 or 0.99 < share < 1 else f"{100 * share:.0f} %"


def duration(seconds: float | None) -> str:
    """Return a time: 4.2 s, 1:45 min, 2:03:10 h."""
    if seconds is None or not math.isfinite(seconds):
        return number(seconds)
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def cut(text: Any, most: int = 400) -> str:
    """Return a value as text, truncated with its length noted."""
    text = str(text)
    return text if len(text) <= most else f"{text[:most].rstrip()} … ({len(text):,} characters)"
