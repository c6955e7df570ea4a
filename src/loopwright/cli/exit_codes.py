"""Map the result or exception of a verb to an exit code and an error message."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loopwright import errors
from loopwright.cli.help_text import folded
from loopwright.config.parser import split_off
from loopwright.config.program import as_called, program
from loopwright.config.safe_text import visible, write_painted

if TYPE_CHECKING:
    from loopwright.api import EventLines, Outcome
    from loopwright.run_folder import RunFolder

DONE, BUG, INPUT, MEMORY, DIVERGED = 0, 1, 2, 3, 4
_CPU_MEMORY = "DefaultCPUAllocator"  # in torch's message when host memory runs out
_TRAINING = ("train", "demo", "resume")
_OTHER_FOLDER = "or --output_dir with another folder"
_DISK_FIXES: dict[int | None, str] = {
    errno.ENOSPC: "make room, and resume",
    errno.EDQUOT: f"make room within your quota, and resume, {_OTHER_FOLDER}",
    errno.EROFS: f"make the file system writable, and resume, {_OTHER_FOLDER}",
    errno.EACCES: f"get write permission, {_OTHER_FOLDER}",
    errno.EPERM: f"get write permission, {_OTHER_FOLDER}",
    errno.EIO: f"check the disk and its connection, and resume, {_OTHER_FOLDER}",
    errno.EFBIG: f"raise the file size limit (ulimit -f), and resume, {_OTHER_FOLDER}",
    errno.EMFILE: "raise the limit of open files (ulimit -n), and resume",
    errno.ENFILE: "raise the limit of open files of the system, and resume",
}
OWN = ("--quiet", "--plain", "--json")  # output flags of the training verbs
# Functions of the verbs that accept --json; launch passes it on, and an unknown verb may have been one of them.
WITH_JSON = frozenset(
    {
        *("train", "check", "resume", "demo", "find_lr", "evaluate", "predict"),
        *("runs", "compare", "verify", "tasks", "doctor", "launch", "no_verb"),
    }
)
_BUG, _OTHER = "bug", "other"  # codes of errors that have none
_REPORT_BUG = "this is a bug of loopwright or of a library that it uses: please report it with the traceback above"
_VERIFY = "lw verify last"
NO_CHECKPOINT, CANNOT_WRITE, PREEMPTED, INTERRUPTED = 65, 74, 75, 130
# Exit codes shared by all processes of a verb: a restart would not help, or was not requested.
TOGETHER = (INPUT, DIVERGED, NO_CHECKPOINT, PREEMPTED, INTERRUPTED)


@dataclass(frozen=True)
class Failure:
    """A failed command: its exit code, and the error to report."""

    exit_code: int
    error: errors.LoopwrightError


def guarded(verb: Callable[[list[str]], int], argv: list[str]) -> int:
    code, name = DONE, getattr(getattr(verb, "func", verb), "__name__", "")
    events: EventLines | None = None  # for failures
    if "--json" in argv and name in WITH_JSON and is_first():
        from loopwright.api import EventLines

        events = EventLines(sys.stdout)
    try:
        try:
            code = verb(argv)
        except SystemExit as error:  # argparse's --help, and usage errors of the small verbs
            code = error.code if isinstance(error.code, int) else INPUT
        sys.stdout.flush()  # or the error would surface at interpreter exit
        return code
    except BrokenPipeError:
        # The reader closed the pipe: discard the rest of the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except (KeyboardInterrupt, errors.Preempted) as error:
        code = code_of_interruption(error)
        if events is not None:
            events.end(state="preempted", message=str(error) or "interrupted", exit_code=code)
        elif is_first():  # the other ranks have nothing to add
            _print_interrupted(error, name, "--quiet" in argv)
        return code
    except (Exception, GeneratorExit) as error:  # noqa: BLE001 - the one place where every error becomes a code
        failure = failure_of(error)
        print_failure(failure, events, error)
        return failure.exit_code


def words_for_resuming(argv: Sequence[str]) -> list[str]:
    """Return the words for resuming the run of a command line: it is the user's own, as is its code."""
    values = {flag: split_off(argv, flag)[0][-1:] for flag in ("--trust_remote_code", "--allow_pickle")}
    consents = [f"{flag}={each or 'true'}" for flag, last in values.items() for each in last]
    return ["--allow_code", "--trust_run", *consents, *(word for word in argv if word in OWN)]


def is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def code_of_interruption(error: KeyboardInterrupt | errors.Preempted) -> int:
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else PREEMPTED


def print_failure(failure: Failure, events: EventLines | None, error: BaseException | None = None) -> None:
    """Report a failure as a JSON event or as text; a bug always prints its traceback.

    Write errors are always printed as text too: standard output may be the file that failed. A failure without a code
    is that of another process, which has printed it.
    """
    shown = failure.error
    if shown.code == _BUG and error is not None:
        traceback.print_exception(error)
    if events is not None:
        fields = {"code": shown.code or _OTHER, "message": shown.what, "saw": list(shown.saw)}
        fix = shown.fix and as_called(shown.fix)
        with contextlib.suppress(OSError):
            events.emit("error", **fields, fix=fix, exit_code=failure.exit_code)
    if shown.code is not None and (events is None or isinstance(error, OSError)):
        error_text = f"error: {shown.what}" if shown.code == _OTHER else as_called(str(shown))
        _print(error_text, "hold", colour="red")


def _print_interrupted(error: KeyboardInterrupt | errors.Preempted, verb: str, is_quiet: bool) -> None:
    """Print what an interruption left behind, unless the run already has."""
    notes = getattr(error, "__notes__", [])  # added by the run if training had begun
    why = str(error) or "interrupted"
    if notes and is_quiet:
        _print(f"{why}; {notes[0]}")
    elif not notes and verb in _TRAINING:
        unchanged = ", and the run is unchanged" if verb == "resume" else ""
        _print(f"{why} before the first update; nothing was trained{unchanged}")
    elif not notes or isinstance(error, errors.Preempted):
        _print(why)


def failure_of(error: BaseException) -> Failure:
    if isinstance(error, errors.AnotherProcessError):
        return Failure(BUG, errors.LoopwrightError(error.what))
    if isinstance(error, errors.LoopwrightError):
        return _failure_of_ours(error)
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError) or _CPU_MEMORY in str(error):
        remedies = "--batch 1   or   --bf16   or   --gradient_checkpointing"
        return failed("memory.train", MEMORY, f"out of memory: {_first_line(error)}", remedies)
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return failed("disk.write", CANNOT_WRITE, str(error), _disk_fix(error))
    return failed(_BUG, BUG, f"{type(error).__name__}: {_first_line(error)}", _REPORT_BUG)


def _failure_of_ours(error: errors.LoopwrightError) -> Failure:
    if isinstance(error, errors.MemoryLimitError):
        return Failure(MEMORY, error)
    if isinstance(error, errors.CheckpointError) and error.code not in ("resume.model", "checkpoint.state"):
        if error.code == "checkpoint.none":
            return (
                Failure(NO_CHECKPOINT, error) if error.fix else failed(error.code, NO_CHECKPOINT, error.what, _VERIFY)
            )
        return failed("checkpoint.write", CANNOT_WRITE, error.what, _disk_fix(error))
    if error.code is not None:
        return Failure(CANNOT_WRITE if type(error).__name__ == "LeaseError" else INPUT, error)
    code = "args.value" if isinstance(error, (errors.ConfigError, errors.DataError)) else _OTHER
    return Failure(INPUT, errors.LoopwrightError(str(error), code=code))


def failed(code: str, exit_code: int, what: str, fix: str) -> Failure:
    return Failure(exit_code, errors.LoopwrightError(what, code=code, fix=fix))


def _disk_fix(error: BaseException | None) -> str:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    if error is None:
        return _VERIFY
    return _DISK_FIXES.get(error.errno, "make sure that the folder exists and is writable, and resume")


def failure_of_run(outcome: Outcome) -> Failure | None:
    if outcome.state != "diverged":
        return None
    reason = (outcome.result.stop_reason or "") if outcome.result is not None else ""
    from loopwright.config.files import read_mapping

    rate = min(float(read_mapping(outcome.run.config).get("learning_rate") or 1e-4) / 10, 1e-4)
    has_state = outcome.run.status.get("last_checkpoint") is not None
    kept = f"the last good state is in {outcome.run.checkpoints}" if has_state else "no state was saved before it"
    failure = failed("loss.nan", DIVERGED, reason, f"{resume_command(outcome.run)} --lr {rate:g}")
    return replace(failure, error=errors.LoopwrightError(reason, code="loss.nan", saw=[kept], fix=failure.error.fix))


def code_of_run(outcome: Outcome) -> int:
    failure = failure_of_run(outcome)
    if failure is not None:
        if is_first():
            print_failure(failure, None)
        return failure.exit_code
    if outcome.state == "stopped":
        if is_first():
            what = "stopped and saved" if outcome.result is not None else "stopped before the first update"
            _print(f"{what}; continue with: {resume_command(outcome.run)}")
        return PREEMPTED
    return DONE


def resume_command(run: RunFolder) -> str:
    return f"{program()} resume {shlex.quote(os.path.normpath(run.path))}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def _print(text: str, method: str = "write", colour: str | None = None) -> None:
    text = visible(text)
    text = folded(text) if sys.stderr.isatty() else text
    if colour is not None:
        from loopwright.api import paint

        head, colon, rest = text.partition(":")
        text = paint(head + colon, colour, sys.stderr) + rest
    # A process beside the first may hold back the error that the command ends with.
    write_painted(getattr(sys.stderr, method, sys.stderr.write), text + "\n")
    sys.stderr.flush()


def keep_search_path() -> None:
    """Keep `python -m` in child processes from finding modules in the current folder, if this process does not."""
    if not {"", os.getcwd()} & set(sys.path):
        os.environ["PYTHONSAFEPATH"] = "1"  # from Python 3.11 on
