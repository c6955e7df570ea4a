"""Where sample data lies: our own, which travels with the tests, and real data, if it is beside the checkout."""

import json
from pathlib import Path
from typing import Any

import pytest

SAMPLES = Path(__file__).resolve().parent / "samples"
_REAL = Path(__file__).resolve().parents[2] / "shared" / "data"


def real_sample(name: str) -> Path:
    """Return a file or folder of real data by its name in `samples`; skip the test without it."""
    path = _REAL / name if name.startswith("mrpc") else _REAL / "samples" / name
    if not path.exists():
        pytest.skip("no shared/data beside the checkout")
    return path


def sample_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SAMPLES / name).read_text(encoding="utf-8").splitlines()]
