"""The report of a run: one HTML page that opens offline, with curves, examples, data, speed and how to get it again.

`write_report` writes it for a run in any state, `LiveReport` keeps it fresh while the run goes on, `write_comparison`
puts several runs side by side, `ReportServer` serves it on localhost, `Watch` does in the background. No torch.
"""

from __future__ import annotations

from loopwright.report.notebook import result_html, summary_of
from loopwright.report.run_view import open_run
from loopwright.report.server import ReportServer, Watch
from loopwright.report.writing import COMPARISON, REPORT, LiveReport, page_path, write_comparison, write_report

__all__ = [
    "COMPARISON",
    "REPORT",
    "LiveReport",
    "ReportServer",
    "Watch",
    "open_run",
    "page_path",
    "result_html",
    "summary_of",
    "write_comparison",
    "write_report",
]
