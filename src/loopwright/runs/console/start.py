"""The start block of a run: model, device, batch, floors, time, guarantee, folder.

The lines about the data are printed earlier, by `loopwright.runs.data.describe`, before torch is imported; the lines
about memory and disk come from the rehearsal.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from loopwright.checkpoint.store import checkpoint_folders, read_manifest, update_of
from loopwright.data.buckets import may_be_graphs
from loopwright.errors import CheckpointError
from loopwright.run_folder import RunFolder
from loopwright.runs.clock import Course
from loopwright.runs.console.screen import Screen, clock, metrics_text
from loopwright.tasks.base import Job
from loopwright.training.prepare import unused_devices

if TYPE_CHECKING:
    from loopwright.runs.trainer import TaskTrainer

_MOST_NAMES = 4
_PRINTED_BY_RUN = ("devices.unused", "checkpoint.saved")
_PRECISIONS = {"no": "fp32", "bf16": "bf16 mixed precision", "fp16": "fp16 mixed precision", "fp8": "fp8"}


def say_model(job: Job, screen: Screen) -> None:
    """Print the model, its size and its new weights; called once the model is built."""
    parameters = list(job.model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    shown, more = job.new_weights[:_MOST_NAMES], len(job.new_weights) - _MOST_NAMES
    new = f"  new: {', '.join(shown)}{f' and {more} more' if more > 0 else ''}" if shown else ""
    name = job.args.model or "a small model from scratch"
    screen.block("model", f"{name}  {_count(total)} parameters, {_count(trained)} trained{new}", *job.notes)


def say_device(job: Job, trainer: TaskTrainer, screen: Screen) -> None:
    """Print the device, the precision and the step mode; called before the first update."""
    training, device = job.training, trainer.device
    num_processes = trainer.num_processes
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        total = torch.cuda.get_device_properties(device).total_memory
        where = f"{name}, {total / 1e9:.0f} GB" if num_processes == 1 else f"{num_processes} × {name}"
    else:
        threads = torch.get_num_threads()
        each = f"{threads} thread{'s' if threads > 1 else ''}"
        where = f"{device.type.upper()} {platform.machine()}, {each}"
        where = where if num_processes == 1 else f"{num_processes} processes on {where} each"
    precision = _PRECISIONS.get(str(training.mixed_precision), str(training.mixed_precision))
    lines = [f"{where} · {precision} · updates are run {_step_mode(training, device, num_processes)}"]
    if device.type == "cuda" and num_processes == 1 and torch.cuda.device_count() > 1:
        lines.append(unused_devices(torch.cuda.device_count()))
    screen.block("device", *lines)


def say_batch(job: Job, course: Course, screen: Screen, num_processes: int, window: int) -> None:
    """Print the samples per update and the number of updates; called once the data is ready."""
    training = job.training
    batch = training.train_batch_size
    updates = f"{course.updates:,} update{'s' if course.updates > 1 else ''}"
    epochs = f"{course.epochs} epoch{'s' if course.epochs > 1 else ''}"
    evaluations = course.evaluations_after(0) - 1
    rate = "auto" if "learning_rate" in job.args.auto else f"{training.learning_rate:g}"
    told = f" · {evaluations} evaluation{'s' if evaluations != 1 else ''}"
    screen.block(
        "batch",
        f"{batch} × accum {window // num_processes} × {num_processes} device{'s' if num_processes > 1 else ''} = "
        f"{batch * window} · {updates} in {epochs}{told}",
        f"lr {rate} {training.lr_scheduler_type}, "
        f"warmup {training.get_warmup_steps(course.updates)} · seed {training.seed}",
    )


def say_floors(floors: Mapping[str, Mapping[str, float]], screen: Screen) -> None:
    """Print the scores of the trivial baselines on the validation data; called once they are known."""
    if floors:
        screen.block("floor", " · ".join(f"{name} {metrics_text(values, {})}" for name, values in floors.items()))


def say_time(course: Course, screen: Screen) -> None:
    """Print the expected duration and its basis; called after the rehearsal, if any."""
    seconds = course.expected_seconds()
    if seconds is None:
        screen.block("time", "known once the first updates are logged: there was no rehearsal")
        return
    screen.block(
        "time",
        f"about {clock(seconds)}, from the rehearsal: {_seconds(course.update_seconds)} an update and "
        f"{_seconds(course.evaluation_seconds)} an evaluation",
    )


def say_run(run: RunFolder, screen: Screen) -> None:
    """Print the run folder; called last, before the trainer begins."""
    screen.block("run", f"{run.id} -> {os.path.normpath(run.path)}")


def say_saved(run: RunFolder, seconds: float, screen: Screen) -> str:
    """Print and return the point from which an interrupted run can resume."""
    screen.close_line()
    name = run.id if run.path.name == run.id else os.path.normpath(run.path)
    newest = _newest_saved(run)
    if newest is None:
        told = f"nothing was saved yet   begin again with: lw resume {name}"
    elif newest[0] == run.status.get("update"):
        told = f"saved checkpoints/{newest[1]} ({seconds:.1f} s)   go on with: lw resume {name}"
    else:
        told = f"not saved again: the last state is checkpoints/{newest[1]}   go on with: lw resume {name}"
    screen.say(told)
    return told


def _newest_saved(run: RunFolder) -> tuple[int, str] | None:
    """Return update and name of the newest checkpoint, which may be newer than status.json; None without one."""
    found = []
    for folder in checkpoint_folders(run.checkpoints):
        with contextlib.suppress(CheckpointError):
            found.append((update_of(read_manifest(folder)), folder.name))
    return max(found, default=None)


def print_notice(screen: Screen, kind: str, text: str, **fields: Any) -> None:
    """Print a message of the trainer (see `Trainer.notify`), except those that the run prints itself."""
    if kind == "resume.guarantee":
        screen.block("resume", fields["guarantee"])
    elif kind not in _PRINTED_BY_RUN:
        screen.say_wrapped(text)
        screen.tell("note", message=text)


def _step_mode(training: Any, device: torch.device, num_processes: int) -> str:
    if training.torch_compile or training.step_mode == "compile":
        return "by torch.compile"
    if training.step_mode == "eager" or not may_be_graphs(training, device, num_processes):
        return "one operation after the other (eager)"
    return "as CUDA graphs" if training.step_mode == "graph" else "as CUDA graphs where that works (auto)"


def _count(number: int) -> str:
    if number >= 1e9:
        return f"{number / 1e9:.2f} B"
    return f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number:,}"


def _seconds(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
