"""Render one or several run folders as one self-contained HTML page, or only its top."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup, escape

from loopwright.report import charts, provenance
from loopwright.report.blocks import Table
from loopwright.report.comparison import notes_of, panels_of, results_table, verdicts_of
from loopwright.report.curves import charts_of
from loopwright.report.formats import metric
from loopwright.report.metrics import Metrics
from loopwright.report.panels import Findings, read_findings
from loopwright.report.panels.tuning import tuning_panel
from loopwright.report.pictures import pictures_of
from loopwright.report.run_view import RunView, view
from loopwright.report.summary import card_of, interval_text
from loopwright.run_folder import RunFolder
from loopwright.version import package_version

MOST_BYTES: Final = 2_000_000
_SPARE_BYTES: Final = 50_000
_TEMPLATES: Final = Path(__file__).with_name("templates")
_PAGE: Final = "report.html"
_EMBEDDED: Final = {"style": "style.css", "script": "script.js", "live_script": "live.js"}
_FLAG: Final = re.compile(r"--[a-z][a-z_-]*")
_NUMBER: Final = re.compile(r"(-?[\d,.:]+(e[+-]?\d+)?( ?%| \w{1,3})?|–)?")


def render(runs: Sequence[RunView], findings: Findings | None = None, stamp: str | None = None) -> str:
    """Return the page of a run, or of several side by side; with the `stamp` of its files, it polls for changes."""
    if len(runs) > 1:
        return _render_several(runs)
    run = runs[0]
    if findings is None:
        findings = read_findings(run.folder.evaluation, run.labels)
    notes = [*run.notes, *findings.notes]
    below = provenance.data_panel(run), provenance.speed_panel(run), tuning_panel(run.folder.path)
    content: dict[str, Any] = {
        "run": run,
        "card": card_of(run),
        "charts": charts_of(runs),
        "findings": findings,
        "panels": [panel for panel in below if panel is not None],
        "again": provenance.again_panel(run),
        "settings": provenance.all_settings(run),
        "stamp": stamp,
        "notes": notes,
        "pictures": [],
    }
    text = fill(_PAGE, content)
    pictures, more = pictures_of(run.folder.path, MOST_BYTES - _SPARE_BYTES - len(text.encode()))
    return fill(_PAGE, {**content, "pictures": pictures, "notes": [*notes, *more]}) if pictures or more else text


def _render_several(runs: Sequence[RunView]) -> str:
    content = {
        "runs": runs,
        "notes": [*notes_of(runs), *(f"{run.name}: {note}" for run in runs for note in run.notes)],
        "results": results_table(runs),
        "verdicts": verdicts_of(runs),
        "charts": charts_of(runs),
        "panels": panels_of(runs),
        "num_colours": charts.NUM_COLOURS,
        "pictures": [],
    }
    text = fill("compare.html", content)
    room = (MOST_BYTES - _SPARE_BYTES - len(text.encode())) // len(runs)
    found = ((run.name, picture) for run in runs for picture in pictures_of(run.folder.path, room)[0])
    shown = [(name, picture) for name, picture in found if picture.name.startswith(("predictions", "worst"))]
    return fill("compare.html", {**content, "pictures": shown}) if shown else text


def summary_of(run_folder: str | Path) -> str:
    """Return one sentence on what a run's result means; called at the end of the run."""
    folder = RunFolder(Path(run_folder))
    return card_of(view(folder, Metrics(folder.path / "no curves are needed"))).verdict


def result_html(run_folder: str | Path) -> str:
    """Return the top of a run's report, in any state, as self-contained HTML; called by a notebook."""
    run = view(RunFolder(Path(run_folder)))
    report = run.folder.path / _PAGE
    return fill("notebook.html", {"run": run, "card": card_of(run), "report": report if report.is_file() else None})


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals.update(
        draw=charts.draw,
        draw_histogram=charts.draw_histogram,
        draw_lines=charts.draw_lines,
        interval_text=interval_text,
        is_number=lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
        numeric_columns=_numeric_columns,
        share_of=_share_of,
        version=package_version(),
        **{name: (_TEMPLATES / file).read_text(encoding="utf-8") for name, file in _EMBEDDED.items()},
    )
    environment.filters.update(metric=metric, with_flags=_with_flags)
    return environment


def compile_templates() -> None:
    """Compile the page template, which takes ten times as long as rendering it."""
    _environment().get_template(_PAGE)


def fill(template: str, content: dict[str, Any]) -> str:
    now = f"{datetime.now():%Y-%m-%d %H:%M}"
    return _environment().get_template(template).render(now=now, **content)


def _with_flags(value: Any) -> Markup:
    """Return a text whose flag names do not break at hyphens."""
    return Markup(_FLAG.sub(r'<span class="flag">\g<0></span>', str(escape(value))))


def _numeric_columns(block: Table) -> list[int]:
    if block.is_left:
        return []
    columns = enumerate(zip(*block.rows, strict=True))
    return [place for place, cells in columns if place and all(map(_looks_numeric, cells))]


def _looks_numeric(value: Any) -> bool:
    return _NUMBER.fullmatch(value) is not None if isinstance(value, str) else isinstance(value, (int, float))


def _share_of(value: Any) -> float | None:
    text = str(value).removesuffix("%").strip()
    try:
        share = float(text) / (100 if str(value).endswith("%") else 1)
    except ValueError:
        return None
    return min(max(share, 0.0), 1.0)
