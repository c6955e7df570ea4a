"""Merge flags, files and a task's defaults into the settings of a run, each with its source. No torch."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from loopwright.config import HfArgumentParser
from loopwright.config.files import plain, read_mapping
from loopwright.config.old_names import AcceptsOldNames
from loopwright.errors import ConfigError, InputError
from loopwright.run_folder import RunFolder, write_atomically
from loopwright.run_folder.config_file import check_end, marked
from loopwright.tasks.arguments import (
    NO_EFFECT,
    NOT_FOLLOWED,
    OWN_HELP,
    ShortName,
    TaskArguments,
    TaskTrainingArguments,
)

if TYPE_CHECKING:
    from loopwright.tasks.base import Task

# Settings that accept "auto": the run finds their values before its first update.
AUTOMATIC = ("learning_rate", "per_device_train_batch_size")
_AUTO = "auto"
# The default for a model with random weights: the tasks' own defaults are for fine-tuning.
SCRATCH_LEARNING_RATE = 1e-3
LENGTHS = ("max_steps", "num_train_epochs")  # replaced by `--time`
# Known from the run folder, or valid for one call only.
_NOT_KEPT = frozenset({"output_dir", "task", "allow_changed_data", "profile", "seeds"})
_PATHS = ("model", "data", "train_file", "validation_file", "test_file")
_SHORT_NAMES = (
    "Short names: --lr is --learning_rate, --epochs --num_train_epochs, --batch --per_device_train_batch_size, --out "
    "--output_dir. Flags that are on are switched off by --no_NAME. --lr and --batch take auto. Beside these there are "
    "--check, --print_config, --quiet, --plain and --json (lw train --help)."
)
_LINE = re.compile(r"^(\w+): .*  # (\w+)$")
# argparse's message for an invalid choice; the choices are quoted only before Python 3.12.
_CHOICE = re.compile(r"argument \S*--(?P<flag>\w+): invalid choice: '(?P<given>.*)' \(choose from (?P<choices>.+)\)")


@dataclass
class Settings:
    """The settings of a run.

    Attributes:
        args: the task's own settings.
        training: the training arguments.
        sources: for each name: "flag", "file", "task", "default", "machine", "data", or "auto": the run chose it.
        module: the model, if a module was passed in Python; it is not written to any file.
        has_new_time: `--time` was given now, not by a file: a resumed run is planned again.
    """

    args: TaskArguments
    training: TaskTrainingArguments
    sources: dict[str, str]
    module: Any = None
    has_new_time: bool = False

    def values(self) -> dict[str, Any]:
        """Return every setting by name, as a YAML value."""
        found = {}
        for owner in (self.args, self.training):
            for field in dataclasses.fields(owner):
                if field.init and not field.metadata.get("is_hidden"):
                    found[field.name] = plain(getattr(owner, field.name))
        return {**found, **dict.fromkeys(self.args.auto, _AUTO)}

    def choose(self, name: str, value: Any) -> None:
        """Set a value that the run had to find; called for each name in `args.auto` once it is found."""
        setattr(self.training, name, value)
        self.sources[name] = _AUTO
        self.args.auto.remove(name)

    def is_given(self, name: str) -> bool:
        """Whether a flag or a file gave this value."""
        return self.sources.get(name) in ("flag", "file")

    def is_planned_by_time(self, is_begun: bool) -> bool:
        """Whether the number of updates is still to be derived from `--time`.

        Args:
            is_begun: the run is resumed; the number in its config.yaml then stands unless a new time is given.
        """
        is_known = is_begun and not self.has_new_time and self.training.max_steps > 0
        return self.args.time is not None and not is_known

    def lines(self) -> list[str]:
        """Return every setting as a line of YAML, with its source as a comment."""
        values = {"task": self.args.task, **self.values()}
        return [
            f"{name}: {json.dumps(value)}  # {self.sources.get(name, 'flag')}"
            for name, value in values.items()
            if name not in _NOT_KEPT or name == "task"
        ]

    def write(self, run: RunFolder) -> None:
        """Write config.yaml; called when a run begins and when it resumes with other settings."""
        write_atomically(run.config, marked(self.lines()))


class FlagHelp(argparse.ArgumentDefaultsHelpFormatter):
    """Help that shows the default of a flag if it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_made = action.dest == "output_dir"  # created in the runs folder if not given
        return action.help if is_made or action.default in (None, []) else super()._get_help_string(action)


class TaskParser(HfArgumentParser):
    """The parser of a task's flags; it raises on bad input instead of exiting.

    Attributes:
        auto_in_files: the fields set to "auto" in settings files.
        config_files: the settings files, once the flags are parsed.
    """

    def __init__(self, dataclass_types: list[type], **kwargs: Any) -> None:
        self.auto_in_files: set[str] = set()
        self.config_files: list[str] = []
        super().__init__(dataclass_types, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise the parser's message as an InputError.

        Raises:
            InputError: always; its code tells an unknown name from an invalid value.
        """
        what, _, near = message.partition(": did you mean ")
        near = near.rstrip("?")
        unknown = re.match(r"unknown flag (--\S+)", what)
        if unknown is not None:
            near = self._nearest(unknown[1]) or near
        in_file = re.search(r"unknown name '([^']+)'", what)
        if in_file is not None:
            near = (self._nearest(f"--{in_file[1]}") or near).removeprefix("--")
        value = re.match(r"unexpected value '([^']+)'", what)
        if value is not None and Path(value[1]).exists():
            raise InputError("args.value", f"{what}: data is given by a flag", fix=f"--data {value[1]}")
        choice = _CHOICE.match(what)
        if choice is not None:
            choices = re.findall(r"[^\s,']+", choice["choices"])
            near_values = difflib.get_close_matches(choice["given"], choices, 1, 0.5) or choices
            flag = f"--{choice['flag']}"
            raise InputError(
                "args.value",
                f"{flag} {choice['given']}: expected one of {', '.join(choices)}",
                fix=f"{flag} {near_values[0]}",
            )
        fix = f"did you mean {near}{self._about(near)}?" if near else f"lw explain {self.prog.split()[-1]}"
        if "unknown flag" in what or "unknown name" in what:
            raise InputError("args.unknown", what, fix=fix)
        raise InputError("args.value", what, fix=fix)

    def without_auto(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split off the flags set to "auto", such as `--lr auto`, and return the other words and these fields."""
        names = self._automatic_names()
        rest: list[str] = []
        found: list[str] = []
        left = list(words)
        while left:
            word = left.pop(0)
            flag, equals, value = word.partition("=")
            name = names.get(flag.removeprefix("--").replace("-", "_")) if flag.startswith("--") else None
            if name is None or (value if equals else next(iter(left), "")) != _AUTO:
                rest.append(word)
                continue
            found.append(name)
            if not equals:
                left.pop(0)
        return rest, found

    def help_of(self, name: str) -> str:
        """Return the `--help` text of a flag, or the flag that it is an alias of."""
        for kind in self.dataclass_types:
            if isinstance(kind, AcceptsOldNames) and name in kind.old_names():
                return f"Another name of --{kind.old_names()[name].new}."
        return str(self._option_string_actions[f"--{name}"].help)

    def _automatic_names(self) -> dict[str, str]:
        """Return the fields that accept "auto", by their full and short names."""
        short = {name.removeprefix("--"): full.removeprefix("--") for name, full in self._short_names().items()}
        return {
            **{name: name for name in AUTOMATIC},
            **{name: full for name, full in short.items() if full in AUTOMATIC},
        }

    def read_values(self, values: Mapping[str, Any], place: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the values of a file; fields set to "auto" are recorded and removed."""
        names = self._automatic_names()
        asked = {key: names.get(key.replace("-", "_")) for key, value in values.items() if value == _AUTO}
        left = {key for key, name in asked.items() if name is not None}
        fields, unknown = super().read_values({key: value for key, value in values.items() if key not in left}, place)
        self.auto_in_files = (self.auto_in_files - set(fields)) | {name for name in asked.values() if name is not None}
        return fields, unknown

    def split_config_files(self, line: list[str]) -> tuple[list[str], list[str]]:
        """Keep the files of `--config`, and refuse a truncated one."""
        self.config_files, rest = super().split_config_files(line)
        for file in self.config_files:
            check_end(Path(file))
        return self.config_files, rest

    def _nearest(self, flag: str) -> str | None:
        """Return the known flag closest to an unknown one; short names count too."""
        shown = [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        close = difflib.get_close_matches(flag.replace("-", "_").replace("__", "--", 1), [*shown, *self._short_names()])
        return close[0] if close else None

    def full_names(self) -> dict[str, str]:
        """Return the flag behind each short or older name."""
        return {f"--{name}": f"--{old.new}" for kind in self.dataclass_types for name, old in kind.old_names().items()}

    def _short_names(self) -> dict[str, str]:
        return {
            f"--{name}": f"--{old.new}"
            for kind in self.dataclass_types
            for name, old in kind.old_names().items()
            if isinstance(old, ShortName)
        }

    def _about(self, flag: str) -> str:
        flag = f"--{flag.lstrip('-')}"
        if flag in self._short_names():
            return f" (short for {self._short_names()[flag]})"
        action = self._option_string_actions.get(flag)
        if action is None or not action.help:
            return ""
        default = "" if action.default in (None, []) else f" default {action.default}"
        return f" ({action.help}{default})"


def without_given(task: Task, flags: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return the flags that a command line does not set, under a short or full name.

    A time counts as setting the number of updates and epochs.
    """
    names = create_parser(task).full_names()

    def full(word: str) -> str:
        flag = word.partition("=")[0]
        return names.get(flag, flag).removeprefix("--").removeprefix("no_")

    given = {full(word) for word in words if word.startswith("--")}
    given |= set(LENGTHS) if "time" in given else set()
    return {name: value for name, value in flags.items() if full(f"--{name}") not in given}


def create_parser(task: Task) -> TaskParser:
    """Return the parser of a task's flags, with the task's defaults."""
    parser = TaskParser(
        [task.arguments, TaskTrainingArguments],
        prog=f"lw train {task.name}",
        usage=f"lw train {task.name} --data FILE [--model MODEL] [--flags]",
        description=_SHORT_NAMES,
        formatter_class=FlagHelp,
        epilog=f"example: {task.example}",
    )
    parser.set_defaults(**task.defaults, task=task.name)
    for action in parser._actions:
        if action.dest in NO_EFFECT or action.dest in NOT_FOLLOWED:
            action.help = argparse.SUPPRESS
        action.help = OWN_HELP.get(action.dest, action.help)
    return parser


def settle(task: Task, words: list[str], config: str | Path | None = None, has_module: bool = False) -> Settings:
    """Return the settings that a command line asks for.

    Args:
        task: the task that defines the flags.
        words: the flags, as on a command line.
        config: a YAML or JSON file of settings that flags override, such as a run's config.yaml.
        has_module: the model is a module passed in Python, not named by a flag.

    Raises:
        InputError, ConfigError: a name is unknown, or a value is invalid.
    """
    parser = create_parser(task)
    rest, asked = parser.without_auto(words)
    line = [*(["--config", str(config)] if config is not None else []), *rest]
    try:
        args, training = parser.parse_args_into_dataclasses(line, look_for_args_file=False)
    except ConfigError as error:
        raise _as_typed(parser, words, error) from error
    auto = _left_to_the_run(parser, asked, training)
    sources = {
        name: "task" if source == "default" and name in task.defaults else source
        for name, source in parser.sources.items()
    }
    if args.task != task.name:
        raise ConfigError(f"the settings are of the task {args.task}, not of {task.name}: name one of them")
    for file in parser.config_files:
        kept = read_sources(file)
        sources |= {name: kept[name] for name, source in sources.items() if source == "file" and name in kept}
    if args.model is None and not has_module and parser.sources["learning_rate"] == "default":
        training.learning_rate, sources["learning_rate"] = SCRATCH_LEARNING_RATE, "task"
    sources |= auto
    args.auto = list(auto)
    has_new_time = _settle_length(parser, task, args, training, sources)
    for name in _PATHS:
        value = getattr(args, name)
        if value is not None and str(value).strip() and os.path.exists(Path(value).expanduser()):
            setattr(args, name, str(Path(value).expanduser().absolute()))
    return Settings(args, training, sources, has_new_time=has_new_time)


def _settle_length(parser: TaskParser, task: Task, args: Any, training: Any, sources: dict[str, str]) -> bool:
    """Resolve a time against a number of updates or epochs; a flag overrides a file.

    Returns:
        Whether a flag gives a time.

    Raises:
        InputError: both are flags, or both are in files.
    """
    if args.time is None:
        return False
    is_flag = parser.sources["time"] == "flag"
    lengths = [name for name in LENGTHS if getattr(training, name) > 0]
    by_flag = [name for name in lengths if parser.sources[name] == "flag"]
    in_file = [name for name in lengths if parser.sources[name] == "file" and sources[name] in ("flag", "file")]
    for name in by_flag if is_flag else [] if by_flag else in_file:
        flag = "--epochs" if name == "num_train_epochs" else f"--{name}"
        raise InputError(
            "args.value",
            f"--time {args.time} and {flag} {getattr(training, name):g}: both say how long the run is",
            fix=f"leave out {flag}   or   leave out --time",
        )
    if by_flag:
        args.time, sources["time"] = None, "flag"
    for name in LENGTHS if is_flag or by_flag else ():
        if is_flag or sources[name] == _AUTO:
            setattr(training, name, parser.get_default(name))
            sources[name] = "task" if name in task.defaults else "default"
    return is_flag


def _as_typed(parser: TaskParser, words: Sequence[str], error: ConfigError) -> ConfigError:
    """Rewrite an error about a value with the flag as typed and a fix; unchanged if no flag gave the value."""
    field = re.match(r"(\w+) must be ", str(error))
    names = parser.full_names()
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        full = names.get(flag, flag).removeprefix("--").replace("-", "_")
        if field is None or not flag.startswith("--") or full != field[1]:
            continue
        given = value if equals else " ".join(words[index + 1 : index + 2])
        what, _, near = str(error).partition(": did you mean ")
        default = parser.get_default(full)
        fix = f"{flag} {plain(default)}   (the default)" if default is not None else f"leave {flag} out"
        if near:
            fix = f"{flag} {near.rstrip('?')}"
        return type(error)(f"error[args.value]: {flag} {given}: {what}\n  fix: {fix}")
    return error


def check_trackers(report_to: Sequence[str] | None) -> None:
    """Refuse unknown or uninstalled trackers; called before the data is read.

    Raises:
        InputError: it names the first, and the closest match or the package.
    """
    if not report_to:
        return
    from loopwright.engine.trackers import PACKAGES, is_installed

    for name in [report_to] if isinstance(report_to, str) else report_to:
        if name in ("all", "none"):
            continue
        if name not in PACKAGES:
            near = difflib.get_close_matches(name, (*PACKAGES, "all"), n=1)
            raise InputError(
                "args.value",
                f"--report_to {name}: there is no such tracker",
                saw=[f"there are {', '.join(PACKAGES)}, all, none"],
                fix=f"--report_to {near[0] if near else next(iter(PACKAGES))}",
            )
        if not is_installed(name):
            package = PACKAGES[name][0]
            raise InputError(
                "install.extra",
                f"--report_to {name} needs the package {package}, which is not installed",
                fix=f"pip install {package}   or   --report_to none",
            )


def _left_to_the_run(parser: TaskParser, asked: Sequence[str], training: TaskTrainingArguments) -> dict[str, str]:
    """Return the fields set to "auto", and whether by a flag or a file; refuse a field that also has a value."""
    flags = {name for name, source in parser.sources.items() if source == "flag"}
    for name in asked:
        if name in flags:
            raise ConfigError(f"{name} is given as 'auto' and as {getattr(training, name)!r}: give only one of them")
    in_files = parser.auto_in_files - flags
    return {name: "flag" if name in asked else "file" for name in AUTOMATIC if name in in_files or name in asked}


def words_of(flags: Mapping[str, Any]) -> list[str]:
    """Return flags given in Python as command-line words; None means not given."""
    words: list[str] = []
    for name, value in flags.items():
        if isinstance(value, (list, tuple)):
            words += [f"--{name}", *map(str, value)]
        elif isinstance(value, Mapping):
            words.append(f"--{name}={json.dumps(value)}")
        elif value is not None:
            words.append(f"--{name}={value.value if isinstance(value, Enum) else value}")
    return words


def read_sources(config: str | Path) -> dict[str, str]:
    """Return the sources of the values in a run's config.yaml, parsed from its comments."""
    lines = Path(config).read_text(encoding="utf-8").splitlines()
    return {match[1]: match[2] for line in lines if (match := _LINE.match(line))}


def task_of(config: str | Path) -> str | None:
    """Return the task named in a settings file, if any."""
    check_end(Path(config))
    named = read_mapping(config).get("task")
    return None if named is None else str(named)
