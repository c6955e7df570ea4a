"""Find the learning rate of a task: `--lr auto`, and the output of `lw find-lr`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev

from loopwright.lr_finder import create_curve
from loopwright.results import LearningRateCurve
from loopwright.run_folder import write_json
from loopwright.runs.job import RunJob

RATES_FILE = "lr_find.json"
_FAR = 4.0  # the ratio of two rates between which a third one is tried
_ROWS, _COLUMNS = 10, 60
_HEADROOM = 1.1  # height of the plot over the losses before the minimum; higher losses are clipped


@dataclass(frozen=True)
class Search:
    """The range of a learning-rate search: the rates of the first and the last update, and the updates."""

    start: float = 1e-7
    end: float = 10.0
    num_updates: int = 100


def find_rate(run: RunJob, search: Search, doing: str = "finding a learning rate") -> LearningRateCurve:
    job, training = run.job, run.training
    trainer = run.create_trainer(is_trial=True)
    # The first group may learn slower than the rest, such as a backbone.
    rate = float(trainer.optimizer.param_groups[0]["lr"])
    slower = rate / training.learning_rate if training.learning_rate > 0 else 1.0

    def on_update(number: int) -> None:
        if trainer.num_processes == 1:  # of several processes none may end alone
            run.owner.heed()
        waiting.to(number)

    with run.screen.waiting(doing, search.num_updates) as waiting:
        curve = trainer.find_lr(
            job.train_dataset,
            **run.update_arguments(),
            start=search.start * slower,
            end=search.end * slower,
            num_updates=search.num_updates,
            train_dataloader_kwargs=run.loader_arguments(),
            bad_samples=training.bad_samples,
            reduction=training.reduction,
            oom=run.args.oom,
            on_update=on_update,
        )
    return create_curve([rate / slower for rate in curve.rates], curve.losses, curve.stop_reason)


def choose_rate(run: RunJob) -> None:
    """Choose, print and record the rate of a run with `--lr auto`: the one that wins short trials."""
    settings, default = run.settings, run.training.learning_rate
    curve = find_rate(run, Search())
    trials = _try_rates(run, default, curve)
    chosen = best_of(trials, default)
    settings.choose("learning_rate", chosen)
    first, *others = sentences(curve)
    tried = ", ".join(f"{rate:g} ended at {_mean_end(losses):.4g}" for rate, losses in trials.items())
    origin = "the default" if chosen == default else "found"
    run.screen.block("lr", f"{chosen:g}, {origin}: {first}", *others, f"loss after short trials: {tried}")
    if run.folder is not None and run.trainer.is_first:
        ends = {f"{rate:g}": _mean_end(losses) for rate, losses in trials.items()}
        values = json.dumps({"chosen": chosen, "default": default, "trials": ends, **asdict(curve)})
        # A number that is not finite is null.
        write_json(run.folder.path / RATES_FILE, json.loads(values, parse_constant=lambda word: None))
        settings.write(run.folder)


def _try_rates(run: RunJob, default: float, curve: LearningRateCurve) -> dict[float, Sequence[float]]:
    """Return the losses of a short warm-up to the default, to the suggestion, and to a rate between them if far."""
    rates = [default]
    if curve.suggestion is not None:
        found = rounded(curve.suggestion)
        far = max(found, default) / min(found, default) > _FAR
        rates += [*([rounded(math.sqrt(found * default))] if far else []), found]
    num_updates = min(max(run.length.updates // 10, 20), 60)
    searches = {rate: Search(rate / 10, rate, num_updates) for rate in sorted(set(rates))}
    return {rate: find_rate(run, search, f"trying lr {rate:g}").losses for rate, search in searches.items()}


def best_of(trials: Mapping[float, Sequence[float]], default: float) -> float:
    """Return the rate with the lowest loss at the end of its trial; the default unless that one is clearly lower.

    All trials train on the same batches, so the losses of two of them are compared update by update.
    """
    best, base = min(trials, key=lambda rate: _mean_end(trials[rate])), trials[default]
    if best == default or len(trials[best]) < len(base):
        return default
    if len(base) < len(trials[best]):  # the default diverged
        return best
    gains = [before - after for before, after in zip(_end(base), _end(trials[best]), strict=True)]
    return best if mean(gains) > 2 * stdev(gains) / math.sqrt(len(gains)) else default


def _end(losses: Sequence[float]) -> Sequence[float]:
    return losses[-max(len(losses) // 3, 2) :]


def _mean_end(losses: Sequence[float]) -> float:
    return mean(_end(losses)) if all(map(math.isfinite, losses)) and losses else math.inf


def rounded(rate: float) -> float:
    return float(f"{rate:.2g}")


def sentences(curve: LearningRateCurve) -> list[str]:
    seen = f"{len(curve.rates)} updates from {curve.rates[0]:.2g} to {curve.rates[-1]:.2g}"
    if curve.suggestion is None or curve.steepest is None or curve.lowest is None:
        found = f"the loss fell at no learning rate in {seen}"
    else:
        found = f"in {seen} the loss falls fastest at {curve.steepest:.2g} and is lowest at {curve.lowest:.2g}"
    return [found, *([f"ended there since {curve.stop_reason}"] if curve.stop_reason else [])]


def rate_lines(curve: LearningRateCurve) -> tuple[list[str], float | None]:
    suggestion = None if curve.suggestion is None else rounded(curve.suggestion)
    return [*plot_lines(curve), "", *sentences(curve)], suggestion


def plot_lines(curve: LearningRateCurve) -> list[str]:
    points = [(math.log10(rate), loss) for rate, loss in zip(curve.rates, curve.smoothed, strict=True)]
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) < 2:
        return []
    low, high = points[0][0], math.log10(curve.rates[-1])
    bottom = min(loss for _, loss in points)
    before = [loss for x, loss in points if curve.lowest is None or x <= math.log10(curve.lowest)]
    top = bottom + (_HEADROOM * (max(before) - bottom) or 1.0)  # the loss may have risen from the start

    def column(x: float) -> int:
        return round((x - low) / (high - low) * (_COLUMNS - 1))

    cells = [[" "] * _COLUMNS for _ in range(_ROWS)]
    if curve.suggestion is not None:
        for row in cells:
            row[column(math.log10(curve.suggestion))] = "|"
    for x, loss in points:
        share = min((loss - bottom) / (top - bottom), 1.0)
        cells[_ROWS - 1 - round(share * (_ROWS - 1))][column(x)] = "*"
    names = {0: f"{top:.3g}", _ROWS - 1: f"{bottom:.3g}"}
    lines = [f"{names.get(place, ''):>8} |{''.join(row).rstrip()}" for place, row in enumerate(cells)]
    lines.append(f"{'loss':>8} +{'-' * _COLUMNS}")
    axis = [" "] * (_COLUMNS + 8)
    for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1):
        text = f"1e{power}"
        place = column(power)
        if all(character == " " for character in axis[max(place - 1, 0) : place + len(text) + 1]):
            axis[place : place + len(text)] = text
    lines.append(f"{'lr':>8}  {''.join(axis).rstrip()}")
    return lines
