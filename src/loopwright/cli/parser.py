"""Parse the arguments of verbs; errors have a code and suggest the nearest flag."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from loopwright.api import Task, create_parser, task_of_run
from loopwright.config.conversion import convert_text
from loopwright.errors import ConfigError, InputError, nearest
from loopwright.run_folder import find_run

_HELP = ("-h", "--help")


class VerbParser(argparse.ArgumentParser):
    """The parser of a verb; it raises on bad input instead of exiting."""

    def __init__(self, verb: str, description: str, example: str, **options: Any) -> None:
        self._example = f"lw {verb} {example}".strip()
        epilog = f"example: {self._example}"
        super().__init__(f"lw {verb}", description=description, epilog=epilog, allow_abbrev=False, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        asked, unknown = self.parse_known_args(args, namespace)
        missing = [action for action in self._actions if action.required and getattr(asked, action.dest) is None]
        if missing:
            names = " and ".join(map(_name, missing))
            raise InputError("args.value", f"{self.prog} needs {names}", fix=self._example)
        if unknown:
            word = unknown[0].partition("=")[0]
            near = nearest(word, self._option_string_actions) if word.startswith("-") else None
            what = f"{self.prog} has no {word}" if word.startswith("-") else f"{self.prog} does not take {word!r}"
            fix = f"{near} instead of {word}" if near else f"leave out {shlex.quote(word)}"
            saw = [f"{self.prog} --help lists its flags"]
            raise InputError("args.unknown", what, saw=saw, fix=fix, flag=word)
        return asked

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but leave missing arguments to `parse_args`."""
        required = [action for action in self._actions if action.required]
        for action in required:
            action.required = False
        try:
            return super().parse_known_args(args, namespace)
        finally:
            for action in required:
                action.required = True

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.type not in (int, float):
            return super()._get_value(action, arg_string)
        try:
            return convert_text(arg_string, action.type)
        except ConfigError as error:
            flag = next((each for each in action.option_strings if each.startswith("--")), action.option_strings[0])
            fix = f"{flag} {error.nearest or action.default}"
            raise InputError("args.value", f"{flag} {arg_string}: {error.what}", fix=fix, flag=flag) from error

    def error(self, message: str) -> NoReturn:
        raise InputError("args.value", f"{self.prog}: {message}", fix=self._example)


def _name(action: argparse.Action) -> str:
    name = action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)
    return "a run" if name == "run" else name


def add_run(parser: VerbParser) -> None:
    parser.add_argument("run", help="folder, id, or last")


def add_json(parser: VerbParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, one object per line, and nothing else")


def parse_for_run(
    parser: VerbParser, argv: Sequence[str], flags_of: Callable[[Task], Sequence[str]]
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the parsed arguments of a verb, and by name the flags of the run's task among them."""
    if any(word in _HELP for word in argv):
        name = next((word for word in argv if not word.startswith("-")), None)
    else:
        name = parser.parse_known_args(argv)[0].run
    if name is None:
        parser.description = f"{parser.description} After a run, --help lists the flags of its task too."
        return parser.parse_args(argv), {}
    task = task_of_run(find_run(name))
    flags, defaults = flags_of(task), create_parser(task)
    group = parser.add_argument_group(f"of {task.name}")
    for flag in flags:
        spellings = dict.fromkeys((f"--{flag}", f"--{flag.replace('_', '-')}"))
        is_switch = defaults.get_default(flag) is False
        form: dict[str, Any] = {"action": "store_const", "const": True} if is_switch else {"metavar": "VALUE"}
        form |= {"nargs": "+", "action": "extend"} if defaults.get_default(flag) == [] else {}
        group.add_argument(*spellings, dest=flag, help=defaults.help_of(flag), **form)
    asked = parser.parse_args(argv)
    return asked, {flag: getattr(asked, flag) for flag in flags if getattr(asked, flag) is not None}
