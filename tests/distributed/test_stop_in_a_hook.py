"""A stop raised inside a hook by one process only: the other must not wait for it for ever."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import toys
from distributed.launcher import launch
from loopwright import StopTrainingError, Trainer

pytestmark = pytest.mark.distributed


class StopsOnRankOne(Trainer):
    def calculate_train_batch_loss(self, batch):
        if self.progress.update == 3 and self._accelerator.process_index == 1:
            raise StopTrainingError("enough on one")
        return super().calculate_train_batch_loss(batch)


def train_until_one_stops():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    trainer = StopsOnRankOne(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.01), callbacks=())
    result = trainer.train(toys.data(64), 5, per_device_batch_size=4, seed=1)
    return [result.updates, result.stop_reason, [float(value) for value in model.weight.detach().flatten()]]


def test_a_stop_raised_in_a_hook_of_one_process_ends_both_at_the_same_update(tmp_path):
    first, second = launch(train_until_one_stops, tmp_path, timeout_seconds=60)
    assert first[0] == second[0] == 4
    assert first[1] == "Stopped by another process"
    assert second[1] == "enough on one"
    assert first[2] == second[2]
