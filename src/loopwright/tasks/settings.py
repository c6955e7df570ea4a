"""From flags, files and a task's own defaults to the settings of a run, each with where it came from. No torch."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from loopwright.config import HfArgumentParser
from loopwright.config.files import plain, read_mapping
from loopwright.errors import ConfigError, InputError
from loopwright.run_folder import RunFolder, write_atomically
from loopwright.tasks.arguments import TaskArguments, TaskTrainingArguments

if TYPE_CHECKING:
    from loopwright.tasks.base import Task

# Said by the run folder itself, or of one call only.
_NOT_KEPT = frozenset({"output_dir", "task", "allow_changed_data"})
_PATHS = ("model", "data", "train_file", "validation_file", "test_file")
_LINE = re.compile(r"^(\w+): .*  # (\w+)$")


@dataclass
class Settings:
    """The settings of a run.

    Attributes:
        args: the task's own.
        training: those of the training.
        sources: for each name: "flag", "file", "task", "default" or "machine".
    """

    args: TaskArguments
    training: TaskTrainingArguments
    sources: dict[str, str]

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


class TaskParser(HfArgumentParser):
    """The parser of a task's flags; what cannot be read is an error to be caught, not the end of the program."""

    def error(self, message: str) -> NoReturn:
        """Refuse the flags.

        Raises:
            InputError: always; its code says whether a name is not known or a value does not fit.
        """
        what, _, near = message.partition(": did you mean ")
        near = near.rstrip("?")
        fix = f"did you mean {near}{self._about(near)}?" if near else f"loopwright explain {self.prog.split()[-1]}"
        if "unknown flag" in what or "unknown name" in what:
            raise InputError("args.unknown", what, fix=fix)
        raise InputError("args.value", what, fix=fix)

    def _about(self, flag: str) -> str:
        action = self._option_string_actions.get(f"--{flag.lstrip('-')}")
        return f" ({action.help} default {action.default})" if action is not None and action.help else ""


def create_parser(task: Task) -> TaskParser:
    """Return the parser of a task's flags, with the task's defaults."""
    parser = TaskParser([task.arguments, TaskTrainingArguments], prog=f"loopwright train {task.name}")
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
