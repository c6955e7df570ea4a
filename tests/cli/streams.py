"""What scripts read of a command line, and a standard output that interrupts what writes to it."""

import io
import json
import os

from loopwright.cli import main


def run(capsys, *argv):
    """Run a command line; return its exit code, and what it printed to both streams."""
    code = main(list(map(str, argv)))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def parsed(text):
    """Return the objects of a text that has one on each line, as a strict parser reads them."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


class SignalsOn(io.StringIO):
    """A standard output that sends this process a signal once a text is written to it, after some other times."""

    def __init__(self, text, number, skip=0):
        super().__init__()
        self._text, self._number, self._left = text, number, skip

    def write(self, text):
        if self._text in text:
            if self._left == 0:
                os.kill(os.getpid(), self._number)
            self._left -= 1
        return super().write(text)
