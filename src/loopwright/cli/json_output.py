"""`--json`: standard output for scripts, with one JSON object per line and nothing else.

Text for people goes to the run's log.txt only; output of libraries goes to standard error.
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
    """Reserve standard output for a verb's events and warnings while the block runs; yields None without `--json`."""
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
    """Reserve standard output for this process; redirect its descriptor to standard error for everything else.

    That covers C libraries and child processes such as data workers.
    """
    before, own = sys.stdout, sys.__stdout__
    try:
        number, errors = sys.__stdout__.fileno(), sys.__stderr__.fileno()  # type: ignore[union-attr]
        saved = os.dup(number)
    except (OSError, ValueError, AttributeError):  # missing or closed
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
    """Emits the library's log warnings as events."""

    def __init__(self, events: EventLines) -> None:
        super().__init__(logging.WARNING)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
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
    """Train, write a final event whatever happens, and return the exit code and the outcome."""
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
    """Return the final event's fields for an interrupted run; empty if it had not begun."""
    if not events.has_begun or screen.run is None:
        return {}
    return {**_about_run(screen.run), "next": [resume_command(screen.run)]}


def _about_run(run: RunFolder) -> dict[str, Any]:
    return {**place_facts(run), "result": run.read_result() or None, "paths": path_facts(run)}


def print_line(line: str) -> None:
    """Print a line for a person."""
    sys.stdout.write(line + "\n")


def print_objects(*objects: Mapping[str, Any]) -> None:
    """Print an answer for scripts, one object per line."""
    EventLines(sys.stdout).lines(*objects)
