"""Command lines in processes of their own, forked from one that has imported torch and transformers already.

Importing these takes seconds of each short run; `tests/cli/test_processes.py` starts the command itself.
"""

import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

from distributed.launcher import SERVER


def run_lines(*lines: list[object], folder: Path, failpoint: str | None = None, **variables: str):
    """Run command lines (the words after `loopwright`) in a new process, until one fails; arm the failpoint before.

    Returns the exit code (that of the first line that fails; minus the signal that ended the process), and the output.
    """
    said = folder / ".said"
    said.touch()
    process = start(*lines, folder=folder, out=said, failpoint=failpoint, **variables)
    process.join()
    text = said.read_text(encoding="utf-8")
    said.unlink()
    return process.exitcode, text


def start(*lines: list[object], folder: Path, out: Path, err: Path | None = None, failpoint=None, **variables: str):
    """Start command lines in a new process, which is returned; its output goes to existing files or a terminal."""
    words = [list(map(str, line)) for line in lines]
    streams = [str(out), str(err or out)]
    process: BaseProcess = SERVER.Process(target=_run, args=(words, str(folder), streams, failpoint, variables))
    process.start()
    return process


def _run(lines: list[list[str]], folder: str, streams: list[str], failpoint: str | None, variables: dict) -> None:
    from loopwright import failpoints
    from loopwright.cli import main

    os.setsid()
    is_terminal = streams[0].startswith("/dev/pts/")  # opened first by the leader of a session, it is in control of it
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_RDWR if is_terminal else os.O_WRONLY | os.O_APPEND), number)
    if is_terminal:
        os.dup2(1, 0)
        sys.stdout.reconfigure(line_buffering=True)
    os.chdir(folder)
    os.environ.update(variables, HF_HUB_OFFLINE="1")
    if failpoint is not None:
        failpoints.arm(failpoint)
    for words in lines:
        code = main(words)
        sys.stdout.flush()
        if code:
            sys.exit(code)
