"""The verbs train, check, find-lr, resume and demo."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

from loopwright import api
from loopwright.cli.exit_codes import DONE, INPUT, OWN, code_of_run, is_first
from loopwright.cli.help_text import hanging
from loopwright.cli.json_output import json_events, train_with_events
from loopwright.cli.launch import folder_in
from loopwright.cli.parser import VerbParser, add_json
from loopwright.cli.seeds import train_seeds
from loopwright.cli.supervise import SUPERVISE_FLAGS, add_supervise, supervise
from loopwright.config import start_clock
from loopwright.config.parser import split_off
from loopwright.config.program import program
from loopwright.errors import InputError
from loopwright.run_folder import find_run, runs_root
from loopwright.run_folder.layout import new_run_id
from loopwright.run_folder.parent import SUPERVISED_VARIABLE

_DESCRIPTIONS = {
    "train": "Train a model. --check stops before the first update, --print_config prints all settings and stops.",
    "check": "Do everything except train: data, model, one update, a save. --files checks only the data.",
    "find-lr": "Train a few updates with a rising learning rate, plot the loss over it, and suggest a rate; nothing is "
    "kept.\n--start 1e-7 --end 10 --num_updates 100 set the range; --quiet prints only the suggestion.",
    "resume": "Resume from the newest checkpoint of a run: a folder, an id, or last. Flags override its config.yaml.",
    "demo": "Train on data that comes with Python, without a network; without a TASK the demos are listed.\n"
    "--variant fashion uses Fashion-MNIST from Debian's package, for classifying or filling in images.",
}
_OUTPUT = (
    "--quiet prints errors and, at the end, the run folder; log.txt there has everything.\n"
    "--plain prints whole lines on a terminal too, as for a pipe: nothing is redrawn or wrapped.\n"
    "--json prints one JSON object per line for scripts, and nothing else: records of metrics.jsonl, errors, the end."
)
_SUPERVISE = (
    "--supervise restarts the run when its process dies; --no_standby saves the memory that fast restarts take."
)
_FILES = (".yaml", ".yml", ".json")


class TaskVerb(VerbParser):
    """The parser of a verb that also takes the flags of a task: `parse_known_args` returns these."""

    def __init__(self, verb: str) -> None:
        super().__init__(verb, "", "", add_help=False)
        self.add_argument("-h", "--help", action="store_true")
        for name in ("quiet", "plain"):
            self.add_argument(f"--{name}", action="store_true")
        add_json(self)


def train(argv: list[str]) -> int:
    parser = _train_parser("train")
    add_supervise(parser)
    asked, rest = parser.parse_known_args(argv)
    if asked.supervise and not (asked.help or asked.check or asked.files or asked.print_config):
        return _supervise("train", asked, argv, folder_given(argv))
    with json_events(asked.json) as events:
        settings = settings_of("train", asked, rest, events)
        if settings is None:
            return DONE if argv else INPUT
        if asked.check or asked.files:
            return _check(settings, asked, events)
        return _code_of(settings, ["lw", "train", *argv], asked, events)


def folder_given(argv: list[str]) -> Path | None:
    """Return the folder that a command to train names, in its flags or in a settings file."""
    parser = _train_parser("train")
    add_supervise(parser)
    settings = settings_of("train", *parser.parse_known_args(argv))
    given = settings is not None and settings.is_given("output_dir") and settings.training.output_dir
    return Path(given) if given else None


def check(argv: list[str]) -> int:
    asked, rest = _train_parser("check").parse_known_args(argv)
    with json_events(asked.json) as events:
        settings = settings_of("check", asked, rest, events)
        if settings is None:
            return DONE if argv else INPUT
        return _check(settings, asked, events)


def _train_parser(verb: str) -> TaskVerb:
    parser = TaskVerb(verb)
    for name in ("check", "files"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--print_config", "--print-config", action="store_true")
    return parser


def _check(settings: api.Settings, asked: Namespace, events: api.EventLines | None) -> int:
    screen = screen_of(asked, events)
    if asked.files:
        plan = api.check_files(api.get_task(settings.args.task), settings, screen)
        screen.events.emit("check", task=settings.args.task, data=api.data_facts(plan))
    else:
        api.check_settings(settings, screen)
    screen.events.emit("end", state="checked", exit_code=DONE)
    return DONE


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
        curve = api.search_rate(settings, screen, start=asked.start, end=asked.end, num_updates=asked.num_updates)
        lines, suggestion = api.rate_lines(curve)
        kept = split_off(rest, "--lr", "--learning_rate")[1]
        command = None if suggestion is None else f"{program()} train {shlex.join([*kept, '--lr', f'{suggestion:g}'])}"
        found = "no suggestion: check the data and the model, or try other rates with --start and --end"
        if events is not None:
            events.lines({**asdict(curve), "chosen": suggestion, "next": [command] if command else []})
        screen.print("\n".join(["", *lines]))
        screen.print(found if suggestion is None else f"suggestion {suggestion:g}\n\n  {command}")
        if suggestion is not None and asked.quiet and events is None:
            sys.stdout.write(f"{suggestion:g}\n")
    return DONE


def resume(argv: list[str]) -> int:
    parser = TaskVerb("resume")
    add_supervise(parser)
    asked, rest = parser.parse_known_args(argv)
    if asked.help or not argv:
        usage = "lw resume RUN [--quiet] [--plain] [--json] [--supervise] [--flags of its task]"
        sys.stdout.write(f"usage: {usage}\n\n{_DESCRIPTIONS['resume']}\n{_OUTPUT}\n{_SUPERVISE}\n\n")
        sys.stdout.write("example: lw resume last --epochs 5\n")
        return DONE if argv else INPUT
    if not rest:
        raise InputError("args.value", "lw resume needs a run", fix="lw resume last")
    if asked.supervise:
        folder = find_run(rest[0]).path  # "last" may be another one later
        again = ["resume", str(folder), *rest[1:], *(word for word in argv if word in OWN)]
        return supervise(asked, folder, again, again)
    with json_events(asked.json) as events:
        screen, run = screen_of(asked, events), find_run(rest[0])
        with _ended_by_signals():
            if events is not None:
                return train_with_events(functools.partial(api.resume_run, run, rest[1:], screen), screen, events)[0]
            return _code_of_outcome(api.resume_run(run, rest[1:], screen), asked)


def demo(argv: list[str]) -> int:
    parser = TaskVerb("demo")
    parser.add_argument("--variant")
    add_supervise(parser)
    asked, rest = parser.parse_known_args(argv)
    if asked.supervise and rest and not asked.help:
        return _supervise("demo", asked, argv, folder_in(rest))
    if asked.help:
        usage = "lw demo [TASK] [--variant NAME] [--quiet] [--plain] [--json] [--supervise] [--flags of the task]"
        sys.stdout.write(f"usage: {usage}\n\n{_DESCRIPTIONS['demo']}\n{_OUTPUT}\n{_SUPERVISE}\n\n")
        sys.stdout.write("example: lw demo text-classification\n")
        return DONE
    with json_events(asked.json) as events:
        if not rest and asked.json:
            raise InputError("args.task", "lw demo needs a task", fix=f"lw demo {api.task_names()[0]} --json")
        if not rest:
            shown = [task for task in api.load_tasks()[0] if task.demo_note]
            lines = [hanging(f"  lw demo {task.name:<22} ", task.demo_note) for task in shown]
            sys.stdout.write("\n".join([*lines, ""]))
            return DONE
        settings = api.demo_settings(api.get_task(rest[0]), rest[1:], screen_of(asked, events), asked.variant)
        return _code_of(settings, ["lw", "demo", *argv], asked, events)


def screen_of(asked: Namespace, events: api.EventLines | None = None) -> api.Screen:
    is_quiet, is_plain = asked.quiet, asked.plain
    return api.Screen(is_first(), is_quiet, is_plain, events, start_clock.of_command())


def _code_of(settings: api.Settings, command: list[str], asked: Namespace, events: api.EventLines | None) -> int:
    """Train, and return the exit code; a quiet run prints only its folder."""
    screen = screen_of(asked, events)
    if settings.args.seeds > 1 and SUPERVISED_VARIABLE in os.environ:
        fix = "--seeds 1   or   leave out --supervise"
        raise InputError("args.value", "--supervise is for a single run", fix=fix, flag="--seeds")
    with _ended_by_signals():
        if settings.args.seeds > 1:
            return train_seeds(settings, command, functools.partial(screen_of, asked, events), events, asked.quiet)
        if events is not None:
            return train_with_events(functools.partial(api.start, settings, screen, command), screen, events)[0]
        return _code_of_outcome(api.start(settings, screen, command), asked)


def _supervise(verb: str, asked: Namespace, argv: list[str], folder: Path | None) -> int:
    """Supervise a new run; its folder is known from the start, so that a restart finds it."""
    words = [word for word in argv if word not in SUPERVISE_FLAGS]
    if folder is None:
        folder = runs_root() / new_run_id("supervised")
        words += ["--output_dir", str(folder)]
    return supervise(asked, folder, [verb, *words])


def _ended_by_signals() -> AbstractContextManager[None]:
    """Return a block that SIGTERM ends; a launcher ends its processes itself, wherever they wait."""
    return api.ends_early() if os.environ.get("WORLD_SIZE", "1") == "1" else nullcontext()


def _code_of_outcome(outcome: api.Outcome, asked: Namespace) -> int:
    if asked.quiet and is_first():
        sys.stdout.write(f"{os.path.normpath(outcome.run.path)}\n")
    return code_of_run(outcome)


def settings_of(
    verb: str, asked: Namespace, rest: list[str], events: api.EventLines | None = None
) -> api.Settings | None:
    """Return the settings of a verb; None if only its help or the settings are printed."""
    name, config, flags = (None, None, []) if asked.help and not rest else _target(verb, rest)
    if name is None and events is not None:
        example = f"lw {verb} {api.task_names()[0]} --data FILE --json"
        raise InputError("args.task", f"lw {verb} needs a task", fix=example)
    if name is None:
        _print_help(verb)
        return None
    task = api.get_task(name)
    if asked.help:
        sys.stdout.write(api.create_parser(task).format_help())
        return None
    settings = api.settle(task, flags, config)
    if not getattr(asked, "print_config", False):
        return settings
    if events is not None:
        events.emit("config", values={"task": name, **settings.values()}, sources=settings.sources)
    else:
        sys.stdout.write("\n".join(settings.lines()) + "\n")
    return None


def _print_help(verb: str) -> None:
    lines = [
        f"usage: lw {verb} TASK --data FILE [--flags]",
        f"       lw {verb} cfg.yaml [--flags]   |   lw {verb} RUN [--flags]\n",
        _DESCRIPTIONS[verb]
        + ("" if verb == "find-lr" else f"\n{_OUTPUT}")
        + (f"\n{_SUPERVISE}" if verb == "train" else "")
        + "\n\ntasks:",
        *(hanging(f"  {name:<22} ", summary) for name, summary in api.summaries().items()),
        f"\nexample: lw {verb} text-classification --data reviews.csv --epochs 3",
        f"lw {verb} TASK --help lists the flags of a task, lw explain TASK describes its data.\n",
    ]
    sys.stdout.write("\n".join(lines))


def _target(verb: str, argv: list[str]) -> tuple[str | None, Path | None, list[str]]:
    """Return the task that a verb is given, by its name, a settings file or a run, that file, and the flags."""
    if not argv:
        return None, None, []
    if argv[0].startswith("-"):
        if "--config" in argv[:-1]:
            return _task_in(Path(argv[argv.index("--config") + 1])), None, argv
        what, saw = f"lw {verb} needs a task, a settings file or a run before its flags", [f"got {argv[0]}"]
        task = next((word for word in argv if word in api.task_names()), "text-classification")
        rest = [word for word in argv if word != task]
        raise InputError("args.task", what, saw=saw, fix=f"lw {verb} {shlex.join([task, *rest])}")
    first, rest = argv[0], argv[1:]
    if first.endswith(_FILES) and Path(first).is_file():
        return _task_in(Path(first)), Path(first), rest
    if first not in api.task_names() and not first.endswith(_FILES):
        try:
            run = find_run(first)
        except InputError:
            api.get_task(first)  # raises, and lists the tasks
        else:
            return str(run.metadata["task"]), api.config_of(run), rest
    if first.endswith(_FILES):
        near = api.near_files(Path(first), _FILES)
        fix = f"{shlex.quote(near[0])} instead of {shlex.quote(first)}" if near else f"create {first}"
        raise InputError("data.file", f"the settings file {first} does not exist", fix=fix)
    if rest and rest[0].endswith(_FILES) and Path(rest[0]).is_file():
        return first, Path(rest[0]), rest[1:]
    return first, None, rest


def _task_in(config: Path) -> str:
    named = api.task_of(config)
    if named is None:
        fix = f"add a line such as 'task: text-classification' to {config}"
        raise InputError("args.task", f"{config} does not name a task", fix=fix)
    return named
