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
    (("peak_memory_bytes",), "Peak memory", "bytes"),
    (("flops_utilisation",), "Device utilisation", "percent"),
    (("gpu_watts",), "Watts", "amount"),
)
_BOUNDS: Final = ("_low", "_high")

Group = Sequence[tuple[int, RunView]]


def charts_of(runs: Sequence[RunView]) -> list[Chart]:
    """Return the charts of these runs, the loss first; curves of several runs are overlaid."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics.series))
    columns = max(min(_COLUMNS, _MOST_POINTS // 2 // max(len(names) * len(runs), 1)), _FEWEST_COLUMNS)
    is_alone, groups, everyone = len(runs) == 1, _groups(runs), list(enumerate(runs))
    losses = (("training", _TRAIN_LOSSES), ("evaluation", _EVAL_LOSSES))
    note = "" if is_alone else "training dashed, evaluation solid"
    plain = [_chart(runs, group, "Loss", losses, columns) for group in groups]
    charts = [replace(chart, is_wide=True, note=note, has_legend=is_alone) for chart in plain]
    charts += [chart for group in groups for chart in _metric_charts(runs, group, names, columns)]
    used = {*_EVAL_LOSSES, *_TRAIN_LOSSES}
    for choices, title, unit in _COURSE:
        used |= set(choices)
        chart = _chart(runs, everyone, title, ((title.lower(), choices),), columns)
        charts.append(replace(chart, unit=unit.removeprefix("amount"), is_from_zero=bool(unit)))
    for name in names:
        if not (name in used or name.startswith("eval_") or name.endswith(_BOUNDS)):
            title = name.replace("_", " ")
            charts.append(_chart(runs, everyone, title, ((title.lower(), (name,)),), columns))
    last = max((run.metrics.update for run in runs), default=0)
    shown = [chart for chart in charts if any(curve.points for curve in chart.curves)][:_MOST_CHARTS]
    return [replace(chart, span=(0.0, float(last))) for chart in shown]


def best_update(run: RunView) -> float | None:
    if isinstance(run.result.get("update"), int):
        return float(run.result["update"])
    series = run.metrics.series.get(f"eval_{run.metric}") if run.metric else None
    best = series.best(run.is_more_better) if series is not None else None
    return None if best is None else best[0]


def _groups(runs: Sequence[RunView]) -> list[Group]:
    """Return the runs with their indices by task: losses and metrics of different tasks have no common scale."""
    tasks = dict.fromkeys(run.task for run in runs)
    return [[(index, run) for index, run in enumerate(runs) if run.task == task] for task in tasks]


def _metric_charts(runs: Sequence[RunView], group: Group, names: Sequence[str], columns: int) -> list[Chart]:
    """Return a chart per evaluation metric, the decisive one first, with intervals and baselines."""
    bounds = {f"{name}{end}" for name in names for end in _BOUNDS}
    metrics = [name for name in names if name.startswith("eval_") and name not in bounds and name not in _EVAL_LOSSES]
    chief = next((f"eval_{run.metric}" for _, run in group if run.metric), None)
    charts = []
    for name in sorted(metrics, key=lambda name: name != chief):
        short = name.removeprefix("eval_")
        title = short.replace("_", " ")
        chart = _chart(runs, group, title, ((title, (name,)),), columns, kind=1, has_band=len(runs) == 1)
        levels = [(each, found[short]) for _, run in group for each, found in run.baselines.items() if short in found]
        note = "selects the best model" if len(runs) == 1 and runs[0].decisive == short else ""
        charts.append(replace(chart, levels=list(dict.fromkeys(levels)), note=note))
    return charts


def _chart(
    runs: Sequence[RunView],
    group: Group,
    title: str,
    lines: Sequence[tuple[str, Sequence[str]]],
    columns: int,
    kind: int = 0,
    has_band: bool = False,
) -> Chart:
    """Return a chart of a group of the runs; `lines` are (label, series, of which the first that exists is drawn).

    `kind` is the colour of the first line in the report of one run; in a comparison each run has its colour.
    """
    curves, shown, is_alone = [], [], len(runs) == 1
    for index, run in group:
        series = run.metrics.series
        for place, (label, names) in enumerate(lines):
            name = next((name for name in names if name in series), None)
            if name is None:
                continue
            points, band = series[name].points(columns), []
            if has_band and all(f"{name}{end}" in series for end in _BOUNDS):
                lows, highs = (dict(series[f"{name}{end}"].points(columns)) for end in _BOUNDS)
                band = [(x, lows[x], highs[x]) for x, _ in points if x in lows and x in highs]
            if not is_alone:
                label = f"{label} {run.name}" if len(lines) > 1 else run.name
            is_dashed = not is_alone and place < len(lines) - 1
            has_dots = len(points) <= _DOTS and not is_dashed
            colour = kind + place if is_alone else index % NUM_COLOURS
            curves.append(Curve(label, points, colour, band, has_dots, is_dashed))
            shown.append(index)
    title = title if len(group) == len(runs) else f"{title}, {group[0][1].task}"
    return Chart(title, curves, _marks(runs, list(dict.fromkeys(shown))))


def _marks(runs: Sequence[RunView], shown: Sequence[int]) -> list[Mark]:
    """Return all marks of a single run; of several, only problems, of the runs on the chart (indices `shown`)."""
    if len(runs) > 1:
        return [
            mark._replace(text=f"{runs[index].name}: {mark.text}", colour=index % NUM_COLOURS)
            for index in shown
            for mark in runs[index].metrics.marks
            if mark.kind in ("resume", "split", "evalsplit", "nan")
        ]
    best = best_update(runs[0])
    return [*runs[0].metrics.marks, *([] if best is None else [Mark("best", best, "best evaluation")])]
