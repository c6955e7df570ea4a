"""Read a row of preference data: a prompt, and a chosen and a rejected answer to it.

Prompt and answers are texts or lists of messages. Without a prompt, `chosen` and `rejected` are whole conversations,
or texts, and the prompt is what they begin with in common: whole turns, or whole words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any

from loopwright.errors import InputError, nearest
from loopwright.sources.chats.formats import Chat, Message, read_chat
from loopwright.sources.values import written_value

PAIR_NAMES = {
    "prompt": ("prompt", "question", "query", "instruction", "conversations", "messages"),
    "chosen": ("chosen", "chosen_response", "response_chosen", "preferred"),
    "rejected": ("rejected", "rejected_response", "response_rejected", "dispreferred"),
}
BESIDE = ("system", "tools")  # columns of any format, after the others
_SYSTEM = ("system", "developer")
_WITHOUT_BLANKS = "\u0e00"  # from here on, most scripts write words without blanks between them
_FIX = "correct this row in the data file   or   delete this row from the data file"
_MOST_SHOWN = 160


@dataclass(frozen=True)
class Pair:
    """A prompt and two answers: all of them texts, or all of them lists of messages."""

    prompt: Any
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


def pair_columns(columns: Iterable[str], given: Sequence[str] = ()) -> list[str]:
    """Return the columns of prompt, if there is one, chosen and rejected answers; empty if there are no answers.

    `given` are the three that the user named, each "" for one to be found. Their order says which is which.
    """
    found = _found_columns(columns, given)
    is_lost = bool(given and given[0]) and found["prompt"] is None
    if is_lost or found["chosen"] is None or found["rejected"] is None:
        return []
    more = "input" if found["prompt"] == "instruction" and "input" in columns else None
    return [name for name in (found["prompt"], more, found["chosen"], found["rejected"]) if name is not None]


def _found_columns(columns: Iterable[str], given: Sequence[str]) -> dict[str, str | None]:
    free = [name for name in columns if name not in given]
    named = zip(PAIR_NAMES.items(), given or [""] * len(PAIR_NAMES), strict=True)
    return {
        role: next((each for each in ([name] if name else usual) if each in (columns if name else free)), None)
        for (role, usual), name in named
    }


def missing_columns(columns: Iterable[str], given: Sequence[str], free: Sequence[str]) -> tuple[str, str]:
    """Return which columns of a pair are not there, and a fix, or "" with too few columns to name.

    Flags name columns by their names or as the last one that is left. Which answer is better is never guessed.
    """
    found, whats, flags = _found_columns(columns, given), [], dict[str, str | None]()
    left = [each for each in free if each not in found.values()]
    for role, name in zip(PAIR_NAMES, given or [""] * len(PAIR_NAMES), strict=True):
        if found[role] is not None or (role == "prompt" and not name):
            flags |= {role: name} if name else {}
            continue
        whats.append(f"--{role}_column {name!r}: no such column" if name else f"no column of {role} answers")
        near = nearest(name, left) if name else None
        flags[role] = near or next((each for each in PAIR_NAMES[role] if each in left), None)
        left = [each for each in left if each != flags[role]]
    unnamed = [role for role, name in flags.items() if name is None]
    if len(left) < len(unnamed):
        return "; ".join(whats), ""
    if len(left) > len(unnamed) > 0 and found["prompt"] is None and "prompt" not in flags:
        flags, unnamed = {"prompt": None, **flags}, ["prompt", *unnamed]
    elif len(left) == len(unnamed) == 1:
        flags[unnamed.pop()] = left[0]
    fix = " ".join(f"--{role}_column {'COLUMN' if name is None else quote(name)}" for role, name in flags.items())
    return "; ".join(whats), f"{fix}, where COLUMN is one of {', '.join(map(repr, left))}" if unnamed else fix


def read_pair(cells: Mapping[str, Any], *, where: str = "") -> Pair:
    """Return the pair in the cells of a row: a prompt, if there are three, then the chosen and the rejected answer.

    A system message and tools may follow. An InputError (data.pair, or data.chat for a message) says why they are not
    two different answers to one prompt.
    """
    place, names = where or "this row", [*cells]
    while names and names[-1] in BESIDE:
        names.pop()
    beside = {name: cells[name] for name in BESIDE if name in cells and name not in names}
    turns = [_turns(cells[name]) for name in names]
    if len(turns) < 2:
        raise _unusable(place, "there are no chosen and rejected answers", dict(zip(names, turns, strict=True)))
    *asked, chosen, rejected = turns
    said = [each for each in asked if _is_said(each)]
    is_text = all(isinstance(each, str) for each in said)
    prompt = "\n\n".join(map(str, said)) if is_text else said[0]
    parts = dict(zip(PAIR_NAMES, (prompt, chosen, rejected), strict=True))
    for role in ("chosen", "rejected"):
        if not _is_said(parts[role]):
            raise _unusable(place, f"there is no {role} answer", parts)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise _unusable(place, "one answer is a text and the other a list of messages", parts)
    if chosen == rejected or (isinstance(chosen, str) and chosen.strip() == rejected.strip()):
        raise _unusable(place, "chosen and rejected are the same", parts)
    more = {name: value for name, value in beside.items() if _is_said(value)}
    if isinstance(chosen, str) and not isinstance(prompt, list):
        if asked and not _is_said(prompt):
            raise _unusable(place, "the prompt is empty", parts)
        if not asked and more:
            raise _unusable(place, f"{' and '.join(more)} cannot be part of whole texts", parts)
        if not asked or not beside:
            return _read_texts(parts, place)
    return _read_messages(parts, more, place)


def _read_messages(parts: Mapping[str, Any], more: Mapping[str, Any], place: str) -> Pair:
    chats = [_read_whole(parts, role, more, place) for role in ("chosen", "rejected")]
    one, other = ([_said(turn) for turn in chat.messages] for chat in chats)
    size = _num_common(one, other)
    if not size:
        raise _unusable(place, "chosen and rejected do not begin with the same prompt", parts)
    if one[-1] == other[-1]:
        raise _unusable(place, "the last turns of chosen and rejected are the same", parts)
    both = [chat.messages[size:] for chat in chats]
    for role, answer, last in zip(("chosen", "rejected"), both, (one[-1], other[-1]), strict=True):
        if others := {turn["role"] for turn in answer} - {"assistant"}:
            what = f"the {role} answer has a turn of the {min(others)}, which would count as the assistant's"
            raise _unusable(place, what, parts)
        if not any(last[1:]):
            raise _unusable(place, f"there is no {role} answer", parts)
    name = "whole conversations" if chats[0].completion == 0 else "a prompt and two answers, as messages"
    return Pair(chats[0].messages[:size], both[0], both[1], chats[0].tools, name)


def _read_texts(parts: Mapping[str, str], place: str) -> Pair:
    prompt, chosen, rejected = parts.values()
    if prompt:
        if len(prompt.split()) > 1 and all(each.strip().startswith(prompt.strip()) for each in (chosen, rejected)):
            raise _unusable(place, "both answers begin with the prompt, which would be there twice", parts)
        return Pair(prompt, chosen, rejected, format="a prompt and two answers, as texts")
    size = _num_common(chosen, rejected)
    if any(_is_of_word(each[size]) for each in (chosen, rejected)):
        while size and _is_of_word(chosen[size - 1]):  # in the middle of a word
            size -= 1
    if size and chosen[size - 1] == " ":  # tokens begin with the blank before a word
        size -= 1
    if not chosen[:size].strip():
        error = _unusable(place, "there is no prompt, and the answers have no common beginning", parts)
        error.flag = "--prompt_column"
        raise error
    return Pair(chosen[:size], chosen[size:], rejected[size:], format="whole texts")


def _is_of_word(character: str) -> bool:
    return character.isalnum() and character < _WITHOUT_BLANKS


def _read_whole(parts: Mapping[str, Any], role: str, more: Mapping[str, Any], place: str) -> Chat:
    """Return an answer with its prompt as one conversation, whether or not the answer repeats the prompt."""
    prompt, answer = parts["prompt"], parts[role]
    row = {"prompt": prompt, "completion": answer} if _is_said(prompt) else {"messages": answer}
    try:
        chat = read_chat({**row, **more}, where=place)
    except InputError:
        turns = [] if isinstance(answer, str) else read_chat({"messages": answer}, where=place, is_prompt=True).messages
        if not turns or turns[-1]["role"] == "assistant":
            raise
        what = f"the {role} answer ends with a turn of the {turns[-1]['role']}, not of the assistant"
        raise _unusable(place, what, parts) from None
    if not _is_said(prompt):
        return chat
    if chat.messages[chat.completion]["role"] not in ("user", *_SYSTEM):
        return chat
    whole = read_chat({"messages": answer, **more}, where=place)
    asked, given = ([*map(_said, each)] for each in (chat.messages[: chat.completion], whole.messages))
    start = int(given[0][0] in _SYSTEM and asked[0][0] not in _SYSTEM)
    is_turn = isinstance(prompt, str) and ("user", prompt.strip()) in [each[:2] for each in given]
    if given[start : start + len(asked)] != asked and not is_turn:
        raise _unusable(place, "the prompt is not the beginning of the answers, which are whole conversations", parts)
    return whole


def _said(turn: Message) -> tuple[str, ...]:
    """Return what a turn says, without ids, scores and the blanks around it."""
    calls = [each["function"] for each in turn.get("tool_calls") or ()]
    thoughts = (str(turn.get(name) or "") for name in ("reasoning_content", "reasoning", "thinking"))
    return turn["role"], str(turn["content"] or "").strip(), str(calls or ""), *thoughts


def _is_said(value: Any) -> bool:
    return bool(value.strip() if isinstance(value, str) else value)


def _turns(value: Any) -> Any:
    """Return a text, or a list of messages, which may be JSON in a cell."""
    if isinstance(value, str):
        found = written_value(value) if value.lstrip().startswith(("[", "{")) else None
        listed = [found] if isinstance(found, dict) else found
        first = listed[0] if isinstance(listed, list) and listed else None
        return listed if isinstance(first, dict) and {"role", "from", "content"} & {*first} else value
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
