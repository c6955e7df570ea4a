"""The start block of a run: model, device, batch, baselines, time, guarantee.

The lines about the data are printed earlier, by `loopwright.runs.data.describe`, before torch is imported; the lines
about memory and disk come from the rehearsal.
"""

from __future__ import annotations

import contextlib
import math
import platform
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from loopwright.checkpoint.store import checkpoint_folders, read_manifest, update_of
from loopwright.config.program import as_called
from loopwright.data.buckets import may_be_graphs
from loopwright.errors import CheckpointError
from loopwright.quantities import counted
from loopwright.run_folder import RunFolder
from loopwright.runs.console.screen import Screen, clock, metrics_text
from loopwright.runs.provenance import name_of
from loopwright.training.prepare import unused_devices

if TYPE_CHECKING:
    from loopwright.runs.job import RunJob

_MOST_NAMES = 4
_PRINTED_BY_RUN = ("devices.unused", "checkpoint.saved")
_PRECISIONS = {"no": "fp32", "bf16": "bf16 mixed precision", "fp16": "fp16 mixed precision", "fp8": "fp8"}


def print_model(run: RunJob) -> None:
    job = run.job
    parameters = list(job.model.parameters())
    total = sum(one.numel() for one in parameters)
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    shown, more = job.new_weights[:_MOST_NAMES], len(job.new_weights) - _MOST_NAMES
    new = f"  new: {', '.join(shown)}{f' and {more} more' if more > 0 else ''}" if shown else ""
    name = job.args.model or "a small model from scratch"
    text = f"{name}  {_count(total)} parameters, {_count(trained)} trained{new}"
    run.notes["model"] = text
    better = f"--model {job.task.pretrained} would start from a pretrained one ({job.task.pretrained_megabytes} MB)"
    is_better = run.is_from_scratch and run.checkpoint is None and job.task.pretrained
    run.screen.block("model", text, *([better] if is_better else []), *job.notes)


def print_preview(run: RunJob) -> None:
    """Print the first training row with the trained tokens marked, for tasks that train on some of them."""
    if pieces := run.task.preview(run.job):
        run.screen.marked("row 1", [*pieces, ("\ntrained tokens are marked", False)])


def print_device(run: RunJob) -> None:
    training, device, num_processes = run.training, run.trainer.device, run.trainer.num_processes
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        total = torch.cuda.get_device_properties(device).total_memory
        where = f"{name}, {total / 1e9:.0f} GB" if num_processes == 1 else f"{num_processes} × {name}"
    else:
        where = f"{device.type.upper()} {platform.machine()}, {counted(torch.get_num_threads(), 'thread')}"
        where = where if num_processes == 1 else f"{num_processes} processes on {where} each"
    precision = _PRECISIONS.get(str(training.mixed_precision), str(training.mixed_precision))
    lines = [f"{where} · {precision} · {_step_mode(training, device, num_processes)}"]
    if device.type == "cuda" and num_processes == 1 and torch.cuda.device_count() > 1:
        lines.append(unused_devices(torch.cuda.device_count()))
    run.screen.block("device", *lines)


def print_batch(run: RunJob) -> None:
    training, length, num_processes = run.training, run.length, run.trainer.num_processes
    batch = training.train_batch_size
    rate = "auto" if "learning_rate" in run.args.auto else f"{training.learning_rate:g}"
    run.screen.block(
        "batch",
        f"{batch} × accum {run.window // num_processes} × {counted(num_processes, 'device')} = {batch * run.window} · "
        f"{counted(length.updates, 'update')} in {counted(length.epochs, 'epoch')} · "
        f"{counted(length.evaluations_after(0) - 1, 'evaluation')}",
        f"lr {rate} {training.lr_scheduler_type}, "
        f"warmup {training.get_warmup_steps(length.updates)} · seed {training.seed}",
    )


def print_few_updates(run: RunJob) -> None:
    """Warn before a run that is too short to learn much."""
    updates, needed = run.length.updates, run.needed_updates
    if run.training.learning_rate == 0:
        run.screen.remark("note", "--lr 0 changes no weight, so nothing is learned")
    if run.checkpoint is None and updates * 5 < needed:
        longer = f"--epochs {math.ceil(needed / run.length.updates_per_epoch)} makes about {needed}"
        longer = f"--max_steps {needed}" if run.training.max_steps > 0 else longer
        kind = "from scratch" if run.is_from_scratch else "to fine-tune"
        what = f"{counted(updates, 'update')} will hardly do for a model {kind}"
        run.screen.remark("note", f"{what}: {longer}")


def print_baselines(run: RunJob) -> None:
    if run.baselines:
        lines = (f"{name} {metrics_text(values, {})}" for name, values in run.baselines.items())
        run.screen.block("naive", " · ".join(lines))


def print_time(run: RunJob) -> None:
    run.length = length = replace(run.length, start_seconds=time.monotonic() - run.screen.began)
    seconds = length.expected_seconds()
    if seconds is None:
        run.screen.block("time", "known once the first updates are logged: there was no rehearsal")
        return
    tested = f", {length.test_evaluations:.2g} times that for the test data" if length.test_evaluations else ""
    run.screen.block(
        "time",
        f"about {clock(seconds)} in all, from the rehearsal: {_seconds(length.update_seconds)} an update and "
        f"{_seconds(length.evaluation_seconds)} an evaluation{tested}",
    )


def print_saved(run: RunFolder, seconds: float, screen: Screen) -> str:
    """Print and return the point from which an interrupted run can resume."""
    screen.close_line()
    name, found = name_of(run), []
    for folder in checkpoint_folders(run.checkpoints):
        with contextlib.suppress(CheckpointError):
            found.append((update_of(read_manifest(folder)), folder.name))
    newest = max(found, default=None)  # which may be newer than status.json
    if newest is None:
        text = f"nothing was saved yet   start again with: lw resume {name}"
    elif newest[0] == run.status.get("update"):
        text = f"saved checkpoints/{newest[1]} ({seconds:.1f} s)   continue with: lw resume {name}"
    else:
        text = f"not saved again: the last state is checkpoints/{newest[1]}   continue with: lw resume {name}"
    text = as_called(text)
    screen.print(text)
    return text


def print_notice(run: RunJob, kind: str, text: str, **fields: Any) -> None:
    """Print a message of the trainer (see `Trainer.notify`), except those that the run prints itself."""
    if kind == "resume.guarantee":
        run.screen.block("resume", fields["guarantee"])
        if run.folder is not None and run.trainer.is_first:
            run.folder.record(guarantee=fields["guarantee"])
    elif kind not in _PRINTED_BY_RUN:
        run.screen.print_wrapped(text)
        run.screen.events.emit("note", message=text)


def _step_mode(training: Any, device: torch.device, num_processes: int) -> str:
    is_compiled = training.torch_compile or training.step_mode == "compile"
    if not may_be_graphs(training, device, num_processes):
        return "updates compiled by torch.compile" if is_compiled else "eager updates"
    if is_compiled:
        return "compiled updates as CUDA graphs where possible"
    return "updates as CUDA graphs" + ("" if training.step_mode == "graph" else " where possible (auto)")


def _count(number: int) -> str:
    if number >= 1e9:
        return f"{number / 1e9:.2f} B"
    return f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number:,}"


def _seconds(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
