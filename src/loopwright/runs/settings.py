"""Merge flags, files and a task's defaults into the settings of a run, each with its source. No torch."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from loopwright.config import HfArgumentParser
from loopwright.config.config_file import check_end, marked
from loopwright.config.fields import is_hidden
from loopwright.config.files import plain, read_mapping
from loopwright.config.secrets import is_secret, without_secrets
from loopwright.errors import ConfigError, InputError, LoopwrightError, nearest
from loopwright.run_folder import RunFolder, write_atomically
from loopwright.runs.kept_config import DIGEST, digest_of
from loopwright.tasks import arguments
from loopwright.tasks.class_options import label_map
from loopwright.tasks.consent import trusts
from loopwright.tasks.pretrained import CONSENTS

if TYPE_CHECKING:
    from loopwright.tasks.base import Task

# Settings that accept "auto": the run finds their values before its first update.
AUTOMATIC = ("learning_rate", "per_device_train_batch_size")
_AUTO = "auto"
_REPEATED = ("label_map", "drop_labels")  # flags that may be given several times
_MAPPED = ("label_map", "class_weights")  # flags that may be a mapping in Python and in files
# The default for a model with random weights: the tasks' own defaults are for fine-tuning.
SCRATCH_LEARNING_RATE = 1e-3
LENGTHS = ("max_steps", "num_train_epochs")  # replaced by `--time`
# Known from the run folder, or valid for one call only.
_NOT_KEPT = frozenset(
    {"output_dir", "task", "allow_changed_data", "allow_changed_model", "profile", "seeds", *CONSENTS}
)
_PATHS = ("model", "data", "train_file", "validation_file", "test_file")
_SHORT_NAMES = (
    "Short names: --lr for --learning_rate, --epochs for --num_train_epochs, --batch for "
    "--per_device_train_batch_size, --out for --output_dir. --no_NAME switches off a flag that is on or unset. "
    "--lr and --batch accept auto. The flags --check, --print_config, --quiet, --plain and --json are described by "
    "lw train --help."
)


@dataclass
class Settings:
    """The settings of a run; a source is "flag", "file", "task", "default", "machine", "data" or, if found, "auto"."""

    args: arguments.TaskArguments
    training: arguments.TaskTrainingArguments
    sources: dict[str, str]
    given: frozenset[str] = frozenset()  # the names of the settings that this call gives, by a flag or a keyword
    left_out: tuple[str, ...] = ()  # trackers of a run that the user has not allowed here
    foreign: RunFolder | None = None  # the run that the settings are from, if the user neither created nor trusts it
    module: Any = None  # the model, if a module was passed in Python; it is not written to any file

    def values(self) -> dict[str, Any]:
        found = {}
        for owner in (self.args, self.training):
            for field in dataclasses.fields(owner):
                if field.init and not is_hidden(field) and not is_secret(field.name):
                    found[field.name] = plain(getattr(owner, field.name))
        return {**found, **dict.fromkeys(self.args.auto, _AUTO)}

    def choose(self, name: str, value: Any) -> None:
        """Set a value that the run had to find; called for each name in `args.auto` once it is found."""
        setattr(self.training, name, value)
        self.sources[name] = _AUTO
        self.args.auto.remove(name)

    def is_given(self, name: str) -> bool:
        return self.sources.get(name) in ("flag", "file")

    def is_planned_by_time(self, is_begun: bool) -> bool:
        """Whether `--time` must be planned; a run that has begun keeps its number of updates without a new time."""
        is_known = is_begun and "time" not in self.given and self.training.max_steps > 0
        return self.args.time is not None and not is_known

    def lines(self) -> list[str]:
        values = {"task": self.args.task, **self.values()}
        return [
            without_secrets(f"{name}: {json.dumps(value)}  # {self.sources.get(name, 'flag')}")
            for name, value in values.items()
            if name not in _NOT_KEPT or name == "task"
        ]

    def write(self, run: RunFolder) -> None:
        write_atomically(run.config, marked(self.lines()))
        sources = {name: self.sources.get(name, "flag") for name in self.values() if name not in _NOT_KEPT}
        run.record(sources=sources, **{DIGEST: digest_of(run)})


class FlagHelp(argparse.ArgumentDefaultsHelpFormatter):
    """Help that shows the default of a flag if it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_created = action.dest == "output_dir"  # in the runs folder if not given
        return action.help if is_created or action.default in (None, []) else super()._get_help_string(action)


class TaskParser(HfArgumentParser):
    """The parser of a task's flags; it raises instead of exiting, and records in `auto` what is set to "auto"."""

    def __init__(self, dataclass_types: list[type], **kwargs: Any) -> None:
        self.auto: dict[str, str] = {}
        self.replaced: dict[str, Any] = {}  # values of the preset, such as a demo's, in whose place "auto" is given
        self._repeated: dict[str, list[str]] = {}
        self.config_files: list[str] = []
        # An abbreviated flag could change its meaning, or become an error, when a field is added.
        super().__init__(dataclass_types, allow_abbrev=False, **kwargs)
        olds = {name: old for kind in self.dataclass_types for name, old in kind.old_names().items()}
        self._full_names = {name: str(old.new) for name, old in olds.items()}
        self._short_names = {name: str(old.new) for name, old in olds.items() if isinstance(old, arguments.ShortName)}

    def take(self, action: argparse.Action, option: str | None, given: Any) -> Any:
        name = self._full_names.get(action.dest, action.dest)
        if name in AUTOMATIC and given == _AUTO:
            self.auto[name] = "flag"
            self._keep_preset()
            return self.get_default(name)
        if name in _REPEATED:
            given = self._repeated[name] = [*self._repeated.get(name, ()), *given]
        if name == "time":
            self.preset = {name: value for name, value in self.preset.items() if name not in LENGTHS}
        return super().take(action, option, given)

    def read_values(self, values: Mapping[str, Any], place: str) -> tuple[dict[str, Any], dict[str, Any]]:
        names = {key: self._full_names.get(key.replace("-", "_"), key.replace("-", "_")) for key in values}
        values = {
            key: [json.dumps(value)] if names[key] in _MAPPED and isinstance(value, Mapping) else value
            for key, value in values.items()
        }
        auto = {key: names[key] for key, value in values.items() if value == _AUTO and names[key] in AUTOMATIC}
        fields, unknown = super().read_values({key: values[key] for key in values if key not in auto}, place)
        for name, value in fields.items():
            self.check_choice(name, value, f"{place}{name} must be")
            self.auto.pop(name, None)
        self.auto |= dict.fromkeys(auto.values(), "file" if place else "flag")
        return fields, unknown

    def set_preset(self, values: Mapping[str, Any], base: Mapping[str, Any]) -> None:
        """Set values that count as flags, but rank below the command line and above `base`; None means not given."""
        for layer in (base, values):
            given = {name: value for name, value in layer.items() if value is not None}
            try:
                fields, unknown = self.read_values(given, "")
            except ConfigError as error:
                self.fail(error)
            if unknown:
                self.fail(self.unknown_name(next(iter(unknown))))
            dropped = LENGTHS if "time" in fields else ()
            self.preset = {**{name: self.preset[name] for name in self.preset if name not in dropped}, **fields}
        self._keep_preset()

    def _keep_preset(self) -> None:
        self.replaced |= {name: self.preset.pop(name) for name in self.auto if name in self.preset}

    def split_config_files(self, line: list[str]) -> tuple[list[str], list[str]]:
        self.config_files, rest = super().split_config_files(line)
        for file in self.config_files:
            check_end(Path(file))
        return self.config_files, rest

    def help_of(self, name: str) -> str:
        if name in self._full_names:
            return f"Another name of --{self._full_names[name]}."
        return str(self._option_string_actions[f"--{name}"].help)

    def error(self, message: str) -> NoReturn:
        lacking = re.match(r"argument (?:\S+/)?(\S+): expected .*argument", message)
        action = self._option_string_actions.get(lacking[1]) if lacking else None
        if lacking is None or action is None:
            raise InputError("args.value", message, fix=self._explain)
        fix = self._without(lacking[1], self._full_names.get(action.dest, action.dest))
        raise InputError("args.value", f"{lacking[1]} needs a value", fix=fix, flag=lacking[1])

    def _without(self, flag: str, name: str) -> str:
        """Return the fix that gives a flag its default; some defaults depend on the model and the data."""
        default = None if name in ("learning_rate", "num_train_epochs") else plain(self.get_default(name))
        return f"leave out {flag}" if default in (None, []) else f"{flag} {default}"

    def fail(self, error: LoopwrightError, action: argparse.Action | None = None) -> NoReturn:
        if isinstance(error, InputError):
            raise error
        typed = self.as_typed(error) if isinstance(error, ConfigError) else error
        raise InputError(
            "args.value", typed.what, saw=typed.saw, fix=typed.fix or self._explain, flag=typed.flag
        ) from error

    def as_typed(self, error: ConfigError) -> ConfigError:
        """Return an error about a value with the flag as typed and a fix; unchanged if no flag gave the value."""
        typed = {self._full_names.get(name, name): each for name, each in self.typed.items()}
        name = self._full_names.get(error.flag or "", error.flag or "")
        if name not in typed:
            return error
        flag, given = typed[name]
        what = f"{flag} {given}: {error.what}"
        fix = self._without(flag, name)
        meant = error.nearest or (nearest(given, error.choices) or error.choices[0] if error.choices else None)
        if meant is not None:  # of several values, only the wrong one is replaced
            fix = f"{flag} {' '.join(meant if word == str(error.given) else word for word in given.split()) or meant}"
        return type(error)(what, code="args.value", fix=fix, flag=flag, given=given, choices=error.choices)

    def unknown_flag(self, flag: str) -> LoopwrightError:
        near = self._nearest(flag)
        fix = f"--{near} instead of {flag}" if near else f"leave out {flag}"
        saw = [f"--{near}: {self._description(near)}" if near else f"{self._explain} lists the flags"]
        return InputError("args.unknown", f"unknown flag {flag}", saw=saw, fix=fix, flag=flag)

    def unknown_name(self, name: str, place: str = "") -> LoopwrightError:
        near = self._nearest(name)
        fix = f"{near} instead of {name}" if near else f"leave out {name}"
        saw = [f"{near}: {self._description(near)}" if near else f"{self._explain} lists the names"]
        return InputError("args.unknown", f"{place}unknown name {name!r}", saw=saw, fix=fix, flag=name)

    def unexpected(self, word: str) -> LoopwrightError:
        what = f"unexpected value {word!r}"
        if Path(word).exists():
            fix = f"--data {shlex.quote(word)} instead of {shlex.quote(word)}"
            return InputError("args.value", f"{what}: data is given by a flag", fix=fix)
        return InputError("args.value", what, fix=f"leave out {shlex.quote(word)}")

    @property
    def _explain(self) -> str:
        return f"lw explain {self.prog.split()[-1]}"

    def _nearest(self, name: str) -> str | None:
        shown = [option for option, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        known = [*(option.removeprefix("--") for option in shown), *self._short_names]
        return nearest(name.lstrip("-").replace("-", "_"), known)

    def _description(self, name: str) -> str:
        if name in self._short_names:
            return f"short for --{self._short_names[name]}"
        action = self._option_string_actions.get(f"--{name}")
        if action is None or not action.help:
            return ""
        default = "" if action.default in (None, []) else f" default {action.default}"
        return f"{action.help}{default}"


def create_parser(task: Task) -> TaskParser:
    parser = TaskParser(
        [task.arguments, arguments.TaskTrainingArguments],
        prog=f"lw train {task.name}",
        usage=f"lw train {task.name} --data FILE [--model MODEL] [--flags]",
        description=_SHORT_NAMES,
        formatter_class=FlagHelp,
        epilog=f"example: {task.example}",
    )
    parser.set_defaults(**task.defaults, task=task.name)
    for action in parser._actions:  # argparse has no public list of them
        if action.dest in arguments.NO_EFFECT or action.dest in arguments.NOT_FOLLOWED:
            action.help = argparse.SUPPRESS
        action.help = arguments.OWN_HELP.get(action.dest, action.help)
    return parser


def settle(
    task: Task,
    given: Sequence[str] | Mapping[str, Any] = (),  # the flags of a command line, or values by name
    config: str | Path | None = None,  # a YAML or JSON file that `given` overrides, such as a run's config.yaml
    *,
    base: Mapping[str, Any] | None = None,  # values by name that a command line overrides
    has_module: bool = False,
) -> Settings:
    """Return the settings that a call asks for."""
    parser = create_parser(task)
    is_named = isinstance(given, Mapping)
    line = [*(["--config", str(config)] if config is not None else []), *([] if is_named else given)]
    try:
        parser.set_preset(given if isinstance(given, Mapping) else {}, base or {})
        args, training = parser.parse_args_into_dataclasses(line, look_for_args_file=False)
    except ConfigError as error:
        raise parser.as_typed(error) from error
    names = {name for name, source in parser.sources.items() if source == "flag"}
    for name in CONSENTS:
        if getattr(args, name) and name not in names:
            what = f"{name} is set in a file, but only a flag of the call itself can allow it"
            raise InputError("args.value", what, fix=f"--{name}   or   remove {name} from the file")
    for name, source in parser.auto.items():
        if source == "flag" and name in names:
            raise ConfigError(f"{name} is given as 'auto' and as {getattr(training, name)!r}: give only one of them")
    auto = {name: parser.auto[name] for name in AUTOMATIC if name in parser.auto and name not in names}
    sources = {
        name: "task" if source == "default" and name in task.defaults else source
        for name, source in parser.sources.items()
    }
    if args.task != task.name:
        raise ConfigError(f"the settings are of the task {args.task}, not of {task.name}: name one of them")
    for file in parser.config_files:
        kept = _recorded_sources(Path(file), args)
        sources |= {name: kept[name] for name, source in sources.items() if source == "file" and name in kept}
    if args.model is None and not has_module and parser.sources["learning_rate"] == "default":
        training.learning_rate, sources["learning_rate"] = SCRATCH_LEARNING_RATE, "task"
    for name, value in parser.replaced.items():
        setattr(training, name, value)
    sources |= auto
    args.auto = list(auto)
    args.label_names = training.label_names or []
    if any(word.endswith(".json") for word in args.label_map):  # a file may change, or not be here on a resume
        args.label_map = [json.dumps(label_map(args.label_map))]
    _settle_length(parser, task, args, training, sources)
    for name in _PATHS:
        value = getattr(args, name)
        if value is not None and str(value).strip() and os.path.exists(Path(value).expanduser()):
            setattr(args, name, str(Path(value).expanduser().absolute()))
    if "overlays" not in names and hasattr(args, "overlays"):
        args.overlays = None  # a file does not choose a folder to write to
    given_values = [getattr(args, name, None) for name in names]
    args.typed = [value for value in given_values if isinstance(value, str)]
    runs = [run for run in map(_run_of, map(Path, parser.config_files)) if run is not None]
    foreign = next((run for run in runs if not trusts(run, args.trust_run)), None)
    left_out: tuple[str, ...] = ()
    if "report_to" not in names and foreign is not None:
        left_out, training.report_to = tuple(training.report_to or ()), []
    if "output_dir" not in names and runs:  # nor does a run choose the folder of another
        training.output_dir, sources["output_dir"] = parser.get_default("output_dir"), "default"
    return Settings(args, training, sources, frozenset(names), left_out, foreign)


def _recorded_sources(config: Path, args: arguments.TaskArguments) -> dict[str, str]:
    """Return the sources of the values in a run's config.yaml; empty for another file.

    A run that has recorded none is from an earlier version: if it has a time, its length came from that.
    """
    run = _run_of(config)
    if run is None or config.name != run.config.name:
        return {}
    earlier = {} if args.time is None else dict.fromkeys(LENGTHS, _AUTO)
    return run.metadata.get("sources") or earlier


def _run_of(config: Path) -> RunFolder | None:
    """Return the run that a settings file belongs to: config.yaml in its folder, or a copy in a checkpoint."""
    folders = (folder for folder in (config.parent, *config.absolute().parents[1:3]) if (folder / "run.json").is_file())
    found = next(folders, None)
    return None if found is None else RunFolder(found)


def _settle_length(parser: TaskParser, task: Task, args: Any, training: Any, sources: dict[str, str]) -> None:
    """Resolve a time against a number of updates or epochs; a flag overrides a file."""
    if args.time is None:
        return
    is_flag = parser.sources["time"] == "flag"
    lengths = [name for name in LENGTHS if getattr(training, name) > 0]
    by_flag = [name for name in lengths if parser.sources[name] == "flag"]
    in_file = [name for name in lengths if parser.sources[name] == "file" and sources[name] in ("flag", "file")]
    for name in by_flag if is_flag else [] if by_flag else in_file:
        flag = "--epochs" if name == "num_train_epochs" else f"--{name}"
        what = f"--time {args.time} and {flag} {getattr(training, name):g}: both set the length of the run"
        raise InputError("args.value", what, fix=f"leave out {flag}   or   leave out --time", flag=flag)
    if by_flag:
        args.time, sources["time"] = None, "flag"
    for name in LENGTHS if is_flag or by_flag else ():
        if is_flag or sources[name] == _AUTO:
            setattr(training, name, parser.get_default(name))
            sources[name] = "task" if name in task.defaults else "default"


def check_trackers(report_to: Sequence[str] | None) -> None:
    if not report_to:
        return
    from loopwright.engine.trackers import PACKAGES, is_installed

    for name in [report_to] if isinstance(report_to, str) else report_to:
        if name in ("all", "none"):
            continue
        if name not in PACKAGES:
            near = nearest(name, (*PACKAGES, "all"))
            what = f"--report_to {name}: there is no such tracker"
            fix = f"--report_to {near or 'none'}"
            raise InputError("args.value", what, saw=[f"known trackers: {', '.join(PACKAGES)}, all, none"], fix=fix)
        if not is_installed(name):
            package = PACKAGES[name][0]
            what = f"--report_to {name} needs the package {package}, which is not installed"
            raise InputError("install.extra", what, fix=f"pip install {package}   or   --report_to none")


def task_of(config: str | Path) -> str | None:
    check_end(Path(config))
    named = read_mapping(config).get("task")
    return None if named is None else str(named)
