"""Profile some updates of a run with torch.profiler: a printed summary, and files."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from loopwright.callbacks.base import TrainerCallback
from loopwright.errors import ConfigError
from loopwright.protocols import TrainerLike
from loopwright.run_folder import write_json

PHASES = ("data", "forward", "backward", "optimizer", "other")
GRAPH_PHASE = "update (graph)"
SUMMARY_FILE, TRACE_FILE = "summary.json", "trace.json.gz"
_LOG_LEVEL = "KINETO_LOG_LEVEL"  # read once, when the first profiler of a process starts
_MARK = "loopwright: "
_RANGES = (_MARK, "Optimizer.", "ProfilerStep")  # named ranges, ours and torch's: not operators
_NUM_OPERATORS = 10


class ProfileCallback(TrainerCallback):
    """Profiles some updates of a run: prints the time by phase and the slowest operators, and writes a trace.

    The first updates are skipped: they create the optimizer's state, record graphs and warm caches. An evaluation ends
    profiling early, so that only updates count. Results are unaffected, but profiled updates are slightly slower. Of
    several processes only rank 0 is profiled.

    Time is measured between the events of an update, on a GPU with its own clock. A CUDA graph is one phase, since it
    combines forward, backward and optimizer. Clipping counts as backward.

    A failed run reports no profile. If the files cannot be written, that is printed and the run continues.

    Args:
        num_updates: updates to profile.
        folder: gets summary.json and trace.json.gz, which chrome://tracing and ui.perfetto.dev open; None writes none.
        num_warm_ups: updates to skip first.
    """

    asks_alike = True
    graph_safe = True

    def __init__(self, num_updates: int = 10, folder: str | Path | None = None, num_warm_ups: int = 3) -> None:
        for name, value, least in (("num_updates", num_updates, 1), ("num_warm_ups", num_warm_ups, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
        self._num_updates = num_updates
        self._folder = None if folder is None else Path(folder)
        self._num_warm_ups = num_warm_ups
        self._profiler: Any = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._forget()

    def _forget(self) -> None:
        self._first = -1
        self._num_done = 0
        self._seconds = dict.fromkeys((*PHASES, GRAPH_PHASE), 0.0)
        self._marks: list[tuple[str, Any]] = []
        self._updates: list[tuple[list[tuple[str, Any]], float, bool]] = []
        self._waited = 0.0
        self._num_graphed = 0
        self._range: Any = None
        self._is_over = False

    # --- events -------------------------------------------------------------------------------------------------

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Choose the updates to profile."""
        self._forget()
        self._is_over = not trainer.run_config.is_world_process_zero
        self._first = trainer.progress.update + self._num_warm_ups

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Begin with the first update of the run, if none is skipped."""
        self._begin_if_due(trainer)

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """End the wait for data, or the previous micro-batch's backward pass."""
        if self._profiler is not None:
            self._mark(trainer, "data" if len(self._marks) == 1 else "backward", "forward")

    def on_train_step_end(
        self, trainer: TrainerLike, batch: Any = None, batch_output: Any = None, **kwargs: Any
    ) -> None:
        """End a forward pass."""
        if self._profiler is not None:
            self._mark(trainer, "forward", "backward")

    def on_before_optimizer_step(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """End the last backward pass, clipping included."""
        if self._profiler is not None:
            self._mark(trainer, "backward", "optimizer")

    def on_optimizer_step_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """End the optimizer's step."""
        if self._profiler is not None:
            self._mark(trainer, "optimizer", "other")

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Begin after the last skipped update; end after the last profiled one."""
        if self._profiler is not None:
            is_skipped = self._marks[-1][0] == "forward"
            self._mark(trainer, "backward" if is_skipped else "other", "data")
            self._end_update(trainer)
            if self._num_done == self._num_updates:
                self._finish(trainer)
        else:
            self._begin_if_due(trainer)

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """End early: an evaluation is not an update."""
        if self._profiler is not None and self._num_done:
            self._finish(trainer)
        self._stop()

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Begin after an evaluation that preceded the first profiled update."""
        self._begin_if_due(trainer)

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Finish with the updates profiled so far."""
        if self._profiler is not None and self._num_done:
            self._finish(trainer)
        elif not self._is_over:
            self._stop()
            self._is_over = True
            num_updates = trainer.progress.update - self._first + self._num_warm_ups
            text = f"Nothing was profiled: the run had {num_updates} updates, all of them skipped as warm-up"
            trainer.notify("profile.empty", text, num_updates=num_updates)

    def on_evaluation_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Profile nothing: an evaluation is not an update."""
        self._is_over = True

    def release(self) -> None:
        """Stop the profiler of a run that failed."""
        self._stop()

    # --- profiling ----------------------------------------------------------------------------------------------

    def _begin_if_due(self, trainer: TrainerLike) -> None:
        if self._is_over or self._profiler is not None or trainer.progress.update != self._first:
            return
        activities = [ProfilerActivity.CPU]
        if trainer.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities, acc_events=True)  # without it some versions warn
        try:
            _start(profiler)
        except RuntimeError as error:
            self._is_over = True
            trainer.notify("profile.failed", f"Nothing is profiled: {str(error).splitlines()[0]}", error=error)
            return
        self._profiler = profiler
        self._end = weakref.finalize(self, profiler.stop)  # even if the callback is removed
        self._start_update(trainer)
        self._enter("data")

    def _start_update(self, trainer: TrainerLike) -> None:
        self._marks = [("", _now(trainer.device))]
        self._waited = getattr(trainer, "data_wait_seconds", 0.0)
        self._num_graphed = getattr(trainer, "num_graphed_updates", 0)

    def _mark(self, trainer: TrainerLike, ended: str, begun: str) -> None:
        self._marks.append((ended, _now(trainer.device)))
        self._enter(begun)

    def _enter(self, phase: str | None) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = None if phase is None else record_function(f"{_MARK}{phase}")
        if self._range is not None:
            self._range.__enter__()

    def _end_update(self, trainer: TrainerLike) -> None:
        waited = getattr(trainer, "data_wait_seconds", 0.0) - self._waited
        is_graph = getattr(trainer, "num_graphed_updates", 0) > self._num_graphed
        self._updates.append((self._marks, waited, is_graph))
        self._num_done += 1
        self._start_update(trainer)

    def _stop(self) -> Any:
        profiler, self._profiler = self._profiler, None
        if profiler is not None and self._end is not None:
            self._enter(None)
            self._end()
        return profiler

    def _finish(self, trainer: TrainerLike) -> None:
        """Print and write the summary; record the time this took, as it does not count as training."""
        began = time.monotonic()
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        profiler = self._stop()
        self._is_over = True
        for marks, waited, is_graph in self._updates:
            add_phases(self._seconds, [(name, _between(before, at)) for (_, before), (name, at) in _pairs(marks)],
                       waited, is_graph)  # fmt: skip
        seconds = {name: value for name, value in self._seconds.items() if value > 0 or name in PHASES}
        if self._seconds[GRAPH_PHASE] and not any(seconds[name] for name in ("forward", "backward", "optimizer")):
            seconds = {name: seconds[name] for name in ("data", GRAPH_PHASE, "other")}
        last = self._first + self._num_done
        found = {
            "num_updates": self._num_done,
            "first_update": self._first + 1,
            "last_update": last,
            "device": str(trainer.device),
            "seconds": seconds,
            "shares": {name: value / (sum(seconds.values()) or 1.0) for name, value in seconds.items()},
            "operators": top_operators(profiler.key_averages()),
        }
        lines = summary_lines(found, self._num_updates)
        if self._folder is not None:
            lines.append(f"        {_write(self._folder, profiler, found)}")
        self._updates = []
        trainer.notify("profile", "\n".join(lines), **found)
        trainer.write_record("profile", took_seconds=round(time.monotonic() - began, 3))


def _write(folder: Path, profiler: Any, found: Mapping[str, Any]) -> str:
    """Write the trace and the summary; return their location, or why they are missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / TRACE_FILE))
        write_json(folder / SUMMARY_FILE, found)
    except (OSError, RuntimeError) as error:  # a full disk: the summary is printed
        return f"not written to {folder}: {error}"
    return f"trace: {folder / TRACE_FILE}, for chrome://tracing or ui.perfetto.dev"


def add_phases(
    seconds: dict[str, float], intervals: Iterable[tuple[str, float]], waited: float, is_graph: bool
) -> None:
    """Add the intervals of one update to the seconds of the phases; each belongs to one phase.

    Args:
        seconds: by phase; changed.
        intervals: (phase, seconds) in order; the first includes the wait for data, and everything before it.
        waited: seconds that the host waited for data.
        is_graph: forward, backward and optimizer were one graph.
    """
    for name, length in intervals:
        if name == "data":
            data = min(waited, length)
            seconds["data"] += data
            seconds["other"] += length - data
        else:
            seconds[GRAPH_PHASE if is_graph and name != "other" else name] += length


def top_operators(events: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the operators with the most self time, measured on the device if it has its own clock.

    Under CUDA graphs the host runs no operators: then the kernels are returned.

    Args:
        events: the result of `torch.profiler.profile.key_averages`.

    Returns:
        name, calls, seconds and share (of the time of all operators) of each, the longest first.
    """
    own = [event for event in events if not event.key.startswith(_RANGES)]
    kernels = [(event, event.self_device_time_total) for event in own if event.device_type.name == "CUDA"]
    operators = [event for event in own if event.device_type.name == "CPU"]
    timed = [(event, event.self_device_time_total) for event in operators]
    if not kernels:
        timed = [(event, event.self_cpu_time_total) for event in operators]
    elif sum(time for _, time in timed) < 0.5 * sum(time for _, time in kernels):
        timed = kernels
    total = sum(time for _, time in timed) or 1.0
    timed.sort(key=lambda pair: (-pair[1], pair[0].key))
    return [
        {"name": event.key, "calls": event.count, "seconds": time / 1e6, "share": time / total}
        for event, time in timed[:_NUM_OPERATORS]
        if time > 0
    ]


def summary_lines(found: Mapping[str, Any], num_asked: int) -> list[str]:
    """Return the summary as readable lines, from the content of summary.json and the number of updates asked for."""
    number, total = found["num_updates"], sum(found["seconds"].values())
    fewer = "" if number == num_asked else f" (of {num_asked} asked for: an evaluation or the end came)"
    shares = rounded_shares(found["shares"])
    lines = [
        f"profile updates {found['first_update']} to {found['last_update']}{fewer}: {1e3 * total / number:.3g} ms each",
        f"        {' · '.join(f'{name} {share:.1f} %' for name, share in shares.items())}",
    ]
    width = max((len(_cut(each["name"])) for each in found["operators"]), default=0)
    if found["operators"]:
        lines.append(f"        {'operator':<{width}}  {'calls':>8}  {'ms':>9}    share, per update")
    for each in found["operators"]:
        lines.append(
            f"        {_cut(each['name']):<{width}}  {each['calls'] / number:8.4g}  "
            f"{1e3 * each['seconds'] / number:9.3f}  {100 * each['share']:5.1f} %"
        )
    return lines


def rounded_shares(shares: Mapping[str, float]) -> dict[str, float]:
    """Return fractions as percentages, rounded to tenths, that add up to 100."""
    tenths = {name: 1000 * share for name, share in shares.items()}
    rounded = {name: int(value) for name, value in tenths.items()}
    missing = round(sum(tenths.values())) - sum(rounded.values())
    for name in sorted(tenths, key=lambda name: rounded[name] - tenths[name])[:missing]:
        rounded[name] += 1
    return {name: value / 10 for name, value in rounded.items()}


def _start(profiler: Any) -> None:
    """Start a profiler without the log lines of torch's library on stderr, unless they were enabled."""
    is_asked = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, "99")
    try:
        profiler.start()
    finally:
        if not is_asked:
            del os.environ[_LOG_LEVEL]


def _cut(name: str) -> str:
    return name if len(name) <= 48 else f"{name[:47]}…"


def _pairs(marks: list[tuple[str, Any]]) -> Iterable[tuple[tuple[str, Any], tuple[str, Any]]]:
    return zip(marks, marks[1:], strict=False)


def _now(device: torch.device) -> Any:
    """Return a point in time; on a GPU an event of its own work, without a device sync."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between(first: Any, second: Any) -> float:
    if isinstance(first, float):
        return float(second - first)
    return float(first.elapsed_time(second)) / 1e3
