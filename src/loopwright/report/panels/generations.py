"""Texts that the model generated at each evaluation, from eval/samples.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from loopwright.report.blocks import Block, Example, Examples, Piece
from loopwright.report.formatting import cut
from loopwright.report.panels.sample import differing

_MOST_SHOWN: Final = 6
_MOST_TEXTS: Final = 5


def at_evaluations(lines: Iterable[Mapping[str, Any]]) -> list[Block]:
    """Return the samples of up to six evaluations across the run, including the first and the last."""
    found = [line for line in lines if isinstance(line.get("samples"), list) and line["samples"]]
    if len(found) > 1 and found[-1]["samples"] == found[-2]["samples"]:
        found.pop()  # the last evaluation was the best
    if not found:
        return []
    last = len(found) - 1
    places = sorted({index * last // max(_MOST_SHOWN - 1, 1) for index in range(_MOST_SHOWN)})
    items = [_item(found[place]) for place in places]
    note = "" if len(items) == len(found) else f"{len(items)} of {len(found):,} evaluations"
    return [Examples("What it writes, at each evaluation", items, note)]


def _item(line: Mapping[str, Any]) -> Example:
    update = line.get("update")
    fields: list[tuple[str, list[Piece]]] = []
    for sample in line["samples"][:_MOST_TEXTS]:
        if "start" in sample:
            written = _on_few_lines(cut(sample.get("written", "")))
            fields.append(("text", [Piece(str(sample["start"])), Piece(written, "new")]))
            continue
        fields.append(("source", [Piece(cut(sample.get("source", ""), 240))]))
        fields += differing(str(sample.get("written", "")), str(sample.get("true", "")))
    return Example("the best model, at the end" if update is None else f"update {update:,}", fields)


def _on_few_lines(text: str) -> str:
    """Return a text without its empty lines, of which a barely trained model writes many."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines) if lines else "(empty lines only)" if text else "(nothing)"
