"""The events of `--json`: one JSON object per line, for scripts. No torch.

The records of a run are the ones in its metrics.jsonl, under the same names; a few have extra fields (see
`EventLines.add`). Stages before and after the run have their own events.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any, TextIO

from loopwright.run_folder.metrics_log import to_line
from loopwright.run_folder.record import plain

_END = "end"


class EventLines:
    """Writes events to a stream as they happen, one per line; without a stream, as on ranks other than 0, nothing."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._added: dict[str, dict[str, Any]] = {}
        self.has_begun = False

    def emit(self, event: str, /, **fields: Any) -> None:
        self._write({"event": event, **fields, "time": round(time.time(), 3)})

    def add(self, event: str, /, **fields: Any) -> None:
        self._added.setdefault(event, {}).update(fields)

    def record(self, record: Mapping[str, Any]) -> None:
        """Write a record of metrics.jsonl with the attached fields; the outcome of the training is kept for `end`."""
        event = record["event"]
        self.has_begun = True
        if event == _END:
            self.add(_END, **{name: value for name, value in record.items() if name not in ("event", "time")})
        else:
            self._write({**record, **self._added.pop(event, {})})

    def end(self, **fields: Any) -> None:
        """Write the last line of a run: the outcome of the training, the attached fields, and these."""
        self.emit(_END, **{**self._added.pop(_END, {}), **fields})
        self.has_begun = False

    def lines(self, *objects: Mapping[str, Any]) -> None:
        """Write plain objects, not events: the answers of read-only verbs."""
        for each in objects:
            self._write(each)

    def _write(self, fields: Mapping[str, Any]) -> None:
        if self._stream is None:
            return
        line = to_line({name: plain(value) for name, value in fields.items()}).decode("ascii")
        try:
            self._stream.write(line)
            self._stream.flush()
        except OSError as error:
            stream, self._stream = self._stream, None
            drop_output(stream)
            if not isinstance(error, BrokenPipeError):  # the run continues, and its folder has everything
                raise


def drop_output(stream: TextIO) -> None:
    """Send what is written to a stream nowhere: after an error the rest of its buffer needs a target at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # not a system stream
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
