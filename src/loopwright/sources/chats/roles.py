"""Roles whose values are conversations: which columns hold them, and the values of these columns as a `Chat`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loopwright.sources.chats.formats import FORMATS, Chat, chat_format, parsed, read_chat
from loopwright.sources.chats.pairs import BESIDE, Pair, pair_columns, read_pair

CHAT_KINDS = ("chat", "prompt", "pair")
_WEIGHT = ("weight",)  # beside the other columns of rows to train on


def chat_columns(kind: str, columns: Sequence[str], given: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the columns of a file that hold conversations, or without the last answer prompts; empty if none do.

    A file may have rows of several formats.
    """
    if kind == "pair":
        found = pair_columns(columns, given)
    else:
        least = {name: needed if kind == "chat" else asked for name, (needed, asked, _) in FORMATS.items()}
        used = [name for each in FORMATS if {*least[each]} <= {*columns} for name in (*least[each], *FORMATS[each][2])]
        found = [name for name in dict.fromkeys(used) if name in columns]
    return tuple(with_beside(kind, found, columns)) if found else ()


def is_usual(column: str | Sequence[str]) -> bool:
    """Whether columns of conversations have the names of formats, so that those of another file can be found."""
    names = {column} if isinstance(column, str) else {*column}
    usual = {name for needed, _, more in FORMATS.values() for name in (*needed, *more)}
    return names <= usual | {*BESIDE, *_WEIGHT}


def with_beside(kind: str, column: Sequence[str], columns: Iterable[str]) -> list[str]:
    """Return the columns of a role; of conversations with those that belong to any format, if the file has them."""
    beside = {"chat": (*BESIDE, *_WEIGHT), "prompt": BESIDE, "pair": BESIDE}.get(kind, ())
    return [*column, *(name for name in beside if name in columns and name not in column)]


def chat_cells(kind: str, row: Mapping[str, Any], trained: Sequence[str]) -> dict[str, Any]:
    """Return the cells of a row that Python gave, for `as_chat`; `trained` are the columns of the run."""
    given = [name for name in trained if name not in BESIDE] if kind == "pair" else []
    named = [given[0] if len(given) > 2 else "", *given[-2:]]
    names = pair_columns(row, named) or pair_columns(row) if given else []
    return {name: row[name] for name in with_beside(kind, names, row)} if names else dict(row)


def as_chat(kind: str, value: Any, where: str = "") -> Chat | Pair:
    """Return the conversation in the cells of a row, by column; an InputError (data.chat) says what is wrong with it.

    A prompt ends before the answer that is asked for: a last turn of the assistant is left out.
    """
    if isinstance(value, Chat | Pair):
        return value
    if kind == "pair":
        return read_pair(value, where=where)
    cells = _as_format(dict(value) if isinstance(value, Mapping) else {"messages": value})
    chat = read_chat(cells, where=where, is_prompt=kind == "prompt")
    if kind == "chat":
        return chat
    messages = list(chat.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return Chat(messages, chat.tools)


def _as_format(cells: dict[str, Any]) -> dict[str, Any]:
    """Rename the only column of another name, to messages or conversations by what is in it."""
    others = [name for name in cells if name not in (*BESIDE, *_WEIGHT)]
    if len(others) != 1 or others[0] in FORMATS or others[0] in ("prompt", "instruction"):
        return cells
    value = cells.pop(others[0])
    found = parsed(value)
    return {("conversations" if could_be_chat(found) and "from" in found[0] else "messages"): value, **cells}


def could_be_chat(value: Any) -> bool:
    turns = value if isinstance(value, list) else []
    return bool(turns) and all(isinstance(each, Mapping) and ("role" in each or "from" in each) for each in turns)


def chat_text(chat: Any) -> str:
    """Return all of a conversation as one text, for hashes; an unusable row has none."""
    if isinstance(chat, Pair):
        return json.dumps([chat.prompt, chat.chosen, chat.rejected, chat.tools], ensure_ascii=False, sort_keys=True)
    if not isinstance(chat, Chat):
        return ""
    return json.dumps([chat.messages, chat.tools], ensure_ascii=False, sort_keys=True, default=str)


def count_turns(rows: Iterable[Mapping[str, Any]], chats: Iterable[Any]) -> Counter[tuple[str, str]]:
    """Count the formats of rows, the turns of each role, and the conversations with tools."""
    found: Counter[tuple[str, str]] = Counter()
    for row, chat in ((row, chat) for row, chat in zip(rows, chats, strict=True) if chat):
        found["format", chat.format if isinstance(chat, Pair) else chat_format(_as_format(dict(row))) or ""] += 1
        if isinstance(chat, Chat) or chat.is_chat:
            found.update(("turns", str(message["role"])) for message in chat.messages)
            found["tools", "conversations"] += chat.tools is not None
    return found


def describe_chats(found: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """Return the counts of all files as plain data, by what was counted."""
    kinds = dict.fromkeys(kind for kind, _ in found)
    return {kind: {name: count for (each, name), count in found.items() if each == kind and count} for kind in kinds}
