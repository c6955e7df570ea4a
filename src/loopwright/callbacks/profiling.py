"""Where the time of an update goes: some updates of a run under torch.profiler, in words and as files."""

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
_RANGES = (_MARK, "Optimizer.", "ProfilerStep")  # stretches of time with a name, ours and torch's: no operators
_NUM_OPERATORS = 10


class ProfileCallback(TrainerCallback):
    """Profiles some updates of a run: prints where their time goes and the operators that take most, keeps a trace.

    The first updates are left out: they make the optimizer's state, record graphs and warm caches. An evaluation ends
    it early, so that only updates are counted. The numbers of the run are the same with and without it; the profiled
    updates are a little slower. With several processes the first one is profiled.

    Time is taken between the events of an update, on the device's own clock where it is a GPU. What is run as a CUDA
    graph is one share, since forward, backward and optimizer are one there. Clipping counts as backward.

    A run that fails takes its profiler with it, and nothing is told. Files that cannot be written are told, and the run
    goes on.

    Args:
        num_updates: how many updates are profiled.
        folder: gets summary.json and trace.json.gz, which chrome://tracing and ui.perfetto.dev open; None writes none.
        num_warm_ups: how many updates are left out first.

    Raises:
        ConfigError: a number that cannot be.
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
        """Settle which updates are profiled."""
        self._forget()
        self._is_over = not trainer.run_config.is_world_process_zero
        self._first = trainer.progress.update + self._num_warm_ups

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Begin with the first update of the run, where none is left out."""
        self._begin_if_due(trainer)

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """End the wait for data, or the backward pass of the micro-batch before."""
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
        """Begin after the last update that is left out; end after the last that is profiled."""
        if self._profiler is not None:
            is_skipped = self._marks[-1][0] == "forward"
            self._mark(trainer, "backward" if is_skipped else "other", "data")
            self._end_update(trainer)
            if self._num_done == self._num_updates:
                self._finish(trainer)
        else:
            self._begin_if_due(trainer)

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """End early: an evaluation is no update."""
        if self._profiler is not None and self._num_done:
            self._finish(trainer)
        self._stop()

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Begin after an evaluation that came before the first update that is profiled."""
        self._begin_if_due(trainer)

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """End with what there is."""
        if self._profiler is not None and self._num_done:
            self._finish(trainer)
        elif not self._is_over:
            self._stop()
            self._is_over = True
            trainer.print(
                f"Nothing was profiled: {self._num_warm_ups} updates are left out first, and the run had "
                f"{trainer.progress.update - self._first + self._num_warm_ups}"
            )

    def on_evaluation_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Profile nothing: an evaluation is no update."""
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
            trainer.print(f"Nothing is profiled: {str(error).splitlines()[0]}")
            return
        self._profiler = profiler
        self._end = weakref.finalize(self, profiler.stop)  # also if the callback is taken away
        self._start_update(trainer)
        self._enter("data")

    def _start_update(self, trainer: TrainerLike) -> None:
        self._marks = [("", _now(trainer.device))]
        self._waited = getattr(trainer, "data_wait_seconds", 0.0)
        self._num_graphed = getattr(trainer, "num_graphed_updates", 0)

    def _mark(self, trainer: TrainerLike, ended: str, begun: str) -> None:
        """Note that one phase is over and another begins."""
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
        """Stop the profiler, if it runs, and return it."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None and self._end is not None:
            self._enter(None)
            self._end()
        return profiler

    def _finish(self, trainer: TrainerLike) -> None:
        """Say what was found, and write it down; how long that took is recorded: it is no part of the training."""
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
        trainer.print("\n".join(lines))
        trainer.write_record("profile", took_seconds=round(time.monotonic() - began, 3))


def _write(folder: Path, profiler: Any, found: Mapping[str, Any]) -> str:
    """Write the trace and the summary; return where they are, or why they are not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / TRACE_FILE))
        write_json(folder / SUMMARY_FILE, found)
    except (OSError, RuntimeError) as error:  # a full disk: what was found is printed
        return f"not written to {folder}: {error}"
    return f"trace: {folder / TRACE_FILE}, for chrome://tracing or ui.perfetto.dev"


def add_phases(
    seconds: dict[str, float], intervals: Iterable[tuple[str, float]], waited: float, is_graph: bool
) -> None:
    """Add the intervals of one update to the seconds of the phases; all of them are in one phase or another.

    Args:
        seconds: by phase; changed.
        intervals: (phase, seconds) in their order; the first one is the wait for data, and what came before it.
        waited: seconds that the host waited for data.
        is_graph: forward, backward and optimizer were one.
    """
    for name, length in intervals:
        if name == "data":
            data = min(waited, length)
            seconds["data"] += data
            seconds["other"] += length - data
        else:
            seconds[GRAPH_PHASE if is_graph and name != "other" else name] += length


def top_operators(events: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the operators that took most time themselves, on the device where that has a clock of its own.

    Under CUDA graphs no operator is run from the host: then it is the kernels that are returned.

    Args:
        events: what `torch.profiler.profile.key_averages` returns.

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
    """Return what was found as lines for a person.

    Args:
        found: what summary.json holds.
        num_asked: how many updates were to be profiled.
    """
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
    """Return shares of one as tenths of per cent that add up to 100."""
    tenths = {name: 1000 * share for name, share in shares.items()}
    rounded = {name: int(value) for name, value in tenths.items()}
    missing = round(sum(tenths.values())) - sum(rounded.values())
    for name in sorted(tenths, key=lambda name: rounded[name] - tenths[name])[:missing]:
        rounded[name] += 1
    return {name: value / 10 for name, value in rounded.items()}


def _start(profiler: Any) -> None:
    """Start a profiler without the lines that torch's own library writes to the error stream, unless they are asked."""
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
    """Return a point in time: of the device's own work where it is a GPU, which the host does not wait for."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between(first: Any, second: Any) -> float:
    """Return the seconds between two points in time."""
    if isinstance(first, float):
        return float(second - first)
    return float(first.elapsed_time(second)) / 1e3
