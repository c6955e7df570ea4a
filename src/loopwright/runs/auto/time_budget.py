"""The number of updates that fit into `--time 2h`: durations as text, and the plan as a pure function. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from loopwright.config.durations import seconds_of
from loopwright.errors import InputError
from loopwright.runs.clock import RunLength


def flag_text(seconds: float) -> str:
    """Return a time as `--time` takes it, rounded up to seconds, or to minutes from two minutes on."""
    whole = math.ceil(seconds) if seconds <= 120 else 60 * math.ceil(seconds / 60)
    parts = {"h": whole // 3600, "m": whole % 3600 // 60, "s": whole % 60} if whole > 120 else {"s": whole}
    return "".join(f"{value}{unit}" for unit, value in parts.items() if value)


def seconds_text(seconds: float) -> str:
    """Return a time as text: 0.48 s, 12 s, 6 min, 2 h 5 min."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{minutes} min" if not hours else f"{hours} h {minutes} min" if minutes else f"{hours} h"


@dataclass(frozen=True)
class Costs:
    """The cost of each part of a run in seconds, measured before its first update."""

    start: float  # time since the command began
    warm_up: float  # extra time of the first updates: worker start-up, graph capture
    update: float
    evaluation: float
    training_evaluation: float  # one evaluation on the training data, once per epoch; 0 if there is none
    save: float
    end: float  # everything after the last evaluation: test data, model folder, report


@dataclass(frozen=True)
class Estimate:
    """The duration of a run in seconds: updates, evaluations, saves, and everything else."""

    updates: float
    evaluations: float
    saves: float
    others: float

    @property
    def total(self) -> float:
        return self.updates + self.evaluations + self.saves + self.others


def estimate(costs: Costs, length: RunLength, position: int = 0) -> Estimate:
    return Estimate(
        updates=(length.updates - position) * costs.update,
        evaluations=length.evaluations_after(position) * costs.evaluation
        + length.epochs_after(position) * costs.training_evaluation,
        saves=length.saves_after(position) * costs.save,
        others=costs.start + costs.warm_up + costs.end,
    )


def planned_updates(seconds: float, costs: Costs, length_of: Callable[[int], RunLength], position: int = 0) -> int:
    """Return the largest total of updates that fits into the time; just `position` if not even one more fits."""
    fits, too_many = position, position + 2 + int(seconds / costs.update)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if estimate(costs, length_of(middle), position).total <= seconds:
            fits = middle
        else:
            too_many = middle
    return fits


def check_fits(given: str, costs: Costs, length: RunLength, position: int) -> None:
    """Refuse a time that is too short for a single update; called with the length of one."""
    needed = estimate(costs, length, position)
    if needed.total <= seconds_of(given):
        return
    evaluations = length.evaluations_after(position)
    raise InputError(
        "args.value",
        f"--time {given} is too short: with a single update the run takes about {seconds_text(needed.total)}",
        saw=[
            f"{seconds_text(costs.start)} have passed before the first update; it takes {seconds_text(costs.update)}",
            f"{evaluations} evaluation{'s' if evaluations > 1 else ''} take {seconds_text(needed.evaluations)}, "
            f"saves {seconds_text(needed.saves)}",
        ],
        fix=f"--time {flag_text(2 * needed.total)}",
    )


def plan_text(given: str, costs: Costs, length: RunLength, position: int) -> str:
    found = estimate(costs, length, position)
    steps = f"{length.updates:,} step{'s' if length.updates > 1 else ''}"
    if position:
        steps = f"{length.updates - position:,} more of {steps}"
    return (
        f"{given}: {steps} ({length.epoch_at(length.updates):,.1f} epochs) at {seconds_text(costs.update)}, "
        f"evaluations {seconds_text(found.evaluations)}, saves {seconds_text(found.saves)}, "
        f"start and end {seconds_text(found.others)}"
    )
