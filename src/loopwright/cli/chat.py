"""The verb chat: talk with the best model of a run in a terminal; its answers are streamed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from loopwright import api
from loopwright.cli.exit_codes import DONE
from loopwright.cli.parser import VerbParser, add_run, parse_for_run
from loopwright.errors import InputError
from loopwright.run_folder import find_run

_RESET, _QUIT = "/reset", "/quit"


def chat(argv: list[str]) -> int:
    description = f"Talk with a run of chat. {_RESET} starts again; {_QUIT} or Ctrl-D ends. stdin may be a pipe."
    parser = VerbParser("chat", description, "last")
    add_run(parser)
    parser.add_argument("--system", help="a system message to begin with")
    asked, changes = parse_for_run(parser, argv, api.prediction_flags)
    dialogue = api.open_dialogue(find_run(asked.run), asked.system, changes)
    for line in _lines(f"{_RESET} starts again; {_QUIT} or Ctrl-D ends."):
        if line == _QUIT:
            break
        if line == _RESET:
            dialogue.reset()
        elif line:
            try:
                dialogue.answer(line, _write)
            except InputError as error:
                sys.stderr.write(f"{error.what}: {_RESET} starts again\n")
            _write("\n")
    return DONE


def _lines(hint: str) -> Iterator[str]:
    """Yield the lines that are typed, after a prompt in a terminal, until the input ends."""
    is_typed = sys.stdin.isatty()
    if is_typed:
        sys.stderr.write(f"{hint}\n")
    while True:
        try:
            yield (input("> ") if is_typed else input()).strip()
        except EOFError:
            return


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
