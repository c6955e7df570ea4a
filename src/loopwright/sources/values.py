"""From the values in a file to what a task reads: texts, lists of texts, answers. Forms that differ become one."""

from __future__ import annotations

import json
from typing import Any


class UnusableValueError(ValueError):
    """A value that is not of the kind that its role needs; its text says why."""


def as_text(value: Any) -> str:
    """Return a text; numbers are written out, nothing is the empty text."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise UnusableValueError(f"a text is needed, not {_shown(value)}")


def as_tokens(value: Any) -> list[str]:
    """Return a list of words; a text is cut at blanks."""
    if isinstance(value, str):
        return value.split()
    if value is None:
        return []
    if isinstance(value, list):
        return [as_text(part) for part in value]
    raise UnusableValueError(f"a list of words is needed, not {_shown(value)}")


def as_texts(value: Any) -> list[str]:
    """Return a list of texts, from a list or from one value per column."""
    if isinstance(value, dict) and isinstance(value.get("text"), list):  # the form of ARC and OpenBookQA
        value = value["text"]
    if isinstance(value, list | tuple):
        return [as_text(part) for part in value]
    raise UnusableValueError(f"a list of texts is needed, not {_shown(value)}")


def as_answers(value: Any, context: str) -> dict[str, list[Any]]:
    """Return {"text": [...], "answer_start": [...]} of a question, both empty where it has no answer.

    Taken are SQuAD's two forms, the same as JSON text (in a csv file), and a bare text, which is looked up in the
    context.

    Raises:
        UnusableValueError: It has another form, or an answer does not stand where it should.
    """
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UnusableValueError(f"the answers are no JSON: {error}") from error
    if value is None or value == "" or value == []:
        return {"text": [], "answer_start": []}
    if isinstance(value, str):
        value = [{"text": value, "answer_start": context.find(value)}]
    if isinstance(value, dict):
        texts, starts = value.get("text"), value.get("answer_start")
    elif isinstance(value, list) and all(isinstance(answer, dict) for answer in value):
        texts = [answer.get("text") for answer in value]
        starts = [answer.get("answer_start") for answer in value]
    else:
        texts = starts = None
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        raise UnusableValueError(f'{{"text": [...], "answer_start": [...]}} is needed, not {_shown(value)}')
    for text, start in zip(texts, starts, strict=True):
        if not isinstance(text, str) or not isinstance(start, int):
            raise UnusableValueError(f"an answer needs a text and a start, not {_shown(text)} and {_shown(start)}")
        if start < 0 or context[start : start + len(text)] != text:
            found = context.find(text)
            if found < 0:
                raise UnusableValueError(f"the answer {_shown(text)} does not occur in the context")
            there = context[max(start, 0) : max(start, 0) + len(text)]
            raise UnusableValueError(
                f"the answer {_shown(text)} is at {found}, not at {start}, where the context has {_shown(there)}"
            )
    return {"text": texts, "answer_start": starts}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
