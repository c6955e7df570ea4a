"""The files a run writes while it trains: its lease, metrics and status."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from loopwright.run_folder.files import remove_leftovers, write_json
from loopwright.run_folder.layout import STOP
from loopwright.run_folder.lease import Lease, LeaseError, Owner
from loopwright.run_folder.metrics_log import MetricsLog
from loopwright.run_folder.status import RunStatus

METRICS: Final = "metrics.jsonl"
_STOP_SECONDS: Final = 0.5  # how often to look for the file that stops a run
# Reserved keys of every record; a metric of such a name is written as `metric_<name>`.
_OWN_NAMES: Final = frozenset(("event", "update", "epoch", "seconds", "time", "nonfinite"))

_logger = logging.getLogger("loopwright")


class RunRecord:
    """The lease, metrics.jsonl and status.json of a run; without a folder, as on ranks but 0, methods are no-ops."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.listener: Callable[[dict[str, Any]], None] | None = None  # called with each record as it is written
        self._lease: Lease | None = None
        self._log: MetricsLog | None = None
        self._status: RunStatus | None = None
        self._unwritten: list[dict[str, Any]] = []
        self._recorded: dict[str, int] = {}
        self._has_begun = False
        self._offset = 0
        self._started = time.monotonic()
        self._ended: float | None = None
        self._seconds_before = 0.0
        self._looked_for_stop = 0.0
        self._is_asked_to_stop = False

    @property
    def seconds(self) -> float:
        """The duration of the run, including resumed parts."""
        end = time.monotonic() if self._ended is None else self._ended
        return self._seconds_before + end - self._started

    def open(self) -> Owner | None:
        """Take the folder before anything in it is touched; return the dead previous owner, if there is one."""
        if self.folder is None:
            return None
        self._lease = Lease(self.folder)
        previous = self._lease.acquire()
        try:
            remove_leftovers(self.folder)
            if not self._lease.is_continued:
                (self.folder / STOP).unlink(missing_ok=True)  # it was for a run that has ended
            self._log = MetricsLog(self.folder / METRICS)
            self._status = RunStatus(self.folder)
        except BaseException:
            self._lease.release()
            raise
        return previous

    def begin(self, state: Mapping[str, Any] | None = None) -> None:
        """Reset the metrics, or truncate them to a checkpoint's `state_dict`; called once, after `open`."""
        self._started = time.monotonic()
        if state is not None:
            self._seconds_before = float(state["seconds"])
            self._recorded = {str(name): int(count) for name, count in state["recorded"].items()}
        if self._log is not None:
            self._log.cut_back(0 if state is None else int(state["offset"]))
        self._has_begun = True

    def write(self, event: str, /, **fields: Any) -> None:
        """Append a record to metrics.jsonl, or keep it after a write error until the next call or checkpoint."""
        if self._log is None:
            return
        times = {"seconds": round(self.seconds, 3), "time": round(time.time(), 3)}
        record = {"event": event, **plain(fields), **times}
        self._unwritten.append(record)
        try:
            self._flush()
        except OSError as error:
            _logger.warning("cannot write %s: %s; retrying with the next record", METRICS, error)
            self.set_status(last_error=error)
        if self.listener is not None:
            self.listener(record)

    def write_metrics(self, event: str, history: Any, /, **fields: Any) -> None:
        """Append the last values of the metrics recorded since the previous call; a no-op if there are none."""
        if self._log is None:
            return
        news: dict[str, Any] = {}
        counts: dict[str, int] = {}
        for name in sorted(history.get_metric_names()):
            values = list(history.get_metric_values(name))
            if len(values) > self._recorded.get(name, 0):
                news[f"metric_{name}" if name in _OWN_NAMES else name] = values[-1]
            counts[name] = len(values)
        self._recorded = counts  # without deleted metrics, which may come back
        if news:
            self.write(event, **fields, **news)

    def set_status(self, **fields: Any) -> None:
        """Change fields of status.json; see `RunStatus.update`."""
        if self._lease is not None and self._status is not None:
            self._lease.last_saved = fields.get("last_checkpoint", self._lease.last_saved)
            if self._lease.loss is None:
                self._status.update(**fields)

    def keep(self, name: str, content: Mapping[str, Any]) -> Path | None:
        """Write a small JSON file into the folder and return its path; None without a folder."""
        if self.folder is None:
            return None
        try:
            write_json(self.folder / name, plain(content))
        except OSError as error:
            _logger.warning("cannot write %s: %s", name, error)
            self.set_status(last_error=error)
            return None
        return self.folder / name

    def beat(self) -> None:
        """Show that the owner is alive, at every update and evaluation step; on a LeaseError the run must end."""
        if self._lease is not None:
            self._lease.heartbeat()

    def is_asked_to_stop(self) -> bool:
        """Whether the file `stop` is in the folder; called at every update, it looks twice a second."""
        if self._lease is not None and self.folder is not None and not self._is_asked_to_stop:
            now = time.monotonic()
            if now - self._looked_for_stop >= _STOP_SECONDS:
                self._looked_for_stop = now
                self._is_asked_to_stop = (self.folder / STOP).exists()
        return self._is_asked_to_stop

    def is_ours(self) -> bool:
        """Whether this process may still commit to the folder; False once closed, LeaseError if the folder moved."""
        return self.folder is None or (self._lease is not None and self._lease.still_ours())

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `begin` needs to resume here, once all records are on disk; OSError on failure."""
        if self._log is not None:
            self._flush()
            self._offset = self._log.sync()
            if self.folder is not None and not self._log.is_in_place() and self.is_ours():
                _logger.warning("%s was deleted or moved: a new file gets the following records", METRICS)
                self._log.close()
                self._log = MetricsLog(self.folder / METRICS)
                self._log.cut_back(self._offset)
                self._offset = self._log.sync()
        return {"offset": self._offset, "recorded": dict(self._recorded), "seconds": self.seconds}

    def close(
        self,
        state: str,
        message: str | None = None,
        error: BaseException | None = None,
        seconds: Mapping[str, float] = MappingProxyType({}),
        **place: int | None,
    ) -> None:
        """Record how the run ended and release the folder. Idempotent.

        A run refused before it began writes nothing: the folder may belong to another run that finished. `seconds` are
        by activity, for metrics.jsonl; `place` is for status.json.
        """
        self._ended = time.monotonic() if self._ended is None else self._ended
        if self._lease is None:
            return
        if self._has_begun and self._lease_is_ours_now():
            self.write("end", state=state, message=message, **seconds)
            failure: dict[str, Any] = {} if error is None else {"last_error": error}
            self.set_status(force=True, state=state, message=message, **failure, **place)
        if self._log is not None:
            self._log.close()
        self._lease.release()
        self._lease = self._log = self._status = None

    def _lease_is_ours_now(self) -> bool:
        try:
            return self.is_ours()
        except LeaseError:
            return False
        except OSError:
            return True  # as far as known, nobody took it over

    def _flush(self) -> None:
        while self._unwritten and self._log is not None:
            self._log.append(self._unwritten[0])
            self._unwritten.pop(0)


def plain(value: Any) -> Any:
    """Return a metric as a JSON value: numbers unchanged, arrays as lists, anything else as text."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if hasattr(value, "tolist"):  # a tensor or an array, of any size
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)
