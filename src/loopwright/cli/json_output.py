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
from typing import Any, TextIO

from loopwright.api import EventLines, Outcome, Screen, path_facts, place_facts
from loopwright.cli import exit_codes
from loopwright.errors import Preempted
from loopwright.run_folder import RunFolder


@contextlib.contextmanager
def json_events(is_json: bool) -> Iterator[EventLines | None]:
    """Reserve standard output for a verb's events and warnings while the block runs; yields None without `--json`."""
    if not is_json:
        yield None
        return
    logger = logging.getLogger("loopwright")
    with _kept_clear() as stream, contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        events = EventLines(stream if exit_codes.is_first() else None)

        def show(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
            events.emit("warning", message=str(message), kind=category.__name__)

        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: events.emit("warning", message=record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        warnings.showwarning = show
        try:
            yield events
        finally:
            logger.removeHandler(handler)


@contextlib.contextmanager
def _kept_clear() -> Iterator[TextIO]:
    """Reserve standard output for this process; C libraries and child processes write to standard error instead."""
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
            yield alone if getattr(before, "inner", before) is own else before
        before.flush()
    finally:
        os.dup2(saved, number)
        os.close(saved)


def train_with_events(train: Callable[[], Outcome], screen: Screen, events: EventLines) -> tuple[int, Outcome | None]:
    """Train, write a final event whatever happens, and return the exit code and the outcome."""
    try:
        outcome = train()
    except (KeyboardInterrupt, Preempted) as error:
        code = exit_codes.code_of_interruption(error)
        messages = [str(error) or "interrupted", *getattr(error, "__notes__", [])]
        events.end(**_interrupted_facts(screen, events), state="preempted", message="; ".join(messages), exit_code=code)
        return code, None
    except (Exception, GeneratorExit) as error:
        if not exit_codes.is_first():
            raise
        failure = exit_codes.failure_of(error)
        exit_codes.print_failure(failure, events, error)
        if events.has_begun:
            events.end(**_interrupted_facts(screen, events), state="failed", exit_code=failure.exit_code)
        return failure.exit_code, None
    code, facts = exit_codes.DONE, _run_facts(outcome.run)
    diverged = exit_codes.failure_of_run(outcome)
    if diverged is not None:
        exit_codes.print_failure(diverged, events)
        code = diverged.exit_code
    elif outcome.state == "stopped":
        code, facts["next"] = exit_codes.PREEMPTED, [exit_codes.resume_command(outcome.run)]
    events.end(**facts, state=outcome.state, exit_code=code)
    return code, outcome


def _interrupted_facts(screen: Screen, events: EventLines) -> dict[str, Any]:
    """Return the final event's fields for an interrupted run; empty if it had not begun."""
    if not events.has_begun or screen.run is None:
        return {}
    return {**_run_facts(screen.run), "next": [exit_codes.resume_command(screen.run)]}


def _run_facts(run: RunFolder) -> dict[str, Any]:
    return {**place_facts(run), "result": run.read_result() or None, "paths": path_facts(run)}


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")


def print_objects(*objects: Mapping[str, Any]) -> None:
    EventLines(sys.stdout).lines(*objects)
