"""The verb find-lr, which finds a learning rate before a run."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict

from loopwright.api import rate_lines, search_rate
from loopwright.cli.exit_codes import DONE, INPUT
from loopwright.cli.json_output import json_events
from loopwright.cli.train import TaskVerb, screen_of, settings_of
from loopwright.config.parser import split_off


def find_lr(argv: list[str]) -> int:
    parser = TaskVerb("find-lr")
    parser.add_argument("--start", type=float, default=1e-7)
    parser.add_argument("--end", type=float, default=10.0)
    parser.add_argument("--num_updates", "--num-updates", type=int, default=100)
    asked, rest = parser.parse_known_args(argv)
    with json_events(asked.json) as events:
        settings = settings_of("find-lr", asked, rest, events)
        if settings is None:
            return DONE if argv else INPUT
        screen = screen_of(asked, events)
        curve = search_rate(settings, screen, start=asked.start, end=asked.end, num_updates=asked.num_updates)
        lines, suggestion = rate_lines(curve)
        kept = split_off(rest, "--lr", "--learning_rate")[1]
        command = None if suggestion is None else f"lw train {shlex.join([*kept, '--lr', f'{suggestion:g}'])}"
        found = "no suggestion: check the data and the model, or try other rates with --start and --end"
        if events is not None:
            events.lines({**asdict(curve), "chosen": suggestion, "next": [command] if command else []})
        screen.print("\n".join(["", *lines]))
        screen.print(found if suggestion is None else f"suggestion {suggestion:g}\n\n  {command}")
        if suggestion is not None and asked.quiet and events is None:
            sys.stdout.write(f"{suggestion:g}\n")
    return DONE
