"""Generated dialogues with a checkable rule, for the demo of chat: a running total, and a word to remember.

Each answer follows from the turns before it, so `right_answer` can check what a model writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from loopwright.demos.demo_data import DemoData, rank

_WORDS = ("tea", "owl", "sun", "map", "jam", "fox", "ice", "hat")
_LARGEST, _LARGEST_STEP = 12, 4
_NUM_ROWS = (4_000, 200)
_NOTED, _ASKED = "Noted.", "Which word was it?"
_REMEMBER, _START, _ADD, _TAKE = "Remember the word ", "Start at ", "Add ", "Take away "
_BRIEF = "Answer with the number alone."


def dialogue_rows() -> DemoData:
    """Return rows of `messages`: steps of a running total around a word to remember, some with a system turn."""
    found: dict[str, list[dict[str, str]]] = {}
    for number in count():
        turns = _dialogue(str(number))
        found.setdefault(str(turns), turns)
        if len(found) == sum(_NUM_ROWS):
            break
    rows = [{"messages": turns} for turns in found.values()]
    train, validation = rows[: _NUM_ROWS[0]], rows[_NUM_ROWS[0] :]
    return DemoData("chat", train, validation, "generated dialogues", "none needed: generated")


def right_answer(messages: Sequence[Mapping[str, str]]) -> str:
    """Return the answer to the last user turn of a dialogue, which follows from the turns before it."""
    said = [turn["content"] for turn in messages if turn["role"] == "user"]
    if said[-1].startswith(_REMEMBER):
        return _NOTED
    if said[-1] == _ASKED:
        return next(text.removeprefix(_REMEMBER) for text in said if text.startswith(_REMEMBER))
    total = 0
    for text in said:
        number = text.removesuffix(".").rpartition(" ")[2]
        if text.startswith(_START):
            total = int(number)
        elif text.startswith((_ADD, _TAKE)):
            total += int(number) if text.startswith(_ADD) else -int(number)
    return f"{total}." if messages[0]["content"] == _BRIEF else f"The total is {total}."


def _dialogue(key: str) -> list[dict[str, str]]:
    draws = count()

    def draw(num_choices: int) -> int:
        return rank(f"dialogue {next(draws)}", key) % num_choices

    total = draw(_LARGEST + 1)
    turns = [f"{_START}{total}."]
    for _ in range(2 + draw(3)):
        step = 1 + draw(_LARGEST_STEP)
        is_sum = total + step <= _LARGEST and (total < step or draw(2) == 0)
        total += step if is_sum else -step
        turns.append(f"{_ADD if is_sum else _TAKE}{step}.")
    if draw(2) == 0:
        turns.insert(draw(len(turns)), f"{_REMEMBER}{_WORDS[draw(len(_WORDS))]}.")
        turns.append(_ASKED)
    messages = [{"role": "system", "content": _BRIEF}] if draw(4) == 0 else []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": right_answer(messages)})
    return messages
