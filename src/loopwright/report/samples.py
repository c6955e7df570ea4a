"""Read the samples of an evaluation, even from a damaged file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a JSON lines file; an empty one for an invalid line."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                sample = json.loads(line)
            except (ValueError, RecursionError):
                sample = None
            yield sample if isinstance(sample, dict) else {}
