"""From what a verb returned or raised to an exit code, and to what a person reads."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from loopwright.cli.wrapping import folded
from loopwright.errors import CheckpointError, ConfigError, DataError, LoopwrightError, MemoryLimitError, Preempted

DONE, BUG, INPUT, MEMORY, DIVERGED = 0, 1, 2, 3, 4
_CPU_MEMORY = "DefaultCPUAllocator"  # torch's word where the machine itself has no memory left
_TRAINING = ("train", "demo", "resume")
_OTHER_FOLDER = "or --output_dir with another folder"
_DISK_FIXES: dict[int | None, str] = {
    errno.ENOSPC: "make room, and resume",
    errno.EDQUOT: f"make room within your quota, and resume, {_OTHER_FOLDER}",
    errno.EROFS: f"let the file system be written to, and resume, {_OTHER_FOLDER}",
    errno.EACCES: f"give yourself the permission, {_OTHER_FOLDER}",
    errno.EPERM: f"give yourself the permission, {_OTHER_FOLDER}",
    errno.EIO: f"look for faults of the disk or its connection, and resume, {_OTHER_FOLDER}",
    errno.EFBIG: f"raise the largest size of a file (ulimit -f), and resume, {_OTHER_FOLDER}",
    errno.EMFILE: "raise the number of open files (ulimit -n), and resume",
    errno.ENFILE: "raise the number of open files of the system, and resume",
}
NO_CHECKPOINT, CANNOT_WRITE, PREEMPTED, INTERRUPTED = 65, 74, 75, 130


def guarded(verb: Callable[[list[str]], int], words: list[str]) -> int:
    """Run a verb, say what went wrong, and return the exit code."""
    code = DONE
    try:
        try:
            code = verb(words)
        except SystemExit as error:  # argparse's --help and errors of the small verbs
            code = error.code if isinstance(error.code, int) else INPUT
        sys.stdout.flush()  # or it would be found out when the interpreter ends
        return code
    except BrokenPipeError:
        # Whoever read the output has seen enough; what is left of it goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except (KeyboardInterrupt, Preempted) as error:
        if os.environ.get("RANK", "0") == "0":  # the others have nothing to add
            _say_interrupted(error, verb.__name__, "--quiet" in words)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else PREEMPTED
    except (Exception, GeneratorExit) as error:  # noqa: BLE001 - the one place where every error becomes a code
        return _code_of(error)


def _say_interrupted(error: KeyboardInterrupt | Preempted, verb: str, is_quiet: bool) -> None:
    """Say what is left of what was interrupted, unless the run itself has said so."""
    told = getattr(error, "__notes__", [])  # by the run, if it had begun to train
    why = str(error) or "interrupted"
    if told and is_quiet:
        _say(f"{why}; {told[0]}")
    elif not told and verb in _TRAINING:
        left = ", and the run is as it was" if verb == "resume" else ""
        _say(f"{why} before the first update; nothing was trained{left}")
    elif not told or isinstance(error, Preempted):
        _say(why)


def _code_of(error: BaseException) -> int:
    kind = type(error).__name__
    if kind == "NoCheckpointError":
        _say_error("checkpoint.none", str(error), "lw verify RUN says what is wrong with each")
        return NO_CHECKPOINT
    if isinstance(error, CheckpointError):
        _say_error("checkpoint.write", str(error), _disk_fix(error))
        return CANNOT_WRITE
    if isinstance(error, (ConfigError, DataError)):
        text = str(error)
        _say(text if text.startswith("error[") else f"error[args.value]: {text}")
        return INPUT
    if isinstance(error, MemoryLimitError):
        _say(str(error))
        return MEMORY
    if kind == "OutOfMemoryError" or isinstance(error, MemoryError) or _CPU_MEMORY in str(error):
        remedies = "half the --batch and twice the --gradient_accumulation_steps, --bf16, --gradient_checkpointing"
        _say_error("memory.train", f"out of memory: {_first_line(error)}", remedies)
        return MEMORY
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        _say_error("disk.write", str(error), _disk_fix(error))
        return CANNOT_WRITE
    if isinstance(error, LoopwrightError):
        _say(f"error: {error}")
        return INPUT
    traceback.print_exception(error)
    _say("this is a bug of loopwright, or of a library that it uses: please report it with the lines above")
    return BUG


def _disk_fix(error: BaseException | None) -> str:
    """Return what helps where a file could not be written, by the error of the system that is at the bottom of it."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    if error is None:
        return "lw verify RUN says what is wrong with each"
    return _DISK_FIXES.get(error.errno, "make sure that the folder is there and takes files, and resume")


def code_of_run(outcome: Any) -> int:
    """Return the exit code of a training run that has ended in order."""
    if outcome.state == "diverged":
        reason = outcome.result.stop_reason if outcome.result is not None else ""
        remedies = "a smaller --lr, --max_grad_norm 1.0, --bf16 instead of --fp16"
        has_state = outcome.run.status.get("last_checkpoint") is not None
        kept = f"the last good state is in {outcome.run.checkpoints}" if has_state else "no state was saved before it"
        _say_error("loss.nan", reason, f"{remedies}; {kept}")
        return DIVERGED
    if outcome.state == "stopped":
        _say(f"stopped and saved; go on with: lw resume {os.path.normpath(outcome.run.path)}")
        return PREEMPTED
    return DONE


def _say_error(code: str, what: str, fix: str) -> None:
    _say(f"error[{code}]: {what}\n  fix: {fix}")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def _say(text: str) -> None:
    """Write a text for a person; on a terminal its lines are broken between words."""
    sys.stderr.write((folded(text) if sys.stderr.isatty() else text) + "\n")
    sys.stderr.flush()
