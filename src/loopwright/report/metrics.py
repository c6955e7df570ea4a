"""metrics.jsonl for a report: curves, marks and time spent, read as a stream and incrementally as it grows."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from loopwright.report.series import Mark, Series
from loopwright.run_folder.files import open_regular, parse_line

_CURVES: Final = frozenset(("log", "speed", "training", "evaluation"))
# Position fields of a record; not curves.
_PLACE: Final = frozenset(("event", "update", "epoch", "seconds", "time", "nonfinite"))
# The seconds of the run by activity, in the records of `speed` and `end`.
_ACTIVITIES: Final = {
    "train_seconds": "training",
    "wait_seconds": "waiting for data",
    "evaluation_seconds": "evaluation",
    "save_seconds": "saving",
}
_PROFILING: Final = "writing the profile"
_MOST_NAMED_LINES: Final = 20
_MOST_MARKS: Final = 20_000
_FEW_MARKS: Final = 8
_REMEMBERED_BYTES: Final = 64
_BLOCK_BYTES: Final = 1 << 20
# Marks by event, with the text shown to the reader.
_MARKS: Final = {
    "checkpoint": ("save", "saved"),
    "oom_split": ("split", "out of memory: split into smaller micro-batches"),
    "oom_eval_split": ("evalsplit", "out of memory in the evaluation: batches split into smaller parts"),
    "skipped_update": ("skip", "update skipped: its loss was not finite"),
    "step_mode": ("mode", "step mode"),
}


@dataclass
class Metrics:
    """The contents of metrics.jsonl; `read` is incremental, so a growing file costs only its new lines."""

    path: Path
    series: dict[str, Series] = field(default_factory=lambda: defaultdict(Series))  # in the order of their first log
    marks: list[Mark] = field(default_factory=list)
    # Seconds of the run by activity, as its last records have them.
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys([*_ACTIVITIES.values(), _PROFILING], 0.0))
    starts: list[dict[str, Any]] = field(default_factory=list)
    tier: str | None = None  # the resume guarantee at the end of the run; None if no record has it
    num_records: int = 0
    num_bad: int = 0
    bad_lines: list[int] = field(default_factory=list)  # the numbers of the first unreadable lines
    first_time: float | None = None  # the wall clock at the first record, in seconds since 1970
    seconds: float = 0.0  # of the run, at the last record
    update: int = 0  # of the last record
    _num_lines: int = 0
    _offset: int = 0
    _tail: bytes = b""

    def mean(self, name: str) -> float | None:
        return self.series[name].mean() if name in self.series else None

    def read(self) -> bool:
        """Read the lines appended since the last call, and return whether there were any.

        Invalid lines are skipped and counted. An incomplete last line is still being written.
        """
        try:
            file = os.fdopen(open_regular(self.path), "rb")
        except FileNotFoundError:
            return False
        with file:
            if not self._is_same(file):
                vars(self).update(vars(Metrics(self.path)))
            before = self._num_lines
            file.seek(self._offset)
            while lines := file.readlines(_BLOCK_BYTES):
                if not lines[-1].endswith(b"\n"):
                    lines.pop()
                self._take_lines(lines)
            return self._num_lines > before

    def _is_same(self, file: Any) -> bool:
        """Whether the file still starts with the part read so far; a resume may have truncated it."""
        file.seek(max(self._offset - len(self._tail), 0))
        return bool(file.read(len(self._tail)) == self._tail)

    def _take_lines(self, lines: list[bytes]) -> None:
        """Parse whole lines: all at once, which is faster, or one by one if any is damaged."""
        if not lines:
            return
        self._offset += sum(map(len, lines))
        self._tail = lines[-1][-_REMEMBERED_BYTES:]
        try:
            records = json.loads(b"[" + b",".join(lines) + b"]")
        except (ValueError, RecursionError):
            records = []
        if len(records) != len(lines):
            records = [parse_line(line) for line in lines]
        for record in records:
            self._num_lines += 1
            try:
                self._take(record)
            except (ValueError, TypeError, AttributeError, OverflowError):
                self.num_bad += 1
                if len(self.bad_lines) < _MOST_NAMED_LINES:
                    self.bad_lines.append(self._num_lines)

    def _take(self, record: dict[str, Any]) -> None:
        event, update = record.get("event"), record.get("update", self.update)
        if not isinstance(update, (int, float)) or not isinstance(event, str):
            raise ValueError("a record has an event, and an update that is a number")
        if event in _CURVES:
            for name, value in record.items():
                if type(value) in (float, int) and name not in _PLACE and name not in _ACTIVITIES:
                    self.series[name].add(update, value)
            if "nonfinite" in record:
                values = ", ".join(f"{name} was {value}" for name, value in record["nonfinite"].items())
                self._mark("nan", update, values)
        elif event == "start":
            self.starts.append(record)
            self.tier = record.get("tier")
            if record.get("resumed_from") is not None:
                # The record of the save it resumes from came after that save, and was truncated with the rest.
                if not any(mark.kind == "save" and mark.update == update for mark in self.marks[-_FEW_MARKS:]):
                    self._mark("save", update, "saved")
                self._mark("resume", update, f"resumed from {record['resumed_from']}")
        elif event == "tier":
            self.tier = record.get("tier")
            reason = f" ({record['reason']})" if record.get("reason") else ""
            self._mark("tier", update, f"resume guarantee {self.tier} from here on{reason}")
        elif event in _MARKS:
            kind, text = _MARKS[event]
            more = record.get("mode") or record.get("message") or ""
            self._mark(kind, update, f"{text} {more}".strip())
        self._time(event, update, record)
        self.num_records += 1

    def _mark(self, kind: str, update: float, text: str) -> None:
        marks = self.marks
        if len(marks) < _MOST_MARKS and not (marks and marks[-1] == Mark(kind, update, text)):
            marks.append(Mark(kind, update, text))

    def _time(self, event: str, update: float, record: dict[str, Any]) -> None:
        """Take the clock of a record, and the time spent by activity where it has it."""
        when, seconds = record.get("time"), record.get("seconds")
        if isinstance(when, (int, float)) and self.first_time is None:
            self.first_time = when
        if isinstance(seconds, (int, float)):
            self.seconds, self.update = seconds, int(update)
        if event in ("speed", "end"):
            for name in _ACTIVITIES.keys() & record.keys():
                self.spent[_ACTIVITIES[name]] = float(record[name])
        elif event == "profile":
            self.spent[_PROFILING] += float(record.get("took_seconds", 0.0))
