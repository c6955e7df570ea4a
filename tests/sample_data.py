"""Where our own sample data lies."""

import json
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).resolve().parent / "samples"


def sample_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SAMPLES / name).read_text(encoding="utf-8").splitlines()]
