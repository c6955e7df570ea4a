"""The live line of a running job: on a terminal, or as a notebook's progress bar. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TextIO

from tqdm.std import tqdm

from loopwright.config.display_width import display_width, truncate
from loopwright.config.safe_text import visible
from loopwright.runs.console.screen import columns_of
from loopwright.terminal import bar_class

# Called with the count and the available columns; None means no limit and a separate bar.
Compose = Callable[[int, int | None], str]

_SECONDS_BETWEEN = 0.1
_BAR_WIDTH = 18
_FULL, _EMPTY = "━", "─"
_SPARE_COLUMNS = 3  # for the ^C that a terminal echoes after the line


class TerminalLine(tqdm):  # type: ignore[type-arg]
    """A terminal line, redrawn at most ten times a second."""

    monitor_interval = 0  # no thread: the process may fork

    def __init__(self, compose: Compose, total: int | None, initial: int, stream: TextIO) -> None:
        self._compose = compose
        super().__init__(
            total=total, initial=initial, file=stream, leave=False, miniters=1, mininterval=_SECONDS_BETWEEN
        )

    def __str__(self) -> str:
        return visible(self._compose(int(self.n), columns_of(self.fp) - _SPARE_COLUMNS))

    def clear(self, nolock: bool = False) -> None:
        """Erase the line, with anything the terminal echoed after it, until it is drawn again."""
        self.fp.write("\r\x1b[K")

    def nudge(self) -> None:
        """Redraw the line if due, even if nothing was counted."""
        now = time.time()  # tqdm's clock
        if now - self.last_print_t >= self.mininterval:
            self.last_print_t = now
            self.refresh()


class NotebookBar:
    """A notebook's progress bar, or tqdm's text bar if the notebook has no widgets."""

    def __init__(self, compose: Compose, total: int | None, initial: int) -> None:
        self._compose = compose
        self._bar: Any = bar_class()(
            total=total,
            initial=initial,
            leave=False,
            miniters=1,
            mininterval=_SECONDS_BETWEEN,
            bar_format="{percentage:3.0f}% {bar} {desc}",
        )
        self.nudge()

    def update(self, count: int) -> None:
        self._bar.update(count)

    def nudge(self) -> None:
        self._bar.set_description_str(visible(self._compose(int(self._bar.n), None)), refresh=False)

    def clear(self) -> None:
        """Do nothing: output of a notebook does not disturb its bar."""

    def refresh(self) -> None:
        self.nudge()
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


def bar_of(share: float) -> str:
    full = round(_BAR_WIDTH * min(max(share, 0.0), 1.0))
    return _FULL * full + _EMPTY * (_BAR_WIDTH - full)


def fitted(parts: list[tuple[int, str]], columns: int, joint: str = " · ") -> str:
    """Join parts, each (rank, text), to one line, dropping the lowest ranks, last first, until it fits."""
    kept = [part for part in parts if part[1]]
    while len(kept) > 1 and display_width(joint.join(text for _, text in kept)) > columns:
        lowest = min(rank for rank, _ in kept)
        del kept[max(index for index, (rank, _) in enumerate(kept) if rank == lowest)]
    return truncate(joint.join(text for _, text in kept), max(columns, 0), "")
