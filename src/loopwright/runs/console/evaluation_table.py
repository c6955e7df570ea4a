"""The evaluations of a run as a table with a header. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from loopwright.config.display_width import display_width, pad
from loopwright.runs.console.screen import in_order, metric_text

_ROW = "eval"
_FIRST_WIDTH = 6
_HEADER_EVERY = 20  # rows, if other lines are printed between them
_BEST = "best"


class EvalTable:
    """Creates the lines of a table of evaluations; the decisive metric comes first."""

    def __init__(self, decisive: str) -> None:
        self.decisive = decisive
        self._widths: dict[str, int] = {}
        self._narrow: dict[str, int] = {}
        self._num_rows = 0

    def lines(
        self,
        update: int,
        epoch: float,
        metrics: Mapping[str, float],
        intervals: Mapping[str, tuple[float, float]],
        seconds: float,
        *,
        is_best: bool,
        columns: int | None = None,  # of the terminal; None omits nothing, and repeats the header now and then
    ) -> tuple[list[str], list[str]]:
        """Return the lines of an evaluation for the screen, and the untruncated ones; the header comes first if due."""
        names = list(in_order(metrics, self.decisive))
        cells = {"update": f"{update:,}", "epoch": f"{epoch:.2f}"}
        cells |= {name: metric_text(metrics[name], intervals.get(name)) for name in names}
        cells["seconds"] = f"{seconds:.1f}"
        for name, cell in cells.items():
            self._widths.setdefault(name, max(display_width(name), len(cell)))
        has_header = self._num_rows == 0
        is_repeated = self._num_rows % _HEADER_EVERY == 0
        self._num_rows += 1
        whole = self._table(list(cells), cells, self._widths, is_best, has_header or is_repeated)
        if columns is None:
            return whole, whole
        shown, widths = list(cells), self._widths
        if "loss" in cells and self.decisive != "loss" and _width_of(shown, widths) > columns:
            cells["loss"] = metric_text(metrics["loss"], None)  # dropping its interval may make room for a metric
            self._narrow.setdefault("loss", max(len("loss"), len(cells["loss"])))
            widths = {**widths, **self._narrow}
        dropped = [*reversed([name for name in names if name not in (self.decisive, "loss")]), "epoch", "loss"]
        while dropped and _width_of(shown, widths) > columns:
            name = dropped.pop(0)
            shown = [each for each in shown if each != name]
        return self._table(shown, cells, widths, is_best, has_header), whole

    def _table(
        self, names: list[str], cells: Mapping[str, str], widths: Mapping[str, int], is_best: bool, has_header: bool
    ) -> list[str]:
        values = (_padded(name, cells[name], widths[name]) for name in names)
        row = "  ".join([f"{_ROW:<{_FIRST_WIDTH}}", *values, _BEST if is_best else ""])
        header = "  ".join([" " * _FIRST_WIDTH, *(_padded(name, name, widths[name]) for name in names)])
        return [*([header.rstrip()] if has_header else []), row.rstrip()]


def _width_of(names: list[str], widths: Mapping[str, int]) -> int:
    return _FIRST_WIDTH + 2 + sum(widths[name] + 2 for name in names) + len(_BEST)


def _padded(name: str, text: str, width: int) -> str:
    return pad(text, width, is_right=name in ("update", "epoch", "seconds"))
