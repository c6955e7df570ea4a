"""metrics.jsonl as a report needs it: curves, marks and where the time went, read as a stream, and on as it grows."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from loopwright.report.series import Series

_CURVES: Final = frozenset(("log", "speed", "training", "evaluation"))
# Of a record, what says where it stands; no curve.
_PLACE: Final = frozenset(("event", "update", "epoch", "seconds", "time", "nonfinite"))
_MOST_NAMED_LINES: Final = 20
_MOST_MARKS: Final = 20_000
_FEW_MARKS: Final = 8
_REMEMBERED_BYTES: Final = 64
_BLOCK_BYTES: Final = 1 << 20
# Marks by the event that makes them, and what a person reads.
_MARKS: Final = {
    "checkpoint": ("save", "saved"),
    "oom_split": ("split", "out of memory: split into smaller micro-batches"),
    "oom_eval_split": ("evalsplit", "out of memory in the evaluation: batches split into smaller parts"),
    "skipped_update": ("skip", "update skipped: its loss was not finite"),
    "step_mode": ("mode", "step mode"),
}


@dataclass(frozen=True)
class Mark:
    """Something that happened at an update: a save, a resume, a split, a value that is no number.

    Attributes:
        kind: save, resume, split, evalsplit, tier, skip, mode or nan.
        update: when.
        text: what, for a person.
    """

    kind: str
    update: float
    text: str


@dataclass
class TimeSpent:
    """Seconds of a run by what they went into, as far as the times of the records tell."""

    training: float = 0.0
    waiting: float = 0.0
    evaluation: float = 0.0
    saving: float = 0.0
    profiling: float = 0.0


@dataclass
class _Clock:
    """Where the last record stood, and how long an update took of late.

    Attributes:
        seconds: of the last record.
        update: of the last record.
        interval: seconds up to the last log from the record before it.
        per_update: seconds of an update, from the last log that tells; None before it.
        unsettled: (event, seconds, updates) of evaluations and saves before that log: a part of them was training.
    """

    seconds: float = 0.0
    update: float = 0.0
    interval: float = 0.0
    per_update: float | None = None
    unsettled: list[tuple[str, float, float]] = field(default_factory=list)


@dataclass
class _Found:
    """All that was read of a file; replaced as a whole when the file turns out to be another one."""

    series: dict[str, Series] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    spent: TimeSpent = field(default_factory=TimeSpent)
    clock: _Clock = field(default_factory=_Clock)
    starts: list[dict[str, Any]] = field(default_factory=list)
    tier: str | None = None
    num_records: int = 0
    num_lines: int = 0
    num_bad: int = 0
    bad_lines: list[int] = field(default_factory=list)
    last_time: float | None = None
    first_time: float | None = None
    offset: int = 0
    tail: bytes = b""


class Metrics:
    """What metrics.jsonl holds; `read` goes on where it was, so a growing file costs only what is new.

    Args:
        path: the file; it may be missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = _Found()

    @property
    def series(self) -> dict[str, Series]:
        """The curves by the name of their metric, in the order they were first logged."""
        return self._found.series

    @property
    def marks(self) -> list[Mark]:
        """What happened on the way, in order."""
        return self._found.marks

    @property
    def spent(self) -> TimeSpent:
        """Where the time went."""
        return self._found.spent

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The records of the start and of every resume."""
        return self._found.starts

    @property
    def tier(self) -> str | None:
        """The resume guarantee that holds at the end; None if no record says it."""
        return self._found.tier

    @property
    def num_records(self) -> int:
        """How many records were read."""
        return self._found.num_records

    @property
    def num_bad(self) -> int:
        """How many lines could not be read."""
        return self._found.num_bad

    @property
    def bad_lines(self) -> list[int]:
        """The numbers of the first lines that could not be read."""
        return self._found.bad_lines

    @property
    def seconds(self) -> float:
        """How long the run had lasted at the last record."""
        return self._found.clock.seconds

    @property
    def update(self) -> int:
        """The last update of a record."""
        return int(self._found.clock.update)

    @property
    def times(self) -> tuple[float | None, float | None]:
        """The clock at the first and at the last record, in seconds since 1970."""
        return self._found.first_time, self._found.last_time

    def read(self) -> bool:
        """Read what was appended since the last call, and return whether that was anything.

        A line that is no record is passed over and counted. A last line without its end is still being written.

        Raises:
            OSError: the file is there and cannot be read.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return False
        with file:
            if not self._is_same(file):
                self._found = _Found()
            found = self._found
            before = found.num_lines
            file.seek(found.offset)
            while lines := file.readlines(_BLOCK_BYTES):
                if not lines[-1].endswith(b"\n"):
                    lines.pop()
                self._take_lines(lines)
            return found.num_lines > before

    def _is_same(self, file: Any) -> bool:
        """Whether what was read so far is still the start of the file; a resume may have cut it back."""
        found = self._found
        file.seek(max(found.offset - len(found.tail), 0))
        return bool(file.read(len(found.tail)) == found.tail)

    def _take_lines(self, lines: list[bytes]) -> None:
        """Take in whole lines: all at once, which is faster, or each by itself if one of them is damaged."""
        if not lines:
            return
        found = self._found
        found.offset += sum(map(len, lines))
        found.tail = lines[-1][-_REMEMBERED_BYTES:]
        try:
            records = json.loads(b"[" + b",".join(lines) + b"]")
        except (ValueError, RecursionError):
            records = []
        if len(records) != len(lines):
            records = [_parsed(line) for line in lines]
        for record in records:
            found.num_lines += 1
            try:
                self._take(record)
            except (ValueError, TypeError, AttributeError):
                found.num_bad += 1
                if len(found.bad_lines) < _MOST_NAMED_LINES:
                    found.bad_lines.append(found.num_lines)

    def _take(self, record: dict[str, Any]) -> None:
        found = self._found
        event, update = record.get("event"), record.get("update", found.clock.update)
        if not isinstance(update, (int, float)) or not isinstance(event, str):
            raise ValueError("a record has an event, and an update that is a number")
        if event in _CURVES:
            series = found.series
            for name, value in record.items():
                kind = type(value)
                if (kind is float or kind is int) and name not in _PLACE:
                    try:
                        series[name].add(update, value)
                    except KeyError:
                        series[name] = Series()
                        series[name].add(update, value)
            if "nonfinite" in record:
                words = ", ".join(f"{name} was {value}" for name, value in record["nonfinite"].items())
                self._mark("nan", update, words)
        elif event == "start":
            found.starts.append(record)
            found.tier = record.get("tier")
            if record.get("resumed_from") is not None:
                # The record of the save that it goes on from came after that save, and was cut off with the rest.
                if not any(mark.kind == "save" and mark.update == update for mark in found.marks[-_FEW_MARKS:]):
                    self._mark("save", update, "saved")
                self._mark("resume", update, f"resumed from {record['resumed_from']}")
        elif event == "tier":
            found.tier = record.get("tier")
            reason = f" ({record['reason']})" if record.get("reason") else ""
            self._mark("tier", update, f"resume guarantee {found.tier} from here on{reason}")
        elif event in _MARKS:
            kind_of_mark, text = _MARKS[event]
            more = record.get("mode") or record.get("message") or ""
            self._mark(kind_of_mark, update, f"{text} {more}".strip())
        self._time(event, update, record)
        found.num_records += 1

    def _mark(self, kind: str, update: float, text: str) -> None:
        marks = self._found.marks
        if len(marks) < _MOST_MARKS and not (marks and marks[-1] == Mark(kind, update, text)):
            marks.append(Mark(kind, update, text))

    def _time(self, event: str, update: float, record: dict[str, Any]) -> None:
        """Add the time since the last record to what it went into."""
        found = self._found
        clock, spent = found.clock, found.spent
        when, seconds = record.get("time"), record.get("seconds")
        if isinstance(when, (int, float)):
            found.first_time = when if found.first_time is None else found.first_time
            found.last_time = when
        if not isinstance(seconds, (int, float)):
            return
        passed = max(seconds - clock.seconds, 0.0)
        num_updates = update - clock.update
        if event == "speed":
            waited = min(float(record.get("data_wait", 0.0)), 1.0) * clock.interval
            spent.waiting += waited
            spent.training -= waited
        elif event in ("evaluation", "checkpoint"):
            if num_updates > 0 and clock.per_update is None:
                spent.training += passed
                clock.unsettled.append((event, passed, num_updates))
            else:
                self._share(event, passed, num_updates)
        elif event in ("log", "training"):
            spent.training += passed
            clock.interval = passed
            if num_updates > 0:
                clock.per_update = passed / num_updates
                for earlier, seconds_of_it, updates_of_it in clock.unsettled:
                    spent.training -= seconds_of_it
                    self._share(earlier, seconds_of_it, updates_of_it)
                clock.unsettled.clear()
        elif event == "profile":
            written = min(float(record.get("took_seconds", 0.0)), passed)
            spent.profiling += written
            spent.training += passed - written
        if event == "start":
            clock.interval = 0.0
        clock.seconds = seconds
        clock.update = update

    def _share(self, event: str, passed: float, num_updates: float) -> None:
        """Add the time of an evaluation or a save; updates since the last record, which no log told of, are no part."""
        clock, spent = self._found.clock, self._found.spent
        trained = min(passed, num_updates * (clock.per_update or 0.0)) if num_updates > 0 else 0.0
        spent.training += trained
        if event == "evaluation":
            spent.evaluation += passed - trained
        else:
            spent.saving += passed - trained


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
