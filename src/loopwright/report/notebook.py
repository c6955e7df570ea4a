"""The top of a report without a page around it: in a notebook, and as one sentence for the terminal."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Final

from loopwright.report.formats import metric
from loopwright.report.metrics import Metrics
from loopwright.report.run_view import RunView, view
from loopwright.report.summary import Bar, card_of, interval_text
from loopwright.run_folder import RunFolder

# Colours readable on white and on black; text uses the notebook's colour.
_OURS: Final = "#3b82f6"
_OTHERS: Final = "#8b8f98"
_LINE: Final = "1px solid rgba(128,128,128,.35)"
_FAINT: Final = "opacity:.7"
_TABLE: Final = "border-collapse:collapse;background:transparent;color:inherit"


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
    card = card_of(run)
    value = ""
    if card.value is not None:
        spread = f" <span style='{_FAINT};font-size:.6em'>95 %: {interval_text(card.interval)}</span>"
        value = (
            f"<div style='font-size:1.7em;margin:.2em 0'>{escape(card.metric)} <b>{metric(card.value)}</b>"
            f"{spread if card.interval is not None else ''}</div>"
        )
    others = "".join(
        f"<tr>{_cell(name)}{_cell(shown, is_right=True)}{_cell(bounds)}</tr>" for name, shown, bounds in card.others
    )
    facts = " · ".join(f"{escape(name)} <b>{escape(str(fact))}</b>" for name, fact in card.facts)
    return (
        f"<div style='font-family:system-ui,sans-serif;max-width:46em;border:{_LINE};border-radius:8px;"
        "padding:.8em 1em;background:transparent;color:inherit'>"
        f"<div style='{_FAINT}'>{escape(run.task)} · {escape(run.id)} · {escape(card.state)}</div>"
        f"{value}<div>{escape(card.verdict)}</div>"
        f"<div style='margin:.6em 0'>{''.join(map(_bar, card.bars))}</div>"
        + (f"<table style='{_TABLE}'>{others}</table>" if others else "")
        + f"<div style='{_FAINT};margin-top:.6em;font-size:.9em'>{facts}</div>{_files(run)}</div>"
    )


def _bar(bar: Bar) -> str:
    colour = _OURS if bar.is_ours else _OTHERS
    width = 100 * min(max(bar.share, 0.0), 1.0)
    return (
        "<div style='display:flex;align-items:center;gap:.6em'>"
        f"<span style='width:9em;text-align:right'>{escape(bar.name)}</span>"
        "<span style='flex:1;background:rgba(128,128,128,.15);border-radius:3px'>"
        f"<span style='display:block;width:{width:.1f}%;height:.9em;background:{colour};border-radius:3px'></span>"
        "</span>"
        f"<span style='width:5em'>{metric(bar.value)}</span></div>"
    )


def _cell(text: str, *, is_right: bool = False) -> str:
    side = "right" if is_right else "left"
    return f"<td style='padding:.1em .8em;text-align:{side};border-top:{_LINE}'>{escape(text)}</td>"


def _files(run: RunView) -> str:
    report = run.folder.path / "report.html"
    if not report.is_file():
        return ""
    return f"<div style='margin-top:.4em;font-size:.9em'><code>{escape(str(report))}</code></div>"
