"""The dress rehearsal: everything that a run does, once, before its first update; then all state is restored.

One update, two evaluation batches with the metric, a save, a load, and a bitwise comparison. A fault shows up here,
within seconds, and not after the first epoch.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Subset

from loopwright.callbacks import LimitEvalStepsCallback, TrainerCallback
from loopwright.checkpoint import Checkpointing, read
from loopwright.checkpoint.state_by_name import optimizer_state, parameter_names
from loopwright.data.images import ImageDataset
from loopwright.engine.memory import release_memory
from loopwright.engine.nested import iter_tensors
from loopwright.engine.processes import world_process_zero_only
from loopwright.engine.seeding import generator_states, restore_generator_states
from loopwright.engine.sharding import load_weights, local, split_like
from loopwright.errors import CheckpointError, ConfigError, Preempted
from loopwright.lr_finder import print_nothing
from loopwright.protocols import TrainerLike
from loopwright.quantities import size
from loopwright.run_folder import RunFolder
from loopwright.runs.console.screen import Screen
from loopwright.runs.trainer import TaskTrainer, loader_options
from loopwright.tasks.base import Job

_ROWS_LOOKED_AT = 512
_EVAL_BATCHES = 2
_UPDATES = 2
_FAULT = "the disk or the memory is at fault"


@dataclass(frozen=True)
class Rehearsal:
    """The findings of a rehearsal.

    Attributes:
        seconds: its duration.
        loss: of the one update.
        memory: peak bytes in use, on the device if there is one, else of the process.
        checkpoint_bytes: the size of a checkpoint.
        free_bytes: free space on the disk of the run.
        update_seconds: the duration of an update of long rows, once warm.
        evaluation_seconds: the duration of an evaluation, extrapolated from its first batches.
    """

    seconds: float
    loss: float
    memory: int
    checkpoint_bytes: int
    free_bytes: int
    update_seconds: float
    evaluation_seconds: float


class LapClock:
    """Measures the time between calls; it synchronizes with the device, which no run does."""

    def __init__(self) -> None:
        self._began = 0.0

    def start(self) -> None:
        """Start a lap."""
        self._began = time.monotonic()

    def lap(self, device: torch.device) -> float:
        """Return the seconds since the last call of this or of `start`, after synchronizing with the device."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.monotonic()
        took, self._began = now - self._began, now
        return took


class Stopwatch(TrainerCallback):
    """Times the updates and the evaluation batches of a rehearsal.

    The first update is a warm-up with a learning rate of zero; only the last one counts.

    Attributes:
        updates: seconds of each update.
        batches: seconds of each evaluation batch.
    """

    asks_alike = True

    def __init__(self) -> None:
        self.updates: list[float] = []
        self.batches: list[float] = []
        self._clock = LapClock()
        self._rates: list[Any] = []

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Start the clock, with learning rates of zero."""
        self._rates = [group["lr"] for group in trainer.optimizer.param_groups]
        for group in trainer.optimizer.param_groups:
            group["lr"] = 0.0
        self._clock.start()

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Record the duration of an update, and restore the learning rates."""
        self.updates.append(self._clock.lap(trainer.device))
        for group, rate in zip(trainer.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Restart the clock."""
        self.batches = []
        self._clock.start()

    def on_eval_step_end(
        self, trainer: TrainerLike, batch: Any = None, batch_output: Any = None, step: int = 0, **kwargs: Any
    ) -> None:
        """Record the duration of a batch, all its parts together."""
        self.batches += [0.0] * (step + 1 - len(self.batches))
        self.batches[step] += self._clock.lap(trainer.device)


def rehearse(
    job: Job, make_optimizer: Callable[[Job], Any], run: RunFolder, screen: Screen, num_kept: int
) -> Rehearsal:
    """Rehearse a run, restore all state, and print the findings.

    Args:
        job: with its datasets.
        make_optimizer: makes an optimizer for the job.
        run: the run folder; files written there are removed again.
        screen: prints the findings.
        num_kept: how many checkpoints the run will keep.

    Raises:
        CheckpointError: the loaded state differs from the saved state.
    """
    started = time.monotonic()
    watch = Stopwatch()
    callbacks = [LimitEvalStepsCallback(_EVAL_BATCHES, limit_intermediate_only=False), watch]
    trainer = TaskTrainer(job, make_optimizer(job), callbacks, report=print_nothing, is_rehearsal=True)
    device = trainer.device
    folder = run.path / ".rehearsal"
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with put_back(job, device):
        try:
            loss, num_bytes = _one_update(job, trainer, folder)
        finally:
            world_process_zero_only(shutil.rmtree)(folder, ignore_errors=True)
    num_eval_batches = -(-len(job.eval_dataset) // (job.training.eval_batch_size * trainer.num_processes))
    found = Rehearsal(
        seconds=time.monotonic() - started,
        loss=loss,
        memory=_memory(device),
        checkpoint_bytes=num_bytes,
        free_bytes=shutil.disk_usage(run.path).free,
        update_seconds=min(watch.updates),
        evaluation_seconds=min(watch.batches, default=0.0) * num_eval_batches,
    )
    too_large = f"micro-batches of {job.training.train_batch_size} do not fit: {trainer.num_parts} parts each"
    where = "on the GPU" if device.type == "cuda" else "of this process"
    needed = (num_kept + 2) * num_bytes
    screen.block(
        "memory",
        f"{size(found.memory)} {where} · disk {num_kept + 2} checkpoints × {size(num_bytes)} = {size(needed)} of "
        f"{size(found.free_bytes)} free",
        *([too_large] if trainer.num_parts > 1 else []),
    )
    screen.block(
        "check",
        f"1 step (loss {loss:.4g}), eval {_EVAL_BATCHES} batches, save, load, compare: bit for bit the same · "
        f"{found.seconds:.1f} s",
    )
    return found


@contextmanager
def put_back(job: Job, device: torch.device) -> Iterator[None]:
    """Run a block that trains, then restore weights, buffers, modes and generators bit by bit."""
    kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in job.model.state_dict().items()}
    modes = [(module, module.training) for module in job.model.modules()]
    generators = generator_states(device)
    try:
        yield
    except Preempted as error:  # a rehearsal is not a run: there is nothing to resume
        raise Preempted(f"ended by {error.signal_name}") from None
    finally:
        load_weights(job.model, kept)
        for parameter in job.model.parameters():
            parameter.grad = None
        for module, mode in modes:
            module.training = mode
        restore_generator_states(generators, device)
        release_memory(device)


def _one_update(job: Job, trainer: TaskTrainer, folder: Any) -> tuple[float, int]:
    """Train on long rows, evaluate, save, load and compare; return the loss and the checkpoint's bytes.

    The same rows are trained on twice: the first pass is the warm-up, the second is timed.
    """
    training = job.training
    num_rows = training.train_batch_size * training.gradient_accumulation_steps * trainer.num_processes
    result = trainer.train(
        Subset(job.train_dataset, longest_rows(job.train_dataset, num_rows) * _UPDATES),
        num_epochs=1,
        eval_dataset=job.eval_dataset,
        per_device_batch_size=training.train_batch_size,
        max_num_train_steps=_UPDATES,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        gradient_clip_norm=training.max_grad_norm or None,
        train_dataloader_kwargs=loader_options(training, has_workers=False),
        eval_dataloader_kwargs={**loader_options(training, has_workers=False), "batch_size": training.eval_batch_size},
        collate_fn=job.collate_fn,
        seed=training.seed,
        mixed_precision=training.mixed_precision,
        step_mode="eager",
        oom=job.args.oom,
        checkpoints=Checkpointing(folder, keep_best=None, asynchronous=False),
    )
    num_bytes = world_process_zero_only(_compare)(job, trainer, folder / f"step-{trainer.progress.update:010d}")
    return float(result.metrics["train_loss_epoch"]), int(num_bytes or 0)


def _compare(job: Job, trainer: TaskTrainer, path: Any) -> int:
    saved = read(path)
    weights = {**saved.model, **saved.state["model_extra"]}
    for name, tensor in job.model.state_dict().items():
        if name in weights and not _are_same(tensor, weights[name]):
            raise CheckpointError(
                f"the rehearsal saved {name} and loaded something else: the disk or memory is at fault"
            )
    names = parameter_names(model=job.model)
    current = list(iter_tensors(optimizer_state(trainer.optimizer, names)))
    loaded = list(iter_tensors(saved.state["optimizer"]))
    if len(current) != len(loaded) or not all(map(_are_same, current, loaded)):
        raise CheckpointError(
            "the rehearsal saved the optimizer and loaded something else: the disk or memory is at fault"
        )
    return sum(file.stat().st_size for file in path.iterdir())


def _are_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(local(first.detach()).cpu(), local(split_like(second, first)).cpu())


def longest_rows(dataset: Any, count: int) -> list[int]:
    """Return the positions of up to `count` memory-hungry rows: the longest near the start of the data.

    Transformed images all have the same size, so the first ones are taken without decoding any.
    """
    if isinstance(dataset, ImageDataset) or "input_ids" not in dataset[0]:
        return list(range(min(count, len(dataset))))
    looked_at = range(min(len(dataset), max(_ROWS_LOOKED_AT, count)))
    lengths = [(num_tokens(dataset[index]), -index) for index in looked_at]
    return [-index for _, index in sorted(lengths, reverse=True)[:count]]


def num_tokens(sample: Mapping[str, Any]) -> int:
    """Return the tokens of a sample; with several texts, such as choices, the longest length times their number.

    Raises:
        ConfigError: it has no tokens.
    """
    if "input_ids" not in sample:
        raise ConfigError("train_sampling_strategy='group_by_length' is for texts: leave it out")
    ids = sample["input_ids"]
    is_several = len(ids) > 0 and isinstance(ids[0], (list, tuple))
    return len(ids) * max(map(len, ids)) if is_several else len(ids)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import psutil

    return int(psutil.Process().memory_info().rss)
