"""Memory that runs out on one of several processes: nothing is split there, and both end with the reason.

A run that was split on one process goes on whole on two.
"""

import os

import pytest
import torch
from torch import nn

import toys
from distributed.launcher import Results, launch, run
from loopwright import Checkpointing, Trainer

pytestmark = pytest.mark.distributed


class Full(Trainer):
    """Has no room left on the second process, so many times."""

    times_full = 99

    def calculate_train_batch_loss(self, batch):
        if self.progress.update == 2 and os.environ["RANK"] == "1" and self.times_full:
            self.times_full -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().calculate_train_batch_loss(batch)


def fit(results: Results) -> None:
    toys.trained((), toys.data(48), cls=Full, seed=2, oom="split")


def test_memory_that_runs_out_on_one_process_ends_both_with_the_reason(tmp_path):
    first, second = run(fit, tmp_path)
    assert [first.exit_code, second.exit_code] == [1, 1]
    assert "error[memory.train]: out of memory in update 3 (batch 4)" in second.output
    assert "not run again in smaller parts: several processes take part" in second.output
    assert "rank 1 of 2 failed" in first.output


class FullOnce(Full):
    times_full = 1


def fit_with_buffers(results: Results) -> None:  # which the processes share in each forward pass
    model = toys.seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    toys.trained((), toys.data(48), model=model, cls=FullOnce, seed=2)


def test_a_process_without_memory_runs_no_forward_pass_that_the_others_would_have_to_join(tmp_path):
    first, second = run(fit_with_buffers, tmp_path, timeout_seconds=30)
    assert [first.exit_code, second.exit_code] == [1, 1]
    assert "error[memory.train]: out of memory in update 3 (batch 4)" in second.output
    assert "the activations of a micro-batch" not in second.output


class Small(nn.Linear):
    largest = 0

    def forward(self, inputs):
        if len(inputs) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.largest = max(self.largest, len(inputs))
        return super().forward(inputs)


def go_on(folder, room: int, accumulation: int, updates: int | None = None) -> list:
    model = toys.seeded(Small, 4, 1)
    model.room = room
    windows = {"per_device_batch_size": 6, "gradient_accumulation_steps": accumulation, "max_num_train_steps": updates}
    saved = {"checkpoints": Checkpointing(folder, allow_changed_model=True), "resume_from": "auto"}
    options = {"eval_dataset": toys.data(5), "seed": 2, "oom": "split", **windows, **saved}
    trainer = toys.trained((), toys.data(17), model=model, cls=Trainer, **options)
    result = trainer.result
    return [result.updates, model.largest, result.metrics["eval_loss_epoch"], trainer.num_parts]


def resume_on_two() -> list:
    return go_on("split", 1000, 1)


def test_a_run_that_was_split_on_one_process_continues_whole_on_two(tmp_path):
    updates, _, _, parts = go_on(tmp_path / "split", 2, 2, updates=1)
    assert (updates, parts) == (1, 4)
    # The second process has a pad in the last update.
    first, second = launch(resume_on_two, tmp_path)
    assert first[:2] == second[:2] == [2, 5] and first[2] == second[2] and first[3] == second[3] == 1
