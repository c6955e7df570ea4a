"""Which shapes of micro-batches are CUDA graphs.

The list is a part of the saved state, so that a resumed run takes the same kernels as one that was never interrupted.

An update is a graph if the shapes of all its micro-batches are listed as recorded, or can still be: each is recorded
when it first comes. Listed failures are eager, and so are new shapes once the list is full. That is a function of the
list and the shapes alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

MOST_SHAPES = 128  # of a run, failures included: each graph keeps its inputs and outputs on the device
MOST_CONSTANTS = 4  # graphs of the same shapes that differ in texts or whole numbers: most often these never repeat
MOST_FAILURES = 8  # after each, all others are recorded again
MOST_CHANGES = 3  # of the optimizer's settings, in updates in a row: each means recording everything again


@dataclass
class Recordings:
    """The shapes of a run, by `engine.graphs.shape_key`."""

    recorded: list[str] = field(default_factory=list)  # shapes that are graphs
    failed: dict[str, str] = field(default_factory=dict)  # shapes that could not be recorded, and why
    ended: str | None = None  # why no update is a graph any more
    settings: str = ""  # a digest of everything but the shapes that graphs were recorded for; "" before the first one
    num_changes: int = 0  # updates in a row before which it changed
    has_moved: bool = False  # anything else that graphs were recorded for has changed since the last update
    unpads: bool | None = None  # whether graphs leave padding out; None before it is decided
    compiled_for: list[list[int]] | None = None  # the sizes that the model is compiled with; None before the first one
    is_dynamic: bool = False  # the model is compiled for all sizes
    not_compiled: str | None = None  # why the model cannot be compiled

    def why_eager(self, keys: list[str]) -> str | None:
        """Return why an update of micro-batches with these shapes is not a graph, or None if it is."""
        new = [key for key in dict.fromkeys(keys) if key not in self.recorded]
        reason = next((self.failed[key] for key in new if key in self.failed), None)
        if reason is not None or not new:
            return reason
        if len(self.failed) >= MOST_FAILURES:
            return f"{MOST_FAILURES} shapes of batches could not be recorded, and no others are tried"
        if len(self.recorded) + len(self.failed) + len(new) > MOST_SHAPES:
            return f"a run records {MOST_SHAPES} shapes of batches at most"
        shapes = [key.rpartition(" ")[0] for key in self.recorded]
        if any(shapes.count(key.rpartition(" ")[0]) >= MOST_CONSTANTS for key in new):
            return "the texts or whole numbers in a batch change, and a graph would repeat them"
        return None

    def add(self, keys: list[str]) -> None:
        self.recorded += [key for key in dict.fromkeys(keys) if key not in self.recorded]

    def fail(self, key: str, reason: str) -> bool:
        """List a shape as a failure; return whether it was a graph before."""
        self.failed[key] = reason
        was_recorded = key in self.recorded
        self.recorded = [each for each in self.recorded if each != key]
        return was_recorded

    def follow(self, settings: str, has_moved: bool = False) -> str | None:
        """Note the settings of the next update; return why no update can be a graph if they change all the time."""
        has_moved |= self.has_moved  # before it was saved
        has_changed = has_moved or self.settings not in ("", settings)
        self.settings, self.num_changes = settings, self.num_changes + 1 if has_changed else 0
        self.has_moved = False
        if self.num_changes <= MOST_CHANGES:
            return None
        if has_moved:
            return "weights are replaced, or attributes of the model change, at every update"
        return "the optimizer's settings change at every update, as with OneCycleLR(cycle_momentum=True)"

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def restored(cls, state: dict[str, Any] | None) -> Recordings:
        """Return the list of a saved run; older checkpoints have none, or other entries."""
        known = {each.name for each in fields(cls)} & (state or {}).keys()
        return cls(**{"unpads": False, **{name: (state or {})[name] for name in known}})
