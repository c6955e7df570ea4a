"""Length, speed and time use of a run, evaluations and saves included. No torch."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import astuple, dataclass, field

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
    test_evaluations: float = 0.0  # the rows of the test data over those of an evaluation
    train_evaluations: float = 0.0  # the same for the training data, if each epoch ends with an evaluation on it
    start_seconds: float = 0.0  # from the start of the command to the first update
    save_seconds: float = 0.0
    end_seconds: float = 0.0  # after the last evaluation: the files of the model, pictures, the report

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
        return self.start_seconds + self.seconds_after(0, self.update_seconds, self.evaluation_seconds)

    def seconds_after(self, update: int, update_seconds: float, evaluation_seconds: float) -> float:
        """Return the seconds from an update to the end of the command, by the cost of updates and evaluations."""
        evaluations = self.evaluations_after(update) + self.test_evaluations
        evaluations += self.epochs_after(update) * self.train_evaluations
        saves = self.saves_after(update) * self.save_seconds
        rest = max(self.updates - update, 0) * update_seconds
        return rest + evaluations * evaluation_seconds + saves + self.end_seconds


@dataclass
class TimeSpent:
    """Seconds of a run in this process, by activity."""

    start: float = 0.0
    train: float = 0.0
    wait: float = 0.0
    evaluation: float = 0.0
    save: float = 0.0

    def text(self, total: float) -> str:
        named = dict(zip(("start", "train", "data-wait", "eval", "save"), astuple(self), strict=True))
        named["other"] = total - sum(named.values())
        shares = {name: 100 * seconds / total for name, seconds in named.items() if total > 0}
        return " · ".join(f"{name} {share:.0f} %" for name, share in shares.items() if share >= 0.5)


@dataclass
class Pace:
    """Measures the pace of a run from the seconds of training that its logs report, and its evaluations."""

    length: RunLength
    _trained: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_LOGS_LOOKED_AT))
    _evaluations: list[float] = field(default_factory=list)
    _evaluating_since: float | None = None
    _ended_at: float | None = None

    def log(self, update: int, trained: float) -> None:
        """Record the start or a log: the seconds of training so far, waiting for data included."""
        self._trained.append((update, trained))

    def begin_evaluation(self) -> None:
        self._evaluating_since = time.monotonic()

    def end_evaluation(self) -> float:
        took = 0.0 if self._evaluating_since is None else time.monotonic() - self._evaluating_since
        self._evaluations.append(took)
        self._evaluating_since = None
        return took

    def end(self) -> None:
        """Record the end of the run, before its last save is complete."""
        self._ended_at = time.monotonic()

    def end_saves(self) -> float:
        """Return the time since `end`; called when the last save is complete."""
        return 0.0 if self._ended_at is None else time.monotonic() - self._ended_at

    def seconds_left(self, update: int) -> float | None:
        (first, began), (last, ended) = self._trained[0], self._trained[-1]
        per_update = (ended - began) / (last - first) if last > first else self.length.update_seconds
        if per_update is None:
            return None
        evaluations, since = self._evaluations[-_LOGS_LOOKED_AT:], self._evaluating_since
        known = sum(evaluations) / len(evaluations) if evaluations else self.length.evaluation_seconds or 0.0
        now_evaluating = 0.0 if since is None else max(known - (time.monotonic() - since), 0.0)
        return now_evaluating + self.length.seconds_after(update, per_update, known)
