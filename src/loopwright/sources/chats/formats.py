"""Read a row of any of the four formats as a list of messages in the format of chat templates."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from loopwright.errors import InputError, nearest
from loopwright.sources.values import written_value

Message = dict[str, Any]

# By format: the columns that a row needs, those that a prompt needs, and those that it may have.
FORMATS = {
    "messages": (("messages",), ("messages",), ()),
    "conversations": (("conversations",), ("conversations",), ()),
    "prompt/completion": (("prompt", "completion"), ("prompt",), ("completion",)),
    "instruction/output": (("instruction", "output"), ("instruction",), ("input", "output", "history")),
}
_CALL_ROLES = ("function_call", "tool_call", "tool_calls")
_ROLES = {
    **dict.fromkeys(("system", "developer", "user", "assistant", "tool"), ""),
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "ai", "model", "bot", "chatbot", "bing", "bard", *_CALL_ROLES), "assistant"),
    **dict.fromkeys(("function", "ipython", "observation", "tool_output"), "tool"),
    **dict.fromkeys((f"{kind}_{what}" for kind in ("tool", "function") for what in ("response", "result")), "tool"),
}
_WEIGHTS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}
_FIX = "correct this row in the data file   or   delete this row from the data file"
_MOST_SHOWN = 160


@dataclass(frozen=True)
class Chat:
    """A conversation in the format of chat templates.

    Attributes:
        messages: dicts with `role` and `content`, and `tool_calls`, `name` etc. where they have them; a turn of the
            assistant that must not be trained has a `weight` of 0.
        tools: the JSON schemas of the tools that the assistant may call.
        completion: index of the first message that may be trained on; earlier ones are the prompt of a
            `prompt`/`completion` row.
        where: the row, for messages.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    completion: int = 0
    where: str = ""


def chat_format(row: Mapping[str, Any], *, is_prompt: bool = False) -> str | None:
    """Return the name of a row's format; None if it has none of them."""
    has = {name for name, value in row.items() if not _is_null(value)}
    filled = {name for name in has if not _is_empty(row[name])}
    for names in (filled, has):  # in a file of several formats, the columns of the others may be empty
        for name, (needed, asked, _) in FORMATS.items():
            if set(asked if is_prompt else needed) <= names:
                return name
    return None


def read_chat(row: Mapping[str, Any], *, where: str = "", is_prompt: bool = False) -> Chat:
    """Return the conversation of a row; InputError if it has none that can be trained on.

    `where` says which row it is, such as "line 3 of chats.jsonl". A prompt needs no answer, and may be a text.
    """
    place, completion = where or "this row", 0
    row = row if isinstance(row, Mapping) else {"messages": row}
    kind = chat_format(row, is_prompt=is_prompt)
    if kind is None:
        raise _no_format(row, place)
    if kind == "prompt/completion":
        listed = _given(row["prompt"], "user", "prompt", place)
        completion = len(listed)
        listed = listed if is_prompt else [*listed, *_given(row["completion"], "assistant", "completion", place)]
    elif kind == "instruction/output":
        listed = _instruction(row, place)[: -1 if is_prompt else None]
    else:
        listed = _given(row[kind], "user", kind, place) if is_prompt else _items(row[kind], kind, place)
    messages = [_message(listed, index, place) for index in range(len(listed))]
    if not messages:
        raise InputError("data.chat", f"{place} is an empty conversation", fix=_FIX)
    if messages[:completion] == messages[completion : 2 * completion]:  # the completion repeats the prompt
        del messages[:completion]
    system = None if _is_null(row.get("system")) else _text(row["system"], f"{place}, system")
    if system is not None and system.strip() and messages and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
        completion += bool(completion)
    chat = Chat(messages, _tools(row.get("tools"), place), completion, where)
    if not is_prompt:
        is_row_trained = _weight(row.get("weight"), f"{place}: the column weight", " or rename the column")
        _check_turns(messages if is_row_trained else [{**each, "weight": 0} for each in messages], completion, place)
    try:
        json.dumps([messages, chat.tools], ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        what, saw = f"{place} has half of a surrogate pair, which is no character", [ascii(error.object[error.start])]
        raise InputError("data.chat", what, saw=saw, fix=_FIX) from None
    return chat


def _no_format(row: Mapping[str, Any], place: str) -> InputError:
    for name in (name for needed, _, _ in FORMATS.values() if {*needed} <= {*row} for name in needed):
        if _is_null(row[name]):
            return InputError("data.chat", f"{place} has no value for {name}", fix=_FIX)
    saw = [f"columns: {', '.join(map(str, row))}", f"formats: {'; '.join(FORMATS).replace('/', ' and ')}"]
    fix = "rename the columns of the data file to one of the formats"
    return InputError("data.chat", f"{place} has none of the formats of conversations", saw=saw, fix=fix)


def _check_turns(messages: list[Message], completion: int, place: str) -> None:
    if not any(each["role"] == "assistant" and is_trained(each) for each in messages[completion:]):
        part = "completion" if completion else "conversation"
        what = f"{place}: the {part} has no turn of the assistant, so there is nothing to train on"
        roles = [each["role"] + ("" if is_trained(each) else " (weight 0)") for each in messages]
        raise InputError("data.chat", what, saw=[f"roles: {', '.join(roles)}"], fix=_FIX)


def is_trained(message: Message) -> bool:
    """Whether the loss may be on a turn of the assistant."""
    return message.get("weight") != 0


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _is_empty(value: Any) -> bool:
    return _is_null(value) or (isinstance(value, Sized) and len(value) == 0)


def _weight(value: Any, what: str, more: str = "") -> int:
    """Return the weight of a row or a message, 0 or 1; 1 if it has none."""
    found = 1 if _is_empty(value) else _WEIGHTS.get(str(value).strip().lower())
    if found is None:
        saw, fix = [f"weight: {_shown(value)}"], f"write 0 (not trained) or 1 (trained){more}"
        raise InputError("data.chat", f"{what} is neither 0 nor 1", saw=saw, fix=fix)
    return found


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def parsed(value: Any) -> Any:
    """Return the list or dict that a cell has as JSON, or as Python writes it; anything else as it is."""
    if not isinstance(value, str) or value.strip()[:1] not in ("[", "{"):
        return value
    found = written_value(value)
    return value if found is None else found


def _items(value: Any, column: str, place: str) -> list[Any]:
    found = parsed(value)
    if isinstance(found, Mapping):
        return [found]
    if isinstance(found, (str, bytes)) or not isinstance(found, Iterable):
        what = f"{place}: {column} is not a list" + (" of messages" if column not in ("tools", "tool_calls") else "")
        raise InputError("data.chat", what, saw=[f"{column}: {_shown(value)}"], fix=_FIX)
    return list(found)


def are_messages(value: Any) -> bool:
    """Whether what a cell of text holds are messages, and not an answer in JSON."""
    listed = [value] if isinstance(value, Mapping) else value
    return isinstance(listed, list) and bool(listed) and all(map(_is_message, listed))


def _is_message(value: Any) -> bool:
    names = set(value) if isinstance(value, Mapping) else set()
    return bool(names & {"role", "from"}) and bool(names & {"content", "value", "tool_calls", "function_call"})


def _given(value: Any, role: str, column: str, place: str) -> list[Any]:
    """Return a prompt or a completion as messages: it is a text, or a list of messages."""
    if isinstance(value, int | float) or (isinstance(value, str) and not are_messages(parsed(value))):
        return [{"role": role, "content": value}]
    return _items(value, column, place)


def _instruction(row: Mapping[str, Any], place: str) -> list[Any]:
    history = [] if _is_empty(row.get("history")) else _items(row["history"], "history", place)
    messages: list[Any] = []
    for turn in history:
        both = [] if isinstance(turn, str | Mapping) or not isinstance(turn, Iterable) else list(turn)
        if not isinstance(turn, Mapping) and len(both) != 2:
            what, saw = f"{place}: history has neither messages nor pairs of texts", [f"history: {_shown(history)}"]
            raise InputError("data.chat", what, saw=saw, fix=_FIX)
        pair = zip(("user", "assistant"), both, strict=False)
        messages += [turn] if isinstance(turn, Mapping) else [{"role": role, "content": each} for role, each in pair]
    asked = _text(row["instruction"], f"{place}, instruction")
    more = None if _is_null(row.get("input")) else _text(row["input"], f"{place}, input")
    asked = f"{asked}\n\n{more}" if more is not None and more.strip() else asked
    return [*messages, {"role": "user", "content": asked}, {"role": "assistant", "content": row.get("output")}]


def _message(listed: list[Any], index: int, place: str) -> Message:
    given, place = listed[index], f"{place}, message {index + 1}"
    if not isinstance(given, Mapping):
        what = f"{place} is not an object with role and content"
        raise InputError("data.chat", what, saw=[f"message: {_shown(given)}"], fix=_FIX)
    given = {name: value for name, value in given.items() if not _is_null(value)}
    named = given.pop("role", given.pop("from", None))
    role = "_".join(str(named).lower().replace("-", " ").split())
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
    role, is_call = _ROLES[role] or role, role in _CALL_ROLES
    fields = [given.pop(name, None) for name in ("tool_calls", "function_call")]
    calls = parsed(content if is_call else next((each for each in fields if not _is_empty(each)), None))
    weight = _weight(given.pop("weight", None), f"{place}: the weight")
    message: Message = {"role": role, "content": None if is_call else _text(content, place, role == "tool"), **given}
    if role == "assistant" and (not weight or given.get("train") is False or given.get("loss") is False):
        message["weight"] = 0
    if not _is_empty(calls):
        listed = [calls] if isinstance(calls, str | Mapping) else _items(calls, "tool_calls", place)
        message["tool_calls"] = [_call(each, place) for each in listed]
    if message["content"] is None and "tool_calls" not in message:
        what = f"{place} ({message['role']}) has neither content nor tool calls"
        raise InputError("data.chat", what, saw=[f"message: {_shown(given)}"], fix=_FIX)
    return message


def _text(content: Any, place: str, is_result: bool = False) -> str | None:
    """Return a content as text; parts of type "text" are joined, and other results of tools are written as JSON."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, int | float) and not isinstance(content, bool):
        return str(content)
    parts = content if isinstance(content, Iterable) and not isinstance(content, Mapping) else [content]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        is_text = not isinstance(part, Mapping) or str(part.get("type", "text")).endswith("text")
        if not isinstance(text, str) or not is_text:
            if is_result:
                return json.dumps(content, ensure_ascii=False, default=str)
            what = f"{place}: the content is not text"
            raise InputError("data.chat", what, saw=[f"content: {_shown(content)}"], fix=_FIX)
        texts.append(text)
    return "".join(texts)


def _call(given: Any, place: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, whether they were one or JSON."""
    outer = parsed(given)
    inner = outer.get("function", outer) if isinstance(outer, Mapping) else None
    why = "has no name"
    if isinstance(inner, Mapping) and isinstance(inner.get("name"), str):
        arguments = parsed(inner.get("arguments", inner.get("parameters")))
        arguments = {} if arguments is None or arguments == "" else arguments
        if isinstance(arguments, Mapping):
            function = {"name": inner["name"], "arguments": arguments}
            return {"type": "function", **({"id": outer["id"]} if outer.get("id") else {}), "function": function}
        why = "has arguments that are not a JSON object"
    raise InputError("data.chat", f"{place}: a tool call {why}", saw=[f"tool call: {_shown(given)}"], fix=_FIX)


def _tools(value: Any, place: str) -> list[dict[str, Any]] | None:
    tools = [] if _is_empty(value) else [parsed(each) for each in _items(value, "tools", place)]
    if not all(isinstance(each, Mapping) for each in tools):
        what = f"{place}: tools is not a list of JSON schemas"
        raise InputError("data.chat", what, saw=[f"tools: {_shown(value)}"], fix=_FIX)
    return [
        dict(each) if "function" in each else {"type": "function", "function": dict(each)} for each in tools
    ] or None
