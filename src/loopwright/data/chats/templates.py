"""Chat templates: the tokenizer's own, a file, or one of those built in, which follow the public formats.

The built-in templates have generation marks around each turn of the assistant and the token that ends it. They refuse
tools and roles that their format does not have, instead of leaving them out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopwright.errors import InputError, nearest

_TOKEN = re.compile(r"<[|｜][^<>'\"{}]+?[|｜]>|<(?:start|end)_of_turn>")
_CONTENT = "{{ message.content }}"
_REFUSED = "{{ raise_exception('this template has no messages of the role ' + message.role + ' here') }}"
_NO_TOOLS = "{% if tools %}{{ raise_exception('this template has no tools') }}{% endif %}"
_TOOLS = (
    "# Tools\n\nYou may call these functions:\n<tools>{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}"
    "{{ '\\n' }}</tools>\n\nCall one as\n<tool_call>\n"
    '{"name": ..., "arguments": ...}\n</tool_call>'
)
_CALLS = (
    "{{ text }}{% for call in message.tool_calls or [] %}{{ '\\n' if text or not loop.first }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
_TEXT = "{% set text = message.content or '' %}"
_LAST_THOUGHTS = (  # thinking before a later question is left out
    _TEXT + "{% if messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)


def _template(
    user: str,
    header: str,
    end: str,
    *,
    system: str = "",
    merged: tuple[str, str] = ("", "\\n\\n"),
    start: str = _NO_TOOLS + "{{ bos_token }}",
    tool: str = "",
    text: str = _TEXT,
    answer: str = "{{ text }}",
    after: str = "",
) -> str:
    """Return a Jinja template; without `system` a system message is merged into the first question."""
    is_first = "loop.index0 == 1 and messages[0].role == 'system'"
    first = f"{{% if {is_first} %}}{{{{ '{merged[0]}' + messages[0].content + '{merged[1]}' }}}}{{% endif %}}"
    turns = {
        "system": system or "{% if not loop.first %}" + _REFUSED + "{% endif %}",
        "user": user.replace("{}", ("" if system else first) + _CONTENT),
        "assistant": f"{text}{header}{{% generation %}}{answer}{end}{{% endgeneration %}}{after}",
        **({"tool": tool} if tool else {}),
    }
    cases = "{% el".join(f"if message.role == '{role}' %}}{turn}" for role, turn in turns.items())
    loop = f"{{% for message in messages %}}{{% {cases}{{% else %}}{_REFUSED}{{% endif %}}{{% endfor %}}"
    written = f"{start}{loop}{{% if add_generation_prompt %}}{header}{{% endif %}}"
    return written.replace("%}\n", "%}{{ '\\n' }}")  # a newline after a tag would be trimmed


def _by_role(header: str, end: str, *, after: str = "", tool: str = "", text: str = _TEXT, bos: str = "") -> str:
    """Return a template of one header per role, `header` with {} for the role; with `tool` it has tools and calls."""

    def turn(role: str, content: str = "{}") -> str:
        return header.replace("{}", role) + content + end + after

    return _template(
        turn("user"),
        header.replace("{}", "assistant"),
        end,
        system=turn("system", _CONTENT),
        start=bos + "{% if tools %}" + turn("system", _TOOLS) + "{% endif %}" if tool else _NO_TOOLS,
        tool=turn(*tool.split(":")) if tool else "",
        text=text,
        answer=_CALLS if tool else "{{ text }}",
        after=after,
    )


_CHATML = {"tool": f"user:<tool_response>\n{_CONTENT}\n</tool_response>", "after": "\n"}

BUILT_IN = {
    "alpaca": _template("### Instruction:\n{}\n\n", "### Response:\n", "{{ eos_token }}", after="\n\n"),
    "chatml": _by_role("<|im_start|>{}\n", "<|im_end|>", **_CHATML),
    "deepseek": _template("<｜User｜>{}", "<｜Assistant｜>", "{{ eos_token }}", system=_CONTENT, text=_LAST_THOUGHTS),
    "gemma": _template("<start_of_turn>user\n{}<end_of_turn>\n", "<start_of_turn>model\n", "<end_of_turn>", after="\n"),
    "llama-2": _template(
        "[INST] {} [/INST]",
        "",
        " {{ eos_token }}",
        merged=("<<SYS>>\\n", "\\n<</SYS>>\\n\\n"),
        answer=" {{ text }}",
        after="{{ bos_token if not loop.last }}",
    ),
    "llama-3": _by_role(
        "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", tool=f"ipython:{_CONTENT}", bos="{{ bos_token }}"
    ),
    "mistral": _template("[INST] {} [/INST]", "", "{{ eos_token }}", answer=" {{ text }}"),
    "phi-3": _by_role("<|{}|>\n", "<|end|>", after="\n"),
    "plain": _template("User: {}\n\n", "Assistant:", "{{ eos_token }}", answer=" {{ text }}", after="\n\n"),
    "qwen": _by_role("<|im_start|>{}\n", "<|im_end|>", text=_LAST_THOUGHTS, **_CHATML),
    "vicuna": _template("USER: {} ", "ASSISTANT:", "{{ eos_token }}", answer=" {{ text }}", system=f"{_CONTENT} "),
    "zephyr": _by_role("<|{}|>\n", "{{ eos_token }}", after="\n"),
}


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with its name: a built-in one, a file, or the first line of the tokenizer's own.

    Attributes:
        default: the Jinja text.
        tool_use: the Jinja text for conversations with tools, if there is another one.
    """

    name: str
    default: str
    tool_use: str | None = None

    def text(self, *, has_tools: bool = False) -> str:
        """Return the Jinja text for a conversation."""
        return self.tool_use if has_tools and self.tool_use else self.default

    @property
    def fix(self) -> str:
        """What to do about a row that the template does not write as it should."""
        row = "correct this row in the data file"
        return row if self.name == "chatml" else f"--chat_template chatml   or   {row}"

    @property
    def tokens(self) -> list[str]:
        """The control tokens that the template writes, such as <|im_start|>; a tokenizer should have them all."""
        return list(dict.fromkeys(_TOKEN.findall(self.default)))


def resolve_template(tokenizer: Any, given: str | Path | None = None) -> ChatTemplate:
    """Return the template of this built-in name or file, or the tokenizer's own; InputError if there is none."""
    names, given = ", ".join(BUILT_IN), None if given is None else str(given)
    if given in BUILT_IN:
        return ChatTemplate(given, BUILT_IN[given])
    if given is not None:
        if "{" in given:
            return ChatTemplate(_first_line(given), given)
        try:
            if (text := Path(given).read_text(encoding="utf-8")).strip():
                return ChatTemplate(given, text)
            raise ValueError("it is empty")
        except (OSError, ValueError) as error:
            near = nearest(given, BUILT_IN)
            raise InputError(
                "model.chat_template",
                f"there is no chat template {given!r}: neither a built-in one nor a file that can be read",
                saw=[f"file: {error}", f"built in: {names}"],
                fix=f"--chat_template {near or 'chatml'}",
                flag="--chat_template",
            ) from None
    own = getattr(tokenizer, "chat_template", None)
    named = own if isinstance(own, dict) else {"default": own}
    default, tool_use = named.get("default"), named.get("tool_use")
    if not default:
        raise InputError(
            "model.chat_template",
            "the tokenizer has no chat template",
            saw=[f"built in: {names}"],
            fix="--chat_template chatml   or   --chat_template template.jinja",
            flag="--chat_template",
        )
    built_in = next((name for name, text in BUILT_IN.items() if text == default), None)
    return ChatTemplate(built_in or _first_line(default), default, tool_use)


def _first_line(template: str) -> str:
    line = template.strip().partition("\n")[0]
    return repr(line if len(line) <= 60 else f"{line[:60]}...")
