"""How many updates fit into a time, for `--time 2h`: lengths of time in words, and the plan as a function. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from loopwright.durations import seconds_of
from loopwright.errors import InputError
from loopwright.runs.clock import Course


def flag_text(seconds: float) -> str:
    """Return a time as `--time` takes it, rounded up: to seconds, to minutes from two minutes on."""
    whole = math.ceil(seconds) if seconds <= 120 else 60 * math.ceil(seconds / 60)
    parts = {"h": whole // 3600, "m": whole % 3600 // 60, "s": whole % 60} if whole > 120 else {"s": whole}
    return "".join(f"{value}{unit}" for unit, value in parts.items() if value)


def told_seconds(seconds: float) -> str:
    """Return a time in words: 0.48 s, 12 s, 6 min, 2 h 5 min."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{minutes} min" if not hours else f"{hours} h {minutes} min" if minutes else f"{hours} h"


@dataclass(frozen=True)
class Costs:
    """What the parts of a run take, in seconds, as they were measured before its first update.

    Attributes:
        start: so much has passed since the command began.
        warm_up: of the first updates beyond what others take: workers that start, graphs that are recorded.
        update: of an update.
        evaluation: of an evaluation.
        training_evaluation: of an evaluation on the training data, one for each epoch; 0 where there is none.
        save: of a save.
        end: of what comes after the last evaluation: the test data, the model folder, the report.
    """

    start: float
    warm_up: float
    update: float
    evaluation: float
    training_evaluation: float
    save: float
    end: float


@dataclass(frozen=True)
class Estimate:
    """What a run of some length takes, in seconds: its updates, its evaluations, its saves, and all else."""

    updates: float
    evaluations: float
    saves: float
    others: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.updates + self.evaluations + self.saves + self.others


def estimate(costs: Costs, course: Course, position: int = 0) -> Estimate:
    """Return what a run takes.

    Args:
        costs: of its parts.
        course: how long it is, and how often it evaluates and saves.
        position: so many updates are done already.
    """
    return Estimate(
        updates=(course.updates - position) * costs.update,
        evaluations=course.evaluations_after(position) * costs.evaluation
        + course.epochs_after(position) * costs.training_evaluation,
        saves=course.saves_after(position) * costs.save,
        others=costs.start + costs.warm_up + costs.end,
    )


def planned_updates(seconds: float, costs: Costs, course_of: Callable[[int], Course], position: int = 0) -> int:
    """Return how many updates a run has in all, so that it takes no longer than it may, and with one more would.

    Args:
        seconds: what it may take.
        costs: of its parts.
        course_of: returns the course of a run of so many updates.
        position: so many updates are done already.

    Returns:
        The number, `position` included; `position` itself where not even one more fits.
    """
    fits, too_many = position, position + 2 + int(seconds / costs.update)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if estimate(costs, course_of(middle), position).total <= seconds:
            fits = middle
        else:
            too_many = middle
    return fits


def check_fits(given: str, costs: Costs, course: Course, position: int) -> None:
    """Refuse a time in which not even one update can be made; called with the course of one.

    Raises:
        InputError: it says what the parts take, and how much time is enough.
    """
    needed = estimate(costs, course, position)
    if needed.total <= seconds_of(given):
        return
    evaluations = course.evaluations_after(position)
    raise InputError(
        "args.value",
        f"--time {given} is too short: with a single update the run takes about {told_seconds(needed.total)}",
        saw=[
            f"{told_seconds(costs.start)} have passed before the first update; it takes {told_seconds(costs.update)}",
            f"{evaluations} evaluation{'s' if evaluations > 1 else ''} take {told_seconds(needed.evaluations)}, "
            f"saves {told_seconds(needed.saves)}",
        ],
        fix=f"--time {flag_text(2 * needed.total)} or more   or   fewer rows to evaluate: --max_eval_samples N",
    )


def told_plan(given: str, costs: Costs, course: Course, position: int) -> str:
    """Return the plan on one line, as the start block has it."""
    found = estimate(costs, course, position)
    steps = f"{course.updates:,} step{'s' if course.updates > 1 else ''}"
    if position:
        steps = f"{course.updates - position:,} more of {steps}"
    return (
        f"{given}: {steps} ({course.epoch_at(course.updates):,.1f} epochs) at {told_seconds(costs.update)}, "
        f"evaluations {told_seconds(found.evaluations)}, saves {told_seconds(found.saves)}, "
        f"start and end {told_seconds(found.others)}"
    )
