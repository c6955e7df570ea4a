"""Render conversations by a chat template, with messages in the shape that it takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from loopwright.data.chats.spans import with_sentinels
from loopwright.data.chats.templates import ChatTemplate
from loopwright.errors import InputError
from loopwright.sources.chats import Chat

PROBE = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
# The shapes of tool calls that templates take: arguments as an object or as JSON, no content as null or as "".
_SHAPES = [{"is_json": is_json, "is_empty": is_empty} for is_empty in (False, True) for is_json in (False, True)]


class Renderer:
    """Renders chats by a template; an InputError says which one it refuses, and why."""

    def __init__(self, tokenizer: Any, template: ChatTemplate) -> None:
        self.template, self._tokenizer, self._in_parts = template, tokenizer, False
        if not self._writes_probe():
            self._in_parts = True  # some templates take contents as lists of parts alone
            self._in_parts = self._writes_probe()

    def _writes_probe(self) -> bool:
        from jinja2 import TemplateSyntaxError

        try:
            said = PROBE[1]["content"]
            return self(Chat(PROBE))[1].count(said) > self.template.text().count(said)
        except InputError as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                what, saw = f"the chat template {self.template.name} is not valid Jinja", [error.saw[0]]
                fix = "--chat_template chatml   or   correct the template"
                raise InputError("model.chat_template", what, saw=saw, fix=fix, flag="--chat_template") from None
            return False

    def __call__(self, chat: Chat, *, prompt: bool = False) -> tuple[list[dict[str, Any]], str]:
        """Return the messages in the shape that the template takes, and their rendering."""
        messages, found, raised = chat.messages, [], None
        for shape in _SHAPES[: None if any(each.get("tool_calls") for each in messages) else 1]:
            shaped = [_shaped(each, is_part=self._in_parts, **shape) for each in messages]
            try:
                found.append((shaped, self.render(shaped, chat.tools, prompt=prompt)))
            except Exception as error:  # noqa: BLE001 (a template is foreign code)
                raised = raised or error
                continue
            if not self._has_python(*found[-1], chat):
                return found[-1]
        if found:
            return found[0]
        saw = [f"template: {type(raised).__name__}: {shown(str(raised))}"]
        saw.append(f"roles: {', '.join(each['role'] for each in messages)}")
        what = f"{place_of(chat)}: the chat template {self.template.name} refuses it"
        raise InputError("model.chat_template", what, saw=saw, fix=self.template.fix) from raised

    def render(self, messages: Any, tools: Any, *, marked: bool = False, prompt: bool = False) -> str:
        """Return the rendering of messages as they are; anything that the template raises."""
        return self._written(messages, tools, self.template.text(has_tools=bool(tools)), marked=marked, prompt=prompt)

    def ignores_tools(self, messages: Any, tools: Any, text: str) -> bool:
        """Whether a rendering has nothing of its tools."""
        return bool(tools) and self._written(messages, None, self.template.text(has_tools=True)) == text

    def _written(self, messages: Any, tools: Any, template: str, *, marked: bool = False, prompt: bool = False) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=with_sentinels(template) if marked else template,
            add_generation_prompt=prompt,
            tokenize=False,
        )
        return text

    def _has_python(self, messages: list[dict[str, Any]], text: str, chat: Chat) -> bool:
        """Whether a template without JSON writes arguments as Python does, or None for a missing content."""
        calls = [call for each in messages for call in each.get("tool_calls") or ()]
        objects = [str(call["function"]["arguments"]) for call in calls if call["function"]["arguments"]]
        odd = [each for each in objects if each.startswith("{'")]
        odd += ["None"] if any(each["content"] is None for each in messages) else []
        given = json.dumps([chat.messages, chat.tools], ensure_ascii=False, default=str) if odd else ""
        given += self.template.text(has_tools=bool(chat.tools))
        return any(text.count(each) > given.count(each) for each in odd)


def place_of(chat: Chat) -> str:
    """Return which row a conversation is, for errors."""
    return chat.where or "a conversation"


def shown(text: str, most: int = 200) -> str:
    """Return a text on one line, cut."""
    cut = text if len(text) <= most else f"{text[:most]}..."
    return cut.replace("\n", "\\n")


def _shaped(message: Mapping[str, Any], *, is_part: bool, is_json: bool, is_empty: bool) -> dict[str, Any]:
    content = "" if is_empty and message["content"] is None else message["content"]
    shaped = {name: value for name, value in message.items() if name != "weight"}
    shaped["content"] = [{"type": "text", "text": content}] if is_part and content is not None else content
    if is_json and message.get("tool_calls"):
        shaped["tool_calls"] = []
        for call in message["tool_calls"]:
            given = call["function"]["arguments"]
            written = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            shaped["tool_calls"].append({**call, "function": {**call["function"], "arguments": written}})
    return shaped
