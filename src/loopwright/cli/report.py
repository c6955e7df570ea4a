"""The verbs report, compare and watch. They do not import torch."""

from __future__ import annotations

import shlex
import sys
import webbrowser

from loopwright.api import EventLines, place_facts
from loopwright.cli.exit_codes import DONE
from loopwright.cli.json_output import json_events
from loopwright.cli.parser import VerbParser, add_json
from loopwright.errors import InputError
from loopwright.report import COMPARISON, REPORT, ReportServer, open_run, page_path, write_comparison, write_report
from loopwright.report.comparison import compare_runs
from loopwright.report.run_view import read_state
from loopwright.report.server import PORT


def report(argv: list[str]) -> int:
    parser = VerbParser("report", "Write an HTML report of a run; for several runs, like `compare`.", "last")
    parser.add_argument("runs", nargs="+", metavar="run", help="folder, id, or last")
    _add_options(parser)
    asked = parser.parse_args(argv)
    return _write(asked.runs, asked.out, asked.open)


def compare(argv: list[str]) -> int:
    parser = VerbParser("compare", "Write an HTML page that compares several runs.", "RUN RUN")
    parser.add_argument("runs", nargs="+", metavar="run", help="folder, id, or last; two or more")
    _add_options(parser)
    add_json(parser)
    asked = parser.parse_args(argv)
    if len(asked.runs) < 2:
        what = f"lw compare needs two runs, got {asked.runs[0]!r} alone"
        raise InputError("args.value", what, fix=f"lw report {shlex.quote(asked.runs[0])}")
    with json_events(asked.json) as events:
        return _write(asked.runs, asked.out, asked.open, events)


def watch(argv: list[str]) -> int:
    parser = VerbParser("watch", "Serve a live report of a run on localhost, until Ctrl-C.", "last")
    parser.add_argument("run", nargs="?", default="last", help="folder, id, or last, which is the default")
    parser.add_argument("--port", type=int, default=PORT, help=f"on 127.0.0.1, default {PORT}; 0 picks a free port")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    asked = parser.parse_args(argv)
    run = open_run(asked.run)
    with ReportServer(run.path, asked.port) as server:
        sys.stdout.write(f"{server.url}   (Ctrl-C stops it)\n")
        state = read_state(run)
        if state not in ("running", "new"):
            sys.stdout.write(f"this run has ended ({state}): the page is updated again once it is resumed\n")
        sys.stdout.flush()
        if asked.open:
            _show(server.url, server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            sys.stdout.write("\n")
    return DONE


def _add_options(parser: VerbParser) -> None:
    parser.add_argument(
        "--out", help="the file to write; unset is report.html or compare.html in the (first) run folder"
    )
    parser.add_argument("--open", action="store_true", help="open it in the browser")


def _write(names: list[str], out: str | None, should_open: bool, events: EventLines | None = None) -> int:
    folders = [open_run(name).path for name in names]
    if len(folders) == 1:
        path = write_report(folders[0], page_path(out, folders[0] / REPORT))
    else:
        path = write_comparison(folders, page_path(out, folders[0] / COMPARISON))
    verdicts = compare_runs(folders)
    if events is None:
        sys.stdout.write("".join(f"{line}\n" for line in (path, *(each["text"] for each in verdicts))))
    else:
        found = [open_run(name) for name in names]
        runs = [{**place_facts(run), "state": read_state(run), "result": run.read_result() or None} for run in found]
        events.lines({"path": str(path), "runs": runs, "verdicts": verdicts})
    if should_open:
        _show(path.resolve().as_uri(), str(path))
    return DONE


def _show(address: str, place: str) -> None:
    if not webbrowser.open(address):
        sys.stdout.write(f"no browser was found here: open {place} in one yourself\n")
