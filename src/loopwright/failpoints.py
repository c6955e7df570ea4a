"""Named fault points: places where a test can make this process die, fail or wait.

Code that must survive a crash calls `failpoint("pre_rename")` where the crash would hurt most. It is a no-op unless the
point is armed, by the environment when this module is first imported,

    LW_FAILPOINT=pre_rename:3:kill,mid_write:*:raise:ENOSPC

or by `arm` inside a test. Each entry is `name:n:action`: at the n-th hit of that point in this process (`*`: at every
hit) do the action, which is one of

    kill            SIGKILL to this process
    raise           RuntimeError
    raise:ENOSPC    OSError with that errno, by its name
    sleep:0.5       wait that many seconds, then continue
    exit:3          exit with that code at once, without clean-up

A forked child continues its parent's counts; a spawned one reads the environment and starts at zero.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from loopwright.errors import ConfigError

FAILPOINTS: Final[dict[str, str]] = {
    "before_first_update": "the run is set up, no update was made yet",
    "after_backward": "gradients of a micro-batch exist, the optimizer has not used them",
    "after_optimizer_step": "weights are updated, progress is not advanced yet",
    "mid_eval": "between two batches of an evaluation",
    "after_snapshot": "the state is copied, nothing of it is written yet",
    "writer_start": "the background writer has taken a snapshot up",
    "mid_write": "part of a file is written, the rest is not",
    "pre_fsync": "a file is written, not yet synced",
    "pre_manifest": "all files of a checkpoint are synced, it has no manifest yet",
    "pre_rename": "everything lies aside under its temporary name",
    "mid_replace": "the old folder of a name is moved aside, the new one is not there yet",
    "after_rename": "the final name exists, its folder is not synced yet",
    "after_commit": "a checkpoint is committed, nothing was done about it yet",
    "pre_best": "a better checkpoint is committed, best.json still names the old one",
    "mid_prune": "a checkpoint to be removed is renamed, its files are still there",
    "mid_load": "a checkpoint is verified and half restored",
    "mid_quarantine": "a bad checkpoint was found, it still has its name",
    "mid_metrics_append": "half a line of metrics.jsonl is written",
    "pre_status": "status.json is about to be written",
    "before_final_save": "the last update is made, its checkpoint is not asked for yet",
    "run_end": "the run is complete on disk, its end was not announced yet",
}
"""All fault points, and their locations."""

_Action = Callable[[str], None]

# The hits of each armed point, and what happens at the n-th of them or, with None, at each. `next` on a count is one
# bytecode: thread-safe, and without a lock that a fork could leave taken.
_points: dict[str, tuple[Iterator[int], list[tuple[int | None, _Action]]] | None] = dict.fromkeys(FAILPOINTS)


def failpoint(name: str) -> None:
    """Run the action armed for this point; free when nothing is armed. Raise a ConfigError for an unknown name."""
    try:
        point = _points[name]
    except KeyError:
        raise _unknown_name(name) from None
    if point is not None:
        hits, faults = point
        number = next(hits)
        for nth, act in faults:
            if nth is None or nth == number:
                act(name)


def is_armed(name: str) -> bool:
    """Return whether a point is armed, for code that must first create a partial state to break."""
    if name not in _points:
        raise _unknown_name(name)
    return _points[name] is not None


def arm(spec: str) -> None:
    """Arm the points of a specification as in the environment, and no others, from a hit count of zero.

    An invalid one raises a ConfigError, and the previously armed points stay.
    """
    armed: dict[str, tuple[Iterator[int], list[tuple[int | None, _Action]]]] = {}
    for entry in map(str.strip, spec.split(",")):
        name, _, rest = entry.partition(":")
        nth, _, action = rest.partition(":")
        if not name or not nth or not action:
            raise ConfigError(f"LW_FAILPOINT: {entry!r} is not of the form name:n:action, as in pre_rename:3:kill")
        if name not in FAILPOINTS:
            raise _unknown_name(name)
        if nth != "*" and (not nth.isascii() or not nth.isdigit() or int(nth) < 1):
            raise ConfigError(f"LW_FAILPOINT: the hit in {entry!r} is {nth!r}; it must be 1, 2, ... or * for every hit")
        fault = (None if nth == "*" else int(nth), _parse_action(action, entry))
        armed.setdefault(name, (itertools.count(1), []))[1].append(fault)
    disarm()
    _points.update(armed)


def disarm() -> None:
    """Disarm every point."""
    _points.update(dict.fromkeys(FAILPOINTS))


def _parse_action(text: str, entry: str) -> _Action:
    kind, colon, argument = text.partition(":")
    try:
        if text == "kill":
            return lambda name: os.kill(os.getpid(), signal.SIGKILL)
        if kind == "raise":
            code = getattr(errno, argument, None) if argument.startswith("E") else None
            if colon and not isinstance(code, int):
                raise ValueError(f"{argument!r} is not an errno name such as ENOSPC or EIO")
            return partial(_raise, code)
        if kind == "sleep":
            seconds = float(argument)
            if not math.isfinite(seconds) or seconds < 0:
                raise ValueError(f"cannot sleep {seconds} seconds")
            return lambda name: time.sleep(seconds)
        if kind == "exit":
            status = int(argument)
            if not 0 <= status <= 255:
                raise ValueError(f"an exit code lies between 0 and 255, got {status}")
            return lambda name: os._exit(status)
    except ValueError as error:
        raise ConfigError(f"LW_FAILPOINT: {entry!r}: {error}") from None
    raise ConfigError(
        f"LW_FAILPOINT: the action in {entry!r} is {text!r}; it must be kill, raise, raise:ERRNO, sleep:seconds "
        "or exit:code"
    )


def _raise(code: int | None, name: str) -> None:
    if code is None:
        raise RuntimeError(f"failpoint {name}")
    raise OSError(code, f"{os.strerror(code)} (failpoint {name})")


def _unknown_name(name: str) -> ConfigError:
    import difflib  # imported lazily: it costs more than the rest of this module

    nearest = difflib.get_close_matches(name, FAILPOINTS, n=1, cutoff=0.0)[0]
    return ConfigError(f"there is no failpoint {name!r}; the nearest is {nearest!r}. All: {', '.join(FAILPOINTS)}")


if _spec := os.environ.get("LW_FAILPOINT"):
    arm(_spec)
