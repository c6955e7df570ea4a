"""Charts as inline SVG: curves with marks, bands and levels; and histograms. Colours come from the style sheet."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final, NamedTuple

from loopwright.report.formatting import number
from loopwright.report.series import Point

_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 12.0, 10.0, 24.0
_MARK_ROW = 7.0
_LOG_RATIO: Final = 100.0
NUM_COLOURS: Final = 8
MARK_NAMES: Final = {
    "save": "save",
    "resume": "resume",
    "split": "memory split",
    "evalsplit": "memory split in evaluation",
    "tier": "another guarantee",
    "skip": "skipped update",
    "mode": "step mode",
    "nan": "not a number",
    "best": "best",
}


@dataclass(frozen=True)
class Curve:
    """A line of a chart.

    Attributes:
        name: in the legend.
        points: (update, value).
        colour: its colour index in the style sheet.
        band: (update, low, high), the interval around it.
        has_dots: draw each point, for short curves.
    """

    name: str
    points: Sequence[Point]
    colour: int = 0
    band: Sequence[tuple[float, float, float]] = ()
    has_dots: bool = False
    is_dashed: bool = False


class ChartMark(NamedTuple):
    """An event at an update, drawn across a chart.

    Attributes:
        kind: a key of `MARK_NAMES`.
        text: a readable description.
        colour: the run's colour index if a chart has several runs; None for the colour of the kind.
    """

    kind: str
    update: float
    text: str
    colour: int | None = None


@dataclass(frozen=True)
class Chart:
    """Curves over the updates.

    Attributes:
        marks: events during the run.
        levels: (name, value) of horizontal lines: the baselines.
        unit: how values are shown: "", "percent" or "bytes".
        is_wide: use the full page width.
        note: next to the title.
        has_legend: name the curves next to the title.
        is_from_zero: start the value axis at zero, so that a nearly constant speed looks constant.
        span: the first and last update of the axis; None uses the curves' range.
    """

    title: str
    curves: Sequence[Curve]
    marks: Sequence[ChartMark] = ()
    levels: Sequence[tuple[str, float]] = ()
    unit: str = ""
    is_wide: bool = False
    note: str = ""
    has_legend: bool = False
    is_from_zero: bool = False
    span: tuple[float, float] | None = None
    kind: str = "chart"

    @property
    def is_log(self) -> bool:
        """Whether the value axis is logarithmic: all values are positive and span two decades."""
        values = [value for curve in self.curves for _, value in curve.points]
        return bool(values) and not self.is_from_zero and min(values) > 0 and max(values) / min(values) >= _LOG_RATIO

    @property
    def mark_kinds(self) -> list[tuple[str, str]]:
        """The kinds of marks on the chart, with their names, for the legend."""
        there = {mark.kind for mark in self.marks}
        return [(kind, name) for kind, name in MARK_NAMES.items() if kind in there]


@dataclass
class _Frame:
    width: float
    height: float
    low: float
    high: float
    bottom: float
    top: float
    is_log: bool
    _scale: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        ends = (self.bottom, self.top)
        self._scale = (math.log(ends[0]), math.log(ends[1])) if self.is_log else ends

    def x(self, update: float) -> float:
        share = (update - self.low) / (self.high - self.low)
        return _LEFT + share * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        at = math.log(max(value, 1e-300)) if self.is_log else value
        share = (at - self._scale[0]) / (self._scale[1] - self._scale[0])
        return self.height - _BOTTOM - min(max(share, 0.0), 1.0) * (self.height - _BOTTOM - _TOP)


def draw(chart: Chart) -> str:
    """Return the SVG of a chart, with its numbers for the script; empty without points."""
    if not any(curve.points for curve in chart.curves):
        return ""
    frame = _frame(chart)
    parts = [_grid(frame, chart)]
    for name, value in chart.levels:
        if not frame.bottom <= value <= frame.top:
            continue
        at = _short(frame.y(value))
        parts.append(
            f'<line class="level" x1="{_short(_LEFT)}" x2="{_short(frame.width - _RIGHT)}" y1="{at}" y2="{at}"/>'
            f'<text class="level-name" x="{_short(frame.width - _RIGHT - 4)}" y="{_short(frame.y(value) - 4)}">'
            f"{escape(name)} {shown(value, chart.unit)}</text>"
        )
    parts.append(_marks(frame, chart))
    for index, curve in enumerate(chart.curves):
        parts.append(_curve(frame, curve, index))
    numbers = json.dumps(
        {
            "unit": chart.unit,
            "log": chart.is_log,
            "frame": [frame.width, frame.height, _LEFT, _RIGHT, _TOP, _BOTTOM],
            "range": [_rounded(frame.low), _rounded(frame.high), _rounded(frame.bottom), _rounded(frame.top)],
            "curves": [
                {
                    "name": curve.name,
                    "x": [_rounded(x) for x, _ in curve.points],
                    "y": [_rounded(y) for _, y in curve.points],
                }
                for curve in chart.curves
            ],
            "marks": [
                [mark.kind, _rounded(mark.update), mark.text, mark.colour] for mark in _shown_marks(frame, chart)
            ],
        },
        separators=(",", ":"),
    )
    label = f"{chart.title}: {', '.join(curve.name for curve in chart.curves)} over updates"
    return (
        f'<svg class="chart" viewBox="0 0 {_short(frame.width)} {_short(frame.height)}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
        f'<script type="application/json">{numbers.replace("<", chr(92) + "u003c")}</script>'
    )


def shown(value: float, unit: str, step: float | None = None) -> str:
    """Return a value in its unit; `step`, the tick distance, sets the number of decimals."""
    if unit == "percent":
        return f"{_fixed(100 * value, None if step is None else 100 * step)} %"
    if unit == "bytes":
        size, name = (1e9, "GB") if abs(value) >= 1e9 else (1e6, "MB")
        return f"{_fixed(value / size, None if step is None else step / size)} {name}"
    return _fixed(value, step)


def _fixed(value: float, step: float | None) -> str:
    """Return a number with the decimals that this tick distance needs; with three digits without a step."""
    if step is None or step >= 1e4:
        return number(value, 3)
    if step < 1e-4:
        digits = math.ceil(math.log10(abs(value) / step) - 1e-9) + 1 if abs(value) > step else 3
        return f"{value:.{max(digits, 3)}g}"
    return f"{value:,.{max(-math.floor(math.log10(step) + 1e-9), 0)}f}"


def draw_histogram(edges: Sequence[float], groups: Sequence[tuple[str, Sequence[int]]]) -> str:
    """Return the SVG of one or two histograms over the same edges."""
    width, height = 460.0, 180.0
    highest = max((max(counts, default=0) for _, counts in groups), default=0) or 1
    num_bars = len(edges) - 1
    step = (width - _LEFT - _RIGHT) / max(num_bars, 1)
    parts = []
    for level in ticks(0.0, highest, 3):
        if level != int(level):
            continue
        at = height - _BOTTOM - level / highest * (height - _BOTTOM - _TOP)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{_short(at)}" y2="{_short(at)}"/>')
        parts.append(f'<text class="tick y" x="{_LEFT - 6}" y="{_short(at + 3.5)}">{number(level)}</text>')
    each = (step - 1) / max(len(groups), 1)
    for place, (name, counts) in enumerate(groups):
        for index, count in enumerate(counts):
            tall = count / highest * (height - _BOTTOM - _TOP)
            parts.append(
                f'<rect class="bar c{place}" x="{_short(_LEFT + index * step + place * each)}" width="{_short(each)}" '
                f'y="{_short(height - _BOTTOM - tall)}" height="{_short(tall)}"><title>{escape(name)} '
                f"{number(edges[index], 3)} to {number(edges[index + 1], 3)}: {count:,}</title></rect>"
            )
    span = edges[-1] - edges[0]
    marked = ticks(edges[0], edges[-1], 6)
    apart = marked[1] - marked[0] if len(marked) > 1 else None
    for value in marked:
        at = _LEFT + (value - edges[0]) / span * (width - _LEFT - _RIGHT)
        parts.append(f'<text class="tick x" x="{_short(at)}" y="{height - 8}">{shown(value, "", apart)}</text>')
    return f'<svg class="histogram" viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def draw_lines(x_name: str, y_name: str, groups: Sequence[tuple[str, Sequence[Point]]]) -> str:
    """Return the SVG of lines through points, with axes that start at zero or below."""
    width, height = 460.0, 230.0
    points = [point for _, curve in groups for point in curve]
    low, high = min(0.0, *(x for x, _ in points)), max(x for x, _ in points)
    bottom, top = min(0.0, *(y for _, y in points)), max(y for _, y in points)
    # Shares are drawn up to one, so that the gap is visible.
    high, top = (1.0 if low >= 0 and end <= 1 else end for end in (high, top))
    frame = _Frame(width, height - 14, low, high if high > low else low + 1, bottom, max(top, bottom + 1e-9), False)
    parts = []
    levels, places = ticks(frame.bottom, frame.top, 5), ticks(frame.low, frame.high, 5)
    for value in levels:
        at = _short(frame.y(value))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{at}" y2="{at}"/>')
        words = shown(value, "", levels[1] - levels[0] if len(levels) > 1 else None)
        parts.append(f'<text class="tick y" x="{_LEFT - 6}" y="{_short(frame.y(value) + 3.5)}">{words}</text>')
    for value in places:
        words = shown(value, "", places[1] - places[0] if len(places) > 1 else None)
        parts.append(f'<text class="tick x" x="{_short(frame.x(value))}" y="{height - 20}">{words}</text>')
    for place, (name, curve) in enumerate(groups):
        parts.append(_curve(frame, Curve(name, curve, place % NUM_COLOURS), place))
    middle, half = _short((_LEFT + width - _RIGHT) / 2), _short((_TOP + height - _BOTTOM) / 2)
    parts.append(f'<text class="tick x" x="{middle}" y="{height - 5}">{escape(x_name)}</text>')
    parts.append(f'<text class="tick x" transform="translate(12 {half}) rotate(-90)">{escape(y_name)}</text>')
    label = f"{y_name} over {x_name}"
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


# ---------------------------------------------------------------------------------------------------- the parts


def _frame(chart: Chart) -> _Frame:
    points = [point for curve in chart.curves for point in curve.points]
    values = [value for _, value in points]
    values += [bound for curve in chart.curves for _, low, high in curve.band for bound in (low, high)]
    is_log = chart.is_log and min(values) > 0
    if not is_log:
        # A distant baseline would squeeze the curve: it is drawn only if it is close enough.
        reach = 2 * (max(values) - min(values)) or abs(max(values)) or 1.0
        lowest, highest = min(values) - reach, max(values) + reach
        values += [value for _, value in chart.levels if lowest <= value <= highest]
    places = [*(x for x, _ in points), *(mark.update for mark in chart.marks), *(chart.span or ())]
    low, high = min(places), max(places)
    low = 0.0 if 0 < low < 0.5 * high or low == high > 0 else low
    high = high if high > low else low + 1
    bottom, top = min(values), max(values)
    if is_log:
        return _Frame(*_size(chart), low, high, bottom * 0.9, top * 1.1, True)
    if bottom == top:
        bottom, top = (0.0, 1.25 * top or 1.0) if bottom >= 0 else (bottom * 1.25, 0.0)
    room = 0.06 * (top - bottom)
    lowest = 0.0 if bottom >= 0 and (chart.is_from_zero or bottom < 0.15 * top) else bottom - room
    return _Frame(*_size(chart), low, high, lowest, 1.0 if chart.unit == "percent" and top > 0.9 else top + room, False)


def _size(chart: Chart) -> tuple[float, float]:
    return (920.0, 300.0) if chart.is_wide else (460.0, 190.0)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return about `most` round numbers between two values."""
    if high <= low:
        return [low]
    raw = (high - low) / most
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= raw * 0.999)
    first = math.ceil(low / step)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _grid(frame: _Frame, chart: Chart) -> str:
    if frame.is_log:
        decades = range(math.ceil(math.log10(frame.bottom)), math.floor(math.log10(frame.top)) + 1)
        levels = [10.0**power for power in decades]
    else:
        levels = ticks(frame.bottom, frame.top, 7 if chart.is_wide else 5)
    parts = ['<g class="axes">']
    step = levels[1] - levels[0] if len(levels) > 1 and not frame.is_log else None
    for value in levels:
        at = frame.y(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_short(frame.width - _RIGHT)}" y1="{_short(at)}" y2="{_short(at)}"/>'
            f'<text class="tick y" x="{_LEFT - 6}" y="{_short(at + 3.5)}">{shown(value, chart.unit, step)}</text>'
        )
    for update in ticks(frame.low, frame.high, 8 if chart.is_wide else 4):
        if update != int(update):
            continue
        place = _short(frame.x(update))
        parts.append(f'<text class="tick x" x="{place}" y="{_short(frame.height - 7)}">{_count(update)}</text>')
    return "".join(parts) + "</g>"


def _curve(frame: _Frame, curve: Curve, index: int) -> str:
    parts = []
    if len(curve.band) == 1:
        at, low, high = curve.band[0]
        x = _short(frame.x(at))
        parts.append(f'<path class="line c{curve.colour}" d="M{x} {_short(frame.y(low))}V{_short(frame.y(high))}"/>')
    elif curve.band:
        upper = [f"{_short(frame.x(x))} {_short(frame.y(high))}" for x, _, high in curve.band]
        lower = [f"{_short(frame.x(x))} {_short(frame.y(low))}" for x, low, _ in reversed(curve.band)]
        parts.append(f'<path class="band c{curve.colour}" d="M{"L".join(upper + lower)}Z"/>')
    places = [f"{_short(frame.x(x))} {_short(frame.y(y))}" for x, y in curve.points]
    if len(places) > 1:
        dashed = " dashed" if curve.is_dashed else ""
        parts.append(f'<path class="line c{curve.colour}{dashed}" data-curve="{index}" d="M{"L".join(places)}"/>')
    if curve.has_dots or len(places) == 1:
        for place in places:
            x, y = place.split()
            parts.append(f'<circle class="dot c{curve.colour}" cx="{x}" cy="{y}" r="2.6"/>')
    return "".join(parts)


def _shown_marks(frame: _Frame, chart: Chart) -> list[ChartMark]:
    """Return the distinguishable marks: one per kind, colour and pixel column."""
    seen: set[tuple[str, int | None, int]] = set()
    kept = []
    for mark in chart.marks:
        place = (mark.kind, mark.colour, round(frame.x(mark.update)))
        if place not in seen:
            seen.add(place)
            kept.append(mark)
    return kept


def _marks(frame: _Frame, chart: Chart) -> str:
    parts = ['<g class="marks">']
    floor = frame.height - _BOTTOM
    for kind, update, text, colour in _shown_marks(frame, chart):
        x = frame.x(update)
        title = f"<title>{escape(text)} at update {_count(update)}</title>"
        if kind == "save":
            parts.append(
                f'<path class="mark save" d="M{_short(x - 3.5)} {_short(floor)}h7l-3.5 -{_short(_MARK_ROW - 1)}z">'
                f"{title}</path>"
            )
        else:
            own = "" if colour is None else f" own c{colour}"
            parts.append(
                f'<line class="mark {kind}{own}" x1="{_short(x)}" x2="{_short(x)}" y1="{_short(_TOP)}" '
                f'y2="{_short(floor)}">{title}</line>'
            )
    return "".join(parts) + "</g>"


def _count(update: float) -> str:
    if update >= 1e6:
        return f"{update / 1e6:.3g}M"
    return f"{update / 1e3:.3g}k" if update >= 1e4 else f"{update:.0f}"


def _short(value: float) -> str:
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def _rounded(value: float) -> float:
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.5g}")
