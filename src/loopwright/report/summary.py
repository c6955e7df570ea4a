"""The top of a report: the result with its interval, the baselines, and one sentence of interpretation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from loopwright.quantities import counted
from loopwright.report.curves import best_update
from loopwright.report.formats import duration, metric, number
from loopwright.report.run_view import RunView

_LIMITS = {"train": "max_train_samples", "validation": "max_eval_samples", "test": "max_test_samples"}
_STATES = {"preempted": "interrupted", "new": "not started"}  # others are shown as they are

Interval = tuple[float, float]


class Bar(NamedTuple):
    """A value in a bar chart; `share` is the length of the bar, and `low` to `high` its interval, all from 0 to 1."""

    name: str
    value: float
    share: float
    low: float | None = None
    high: float | None = None
    is_ours: bool = False


@dataclass
class Card:
    """The result of a run; `value` is None before the first evaluation. `others`: (name, value, interval in words)."""

    metric: str = ""
    tokens: str = ""
    value: float | None = None
    interval: Interval | None = None
    bars: list[Bar] = field(default_factory=list)
    verdict: str = ""
    others: list[tuple[str, str, str]] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    state: str = ""
    missing: list[str] = field(default_factory=list)


def card_of(run: RunView) -> Card:
    values, intervals = _values(run)
    beside = {name: f" ({each})" for name, each in of_both_splits(run.result, "tokens").items()}
    name = run.metric if run.metric in values else next(iter(values), None)
    card = Card(state=_STATES.get(run.state, run.state), facts=_facts(run))
    if name is None:
        card.verdict = _nothing_yet(run)
        return card
    card.metric, card.value, card.interval = name, values.pop(name), intervals.get(name)
    card.tokens = beside.get(name, "")
    baselines = {baseline: found[name] for baseline, found in run.baselines.items() if name in found}
    card.bars = _bars(card.value, card.interval, baselines)
    card.verdict = ("" if run.result else "So far, at the best evaluation: ") + _verdict(run, card, baselines)
    card.others = [
        (other.replace("_", " ") + beside.get(other, ""), metric(value), interval_text(intervals.get(other)))
        for other, value in values.items()
    ]
    card.missing = missing_intervals(of_both_splits(run.result, "no_intervals"))
    card.others += [(other, str(value), "") for other, value in of_both_splits(run.result, "nonfinite").items()]
    return card


def of_both_splits(result: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return values of a result by metric; the names of those on the test data begin with "test "."""
    tested = result.get(f"test_{key}") or {}
    return {**(result.get(key) or {}), **{f"test {name}": value for name, value in tested.items()}}


def missing_intervals(reasons: Mapping[str, str]) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [f"No interval for {', '.join(each)}: {reason}." for reason, each in names.items()]


def interval_text(bounds: Interval | None) -> str:
    return "" if bounds is None else f"{metric(bounds[0])} to {metric(bounds[1])}"


def _values(run: RunView) -> tuple[dict[str, float], dict[str, Interval]]:
    """Return metrics and intervals, from the result or else from the best evaluation so far."""
    values: dict[str, float] = {}
    intervals: dict[str, Interval] = {}
    if run.result.get("metrics"):
        for prefix, title in (("", ""), ("test_", "test ")):
            metrics, bounds = run.result.get(f"{prefix}metrics") or {}, run.result.get(f"{prefix}intervals") or {}
            values |= {f"{title}{name}": float(value) for name, value in metrics.items()}
            intervals |= {f"{title}{name}": (float(low), float(high)) for name, (low, high) in bounds.items()}
        return values, intervals
    update = best_update(run)
    at_best = {
        name.removeprefix("eval_"): value
        for name, curve in run.metrics.series.items()
        if name.startswith("eval_") and (value := _at(curve.points(1 << 12), update)) is not None
    }
    for name, value in at_best.items():
        if not (name.endswith(("_low", "_high")) and name.rpartition("_")[0] in at_best):
            values[name] = value
            if f"{name}_low" in at_best and f"{name}_high" in at_best:
                intervals[name] = at_best[f"{name}_low"], at_best[f"{name}_high"]
    if "loss" in values:
        values.pop("loss_epoch", None)
    return values, intervals


def _at(points: list[tuple[float, float]], update: float | None) -> float | None:
    if not points:
        return None
    return next((value for x, value in reversed(points) if x == update), points[-1][1])


def _bars(value: float, interval: Interval | None, baselines: Mapping[str, float]) -> list[Bar]:
    everything = [value, *baselines.values(), *(interval or ())]
    if min(everything) < 0:
        return []
    top = 1.0 if max(everything) <= 1 else 100.0 if 50 < max(everything) <= 100 else max(everything) * 1.05
    low, high = (None, None) if interval is None else (interval[0] / top, interval[1] / top)
    ours = Bar("this run", value, value / top, low, high, True)
    return [ours, *(Bar(name, each, each / top) for name, each in baselines.items())]


def _verdict(run: RunView, card: Card, baselines: Mapping[str, float]) -> str:
    assert card.value is not None
    verdict = run.result.get("verdict") or {}
    needed = ("baseline", "baseline_value", "metric", "direction")
    if all(verdict.get(name) is not None for name in needed) and {"kind", "value"} <= verdict.keys():
        return verdict_text(verdict, card.metric)
    if not baselines:
        range_ = "" if card.interval is None else f" (95 % interval: {interval_text(card.interval)})"
        return f"{card.metric} is {metric(card.value)}{range_}; there is no baseline to compare it with."
    sign = 1 if run.is_more_better else -1
    name = max(baselines, key=lambda each: sign * baselines[each])
    found = {"metric": card.metric, "direction": "max" if sign > 0 else "min", "value": card.value}
    reason = "unknown" if run.result else "live"
    return verdict_text({**found, "baseline": name, "baseline_value": baselines[name], "kind": None, "reason": reason})


def verdict_text(verdict: Mapping[str, Any], shown: str | None = None) -> str:
    """Return a verdict in words; `shown` is the metric next to it."""
    name, kind, num_rows = verdict["metric"], verdict["kind"], verdict.get("rows", 0)
    unit = verdict.get("unit", "row")
    start = "On the test data: " if verdict.get("split") == "test" else ""
    start += "" if shown in (None, name) else f"By {name}, since no baseline has {shown}: "
    against = f"{verdict['baseline']} ({metric(verdict['baseline_value'])})"
    if verdict["value"] is None:
        return f"{start}{name} of the model is undefined; that of {against} is not. So there is no verdict."
    is_more_better, value, other = verdict["direction"] == "max", verdict["value"], verdict["baseline_value"]
    gain = value - other if is_more_better else other - value
    amount = _amount(abs(gain), value, other, is_share=is_more_better)
    is_perfect = math.isclose(value, 1) or math.isclose(value, 100) if is_more_better else value == 0
    if gain == 0 and is_perfect:
        return f"{start}As good as {verdict['baseline']}: both are perfect, so this data cannot tell them apart."
    difference = f"{amount} {'better' if gain > 0 else 'worse'}" if gain else "the same score"
    if kind is None:
        why = {
            "rows": f"{counted(num_rows, unit, 'is')} too few to judge it by",
            "live": "the verdict follows at the end",
        }.get(verdict["reason"], "there are no scores of single rows to judge it by")
        return f"{start}{difference.capitalize()} {'than' if gain else 'as'} {against}; {why}."
    p = "p < 0.001" if verdict["p"] < 0.001 else f"p = {verdict['p']:.2g}"
    picked = verdict.get("evaluations", 1)
    evidence = [p, counted(num_rows, unit), f"{verdict['seeds']} seeds" if "seeds" in verdict else ""]
    evidence.append(f"best of {picked} evaluations" if picked > 1 and gain > 0 else "")
    found = f"({', '.join(filter(None, evidence))})"
    if kind == "indistinct":
        return f"{start}Not distinguishable from {against}: {difference} {found}."
    return f"{start}{kind.capitalize()} than {against} by {amount} {found}."


def _amount(gain: float, value: float, baseline: float, is_share: bool) -> str:
    """Return a difference: in points for shares and for metrics out of a hundred, but not for errors."""
    if not is_share:
        return number(gain, 3)
    if max(value, baseline) <= 1 and min(value, baseline) >= 0:
        return f"{100 * gain:.1f} points"
    return f"{gain:.1f} points" if 50 < max(value, baseline) <= 100 else number(gain, 3)


def _nothing_yet(run: RunView) -> str:
    if run.state == "new":
        return "This run has not started yet."
    if not run.metrics.num_records:
        return "metrics.jsonl has no records yet: there are no curves and no result."
    if run.is_live:
        return "No evaluation yet: the curves show the training so far."
    return "This run ended without an evaluation: there are curves but no result."


def _facts(run: RunView) -> list[tuple[str, str]]:
    status, result = run.status, run.result
    updates = result.get("updates") or status.get("update") or run.metrics.update
    epochs = status.get("epochs", result.get("epochs"))  # a resumed run still has its earlier result
    best = best_update(run)
    num_resumes = sum(start.get("resumed_from") is not None for start in run.metrics.starts)
    facts = [("updates", f"{updates:,}" if isinstance(updates, int) else str(updates))]
    facts += [("epochs", number(float(epochs)))] if epochs is not None else []
    facts += [("best at update", number(best))] if best is not None else []
    facts.append(("time", duration(float(result.get("seconds") or run.metrics.seconds))))
    facts += [("resumed", counted(num_resumes, "time"))] if num_resumes else []
    splits = run.data.get("splits") or {}
    for name in ("train", "validation", "test"):
        if name in splits:
            num_rows = int(splits[name].get("num_rows", 0))
            limit = run.config.get(_LIMITS.get(name, ""))
            is_cut = isinstance(limit, int) and limit < num_rows
            facts.append((f"{name} rows", f"{limit:,} of {num_rows:,}" if is_cut else f"{num_rows:,}"))
    return facts
