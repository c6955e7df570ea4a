"""Rows of running text: paragraphs and their areas, texts for language models, bodies and their first lines."""

from __future__ import annotations

from collections import defaultdict

from loopwright.data.embedded.demo_data import Row, first_paragraph, is_held_out, mixed, shuffled, split_by_name
from loopwright.data.embedded.stdlib_docs import StdlibDocs

AREAS = {
    "archives": ("zipfile", "tarfile", "gzip", "bz2", "lzma", "zipapp", "_compression"),
    "asyncio": ("asyncio",),
    "dates": ("datetime", "calendar", "time", "zoneinfo"),
    "drawing": ("turtle", "colorsys"),
    "email": ("email", "mailbox", "smtplib", "imaplib", "poplib"),
    "imports": ("importlib", "pkgutil", "runpy", "modulefinder", "zipimport"),
    "logging": ("logging",),
    "numbers": ("decimal", "fractions", "statistics", "random", "numbers"),
    "parallel": ("threading", "multiprocessing", "concurrent", "queue", "subprocess", "sched", "_threading_local"),
    "testing": ("unittest", "doctest"),
    "web": ("http", "urllib", "html", "wsgiref", "xmlrpc", "socketserver", "webbrowser"),
    "xml": ("xml",),
}

# Per area, of which the smallest has about 125 different paragraphs.
_MOST_OF_AN_AREA, _VALIDATION_OF_AN_AREA = 140, 25
_MOST_SUMMARIES = (1200, 200)
_MOST_BODY_WORDS = 100
_SHARE_OF_MODULES = 0.06
_SHARE_OF_SUMMARIES = 0.15


def area_rows(found: StdlibDocs) -> tuple[list[Row], list[Row]]:
    """Return rows of `text`, the first paragraph of a docstring, and `label`, the one of twelve areas it is from.

    No paragraph occurs twice, and one that two areas have is left out.
    """
    homes = {module: area for area, modules in AREAS.items() for module in modules}
    areas: dict[str, set[str]] = defaultdict(set)
    for doc in found.docs:
        text = first_paragraph(doc.text)
        area = homes.get(doc.module.partition(".")[0])
        if area and len(text.split()) >= 3:
            areas[text].add(area)
    of_area: dict[str, list[str]] = {area: [] for area in AREAS}
    for text in shuffled(areas, "areas", str):
        if len(areas[text]) == 1:
            of_area[next(iter(areas[text]))].append(text)
    train: list[Row] = []
    validation: list[Row] = []
    for area, texts in of_area.items():
        cut = _VALIDATION_OF_AN_AREA
        validation += [{"text": text, "label": area} for text in texts[:cut]]
        train += [{"text": text, "label": area} for text in texts[cut : cut + _MOST_OF_AN_AREA]]
    return mixed(train, "text"), mixed(validation, "text")


def language_rows(found: StdlibDocs) -> tuple[list[Row], list[Row]]:
    """Return rows of `text`: whole docstrings and pages of `help()`, held out by module and by page.

    A text that occurs twice is kept where it comes first, so that none is on both sides.
    """
    homes: dict[str, str] = {}
    for doc in found.docs:
        if doc.text:
            homes.setdefault(doc.text, doc.module)
    for name, page in found.topics.items():
        homes.setdefault(page, f"topic {name}")
    train: list[Row] = []
    validation: list[Row] = []
    for text, home in homes.items():
        (validation if is_held_out(home, _SHARE_OF_MODULES) else train).append({"text": text})
    return train, validation


def summary_rows(found: StdlibDocs) -> tuple[list[Row], list[Row]]:
    """Return rows of `document`, a docstring without its first line, and `summary`, that line; held out by it."""
    firsts: dict[str, str] = {}
    for doc in found.docs:
        first, _, body = doc.text.partition("\n\n")
        words = body.split()
        if doc.name and "\n" not in first and 3 <= len(first.split()) <= 20 and len(words) >= 15:
            firsts.setdefault(" ".join(words[:_MOST_BODY_WORDS]), " ".join(first.split()))
    named = [(first, {"document": body, "summary": first}) for body, first in firsts.items()]
    return split_by_name(named, _SHARE_OF_SUMMARIES, _MOST_SUMMARIES, "document")
