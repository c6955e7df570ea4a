"""Encode a conversation as tokens and labels, with the loss on the right tokens.

The text is the template's rendering of the whole conversation, tokenized once; labels are -100 except where the
assistant speaks. Turns come from the template's generation marks, or else from rendering the conversation up to each
turn; both are proven for every row against the positions that `spans` finds.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.data.chats.spans import (
    PRIVATE,
    Rendering,
    Sentinels,
    common_prefix,
    with_sentinels,
)
from loopwright.data.chats.templates import resolve_template
from loopwright.data.columns import IGNORED
from loopwright.errors import ConfigError, InputError, nearest
from loopwright.sources.chats import Chat, is_trained

TRAIN_ON = ("assistant", "all", "last", "completion")
OVERLONG = ("refuse", "truncate", "drop")

# Whose texts get sentinels, and whether empty ones do; fewer for templates that look into their texts.
_ATTEMPTS = [(roles, empty) for empty in (True, False) for roles in (None, {"assistant"})]
# The shapes of tool calls that templates take: arguments as an object or as JSON, no content as null or as "".
_SHAPES = [{"is_json": is_json, "is_empty": is_empty} for is_empty in (False, True) for is_json in (False, True)]
_PROBE = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
_OPEN_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?$")
_LEAST_SUFFIX = 3
_MOST_KNOWN = 10_000
_MOST_SHOWN = 200
_TEMPLATE_FIX = "--chat_template chatml   or   correct this row in the data file"

Span = tuple[int, int]


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as the model sees it.

    Attributes:
        labels: the ids of the trained tokens, -100 elsewhere; not shifted.
        text: the rendered conversation.
        spans: the trained characters of `text`.
        dropped: texts of the assistant that the template left out, such as thinking of earlier turns.
    """

    input_ids: list[int]
    labels: list[int]
    text: str
    spans: list[Span]
    dropped: list[str]


class ChatEncoder:
    """Makes an `EncodedChat` of a `Chat`; None for one that is too long if overlong="drop".

    Args:
        chat_template: a built-in name or a file; None for the tokenizer's own template.
        train_on: "assistant" for each turn of the assistant, "last" for its last one, "completion" for what follows
            the prompt (or the last user message), "all" for every token.
        max_length: the most tokens.
        overlong: what happens to a longer conversation. "truncate" leaves out turns from the end, and cuts a first
            turn that is too long on its own; one without trained tokens after that is dropped.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        train_on: str = "assistant",
        max_length: int | None = None,
        overlong: str = "refuse",
    ) -> None:
        for name, value, choices in (("train_on", train_on, TRAIN_ON), ("overlong", overlong, OVERLONG)):
            if value not in choices:
                what = f"{name} is {value!r}; it must be one of {', '.join(choices)}"
                raise ConfigError(what, given=value, choices=choices, nearest=nearest(str(value), choices))
        if not getattr(tokenizer, "is_fast", False):
            raise InputError(
                "model.tokenizer",
                "the tokenizer has no offsets, which masks need",
                saw=[f"tokenizer: {type(tokenizer).__name__}"],
                fix="save a fast tokenizer (tokenizer.json) in the folder of the model",
            )
        self.tokenizer, self.template = tokenizer, resolve_template(tokenizer, chat_template)
        self.train_on, self.max_length, self.overlong = train_on, max_length, overlong
        self._in_parts, self._has_prompt, self._first_header = False, True, ""
        self._lengths: dict[tuple[str, str], int] = {}  # of headers and ends, by the text between two contents
        self._control = tuple(sorted(tokenizer.get_added_vocab(), key=len, reverse=True))
        self._boundary = re.compile("|".join([r"\s", *map(re.escape, self._control)]))
        self._added = set(tokenizer.get_added_vocab().values()) | set(tokenizer.all_special_ids)
        self.end_of_turn, self._end_text = self._probed()

    def __call__(self, chat: Chat) -> EncodedChat | None:
        """Return the tokens and labels of a conversation."""
        encoded = self._encoded(chat)
        if self.max_length is None or len(encoded.input_ids) <= self.max_length:
            return encoded
        if self.overlong == "refuse":
            raise InputError(
                "model.length",
                f"{_place(chat)} has {len(encoded.input_ids):,} tokens, more than {self.max_length:,}",
                saw=[f"starts with: {_shown(encoded.text[:80])}"],
                fix="--overlong truncate   or   --overlong drop",
            )
        return self._truncated(chat) if self.overlong == "truncate" else None

    def _truncated(self, chat: Chat) -> EncodedChat | None:
        assert self.max_length is not None
        ends = [i for i, each in enumerate(chat.messages) if each["role"] == "assistant" and i >= chat.completion]
        encoded = None
        for end in reversed(ends):
            encoded = self._encoded(Chat(chat.messages[: end + 1], chat.tools, chat.completion, chat.where))
            if len(encoded.input_ids) <= self.max_length:
                return encoded
        assert encoded is not None
        ids, labels = encoded.input_ids[: self.max_length], encoded.labels[: self.max_length]
        if all(each == IGNORED for each in labels):
            return None
        return EncodedChat(ids, labels, encoded.text, encoded.spans, encoded.dropped)

    def _encoded(self, chat: Chat) -> EncodedChat:
        messages, text = self._rendered(chat)
        spans, segments, dropped = [(0, len(text))], [(0, len(text))], list[str]()
        if self.train_on == "all" and not all(map(is_trained, chat.messages)):
            what = f"{_place(chat)} has a turn of the weight 0, which train_on='all' would train"
            raise InputError("data.chat", what, fix="--train_on assistant")
        if self.train_on != "all":
            spans, segments, dropped = self._trained(chat, messages, text)
        tokens = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.asarray(tokens["input_ids"], np.int64)
        trains = trained_tokens(text, tokens["offset_mapping"], spans, segments)
        if not trains.any():
            raise self._unproven(chat, "no token would be trained", text[-_MOST_SHOWN:], chat.messages)
        return EncodedChat(ids.tolist(), np.where(trains, ids, IGNORED).tolist(), text, spans, dropped)

    def _trained(
        self, chat: Chat, messages: list[dict[str, Any]], text: str
    ) -> tuple[list[Span], list[Span], list[str]]:
        """Return the trained characters, the assistant's own among them, and the texts that were dropped."""
        sentinels, found = self._located(chat, messages, text)
        turns = [index for index, each in enumerate(messages) if each["role"] == "assistant"]
        weighted = [index for index in turns if is_trained(chat.messages[index])]
        by_turn = (
            self._by_marks(chat, found, turns) if found.marks else self._by_prefixes(chat, sentinels, found, turns)
        )
        users = [index for index, each in enumerate(messages) if each["role"] == "user"]
        first = chat.completion
        if self.train_on == "completion" and not first:
            first = max((index for index in users if index < turns[-1]), default=0)
        elif self.train_on == "last":
            first = max(weighted, default=0)
        own = [each for each in found.segments if each.message in turns and each.text]
        lost = {each.message for each in own} - {each.message for each in own if not each.is_dropped}
        trained = [index for index in weighted if index >= first and index not in lost]
        spans = [span for index in trained for span in by_turn.get(index, ())]
        segments = [span for index in trained for span in found.of_message(index)]
        return spans, segments, [each.text for each in own if each.is_dropped]

    # ------------------------------------------------------------------------------------------------- rendering

    def _rendered(self, chat: Chat) -> tuple[list[dict[str, Any]], str]:
        """Return the messages in the shape that the template takes, and their rendering."""
        messages = chat.messages
        if any(PRIVATE.search(json.dumps(each, ensure_ascii=False, default=str)) for each in messages):
            what = f"{_place(chat)} has characters of the private use area B"
            raise InputError("data.chat", what, fix="delete these characters from the data file")
        raised: Exception | None = None
        for shape in _SHAPES[: None if any(each.get("tool_calls") for each in messages) else 1]:
            shaped = [_shaped(each, is_part=self._in_parts, **shape) for each in messages]
            try:
                return shaped, self._render(shaped, chat.tools)
            except Exception as error:  # noqa: BLE001 (a template is foreign code)
                raised = raised or error
        raise InputError(
            "model.chat_template",
            f"{_place(chat)}: the chat template {self.template.name} refuses it",
            saw=[
                f"template: {type(raised).__name__}: {_shown(str(raised))}",
                f"roles: {', '.join(each['role'] for each in messages)}",
            ],
            fix=_TEMPLATE_FIX,
        ) from raised

    def _render(self, messages: Any, tools: Any, *, marked: bool = False, prompt: bool = False) -> str:
        template = self.template.text(has_tools=bool(tools))
        text: str = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=with_sentinels(template) if marked else template,
            add_generation_prompt=prompt,
            tokenize=False,
        )
        return text

    def _located(self, chat: Chat, messages: list[dict[str, Any]], text: str) -> tuple[Sentinels, Rendering]:
        """Return the rendering with the positions of all texts, proven to equal the plain one."""
        nearest_text = ""
        for roles, empty in _ATTEMPTS:
            sentinels = Sentinels(messages, roles=roles, empty=empty)
            try:
                found = sentinels.found_in(self._render(sentinels.messages, chat.tools, marked=True))
            except Exception:  # noqa: BLE001 (a template that looks into its texts; the next attempt has fewer)
                continue
            if found.text == text:
                self._check(chat, found, messages)
                return sentinels, found
            nearest_text = found.text
        place = common_prefix(text, nearest_text)
        written = text[max(0, place - _MOST_SHOWN // 2) : place + _MOST_SHOWN // 2]
        raise self._unproven(chat, "the turns of the assistant cannot be located", written, messages)

    def _check(self, chat: Chat, found: Rendering, messages: list[dict[str, Any]]) -> None:
        for each in found.segments:
            if messages[each.message]["role"] != "assistant" or each.is_dropped:
                continue
            written = found.text[each.starts[0] : each.ends[0]] if each.is_whole else found.text[-_MOST_SHOWN:]
            if not each.is_whole or written != each.text:
                what = "the template changes the assistant's text" if each.is_whole else "a text is cut or repeated"
                raise self._unproven(chat, what, written, [messages[each.message]])

    def _unproven(self, chat: Chat, what: str, written: str, messages: list[dict[str, Any]]) -> InputError:
        said = [str(each.get("content") or each.get("tool_calls")) for each in messages if each["role"] == "assistant"]
        return InputError(
            "data.chat_mask",
            f"{_place(chat)}: {what}",
            saw=[
                f"template: {self.template.name}",
                f"the assistant's text: {_shown(said[0] if said else '')}",
                f"in the rendering: {_shown(written)}",
            ],
            fix=_TEMPLATE_FIX,
        )

    # ----------------------------------------------------------------------------------------------------- turns

    def _by_marks(self, chat: Chat, found: Rendering, turns: list[int]) -> dict[int, list[Span]]:
        """Return the spans of each turn by the template's generation marks."""
        spans: dict[int, list[Span]] = {}
        speakers = {each.message for each in found.segments}
        owners = sorted((*span, index) for index in speakers for span in found.of_message(index))
        for start, end in sorted(found.marks):
            inside = [index for first, last, index in owners if start <= first and last <= end]
            earlier = [index for first, _, index in owners if first <= start]
            for index in (inside or earlier[-1:])[:1]:  # a mark without a text belongs to the turn before
                spans.setdefault(index, []).append((start, end))
        for each in found.segments:
            for first, last in list(zip(each.starts, each.ends, strict=False))[: 1 if each.is_name else None]:
                is_own = each.message in turns
                is_covered = any(start <= first and last <= end for start, end in found.marks)
                is_touched = any(start < last and first < end for start, end in found.marks)
                if (is_own and not is_covered) or (not is_own and is_touched):
                    what = f"generation marks {'leave out' if is_own else 'cover'} {_shown(each.text)!r}"
                    marked = " ... ".join(found.text[start:end] for start, end in found.marks)
                    raise self._unproven(chat, what, marked, chat.messages)
        for own_spans in spans.values():
            start, end = own_spans[-1]
            rest = found.text[end:]
            if self._end_text and rest.lstrip(" ").startswith(self._end_text):
                own_spans[-1] = (start, end + len(rest) - len(rest.lstrip(" ")) + len(self._end_text))
        return spans

    def _by_prefixes(
        self, chat: Chat, sentinels: Sentinels, found: Rendering, turns: list[int]
    ) -> dict[int, list[Span]]:
        """Return the span of each turn: from the end of the generation prompt to the end of the turn.

        Both are found by rendering the conversation up to the turn, and comparing what the template writes there
        between two contents with what it writes in the whole conversation.
        """
        spans = {}
        text = found.text
        for index in turns:
            own = found.of_message(index)
            if not own:
                continue
            first, last = min(start for start, _ in own), max(end for _, end in own)
            last = max(last, self._last_name(chat, sentinels, found, index))
            others = [p for each in found.segments if each.message != index for p in (*each.starts, *each.ends)]
            before = text[max((p for p in others if p <= first), default=0) : first]
            after = text[last : min((p for p in others if p >= last), default=len(text))]
            if any(first < p < last for p in others):
                what = "another message is inside a turn of the assistant"
                raise self._unproven(chat, what, text[first:last], [chat.messages[index]])
            header = self._length("header", before, chat, sentinels, index)
            is_last = index == len(chat.messages) - 1
            tail = after if is_last else after[: self._length("end", after, chat, sentinels, index)]
            if tail.rstrip(" ").endswith(self._control):
                tail = tail.rstrip(" ")  # spaces after the end of a turn belong to the next one
            spans[index] = [(first - len(before) + header, last + len(tail))]
        return spans

    def _last_name(self, chat: Chat, sentinels: Sentinels, found: Rendering, index: int) -> int:
        """Return the end of the last name of a tool in a turn, where names are repeated there or by the tool."""
        repeated = [each for each in found.segments if each.message == index and len(each.starts) > 1]
        rendered = self._render(sentinels.messages[: index + 1], chat.tools) if repeated else ""
        return max((each.ends[max(0, rendered.count(each.sentinel) - 1)] for each in repeated), default=0)

    def _length(self, kind: str, gap: str, chat: Chat, sentinels: Sentinels, index: int) -> int:
        """Return how much of the text between two contents is a header, or the end of a turn."""
        if (kind, gap) not in self._lengths:
            if len(self._lengths) >= _MOST_KNOWN:
                self._lengths.clear()
            measured = self._header if kind == "header" else self._end
            self._lengths[kind, gap] = measured(gap, chat, sentinels.messages[: index + (kind == "end")])
        return self._lengths[kind, gap]

    def _written(self, chat: Chat, messages: list[dict[str, Any]], *, prompt: bool = False) -> str | None:
        """Return what the template writes after the last content; None for messages that it does not take."""
        try:
            rendered = self._render(messages, chat.tools, prompt=prompt)
        except Exception:  # noqa: BLE001 (such as no messages at all)
            return None
        last = [match.end() for match in PRIVATE.finditer(rendered)][-1:]
        return rendered[last[0] if last else 0 :]

    def _header(self, gap: str, chat: Chat, messages: list[dict[str, Any]]) -> int:
        written = self._written(chat, messages, prompt=True)
        if written is None:
            return len(gap)
        prompt = _OPEN_THOUGHT.sub("", written) if self._has_prompt else self._first_header
        if self._has_prompt and (length := common_prefix(gap, prompt)) in (len(gap), len(prompt)):
            rest = gap[length:]
            return len(gap) if len(rest) >= _LEAST_SUFFIX and self._first_header.endswith(rest) else length
        for size in range(len(prompt), _LEAST_SUFFIX - 1, -1):
            if (place := gap.rfind(prompt[-size:])) >= 0:
                return place + size
        return len(gap.rstrip(" "))

    def _end(self, gap: str, chat: Chat, messages: list[dict[str, Any]]) -> int:
        written = self._written(chat, messages)
        if written is None:
            return len(self._end_text) if self._end_text and gap.startswith(self._end_text) else 0
        if (length := common_prefix(gap, written)) in (len(gap), len(written)):
            return length
        # The last turn ends differently. A prompt for another turn shows how other turns end.
        prompted = common_prefix(gap, self._written(chat, messages, prompt=True) or "")
        tokens = [match for match in self._boundary.finditer(gap) if match.end() <= max(length, prompted)]
        ends = [match.end() for match in tokens if match.end() <= length]
        return max([*ends, *[match.end() for match in tokens if match[0].strip()][:1]], default=0)

    def _probed(self) -> tuple[int | None, str]:
        """Return the token that ends a turn, and its text, from a short conversation; (None, "") without one."""
        for self._in_parts in (False, True):
            try:
                messages, text = self._rendered(Chat(_PROBE))
                sentinels, found = self._located(Chat(_PROBE), messages, text)
            except InputError:
                continue
            if not found.of_message(1):
                continue
            prompt, without = (
                self._written(Chat(_PROBE), sentinels.messages[:1], prompt=each) for each in (True, False)
            )
            self._has_prompt = prompt != without
            asked = found.of_message(0)[0][1] if found.of_message(0) else common_prefix(text, without or "")
            between = text[asked : found.of_message(1)[0][0]].rstrip(" ")
            self._first_header = _OPEN_THOUGHT.sub("", prompt or "") if self._has_prompt else between
            tokens = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            end = found.last_end()
            for token, (start, stop) in zip(tokens["input_ids"], tokens["offset_mapping"], strict=True):
                if start >= end and token in self._added and text[start:stop].strip():
                    return token, text[start:stop]
            return None, ""
        self._in_parts = False
        return None, ""


def trained_tokens(text: str, offsets: Any, spans: list[Span], segments: list[Span]) -> npt.NDArray[np.bool_]:
    """Return which tokens are trained: those inside a span, and any that has a part of the assistant's own text.

    A token may take whitespace after a span along, as control tokens of some tokenizers do.
    """
    places = np.asarray(offsets, np.int64).reshape(-1, 2)
    first, last = places[:, 0], places[:, 1]
    found = np.zeros(len(places), np.bool_)
    for start, end in spans:
        reach = len(text) - len(text[end:].lstrip())
        found |= (first >= start) & (first < end) & (last > first) & (last <= reach)
    for start, end in segments:
        found |= (first < end) & (last > start) & (start < end)
    return found


def _place(chat: Chat) -> str:
    return chat.where or "a conversation"


def _shown(text: str) -> str:
    cut = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    return cut.replace("\n", "\\n")


def _as_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shaped(message: dict[str, Any], *, is_part: bool, is_json: bool, is_empty: bool) -> dict[str, Any]:
    content = "" if is_empty and message["content"] is None else message["content"]
    message = {name: value for name, value in message.items() if name != "weight"}
    shaped = {**message, "content": [{"type": "text", "text": content}] if is_part and content is not None else content}
    if is_json and message.get("tool_calls"):
        shaped["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _as_json(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return shaped


__all__ = ["OVERLONG", "TRAIN_ON", "ChatEncoder", "EncodedChat", "trained_tokens"]
