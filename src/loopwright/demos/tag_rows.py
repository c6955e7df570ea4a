"""Rows of words and tags: which words of a docstring are parameters of its function, exceptions or values."""

from __future__ import annotations

import re

from loopwright.demos.demo_data import Row, is_held_out, mixed, shuffled
from loopwright.demos.stdlib_docs import Doc, StdlibDocs

_MOST, _SHARE = (1200, 250), 0.18
_MOST_TOKENS = 48
_LEAST_TOKENS = 8

_TOKEN = re.compile(r"\w+|[^\w\s]")
_EXCEPTION = re.compile(
    r"\b(?:[A-Z]\w*(?:Error|Exception|Warning)|KeyboardInterrupt|StopIteration|StopAsyncIteration|SystemExit)\b"
)
# Quoted ones contain no spaces, so that two apostrophes are not mistaken for quotes.
_VALUE = re.compile(r"""\b(?:None|True|False)\b|(?<!\w)(?:'[^'\s]{1,20}'|"[^"\s]{1,20}")(?!\w)""")
# Parameters that are also common English words: the signature does not show whether one is meant.
_AMBIGUOUS = {"a", "an", "as", "at", "by", "for", "of", "on", "to"}


def tag_rows(found: StdlibDocs) -> tuple[list[Row], list[Row]]:
    """Return rows of `tokens` and `ner_tags` (IOB2 with PARAM, EXC and VALUE); held out by the function's name.

    Each row is the beginning of a docstring, complete paragraphs without examples, with at least one tag.
    """
    sides: tuple[dict[str, Row], dict[str, Row]] = ({}, {})
    for doc in found.docs:
        text = _beginning(doc.text)
        tokens = list(_TOKEN.finditer(text))
        if doc.kind != "function" or not _LEAST_TOKENS <= len(tokens) <= _MOST_TOKENS:
            continue
        spans = find_spans(text, doc)
        if spans and not any(part.name in _AMBIGUOUS for part in doc.parameters):
            tags = [_tag(token.start(), spans) for token in tokens]
            row = {"tokens": [token.group() for token in tokens], "ner_tags": tags}
            sides[is_held_out(doc.short_name, _SHARE)].setdefault(text, row)
    # A text shared by functions of different names is for validation only.
    train = {text: row for text, row in sides[0].items() if text not in sides[1]}
    return _choose(train, _MOST[0]), _choose(sides[1], _MOST[1])


def _choose(rows: dict[str, Row], most: int) -> list[Row]:
    """Return up to this many shuffled rows, including all of the rare ones with exceptions."""
    texts = shuffled(rows, "tags", str)
    texts.sort(key=lambda text: "B-EXC" not in rows[text]["ner_tags"])
    return mixed([rows[text] for text in texts[:most]], "tokens")


def find_spans(text: str, doc: Doc) -> list[tuple[int, int, str]]:
    """Return start, end and kind of each parameter, exception and value in a text: whole words, without overlap."""
    spans: list[tuple[int, int, str]] = []
    names = sorted({part.name for part in doc.parameters})
    # Neither an attribute (`sys.path`) nor a call (`key()`).
    parameter = re.compile(rf"(?<![\w.])(?:{'|'.join(names)})(?![\w(])") if names else None
    for pattern, kind in [(parameter, "PARAM"), (_EXCEPTION, "EXC"), (_VALUE, "VALUE")]:
        for match in pattern.finditer(text) if pattern else ():
            if all(match.end() <= start or end <= match.start() for start, end, _ in spans):
                spans.append((*match.span(), kind))
    return sorted(spans)


def _beginning(text: str) -> str:
    """Return the first paragraphs that fit, up to the first example; at least one."""
    kept: list[str] = []
    for paragraph in text.split("\n\n"):
        if kept and (">>>" in paragraph or len(_TOKEN.findall("\n".join([*kept, paragraph]))) > _MOST_TOKENS):
            break
        kept.append(paragraph)
    return "\n".join(kept)


def _tag(position: int, spans: list[tuple[int, int, str]]) -> str:
    for start, end, kind in spans:
        if start <= position < end:
            return f"B-{kind}" if position == start else f"I-{kind}"
    return "O"
