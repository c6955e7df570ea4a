"""The verb chat: talk with the best model of a run in a terminal; its answers are streamed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from loopwright import api
from loopwright.cli.exit_codes import DONE
from loopwright.cli.parser import VerbParser, add_run, parse_for_run
from loopwright.errors import InputError
from loopwright.run_folder import find_run

_COMMANDS = "/reset starts again, /help lists the commands, /quit or Ctrl-D ends; Ctrl-C stops an answer"
_COMMAND = re.compile(r"/\w+", re.ASCII)


def chat(argv: list[str]) -> int:
    description = f"Talk with a run of chat or preference: {_COMMANDS}. stdin may be a pipe, with a turn on each line."
    parser = VerbParser("chat", description, "last")
    add_run(parser)
    parser.add_argument("--system", help="a system message to begin with")
    asked, changes = parse_for_run(parser, argv, api.prediction_flags)
    dialogue = api.open_dialogue(find_run(asked.run), asked.system, changes)
    for line in _lines():
        command = line.lower() if _COMMAND.fullmatch(line) else ""
        if command in ("/quit", "/exit"):
            break
        if command == "/reset":
            dialogue.reset()
        elif command:
            _hint(_COMMANDS if command == "/help" else f"there is no {line}: {_COMMANDS}")
        elif line:
            _answer(dialogue, line)
    return DONE


def _answer(dialogue: Any, line: str) -> None:
    try:
        dialogue.answer(line, _write)
    except KeyboardInterrupt:
        _hint("\nstopped: this turn is left out of the conversation")
    except InputError as error:
        _hint(f"{': '.join([error.what, *error.saw[:1]])}: this turn is left out, and /reset starts again")
    _write("\n")


def _lines() -> Iterator[str]:
    """Yield the lines that are typed, after a prompt in a terminal, until the input ends."""
    if sys.stdin is None:  # closed by the caller
        return
    is_typed = sys.stdin.isatty()
    if is_typed:
        _hint(_COMMANDS)
    for stream, encoding in ((sys.stdin, None if is_typed else "utf-8"), (sys.stdout, None), (sys.stderr, None)):
        if hasattr(stream, "reconfigure"):  # no byte on stdin, and no character of an answer, is an error
            stream.reconfigure(encoding=encoding, errors="replace")
    while True:
        try:
            yield input("> " if is_typed else "").strip("\ufeff \t\r\n")
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_typed:
                raise
            _hint(f"\n{_COMMANDS}")


def _hint(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
