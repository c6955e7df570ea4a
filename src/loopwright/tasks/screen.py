"""What a run says on the screen and in log.txt: plain lines. No torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from loopwright.run_folder import RunFolder


class Screen:
    """Prints lines, and writes them to the run's log.txt once there is one.

    Args:
        is_main: whether this process prints at all.
        is_quiet: write to the log only.
    """

    def __init__(self, is_main: bool = True, is_quiet: bool = False) -> None:
        self._is_main = is_main
        self._is_quiet = is_quiet
        self._run: RunFolder | None = None
        self._earlier: list[str] = []

    def say(self, line: str = "") -> None:
        """Print a line."""
        if not self._is_main:
            return
        if not self._is_quiet:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
        if self._run is None:
            self._earlier.append(line)
        else:
            self._run.append_log(line)

    def block(self, name: str, *lines: str) -> None:
        """Print lines under a name, as the start block has them."""
        for index, line in enumerate(lines):
            self.say(f"{name if index == 0 else '':<8}{line}")

    def attach(self, run: RunFolder) -> None:
        """Write what was said so far, and from now on, to the log of a run."""
        self._run = run
        for line in self._earlier:
            run.append_log(line)
        self._earlier = []


def eval_metrics(latest: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an evaluation by their short names, out of everything that a history holds."""
    names = {name.removeprefix("eval_"): value for name, value in latest.items() if name.startswith("eval_")}
    bounds = {f"{name}{end}" for name in names for end in ("_low", "_high")}
    return {name: value for name, value in names.items() if name != "loss_epoch" and name not in bounds}


def metrics_text(metrics: Mapping[str, float], intervals: Mapping[str, tuple[float, float]]) -> str:
    """Return metrics on one line, each with half the width of its interval where it has one."""
    shown = []
    for name, value in metrics.items():
        low, high = intervals.get(name, (None, None))
        spread = "" if low is None or high is None else f" ±{(high - low) / 2:.3f}"
        shown.append(f"{name} {value:.4f}{spread}")
    return "  ".join(shown)


def clock(seconds: float) -> str:
    """Return seconds as minutes and seconds, or hours too."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def size(num_bytes: float) -> str:
    """Return bytes in the unit that reads best."""
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"
