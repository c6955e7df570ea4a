"""`--seeds 3`: the same run with consecutive seeds, and a summary of all of them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence

from loopwright.cli.exit_codes import DIVERGED, DONE, code_of_run, is_first
from loopwright.cli.json_output import told_to_its_end
from loopwright.runs.console.json_events import EventLines
from loopwright.runs.console.screen import Screen
from loopwright.runs.early_signals import ends_early
from loopwright.runs.seeds import (
    SeedRun,
    command_of_rest,
    line_of,
    name_of,
    next_commands,
    say_seeds,
    seeds_facts,
)
from loopwright.runs.settings import Settings
from loopwright.runs.start import Seeds

_TO_GO_ON = ("preempted", "stopped", "failed")


def train_seeds(
    settings: Settings,
    words: Sequence[str],
    open_screen: Callable[[], Screen],
    events: EventLines | None,
    is_quiet: bool,
) -> int:
    """Train with each seed, and return the worst exit code.

    A run that diverges is reported and the others still train; any other failure ends all of them.

    Args:
        settings: shared by all runs.
        words: the command line, without `lw`.
        open_screen: returns a new screen for a run.
        events: the stream of `--json`.
        is_quiet: print only the folders of the runs.
    """
    several = Seeds(settings, ["lw", *words])
    begun: list[SeedRun] = []
    worst = DONE
    with ends_early():
        for seed in several.seeds:
            screen = open_screen()
            train = functools.partial(several.train, seed, screen)
            try:
                if events is not None:
                    code, outcome = told_to_its_end(train, screen, events)
                else:
                    outcome = train()
                    code = code_of_run(outcome)
            except BaseException as error:
                begun += _broken_off(seed, screen)
                if begun:
                    say_seeds(begun, _to_go_on(begun, several.seeds, words, settings), open_screen())
                    _note(error, begun, several.seeds)
                raise
            worst = max(worst, code)
            if outcome is not None:
                begun.append(SeedRun(seed, outcome.run, outcome.state))
                screen.say(line_of(begun[-1]))
            else:
                begun += _broken_off(seed, screen)
            if code not in (DONE, DIVERGED):
                break
    if not begun:
        return worst
    commands = [*next_commands(begun), *_to_go_on(begun, several.seeds, words, settings)]
    say_seeds(begun, commands, open_screen())
    if events is not None:
        events.tell("seeds", seeds=several.seeds, **seeds_facts(begun), next=commands, exit_code=worst)
    elif is_quiet and is_first():
        sys.stdout.write("".join(f"{os.path.normpath(each.run.path)}\n" for each in begun))
    return worst


def _broken_off(seed: int, screen: Screen) -> list[SeedRun]:
    """Return the interrupted run, if it had a folder."""
    run = screen.run
    if run is None or not run.path.is_dir():
        return []
    state = str(run.status["state"])
    return [SeedRun(seed, run, state if state in _TO_GO_ON else "preempted")]  # as in its last evaluation


def _to_go_on(begun: Sequence[SeedRun], seeds: Sequence[int], words: Sequence[str], settings: Settings) -> list[str]:
    """Return the commands that finish the work: resume the interrupted runs, train the missing seeds."""
    resumed = [f"lw resume {name_of(each.run)}" for each in begun if each.state in _TO_GO_ON]
    left = [seed for seed in seeds if seed not in {each.seed for each in begun}]
    folder = str(settings.training.output_dir) if settings.is_given("output_dir") else None
    return [*resumed, *([command_of_rest(words, left, folder)] if left else [])]


def _note(error: BaseException, begun: Sequence[SeedRun], seeds: Sequence[int]) -> None:
    """Attach the list of finished runs to the error that ended them all."""
    done = [str(each.seed) for each in begun if each.state == "done"]
    told = f"done: {', '.join(done) or 'none'} of the seeds {', '.join(map(str, seeds))}"
    error.__notes__ = ["; ".join([*getattr(error, "__notes__", []), told])]
