"""Keep secrets out of files: tokens, keys and passwords, by the name of a value or by their form."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

HIDDEN = "<hidden>"
_WORDS = r"(?:token|secret|passw(?:or)?d|api_?key|access_?key|secret_?key|private_?key|credentials?)"
_NAME = re.compile(rf"(?i)(?:.*[_.-])?{_WORDS}")
_SPECIAL = re.compile(r"(?i)(?:.*_)?(?:pad|mask|unk|sep|cls|bos|eos|start|end)_token")  # of a tokenizer
_ASSIGNED = re.compile(rf"(?i)((?:\b|_){_WORDS}[\"']?\s*[=:]\s*[\"'])([^\"'\n]{{8,}})")
_USER = re.compile(r"(?<=://)[^/\s@:\"']*:[^/\s@\"']+(?=@)")
_FORM = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[\w-]{20,}|AKIA[A-Z0-9]{12,}|"
    r"xox[abprs]-[\w-]{10,}|glpat-[\w-]{16,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,})"
)


def is_secret(name: str) -> bool:
    """Whether a value of this name is one to keep secret, such as hub_token or WANDB_API_KEY, but not pad_token."""
    return _NAME.fullmatch(name) is not None and _SPECIAL.fullmatch(name) is None


def without_secrets(text: str) -> str:
    """Return a text without passwords in addresses, tokens of known form, and the secrets of the environment."""
    for name, value in os.environ.items():
        if len(value) >= 12 and value in text and is_secret(name) and not value.isalpha():
            text = text.replace(value, HIDDEN)
    return _FORM.sub(HIDDEN, _USER.sub(HIDDEN, _ASSIGNED.sub(rf"\1{HIDDEN}", text)))


def command_without_secrets(words: Sequence[str]) -> list[str]:
    """Return a command line without the values of flags and variables that are secret."""
    shown, is_next = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        is_flag = is_secret(name.lstrip("-").replace("-", "_"))
        shown.append(HIDDEN if is_next else f"{name}={HIDDEN}" if is_flag and equals else without_secrets(word))
        is_next = is_flag and not equals and word.startswith("-")
    return shown
