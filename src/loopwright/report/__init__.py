"""The report of a run: one offline HTML page with curves, examples, data, speed and how to reproduce the run.

`write_report` writes it for a run in any state. `LiveReport` keeps it up to date during the run. `write_comparison`
puts several runs side by side. `ReportServer` serves it on localhost; `Watch` does so in the background. No torch.
"""

from __future__ import annotations

from loopwright.report.output import COMPARISON, REPORT, LiveReport, page_path, write_comparison, write_report
from loopwright.report.page import result_html, summary_of
from loopwright.report.run_view import open_run
from loopwright.report.server import ReportServer, Watch
from loopwright.report.summary import missing_intervals, of_both_splits

__all__ = ["COMPARISON", "REPORT", "LiveReport", "ReportServer", "Watch", "open_run", "page_path", "write_report"]
__all__ += ["missing_intervals", "of_both_splits", "result_html", "summary_of", "write_comparison"]
