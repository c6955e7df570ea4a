"""The top of a report: the result with its interval, the baselines, and one sentence of interpretation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loopwright.report.curves import best_update
from loopwright.report.formats import duration, metric, number, plural
from loopwright.report.run_view import RunView

_LIMITS = {"train": "max_train_samples", "validation": "max_eval_samples"}
_FEW_ROWS = 5  # a bootstrap of so few is meaningless: they may all be alike
_STATES = {
    "done": "done",
    "running": "running",
    "stopped": "stopped",
    "failed": "failed",
    "preempted": "interrupted",
    "lost": "lost",
    "new": "not begun",
}


@dataclass(frozen=True)
class Bar:
    """A value in a bar chart.

    Attributes:
        share: the length of the bar, from 0 to 1.
        low, high: the interval on the same scale; None without one.
        is_ours: whether it is the trained model's.
    """

    name: str
    value: float
    share: float
    low: float | None = None
    high: float | None = None
    is_ours: bool = False


@dataclass
class Card:
    """The result of a run.

    Attributes:
        metric: the name of the decisive metric.
        value: its value; None before the first evaluation.
        interval: (low, high); None without one.
        bars: the value next to the baselines.
        verdict: its interpretation, in a sentence.
        others: the other metrics: name, value, interval in words.
        facts: other notable facts: name and value.
        state: the run's state, in a word.
    """

    metric: str = ""
    value: float | None = None
    interval: tuple[float, float] | None = None
    bars: list[Bar] = field(default_factory=list)
    verdict: str = ""
    others: list[tuple[str, str, str]] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    state: str = ""


def card_of(run: RunView) -> Card:
    """Return the top of a run's page."""
    values, intervals = _values(run)
    name = run.metric if run.metric in values else next(iter(values), None)
    made = Card(state=_STATES.get(run.state, run.state), facts=_facts(run))
    if name is None:
        made.verdict = _nothing_yet(run)
        return made
    made.metric, made.value, made.interval = name, values[name], intervals.get(name)
    floors = {floor: found[name] for floor, found in run.baselines.items() if name in found}
    made.bars = _bars(made.value, made.interval, floors)
    made.verdict = _verdict(run, made, floors)
    made.others = [
        (other.replace("_", " "), metric(value), interval_text(intervals.get(other)))
        for other, value in values.items()
        if other != name
    ]
    made.others += [(other, str(word), "") for other, word in (run.result.get("nonfinite") or {}).items()]
    return made


def interval_text(bounds: tuple[float, float] | None) -> str:
    """Return an interval in words; empty without one."""
    return "" if bounds is None else f"{metric(bounds[0])} to {metric(bounds[1])}"


def _values(run: RunView) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Return metrics and intervals, from the result or else from the best evaluation so far."""
    if run.result.get("metrics"):
        found = {str(key): float(value) for key, value in run.result["metrics"].items()}
        spread = {str(key): _pair(bounds) for key, bounds in (run.result.get("intervals") or {}).items()}
        tested = {f"test {key}": float(value) for key, value in (run.result.get("test_metrics") or {}).items()}
        spread |= {f"test {key}": _pair(bounds) for key, bounds in (run.result.get("test_intervals") or {}).items()}
        return {**found, **tested}, spread
    values: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    series = run.metrics.series
    at = best_update(run)
    for name, curve in series.items():
        short = name.removeprefix("eval_")
        if short == name or name.endswith(("_low", "_high")) and name.rpartition("_")[0] in series:
            continue
        point = _at(curve.points(1 << 12), at)
        if point is not None:
            values[short] = point
        bounds = [
            _at(series[f"{name}{end}"].points(1 << 12), at) for end in ("_low", "_high") if f"{name}{end}" in series
        ]
        if len(bounds) == 2 and bounds[0] is not None and bounds[1] is not None:
            intervals[short] = (bounds[0], bounds[1])
    if "loss_epoch" in values and "loss" in values:
        del values["loss_epoch"]
    return values, intervals


def _at(points: list[tuple[float, float]], update: float | None) -> float | None:
    if not points:
        return None
    return next((value for x, value in reversed(points) if x == update), points[-1][1])


def _pair(bounds: Any) -> tuple[float, float]:
    low, high = bounds
    return float(low), float(high)


def _bars(value: float, interval: tuple[float, float] | None, floors: Mapping[str, float]) -> list[Bar]:
    everything = [value, *floors.values(), *(interval or ())]
    if min(everything) < 0:
        return []
    top = 1.0 if max(everything) <= 1 else 100.0 if 50 < max(everything) <= 100 else max(everything) * 1.05
    low, high = (None, None) if interval is None else (interval[0] / top, interval[1] / top)
    ours = Bar("this run", value, value / top, low, high, True)
    return [ours, *(Bar(name, floor, floor / top) for name, floor in floors.items())]


def _verdict(run: RunView, made: Card, floors: Mapping[str, float]) -> str:
    assert made.value is not None
    prefix = "" if run.result else "So far, at the best evaluation: "
    if not floors:
        return prefix + (
            f"{made.metric} is {metric(made.value)}; there is no baseline to hold it against."
            if made.interval is None
            else f"{made.metric} is {metric(made.value)}, and with 95 % probability between "
            f"{metric(made.interval[0])} and {metric(made.interval[1])}; there is no baseline to hold it against."
        )
    sign = 1 if run.is_more_better else -1
    name = max(floors, key=lambda floor: sign * floors[floor])
    floor = floors[name]
    gain = sign * (made.value - floor)
    amount = _amount(abs(gain), made.value, floor, is_share=run.is_more_better)
    if gain == 0 and _is_perfect(made.value, run.is_more_better):
        return f"{prefix}As good as {name}: both are perfect, so this data cannot tell them apart."
    if gain == 0:
        return f"{prefix}No better than {name} ({metric(floor)}): the model has learnt nothing that this metric shows."
    num_rows = _num_evaluated(run)
    if made.interval is None or num_rows < _FEW_ROWS:
        word = "better" if gain > 0 else "worse"
        few = "1 row is" if num_rows == 1 else f"{num_rows} rows are"
        why = f"{few} too few to judge it by" if num_rows < _FEW_ROWS else "there is no interval to judge it by"
        return f"{prefix}{amount.capitalize()} {word} than {name} ({metric(floor)}); {why}."
    nearest = made.interval[0] if run.is_more_better else made.interval[1]
    farthest = made.interval[1] if run.is_more_better else made.interval[0]
    if gain > 0:
        is_clear = sign * (nearest - floor) > 0
        end = "the interval does not touch it." if is_clear else "but the interval includes it: this may be chance."
        joint = ";" if is_clear else ","
        return f"{prefix}Better than {name} ({metric(floor)}) by {amount}{joint} {end}"
    is_clear = sign * (farthest - floor) < 0
    end = "the interval does not reach it." if is_clear else "the interval includes it: this may be chance."
    return f"{prefix}Worse than {name} ({metric(floor)}) by {amount}; {end}"


def _num_evaluated(run: RunView) -> float:
    known = [(run.data.get("splits") or {}).get("validation", {}).get("num_rows"), run.config.get("max_eval_samples")]
    return min((number for number in known if isinstance(number, int)), default=math.inf)


def _is_perfect(value: float, is_more_better: bool) -> bool:
    """Whether no model can do better: 1, 100, or no error at all."""
    return value in (1.0, 100.0) if is_more_better else value == 0.0


def _amount(gain: float, value: float, floor: float, is_share: bool) -> str:
    """Return a difference: in points for shares and for metrics out of a hundred, but not for errors."""
    if not is_share:
        return number(gain, 3)
    if max(value, floor) <= 1 and min(value, floor) >= 0:
        return f"{100 * gain:.1f} points"
    return f"{gain:.1f} points" if 50 < max(value, floor) <= 100 else number(gain, 3)


def _nothing_yet(run: RunView) -> str:
    if run.state == "new":
        return "This run has not begun: there is nothing to show yet."
    if not run.metrics.num_records:
        return "metrics.jsonl holds no record yet: nothing was logged, so there are no curves and no result."
    if run.is_live:
        return "No evaluation yet: the curves show the training so far."
    return "This run ended without an evaluation: there are curves, and no result."


def _facts(run: RunView) -> list[tuple[str, str]]:
    status, result = run.status, run.result
    updates = result.get("updates") or status.get("update") or run.metrics.update
    epochs = result.get("epochs") or status.get("epoch")
    facts = [("updates", f"{updates:,}" if isinstance(updates, int) else str(updates))]
    if epochs:
        facts.append(("epochs", number(float(epochs))))
    best = best_update(run)
    if best is not None:
        facts.append(("best at update", number(best)))
    seconds = result.get("seconds") or run.metrics.seconds
    facts.append(("time", duration(float(seconds))))
    num_resumes = sum(start.get("resumed_from") is not None for start in run.metrics.starts)
    if num_resumes:
        facts.append(("resumed", plural(num_resumes, "time")))
    splits = run.data.get("splits") or {}
    for name in ("train", "validation", "test"):
        if name in splits:
            num_rows = int(splits[name].get("num_rows", 0))
            limit = run.config.get(_LIMITS.get(name, ""))
            is_cut = isinstance(limit, int) and limit < num_rows
            facts.append((f"{name} rows", f"{limit:,} of {num_rows:,}" if is_cut else f"{num_rows:,}"))
    return facts
