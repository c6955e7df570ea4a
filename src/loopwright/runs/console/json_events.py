"""What `--json` prints: one JSON object per line, for scripts. No torch.

The records of a run are those of its metrics.jsonl, under the same names; a few have fields beside them that the file
need not repeat (see `EventLines.add`). What comes before a run and after it has events of its own.
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
    """Writes events to a stream as they happen, each as one line.

    Args:
        stream: standard output; None writes nothing, on processes beside the first.

    Attributes:
        has_begun: a run has begun to train.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._added: dict[str, dict[str, Any]] = {}
        self.has_begun = False

    def tell(self, event: str, /, **fields: Any) -> None:
        """Write an event, with the time.

        Raises:
            OSError: the stream cannot be written, of a full disk say; nothing more is. A reader may go away.
        """
        self._write({"event": event, **fields, "time": round(time.time(), 3)})

    def add(self, event: str, /, **fields: Any) -> None:
        """Keep fields for the next event of this name; called before it is due, by whoever knows them."""
        self._added.setdefault(event, {}).update(fields)

    def hear(self, record: Mapping[str, Any]) -> None:
        """Write a record of metrics.jsonl with the fields that were added; called with each as it is written.

        How the training ended is kept for the last line, which `end` writes when the model is written too.
        """
        event = record["event"]
        self.has_begun = True
        if event == _END:
            self.add(_END, **{name: value for name, value in record.items() if name not in ("event", "time")})
        else:
            self._write({**record, **self._added.pop(event, {})})

    def end(self, **fields: Any) -> None:
        """Write the last line of a run: how its training ended, the fields that were added, and these."""
        self.tell(_END, **{**self._added.pop(_END, {}), **fields})
        self.has_begun = False

    def lines(self, *objects: Mapping[str, Any]) -> None:
        """Write objects that are no events: the answers of verbs that look."""
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
            with contextlib.suppress(OSError, ValueError, AttributeError):  # no stream of the system's
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
            if not isinstance(error, BrokenPipeError):  # then the run goes on, and its folder has everything
                raise
