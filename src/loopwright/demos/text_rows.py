"""Rows of running text: paragraphs and their areas, texts for language models, notes and their summaries."""

from __future__ import annotations

import re
from collections import defaultdict
from datetime import date
from itertools import count

from loopwright.demos.dates import FORMS
from loopwright.demos.demo_data import Row, first_paragraph, is_held_out, mixed, rank, shuffled
from loopwright.demos.stdlib_docs import StdlibDocs
from loopwright.sources.scan import without_spelling

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

# Per area; the smallest has about 125 distinct paragraphs.
_MOST_OF_AN_AREA, _VALIDATION_OF_AN_AREA = 140, 25
_SHARE_OF_MODULES = 0.06

_NUM_SUMMARIES = (8000, 250)
_SHARE_OF_SENTENCES, _SHARE_OF_DAYS = 0.15, 0.1
# The minimum of quotable sentences of a module, for training and for validation.
_LEAST_SENTENCES = (8, 2)
_SENTENCE = re.compile(r"[A-Z][\w ,'-]*\.")
_FIRST_DAY, _LAST_DAY = date(2000, 1, 1).toordinal(), date(2029, 12, 31).toordinal()
_PUT_OFF = ("It was put off until {}.", "It was moved to {}.", "Then {} was chosen.")


def area_rows(found: StdlibDocs) -> tuple[list[Row], list[Row]]:
    """Return rows of `text`, a first paragraph that only one area has, and `label`, one of twelve areas."""
    homes = {module: area for area, modules in AREAS.items() for module in modules}
    areas: dict[str, set[str]] = defaultdict(set)
    spellings: dict[str, str] = {}
    for doc in found.docs:
        text = first_paragraph(doc.text)
        area = homes.get(doc.module.partition(".")[0])
        if area and len(text.split()) >= 3:
            areas[spellings.setdefault(without_spelling(text), text)].add(area)
    of_area: dict[str, list[str]] = {area: [] for area in AREAS}
    for text in shuffled(areas, "areas", str):
        if len(areas[text]) == 1:
            of_area[next(iter(areas[text]))].append(text)
    sides: tuple[list[Row], list[Row]] = ([], [])
    for area, texts in of_area.items():
        for place, text in enumerate(texts[: _VALIDATION_OF_AN_AREA + _MOST_OF_AN_AREA]):
            sides[place < _VALIDATION_OF_AN_AREA].append({"text": text, "label": area})
    return mixed(sides[0], "text"), mixed(sides[1], "text")


def language_rows(found: StdlibDocs) -> tuple[list[Row], list[Row]]:
    """Return rows of `text`: docstrings and pages of `help()`, each once, held out by module and by page."""
    homes: dict[str, str] = {}
    for doc in found.docs:
        if doc.text:
            homes.setdefault(doc.text, doc.module)
    for name, page in found.topics.items():
        homes.setdefault(page, f"topic {name}")
    sides: tuple[list[Row], list[Row]] = ([], [])
    for text, home in homes.items():
        sides[is_held_out(home, _SHARE_OF_MODULES)].append({"text": text})
    return sides


def summary_rows(found: StdlibDocs) -> tuple[list[Row], list[Row]]:
    """Return rows of `document`, notes about a module's review, and `summary`: whether and when it took place.

    The notes quote an irrelevant docstring of the module, and name up to three days, of which the last counts.
    Validation uses other docstrings and days.
    """
    quotes: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    homes: dict[str, str] = {}
    for doc in found.docs:
        text = first_paragraph(doc.text)
        if doc.kind == "function" and _SENTENCE.fullmatch(text) and 3 <= len(text.split()) <= 8:
            homes.setdefault(text, doc.module.partition(".")[0])
    for text, module in homes.items():
        quotes[module][is_held_out(text, _SHARE_OF_SENTENCES)].append(text)
    pairs = {module: zip(sides, _LEAST_SENTENCES, strict=True) for module, sides in quotes.items() if module[0] != "_"}
    modules = sorted(module for module, pair in pairs.items() if all(len(side) >= least for side, least in pair))
    train, validation = (
        [_notes(modules[number % len(modules)], quotes, number, is_validation) for number in range(num_rows)]
        for num_rows, is_validation in zip(_NUM_SUMMARIES, (False, True), strict=True)
    )
    return mixed(train, "document"), mixed(validation, "document")


def _notes(module: str, quotes: dict[str, tuple[list[str], list[str]]], number: int, is_validation: bool) -> Row:
    draws = count()

    def draw(num_choices: int) -> int:
        return rank(f"review {next(draws)}", f"{is_validation} {number}") % num_choices

    def draw_day() -> date:
        while True:
            day = date.fromordinal(_FIRST_DAY + draw(_LAST_DAY - _FIRST_DAY + 1))
            if is_held_out(day.isoformat(), _SHARE_OF_DAYS) == is_validation:
                return day

    def written(day: date) -> str:
        return FORMS[draw(len(FORMS))](day)

    day = draw_day()
    sentences = [f"The review of {module} was planned for {written(day)}."]
    for _ in range(draw(3)):
        day = draw_day()
        sentences.append(_PUT_OFF[draw(len(_PUT_OFF))].format(written(day)))
    summary = f"{module} reviewed on {day.isoformat()}"
    if draw(6) == 0:
        sentences.append("In the end nobody came.")
        summary = f"{module} not reviewed"
    quote = quotes[module][is_validation]
    sentences.insert(1 + draw(len(sentences)), quote[draw(len(quote))])
    return {"document": " ".join(sentences), "summary": summary}
