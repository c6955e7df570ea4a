"""The verbs train, check, resume and demo."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from loopwright.api import go_on
from loopwright.cli.exit_codes import DONE, INPUT, OWN, code_of_run, is_first
from loopwright.cli.help_text import hanging
from loopwright.cli.json_output import telling, told_to_its_end
from loopwright.cli.seeds import train_seeds
from loopwright.errors import InputError
from loopwright.run_folder import find_run, runs_root
from loopwright.runs.console.json_events import EventLines
from loopwright.runs.console.screen import Screen
from loopwright.runs.early_signals import ends_early
from loopwright.runs.kept_config import config_of
from loopwright.runs.provenance import data_facts
from loopwright.runs.settings import Settings, create_parser, settle, task_of
from loopwright.runs.start import check_files, check_settings, start
from loopwright.tasks import TASKS, get_task, load_tasks, summaries, task_names
from loopwright.tasks.base import Task

if TYPE_CHECKING:
    from loopwright.runs.job import Outcome

_ABOUT = {
    "train": "Train a model. --check stops before the first update, --print_config shows all settings and stops.",
    "check": "Do everything but the training: data, model, one update, a save. --files checks the data alone.",
    "find-lr": "Train a few updates with a rising learning rate, show the loss over it, suggest one; leaves nothing "
    "behind.\n--start 1e-7 --end 10 --num_updates 100 say where to look; --quiet prints the suggestion alone.",
}
_QUIET = (
    "--quiet prints errors and, at the end, the run folder; log.txt there has everything.\n"
    "--plain prints whole lines on a terminal too, as a pipe gets them: none changes, none is broken.\n"
    "--json prints one JSON object per line for scripts, and nothing else: records of metrics.jsonl, errors, the end."
)
_FILES = (".yaml", ".yml", ".json")
JSON = "--json"


def train(words: list[str]) -> int:
    """Train a model; --check stops before the first update, --print_config before anything else."""
    with telling(JSON in words) as events:
        settings, asked = settings_of("train", words, events)
        if settings is None:
            return DONE if words else INPUT
        screen = screen_of(asked["quiet"], asked["plain"], events)
        if asked["check"] or asked["files"]:
            return _checked(settings, asked, screen)
        return _ended(settings, ["train", *words], screen, asked["quiet"])


def check(words: list[str]) -> int:
    """Check data and model without training; --files checks only the data, without torch."""
    with telling(JSON in words) as events:
        settings, asked = settings_of("check", words, events)
        if settings is None:
            return DONE if words else INPUT
        return _checked(settings, asked, screen_of(asked["quiet"], asked["plain"], events))


def _checked(settings: Settings, asked: dict[str, bool], screen: Screen) -> int:
    if asked["files"]:
        plan = check_files(get_task(settings.args.task), settings, screen)
        screen.tell("check", task=settings.args.task, data=data_facts(plan))
    else:
        check_settings(settings, screen)
    screen.tell("end", state="checked", exit_code=DONE)
    return DONE


def resume(words: list[str]) -> int:
    """Resume a run."""
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(
            "usage: lw resume RUN [--quiet] [--plain] [--json] [--flags of its task]\n\n"
            "Go on from the newest checkpoint of a run: a folder, an id, or last. Flags win over its config.yaml.\n"
            f"{_QUIET}\n\n"
            "example: lw resume last --epochs 5\n"
        )
        return DONE if words else INPUT
    with telling(JSON in words) as events:
        is_quiet, is_plain, words = _own(words)
        if not words:
            raise InputError("args.value", "lw resume needs a run", fix="lw resume last")
        screen, run = screen_of(is_quiet, is_plain, events), find_run(words[0])
        return _code_of(lambda: go_on(run, words[1:], screen), screen, is_quiet)


def demo(words: list[str]) -> int:
    """Train on data that comes with Python, or list the demos."""
    is_quiet, is_plain, rest = _own(words)
    if not rest and JSON in words:
        raise InputError("args.task", "lw demo needs a task", fix=f"lw demo {next(iter(TASKS))} --json")
    if not rest:
        for task in load_tasks()[0]:
            if task.demo_note:
                sys.stdout.write(hanging(f"  lw demo {task.name:<22} ", task.demo_note) + "\n")
        return DONE
    if rest[0] in ("-h", "--help"):
        sys.stdout.write(
            "usage: lw demo [TASK] [--variant NAME] [--quiet] [--plain] [--json] [--flags of the task]\n\n"
            "Train on data that comes with Python, without a network; without a TASK the demos are listed.\n"
            "--variant fashion takes Fashion-MNIST of Debian's package, where images are classified or filled in.\n"
            f"{_QUIET}\n\n"
            "example: lw demo text-classification\n"
        )
        return DONE
    with telling(JSON in words) as events:
        screen = screen_of(is_quiet, is_plain, events)
        settings = _demo_settings(get_task(rest[0]), rest[1:], screen)
        return _ended(settings, ["demo", *words], screen, is_quiet)


def _demo_settings(task: Task, rest: list[str], screen: Screen) -> Settings:
    from loopwright.demos import find_minilm, write_demo

    variant, rest = _variant(task, rest)
    folder = runs_root() / "demo-data" / (task.name if variant is None else f"{task.name}-{variant}")
    write_demo(task.name, folder, variant=variant)
    flags = {"data": folder, **task.demo, **({} if variant is None else task.demo_variants[variant])}
    minilm = find_minilm() if task.demo_model == "minilm" else None
    if minilm is not None and minilm.folder is not None:
        flags["model"] = minilm.folder
    elif minilm is not None:
        screen.say(f"{minilm.problem}: a small model from scratch is trained instead")
        flags = {name: value for name, value in flags.items() if name != "freeze"}
    return settle(task, rest, base=flags)


def _variant(task: Task, words: list[str]) -> tuple[str | None, list[str]]:
    """Split the words into the requested variant of a demo and the rest; refuse an unknown variant."""
    if "--variant" not in words:
        return None, words
    place = words.index("--variant")
    name = words[place + 1] if place + 1 < len(words) else ""
    if name not in task.demo_variants:
        raise InputError(
            "args.value",
            f"the demo of {task.name} has no variant {name!r}",
            saw=[f"its variants: {', '.join(task.demo_variants) or 'none'}"],
            fix=f"lw demo {task.name}",
        )
    return name, [*words[:place], *words[place + 2 :]]


def screen_of(is_quiet: bool, is_plain: bool, events: EventLines | None = None) -> Screen:
    """Return the screen of a verb; only rank 0 prints."""
    return Screen(is_main=is_first(), is_quiet=is_quiet, is_plain=is_plain, events=events)


def _quiet_help(verb: str) -> str:
    return "" if verb == "find-lr" else f"\n{_QUIET}"


def _own(words: list[str]) -> tuple[bool, bool, list[str]]:
    """Split off --quiet, --plain and --json; return whether the first two were given, and the rest."""
    return "--quiet" in words, "--plain" in words, [word for word in words if word not in OWN]


def _ended(settings: Settings, words: list[str], screen: Screen, is_quiet: bool) -> int:
    if settings.args.seeds > 1:
        return train_seeds(
            settings, words, lambda: screen_of(is_quiet, screen.is_plain, screen.events), screen.events, is_quiet
        )
    return _code_of(lambda: start(settings, screen, ["lw", *words]), screen, is_quiet)


def _code_of(train: Callable[[], Outcome], screen: Screen, is_quiet: bool) -> int:
    """Train, and return the exit code; a quiet run prints only its folder."""
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"  # otherwise the launcher ends them, wherever they wait
    with ends_early() if is_alone else nullcontext():
        if screen.events is not None:
            return told_to_its_end(train, screen, screen.events)[0]
        outcome = train()
    if is_quiet and is_first():
        sys.stdout.write(f"{os.path.normpath(outcome.run.path)}\n")
    return code_of_run(outcome)


def settings_of(
    verb: str, words: list[str], events: EventLines | None = None
) -> tuple[Settings | None, dict[str, bool]]:
    """Return the settings and the verb's own flags; None for the settings if only help or the config is printed."""
    asked = {
        name: f"--{name}" in words
        for name in ("check", "files", "quiet", "plain", "json", "print_config", "print-config")
    }
    words = [word for word in words if word not in {f"--{name}" for name in asked}]
    name, config, rest = _target(verb, words)
    if name is None and events is not None:
        example = f"lw {verb} {next(iter(TASKS))} --data FILE --json"
        raise InputError("args.task", f"lw {verb} needs a task", fix=example)
    if name is None:
        sys.stdout.write(f"usage: lw {verb} TASK --data FILE [--flags]\n")
        sys.stdout.write(f"       lw {verb} cfg.yaml [--flags]   |   lw {verb} RUN [--flags]\n")
        sys.stdout.write(f"\n{_ABOUT[verb]}{_quiet_help(verb)}\n\ntasks:\n")
        for task_name, summary in summaries().items():
            sys.stdout.write(hanging(f"  {task_name:<22} ", summary) + "\n")
        sys.stdout.write(f"\nexample: lw {verb} text-classification --data reviews.csv --epochs 3\n")
        sys.stdout.write(f"lw {verb} TASK --help lists the flags of a task, lw explain TASK its data.\n")
        return None, asked
    task = get_task(name)
    if "--help" in rest or "-h" in rest:
        sys.stdout.write(create_parser(task).format_help())
        return None, asked
    settings = settle(task, rest, config)
    if asked["print_config"] or asked["print-config"]:
        if events is not None:
            events.tell("config", values={"task": name, **settings.values()}, sources=settings.sources)
        else:
            sys.stdout.write("\n".join(settings.lines()) + "\n")
        return None, asked
    return settings, asked


def _target(verb: str, words: list[str]) -> tuple[str | None, Path | None, list[str]]:
    if not words or words[0] in ("-h", "--help"):
        return None, None, []
    if words[0].startswith("-"):
        if "--config" in words[:-1]:
            return _task_in(Path(words[words.index("--config") + 1])), None, words
        raise InputError(
            "args.task",
            f"lw {verb} needs a task, a file of settings or a run before its flags",
            saw=[f"got {words[0]}"],
            fix=f"lw {verb} {next(iter(TASKS))} {' '.join(words[:4])}",
        )
    first, rest = words[0], words[1:]
    if first.endswith(_FILES) and Path(first).is_file():
        return _task_in(Path(first)), Path(first), rest
    if first not in task_names() and not first.endswith(_FILES):
        try:
            run = find_run(first)
        except InputError:
            get_task(first)  # raises, and lists the tasks
        else:
            return str(run.metadata["task"]), config_of(run), rest
    if first.endswith(_FILES):
        raise InputError("data.file", f"the file of settings {first} does not exist", fix="give its path")
    if rest and rest[0].endswith(_FILES) and Path(rest[0]).is_file():
        return first, Path(rest[0]), rest[1:]
    return first, None, rest


def _task_in(config: Path) -> str:
    named = task_of(config)
    if named is None:
        raise InputError(
            "args.task",
            f"{config} does not say which task it is of",
            fix=f"write a line such as task: {next(iter(TASKS))} into it, or lw train TASK {config}",
        )
    return named
