"""Quantities as people read them, on the screen and in reports."""

from __future__ import annotations

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


_PLURALS = {"is": "are", "has": "have", "lacks": "lack", "belongs": "belong", "holds": "hold"}
_PLURALS |= {"class": "classes", "box": "boxes", "category": "categories"}


def agreeing(number: int, word: str) -> str:
    """Return a noun or a verb in the singular or plural."""
    return word if number == 1 else _PLURALS.get(word, f"{word}s")


def counted(number: int, noun: str, verb: str = "") -> str:
    """Return a number with its noun, and a verb if given: `1 row has`, `3 rows have`."""
    return " ".join([f"{number:,}", *(agreeing(number, each) for each in (noun, verb) if each)])


def size(num_bytes: float) -> str:
    """Return bytes in the most readable unit: 512 bytes, 1.7 kB, 24.3 GB."""
    value = float(num_bytes)
    for unit in _UNITS[:-1]:
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} {_UNITS[-1]}"
