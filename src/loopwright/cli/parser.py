"""Parse the arguments of verbs that use a run; errors have a code and suggest the nearest flag."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import NoReturn

from loopwright.errors import InputError
from loopwright.run_folder import find_run
from loopwright.runs.settings import create_parser
from loopwright.tasks import get_task
from loopwright.tasks.base import Task

_HELP = ("-h", "--help")
_UNKNOWN = re.compile(r"unrecognized arguments: (.*)")


class VerbParser(argparse.ArgumentParser):
    """The parser of a verb; it raises on bad input instead of exiting.

    Args:
        verb: the word after `loopwright`.
        description: the verb's help, in a sentence.
        example: example arguments.
    """

    def __init__(self, verb: str, description: str, example: str) -> None:
        self._example = f"lw {verb} {example}".strip()
        super().__init__(f"lw {verb}", description=description, epilog=f"example: {self._example}", allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise the parser's message as an InputError."""
        unknown = _UNKNOWN.match(message)
        if unknown is None:
            missing = message.removeprefix("the following arguments are required: ")
            told = ", ".join("a run" if name == "run" else name for name in missing.split(", "))
            what = f"{self.prog} needs {told}" if missing != message else f"{self.prog}: {message}"
            raise InputError("args.value", what, fix=f"{self._example}   ({self.prog} --help says more)")
        flag = unknown[1].split()[0].partition("=")[0]
        near = get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.5)
        what = f"{self.prog} has no {flag}" if flag.startswith("-") else f"{self.prog} does not take {flag!r}"
        fix = f"did you mean {near[0]}?" if near else f"{self.prog} --help says what it takes"
        raise InputError("args.unknown", what, fix=fix)


def add_json(parser: VerbParser) -> None:
    """Add `--json` to a verb."""
    parser.add_argument("--json", action="store_true", help="print JSON, one object per line, and nothing else")


def parse_for_run(
    parser: VerbParser, words: Sequence[str], flags_of: Callable[[Task], Sequence[str]]
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the parsed arguments of a verb, and the flags of the run's task among them, by name.

    Args:
        parser: the verb's parser, with a positional `run`.
        words: the words after the verb.
        flags_of: returns the task flags that the verb accepts.

    Raises:
        InputError: there is no such run, or a word cannot be parsed.
    """
    is_help = any(word in _HELP for word in words)
    if is_help:
        name = next((word for word in words if not word.startswith("-")), None)
    else:
        name = parser.parse_known_args(words)[0].run
    if name is None:
        return parser.parse_args(words), {}
    task = get_task(str(find_run(name).metadata["task"]))
    flags = flags_of(task)
    about = create_parser(task).help_of
    group = parser.add_argument_group(f"of {task.name}")
    for flag in flags:
        spellings = dict.fromkeys((f"--{flag}", f"--{flag.replace('_', '-')}"))
        group.add_argument(*spellings, dest=flag, metavar="VALUE", help=about(flag))
    asked = parser.parse_args(words)
    return asked, {flag: getattr(asked, flag) for flag in flags if getattr(asked, flag) is not None}
