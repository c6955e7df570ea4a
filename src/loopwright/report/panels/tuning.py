"""The panel of measurements around a run: lr_find.json and profile/summary.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from loopwright.report.blocks import Block, Facts, Lines, Panel, Table, without_empty
from loopwright.report.formats import cut, number, percent
from loopwright.report.panels.sample import json_or_none

_MOST_OPERATORS: Final = 12


def tuning_panel(folder: Path) -> Panel | None:
    rates, profile = (json_or_none(folder / name) for name in ("lr_find.json", "profile/summary.json"))
    blocks = _rate_blocks(rates) if isinstance(rates, dict) else []
    blocks += _profile_blocks(profile) if isinstance(profile, dict) else []
    return Panel("Tuning", blocks) if blocks else None


def _rate_blocks(found: Mapping[str, Any]) -> list[Block]:
    rates = found.get("rates") or ()
    curves = []
    for name, key in (("each update", "losses"), ("smoothed", "smoothed")):
        points = [
            (math.log10(rate), loss)
            for rate, loss in zip(rates, found.get(key) or (), strict=False)
            if _is_number(rate) and rate > 0 and _is_number(loss)
        ]
        curves += [(name, points)] if len(points) > 1 else []
    if not curves:
        return []
    names = {"chosen": "chosen", "steepest": "where the loss falls fastest", "lowest": "where the loss is lowest"}
    facts = [(name, f"{found[key]:.2g}") for key, name in names.items() if _is_number(found.get(key))]
    facts += [("stopped because", str(found["stop_reason"]))] if found.get("stop_reason") else []
    note = "chosen: where the loss falls fastest, or a tenth of where it is lowest if that is smaller"
    curve = Lines("Loss over the learning rate", "log10 of the learning rate", "loss", _within(curves), note)
    return [curve, Facts("Learning rate", facts)]


def _profile_blocks(found: Mapping[str, Any]) -> list[Block]:
    shares = {name: value for name, value in (found.get("seconds") or {}).items() if _is_number(value)}
    total = sum(shares.values())
    if total <= 0:
        return []
    num_updates = max(int(found.get("num_updates") or 1), 1)
    each = {name: f"{number(1e3 * value / num_updates, 3)} ms" for name, value in shares.items()}
    rows = [[name, each[name], percent(value / total)] for name, value in shares.items()]
    note = f"updates {found.get('first_update')} to {found.get('last_update')}; profile/ has the trace"
    operators = [
        [cut(one.get("name"), 80), number(one.get("calls", 0) / num_updates, 3),
         f"{number(1e3 * one['seconds'] / num_updates, 3)} ms",
         percent(float(one.get("share", 0.0)))]
        for one in (found.get("operators") or ())[:_MOST_OPERATORS]
        if _is_number(one.get("seconds"))
    ]  # fmt: skip
    columns = ["operator", "calls", "per update", "share"]
    times = Table("Time per update", ["", "per update", "share"], rows, note, bar=2)
    return without_empty([times, *_limits(found), Table("Slowest operators", columns, operators, is_wide=True)])


def _limits(found: Mapping[str, Any]) -> list[Block]:
    limits = found.get("limits")
    if not isinstance(limits, dict) or not _is_number(limits.get("share")):
        return []
    names = {"matrix": "matrix work, at least", "memory": "weights and optimizer, at least", "data": "data"}
    names |= {"launch": "launch, at most"}
    times = {text: limits[f"{name}_seconds"] for name, text in names.items() if f"{name}_seconds" in limits}
    facts = [(text, f"{number(1e3 * value, 3)} ms") for text, value in times.items() if _is_number(value)]
    return [Facts("Limit of the machine (estimated)", [*facts, ("reached, about", percent(limits["share"]))])]


def _within(curves: list[tuple[str, list[tuple[float, float]]]]) -> list[tuple[str, list[tuple[float, float]]]]:
    """Return the curves without points far above their start: an exploded loss would flatten the rest."""
    start = [loss for _, points in curves for _, loss in points[: max(len(points) // 5, 1)]]
    top = max(start) + max(max(start) - min(loss for _, points in curves for _, loss in points), 1e-9)
    return [(name, [point for point in points if point[1] <= top]) for name, points in curves]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
