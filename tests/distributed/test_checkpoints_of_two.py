"""Checkpoints of a run on two processes: the first writes, both know, and they continue together."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import toys
from distributed.launcher import launch
from loopwright import Checkpointing, Trainer
from loopwright.callbacks import TrainerCallback

pytestmark = pytest.mark.distributed


class Saved(TrainerCallback):
    def __init__(self):
        self.names = []

    def on_checkpoint_saved(self, trainer, path=None, **kwargs):
        self.names.append(path.name)


def fit(folder: str, num_epochs: int) -> list:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    saved = Saved()
    trainer = Trainer(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), 0.01), callbacks=[saved])
    checkpoints = Checkpointing(Path(os.environ["TWO_FOLDER"]) / folder, every_updates=2)
    result = trainer.train(
        toys.data(22), num_epochs, toys.data(6), per_device_batch_size=4, seed=3,
        checkpoints=checkpoints, resume_from="auto",
    )  # fmt: skip
    weights = [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]
    return [result.updates, saved.names, weights, result.metrics]


def whole_and_in_two_parts() -> list:
    return [fit("whole", 2), fit("parts", 1), fit("parts", 2)]


def test_a_run_of_two_processes_saves_once_and_continues_with_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("TWO_FOLDER", str(tmp_path))
    first, second = launch(whole_and_in_two_parts, tmp_path, timeout_seconds=90)
    assert first == second
    whole, _, resumed = first
    assert whole[0] == resumed[0] == 6
    assert whole[2:] == resumed[2:]
    assert f"step-{6:010d}" in whole[1]
    assert [path.name for path in (tmp_path / "whole").glob(".*")] == [".lock"]
