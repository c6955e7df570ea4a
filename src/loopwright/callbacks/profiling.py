"""Profile some updates of a run with torch.profiler: a printed summary, and files."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from loopwright.callbacks.base import TrainerCallback, require_counts
from loopwright.callbacks.roofline import limit_lines, limits_of, machine_rates, weight_traffic
from loopwright.engine.compilation import has_compiled_modules
from loopwright.engine.graphs import NotCapturableError
from loopwright.engine.temporary import replaced
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

    The matrix work of the run's first update is counted, for an estimate of how near updates are to the limit of the
    machine (see `roofline`); that update is slower too.

    A failed run reports no profile. If the files cannot be written, that is printed and the run continues.

    Args:
        num_updates: updates to profile.
        folder: gets summary.json and trace.json.gz, which chrome://tracing and ui.perfetto.dev open; None writes none.
        num_warm_ups: updates to skip first.
    """

    asks_alike = True
    graph_safe = True

    def __init__(self, num_updates: int = 10, folder: str | Path | None = None, num_warm_ups: int = 3) -> None:
        require_counts(num_updates=num_updates)
        if isinstance(num_warm_ups, bool) or not isinstance(num_warm_ups, int) or num_warm_ups < 0:
            raise ConfigError(f"num_warm_ups must be a whole number of at least 0, got {num_warm_ups!r}")
        self._num_updates = num_updates
        self._folder = None if folder is None else Path(folder)
        self._num_warm_ups = num_warm_ups
        self._profiler: Any = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._forget()

    def _forget(self) -> None:
        self._first = -1
        self._marks: list[tuple[str, Any]] = []  # the ends of phases in the current update
        self._updates: list[tuple[list[tuple[str, Any]], float, bool]] = []  # marks, seconds of waiting, is a graph
        self._before = (0.0, 0)  # seconds waited and updates graphed before the current one
        self._range: Any = None
        self._work: Any = None  # counts the floating-point operations of the first update
        self._num_flops: int | None = None
        self._is_counting = self._is_over = False

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._forget()
        self._is_over = not trainer.run_config.is_world_process_zero
        self._first = trainer.progress.update + self._num_warm_ups

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._begin_if_due(trainer)

    on_eval_epoch_end = on_train_epoch_start  # an evaluation may precede the first profiled update

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        # The first update is never a graph. A module that is compiled would run another way.
        if self._begins_counting and trainer.num_processes == 1 and not has_compiled_modules(trainer.model):
            self._start_counting()
        self._mark(trainer, "data" if len(self._marks) == 1 else "backward", "forward")

    def on_train_step_end(self, trainer: TrainerLike, *args: Any, **kwargs: Any) -> None:
        self._mark(trainer, "forward", "backward")

    def on_before_optimizer_step(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self._is_counting:
            self._num_flops = self._work.get_total_flops()
            self._stop_counting()
        self._mark(trainer, "backward", "optimizer")

    def on_optimizer_step_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._mark(trainer, "optimizer", "other")

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._stop_counting()
        if self._profiler is None:
            self._begin_if_due(trainer)
            return
        is_skipped = self._marks[-1][0] == "forward"
        self._mark(trainer, "backward" if is_skipped else "other", "data")
        waited, graphed = self._before
        self._updates.append((self._marks, trainer.data_wait_seconds - waited, trainer.num_graphed_updates > graphed))
        self._start_update(trainer)
        if len(self._updates) == self._num_updates:
            with trainer.spending(None):
                self._finish(trainer)

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self._profiler is not None and self._updates:
            self._finish(trainer)
        self._stop()

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self._profiler is not None and self._updates:
            self._finish(trainer)
        elif not self._is_over:
            self._stop()
            self._is_over = True
            num_updates = trainer.progress.update - self._first + self._num_warm_ups
            text = f"Nothing was profiled: the run had {num_updates} updates, all of them skipped as warm-up"
            trainer.notify("profile.empty", text, num_updates=num_updates)

    def on_evaluation_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._is_over = True

    def release(self) -> None:
        self._stop_counting()
        self._stop()

    def _begin_if_due(self, trainer: TrainerLike) -> None:
        if self._is_over or self._profiler is not None or trainer.progress.update != self._first:
            return
        on_gpu = [ProfilerActivity.CUDA] if trainer.device.type == "cuda" else []
        profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu], acc_events=True)  # without it some versions warn
        try:
            # The log lines of torch's library on stderr are off, unless they were enabled.
            with replaced(os.environ, {_LOG_LEVEL: os.environ.get(_LOG_LEVEL, "99")}):
                profiler.start()
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
        self._before = (trainer.data_wait_seconds, trainer.num_graphed_updates)

    def _mark(self, trainer: TrainerLike, ended: str, begun: str) -> None:
        if self._profiler is not None:
            self._marks.append((ended, _now(trainer.device)))
            self._enter(begun)

    def _enter(self, phase: str | None) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = None if phase is None else record_function(f"{_MARK}{phase}").__enter__()

    @property
    def _begins_counting(self) -> bool:
        return self._work is None and not self._is_over and self._profiler is None

    def _start_counting(self) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        self._work, self._is_counting = FlopCounterMode(display=False), True
        self._work.__enter__()

    def count_work(self, run_micro_batch: Callable[[], Any], number: int) -> None:
        """Count the operations of a micro-batch, one of `number` in an update."""
        if self._begins_counting:
            self._start_counting()
            with suppress(RuntimeError, MemoryError, NotCapturableError):  # too little memory for the whole model, say
                run_micro_batch()
                self._num_flops = number * self._work.get_total_flops()
            self._stop_counting()

    def _stop_counting(self) -> None:
        if self._is_counting:
            self._is_counting = False
            self._work.__exit__(None, None, None)

    def _limits(self, trainer: TrainerLike, seconds: Mapping[str, float], events: Iterable[Any]) -> dict[str, Any]:
        """Return the limits of an update; empty if its matrix work was not counted or memory is short."""
        model, number = trainer.model, len(self._updates)
        dtype = next((each.dtype for each in model.parameters()), torch.float32)
        flops, precision = self._num_flops, trainer.run_config.mixed_precision
        rates = None if flops is None else machine_rates(trainer.device, precision, dtype)
        if flops is None or rates is None:
            return {}
        kernels = [event.self_device_time_total / 1e6 for event in events if event.device_type.name == "CUDA"]
        busy = sum(kernels) / number if kernels else None
        traffic = weight_traffic(model, trainer.optimizer)
        whole, waited = sum(seconds.values()) / number, seconds["data"] / number
        return {"limits": limits_of(whole, waited, busy, flops, traffic, rates)}

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
        total = dict.fromkeys((*PHASES, GRAPH_PHASE), 0.0)
        for marks, waited, is_graph in self._updates:
            intervals = [
                (name, float(at - before) if isinstance(before, float) else before.elapsed_time(at) / 1e3)
                for (_, before), (name, at) in pairwise(marks)
            ]
            add_phases(total, intervals, waited, is_graph)
        is_eager = any(total[name] for name in ("forward", "backward", "optimizer")) or not total[GRAPH_PHASE]
        shown = (*PHASES, GRAPH_PHASE) if is_eager else ("data", GRAPH_PHASE, "other")
        seconds = {name: total[name] for name in shown if total[name] or name in PHASES}
        events = list(profiler.key_averages())
        found = {
            "num_updates": len(self._updates),
            "first_update": self._first + 1,
            "last_update": self._first + len(self._updates),
            "device": str(trainer.device),
            "seconds": seconds,
            "shares": {name: value / (sum(seconds.values()) or 1.0) for name, value in seconds.items()},
            "operators": top_operators(events),
            **self._limits(trainer, seconds, events),
        }
        lines = summary_lines(found, self._num_updates) + (limit_lines(found["limits"]) if "limits" in found else [])
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
    """Add the intervals of one update, as (phase, seconds), to the seconds of the phases.

    The first interval includes the wait for data and everything before it. Of a graph all but the rest is one phase.
    """
    for name, length in intervals:
        if name == "data":
            seconds["data"] += min(waited, length)
            seconds["other"] += length - min(waited, length)
        else:
            seconds[GRAPH_PHASE if is_graph and name != "other" else name] += length


def top_operators(events: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the operators with the most self time, from `key_averages()`, the slowest first.

    The device's clock counts if it has one. Under CUDA graphs the host runs no operators: then these are the kernels.
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
    """Return the content of summary.json as readable lines; `num_asked` updates were to be profiled."""
    number, total = found["num_updates"], sum(found["seconds"].values())
    fewer = "" if number == num_asked else f" (of {num_asked} requested: an evaluation or the end came first)"
    shares = rounded_shares(found["shares"])
    lines = [
        f"profile updates {found['first_update']} to {found['last_update']}{fewer}: {1e3 * total / number:.3g} ms each",
        f"        {' · '.join(f'{name} {share:.1f} %' for name, share in shares.items())}",
    ]
    names = [name if len(name) <= 48 else f"{name[:47]}…" for name in (each["name"] for each in found["operators"])]
    width = max(map(len, names), default=0)
    if names:
        lines.append(f"        {'operator':<{width}}  {'calls':>8}  {'ms':>9}    share, per update")
    for name, each in zip(names, found["operators"], strict=True):
        calls, milliseconds = each["calls"] / number, 1e3 * each["seconds"] / number
        lines.append(f"        {name:<{width}}  {calls:8.4g}  {milliseconds:9.3f}  {100 * each['share']:5.1f} %")
    return lines


def rounded_shares(shares: Mapping[str, float]) -> dict[str, float]:
    """Return fractions as percentages, rounded to tenths, that add up to 100."""
    tenths = {name: 1000 * share for name, share in shares.items()}
    rounded = {name: int(value) for name, value in tenths.items()}
    missing = round(sum(tenths.values())) - sum(rounded.values())
    for name in sorted(tenths, key=lambda name: rounded[name] - tenths[name])[:missing]:
        rounded[name] += 1
    return {name: value / 10 for name, value in rounded.items()}


def _now(device: torch.device) -> Any:
    """Return a point in time; on a GPU an event of its own work, without a device sync."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
