"""The same run with several seeds: the settings of each, and statistics over their metrics. No torch."""

from __future__ import annotations

import copy
import gc
import math
import os
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopwright.config.display_width import display_width, pad
from loopwright.config.parser import split_off
from loopwright.config.program import program
from loopwright.errors import InputError
from loopwright.report.summary import verdict_text
from loopwright.run_folder import RunFolder
from loopwright.runs.console.screen import Screen, metric_text
from loopwright.runs.creation import check_new_folder, option_of_folder
from loopwright.runs.ownership import Ownership
from loopwright.runs.provenance import name_of, place_facts
from loopwright.runs.settings import Settings
from loopwright.runs.start import Outcome, check_files, start
from loopwright.runs.verdicts import verdict_of_seeds
from loopwright.sources import DataPlan
from loopwright.tasks import get_task

_NONE = "-"
RESUMABLE = ("preempted", "stopped", "failed")


@dataclass(frozen=True)
class SeedRun:
    """One of several runs that differ only in their seed."""

    seed: int
    run: RunFolder
    state: str  # "done", "stopped", "diverged", "preempted" or "failed"

    @property
    def result(self) -> dict[str, Any]:
        """The content of result.json; empty unless the run is done."""
        return self.run.read_result() if self.state == "done" else {}

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.result.get("metrics", {}))

    @property
    def line(self) -> str:
        score = self.score()
        shown = "" if score is None else f"{self.result['metric']} {score}   "
        return f"seed {self.seed}  {self.state}   {shown}{os.path.normpath(self.run.path)}"

    def score(self) -> str | None:
        result = self.result
        value = self.metrics.get(result.get("metric", ""))
        return None if value is None else metric_text(value, result.get("intervals", {}).get(result["metric"]))


def with_seed(settings: Settings, seed: int) -> Settings:
    """Return a copy of the settings with this seed, and with a subfolder of its own in a named output folder."""
    several = settings.args.seeds > 1
    one = copy.deepcopy(settings)
    one.training.seed = seed
    one.args.seeds = 1
    if several and settings.is_given("output_dir"):
        one.training.output_dir = str(folder_of(settings.training.output_dir or "", seed))
    return one


def folder_of(folder: str | Path, seed: int) -> Path:
    return Path(folder) / f"seed-{seed}"


class Seeds:
    """Trains the same settings with consecutive seeds, each in a separate run; data is read and split once."""

    def __init__(self, settings: Settings, command: Sequence[str] | None = None) -> None:
        self._settings = settings
        self._command = command
        self._plan: DataPlan | None = None
        self._updates: int | None = None
        self._previous = Ownership()
        self.seeds = [settings.training.seed + offset for offset in range(settings.args.seeds)]
        if len(self.seeds) > 1 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
            what = f"--seeds {len(self.seeds)}: only a single run can be resumed after a restart of its processes"
            fix = "leave out --max-restarts   or   leave out --seeds"
            raise InputError("args.value", what, fix=fix)
        if settings.is_given("output_dir"):
            for seed in self.seeds:
                folder = with_seed(settings, seed).training.output_dir
                check_new_folder(folder, option_of_folder(command))

    def commands_of_rest(self, begun: Sequence[SeedRun]) -> list[str]:
        """Return the commands that finish the work: resume the interrupted runs, train the missing seeds."""
        resumed = [f"{program()} resume {name_of(each.run)}" for each in begun if each.state in RESUMABLE]
        left = [seed for seed in self.seeds if seed not in {each.seed for each in begun}]
        folder = str(self._settings.training.output_dir) if self._settings.is_given("output_dir") else None
        return [*resumed, *([command_of_rest((self._command or [])[1:], left, folder)] if left else [])]

    def train(self, seed: int, screen: Screen) -> Outcome:
        one = with_seed(self._settings, seed)
        if self._updates is not None:  # the number that fits into the given time, as found by the first run
            one.args.time, one.training.max_steps, one.sources["max_steps"] = None, self._updates, "auto"
        word = f"seed{seed}" if len(self.seeds) > 1 else None
        if word is not None:
            screen.print(f"seed {seed} ({self.seeds.index(seed) + 1} of {len(self.seeds)})")
        self._plan = check_files(get_task(one.args.task), one, screen, self._plan)
        previous, self._previous = self._previous, Ownership()
        try:
            outcome = start(one, screen, self._command, known=self._plan, word=word, previous=previous)
            if seed != self.seeds[-1] and outcome.state != "stopped":
                self._previous.take(outcome.run, "seeds")
            return outcome
        finally:
            previous.release()
            if one.args.time is not None and one.training.max_steps > 0:
                self._updates = one.training.max_steps
            gc.collect()  # models have reference cycles; free their memory for the next run


def spread_of(runs: Sequence[SeedRun]) -> dict[str, dict[str, float | int | None]]:
    """Return statistics of the finite values of each metric over the finished runs; the deviation is the sample's."""
    found: dict[str, list[float]] = {}
    for each in runs:
        for name, value in each.metrics.items():
            if math.isfinite(value):
                found.setdefault(name, []).append(value)
    return {
        name: {
            "mean": statistics.fmean(values),
            "std": statistics.stdev(values) if len(values) > 1 else None,
            "min": min(values),
            "max": max(values),
            "runs": len(values),
        }
        for name, values in found.items()
    }


def best_of(runs: Sequence[SeedRun]) -> SeedRun | None:
    """Return the best run by the decisive metric, the first one on a tie; None without runs."""
    scored = [(each, value) for each in runs if (value := each.metrics.get(each.result.get("metric", ""))) is not None]
    if not scored:
        return None
    sign = 1 if scored[0][0].result["direction"] == "max" else -1
    return max(scored, key=lambda pair: sign * pair[1])[0]


def print_seeds(runs: Sequence[SeedRun], commands: Sequence[str], screen: Screen) -> None:
    decisive = next((each.result["metric"] for each in runs if each.result), None)
    rows = [["seed", *([decisive] if decisive else []), "state", "run"]]
    for each in runs:
        score = [each.score() or _NONE] if decisive else []
        rows.append([str(each.seed), *score, each.state, os.path.normpath(each.run.path)])
    screen.print()
    screen.block("seeds", *_aligned(rows), wraps=False)
    spread = spread_of(runs)
    finished = sum(bool(each.metrics) for each in runs)
    if finished > 1:
        named = sorted(spread, key=lambda name: (name != decisive, name == "loss"))
        columns = ("mean", "std", "min", "max")
        table = [["", *columns], *([name, *(_number(spread[name][column]) for column in columns)] for name in named)]
        screen.block(f"over {finished}", *_aligned(table), wraps=False)
    best = best_of(runs)
    if best is not None and decisive is not None:
        screen.block("best", f"seed {best.seed}  {decisive} {best.metrics[decisive]:.4f}   {name_of(best.run)}")
    if verdict := _verdict(runs):
        screen.block("", verdict_text(verdict))
    if commands:
        screen.block("next", *commands, wraps=False)


def seeds_facts(runs: Sequence[SeedRun]) -> dict[str, Any]:
    best = best_of(runs)
    return {
        "runs": [
            {"seed": each.seed, **place_facts(each.run), "state": each.state, "metrics": each.metrics} for each in runs
        ],
        "metrics": spread_of(runs),
        "best": None if best is None else {"seed": best.seed, **place_facts(best.run)},
        "verdict": _verdict(runs),
    }


def _verdict(runs: Sequence[SeedRun]) -> dict[str, Any] | None:
    return verdict_of_seeds([each.result.get("verdict") or {} for each in runs if each.metrics])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(display_width(row[place]) for row in rows) for place in range(len(rows[0]))]
    return ["  ".join(map(pad, row, widths)).rstrip() for row in rows]


def _number(value: float | int | None) -> str:
    return _NONE if value is None else f"{value:.4f}"


def next_commands(runs: Sequence[SeedRun]) -> list[str]:
    ended = [each for each in runs if each.metrics]
    commands = [f"{program()} compare {' '.join(name_of(each.run) for each in ended)} --open"] if len(ended) > 1 else []
    best = best_of(runs)
    return [*commands, *([f"{program()} report {name_of(best.run)} --open"] if best is not None else [])]


def command_of_rest(argv: Sequence[str], seeds: Sequence[int], folder: str | None) -> str:
    """Return the command that trains with the remaining seeds; `argv` is the original one, without `lw`."""
    kept = split_off(argv, "--seed", "--seeds")[1]
    added = ["--seed", str(seeds[0]), "--seeds", str(len(seeds))]
    if folder is not None and len(seeds) == 1:  # then it is the run's own folder
        kept = split_off(kept, "--out", "--output_dir")[1]
        added += ["--out", str(folder_of(folder, seeds[0]))]
    return f"{program()} {shlex.join([*kept, *added])}"
