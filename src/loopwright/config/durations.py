"""Durations as people write them on the command line: 90s, 30m, 2h, 1h30m, 1:30:00."""

from __future__ import annotations

import math
import re

from loopwright.errors import InputError

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_PARTS = re.compile("".join(rf"(?:(?P<{unit}>\d+(?:\.\d+)?){unit})?" for unit in _UNITS))
_CLOCK = re.compile(r"(?P<h>\d+):(?P<m>[0-5]\d):(?P<s>[0-5]\d)")
_MOST_CHARACTERS = 100  # digits without a unit take quadratic time
_FORMS = "90s, 30m, 2h, 1h30m or 1:30:00"


def seconds_of(text: str) -> float:
    """Return the seconds of a duration such as 90s, 30m, 1h30m, 1d12h or 1:30:00; raise an InputError if invalid."""
    text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    found = _CLOCK.fullmatch(text.strip()) or _PARTS.fullmatch(text.strip().lower())
    parts = {} if found is None else {unit: value for unit, value in found.groupdict().items() if value is not None}
    if not parts:
        raise InputError("args.value", f"--time {text}: expected a length of time such as {_FORMS}", fix=_nearest(text))
    seconds = math.fsum(_UNITS[unit] * float(value) for unit, value in parts.items())
    if not 0 < seconds < math.inf:
        raise InputError("args.value", f"--time {text}: expected a time above zero, such as {_FORMS}", fix="--time 30m")
    return seconds


def _nearest(text: str) -> str:
    number = re.fullmatch(r"\d+(?:\.\d+)?", text.strip())
    if number is not None:
        return f"--time {number[0]}s   or   --time {number[0]}m"
    clock = re.fullmatch(r"(\d+):([0-5]\d)", text.strip())
    if clock is not None:
        return f"--time {clock[1]}h{int(clock[2])}m   or   --time {clock[1]}m{int(clock[2])}s"
    words = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z])[a-z]*", text.lower())
    units = [unit for _, unit in words]
    is_in_order = bool(units) and units == sorted(set(units) & set(_UNITS), key=list(_UNITS).index)
    return f"--time {''.join(value + unit for value, unit in words)}" if is_in_order else "--time 2h"
