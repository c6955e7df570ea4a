"""The top of a report without a page around it: in a notebook, and as one sentence for the terminal."""

from __future__ import annotations

from pathlib import Path

from loopwright.report.metrics import Metrics
from loopwright.report.page import fill
from loopwright.report.run_view import view
from loopwright.report.summary import card_of
from loopwright.run_folder import RunFolder


def summary_of(run_folder: str | Path) -> str:
    """Return one sentence on what a run's result means; called at the end of the run."""
    folder = RunFolder(Path(run_folder))
    return card_of(view(folder, Metrics(folder.path / "no curves are needed"))).verdict


def result_html(run_folder: str | Path) -> str:
    """Return the top of a run's report, in any state, as self-contained HTML; called by a notebook.

    Raises:
        InputError: the folder does not exist.
    """
    run = view(RunFolder(Path(run_folder)))
    report = run.folder.path / "report.html"
    return fill("notebook.html", {"run": run, "card": card_of(run), "report": report if report.is_file() else None})
