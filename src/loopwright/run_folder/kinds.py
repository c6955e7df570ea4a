"""The kinds of values in the JSON files of a run, checked once, where a file is read."""

from __future__ import annotations

from typing import Any, Final

# "*" is any name. A named value may also be missing or null. A list has one kind for all, a tuple one for each item.
_NUMBERS: Final = {"*": {"*": float}}  # of baselines and metrics
_SCORES: Final = {"metrics": {"*": float}, "intervals": {"*": (float, float)}, "no_intervals": {"*": str}}
_VERDICT: Final = dict.fromkeys(("kind", "metric", "direction", "baseline", "unit", "split", "reason"), str)
_FILE: Final = {"path": str, "kind": str, "sha256": str, "num_bytes": int, "num_rows": int, "settings": dict}
_COUNTS: Final = {"splits": {"*": {"num_rows": int, "parts": [dict]}}, "counts": {"*": {"*": int}}, "images": dict}
_FOUND: Final = {"duplicates": {"*": int}, "dropped": {"*": int}, "warnings": [str], "guesses": [str]}
_KINDS: Final[dict[str, Any]] = {
    "run.json": {"id": str, "task": str, "created": str, "environment": dict, "sources": dict},
    "status.json": {"state": str, "update": int, "epoch": int, "epochs": int, "pid": int, "updated_at": str}
    | dict.fromkeys(("message", "last_checkpoint", "last_error", "host"), str),
    "best.json": {"checkpoint": str, "metric": str, "direction": str, "value": float, "loss": float},
    "baselines.json": _NUMBERS,
    "result.json": {"task": str, "metric": str, "direction": str, "update": int, "updates": int, "epochs": int}
    | {"seconds": float, "stop_reason": str, "baselines": _NUMBERS, "evaluations": int, "num_suspects": int}
    | {f"{split}{name}": kind for split in ("", "test_") for name, kind in {**_SCORES, "nonfinite": {"*": str}}.items()}
    | {"verdict": {**_VERDICT, "value": float, "baseline_value": float, "p": float, "rows": int, "seeds": int}},
    "data.json": {"task": str, "files": [_FILE], "columns": dict, "kinds": {"*": str}, **_COUNTS, **_FOUND}
    | {"labels": {"kind": str, "names": [str], "label_map": dict, "separator": str, "dropped": [str]}}
    | {"label_range": (float, float), "lengths": {"*": {"*": {"*": int}}}},
}


def check_kinds(content: Any, file_name: str) -> None:
    """Raise a ValueError for the first value of a file that has another kind than the runs of this package write."""
    if file_name in _KINDS:
        _check(content, _KINDS[file_name], "it")


def _check(value: Any, kind: Any, name: str) -> None:
    expected = kind if isinstance(kind, type) else list if isinstance(kind, tuple) else type(kind)
    is_number = expected in (int, float)
    fits = isinstance(value, (int, float) if expected is float else expected)
    fits = fits and not (is_number and isinstance(value, bool))
    if not fits or (is_number and abs(value) >= 2**63) or (isinstance(kind, tuple) and len(value) != len(kind)):
        raise ValueError(f"{name} is a {type(value).__name__} ({value!s:.40}), expected a {expected.__name__}")
    if isinstance(kind, dict):
        for key, item in value.items():
            wanted = kind.get(key, kind.get("*"))
            if wanted is not None and not (item is None and key in kind):
                _check(item, wanted, f"{name}.{key}" if name != "it" else key)
    elif not isinstance(kind, type):
        for index, item in enumerate(value):
            _check(item, kind[min(index, len(kind) - 1)], f"{name}.{index}")
