"""Choose the micro-batch of a run: `--batch auto`, and `--effective_batch` for the samples of an update."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Subset

from loopwright.callbacks import TrainerCallback
from loopwright.engine.memory import SavedBytes, forget_frames, free_bytes, is_out_of_memory
from loopwright.engine.nested import iter_tensors
from loopwright.errors import InputError
from loopwright.protocols import TrainerLike
from loopwright.quantities import size
from loopwright.runs.job import RunJob
from loopwright.runs.settings import Settings
from loopwright.runs.trainer import TaskTrainer, loader_options
from loopwright.runs.trial import longest_rows, put_back

BATCH = "per_device_train_batch_size"
_ACCUMULATION = "gradient_accumulation_steps"
_OF_GPU = 0.9  # at most this share of GPU memory: leaves room for peaks and fragmentation
_OF_HOST = 0.8  # at most this share of the available memory: others use it too
_UPDATES = 2  # the optimizer allocates its state in the first one
_MICRO_BATCHES = 2  # if an update has several: from the second one on, gradients are held


def choose_batch(run: RunJob) -> None:
    """Set micro-batch and accumulation of a new run; `--batch auto` tries powers of two on the longest rows."""
    job, settings = run.job, run.settings
    args, training = job.args, job.training
    if args.effective_batch is None and BATCH not in args.auto:
        return
    num_processes = TaskTrainer(job).num_processes
    given = training.train_batch_size * training.gradient_accumulation_steps * num_processes
    effective = given if args.effective_batch is None else args.effective_batch
    if BATCH not in args.auto and settings.is_given(BATCH):
        _accumulate(settings, training.train_batch_size, effective, num_processes)
        return
    asked = "--batch auto" if BATCH in args.auto else f"{_update_flag(args)} without --batch"
    if num_processes > 1:
        what = f"{asked} is for one process, and there are {num_processes}"
        raise InputError("args.value", what, fix=f"--batch {training.train_batch_size}")
    if settings.is_given(_ACCUMULATION) and args.effective_batch is not None:
        raise InputError(
            "args.value",
            f"{_update_flag(args)} and --gradient_accumulation_steps {training.gradient_accumulation_steps} "
            "with a --batch that is to be found: the accumulation follows from both",
            fix="leave out --gradient_accumulation_steps",
        )
    reason = job.task.why_not_cut(job)
    if reason is not None:
        raise InputError("args.value", f"{asked}: {reason}", fix=f"--batch {effective}")
    if BATCH not in args.auto:
        args.auto.append(BATCH)
    largest = _largest(run, effective)
    settings.choose(BATCH, largest)
    _accumulate(settings, largest, effective, 1)


def _update_flag(args: Any) -> str:
    """Return the flag that was given for the samples of an update; chat derives them from tokens."""
    tokens = getattr(args, "tokens_per_update", None)
    return f"--effective_batch {args.effective_batch}" if tokens is None else f"--tokens_per_update {tokens}"


def _accumulate(settings: Settings, batch: int, effective: int, num_processes: int) -> None:
    accumulation, rest = divmod(effective, batch * num_processes)
    each = f" on {num_processes} processes" if num_processes > 1 else ""
    what = f"{_update_flag(settings.args)}: an update of {effective} samples"
    if rest or not accumulation:
        possible = batch * num_processes * max(1, round(effective / (batch * num_processes)))
        flag, value = _update_flag(settings.args).split()
        fix = f"{flag} {int(value) // effective * possible}"
        raise InputError("args.value", f"{what} cannot be made of micro-batches of {batch}{each}", fix=fix)
    given = settings.training.gradient_accumulation_steps
    if settings.args.effective_batch is not None and settings.is_given(_ACCUMULATION) and given != accumulation:
        what = f"{what} in micro-batches of {batch}{each} accumulates {accumulation}, not {given}"
        raise InputError("args.value", what, fix="leave out --gradient_accumulation_steps")
    settings.training.gradient_accumulation_steps = accumulation
    settings.sources[_ACCUMULATION] = "auto"


@dataclass(frozen=True)
class _Need:
    num_bytes: int  # peak use on a GPU; activations kept by the forward pass on the host
    held: int  # on the host, the gradients and the optimizer's state


def _largest(run: RunJob, effective: int) -> int:
    """Return the largest micro-batch that fits, and print it; raise MemoryLimitError if one sample does not fit."""
    job, screen = run.job, run.screen
    started, best, needed, reason = time.monotonic(), 0, _Need(0, 0), ""
    powers = [2**power for power in range(effective.bit_length()) if effective % 2**power == 0]
    candidates = [rows for rows in powers if rows <= len(job.train_dataset)] or [1]
    with screen.waiting("finding a batch size", len(candidates)) as waiting:
        for rows in candidates:
            device = TaskTrainer(job).device
            room = max(_room(device) - needed.held, 0)
            # Memory grows with the rows: skip the next size if it cannot fit.
            if best and device.type != "cuda" and 2 * needed.num_bytes > room:
                reason = f"{rows} would need about {size(2 * needed.num_bytes)} of {size(room)}"
                break
            found = _tried(run, rows, min(effective // rows, _MICRO_BATCHES))
            if found is None:
                reason = f"{rows} do not fit"
                break
            if best and found.num_bytes > room:
                reason = f"{rows} need {size(found.num_bytes)} of {size(room)}"
                break
            best, needed = rows, found
            waiting.to(rows.bit_length())
    why = f"the largest power of two that fits: {reason}" if reason else "as many as an update can have"
    what = "the GPU's memory" if device.type == "cuda" else "activations"
    screen.block(
        "auto",
        f"batch {best} × accum {effective // best} = {effective}, {why} · {size(needed.num_bytes)} of {what} · "
        f"{time.monotonic() - started:.1f} s",
    )
    return best


def _room(device: torch.device) -> float:
    if device.type == "cuda":
        return _OF_GPU * (free_bytes(device) + torch.cuda.memory_allocated(device))
    return _OF_HOST * free_bytes(device)


class _FirstForward(TrainerCallback):
    """Counts the bytes that the forward pass of the first micro-batch keeps; `stack` ends the counting."""

    asks_alike = True

    def __init__(self, saved: SavedBytes, stack: ExitStack) -> None:
        self._saved = saved
        self._stack = stack
        self._is_first = True

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self._is_first:
            self._is_first = False
            self._stack.enter_context(self._saved.counting())

    def on_train_step_end(self, trainer: TrainerLike, *args: Any, **kwargs: Any) -> None:
        self._stack.close()


def _tried(run: RunJob, rows: int, num_micro_batches: int) -> _Need | None:
    """Train two updates on this many long rows; return the memory needed, or None if it does not fit."""
    job = run.job
    saved, stack = SavedBytes(job.model.parameters()), ExitStack()
    is_on_gpu = TaskTrainer(job).device.type == "cuda"
    trainer = run.create_trainer([] if is_on_gpu else [_FirstForward(saved, stack)], is_trial=True)
    device = trainer.device
    if is_on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    sizes = {"per_device_batch_size": rows, "gradient_accumulation_steps": num_micro_batches}
    with put_back(job, device):
        try:
            with stack:
                trainer.train(
                    Subset(job.train_dataset, longest_rows(job.train_dataset, rows) * num_micro_batches * _UPDATES),
                    **{**run.update_arguments(), **sizes},
                    num_epochs=1,
                    max_num_train_steps=_UPDATES,
                    train_dataloader_kwargs=loader_options(run.training, has_workers=False),
                    step_mode="eager",
                )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or rows == 1:
                raise
            forget_frames(error)
            return None
        if is_on_gpu:
            return _Need(int(torch.cuda.max_memory_allocated(device)), 0)
        gradients = [parameter for parameter in job.model.parameters() if parameter.requires_grad]
        state = iter_tensors(list(trainer.optimizer.state.values()))
        return _Need(saved.num_bytes, sum(tensor.nbytes for tensor in (*gradients, *state)))
