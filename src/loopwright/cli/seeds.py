"""`--seeds 3`: the same run with consecutive seeds, and a summary of all of them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence

from loopwright import api
from loopwright.cli.exit_codes import DIVERGED, DONE, code_of_run, is_first
from loopwright.cli.json_output import train_with_events


def train_seeds(
    settings: api.Settings,
    command: Sequence[str],
    open_screen: Callable[[], api.Screen],
    events: api.EventLines | None,
    is_quiet: bool,
) -> int:
    """Train with each seed, and return the worst exit code; any failure but a divergence ends all of them."""
    several = api.Seeds(settings, command)
    begun: list[api.SeedRun] = []
    worst = DONE
    with api.ends_early():
        for seed in several.seeds:
            screen = open_screen()
            train = functools.partial(several.train, seed, screen)
            try:
                if events is not None:
                    code, outcome = train_with_events(train, screen, events)
                else:
                    outcome = train()
                    code = code_of_run(outcome)
            except BaseException as error:
                begun += _broken_off(seed, screen)
                if begun:
                    api.print_seeds(begun, several.commands_of_rest(begun), open_screen())
                    done = ", ".join(str(each.seed) for each in begun if each.state == "done")
                    note = f"done: {done or 'none'} of the seeds {', '.join(map(str, several.seeds))}"
                    error.__notes__ = ["; ".join([*getattr(error, "__notes__", []), note])]
                raise
            worst = max(worst, code)
            if outcome is not None:
                begun.append(api.SeedRun(seed, outcome.run, outcome.state))
                screen.print(begun[-1].line)
            else:
                begun += _broken_off(seed, screen)
            if code not in (DONE, DIVERGED):
                break
    if not begun:
        return worst
    commands = [*api.next_commands(begun), *several.commands_of_rest(begun)]
    api.print_seeds(begun, commands, open_screen())
    if events is not None:
        events.emit("seeds", seeds=several.seeds, **api.seeds_facts(begun), next=commands, exit_code=worst)
    elif is_quiet and is_first():
        sys.stdout.write("".join(f"{os.path.normpath(each.run.path)}\n" for each in begun))
    return worst


def _broken_off(seed: int, screen: api.Screen) -> list[api.SeedRun]:
    run = screen.run
    if run is None or not run.path.is_dir():
        return []
    state = str(run.status["state"])
    return [api.SeedRun(seed, run, state if state in api.RESUMABLE else "preempted")]  # as in its last evaluation
