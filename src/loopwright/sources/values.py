"""Convert file values to task inputs: texts, lists of texts, answers, each in one format."""

from __future__ import annotations

import ast
import json
import math
import re
from contextlib import suppress
from decimal import Decimal
from typing import Any

from loopwright.config.files import check_depth

_MOST_PYTHON = 1 << 18  # characters of a value in Python, which take a thousand times as many bytes to parse
_LIST_OF_TEXTS = re.compile(r"\s*\[\s*(?:['\"].*)?\]\s*", re.DOTALL)


class UnusableValueError(ValueError):
    """A value that its role cannot use; the message has the reason."""


def as_role(kind: str, value: Any, context: str = "") -> Any:
    """Return a value in the format of a role's kind: text, tokens, texts or answers (in their context)."""
    if kind == "answers":
        return as_answers(value, context)
    return {"text": as_text, "tokens": as_tokens, "texts": as_texts}[kind](value)


def as_text(value: Any) -> str:
    """Return a text; numbers are written out, None becomes the empty text."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UnusableValueError(f"a text is needed, not {_shown(value)}, which is not UTF-8") from error
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise UnusableValueError(f"a text is needed, not {_shown(value)}")


def as_plain(value: Any, *, is_listed: bool = False) -> Any:
    """Return a value of arrow in JSON's types, or bytes: dates, times and the like as text, without a midnight.

    Arrow gives all dicts of a list the same keys; those without a value are left out.
    """
    if isinstance(value, dict):
        items = [each for each in value.items() if not is_listed or each[1] is not None]
        return {str(name): as_plain(part, is_listed=is_listed) for name, part in items}
    if isinstance(value, list | tuple):
        return [as_plain(part, is_listed=True) for part in value]
    if value is None or isinstance(value, str | int | float | bytes):
        return value
    return float(value) if isinstance(value, Decimal) else str(value).removesuffix(" 00:00:00")


def as_tokens(value: Any) -> list[str]:
    """Return a list of words; a text is split at spaces, unless it is a list written as text."""
    if isinstance(value, str):
        words = listed(value)
        value = value.split() if words is None else words
    if value is None:
        return []
    if isinstance(value, list):
        if None in value:
            raise UnusableValueError(f"word {value.index(None) + 1} of {len(value)} is null")
        return [as_text(part) for part in value]
    raise UnusableValueError(f"a list of words is needed, not {_shown(value)}")


def as_texts(value: Any) -> list[str]:
    if isinstance(value, dict) and isinstance(value.get("text"), list):  # the format of ARC and OpenBookQA
        value = value["text"]
    if isinstance(value, str):
        value = listed(value) or value
    if isinstance(value, list | tuple):
        return [as_text(part) for part in value]
    raise UnusableValueError(f"a list of texts is needed, not {_shown(value)}")


def listed(text: str) -> list[Any] | None:
    """Return the list of texts written in a csv cell; None for any other text, such as words in brackets."""
    return written_list(text) if _LIST_OF_TEXTS.fullmatch(text) else None


def written_list(text: str) -> list[Any] | None:
    value = written_value(text)
    return value if isinstance(value, list) else None


def written_value(text: str) -> Any:
    """Return the value written in a text, in JSON or Python; None if there is none."""
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        try:
            value = json.loads(text)
        except ValueError:
            value = ast.literal_eval(text.strip()) if len(text) <= _MOST_PYTHON else None
            repr(value)  # a ValueError for whole numbers of thousands of digits
        check_depth(value)
        return value
    return None


def without_empty_end(parts: list[Any]) -> list[Any]:
    end = len(parts)
    while end > 2 and (parts[end - 1] is None or (isinstance(parts[end - 1], str) and not parts[end - 1].strip())):
        end -= 1
    return parts[:end]


def as_answers(value: Any, context: str) -> dict[str, list[Any]]:
    """Return {"text": [...], "answer_start": [...]} of a question, both empty if it has no answer.

    It accepts SQuAD's two formats, the same as text (in a csv file), and texts alone, which are searched in the
    context; UnusableValueError otherwise, or if an answer is not where it should be.
    """
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        written = written_value(value)
        if not isinstance(written, dict | list):
            raise UnusableValueError(f"the answers are not JSON: {_shown(value)}")
        value = written
    if value is None or value == "" or value == []:
        return {"text": [], "answer_start": []}
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and all(isinstance(answer, str) for answer in value):
        value = {"text": value}
    if isinstance(value, dict):
        texts, starts = value.get("text"), value.get("answer_start")
        if isinstance(texts, str):
            texts, starts = [texts], None if starts is None else [starts]
        if isinstance(texts, list) and starts is None and all(isinstance(text, str) for text in texts):
            starts = [context.find(text) for text in texts]
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
            what = f"the answer {_shown(text)} is at {found}, not at {start}, where the context has {_shown(there)}"
            raise UnusableValueError(what)
    return {"text": texts, "answer_start": starts}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
