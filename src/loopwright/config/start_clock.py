"""Where the time goes from the start of a process to the first update, phase by phase. No torch."""

from __future__ import annotations

import gc
import os
import time
from importlib import import_module
from pathlib import Path


class StartClock:
    """Seconds by phase; each lap adds the time since the lap before, so the phases add up to the whole."""

    def __init__(self, began: float | None = None) -> None:
        self.began = time.monotonic() if began is None else began
        self.seconds: dict[str, float] = {}
        self.is_over = False
        self._lapped = self.began

    def lap(self, phase: str) -> None:
        """End a phase now; a no-op after the first update."""
        if not self.is_over:
            now = time.monotonic()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._lapped
            self._lapped = now

    def import_modules(self, *names: str) -> None:
        """Import modules; the package of each has its own phase, and what was imported before is in "import"."""
        self.lap("import")
        for name in names:
            import_module(name)
            self.lap(f"import {name.partition('.')[0]}")

    def lines(self) -> list[str]:
        """Return the phases as text, the whole first."""
        total = sum(self.seconds.values())
        head = f"{total:6.2f} s from the start of the command to the first update"
        return [head, *(f"{each:6.2f} s  {phase}" for phase, each in self.seconds.items() if each >= 0.005)]


_active = StartClock()


def begin(began: float | None = None) -> StartClock:
    """Start a clock, which `lap` then goes to."""
    global _active
    _active = StartClock(began)
    return _active


def of_command() -> StartClock:
    """Return the clock of this command line; a new one if it has trained already, as with several seeds."""
    return begin() if _active.is_over else _active


def lap(phase: str) -> None:
    """End a phase of the start now; called by code that knows no screen."""
    _active.lap(phase)


_thresholds: tuple[int, int, int] | None = None


def collect_rarely() -> None:
    """Let the garbage collector run rarely: imports leave little garbage, and looking for it takes 0.6 s.

    For a process that is a command line; the collector of a user's own process is not ours to change.
    """
    global _thresholds
    _thresholds = gc.get_threshold()
    gc.set_threshold(10_000)


def collect_as_usual() -> None:
    """Undo `collect_rarely` once everything is imported; what is alive by now is never looked at again."""
    global _thresholds
    if _thresholds is not None:
        gc.freeze()
        gc.set_threshold(*_thresholds)
        _thresholds = None


def process_start() -> float:
    """Return when this process was created, by the clock of `time.monotonic`."""
    try:  # to 10 ms; psutil's time of the boot is whole seconds
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        import psutil

        age = time.time() - float(psutil.Process().create_time())
    return time.monotonic() - max(age, 0.0)
