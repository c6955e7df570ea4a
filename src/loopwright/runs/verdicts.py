"""Verdicts: whether a model, or several with other seeds, is better than the strongest baseline. No torch.

A verdict is a dict of values, kept in result.json; `loopwright.report` puts it into words.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loopwright.metrics.paired import LEVEL, RowScores, judge, t_tail
from loopwright.run_folder import write_atomically

ROWS, BASELINE_ROWS = "rows.npz", "baselines.npz"


def verdict_of(
    directions: Mapping[str, bool],  # whether higher is better, by metric
    metrics: Mapping[str, float],
    rows: Mapping[str, RowScores],
    baselines: Mapping[str, Mapping[str, float]],
    baseline_rows: Mapping[str, RowScores],  # by the name of a baseline, a colon, and the metric
    num_picked: int,  # the number of evaluations of which this one is the best
    prefix: str = "",  # of the metrics of the baselines: "test_" for a verdict on the test data
) -> dict[str, Any]:
    """Return the verdict against the strongest baseline.

    The first of the `directions` decides that some baseline has: a constant prediction has no correlation.
    """
    verdict: dict[str, Any] = {"kind": None, "evaluations": num_picked, "split": prefix.rstrip("_") or "validation"}
    name = next((name for name in directions if any(prefix + name in each for each in baselines.values())), None)
    if name is None:
        return {**verdict, "metric": next(iter(directions)), "reason": "baseline"}
    sign = 1 if directions[name] else -1
    known = {each: scores[prefix + name] for each, scores in baselines.items() if prefix + name in scores}
    strongest = max(known, key=lambda baseline: sign * known[baseline])
    verdict |= {"metric": name, "direction": "max" if directions[name] else "min", "baseline": strongest}
    verdict |= {"value": metrics.get(name), "baseline_value": known[strongest]}
    if not math.isfinite(metrics.get(name, math.nan)):
        return {**verdict, "value": None, "reason": "undefined"}
    theirs = baseline_rows.get(f"{strongest}:{prefix}{name}")
    if name not in rows or theirs is None:
        return {**verdict, "reason": "unknown"}
    verdict |= judge(rows[name], theirs, greater_is_better=directions[name], num_picked=num_picked)
    if verdict["kind"] is None:
        verdict |= {"reason": "rows", "rows": verdict["rows"] or rows[name].shape[1]}
    return verdict


def verdict_of_seeds(verdicts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the verdict over runs that differ in their seed; None without two runs that can be compared.

    A t test over the seeds shows that other seeds would be better as well; all of them saw the same rows, however, and
    picked their best evaluation on them. So half of the runs must be better by themselves: their p, combined by
    Rüger's rule, which holds for any dependence, must be small too.
    """
    first = verdicts[0] if verdicts else {}
    same = ("split", "metric", "direction", "baseline")
    usable = [one for one in verdicts if one.get("p") is not None and all(one[key] == first[key] for key in same)]
    if len(usable) < max(2, len(verdicts)):
        return None
    sign, number = 1 if first["direction"] == "max" else -1, len(usable)
    gains = [sign * (each["value"] - each["baseline_value"]) for each in usable]
    mean, deviation, half = statistics.fmean(gains), statistics.stdev(gains), math.ceil(number / 2)
    t = abs(mean) / deviation * math.sqrt(number) if deviation else math.inf if mean else 0.0
    agreeing = sorted(each["p"] if gain * mean > 0 else 1.0 for each, gain in zip(usable, gains, strict=True))
    p = min(1.0, max(t_tail(t, number - 1), agreeing[half - 1] * number / half))
    kind = "indistinct" if p > LEVEL else "better" if mean > 0 else "worse"
    means = {name: statistics.fmean(each[name] for each in usable) for name in ("value", "baseline_value")}
    rows, unit = min(each["rows"] for each in usable), first.get("unit", "row")
    verdict = {**{name: first[name] for name in same}, **means, "kind": kind, "p": p, "seeds": number, "test": "t"}
    return {**verdict, "rows": rows, "unit": unit}


def save_rows(path: Path, rows: Mapping[str, RowScores]) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **dict[str, Any](rows))
    write_atomically(path, buffer.getvalue())
