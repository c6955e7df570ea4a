"""Find the verb of a command line, and run it.

`main` returns the exit code: 0 done, 1 a bug, 2 your input, 3 out of memory, 4 diverged, 65 no valid checkpoint,
74 cannot write, 75 stopped early and resumable, 130 Ctrl-C and saved. The module of a verb is imported when it is run,
and parses what follows the verb: its flags may depend on a run.
"""

from __future__ import annotations

import functools
import importlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from types import MappingProxyType

from loopwright.cli.exit_codes import INTERRUPTED, guarded
from loopwright.cli.help_text import hanging
from loopwright.config import start_clock
from loopwright.config.safe_text import SafeStream
from loopwright.errors import InputError, nearest

# For each verb: the module of this package that defines it, its arguments, and its help line.
VERBS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "demo": ("train", "[TASK]", "train on bundled data, offline; without TASK: list the demos"),
        "train": ("train", "TASK --data D ...", "train a model; also: train cfg.yaml, train RUN (the same again)"),
        "check": ("train", "TASK ...", "do everything except train; --files checks only the data"),
        "find-lr": ("train", "TASK --data D ...", "plot the loss over the learning rate, and suggest a rate"),
        "resume": ("train", "RUN [--flags]", "resume a run; RUN is a folder, an id, or last"),
        "launch": ("launch", "-n N -- VERB ...", "run a verb or a script on several processes"),
        "evaluate": ("predict", "RUN [--data FILE]", "print the metrics of a run's best model"),
        "predict": ("predict", "RUN INPUT...", "predict for texts, a csv or jsonl file, or - for stdin"),
        "chat": ("chat", "RUN", "talk with a chat model; its answers are streamed"),
        "export": ("predict", "RUN --to FOLDER", "export the best model to a folder, with a README.md"),
        "report": ("report", "RUN [RUN ...]", "write an HTML report of a run, or of several; --open shows it"),
        "watch": ("report", "[RUN]", "serve a live report of a run on localhost"),
        "compare": ("report", "RUN RUN ...", "compare several runs: curves, settings, data, samples"),
        "runs": ("runs", "", "list the runs"),
        "stop": ("runs", "RUN", "stop a run gracefully after its next update; its state is saved"),
        "verify": ("runs", "RUN", "verify every byte of a run's checkpoints"),
        "tasks": ("info", "", "list the tasks"),
        "explain": ("info", "TASK | errors", "describe the data and flags of a task, or list all error codes"),
        "doctor": ("info", "", "show what is installed, and the hardware of this machine"),
    }
)
ALIASES = {"eval": "evaluate"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's own, and return its exit code."""
    if argv is None:
        start_clock.collect_rarely()
    _replace_closed_streams()
    start_clock.begin(start_clock.process_start() if argv is None else None)
    with redirect_stdout(SafeStream(sys.stdout)), redirect_stderr(SafeStream(sys.stderr)):
        code = guarded(*_find(list(sys.argv[1:] if argv is None else argv)))
    if argv is None and code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # everything is printed: ignore another Ctrl-C during exit
    return code


def _find(argv: list[str]) -> tuple[Callable[[list[str]], int], list[str]]:
    if argv[:1] == ["help"] and len(argv) > 1:
        argv = [*argv[1:], "--help"]
    first = argv[0] if argv else ""
    if first in ("", "-h", "--help", "help"):
        return _help, argv[1:]
    if first in ("--version", "version"):
        return _version, argv[1:]
    verb = ALIASES.get(first, first)
    if verb not in VERBS:
        return functools.partial(no_verb, first), argv[1:]
    module = importlib.import_module(f"loopwright.cli.{VERBS[verb][0]}")
    return getattr(module, verb.replace("-", "_")), argv[1:]


def _replace_closed_streams() -> None:
    """Redirect closed streams to /dev/null; some schedulers close them."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives


def no_verb(verb: str, argv: list[str]) -> int:
    known = [*VERBS, "version", "help"]
    near = nearest(verb, [*known, *ALIASES])
    fix, saw = f"lw {shlex.join([near, *argv])}" if near else "lw --help", [f"the verbs are {', '.join(known)}"]
    raise InputError("args.unknown", f"{verb!r} is not a verb", saw=saw, fix=fix)


def _version(argv: list[str]) -> int:
    from loopwright.api import package_version

    sys.stdout.write(f"loopwright {package_version()}\n")
    return 0


def _help(argv: list[str]) -> int:
    lines = [hanging(f"  {verb:<9} {arguments:<20}", text) for verb, (_, arguments, text) in VERBS.items()]
    text = "lw help VERB describes a verb, lw explain TASK lists the flags of a task, lw version prints the version."
    end = hanging("  ", text)
    sys.stdout.write("\n".join(["usage: lw VERB ...   (loopwright is the same)\n", *lines, "", end, ""]))
    return 0
