"""Encode a conversation as tokens and labels, with the loss on the right tokens.

The text is the template's rendering of the whole conversation, tokenized once; labels are -100 except where the
assistant speaks. Turns come from the template's generation marks, or else from rendering the conversation up to each
turn; both are proven for every row against the positions that `spans` finds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.data.chats.renderer import PROBE, Renderer, place_of, shown
from loopwright.data.chats.spans import PRIVATE, Rendering, Sentinels, common_prefix
from loopwright.data.chats.templates import resolve_template
from loopwright.data.columns import IGNORED
from loopwright.errors import ConfigError, InputError, nearest
from loopwright.quantities import counted
from loopwright.sources.chats import Chat, is_trained

TRAIN_ON = ("assistant", "all", "last", "completion")
OVERLONG = ("refuse", "truncate", "drop")

# Whose texts get sentinels, and whether empty ones do; fewer for templates that look into their texts.
_ATTEMPTS = [(roles, empty) for empty in (True, False) for roles in (None, {"assistant"})]
_OPEN_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?$")
_LEAST_SUFFIX = 3
_MOST_KNOWN = 10_000
_MOST_SHOWN = 200
_AROUND = 30  # characters that are shown on each side

Span = tuple[int, int]


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as the model sees it.

    Attributes:
        labels: the ids of the trained tokens, -100 elsewhere; not shifted.
        text: the rendered conversation.
        spans: the trained characters of `text`.
        dropped: texts of the assistant that the template left out, such as thinking of earlier turns.
        ignored: whose other texts it left out: roles, or "tools".
    """

    input_ids: list[int]
    labels: list[int]
    text: str
    spans: list[Span]
    dropped: list[str]
    ignored: list[str] = field(default_factory=list)


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
        self._renderer = Renderer(tokenizer, self.template)
        self._render = self._renderer.render
        if max_length is not None and max_length < 1:
            raise ConfigError(f"max_length must be at least 1 token, got {max_length}")
        self.train_on, self.max_length, self.overlong = train_on, max_length, overlong
        self._has_prompt, self._first_header = True, ""
        self._lengths: dict[tuple[str, str], int | None] = {}  # of headers and ends, by the text between two contents
        self._control = tuple(sorted(tokenizer.get_added_vocab(), key=len, reverse=True))
        self._boundary = re.compile("|".join([r"\s", *map(re.escape, self._control)]))
        self._next_control = re.compile(rf"\s*(?:{'|'.join(map(re.escape, self._control)) or '(?!)'})")
        self._added = set(tokenizer.get_added_vocab().values()) | set(tokenizer.all_special_ids)
        self.end_of_turn, self._end_text = self._probed()

    def __call__(self, chat: Chat) -> EncodedChat | None:
        """Return the tokens and labels of a conversation."""
        encoded = self.whole(chat)
        if self.max_length is None or len(encoded.input_ids) <= self.max_length:
            return encoded
        if self.overlong == "refuse":
            raise InputError(
                "model.length",
                f"{place_of(chat)} has {len(encoded.input_ids):,} tokens, more than {self.max_length:,}",
                saw=[f"starts with: {shown(encoded.text[:80])}"],
                fix="--overlong truncate   or   --overlong drop",
            )
        return self.truncated(chat) if self.overlong == "truncate" else None

    def check(self, labels: Sequence[Any], first_text: str) -> None:
        """Raise an InputError if every token of a dataset is trained although train_on is not "all"."""
        if self.train_on == "all" or any((np.asarray(each) == IGNORED).any() for each in labels):
            return
        what = f"every token would be trained in {counted(len(labels), 'conversation')}"
        saw = [f"template: {self.template.name}", f"first conversation: {shown(first_text, 2 * _MOST_SHOWN)}"]
        raise InputError("data.chat_mask", what, saw=saw, fix="--train_on all")

    def truncated(self, chat: Chat) -> EncodedChat | None:
        """Return a conversation of at most `max_length` tokens; None if none of them would be trained."""
        assert self.max_length is not None
        ends = [i for i, each in enumerate(chat.messages) if each["role"] == "assistant" and i >= chat.completion]
        encoded = None
        for end in reversed(ends):
            encoded = self.whole(replace(chat, messages=chat.messages[: end + 1]), is_part=True)
            if len(encoded.input_ids) <= self.max_length:
                break
        assert encoded is not None
        ids, labels = encoded.input_ids[: self.max_length], encoded.labels[: self.max_length]
        if all(each == IGNORED for each in labels):
            return None
        return replace(encoded, input_ids=ids, labels=labels)

    def whole(self, chat: Chat, *, is_part: bool = False) -> EncodedChat:
        """Return a conversation of any length; one of which nothing is trained must be a part of another."""
        for number, each in enumerate(chat.messages, 1):
            written = json.dumps(each, ensure_ascii=False, default=str)
            if found := PRIVATE.search(written):
                what = f"{place_of(chat)} has characters of the private use area B"
                around = ascii(written[max(0, found.start() - _AROUND) : found.end() + _AROUND])
                saw = [f"message {number}: U+{ord(found[0]):X} in {around}"]
                raise InputError("data.chat", what, saw=saw, fix="delete these characters from the data file")
        if self.train_on == "all" and not all(map(is_trained, chat.messages)):
            what = f"{place_of(chat)} has a turn of the weight 0, which train_on='all' would train"
            raise InputError("data.chat", what, fix="--train_on assistant")
        messages, text = self._renderer(chat)
        spans, segments, dropped, ignored = [(0, len(text))], [(0, len(text))], list[str](), list[str]()
        if self.train_on != "all":
            spans, segments, dropped, ignored = self._trained(chat, messages, text)
        if self._renderer.ignores_tools(messages, chat.tools, text):
            ignored.append("tools")
        tokens = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.asarray(tokens["input_ids"], np.int64)
        trains = trained_tokens(text, tokens["offset_mapping"], spans, segments)
        if not trains.any() and not is_part and self.train_on != "all" and not self._chosen(chat):
            what = f"{place_of(chat)}: train_on={self.train_on!r} would train turns of the weight 0 alone"
            roles = [each["role"] + ("" if is_trained(each) else " (weight 0)") for each in chat.messages]
            fix = "--train_on assistant   or   correct this row in the data file"
            raise InputError("data.chat", what, saw=[f"roles: {', '.join(roles)}"], fix=fix)
        if not trains.any() and not is_part:
            raise self._unproven(chat, "no token would be trained", text[-_MOST_SHOWN:], chat.messages)
        return EncodedChat(ids.tolist(), np.where(trains, ids, IGNORED).tolist(), text, spans, dropped, ignored)

    def _trained(
        self, chat: Chat, messages: list[dict[str, Any]], text: str
    ) -> tuple[list[Span], list[Span], list[str], list[str]]:
        """Return the trained characters, the assistant's own among them, the texts that were dropped, and others'."""
        sentinels, found = self._located(chat, messages, text)
        turns = [index for index, each in enumerate(messages) if each["role"] == "assistant"]
        self._check_marks(chat, found, turns)
        by_turn = self._by_turn(chat, sentinels, found, turns)
        texts = [each for each in found.segments if each.text]
        own = [each for each in texts if each.message in turns]
        lost = {each.message for each in own} - {each.message for each in own if not each.is_dropped}
        trained = [index for index in self._chosen(chat) if index not in lost]
        spans = [span for index in trained for span in by_turn.get(index, ())]
        segments = [span for index in trained for span in found.of_message(index)]
        ignored = {messages[each.message]["role"] for each in texts if each.is_dropped} - {"assistant"}
        return spans, segments, [each.text for each in own if each.is_dropped], sorted(ignored)

    def _chosen(self, chat: Chat) -> list[int]:
        """Return the turns that `train_on` names, without those of the weight 0."""
        turns = [index for index, each in enumerate(chat.messages) if each["role"] == "assistant"]
        weighted = [index for index in turns if is_trained(chat.messages[index])]
        first = chat.completion
        if self.train_on == "completion" and not first:
            users = (index for index in range(turns[-1]) if chat.messages[index]["role"] == "user")
            first = max(users, default=0)
        elif self.train_on == "last":
            first = max(weighted, default=0)
        return [index for index in weighted if index >= first]

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
            f"{place_of(chat)}: {what}",
            saw=[
                f"template: {self.template.name}",
                f"the assistant's text: {shown(said[0] if said else '')}",
                f"in the rendering: {shown(written)}",
            ],
            fix=self.template.fix,
        )

    # ----------------------------------------------------------------------------------------------------- turns

    def _check_marks(self, chat: Chat, found: Rendering, turns: list[int]) -> None:
        """Check that the template's generation marks, if it has any, are around the texts of the assistant alone."""
        for each in found.segments if found.marks else ():
            for first, last in list(zip(each.starts, each.ends, strict=False))[: 1 if each.is_name else None]:
                is_own = each.message in turns
                is_covered = any(start <= first and last <= end for start, end in found.marks)
                is_touched = any(start < last and first < end for start, end in found.marks)
                if (is_own and not is_covered) or (not is_own and is_touched):
                    what = f"generation marks {'leave out' if is_own else 'cover'} {shown(each.text)!r}"
                    marked = " ... ".join(found.text[start:end] for start, end in found.marks)
                    raise self._unproven(chat, what, marked, chat.messages[each.message :] if is_own else chat.messages)

    def _by_turn(self, chat: Chat, sentinels: Sentinels, found: Rendering, turns: list[int]) -> dict[int, list[Span]]:
        """Return the spans of each turn: from the end of the generation prompt to the end of the turn, within marks.

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
            is_last = index == len(chat.messages) - 1
            is_inside = any(first < p < last for p in others)
            if not found.marks and (is_inside or (is_last and last + len(after) < len(text))):
                what = f"another message is {'inside a turn of the assistant' if is_inside else 'after the last turn'}"
                raise self._unproven(chat, what, text[first:last] if is_inside else text[last:], [chat.messages[index]])
            header = self._length("header", before, chat, sentinels, index)
            end = len(after) if is_last else self._length("end", after, chat, sentinels, index)
            start = first - len(before)
            if found.marks:
                spans[index] = self._within_marks(found, (start + (header or 0), last, end, len(after)))
                continue
            if end is None:
                end = len(self._end_text) if after.startswith(self._end_text) else 0
            tail = after[:end]
            if tail.rstrip(" ").endswith(self._control):
                tail = tail.rstrip(" ")  # spaces after the end of a turn belong to the next one
            spans[index] = [(start + (len(before.rstrip(" ")) if header is None else header), last + len(tail))]
        return spans

    def _within_marks(self, found: Rendering, turn: tuple[int, int, int | None, int]) -> list[Span]:
        """Return the marked parts of a turn, and its end token where marks leave it out.

        A turn is its start, the end of its texts, and how much after them belongs to it, if that is known, and at most.
        """
        start, last, known, most = turn
        end = last + (most if known is None else known)
        parts = [(max(start, left), min(end, right)) for left, right in found.marks if left < end and start < right]
        reach = max((right for _, right in parts), default=end)
        written, control = found.text[last:reach], self._next_control.match(found.text, reach, end)
        if control is None or reach < last:
            return parts
        if control[0].strip() == self._end_text:
            is_left_out = self._end_text not in written
        else:
            is_left_out = known is not None and not written.rstrip().endswith(self._control)
        return [*parts, (reach, control.end())] if is_left_out else parts

    def _last_name(self, chat: Chat, sentinels: Sentinels, found: Rendering, index: int) -> int:
        """Return the end of the last name of a tool in a turn, where names are repeated there or by the tool."""
        repeated = [each for each in found.segments if each.message == index and len(each.starts) > 1]
        rendered = self._render(sentinels.messages[: index + 1], chat.tools) if repeated else ""
        return max((each.ends[max(0, rendered.count(each.sentinel) - 1)] for each in repeated), default=0)

    def _length(self, kind: str, gap: str, chat: Chat, sentinels: Sentinels, index: int) -> int | None:
        """Return how much of the text between two contents is a header, or the end of a turn; None if unknown."""
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

    def _header(self, gap: str, chat: Chat, messages: list[dict[str, Any]]) -> int | None:
        written = self._written(chat, messages, prompt=True)
        if written is None:
            return None
        prompt = _OPEN_THOUGHT.sub("", written) if self._has_prompt else self._first_header
        if self._has_prompt and (length := common_prefix(gap, prompt)) in (len(gap), len(prompt)):
            rest = gap[length:]
            return len(gap) if len(rest) >= _LEAST_SUFFIX and self._first_header.endswith(rest) else length
        for size in range(len(prompt), _LEAST_SUFFIX - 1, -1):
            if (place := gap.rfind(prompt[-size:])) >= 0:
                return place + size
        return None

    def _end(self, gap: str, chat: Chat, messages: list[dict[str, Any]]) -> int | None:
        written = self._written(chat, messages)
        if written is None:
            return None
        if (length := common_prefix(gap, written)) in (len(gap), len(written)):
            return length
        # The last turn ends differently. A prompt for another turn shows how other turns end.
        prompted = common_prefix(gap, self._written(chat, messages, prompt=True) or "")
        tokens = [match for match in self._boundary.finditer(gap) if match.end() <= max(length, prompted)]
        ends = [match.end() for match in tokens if match.end() <= length]
        return max([*ends, *[match.end() for match in tokens if match[0].strip()][:1]], default=0)

    def _probed(self) -> tuple[int | None, str]:
        """Return the token that ends a turn, and its text, from a short conversation; (None, "") without one."""
        chat = Chat(PROBE)
        try:
            messages, text = self._renderer(chat)
            sentinels, found = self._located(chat, messages, text)
        except InputError:
            return None, ""
        if not found.of_message(1):
            return None, ""
        prompt, without = (self._written(chat, sentinels.messages[:1], prompt=each) for each in (True, False))
        self._has_prompt = prompt != without
        asked = found.of_message(0)[0][1] if found.of_message(0) else common_prefix(text, without or "")
        between = text[asked : found.of_message(1)[0][0]].rstrip(" ")
        self._first_header = _OPEN_THOUGHT.sub("", prompt or "") if self._has_prompt else between
        end = max((end for each in found.segments for end in each.ends), default=0)  # the template wrote the rest
        if self.train_on != "all" and not (self._has_prompt or found.marks):
            self._check_end(text, text[end:], between)
        tokens = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        for token, (start, stop) in zip(tokens["input_ids"], tokens["offset_mapping"], strict=True):
            if start >= end and token in self._added and text[start:stop].strip():
                return token, text[start:stop]
        return None, ""

    def _check_end(self, text: str, tail: str, header: str) -> None:
        """Check that the header of an answer is not written after the last turn as well."""
        common = common_prefix(tail.rstrip()[::-1], header.rstrip()[::-1])
        if common >= _LEAST_SUFFIX and not self._renderer(Chat([*PROBE, PROBE[0]]))[1].startswith(text):
            what = f"the chat template {self.template.name} writes the header of an answer after the last one"
            saw = [f"after the last answer: {shown(tail)}", "it would be trained"]
            fix = "--chat_template chatml   or   write it in the template only if add_generation_prompt is true"
            raise InputError("data.chat_mask", what, saw=saw, fix=fix, flag="--chat_template")


def trained_tokens(text: str, offsets: Any, spans: list[Span], segments: list[Span]) -> npt.NDArray[np.bool_]:
    """Return which tokens are trained: those inside a span, and any that has a part of the assistant's own text.

    A token may take whitespace after a span along, as control tokens of some tokenizers do. Others trim their offsets,
    which leaves tokens of whitespace only an end: they start where the token before them ends.
    """
    places = np.asarray(offsets, np.int64).reshape(-1, 2)
    last = places[:, 1]
    before = np.concatenate([[0], np.maximum.accumulate(last)[:-1]])
    first = np.where(places[:, 0] == last, before, places[:, 0])
    found = np.zeros(len(places), np.bool_)
    for start, end in spans:
        reach = len(text) - len(text[end:].lstrip())
        found |= (first >= start) & (first < end) & (last > first) & (last <= reach)
    for start, end in segments:
        found |= (first < end) & (last > start) & (start < end)
    return found
