"""Write reports to files: at the end of a run, during it, and on request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from loopwright.errors import InputError
from loopwright.report.metrics import Metrics
from loopwright.report.page import compile_templates, render
from loopwright.report.panels import Findings, read_findings
from loopwright.report.run_view import RunView, view
from loopwright.run_folder import METRICS, RunFolder, write_atomically
from loopwright.run_folder.status import STATUS

REPORT: Final = "report.html"
COMPARISON: Final = "compare.html"
_MOST_SHARE: Final = 0.003  # of the time between two refreshes
_FEWEST_SECONDS: Final = 2.0
_FINDINGS: Final = ("predictions.jsonl", "worst.jsonl", "suspects.csv", "samples.jsonl", "classes.json")

Stamp = tuple[tuple[int, int], ...]


def write_report(run_folder: str | Path, path: Path | None = None) -> Path:
    """Write report.html, or another file, of a run in any state, and return it; an OSError keeps the old report."""
    folder = RunFolder(Path(run_folder))
    path = folder.path / REPORT if path is None else path
    write_atomically(path, render([view(folder)]))
    return path


def write_comparison(run_folders: Sequence[str | Path], path: Path) -> Path:
    """Write the page of several runs side by side, and return the file."""
    write_atomically(path, render([view(RunFolder(Path(folder))) for folder in run_folders]))
    return path


def page_path(out: str | Path | None, default: Path, option: str = "--out ") -> Path:
    """Return the output file of a page; an InputError refuses a folder before anything is rendered.

    `option` is how it was given, up to the value: as a flag, or as an argument in Python.
    """
    if out is None:
        return default
    path = Path(out)
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else f"is in {path.parent}, which does not exist"
        given, near = (
            f"{option}{one}" if option.startswith("--") else f"{option}{str(one)!r}"
            for one in (path, Path(path.name or "report").with_suffix(".html"))
        )
        raise InputError("args.value", f"{given} {why}", fix=near)
    return path


class LiveReport:
    """The report of a live run: rewritten when the run changes, reading only new data.

    `refresh` may be called at every log: it is a no-op until the report would cost less than 0.3% of the time.
    """

    def __init__(self, run_folder: str | Path) -> None:
        self._folder = RunFolder(Path(run_folder))
        self._metrics = Metrics(self._folder.path / METRICS)
        self._findings: tuple[Stamp, Findings] | None = None
        self._written: Stamp | None = None
        self._next = 0.0
        compile_templates()  # now, so that training does not wait for it

    def refresh(self) -> Path | None:
        """Write report.html if it is due and the run has changed, and return it; an OSError keeps the old report."""
        began = time.monotonic()
        if began < self._next:
            return None
        stamp = self.stamp()
        if stamp == self._written:
            return None
        path = self._folder.path / REPORT
        write_atomically(path, self.page())
        took = time.monotonic() - began
        self._written = stamp
        self._next = began + max(took / _MOST_SHARE, _FEWEST_SECONDS)
        return path

    def page(self, stamp: str | None = None) -> str:
        """Return the current page; with a stamp, it polls its server for changes."""
        run = self.view()
        return render([run], self._read_findings(run), stamp)

    def view(self) -> RunView:
        return view(self._folder, self._metrics)

    def stamp(self) -> Stamp:
        """Return a value that changes with the run's files."""
        folder = self._folder
        names = (folder.path / METRICS, folder.path / STATUS, folder.result, folder.evaluation / "predictions.jsonl")
        return tuple(map(_stamp, names))

    def _read_findings(self, run: RunView) -> Findings:
        folder = self._folder.evaluation
        stamp = tuple(_stamp(folder / name) for name in _FINDINGS)
        if self._findings is None or self._findings[0] != stamp:
            self._findings = (stamp, read_findings(folder, run.labels))
        return self._findings[1]


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
