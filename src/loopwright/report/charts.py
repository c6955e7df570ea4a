"""Charts as inline SVG: curves with marks, bands and levels; and histograms. Colours come from the style sheet."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Final, NamedTuple

from loopwright.config.display_width import display_width, truncate
from loopwright.report.formats import number
from loopwright.report.series import Mark, Point

_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 12.0, 10.0, 24.0
_LINE = 11.0  # the height of a small text
_COLUMN = 6.0  # the width of a letter of a small text
_MARK_ROW = 7.0
_LOG_RATIO: Final = 100.0
NUM_COLOURS: Final = 8
MARK_NAMES: Final = {
    "save": "save",
    "resume": "resume",
    "split": "memory split",
    "evalsplit": "memory split in evaluation",
    "tier": "guarantee changed",
    "skip": "skipped update",
    "mode": "step mode",
    "nan": "not finite",
    "best": "best",
}


class Curve(NamedTuple):
    """A line through `points` (update, value); `band` is the interval around it, (update, low, high)."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    band: Sequence[tuple[float, float, float]] = ()
    has_dots: bool = False
    is_dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves over the updates."""

    title: str
    curves: Sequence[Curve]
    marks: Sequence[Mark] = ()
    levels: Sequence[tuple[str, float]] = ()  # (name, value) of horizontal lines: the baselines
    unit: str = ""  # or "percent" or "bytes"
    is_wide: bool = False
    note: str = ""
    has_legend: bool = False
    is_from_zero: bool = False  # so that a nearly constant speed looks constant
    span: tuple[float, float] | None = None  # the first and last update of the axis; None uses the curves' range

    @property
    def is_log(self) -> bool:
        """Whether the value axis is logarithmic: all values are positive and span two decades."""
        values = [value for curve in self.curves for _, value in curve.points]
        return bool(values) and not self.is_from_zero and min(values) > 0 and max(values) / min(values) >= _LOG_RATIO

    @property
    def mark_kinds(self) -> list[tuple[str, str]]:
        there = {mark.kind for mark in self.marks}
        return [(kind, name) for kind, name in MARK_NAMES.items() if kind in there]


@dataclass
class _Frame:
    """Where values lie in an SVG: from `low` to `high` across, from `bottom` to `top` upwards."""

    width: float
    height: float
    low: float
    high: float
    bottom: float
    top: float
    is_log: bool = False

    def x(self, update: float) -> float:
        share = (update - self.low) / (self.high - self.low)
        return _LEFT + share * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        scale = math.log if self.is_log else float
        at = scale(max(value, 1e-300)) if self.is_log else value
        share = (at - scale(self.bottom)) / (scale(self.top) - scale(self.bottom))
        share = min(max(share, 0.0), 1.0)
        return self.height - _BOTTOM - share * (self.height - _BOTTOM - _TOP)

    def place(self, update: float, value: float) -> str:
        return f"{_short(self.x(update))} {_short(self.y(value))}"

    def across(self, kind: str, value: float) -> str:
        at = _short(self.y(value))
        return f'<line class="{kind}" x1="{_short(_LEFT)}" x2="{_short(self.width - _RIGHT)}" y1="{at}" y2="{at}"/>'

    def level(self, value: float, text: str) -> str:
        return self.across("grid", value) + _text("tick y", _LEFT - 6, self.y(value) + 3.5, text)


def draw(chart: Chart) -> str:
    """Return the SVG of a chart, with its numbers for the script; empty without points."""
    if not any(curve.points for curve in chart.curves):
        return ""
    frame = _frame(chart)
    parts = [_grid(frame, chart)]
    levels = [(name, value) for name, value in chart.levels if frame.bottom <= value <= frame.top]
    parts += (frame.across("level", value) for _, value in levels)
    parts += _level_names(frame, [(frame.y(value) - 4, name, shown(value, chart.unit)) for name, value in levels])
    distinct: dict[tuple[str, int | None, int], Mark] = {}  # the first mark per kind, colour and pixel column
    for mark in chart.marks:
        distinct.setdefault((mark.kind, mark.colour, round(frame.x(mark.update))), mark)
    marks = list(distinct.values())
    parts.append(f'<g class="marks">{"".join(_mark(frame, mark) for mark in marks)}</g>')
    parts += (_curve(frame, curve, index) for index, curve in enumerate(chart.curves))
    numbers = {
        "unit": chart.unit,
        "log": chart.is_log,
        "frame": [frame.width, frame.height, _LEFT, _RIGHT, _TOP, _BOTTOM],
        "range": list(map(_rounded, (frame.low, frame.high, frame.bottom, frame.top))),
        "curves": [
            {"name": name, "x": [_rounded(x) for x, _ in points], "y": [_rounded(y) for _, y in points]}
            for name, points, *_ in chart.curves
        ],
        "marks": [[kind, _rounded(update), text, colour] for kind, update, text, colour in marks],
    }
    label = f"{chart.title}: {', '.join(curve.name for curve in chart.curves)} over updates"
    script = json.dumps(numbers, separators=(",", ":")).replace("<", chr(92) + "u003c")
    svg = _svg(frame, f'class="chart" aria-label="{escape(label)}"', parts)
    return f'{svg}<script type="application/json">{script}</script>'


def _level_names(frame: _Frame, names: Sequence[tuple[float, str, str]]) -> list[str]:
    """Return (place, name, value) as texts: those that would overlap share a row if they fit, or else move apart."""
    most = int((frame.width - _LEFT - _RIGHT - 8) / _COLUMN)
    rows: dict[float, tuple[str, int]] = {}  # the text and its columns by place
    for place, name, value in names:
        name = truncate(name, most - len(value) - 1)
        label = name if name.isascii() else f"\u2068{name}\u2069"  # right-to-left letters would draw the value in
        text, width = f"{escape(label)} {value}", display_width(name) + 1 + len(value)
        near = min(rows, key=lambda each: abs(each - place), default=None)
        if near is None or abs(near - place) >= _LINE:
            rows[place] = text, width
        elif rows[near][1] + 3 + width <= most:
            rows[near] = f"{rows[near][0]} · {text}", rows[near][1] + 3 + width
        else:
            moves = (place + sign * step * _LINE / 2 for step in range(1, 60) for sign in (1, -1))
            inside = (y for y in moves if _TOP < y < frame.height - _BOTTOM)
            free = (y for y in inside if all(abs(y - row) >= _LINE for row in rows))
            rows[next(free, place)] = text, width
    return [_text("level-name", frame.width - _RIGHT - 4, place, text) for place, (text, _) in rows.items()]


def shown(value: float, unit: str, step: float | None = None) -> str:
    """Return a value in its unit; `step`, the tick distance, sets the number of decimals."""
    if unit == "percent":
        return f"{_fixed(100 * value, step and 100 * step)} %"
    if unit == "bytes":
        size, name = (1e9, "GB") if abs(value) >= 1e9 else (1e6, "MB")
        return f"{_fixed(value / size, step and step / size)} {name}"
    return _fixed(value, step)


def _fixed(value: float, step: float | None) -> str:
    """Return a number with the decimals that this tick distance needs; with three digits without a step."""
    if step is None or step >= 1e4:
        return number(value, 3)
    if step < 1e-4:
        digits = math.ceil(math.log10(abs(value) / step) - 1e-9) + 1 if abs(value) > step else 3
        return f"{value:.{max(digits, 3)}g}"
    return f"{value:,.{max(-math.floor(math.log10(step) + 1e-9), 0)}f}"


def draw_histogram(
    edges: Sequence[float], groups: Sequence[tuple[str, Sequence[float]]], sizes: Sequence[int] = ()
) -> str:
    """Return the SVG of a histogram; with `sizes`, of shares of so many samples, and the diagonal."""
    highest = 1.0 if sizes else max((max(counts, default=0) for _, counts in groups), default=0) or 1
    frame = _Frame(460.0, 180.0, edges[0], edges[-1], 0.0, highest)
    levels = [level for level in ticks(0.0, highest, 3) if sizes or level == int(level)]
    parts = [frame.level(level, f"{level:g}" if sizes else number(level)) for level in levels]
    step = (frame.width - _LEFT - _RIGHT) / (len(edges) - 1)
    width = (step - 1) / max(len(groups), 1)
    texts = []
    for place, (name, counts) in enumerate(groups):
        for index, count in enumerate(counts):
            x, y = _LEFT + index * step + place * width, frame.y(count)
            shown_count = f"{count:.3f} of {sizes[index]:,}" if sizes else f"{count:,}"
            texts.append(f"{name} {number(edges[index], 3)} to {number(edges[index + 1], 3)}: {shown_count}")
            parts.append(
                f'<rect class="bar c{place}" x="{_short(x)}" width="{_short(width)}" y="{_short(y)}" '
                f'height="{_short(frame.height - _BOTTOM - y)}"><title>{escape(texts[-1])}</title></rect>'
            )
            if sizes and sizes[index]:
                parts.append(_text("tick x", x + width / 2, y - 2, _count(sizes[index])))
    if sizes:
        parts.append(f'<path class="line c1" d="M{frame.place(0.0, 0.0)}L{frame.place(1.0, 1.0)}"/>')
    parts += _x_ticks(frame, ticks(edges[0], edges[-1], 6), frame.height - 8)
    return _svg(frame, f'class="histogram" aria-label="{escape("; ".join(texts))}"', parts)


def draw_lines(x_name: str, y_name: str, groups: Sequence[tuple[str, Sequence[Point]]]) -> str:
    points = [point for _, curve in groups for point in curve]
    low, high = min(0.0, *(x for x, _ in points)), max(x for x, _ in points)
    bottom, top = min(0.0, *(y for _, y in points)), max(y for _, y in points)
    # Shares are drawn up to one, so that the gap is visible.
    high, top = (1.0 if low >= 0 and end <= 1 else end for end in (high, top))
    frame = _Frame(460.0, 216.0, low, high if high > low else low + 1, bottom, max(top, bottom + 1e-9))
    levels = ticks(frame.bottom, frame.top, 5)
    parts = [frame.level(value, shown(value, "", _distance(levels))) for value in levels]
    parts += _x_ticks(frame, ticks(frame.low, frame.high, 5), 210)
    for place, (name, curve) in enumerate(groups):
        parts.append(_curve(frame, Curve(name, curve, place % NUM_COLOURS), place))
    middle, half = (_LEFT + frame.width - _RIGHT) / 2, _short((_TOP + 230 - _BOTTOM) / 2)
    parts.append(_text("tick x", middle, 225, escape(x_name)))
    parts.append(f'<text class="tick x" transform="translate(12 {half}) rotate(-90)">{escape(y_name)}</text>')
    label = escape(f"{y_name} over {x_name}")
    return _svg(replace(frame, height=230.0), f'aria-label="{label}"', parts)


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
    size = (920.0, 300.0) if chart.is_wide else (460.0, 190.0)
    if is_log:
        return _Frame(*size, low, high, bottom * 0.9, top * 1.1, is_log=True)
    if bottom == top:
        bottom, top = (0.0, 1.25 * top or 1.0) if bottom >= 0 else (bottom * 1.25, 0.0)
    room = 0.06 * (top - bottom)
    lowest = 0.0 if bottom >= 0 and (chart.is_from_zero or bottom < 0.15 * top) else bottom - room
    highest = 1.0 if chart.unit == "percent" and top > 0.9 else top + room
    return _Frame(*size, low, high, lowest, highest)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return about `most` round numbers between two values."""
    if high <= low:
        return [low]
    raw = (high - low) / most
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= raw * 0.999)
    first = math.ceil(low / step)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _distance(values: Sequence[float]) -> float | None:
    return values[1] - values[0] if len(values) > 1 else None


def _x_ticks(frame: _Frame, values: Sequence[float], y: float) -> list[str]:
    return [_text("tick x", frame.x(value), y, shown(value, "", _distance(values))) for value in values]


def _grid(frame: _Frame, chart: Chart) -> str:
    if frame.is_log:
        decades = range(math.ceil(math.log10(frame.bottom)), math.floor(math.log10(frame.top)) + 1)
        levels = [10.0**power for power in decades]
    else:
        levels = ticks(frame.bottom, frame.top, 7 if chart.is_wide else 5)
    step = None if frame.is_log else _distance(levels)
    parts = [frame.level(value, shown(value, chart.unit, step)) for value in levels]
    for update in ticks(frame.low, frame.high, 8 if chart.is_wide else 4):
        if update == int(update):
            parts.append(_text("tick x", frame.x(update), frame.height - 7, _count(update)))
    return f'<g class="axes">{"".join(parts)}</g>'


def _curve(frame: _Frame, curve: Curve, index: int) -> str:
    parts = []
    if len(curve.band) == 1:
        at, low, high = curve.band[0]
        parts.append(f'<path class="line c{curve.colour}" d="M{frame.place(at, low)}V{_short(frame.y(high))}"/>')
    elif curve.band:
        upper = [frame.place(x, high) for x, _, high in curve.band]
        lower = [frame.place(x, low) for x, low, _ in reversed(curve.band)]
        parts.append(f'<path class="band c{curve.colour}" d="M{"L".join(upper + lower)}Z"/>')
    if len(curve.points) > 1:
        dashed = " dashed" if curve.is_dashed else ""
        places = "L".join(frame.place(x, y) for x, y in curve.points)
        parts.append(f'<path class="line c{curve.colour}{dashed}" data-curve="{index}" d="M{places}"/>')
    if curve.has_dots or len(curve.points) == 1:
        for x, y in curve.points:
            center = f'cx="{_short(frame.x(x))}" cy="{_short(frame.y(y))}"'
            parts.append(f'<circle class="dot c{curve.colour}" {center} r="2.6"/>')
    return "".join(parts)


def _mark(frame: _Frame, mark: Mark) -> str:
    x, floor = frame.x(mark.update), _short(frame.height - _BOTTOM)
    title = f"<title>{escape(mark.text)} at update {_count(mark.update)}</title>"
    if mark.kind == "save":
        return f'<path class="mark save" d="M{_short(x - 3.5)} {floor}h7l-3.5 -{_short(_MARK_ROW - 1)}z">{title}</path>'
    own = "" if mark.colour is None else f" own c{mark.colour}"
    at = f'x1="{_short(x)}" x2="{_short(x)}" y1="{_short(_TOP)}" y2="{floor}"'
    return f'<line class="mark {mark.kind}{own}" {at}>{title}</line>'


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{_short(x)}" y="{_short(y)}">{text}</text>'


def _svg(frame: _Frame, attributes: str, parts: Sequence[str]) -> str:
    box = f"0 0 {_short(frame.width)} {_short(frame.height)}"
    return f'<svg {attributes} viewBox="{box}" role="img">{"".join(parts)}</svg>'


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
