"""The output of a run on the screen and in log.txt: plain lines, and one live line on a terminal. No torch."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO, TypeVar

from loopwright.config import start_clock
from loopwright.config.display_width import display_width, truncate, wrap
from loopwright.config.safe_text import visible, write_painted
from loopwright.config.secrets import without_secrets
from loopwright.config.start_clock import StartClock
from loopwright.run_folder import RunFolder
from loopwright.runs.console.json_events import EventLines, drop_output
from loopwright.terminal import is_coloured, is_notebook, is_terminal, paint

T = TypeVar("T")

_SILENT_SECONDS = 1.0  # shorter work gets no line
_SECONDS_BETWEEN = 0.1
_INDENT = 8
_BREAK = "⏎"  # of a line, where it is marked
_FALLBACK_WIDTH = 80


class Screen:
    """Prints lines, and writes them to the run's log.txt once there is one."""

    def __init__(
        self,
        is_main: bool = True,
        is_quiet: bool = False,
        is_plain: bool = False,
        events: EventLines | None = None,
        clock: StartClock | None = None,  # of the command; by default it starts now
    ) -> None:
        self.clock = start_clock.begin() if clock is None else clock
        self.began = self.clock.began
        # The stream of `--json`: events go there, and no text is printed; without it they go nowhere.
        self.events = EventLines(None) if events is None else events
        self._is_main = is_main
        self._is_quiet = is_quiet or events is not None
        self.is_plain = is_plain  # plain lines even on a terminal, without a live line
        self.run: RunFolder | None = None
        self._earlier: list[str] = []
        self._line: Any = None

    @property
    def speaks(self) -> bool:
        return self._is_main and not self._is_quiet

    @property
    def is_live(self) -> bool:
        """Whether a line can be redrawn: on a terminal or in a notebook."""
        return self.speaks and not self.is_plain and (is_terminal(sys.stdout) or is_notebook())

    @property
    def columns(self) -> int | None:
        """The width of the terminal; None in a pipe, a file or a notebook, where lines may be long."""
        return columns_of(sys.stdout) if is_terminal(sys.stdout) and not self.is_plain else None

    def print(
        self, line: str = "", logged: str | None = None, colour: str | None = None, painted: str | None = None
    ) -> None:
        """Print a line, or `painted` where there are colours; log.txt gets `logged`, if different."""
        if not self._is_main:
            return
        line = visible(line)
        if self.speaks:
            parts = line.split("\n")
            if colour is not None and not self.is_plain:
                parts = [paint(part, colour, sys.stdout) for part in parts]
            try:
                if self._line is not None:
                    self._line.clear()
                has_colours = painted is not None and is_coloured(sys.stdout) and not self.is_plain
                _write(sys.stdout, f"{painted if has_colours else chr(10).join(parts)}\n")
                if self._line is not None:
                    self._line.refresh()
            except BrokenPipeError:  # the run continues, and still writes log.txt
                self._is_quiet, self._line = True, None
                drop_output(sys.stdout)
        self.log(line if logged is None else visible(logged))

    def remark(self, kind: str, text: str) -> None:
        self.print(f"{kind}: {text}", colour="yellow")
        self.events.emit("warning", message=visible(text))

    def print_wrapped(self, line: str) -> None:
        columns = self.columns if self.speaks else None
        fits = columns is None or "\n" in line or display_width(line) <= columns
        self.print(line if fits or columns is None else "\n".join(_broken(line, columns)), line)

    def log(self, line: str) -> None:
        if not self._is_main:
            return
        line = without_secrets(line)
        if self.run is None:
            self._earlier.append(line)
        else:
            self.run.append_log(line)

    def block(self, name: str, *lines: str, wraps: bool = True, colour: str | None = None) -> None:
        """Print lines under a name, as in the start block; `wraps` is False for lines to be copied."""
        columns = self.columns if wraps and self.speaks else None
        for index, line in enumerate(lines):
            head = f"{name if index == 0 else '':<{_INDENT}}"
            parts = [line] if columns is None else _broken(line, columns - _INDENT)
            self.print(head + f"\n{' ' * _INDENT}".join(parts), head + line, colour)

    def marked(self, name: str, pieces: Iterable[tuple[str, bool]]) -> None:
        """Print a text in pieces, those that are marked in green, or in brackets without colours, with line breaks."""
        lines, painted = [f"{name:<{_INDENT}}"], [f"{name:<{_INDENT}}"]
        for piece, is_marked in pieces:
            text = visible(piece)
            for index, part in enumerate((text.replace("\n", f"{_BREAK}\n") if is_marked else text).split("\n")):
                margin = f"\n{' ' * _INDENT}" if index else ""
                lines.append(margin + (f"⟦{part}⟧" if is_marked and part else part))
                painted.append(margin + (paint(part, "green", sys.stdout) if is_marked else part))
        self.print("".join(lines), painted="".join(painted))

    def attach(self, run: RunFolder) -> None:
        """Write all output, past and future, to the log of a run."""
        self.run = run
        for line in self._earlier:
            run.append_log(line)
        self._earlier = []

    def open_line(self, compose: Callable[[int, int | None], str], total: int, initial: int = 0) -> Any:
        """Open a live counter; None if the output cannot have one. `compose` gets the count and the columns or None."""
        self.close_line()
        if self.is_live:
            from loopwright.runs.console.status_line import NotebookBar, TerminalLine

            if is_terminal(sys.stdout):
                self._line = TerminalLine(compose, total, initial, sys.stdout)
            else:
                self._line = NotebookBar(compose, total, initial)
        return self._line

    def close_line(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()

    def waiting(self, what: str, total: int | None = None, *, is_one_step: bool = False) -> Waiting:
        """Return a context manager that shows the progress of long work, or with `is_one_step` the elapsed seconds."""
        return Waiting(self, what, total, is_one_step=is_one_step)


class Waiting:
    """The progress of long work: after a second a live line on a terminal, elsewhere one plain line at the end.

    With `is_one_step` a thread shows the elapsed seconds while the block runs, which must not fork.
    """

    def __init__(self, screen: Screen, what: str, total: int | None = None, *, is_one_step: bool = False) -> None:
        self._screen = screen
        self._what = what
        self._total = total
        self._done = 0
        self._began = time.monotonic()
        self._next = self._began + _SILENT_SECONDS
        self._width = 0
        self._is_one_step = is_one_step
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Waiting:
        if self._is_one_step and self._screen.speaks and self._has_terminal():
            self._thread = threading.Thread(target=self._tick, name="loopwright waiting", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(is_over=kind is None)

    def to(self, done: int, total: int | None = None) -> None:
        self._done = done
        if total is not None:
            self._total = total
        if not self._is_one_step and time.monotonic() >= self._next:
            self._show()

    def over(self, things: Iterable[T]) -> Iterator[T]:
        for done, thing in enumerate(things, 1):
            yield thing
            self.to(done)

    def close(self, is_over: bool = True) -> None:
        if self._thread is not None:
            self._is_closed.set()
            self._thread.join()
        if self._width:
            _write(sys.stderr, "\r" + " " * self._width + "\r")
            self._width = 0
        seconds = time.monotonic() - self._began
        if is_over and seconds >= _SILENT_SECONDS:
            line = f"{self._what}: {f'{self._done:,} in ' if self._done else ''}{seconds:.1f} s"
            self._screen.log(line) if self._has_terminal() else self._screen.print(line)

    def _has_terminal(self) -> bool:
        return is_terminal(sys.stderr) and not self._screen.is_plain

    def _tick(self) -> None:
        pause = _SILENT_SECONDS
        while not self._is_closed.wait(pause):
            self._show()
            pause = _SECONDS_BETWEEN

    def _show(self) -> None:
        now = time.monotonic()
        self._next = now + _SECONDS_BETWEEN
        if not self._screen.speaks or not self._has_terminal():
            return
        share = self._done / self._total if self._total else 0.0
        left = f" · left {clock((now - self._began) * (1 - share) / share)}" if 0 < share <= 1 else ""
        if self._is_one_step:
            far = f"{f'{self._done} of {self._total}, ' if self._total else ''}{now - self._began:.0f} s"
        else:
            far = f"{100 * share:.0f} % of {self._total:,}{left}" if self._total else f"{self._done:,}"
        text = truncate(visible(f"{self._what}: {far}"), columns_of(sys.stderr) - 1, "")
        _write(sys.stderr, "\r" + text + " " * max(self._width - display_width(text), 0))
        self._width = display_width(text)


def columns_of(stream: Any) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _FALLBACK_WIDTH
    except (AttributeError, OSError, ValueError):
        return _FALLBACK_WIDTH


def _broken(line: str, columns: int) -> list[str]:
    return wrap(line, max(columns, 20)) or [line]


def _write(stream: TextIO, text: str) -> None:
    """Write a text, replacing characters that the stream cannot encode."""

    def write(part: str) -> None:
        try:
            stream.write(part)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(part.encode(encoding, "replace").decode(encoding))

    write_painted(write, text)
    stream.flush()


def eval_metrics(latest: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an evaluation by their short names, out of all entries of a history."""
    names = {name.removeprefix("eval_"): value for name, value in latest.items() if name.startswith("eval_")}
    bounds = {f"{name}{end}" for name in names for end in ("_low", "_high")}
    return {name: value for name, value in names.items() if name != "loss_epoch" and name not in bounds}


def in_order(metrics: Mapping[str, float], decisive: str) -> dict[str, float]:
    """Return metrics with the decisive one first, calibration and loss last."""
    names = sorted(metrics, key=lambda name: (name != decisive, name in ("ece", "loss"), name == "loss"))
    return {name: metrics[name] for name in names}


def metrics_text(
    metrics: Mapping[str, float], intervals: Mapping[str, tuple[float, float]], tokens: Mapping[str, str] | None = None
) -> str:
    texts = {name: f"{name} {metric_text(value, intervals.get(name))}" for name, value in metrics.items()}
    texts |= {name: f"{texts[name]} ({each})" for name, each in (tokens or {}).items() if name in texts}
    return "  ".join(texts.values())


def metric_text(value: float, interval: tuple[float, float] | None) -> str:
    """Return a metric and its distance from the farther end of its interval, which need not be in the middle."""
    return f"{value:.4f}" if interval is None else f"{value:.4f} ±{max(value - interval[0], interval[1] - value):.3f}"


def clock(seconds: float) -> str:
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def lasted(seconds: float) -> str:
    """Return a duration, with tenths below a minute so that short runs can be told apart."""
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)
