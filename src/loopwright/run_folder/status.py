"""status.json: how a run is doing, for outside observers.

    {"state": "running", "update": 1200, "epoch": 3, "epochs": 2, "message": null,
     "last_checkpoint": "checkpoints/step-0000001200", "last_error": null, "pid": 4711, "host": "box",
     "updated_at": "2025-11-15T09:44:00.000+00:00"}

It may be a second old. A killed run stays in state `running`, but its lease is free.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from loopwright.errors import ConfigError
from loopwright.failpoints import failpoint
from loopwright.run_folder.files import read_json, write_json

STATUS: Final = "status.json"
STATES: Final = ("running", "done", "stopped", "failed", "preempted")
_FIELDS: Final = ("state", "update", "epoch", "epochs", "message", "last_checkpoint", "last_error")
# Changes that observers wait for are written at once, regardless of the interval.
_URGENT: Final = ("state", "last_error")

_logger = logging.getLogger("loopwright")


class RunStatus:
    """The status of a run; created at its start, by the owner of its folder. Thread-safe.

    Nothing is written before the first `update`. A write error does not stop the run: it is kept in `problem` until a
    write succeeds, and logged once. `every_seconds` is the interval of updates that change neither `state` nor
    `last_error`.
    """

    def __init__(self, folder: str | Path, *, every_seconds: float = 1.0) -> None:
        self.problem: OSError | None = None
        self._path = Path(folder) / STATUS
        self._every_seconds = every_seconds
        self._fields: dict[str, Any] = dict.fromkeys(_FIELDS)
        self._fields["state"] = "running"
        self._written_at = -math.inf
        self._lock = threading.Lock()

    def update(self, *, force: bool = False, **fields: Any) -> bool:
        """Change these fields, keep the others, and write the file if due; called at every log, save and error.

        Fields: `state` (one of `STATES`), `update`, `epoch` (in progress), `epochs` (finished), `message`,
        `last_checkpoint`, `last_error`; paths and exceptions become text. Return whether they were written; if not, a
        later update will write them.
        """
        if unknown := fields.keys() - set(_FIELDS):
            raise ConfigError(f"status.json has no field {sorted(unknown)[0]!r}; it has {', '.join(_FIELDS)}")
        if fields.get("state", "running") not in STATES:
            raise ConfigError(f"a run's state is one of {', '.join(STATES)}; got {fields['state']!r}")
        with self._lock:
            changes = {name: _to_plain(value) for name, value in fields.items()}
            is_urgent = force or any(name in changes and changes[name] != self._fields[name] for name in _URGENT)
            self._fields.update(changes)
            if not is_urgent and time.monotonic() < self._written_at + self._every_seconds:
                return False
            return self._write()

    def _write(self) -> bool:
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        content = {**self._fields, "pid": os.getpid(), "host": platform.node(), "updated_at": now}
        # Measured from the end of the write, also after a failure: a slow or full disk is not retried all the time.
        try:
            failpoint("pre_status")
            write_json(self._path, content)
        except OSError as error:
            if self.problem is None:
                _logger.warning("cannot write %s: %s; training continues", self._path, error)
            self.problem = error
            return False
        finally:
            self._written_at = time.monotonic()
        self.problem = None
        return True


def read(folder: str | Path) -> dict[str, Any] | None:
    """Return the content of a run's status.json, None without one; raise a DamagedFileError for invalid content."""
    return read_json(Path(folder) / STATUS, {}) or None


def _to_plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else str(value)
