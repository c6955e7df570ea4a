"""Command lines in processes of their own, forked from one that has imported torch and transformers already.

Importing these takes seconds of each short run; `tests/cli/test_processes.py` starts the command itself.
"""

import multiprocessing
import os
import sys
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "loopwright.runs.train",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.modernbert.modeling_modernbert",
        "transformers.models.t5.modeling_t5",
    ]
)


def run_lines(*lines: list[object], folder: Path, failpoint: str | None = None) -> tuple[int | None, str]:
    """Run command lines (the words after `loopwright`) in a new process, until one fails; arm the failpoint before.

    Returns the exit code (that of the first line that fails; minus the signal that ended the process), and the output.
    """
    said = folder / ".said"
    words = [list(map(str, line)) for line in lines]
    process = _CONTEXT.Process(target=_run, args=(words, str(folder), str(said), failpoint))
    process.start()
    process.join()
    text = said.read_text(encoding="utf-8")
    said.unlink()
    return process.exitcode, text


def _run(lines: list[list[str]], folder: str, said: str, failpoint: str | None) -> None:
    from loopwright import failpoints
    from loopwright.cli import main

    os.chdir(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    with Path(said).open("w", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    if failpoint is not None:
        failpoints.arm(failpoint)
    for words in lines:
        code = main(words)
        sys.stdout.flush()
        if code:
            sys.exit(code)
