"""The command `loopwright` and its alias `lw`: one verb, then its arguments.

`main` returns the exit code: 0 done, 1 a bug, 2 your input, 3 out of memory, 4 diverged, 65 no valid checkpoint,
74 cannot write, 75 stopped early and resumable, 130 Ctrl-C and saved. Importing this does not import torch.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType

__all__ = ["main"]

# For each verb: the module of this package that defines it, and its help line.
VERBS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "demo": ("train", "[TASK]              train something now, offline; no TASK: list the demos"),
        "train": ("train", "TASK --data D ...   train a model; also: train cfg.yaml, train RUN (the same again)"),
        "check": ("train", "TASK ...            everything but the training; --files for the data alone"),
        "find-lr": ("find_lr", "TASK --data D ...   the loss over the learning rate, and a suggestion"),
        "resume": ("train", "RUN [--flags]       go on with a run; RUN is a folder, an id, or last"),
        "launch": ("launch", "-n N -- VERB ...    a verb, or a script, on several processes"),
        "evaluate": ("predict", "RUN [--data FILE]   the metrics of a run's best model"),
        "predict": ("predict", "RUN INPUT...        predictions for texts, a csv or jsonl file, or - for stdin"),
        "export": ("predict", "RUN --to FOLDER     the best model as a folder; its README.md says how to open it"),
        "report": ("report", "RUN [RUN ...]       one HTML page about a run, or several; --open shows it"),
        "watch": ("report", "[RUN]               the page of a run on localhost, while it goes on"),
        "compare": ("report", "RUN RUN ...         several runs side by side: curves, settings, data, samples"),
        "runs": ("runs", "                    the runs so far"),
        "stop": ("runs", "RUN                 end a run in order at its next update, saved"),
        "verify": ("runs", "RUN                 check every byte of a run's checkpoints"),
        "tasks": ("info", "                    the tasks"),
        "explain": ("info", "TASK | errors       data, flags and an example of a task; or all error codes"),
        "doctor": ("info", "                    what is installed, and what this machine has"),
    }
)
_ALIASES = {"eval": "evaluate"}
_INTERRUPTED = 130
_GIVEN = 20  # width of the argument column in the lines above


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's own, and return its exit code."""
    from loopwright.cli.exit_codes import guarded

    _replace_closed_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        return guarded(_help, words)
    if words[0] == "--version":
        return guarded(_version, words)
    verb = _ALIASES.get(words[0], words[0])
    if verb not in VERBS:
        near = get_close_matches(verb, [*VERBS, *_ALIASES], n=1)
        hint = f"did you mean {near[0]}?" if near else f"the verbs are {', '.join(VERBS)}"
        return guarded(_refuse_verb(verb, hint), words)
    module = importlib.import_module(f"loopwright.cli.{VERBS[verb][0]}")
    code = guarded(getattr(module, verb.replace("-", "_")), words[1:])
    if argv is None and code == _INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # everything is printed: ignore another Ctrl-C during exit
    return code


def _replace_closed_streams() -> None:
    """Redirect closed streams to /dev/null; some schedulers close them."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives


def _refuse_verb(verb: str, hint: str) -> Callable[[list[str]], int]:
    from loopwright.errors import InputError

    def no_verb(words: list[str]) -> int:
        raise InputError("args.unknown", f"{verb!r} is not a verb", fix=hint)

    return no_verb


def _version(words: list[str]) -> int:
    from loopwright.version import package_version

    _print(f"loopwright {package_version()}")
    return 0


def _help(words: list[str]) -> int:
    from loopwright.cli.help_text import hanging

    _print("usage: lw VERB ...   (loopwright is the same)\n")
    for verb, (_, text) in VERBS.items():
        given, about = text[:_GIVEN], text[_GIVEN:]
        _print(hanging(f"  {verb:<9} {given}", about))
    _print("\n" + hanging("  ", "lw VERB --help says more; lw explain TASK lists every flag of a task."))
    return 0 if words else 2


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
