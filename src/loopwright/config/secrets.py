"""Keep secrets out of files: tokens, keys and passwords, by the name of a value or by their form."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

HIDDEN = "<hidden>"
_WORDS = (
    r"(?:token|secret|pass(?:word|wd|phrase)|pwd|credentials?|(?:api|access|account|private|secret[\w-]{0,30})[_-]?key)"
)
_NAME = re.compile(rf"(?i)(?:.*[_.-])?{_WORDS}|.*passw(?:or)?d")
_OTHER = re.compile(r"(?i)(?:.*_)?(?:pad|mask|unk|sep|cls|bos|eos|start|end)_token|(?:old)?pwd")  # no secrets
# Each pattern takes linear time: it begins where no other match can, and after that either fails soon or succeeds.
_ASSIGNED = re.compile(
    rf"(?i)(?<![\w.-])([\w.-]{{0,60}}{_WORDS})([\"']?[ \t]{{0,8}}[:=][ \t]{{0,8}})"
    r"(?:[\"']([^\"'\n]+)|([^\s\"'`,;()\[\]{}<>$]+))"
)
_CODE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|[./~].*|\d{1,7}(?:\.\d*)?")  # a name, a path, a small number
_USER = re.compile(r"(?<=://)(?!git@)[^/?#\s\"'<>]+(?=@)")
_QUERY = re.compile(rf"(?i)([?&](?:[\w.-]{{0,40}}[_-])?(?:{_WORDS}|key|sig|signature|credential)=)[^&\s\"'#]{{6,}}")
_BLOCK = re.compile(r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,9}-----)[\s\S]*?(?=-----END|\ndiff --git |\Z)")
_FORM = re.compile(
    r"(?<![\w-])(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[\w-]{20,}|AKIA[A-Z0-9]{12,}|"
    r"xox[abprs]-[\w-]{10,}|glpat-[\w-]{16,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,}|(?i:bearer)[ ]{1,4}[\w.~+/-]{16,})"
)


def is_secret(name: str) -> bool:
    """Whether a value of this name is one to keep secret, such as hub_token or WANDB_API_KEY, but not pad_token."""
    return _NAME.fullmatch(name) is not None and _OTHER.fullmatch(name) is None


def without_secrets(text: str) -> str:
    """Return a text without passwords in addresses, tokens of known form, and the secrets of the environment."""
    for name, value in os.environ.items():
        if len(value) >= 12 and is_secret(name) and value in text and not value.isalpha():
            text = text.replace(value, HIDDEN)
    text = _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(HIDDEN, _BLOCK.sub(rf"\1{HIDDEN}", text)))
    return _FORM.sub(HIDDEN, _ASSIGNED.sub(_hide_assigned, text))


def _hide_assigned(match: re.Match[str]) -> str:
    """Hide a value that is assigned to a secret name; code, such as the name of a variable or a call, stays."""
    name, sign, quoted, bare = match.groups()
    value, is_password = quoted or bare, "pass" in name.lower()
    is_code = quoted is None and match.string[match.end() : match.end() + 1] in tuple("([{<\"'$")
    if quoted is None and _CODE.fullmatch(bare):
        is_plain = is_password and len(bare) >= 8 and bare.isalpha() and bare.islower()
        is_likely = is_plain or re.search(r"\d", bare) or (sign == "=" and name.isupper())  # of .env or a shell
        is_code = is_code or not is_likely or "." in bare or bare[0] in "/~" or is_secret(bare)
    if is_code or HIDDEN in value or len(value) < (6 if is_password else 8) or not is_secret(name):
        return match[0]
    return match[0][: -len(value)] + HIDDEN


def command_without_secrets(words: Sequence[str]) -> list[str]:
    """Return a command line without the values of flags and variables that are secret."""
    shown, is_next = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        is_flag = is_secret(name.lstrip("-").replace("-", "_"))
        shown.append(HIDDEN if is_next else f"{name}={HIDDEN}" if is_flag and equals else without_secrets(word))
        is_next = is_flag and not equals and word.startswith("-")
    return shown
