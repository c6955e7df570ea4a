"""Read a row of any of the four formats as a list of messages in the format of chat templates."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from loopwright.errors import InputError, nearest

Message = dict[str, Any]

_ROLES = {
    **dict.fromkeys(("system", "developer", "user", "assistant", "tool"), ""),
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "chatbot", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("function", "ipython", "observation", "tool_response", "function_response"), "tool"),
}
_FIX = "correct this row in the data file   or   delete this row from the data file"
_MOST_SHOWN = 160


@dataclass(frozen=True)
class Chat:
    """A conversation in the format of chat templates.

    Attributes:
        messages: dicts with `role` and `content`, and `tool_calls`, `name` etc. where they have them.
        tools: the JSON schemas of the tools that the assistant may call.
        completion: index of the first message that may be trained on; earlier ones are the prompt of a
            `prompt`/`completion` row.
        where: the row, for messages.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    completion: int = 0
    where: str = ""


def chat_format(row: Mapping[str, Any]) -> str | None:
    """Return the name of a row's format; None if it has none of them."""
    has = {name for name, value in row.items() if value is not None}
    if "messages" in has:
        return "messages"
    if "conversations" in has:
        return "conversations"
    if {"prompt", "completion"} <= has:
        return "prompt/completion"
    if {"instruction", "output"} <= has:
        return "instruction/output"
    return None


def read_chat(row: Mapping[str, Any], *, where: str = "") -> Chat:
    """Return the conversation of a row; InputError if it has none that can be trained on.

    `where` says which row it is, such as "chats.jsonl, line 3".
    """
    place = where or "this row"
    kind = chat_format(row)
    if kind is None:
        raise InputError(
            "data.chat",
            f"{place} has none of the formats of conversations",
            saw=[
                f"columns: {', '.join(map(str, row))}",
                "formats: messages; conversations; prompt and completion; instruction and output",
            ],
            fix="rename the columns of the data file to one of the formats",
        )
    completion = 0
    if kind == "prompt/completion":
        prompt = _given(row["prompt"], "user", "prompt", place)
        answer = _given(row["completion"], "assistant", "completion", place)
        listed, completion = [*prompt, *answer], len(prompt)
    elif kind == "instruction/output":
        listed = _instruction(row, place)
    else:
        listed = _items(row[kind], kind, place)
    messages = [_message(listed, index, place) for index in range(len(listed))]
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
        completion += bool(completion)
    _check_turns(messages, completion, place)
    return Chat(messages, _tools(row.get("tools"), place), completion, where)


def _check_turns(messages: list[Message], completion: int, place: str) -> None:
    roles = [each["role"] for each in messages]
    if not messages:
        raise InputError("data.chat", f"{place} is an empty conversation", fix=_FIX)
    if "assistant" not in roles[completion:]:
        part = "completion" if completion else "conversation"
        what = f"{place}: the {part} has no turn of the assistant, so there is nothing to train on"
        raise InputError("data.chat", what, saw=[f"roles: {', '.join(roles)}"], fix=_FIX)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _parsed(value: Any) -> Any:
    """Return the list or dict that a cell has as JSON, or as Python writes it; anything else as it is."""
    if not isinstance(value, str) or value.strip()[:1] not in ("[", "{"):
        return value
    readers: list[Callable[[str], Any]] = [json.loads, ast.literal_eval]
    for read in readers:
        try:
            return read(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return value


def _items(value: Any, column: str, place: str) -> list[Any]:
    found = _parsed(value)
    if isinstance(found, (str, bytes, Mapping)) or not isinstance(found, Iterable):
        what = f"{place}: {column} is not a list of messages"
        raise InputError("data.chat", what, saw=[f"{column}: {_shown(value)}"], fix=_FIX)
    return list(found)


def _given(value: Any, role: str, column: str, place: str) -> list[Any]:
    """Return a prompt or a completion as messages: it is a text, or a list of messages."""
    found = _parsed(value)
    if isinstance(value, str) and not (isinstance(found, list) and found and isinstance(found[0], Mapping)):
        return [{"role": role, "content": value}]
    return _items(found, column, place)


def _instruction(row: Mapping[str, Any], place: str) -> list[Any]:
    messages: list[Any] = []
    for turn in _items(row.get("history") or [], "history", place):
        question, answer = turn if not isinstance(turn, str) and len(turn) == 2 else (turn, None)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    more = row.get("input")
    asked = f"{row['instruction']}\n\n{more}" if isinstance(more, str) and more.strip() else row["instruction"]
    return [*messages, {"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]


def _message(listed: list[Any], index: int, place: str) -> Message:
    given, place = listed[index], f"{place}, message {index + 1}"
    if not isinstance(given, Mapping):
        what = f"{place} is not an object with role and content"
        raise InputError("data.chat", what, saw=[f"message: {_shown(given)}"], fix=_FIX)
    given = {name: value for name, value in given.items() if value is not None}
    named = given.pop("role", given.pop("from", None))
    role = str(named).strip().lower().replace("-", "_")
    if role not in _ROLES:
        near = nearest(role, _ROLES)
        seen = [str(each.get("role", each.get("from"))) for each in listed if isinstance(each, Mapping)]
        raise InputError(
            "data.chat",
            f"{place} has {'no role' if named is None else f'the unknown role {named!r}'}",
            saw=[
                f"message: {_shown(given)}",
                f"roles in this conversation: {', '.join(dict.fromkeys(seen))}",
                f"known roles: {', '.join(_ROLES)}" if near is None else f"nearest role: {near}",
            ],
            fix=_FIX,
        )
    content = given.pop("content", given.pop("value", None))
    message: Message = {"role": _ROLES[role] or role, "content": _text(content, place), **given}
    if role == "function_call":
        calls = _parsed(content)
        message |= {"content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
    if "tool_calls" in message and (calls := _items(message.pop("tool_calls") or [], "tool_calls", place)):
        message["tool_calls"] = [_call(each, place) for each in calls]
    if message["content"] is None and "tool_calls" not in message:
        what = f"{place} ({message['role']}) has neither content nor tool calls"
        raise InputError("data.chat", what, saw=[f"message: {_shown(given)}"], fix=_FIX)
    return message


def _text(content: Any, place: str) -> str | None:
    """Return a content as text; parts of type "text" are joined."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, Iterable) and not isinstance(content, Mapping) else [content]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str) or (isinstance(part, Mapping) and part.get("type", "text") != "text"):
            what = f"{place}: the content is not text"
            raise InputError("data.chat", what, saw=[f"content: {_shown(content)}"], fix=_FIX)
        texts.append(text)
    return "".join(texts)


def _call(given: Any, place: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, whether they were one or JSON."""
    outer = _parsed(given)
    inner = outer.get("function", outer) if isinstance(outer, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        what = f"{place}: a tool call has no name"
        raise InputError("data.chat", what, saw=[f"tool call: {_shown(given)}"], fix=_FIX)
    arguments = _parsed(inner.get("arguments", inner.get("parameters", {})))
    function = {"name": inner["name"], "arguments": {} if arguments in (None, "") else arguments}
    return {"type": "function", **({"id": outer["id"]} if outer.get("id") else {}), "function": function}


def _tools(value: Any, place: str) -> list[dict[str, Any]] | None:
    if value is None or value == "":
        return None
    tools = [_parsed(each) for each in _items(value, "tools", place)]
    if not all(isinstance(each, Mapping) for each in tools):
        what = f"{place}: tools is not a list of JSON schemas"
        raise InputError("data.chat", what, saw=[f"tools: {_shown(value)}"], fix=_FIX)
    return [
        dict(each) if "function" in each else {"type": "function", "function": dict(each)} for each in tools
    ] or None
