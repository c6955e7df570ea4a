"""Colours: which streams get them."""

import io

import pytest

from loopwright.terminal import is_coloured, is_terminal, paint


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


CASES = {
    "terminal": (Terminal, {}, True),
    "pipe": (io.StringIO, {}, False),
    "dumb": (Terminal, {"TERM": "dumb"}, False),
    "no_color": (Terminal, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    "empty_no_color": (Terminal, {"NO_COLOR": ""}, True),
    "forced_pipe": (io.StringIO, {"FORCE_COLOR": "1"}, True),
    "forced_off": (Terminal, {"FORCE_COLOR": "0"}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_colours_follow_the_stream_and_the_environment(case, monkeypatch):
    stream_class, environment, expected = CASES[case]
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = stream_class()
    assert is_coloured(stream) is expected
    assert paint("best", "green", stream) == ("\x1b[32mbest\x1b[0m" if expected else "best")


def test_a_closed_stream_and_no_stream_have_no_colours(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    closed = io.StringIO()
    closed.close()
    assert not is_terminal(closed) and not is_coloured(None)
    with pytest.raises(KeyError):
        paint("text", "no colour", Terminal())
