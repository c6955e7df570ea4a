"""What the tests of bad input share: writing a file, and expecting an error with a code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loopwright.errors import InputError


class Refusal:
    """The error that was raised, once the block has ended."""

    error: InputError

    def __contains__(self, text: str) -> bool:
        return text in str(self.error)


@contextmanager
def assert_refused(code: str) -> Iterator[Refusal]:
    """Expect an InputError with this code, in the form in which it is printed."""
    refusal = Refusal()
    with pytest.raises(InputError) as caught:
        yield refusal
    refusal.error = caught.value
    lines = str(caught.value).split("\n")
    assert caught.value.code == code, str(caught.value)
    assert lines[0] == f"error[{code}]: {caught.value.what}"
    assert lines[-1] == f"  fix: {caught.value.fix}" and caught.value.fix
    assert lines[1:-1] == [f"  {line}" for line in caught.value.saw]


def write(path: Path, content: str | bytes) -> Path:
    """Write a file, text as UTF-8 and with its line breaks as they are."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path
