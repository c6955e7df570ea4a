"""Length, speed and time use of a run, evaluations and saves included. No torch."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_LOGS_LOOKED_AT = 16


@dataclass(frozen=True)
class RunLength:
    """The length of a run; `limit` is its updates, if the last epoch is not whole or only their number was given."""

    updates: int
    epochs: int
    limit: int | None = None
    evaluates: bool = True
    evaluate_every: int | None = None  # updates between evaluations within an epoch; None for epoch ends only
    update_seconds: float | None = None  # of an update in the rehearsal; None without one
    evaluation_seconds: float | None = None  # of an evaluation, estimated by the rehearsal; None without one
    per_epoch: int | None = None  # updates of a full epoch; None if all epochs are full
    save_every: int | None = None  # updates between saves; None if saves do not depend on updates
    saves_epochs: bool = False

    @property
    def updates_per_epoch(self) -> float:
        """Updates of an epoch; the last one may have fewer."""
        return max(self.per_epoch or self.updates / max(self.epochs, 1), 1e-9)

    def epoch_at(self, update: int) -> float:
        return update / self.updates_per_epoch

    def epochs_after(self, update: int) -> int:
        """Return the number of epoch ends still to come; the end of the run counts as one, even mid-epoch."""
        return self.epochs - int(self.epoch_at(update) + 1e-9) if update < self.updates else 0

    def saves_after(self, update: int) -> int:
        """Return the maximum number of saves still to come: one per new best evaluation, and one at the end."""
        due = self.epochs_after(update) if self.saves_epochs else 0
        if self.save_every is not None:
            due = self.updates // self.save_every - update // self.save_every
        return max(due, self.evaluations_after(update) - 1) + 1

    def evaluations_after(self, update: int) -> int:
        """Return the number of evaluations still to come: at epoch ends, between them, and of the best model."""
        left = 1
        if self.evaluates:
            left += self.epochs_after(update)
        if self.evaluates and self.evaluate_every is not None:
            left += self.updates // self.evaluate_every - update // self.evaluate_every
            left -= self._shared_after(update, self.evaluate_every)
        return left

    def _shared_after(self, update: int, every: int) -> int:
        """Return how many evaluations by updates coincide with epoch ends, and so run only once."""
        per_epoch = self.updates_per_epoch
        at_end = int(update < self.updates and self.updates % every == 0)
        if per_epoch < 1 or not float(per_epoch).is_integer():
            return at_end
        both = math.lcm(int(per_epoch), every)
        return self.updates // both - update // both + (at_end if self.updates % per_epoch else 0)

    def expected_seconds(self) -> float | None:
        if self.update_seconds is None or self.evaluation_seconds is None:
            return None
        return self.updates * self.update_seconds + self.evaluations_after(0) * self.evaluation_seconds


@dataclass
class TimeSpent:
    """Seconds of a run in this process, by activity."""

    start: float = 0.0
    train: float = 0.0
    wait: float = 0.0
    evaluation: float = 0.0
    save: float = 0.0

    def text(self, total: float) -> str:
        named = {
            "start": self.start,
            "train": self.train,
            "data-wait": self.wait,
            "eval": self.evaluation,
            "save": self.save,
        }
        named["other"] = total - sum(named.values())
        shares = {name: 100 * seconds / total for name, seconds in named.items() if total > 0}
        return " · ".join(f"{name} {share:.0f} %" for name, share in shares.items() if share >= 0.5)


@dataclass
class Pace:
    """Measures the pace of a run, and updates `spent`."""

    length: RunLength
    spent: TimeSpent = field(default_factory=TimeSpent)
    _trained: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_LOGS_LOOKED_AT))
    _evaluations: list[float] = field(default_factory=list)
    _resumed_at: float = 0.0
    _is_paused: bool = False

    def begin(self, update: int) -> None:
        self._resumed_at = time.monotonic()
        self._trained.append((update, 0.0))

    def log(self, update: int, waiting: float) -> None:
        """Record a log; `waiting` is the share of time since the last log spent waiting for data."""
        before = self.spent.train + self.spent.wait
        self._count()
        passed = self.spent.train + self.spent.wait - before
        waited = min(waiting, 1.0) * passed
        self.spent.wait += waited
        self.spent.train -= waited
        self._trained.append((update, self.spent.train + self.spent.wait))

    @contextmanager
    def saving(self) -> Iterator[None]:
        self._count()
        began = time.monotonic()
        try:
            yield
        finally:
            self._resumed_at = time.monotonic()
            self.spent.save += self._resumed_at - began

    def begin_evaluation(self) -> None:
        self._count()
        self._is_paused = True

    def end_evaluation(self) -> float:
        now = time.monotonic()
        took, self._resumed_at, self._is_paused = now - self._resumed_at, now, False
        self._evaluations.append(took)
        self.spent.evaluation += took
        return took

    def end(self) -> None:
        """Stop counting as training; called at the end of the run, before its last save is complete."""
        self._count()
        self._is_paused = True

    def end_saves(self) -> float:
        """Count the time since `end` as saving, and return it; called when the last save is complete."""
        took = time.monotonic() - self._resumed_at if self._is_paused else 0.0
        self.spent.save += took
        return took

    def seconds_left(self, update: int) -> float | None:
        per_update = self._update_seconds()
        if per_update is None:
            return None
        evaluations = self._evaluations[-_LOGS_LOOKED_AT:]
        known = sum(evaluations) / len(evaluations) if evaluations else self.length.evaluation_seconds or 0.0
        now_evaluating = max(known - (time.monotonic() - self._resumed_at), 0.0) if self._is_paused else 0.0
        rest = max(self.length.updates - update, 0) * per_update
        return rest + now_evaluating + self.length.evaluations_after(update) * known

    def _update_seconds(self) -> float | None:
        (first, began), (last, ended) = self._trained[0], self._trained[-1]
        return (ended - began) / (last - first) if last > first else self.length.update_seconds

    def _count(self) -> None:
        now = time.monotonic()
        if not self._is_paused:
            self.spent.train += now - self._resumed_at
        self._resumed_at = now
