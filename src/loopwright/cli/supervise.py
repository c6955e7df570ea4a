"""`--supervise`: train in a child process, and restart it from its last checkpoint when it dies.

The supervisor is its own standby: once the run trains, it imports what the run has imported, and a restart is a fork.
It creates no tensor and starts no thread, so a fork is safe. What it costs is the memory of the imports, which the
process that trains shares with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from loopwright.api import EventLines
from loopwright.cli.exit_codes import DONE, INTERRUPTED, PREEMPTED, TOGETHER, keep_search_path, words_for_resuming
from loopwright.cli.parser import VerbParser
from loopwright.errors import InputError, LoopwrightError
from loopwright.run_folder import find_run
from loopwright.run_folder.parent import BEGUN_VARIABLE, SUPERVISED_VARIABLE, end_with_parent

_MOST_RESTARTS = 5  # without a new update
_LOOK_SECONDS = 0.25
_FORWARDED = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
SUPERVISE_FLAGS = ("--supervise", "--no_standby", "--no-standby")


def add_supervise(parser: VerbParser) -> None:
    parser.add_argument("--supervise", action="store_true")
    parser.add_argument("--no_standby", "--no-standby", action="store_true")


def supervise(asked: Namespace, folder: Path, first: Sequence[str], again: Sequence[str] | None = None) -> int:
    """Run a command line that trains in a folder; after a death run `again`, by default one that resumes the run."""
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if not is_alone or not hasattr(os, "fork"):
        what, saw = "--supervise is for one process on Linux or macOS", ["lw launch --max-restarts 3 restarts several"]
        raise InputError("args.value", what, saw=saw, fix="leave out --supervise", flag="--supervise")
    again = again or ["resume", str(folder), *words_for_resuming(first)]
    return _Supervisor(asked, folder).run(first, again)


def _wait_for(file: Any) -> None:
    """Wait until a file can be read. A signal that arrives just before is handled soon, not when the wait is over."""
    while not select.select([file], [], [], _LOOK_SECONDS)[0]:
        pass


class _Supervisor:
    def __init__(self, asked: Namespace, folder: Path) -> None:
        self._folder = folder.absolute()  # otherwise a run whose id begins like it may be found
        self._asked = asked
        # Modules that are still to be imported, None if unknown. Outside Linux many libraries do not survive a fork.
        self._imports: list[str] | None = None if sys.platform == "linux" and not asked.no_standby else []
        self._child: int | None = None
        self._signal: int | None = None
        self._handlers: dict[int, Any] = {}  # those that were replaced

    def run(self, first: Sequence[str], again: Sequence[str]) -> int:
        """Return the exit code of the last process; in a process that trains, its own."""
        os.environ[BEGUN_VARIABLE] = str(time.time())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, the kernel keeps no exit code
        furthest, failures, argv = self._update(), 0, first
        while self._signal is None:
            with self._forwarding():
                code = self._train(argv, furthest)
            if self._child is None or code == DONE or code in TOGETHER or self._signal is not None:
                return code if code >= 0 else 128 - code
            reached = self._update()
            failures = 0 if reached > furthest else failures + 1
            furthest = max(reached, furthest)
            # An error in words, before anything new was done, would only be repeated.
            if failures > (_MOST_RESTARTS if code < 0 else 0):
                if code < 0:
                    self._note(f"gave up: {_end_of(code)}, {failures} times without a new update", code, furthest)
                return code if code >= 0 else 128 - code
            self._note(f"{_end_of(code)} after step {reached:,}; restarting from the last checkpoint", code, reached)
            with contextlib.suppress(InputError):  # it died before it had a folder
                find_run(self._folder)
                argv = again
        return INTERRUPTED if self._signal == signal.SIGINT else PREEMPTED

    def _train(self, argv: Sequence[str], furthest: int) -> int:
        parent, (reading, writing) = os.getpid(), os.pipe()
        has_cuda = "torch.cuda" in sys.modules and sys.modules["torch.cuda"].is_initialized()
        has_threads = threading.active_count() > 1 or has_cuda  # one of the imports has started it
        sys.stdout.flush()
        self._child = os.fork() or None
        if self._child is None:
            os.close(reading)
            self._begin_child(parent)
            if has_threads:  # a fork of them is only good for a fresh start
                keep_search_path()
                os.execv(sys.executable, [sys.executable, "-m", "loopwright", *argv])
            return self._run_child(argv, furthest, writing)
        os.close(writing)
        if self._signal is not None:  # received just before
            os.kill(self._child, self._signal)
        sent = b""
        with open(reading, "rb", buffering=0) as pipe:
            while self._imports is None and not sent.endswith(b"\n"):
                _wait_for(pipe)
                if not (part := pipe.read(1 << 16)):
                    break
                sent += part
        with contextlib.suppress(ValueError):  # empty or cut off if the process ends first
            self._imports = json.loads(sent) if self._imports is None else self._imports
        self._import()
        if hasattr(os, "pidfd_open"):
            with open(os.pidfd_open(self._child), "rb", buffering=0) as process:
                _wait_for(process)
        return os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])

    def _begin_child(self, parent: int) -> None:
        end_with_parent(parent)
        self._restore_handlers()
        os.setpgid(0, 0)  # a signal to the group of the supervisor arrives once, from the supervisor
        # A terminal stops a process outside its own group that reads from it: a prompt fails instead.
        for number in (signal.SIGTTIN, signal.SIGTTOU):
            signal.signal(number, signal.SIG_IGN)
        if os.isatty(0):
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ[SUPERVISED_VARIABLE] = str(parent)

    def _run_child(self, argv: Sequence[str], furthest: int, pipe: int) -> int:
        if self._imports is None:
            threading.Thread(target=self._send_imports, args=(pipe, furthest), daemon=True).start()
        else:
            os.close(pipe)
        from loopwright.cli.main import main

        return main(argv)

    def _send_imports(self, pipe: int, furthest: int) -> None:
        """Send the names of all imported modules to the supervisor, once the run trains."""
        while self._update() <= furthest:
            time.sleep(_LOOK_SECONDS)
        with open(pipe, "w", encoding="utf-8") as file:
            file.write(json.dumps(list(sys.modules)) + "\n")

    def _import(self) -> None:
        """Import what the process has imported, as long as it runs."""
        assert self._child is not None
        with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            while self._imports and os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                name = self._imports.pop(0)
                if name not in sys.modules and not name.startswith("__"):
                    with contextlib.suppress(Exception):
                        importlib.import_module(name)
        gc.collect()
        gc.freeze()  # so that collections in the children copy no pages

    def _update(self) -> int:
        """Return the update that the run has reached, from its newest checkpoint or its last log."""
        with contextlib.suppress(LoopwrightError, OSError):
            run = find_run(self._folder)
            names = [path.name.removeprefix("step-") for path in run.checkpoints.glob("step-*")]
            return max([int(run.status.get("update") or 0), *(int(name) for name in names if name.isdecimal())])
        return 0

    def _note(self, text: str, code: int, update: int) -> None:
        with contextlib.suppress(LoopwrightError, OSError):
            find_run(self._folder).append_log(text)
        if self._asked.json:
            EventLines(sys.stdout).emit("restart", message=text, exit_code=code, update=update)
        else:
            start = "\n" if sys.stderr.isatty() else ""  # below a line that is redrawn
            sys.stderr.write(f"{start}{text}\n")
            sys.stderr.flush()

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Pass signals on to the process while the block runs; Ctrl-Z pauses both."""
        handlers = {**dict.fromkeys(_FORWARDED, self._forward), "SIGTSTP": self._pause}
        for name, handler in handlers.items():
            number = getattr(signal, name)
            if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's nohup is left alone
                self._handlers[number] = signal.signal(number, handler)
        try:
            yield
        finally:
            self._restore_handlers()

    def _restore_handlers(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        self._send(number)

    def _pause(self, number: int, frame: FrameType | None) -> None:
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, number)


def _end_of(code: int) -> str:
    return f"the process was ended by {signal.Signals(-code).name}" if code < 0 else f"the process ended with {code}"
