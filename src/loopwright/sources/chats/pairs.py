"""Read a row of preference data: a prompt, and a chosen and a rejected answer to it.

Prompt and answers are texts or lists of messages. Without a prompt, `chosen` and `rejected` are whole conversations,
or texts, and the prompt is what they begin with in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loopwright.errors import InputError
from loopwright.sources.chats.formats import Chat, Message, read_chat
from loopwright.sources.values import written_value

PAIR_NAMES = {
    "prompt": ("prompt", "question", "query", "instruction", "conversations", "messages"),
    "chosen": ("chosen", "chosen_response", "response_chosen", "preferred"),
    "rejected": ("rejected", "rejected_response", "response_rejected", "dispreferred"),
}
_FIX = "correct this row in the data file   or   delete this row from the data file"
_MOST_SHOWN = 160

Turns = str | list[Message]


@dataclass(frozen=True)
class Pair:
    """A prompt and two answers: all of them texts, or all of them lists of messages."""

    prompt: Any  # Turns
    chosen: Any
    rejected: Any
    tools: list[dict[str, Any]] | None = None
    format: str = ""  # of the row that it was read from

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)

    @property
    def messages(self) -> list[Message]:
        """The prompt and the chosen answer."""
        if self.is_chat:
            return [*self.prompt, *self.chosen]
        return [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.chosen}]


def pair_columns(columns: Sequence[str], given: Sequence[str] = ()) -> list[str]:
    """Return the columns of prompt, if there is one, chosen and rejected answers; empty if there are no answers.

    `given` are the three that the user named, each "" for one to be found.
    """
    usual = dict(PAIR_NAMES) | {role: (name,) for role, name in zip(PAIR_NAMES, given, strict=False) if name}
    found = {role: next((name for name in names if name in columns), None) for role, names in usual.items()}
    if found["prompt"] is None and len(usual["prompt"]) == 1:
        return []
    has_answers = found["chosen"] is not None and found["rejected"] is not None
    return [name for name in found.values() if name is not None] if has_answers else []


def read_pair(cells: Mapping[str, Any], *, where: str = "") -> Pair:
    """Return the pair in the cells of a row: a prompt, if there are three, then the chosen and the rejected answer.

    An InputError (data.pair, or data.chat for a message) says why they are not two different answers to one prompt.
    """
    place = where or "this row"
    named = pair_columns(list(cells)) or [name for name in cells if name not in ("system", "tools")]
    turns = [_turns(cells[name]) for name in named]
    parts = dict(zip(list(PAIR_NAMES)[-len(turns) :], turns, strict=False))
    prompt, chosen, rejected = (parts.get(role) for role in PAIR_NAMES)
    for role, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer or (isinstance(answer, str) and not answer.strip()):
            raise _unusable(place, f"there is no {role} answer", parts)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise _unusable(place, "one answer is a text and the other a list of messages", parts)
    if chosen == rejected:
        raise _unusable(place, "chosen and rejected are the same", parts)
    assert chosen is not None and rejected is not None
    if isinstance(chosen, str) and not isinstance(prompt, list):
        return _read_texts(prompt, chosen, str(rejected), place, parts)
    more = {name: cells[name] for name in ("system", "tools") if cells.get(name) is not None}
    chats = [_read_whole(prompt, each, more, place, parts) for each in (chosen, rejected)]
    messages = [chat.messages for chat in chats]
    size = min(chat.completion for chat in chats) or _num_common(*messages)
    if not size or messages[0][:size] != messages[1][:size]:
        raise _unusable(place, "chosen and rejected do not begin with the same prompt", parts)
    if messages[0][-1] == messages[1][-1]:
        raise _unusable(place, "the last turns of chosen and rejected are the same", parts)
    name = "whole conversations" if chats[0].completion == 0 else "a prompt and two answers, as messages"
    return Pair(messages[0][:size], messages[0][size:], messages[1][size:], chats[0].tools, name)


def _read_texts(prompt: str | None, chosen: str, rejected: str, place: str, parts: Mapping[str, Any]) -> Pair:
    if prompt:
        return Pair(prompt, chosen, rejected, format="a prompt and two answers, as texts")
    size = _num_common(chosen, rejected)
    if size and chosen[size - 1] == " ":  # tokens begin with the blank before a word
        size -= 1
    if not size:
        raise _unusable(place, "there is no prompt, and the answers have no common beginning", parts)
    return Pair(chosen[:size], chosen[size:], rejected[size:], format="whole texts")


def _read_whole(prompt: Any, answer: Any, more: Mapping[str, Any], place: str, parts: Mapping[str, Any]) -> Chat:
    """Return an answer with its prompt as one conversation, whether or not the answer repeats the prompt."""
    if not prompt:
        return read_chat({"messages": answer, **more}, where=place)
    chat = read_chat({"prompt": prompt, "completion": answer, **more}, where=place)
    if chat.messages[chat.completion]["role"] != "user":
        return chat
    asked, whole = chat.messages[: chat.completion], read_chat({"messages": answer, **more}, where=place)
    is_said = isinstance(prompt, str) and prompt in [each["content"] for each in whole.messages[:-1]]
    if whole.messages[: len(asked)] != asked and not is_said:
        raise _unusable(place, "the prompt is not the beginning of the answers, which are whole conversations", parts)
    return whole


def _turns(value: Any) -> Any:
    """Return a text, or a list of messages, which may be JSON in a cell."""
    if isinstance(value, str):
        found = written_value(value) if value.lstrip().startswith(("[", "{")) else None
        listed = [found] if isinstance(found, dict) else found
        return listed if isinstance(listed, list) and listed and isinstance(listed[0], dict) else value
    if isinstance(value, Mapping):
        return [dict(value)]
    return list(value) if isinstance(value, Iterable) else None if value is None or value != value else str(value)


def _num_common(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Return the length of the common beginning, which leaves something of both."""
    most = min(len(chosen), len(rejected)) - 1
    return next((place for place in range(most) if chosen[place] != rejected[place]), max(most, 0))


def _unusable(place: str, why: str, parts: Mapping[str, Any]) -> InputError:
    shown = {name: repr(value) for name, value in parts.items() if value}
    cut = {name: text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..." for name, text in shown.items()}
    return InputError("data.pair", f"{place}: {why}", saw=[f"{name}: {text}" for name, text in cut.items()], fix=_FIX)
