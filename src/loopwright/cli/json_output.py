"""`--json`: standard output for scripts. One JSON object per line, and nothing else.

What people read goes to log.txt of the run alone; what libraries print goes to standard error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from loopwright.cli.exit_codes import (
    DONE,
    PREEMPTED,
    code_of_interruption,
    failure_of,
    failure_of_run,
    is_first,
    resume_command,
    say_failure,
)
from loopwright.errors import Preempted
from loopwright.run_folder import RunFolder
from loopwright.runs.console.json_events import EventLines
from loopwright.runs.console.screen import Screen
from loopwright.runs.provenance import path_facts, place_facts

if TYPE_CHECKING:
    from loopwright.runs.job import Outcome


@contextlib.contextmanager
def telling(is_json: bool) -> Iterator[EventLines | None]:
    """Keep standard output for the events of a verb while the block runs, and tell its warnings as such.

    Args:
        is_json: whether that is asked for; None is what there is otherwise.
    """
    if not is_json:
        yield None
        return
    logger = logging.getLogger("loopwright")
    with _kept_clear() as stream, contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        events = EventLines(stream if is_first() else None)
        handler = _Warnings(events)
        logger.addHandler(handler)
        warnings.showwarning = _shown_by(events)
        try:
            yield events
        finally:
            logger.removeHandler(handler)


@contextlib.contextmanager
def _kept_clear() -> Iterator[TextIO]:
    """Return standard output for this process alone, while what others write to its descriptor goes to standard error.

    Others are libraries in C, and processes that this one starts: workers that read data, say.
    """
    before, own = sys.stdout, sys.__stdout__
    try:
        number, errors = sys.__stdout__.fileno(), sys.__stderr__.fileno()  # type: ignore[union-attr]
        saved = os.dup(number)
    except (OSError, ValueError, AttributeError):  # there is none, or it was closed
        yield before
        return
    before.flush()
    os.dup2(errors, number)
    try:
        with os.fdopen(os.dup(saved), "w", encoding="ascii") as alone:
            yield alone if before is own else before
        before.flush()
    finally:
        os.dup2(saved, number)
        os.close(saved)


class _Warnings(logging.Handler):
    """Tells the warnings of the library's log."""

    def __init__(self, events: EventLines) -> None:
        super().__init__(logging.WARNING)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        """Tell one."""
        self._events.tell("warning", message=record.getMessage())


def _shown_by(events: EventLines) -> Callable[..., None]:
    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        events.tell("warning", message=str(message), kind=category.__name__)

    return show


def told_to_its_end(train: Callable[[], Outcome], screen: Screen, events: EventLines) -> tuple[int, Outcome | None]:
    """Train, and tell how it came out in a last line, whatever that is; return the exit code, and how it ended.

    Args:
        train: trains.
        screen: that the run writes its log by.
        events: of this command.
    """
    try:
        outcome = train()
    except (KeyboardInterrupt, Preempted) as error:
        code = code_of_interruption(error)
        told = [str(error) or "interrupted", *getattr(error, "__notes__", [])]
        events.end(**_about(screen, events), state="preempted", message="; ".join(told), exit_code=code)
        return code, None
    except (Exception, GeneratorExit) as error:
        if not is_first():
            raise
        failure = failure_of(error)
        say_failure(failure, events, error)
        if events.has_begun:
            events.end(**_about(screen, events), state="failed", exit_code=failure.exit_code)
        return failure.exit_code, None
    failure_told = failure_of_run(outcome)
    if failure_told is not None:
        say_failure(failure_told, events)
    code = failure_told.exit_code if failure_told is not None else PREEMPTED if outcome.state == "stopped" else DONE
    about = _about_run(outcome.run)
    if outcome.state == "stopped":
        about["next"] = [resume_command(outcome.run)]
    events.end(**about, state=outcome.state, exit_code=code)
    return code, outcome


def _about(screen: Screen, events: EventLines) -> dict[str, Any]:
    """Return what the last line says of a run that was broken off; nothing of one that had not begun."""
    if not events.has_begun or screen.run is None:
        return {}
    return {**_about_run(screen.run), "next": [resume_command(screen.run)]}


def _about_run(run: RunFolder) -> dict[str, Any]:
    return {**place_facts(run), "result": run.read_result() or None, "paths": path_facts(run)}


def print_line(line: str) -> None:
    """Print a line for a person."""
    sys.stdout.write(line + "\n")


def print_objects(*objects: Mapping[str, Any]) -> None:
    """Print an answer for scripts, an object per line."""
    EventLines(sys.stdout).lines(*objects)
