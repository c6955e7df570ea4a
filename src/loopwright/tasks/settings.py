"""From flags, files and a task's own defaults to the settings of a run, each with where it came from. No torch."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
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
from loopwright.tasks.arguments import ShortName, TaskArguments, TaskTrainingArguments

if TYPE_CHECKING:
    from loopwright.tasks.base import Task

# Said by the run folder itself, or of one call only.
_NOT_KEPT = frozenset({"output_dir", "task", "allow_changed_data"})
_PATHS = ("model", "data", "train_file", "validation_file", "test_file")
_SHORT_NAMES = (
    "Short names: --lr is --learning_rate, --epochs --num_train_epochs, --batch --per_device_train_batch_size, --out "
    "--output_dir. Flags that are on are switched off by --no_NAME."
)
_LINE = re.compile(r"^(\w+): .*  # (\w+)$")


@dataclass
class Settings:
    """The settings of a run.

    Attributes:
        args: the task's own.
        training: those of the training.
        sources: for each name: "flag", "file", "task", "default" or "machine".
        module: the model, where a module was handed over in Python; it is kept in no file.
    """

    args: TaskArguments
    training: TaskTrainingArguments
    sources: dict[str, str]
    module: Any = None

    def values(self) -> dict[str, Any]:
        """Return every setting by name, as YAML can hold it."""
        found = {}
        for owner in (self.args, self.training):
            for field in dataclasses.fields(owner):
                if field.init and not field.metadata.get("is_hidden"):
                    found[field.name] = plain(getattr(owner, field.name))
        return found

    def is_given(self, name: str) -> bool:
        """Whether a flag or a file gave this value."""
        return self.sources.get(name) in ("flag", "file")

    def lines(self) -> list[str]:
        """Return every setting as a line of YAML with a comment that says where it came from."""
        values = {"task": self.args.task, **self.values()}
        return [
            f"{name}: {json.dumps(value)}  # {self.sources.get(name, 'flag')}"
            for name, value in values.items()
            if name not in _NOT_KEPT or name == "task"
        ]

    def write(self, run: RunFolder) -> None:
        """Write config.yaml; called when a run begins and when it goes on with other settings."""
        write_atomically(run.config, "\n".join(self.lines()) + "\n")


class FlagHelp(argparse.ArgumentDefaultsHelpFormatter):
    """Help that says the default of a flag where it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, []) else super()._get_help_string(action)


class TaskParser(HfArgumentParser):
    """The parser of a task's flags; what cannot be read is an error to be caught, not the end of the program."""

    def error(self, message: str) -> NoReturn:
        """Refuse the flags.

        Raises:
            InputError: always; its code says whether a name is not known or a value does not fit.
        """
        what, _, near = message.partition(": did you mean ")
        near = near.rstrip("?")
        unknown = re.match(r"unknown flag (--\S+)", what)
        if unknown is not None:
            near = self._nearest(unknown[1]) or near
        fix = f"did you mean {near}{self._about(near)}?" if near else f"loopwright explain {self.prog.split()[-1]}"
        if "unknown flag" in what or "unknown name" in what:
            raise InputError("args.unknown", what, fix=fix)
        raise InputError("args.value", what, fix=fix)

    def help_of(self, name: str) -> str:
        """Return what `--help` says about a flag, or whose other name it is."""
        for kind in self.dataclass_types:
            if isinstance(kind, AcceptsOldNames) and name in kind.old_names():
                return f"Another name of --{kind.old_names()[name].new}."
        return str(self._option_string_actions[f"--{name}"].help)

    def _nearest(self, flag: str) -> str | None:
        """Return the flag that is most like one that is not known; short names count too."""
        shown = [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        close = difflib.get_close_matches(flag.replace("-", "_").replace("__", "--", 1), [*shown, *self._short_names()])
        return close[0] if close else None

    def full_names(self) -> dict[str, str]:
        """Return the flag that each short or older name of one stands for."""
        return {f"--{name}": f"--{old.new}" for kind in self.dataclass_types for name, old in kind.old_names().items()}

    def _short_names(self) -> dict[str, str]:
        """Return the short names of flags, and the flags they stand for."""
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
    """Return the flags that the words of a command line do not set, by a short name or by the whole one."""
    names = create_parser(task).full_names()

    def full(word: str) -> str:
        flag = word.partition("=")[0]
        return names.get(flag, flag).removeprefix("--").removeprefix("no_")

    given = {full(word) for word in words if word.startswith("--")}
    return {name: value for name, value in flags.items() if full(f"--{name}") not in given}


def create_parser(task: Task) -> TaskParser:
    """Return the parser of a task's flags, with the task's defaults."""
    parser = TaskParser(
        [task.arguments, TaskTrainingArguments],
        prog=f"loopwright train {task.name}",
        usage=f"loopwright train {task.name} --data FILE [--model MODEL] [--flags]",
        description=_SHORT_NAMES,
        formatter_class=FlagHelp,
        epilog=f"example: {task.example}",
    )
    parser.set_defaults(**task.defaults, task=task.name)
    return parser


def settle(task: Task, words: list[str], config: str | Path | None = None) -> Settings:
    """Return the settings that a command line asks for.

    Args:
        task: whose flags they are.
        words: the flags, as on a command line.
        config: a YAML or JSON file of settings that flags overrule, such as the config.yaml of a run.

    Raises:
        InputError, ConfigError: a name is not known, or a value cannot be.
    """
    parser = create_parser(task)
    line = [*(["--config", str(config)] if config is not None else []), *words]
    args, training = parser.parse_args_into_dataclasses(line, look_for_args_file=False)
    sources = {
        name: "task" if source == "default" and name in task.defaults else source
        for name, source in parser.sources.items()
    }
    if args.task != task.name:
        raise ConfigError(f"the settings are of the task {args.task}, not of {task.name}: name one of them")
    if config is not None:
        kept = read_sources(config)
        sources |= {name: kept[name] for name, source in sources.items() if source == "file" and name in kept}
    for name in _PATHS:
        value = getattr(args, name)
        if value is not None and Path(value).expanduser().exists():
            setattr(args, name, str(Path(value).expanduser().absolute()))
    return Settings(args, training, sources)


def words_of(flags: Mapping[str, Any]) -> list[str]:
    """Return flags given in Python as a command line has them; None stands for not given."""
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
    """Return where the values of a run's config.yaml came from, by its comments."""
    lines = Path(config).read_text(encoding="utf-8").splitlines()
    return {match[1]: match[2] for line in lines if (match := _LINE.match(line))}


def task_of(config: str | Path) -> str | None:
    """Return the task that a file of settings names, if it does."""
    named = read_mapping(config).get("task")
    return None if named is None else str(named)
