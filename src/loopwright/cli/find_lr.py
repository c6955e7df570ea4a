"""The verb find-lr, which finds a learning rate before a run."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from dataclasses import asdict

from loopwright.cli.exit_codes import DONE, INPUT, OWN
from loopwright.cli.json_output import telling
from loopwright.cli.parser import VerbParser
from loopwright.cli.train import JSON, screen_of, settings_of
from loopwright.runs.console.screen import Screen
from loopwright.runs.settings import Settings
from loopwright.runs.start import check_files
from loopwright.tasks import get_task
from loopwright.tasks.data import RunData

_HELP = ("-h", "--help")
_RATE_FLAGS = ("--lr", "--learning_rate", "--learning-rate")


def find_lr(words: list[str]) -> int:
    """Find a learning rate: print the loss curve, a suggestion, and the command that trains with it."""
    parser = VerbParser("find-lr", "Where to look for a learning rate.", "text-classification --data reviews.csv")
    parser.add_argument("--start", type=float, default=1e-7)
    parser.add_argument("--end", type=float, default=10.0)
    parser.add_argument("--num_updates", "--num-updates", type=int, default=100)
    is_help = not words or any(word in _HELP for word in words)
    bounds, rest = (None, words) if is_help else parser.parse_known_args(words)
    with telling(JSON in words) as events:
        settings, asked = settings_of("find-lr", rest, events)
        if settings is None or bounds is None:
            return DONE if words else INPUT
        return _searched(settings, screen_of(asked["quiet"], asked["plain"], events), bounds, rest, asked["quiet"])


def _searched(settings: Settings, screen: Screen, bounds: Namespace, rest: list[str], is_quiet: bool) -> int:
    task = get_task(settings.args.task)
    plan = check_files(task, settings, screen)
    from loopwright.runs.auto.learning_rate import Search, plot_lines, rounded, sentences
    from loopwright.runs.job import find_rate_only

    search = Search(bounds.start, bounds.end, bounds.num_updates)
    curve = find_rate_only(task, settings, RunData(plan), screen, search)
    suggestion = None if curve.suggestion is None else rounded(curve.suggestion)
    command = f"lw train {shlex.join([*_without_rate(rest), '--lr', f'{suggestion:g}'])}" if suggestion else None
    if screen.events is not None:
        screen.events.lines({**asdict(curve), "chosen": suggestion, "next": [command] if command else []})
    screen.say()
    for line in plot_lines(curve):
        screen.say(line)
    screen.say("\n".join(["", *sentences(curve)]))
    if suggestion is None:
        screen.say("no suggestion: look at the data and the model, or at other rates with --start and --end")
        return DONE
    screen.say(f"suggestion {suggestion:g}\n\n  {command}")
    if is_quiet and screen.events is None:
        sys.stdout.write(f"{suggestion:g}\n")
    return DONE


def _without_rate(words: list[str]) -> list[str]:
    kept: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word in _RATE_FLAGS:
            left = left[1:]
        elif word.partition("=")[0] not in _RATE_FLAGS and word not in OWN:
            kept.append(word)
    return kept
