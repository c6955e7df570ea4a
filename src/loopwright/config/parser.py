"""`HfArgumentParser`: dataclasses filled from a command line, from files, or from both.

A value comes from a flag, else from a file given with `--config`, else from the dataclass; `sources` records which.

Example:
    >>> from loopwright.config import TrainingArguments
    >>> parser = HfArgumentParser(TrainingArguments)
    >>> (args,) = parser.parse_args_into_dataclasses(["--learning-rate", "1e-4", "--bf16"])
    >>> args.learning_rate, args.bf16, parser.sources["bf16"], parser.sources["seed"]
    (0.0001, True, 'flag', 'default')
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from loopwright.config import conversion
from loopwright.config.choices import not_among
from loopwright.config.fields import is_hidden
from loopwright.config.files import read_mapping
from loopwright.config.old_names import AcceptsOldNames
from loopwright.errors import ConfigError, LoopwrightError, nearest

CONFIG_FLAG = "--config"

# Metadata of a field that is passed to argparse.
_ARGPARSE_KEYS = ("help", "metavar", "nargs", "const")

# Words that are values, not flags; argparse before Python 3.14 does not know -1e-3.
_NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$", re.IGNORECASE)


def HfArg(
    *,
    aliases: str | list[str] | None = None,
    help: str | None = None,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Declare a field of a dataclass together with its help text and its other flags.

    Args:
        aliases: extra flags, such as "-e".
        default: without it the flag is required.
        kwargs: extra arguments of `dataclasses.field`.
    """
    given = {name: value for name, value in (("aliases", aliases), ("help", help)) if value is not None}
    field: Any = dataclasses.field
    return field(default=default, default_factory=default_factory, metadata={**(metadata or {}), **given}, **kwargs)


class _Field(argparse.Action):
    """Converts and stores a flag's value (False for one that takes none), and records that it was given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        assert isinstance(parser, HfArgumentParser)
        value = parser.take(self, option, False if self.nargs == 0 else values)
        setattr(namespace, self.dest, value.value if isinstance(value, Enum) else value)  # as transformers has it


class HfArgumentParser(argparse.ArgumentParser):
    """Turns fields of dataclasses into flags, and flags into dataclasses.

    You may add your own arguments with `add_argument`: they are returned in a namespace after the dataclasses.

    Args:
        dataclass_types: one or several dataclasses.
        kwargs: arguments of `argparse.ArgumentParser`.

    Attributes:
        sources: the origin of each field's value after parsing: "default", "file" or "flag".
        typed: each flag of the command line by its field: the flag and its value, as they were typed.
        preset: values of fields that rank between the flags and the files, and count as flags.

    Raises:
        ConfigError: two of the dataclasses have a field of the same name, or a type cannot be read.
    """

    def __init__(self, dataclass_types: type | Iterable[type] | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(**kwargs)
        self._negative_number_matcher = _NEGATIVE_NUMBER
        if isinstance(dataclass_types, type):
            dataclass_types = [dataclass_types]
        self.dataclass_types: list[Any] = list(dataclass_types or [])
        self.sources: dict[str, str] = {}
        self.typed: dict[str, tuple[str, str]] = {}
        self.preset: dict[str, Any] = {}
        self._given: dict[str, Any] = {}
        self._hints: dict[str, Any] = {}
        self._choices: dict[str, Sequence[Any]] = {}
        self._owners: dict[str, Any] = {}
        self._config_action: argparse.Action | None = None
        for kind in self.dataclass_types:
            self._add_dataclass(kind)

    def parse_args_into_dataclasses(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: str | os.PathLike[str] | None = None,
        args_file_flag: str | None = None,
    ) -> tuple[Any, ...]:
        """Return the dataclasses, filled from a command line and its files.

        Flags override the values of `--config FILE` (YAML, or JSON if the name ends in .json). It may be given several
        times; later files override earlier ones. An unknown flag ends the program with code 2.

        Args:
            args: the command line; the program's own by default.
            return_remaining_strings: return unknown words as a last value, instead of ending the program.
            look_for_args_file: read default flags from the script's .args file.
            args_filename: read them from this file instead.
            args_file_flag: a flag whose value names such a file too.

        Returns:
            The dataclasses in order, a namespace if you added arguments, and the remaining strings if requested.

        Raises:
            ConfigError: values conflict, or are not supported.
        """
        line = list(sys.argv[1:] if args is None else args)
        line = self._with_args_files(line, look_for_args_file, args_filename, args_file_flag)
        self._add_old_flags()
        config_files, line = self.split_config_files([self._in_full(word) for word in line])
        from_files: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for file in config_files:
            try:
                fields, rest = self.read_values(read_mapping(file), f"{file}: ")
            except ConfigError as error:
                self.fail(error)
            unknown = [name for name in rest if name not in self._own_names()]
            if unknown:
                self.fail(self.unknown_name(unknown[0], f"{file}: "))
            from_files |= fields
            own |= rest
        if not return_remaining_strings:
            # Before parsing, which would report a missing flag rather than a misspelt one.
            self._refuse_unknown_flags(line)
        namespace, remaining = self._parse_line(line, {**from_files, **own})
        outputs = self._fill(from_files, self._given)
        for name in [*self._hints, *(name for kind in self.dataclass_types for name in conversion.old_names_of(kind))]:
            namespace.__dict__.pop(name, None)
        if vars(namespace):
            outputs = (*outputs, namespace)
        if return_remaining_strings:
            return (*outputs, remaining)
        if remaining:
            self.fail(self._unknown_word(remaining))
        return outputs

    def parse_dict(self, args: Mapping[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Return the dataclasses, filled from a dict; a bad value raises a ConfigError.

        So does an unknown key, unless `allow_extra_keys` is True.
        """
        values, unknown = self.read_values(args, "")
        if unknown and not allow_extra_keys:
            raise self.unknown_name(next(iter(unknown)))
        return self._fill(values, {})

    def parse_json_file(self, json_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Return the dataclasses, filled from a JSON file as by `parse_dict`; an unreadable file raises too."""
        return self.parse_dict(read_mapping(json_file, "JSON"), allow_extra_keys)

    def parse_yaml_file(self, yaml_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Return the dataclasses, filled from a YAML file as by `parse_dict`; an unreadable file raises too."""
        return self.parse_dict(read_mapping(yaml_file, "YAML"), allow_extra_keys)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; a flag may have - where its name has _."""
        line = list(sys.argv[1:] if args is None else args)
        self._given, self.typed = {}, {}
        return super().parse_known_args([self._in_full(word) for word in line], namespace)

    def take(self, action: argparse.Action, option: str | None, given: Any) -> Any:
        """Convert the value of a flag, record that it was given, and return it; called by the actions of the fields."""
        name = action.dest
        self.typed[name] = str(option), " ".join(given) if isinstance(given, list) else str(given)
        try:
            read = conversion.convert_text if isinstance(given, str) else conversion.convert
            self._given[name] = self.check_choice(name, read(given, self._hint_of(name)))
        except ConfigError as error:
            error.flag = error.flag or name
            self.fail(error, action)
        return self._given[name]

    def check_choice(self, name: str, value: Any, subject: str = "expected") -> Any:
        """Return a value if it is among the choices of its field, else raise a ConfigError."""
        for each in value if isinstance(value, list) else [value]:
            if name in self._choices and each is not None and each not in self._choices[name]:
                raise not_among(subject, each, self._choices[name], flag=name)
        return value

    def fail(self, error: LoopwrightError, action: argparse.Action | None = None) -> NoReturn:
        """End the program with code 2, as argparse does; override it to raise the error."""
        if action is not None:
            raise argparse.ArgumentError(action, str(error)) from error
        self.error(str(error))

    def _add_dataclass(self, kind: type) -> None:
        title = getattr(kind, "_argument_group_name", None)  # as trl names the groups of its dataclasses
        group = self.add_argument_group(title) if title else self
        hints = conversion.field_types(kind)
        for field in dataclasses.fields(kind):
            if not field.init:
                continue
            if field.name in self._hints:
                names = f"{self._owners[field.name].__name__} and {kind.__name__}"
                raise ConfigError(f"{names} both have a field {field.name!r}: a flag can fill only one, rename one")
            self._hints[field.name] = hints[field.name]
            if "choices" in field.metadata:
                self._choices[field.name] = field.metadata["choices"]
            self._owners[field.name] = kind
            self._add_field(group, field, hints[field.name], getattr(kind, "negates_unset", False))

    def _add_field(self, group: Any, field: Any, hint: Any, negates_unset: bool) -> None:
        given = {key: field.metadata[key] for key in _ARGPARSE_KEYS if key in field.metadata}
        if is_hidden(field):
            given["help"] = argparse.SUPPRESS
        aliases = field.metadata.get("aliases", [])
        aliases = [aliases] if isinstance(aliases, str) else aliases
        default = (False if hint is bool else None) if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        # As in transformers, a bool without a default is False.
        is_required = _has_no_default(field) and hint is not bool
        options = {"default": default, "required": is_required, **_options(hint), **given}
        if field.name in self._choices and "metavar" not in given:
            options["metavar"] = _braced(self._choices[field.name])
        group.add_argument(f"--{field.name}", *aliases, dest=field.name, action=_Field, **options)
        if bool in conversion.members(hint) and (default is True or (default is None and negates_unset)):
            text = argparse.SUPPRESS if is_hidden(field) else f"the same as --{field.name} false"
            options = {"nargs": 0, "default": argparse.SUPPRESS, "help": text}
            group.add_argument(f"--no_{field.name}", dest=field.name, action=_Field, **options)

    def _add_old_flags(self) -> None:
        """Add the old names as hidden flags, unless they are taken; and `--config`."""
        for kind in self.dataclass_types:
            for name, old in conversion.old_names_of(kind).items():
                if f"--{name}" not in self._option_string_actions:
                    options = {**_options(old.hint), "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
                    self.add_argument(f"--{name}", dest=name, action=_Field, **options)
        if CONFIG_FLAG not in self._option_string_actions:
            text = "YAML or JSON file with values of these flags; a flag overrules it."
            self._config_action = self.add_argument(CONFIG_FLAG, default=argparse.SUPPRESS, metavar="FILE", help=text)

    def _with_args_files(self, line: list[str], look_beside_script: bool, filename: Any, flag: str | None) -> list[str]:
        files = []
        if filename:
            files.append(Path(filename))
        elif look_beside_script and sys.argv and Path(sys.argv[0]).name:
            beside = Path(sys.argv[0]).with_suffix(".args")
            files += [beside] if beside.is_file() else []
        if flag:
            named, line = split_off(line, flag)
            files += [Path(name) for name in named if name is not None]
        words = []
        for file in files:
            try:
                words += shlex.split(file.read_text(encoding="utf-8"), comments=True)
            except (OSError, ValueError) as error:
                self.error(f"cannot read flags from {file}: {error}")
        return words + line

    def split_config_files(self, line: list[str]) -> tuple[list[str], list[str]]:
        """Return the files of `--config`, and the line without them, unless `--config` is a user's own flag."""
        if self._option_string_actions[CONFIG_FLAG] is not self._config_action:
            return [], line
        files, rest = split_off(line, CONFIG_FLAG)
        if None in files:
            self.error(f"argument {CONFIG_FLAG}: expected one argument")
        return [file for file in files if file is not None], rest

    def _parse_line(self, line: list[str], from_files: Mapping[str, Any]) -> tuple[argparse.Namespace, list[str]]:
        """Parse flags over the values of files, which satisfy required flags too."""
        covered = [action for action in self._actions if action.required and action.dest in from_files]
        for action in covered:
            action.required = False
        try:
            namespace, remaining = self.parse_known_args(line, argparse.Namespace(**from_files))
        finally:
            for action in covered:
                action.required = True
        return namespace, remaining

    def _in_full(self, word: str) -> str:
        """Return a word with its flag in full and _ for -; an unknown flag stays, argparse reports an ambiguous one."""
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        name = "--" + name[2:].replace("-", "_")
        meant = self._meant_by(name)
        return (meant[0] if len(meant) == 1 else name) + equals + value if meant else word

    def _meant_by(self, name: str) -> list[str]:
        """Return the flags that a name may stand for: its own, else those it abbreviates, without old names."""
        flags = self._option_string_actions
        if name in flags or not self.allow_abbrev or name == "--":
            return [name] if name in flags else []
        found = {action: flag for flag, action in flags.items() if flag.startswith(name)}
        return [flag for action, flag in found.items() if not isinstance(action, _Field) or action.dest in self._hints]

    def _own_names(self) -> set[str]:
        """Return the names of arguments that are not fields: those added by hand."""
        others = (action for action in self._actions if not isinstance(action, _Field))
        return {action.dest for action in others if action is not self._config_action}

    def read_values(self, values: Mapping[str, Any], place: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the values of fields, with their types and current names, and the values of unknown names."""
        known, unknown = {}, {}
        for key, value in values.items():
            name = key.replace("-", "_")
            if self._hint_of(name) is None:
                unknown[key] = value
            else:
                known[name] = conversion.convert_named(f"{place}{key}", value, self._hint_of(name))
        return self._renamed(known), unknown

    def _hint_of(self, name: str) -> Any:
        """Return the type of a field, also by an old name; None if there is no such field."""
        if name in self._hints:
            return self._hints[name]
        olds = (conversion.old_names_of(kind).get(name) for kind in self.dataclass_types)
        return next((old.hint for old in olds if old is not None), None)

    def _renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values under their current names; an old name that is a field of another dataclass stays."""
        renamed = {name: value for name, value in values.items() if name in self._hints}
        for kind in self.dataclass_types:
            if isinstance(kind, AcceptsOldNames):
                old = {name: values[name] for name in kind.old_names() if name in values and name not in renamed}
                fields = {name: value for name, value in renamed.items() if self._owners[name] is kind}
                renamed |= kind.translate_old_names({**fields, **old})
        return renamed

    def _fill(self, from_files: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[Any, ...]:
        flags = {**self.preset, **self._renamed(flags)}
        defaults = {name: value for name, value in self._defaults.items() if name in self._hints}
        values = {**defaults, **from_files, **flags}
        self.sources = {
            name: "flag" if name in flags else "file" if name in from_files else "default" for name in self._hints
        }
        outputs = []
        for kind in self.dataclass_types:
            inputs = {name: value for name, value in values.items() if self._owners[name] is kind}
            for field in dataclasses.fields(kind):
                if field.init and field.name not in inputs and _has_no_default(field):
                    if self._hints[field.name] is not bool:
                        raise ConfigError(f"{kind.__name__} needs a value of {field.name}, which has no default")
                    inputs[field.name] = False
            outputs.append(kind(**inputs))
        return tuple(outputs)

    def unknown_name(self, name: str, place: str = "") -> LoopwrightError:
        """Return the error about an unknown name in a file or a dict."""
        near = nearest(name, [*self._hints, *self._own_names()])
        return ConfigError(f"{place}unknown name {name!r}", flag=name, nearest=near)

    def unknown_flag(self, flag: str) -> LoopwrightError:
        """Return the error about an unknown flag."""
        actions = self._option_string_actions.items()
        known = [option for option, action in actions if action.help != argparse.SUPPRESS]
        near = nearest(flag.replace("-", "_"), known) or nearest(flag, known)
        return ConfigError(f"unknown flag {flag}", flag=flag, nearest=near)

    def unexpected(self, word: str) -> LoopwrightError:
        """Return the error about a word that belongs to no flag."""
        return ConfigError(f"unexpected value {word!r}", given=word)

    def _refuse_unknown_flags(self, line: list[str]) -> None:
        for word in line[: line.index("--")] if "--" in line else line:
            flag = self._in_full(word).partition("=")[0]
            # argparse takes a word with a space in it for a value.
            if flag.startswith("--") and " " not in word and not self._meant_by(flag):
                self.fail(self._unknown_word([word]))

    def _unknown_word(self, words: list[str]) -> LoopwrightError:
        flags = [flag for flag in (word.partition("=")[0] for word in words) if flag.startswith("-") and len(flag) > 1]
        return self.unknown_flag(flags[0]) if flags else self.unexpected(words[0])


def _has_no_default(field: Any) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _options(hint: Any) -> dict[str, Any]:
    allowed = conversion.members(hint)
    lists = [member for member in allowed if conversion.is_list(member)]
    if lists:
        return {"nargs": "+", "metavar": _metavar((get_args(lists[0]) or (str,))[0])}
    options = {"metavar": _metavar(allowed[0] if allowed else str)}
    return {**options, "nargs": "?", "const": True} if allowed == [bool] else options


def _metavar(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return _braced(get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _braced(member.value for member in hint)
    kind = get_origin(hint) or hint
    return {dict: "JSON", str: "TEXT"}.get(kind, getattr(kind, "__name__", "value").upper())


def _braced(choices: Iterable[Any]) -> str:
    return "{" + ",".join(map(str, choices)) + "}"


def split_off(argv: Sequence[str], *flags: str) -> tuple[list[str | None], list[str]]:
    """Return the values of these flags in a command line, None for one without, and the command line without them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    spellings = dict.fromkeys(spelling for flag in flags for spelling in (flag, f"--{flag[2:].replace('_', '-')}"))
    parser.add_argument(*spellings, dest="values", action="append", nargs="?", default=[])
    found, rest = parser.parse_known_args(list(argv))
    return found.values, rest
