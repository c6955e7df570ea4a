"""Follow the `fix:` of a printed error literally, as a user does who copies it.

A fix is one of these, or several of them with "   or   " between them, each of which must work:

- flags for the same command, which replace those of the same name: `--text_column review`
- words of the command to replace, or to leave out: `--epochs instead of --epoch`, `leave out --seeds`
- a command: one of `lw` is run instead, any other is run first, and `   then   ` flags may follow it
- an edit in words, which the test carries out
"""

import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SHELL = ("chmod", "gunzip", "mv", "pip", "python", "tr", "unzip", "cp", "iconv")


class Failure(NamedTuple):
    """A printed error."""

    code: str
    fix: str
    text: str

    @property
    def ways(self) -> list[str]:
        """The alternatives; what a measured saving of memory is worth stands in parentheses."""
        return [re.sub(r" \(−[^)]*\)$", "", way).strip() for way in self.fix.split("   or   ")]


def failure_in(err: str) -> Failure:
    """Return the last error that was printed."""
    assert re.search("^error.*^  fix: ", err, re.M | re.S), f"no error with a fix: {err}"
    *_, found = re.finditer(r"^error\[([a-z_.]+)\]: .*?^  fix: (.*?)$", err, re.M | re.S)
    return Failure(found[1], found[2], found[0])


def is_flag(word: str) -> bool:
    return bool(re.match(r"--?[a-zA-Z]", word))


def _plain(word: str) -> str:
    return word.partition("=")[0].replace("-", "_") if is_flag(word) else word


def without(words: Sequence[str], flag: str) -> list[str]:
    """Return a command without a flag and its values, or without a word."""
    kept, skipping = [], False
    for word in words:
        skipping = _plain(word) == _plain(flag) or (skipping and is_flag(flag) and not is_flag(word))
        kept += [] if skipping else [word]
    return kept


def with_flags(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    assert is_flag(flags[0]), flags
    for flag in filter(is_flag, flags):
        words = without(words, flag)
    return [*words, *flags]


def replaced(words: Sequence[str], new: Sequence[str], old: Sequence[str]) -> list[str]:
    """Return a command with other words in a place; a path may have been typed in another form."""
    size = len(old)
    for place in range(len(words) - size + 1):
        here = [word.partition("=")[0] if is_flag(word) else word for word in words[place : place + size]]
        if all(one == other or Path(one).absolute() == Path(other) for one, other in zip(here, old, strict=True)):
            rest = [words[place].partition("=")[2]] if size == 1 and is_flag(old[0]) and "=" in words[place] else []
            return [*words[:place], *new, *rest, *words[place + size :]]
    raise AssertionError(f"{old} is not in {words}")


def run_shell(command: str, install: Callable[[str], None] | None) -> None:
    if command.startswith("pip "):
        assert install is not None, command
        install(command)
        return
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def follow(
    words: Sequence[str],
    way: str,
    edit: Callable[[str], Any] | None = None,
    install: Callable[[str], None] | None = None,
) -> list[str]:
    """Return the command to run after following one way of a fix; `edit` carries out one in words."""
    assert not re.search(r"\b(FILE|FOLDER|RUN|TASK|NUMBER|NAME|N)\b|\.\.\.", way) or edit is not None, way
    first, _, then = way.partition("   then   ")
    if Path(first.split()[0].strip("'")).name.rstrip(".0123456789") in SHELL:
        run_shell(first, install)
        return follow(words, then, edit) if then else list(words)
    if first.startswith("lw "):
        return shlex.split(first)[1:]
    if first.startswith("leave out "):
        return without(words, *shlex.split(first.removeprefix("leave out ")))
    new, instead, old = first.partition(" instead of ")
    if instead and edit is None:
        return replaced(words, shlex.split(new), shlex.split(old))
    if is_flag(first):
        return with_flags(words, shlex.split(first))
    assert edit is not None, f"only a person can follow this: {way}"
    edited = edit(way)
    return edited if isinstance(edited, list) else list(words)
