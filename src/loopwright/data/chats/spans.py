"""Find each turn of the assistant in a rendered conversation, exactly.

Private-use characters around the content of every message survive a chat template: trimming, dropped thinking and the
JSON of tool calls work as before. A rendering with them must equal the plain one once they are removed, and the text
between two of them must equal the content. That locates every turn and proves it at the same time, also for templates
that strip earlier thinking or treat the last message differently, where prefixes of the conversation do not align.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

_FIRST, _GENERATION, _END_GENERATION = 0x100000, 0x10FFFC, 0x10FFFD  # supplementary private use area B
PRIVATE = re.compile("[\U00100000-\U0010fffd]")
_THINKING = re.compile(r"(</?think(?:ing)?>|\[/?THINK\])")
_GENERATION_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")


@dataclass
class Segment:
    """A text of a message that the template should write: a content, a thought, or the name of a called tool."""

    message: int
    text: str
    is_name: bool
    sentinel: str
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @property
    def is_dropped(self) -> bool:
        """Whether the template left it out."""
        return not self.starts and not self.ends

    @property
    def is_whole(self) -> bool:
        """Whether it stands in the text once; the name of a tool may be repeated, as by the tool's answer."""
        return len(self.starts) == len(self.ends) and (self.is_name or len(self.starts) == 1)


@dataclass
class Rendering:
    """A rendered conversation, with the positions of its segments and of the template's generation marks."""

    text: str
    segments: list[Segment]
    marks: list[tuple[int, int]]

    def of_message(self, index: int) -> list[tuple[int, int]]:
        """Return the positions of the texts of a message."""
        own = [each for each in self.segments if each.message == index and not each.is_dropped]
        return [(each.starts[0], each.ends[0]) for each in own]


class Sentinels:
    """Puts private-use characters around the texts of messages, and finds them in a rendering.

    Args:
        roles: whose content is wrapped; None for everyone's.
        empty: whether an empty content gets its characters as well.
    """

    def __init__(self, messages: list[dict[str, Any]], *, roles: set[str] | None, empty: bool) -> None:
        self.segments: list[Segment] = []
        self.messages: list[dict[str, Any]] = []
        for index, message in enumerate(messages):
            wrapped = dict(message)
            is_marked = empty and not message.get("tool_calls")
            if roles is None or message["role"] in roles:
                for name in [each for each in ("content", *_THOUGHT_FIELDS) if each in message]:
                    wrapped[name] = self._content(index, message[name], is_marked)
            if message.get("tool_calls"):
                wrapped["tool_calls"] = [self._call(index, each) for each in message["tool_calls"]]
            self.messages.append(wrapped)

    def found_in(self, rendered: str) -> Rendering:
        """Return a rendering of `messages` without the characters, and where they were."""
        for each in self.segments:
            each.starts, each.ends = [], []
        opened: list[int] = []
        marks: list[tuple[int, int]] = []
        for removed, match in enumerate(PRIVATE.finditer(rendered)):
            number, position = ord(match[0]) - _FIRST, match.start() - removed
            if ord(match[0]) == _GENERATION:
                opened.append(position)
            elif ord(match[0]) == _END_GENERATION:
                marks.append((opened.pop() if opened else position, position))
            else:
                segment = self.segments[number // 2]
                (segment.ends if number % 2 else segment.starts).append(position)
        return Rendering(PRIVATE.sub("", rendered), self.segments, marks)

    def _content(self, index: int, content: Any, empty: bool) -> Any:
        if isinstance(content, list):
            return [{**each, "text": self._content(index, each["text"], empty)} for each in content]
        if not isinstance(content, str) or not (content.strip() or empty):
            return content
        pieces = _THINKING.split(content)  # every second one is a tag
        if not any(piece.strip() for piece in pieces[::2]):
            return self._wrap(index, content)
        return "".join(
            piece if place % 2 or not piece.strip() else self._wrap(index, piece) for place, piece in enumerate(pieces)
        )

    def _call(self, index: int, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "name": self._wrap(index, function["name"], is_name=True)}}

    def _wrap(self, index: int, text: str, *, is_name: bool = False) -> str:
        """Wrap a text inside its surrounding whitespace, which a template may trim."""
        core = text.strip()
        before, _, after = text.partition(core) if core else ("", "", text)
        number = _FIRST + 2 * len(self.segments)
        self.segments.append(Segment(index, core, is_name, chr(number)))
        return f"{before}{chr(number)}{core}{chr(number + 1)}{after}"


@lru_cache
def with_sentinels(template: str) -> str:
    """Return a template that writes private-use characters where its generation marks begin and end.

    The assignment keeps the whitespace control of the tag.
    """

    def written(tag: re.Match[str]) -> str:
        left, end, right = tag.groups()
        if end:
            return f"{{%{left} set mark = 1 %}}{{{{ '{chr(_END_GENERATION)}' }}}}{{% endgeneration {right}%}}"
        return f"{{%{left} generation %}}{{{{ '{chr(_GENERATION)}' }}}}{{% set mark = 1 {right}%}}"

    return _GENERATION_TAG.sub(written, template)


def common_prefix(one: str, other: str) -> int:
    """Return the number of characters that two texts have in common at their start."""
    for place, (mine, its) in enumerate(zip(one, other, strict=False)):
        if mine != its:
            return place
    return min(len(one), len(other))
