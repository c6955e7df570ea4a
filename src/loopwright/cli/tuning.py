"""The verb that finds a setting before a run: find-lr."""

from __future__ import annotations

import shlex
import sys

from loopwright.api import check_files
from loopwright.cli.outcomes import DONE, INPUT
from loopwright.cli.training import screen_of, settings_of
from loopwright.cli.words import VerbParser
from loopwright.tasks import get_task
from loopwright.tasks.data import RunData

_HELP = ("-h", "--help")
_RATE_FLAGS = ("--lr", "--learning_rate", "--learning-rate")


def find_lr(words: list[str]) -> int:
    """Find a learning rate: print the loss over it, a suggestion, and the command that trains with it."""
    parser = VerbParser("find-lr", "Where to look for a learning rate.", "text-classification --data reviews.csv")
    parser.add_argument("--start", type=float, default=1e-7)
    parser.add_argument("--end", type=float, default=10.0)
    parser.add_argument("--num_updates", "--num-updates", type=int, default=100)
    is_help = not words or any(word in _HELP for word in words)
    bounds, rest = (None, words) if is_help else parser.parse_known_args(words)
    settings, asked = settings_of("find-lr", rest)
    if settings is None or bounds is None:
        return DONE if words else INPUT
    task, screen = get_task(settings.args.task), screen_of(asked["quiet"], asked["plain"])
    plan = check_files(task, settings, screen)
    from loopwright.tasks.job import find_rate_only
    from loopwright.tasks.rates import Search, plot_lines, rounded, sentences

    search = Search(bounds.start, bounds.end, bounds.num_updates)
    curve = find_rate_only(task, settings, RunData(plan), screen, search)
    screen.say()
    for line in plot_lines(curve):
        screen.say(line)
    screen.say("\n".join(["", *sentences(curve)]))
    if curve.suggestion is None:
        screen.say("no suggestion: look at the data and the model, or at other rates with --start and --end")
        return DONE
    rate = f"{rounded(curve.suggestion):g}"
    screen.say(f"suggestion {rate}\n\n  lw train {shlex.join([*_without_rate(rest), '--lr', rate])}")
    if asked["quiet"]:
        sys.stdout.write(f"{rate}\n")
    return DONE


def _without_rate(words: list[str]) -> list[str]:
    """Return the words without a learning rate among them."""
    kept: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word in _RATE_FLAGS:
            left = left[1:]
        elif word.partition("=")[0] not in _RATE_FLAGS and word not in ("--quiet", "--plain"):
            kept.append(word)
    return kept
