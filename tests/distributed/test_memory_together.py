"""Memory that runs out on one of several processes: nothing is split there, and both end with the reason."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from distributed.launcher import Results, run
from flaws import subject
from loopwright import Trainer

pytestmark = pytest.mark.distributed


class Full(Trainer):
    """Has no room left on the second process."""

    def calculate_train_batch_loss(self, batch):
        if self.progress.update == 2 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().calculate_train_batch_loss(batch)


def fit(results: Results) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    trainer = Full(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.01), callbacks=())
    trainer.train(subject.data(48), 1, per_device_batch_size=4, seed=2, oom="split")


def test_memory_that_runs_out_on_one_process_ends_both_with_the_reason(tmp_path):
    first, second = run(fit, tmp_path)
    assert [first.exit_code, second.exit_code] == [1, 1]
    assert "error[memory.train]: out of memory in update 3 (batch 4)" in second.output
    assert "not run again in smaller parts: several processes take part" in second.output
    assert "rank 1 of 2 failed" in first.output
