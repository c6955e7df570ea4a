"""The charts of a report: loss, metrics, learning rate, speed; for one run or several overlaid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from loopwright.report.charts import NUM_COLOURS, Chart, Curve
from loopwright.report.run_view import RunView
from loopwright.report.series import Mark

_MOST_POINTS: Final = 24_000  # over all curves of a page: about 600 kB
_COLUMNS: Final = 600
_FEWEST_COLUMNS: Final = 24
_MOST_CHARTS: Final = 40
_DOTS: Final = 40
_EVAL_LOSSES: Final = ("eval_loss", "eval_loss_epoch", "intermediate_eval_loss", "evaluation_loss")
_TRAIN_LOSSES: Final = ("loss", "train_loss", "train_loss_epoch")
# Logged series (the first that exists), title and unit. Charts with a unit start at zero.
_COURSE: Final = (
    (("lr", "learning_rate"), "Learning rate", ""),
    (("gradient_norm", "grad_norm"), "Gradient norm", ""),
    (("samples_per_second",), "Samples per second", "amount"),
    (("tokens_per_second",), "Tokens per second", "amount"),
    (("data_wait",), "Waiting for data", "percent"),
    (("padding_waste",), "Padding", "percent"),
    (("peak_memory_bytes",), "Memory, peak", "bytes"),
    (("flops_utilisation",), "Utilisation of the device", "percent"),
    (("gpu_watts",), "Watts", "amount"),
)
_BOUNDS: Final = ("_low", "_high")


def charts_of(runs: Sequence[RunView]) -> list[Chart]:
    """Return the charts of these runs, the loss first; curves of several runs are overlaid."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics.series))
    columns = max(min(_COLUMNS, _MOST_POINTS // 2 // max(len(names) * len(runs), 1)), _FEWEST_COLUMNS)
    charts = [_loss_chart(runs, group, columns) for group in _groups(runs)]
    charts += [chart for group in _groups(runs) for chart in _metric_charts(runs, group, names, columns)]
    used = {*_EVAL_LOSSES, *_TRAIN_LOSSES}
    for choices, title, unit in _COURSE:
        used |= set(choices)
        charts.append(_plain_chart(runs, choices, title, unit, columns))
    for name in names:
        is_shown = name in used or name.startswith("eval_") or name.removesuffix("_low").removesuffix("_high") != name
        if not is_shown:
            charts.append(_plain_chart(runs, (name,), name.replace("_", " "), "", columns))
    last = max((run.metrics.update for run in runs), default=0)
    shown = [chart for chart in charts if any(curve.points for curve in chart.curves)][:_MOST_CHARTS]
    return [replace(chart, span=(0.0, float(last))) for chart in shown]


def best_update(run: RunView) -> float | None:
    """Return the update of the best evaluation so far."""
    if isinstance(run.result.get("update"), int):
        return float(run.result["update"])
    series = run.metrics.series.get(f"eval_{run.metric}") if run.metric else None
    best = series.best(run.is_more_better) if series is not None else None
    return None if best is None else best[0]


def _groups(runs: Sequence[RunView]) -> list[list[tuple[int, RunView]]]:
    """Return the runs with their indices by task: losses and metrics of different tasks have no common scale."""
    groups: dict[str, list[tuple[int, RunView]]] = {}
    for index, run in enumerate(runs):
        groups.setdefault(run.task, []).append((index, run))
    return list(groups.values())


def _titled(title: str, runs: Sequence[RunView], group: Sequence[tuple[int, RunView]]) -> str:
    return title if len(group) == len(runs) else f"{title}, {group[0][1].task}"


def _loss_chart(runs: Sequence[RunView], group: Sequence[tuple[int, RunView]], columns: int) -> Chart:
    curves = []
    is_alone = len(runs) == 1
    for index, run in group:
        series = run.metrics.series
        for kind, (title, names) in enumerate((("training", _TRAIN_LOSSES), ("evaluation", _EVAL_LOSSES))):
            points = next((series[name].points(columns) for name in names if name in series), [])
            is_dashed = kind == 0 and not is_alone
            has_dots = len(points) <= _DOTS and not is_dashed
            name = title if is_alone else f"{title} {run.id}"
            curve = Curve(name, points, _colour(index, len(runs), kind), has_dots=has_dots, is_dashed=is_dashed)
            curves += [curve] if points else []
    note = "" if is_alone else "training dashed, evaluation solid"
    title = _titled("Loss", runs, group)
    marks = _marks(runs, [index for index, _ in group])
    return Chart(title, curves, marks, is_wide=True, note=note, has_legend=is_alone)


def _metric_charts(
    runs: Sequence[RunView], group: Sequence[tuple[int, RunView]], names: Sequence[str], columns: int
) -> list[Chart]:
    """Return a chart per evaluation metric, the decisive one first, with intervals and baselines."""
    bounds = {f"{name}{end}" for name in names for end in _BOUNDS}
    found = [name for name in names if name.startswith("eval_") and name not in bounds and name not in _EVAL_LOSSES]
    chief = next((f"eval_{run.metric}" for _, run in group if run.metric), None)
    found.sort(key=lambda name: name != chief)
    charts = []
    is_alone = len(runs) == 1
    for name in found:
        short = name.removeprefix("eval_")
        shown = {index: run for index, run in group if name in run.metrics.series}
        curves = [
            _metric_curve(run, name, columns, _colour(index, len(runs), 1), is_alone) for index, run in shown.items()
        ]
        levels = [
            (each, values[short]) for _, run in group for each, values in run.baselines.items() if short in values
        ]
        note = "decides which model is best" if is_alone and runs[0].decisive == short else ""
        title = _titled(short.replace("_", " "), runs, group)
        charts.append(Chart(title, curves, _marks(runs, list(shown)), list(dict.fromkeys(levels)), note=note))
    return charts


def _metric_curve(run: RunView, name: str, columns: int, colour: int, is_alone: bool) -> Curve:
    """Return the curve of a metric, with its interval if it is the only run on the chart."""
    series = run.metrics.series
    points = series[name].points(columns)
    band = []
    if is_alone and all(f"{name}{end}" in series for end in _BOUNDS):
        lows = dict(series[f"{name}_low"].points(columns))
        highs = dict(series[f"{name}_high"].points(columns))
        band = [(x, lows[x], highs[x]) for x, _ in points if x in lows and x in highs]
    label = name.removeprefix("eval_").replace("_", " ") if is_alone else run.id
    return Curve(label, points, colour, band, has_dots=len(points) <= _DOTS)


def _plain_chart(runs: Sequence[RunView], choices: Sequence[str], title: str, unit: str, columns: int) -> Chart:
    curves, shown = [], []
    for index, run in enumerate(runs):
        name = next((name for name in choices if name in run.metrics.series), None)
        if name is not None:
            points = run.metrics.series[name].points(columns)
            label = title.lower() if len(runs) == 1 else run.id
            shown.append(index)
            curves.append(Curve(label, points, _colour(index, len(runs), 0), has_dots=len(points) <= _DOTS))
    return Chart(title, curves, _marks(runs, shown), unit=unit.removeprefix("amount"), is_from_zero=bool(unit))


def _colour(index: int, num_runs: int, kind: int) -> int:
    """Return a colour index: by kind in the report of one run, by run in a comparison."""
    return kind if num_runs == 1 else index % NUM_COLOURS


def _marks(runs: Sequence[RunView], shown: Sequence[int]) -> list[Mark]:
    """Return the marks of a single run; for several, only problems, in the colours of the runs on the chart.

    Args:
        runs: all runs of the page.
        shown: the indices of the runs with a curve on the chart.
    """
    if len(runs) > 1:
        return [
            mark._replace(text=f"{runs[index].id}: {mark.text}", colour=_colour(index, len(runs), 0))
            for index in shown
            for mark in runs[index].metrics.marks
            if mark.kind in ("resume", "split", "evalsplit", "nan")
        ]
    best = best_update(runs[0])
    return [*runs[0].metrics.marks, *([] if best is None else [Mark("best", best, "best evaluation")])]
