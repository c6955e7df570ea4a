"""Checkpoints of a run on two processes: the first writes, both know, and they continue together."""

import os

import pytest
import torch
from torch import nn

import toys
from distributed.launcher import launch
from loopwright import Checkpointing, Trainer

pytestmark = pytest.mark.distributed


class Remembering(nn.Module):
    """A model with a memory of what this process has seen, and its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.rank = toys.network(8, dropout=0.2), int(os.environ.get("RANK", 0))
        self.memory = torch.zeros(3)

    def forward(self, inputs):
        if self.training:
            self.memory = 0.5 * self.memory + inputs.detach().mean()
        return self.network(inputs) + self.memory.sum()


def fit(folder: str, num_epochs: int) -> list:
    watch = toys.watch(on_checkpoint_saved=lambda trainer, path, **kwargs: path.name)
    checkpoints = Checkpointing(folder, every_updates=2)
    options = {"eval_dataset": toys.data(6), "seed": 3, "checkpoints": checkpoints, "resume_from": "auto"}
    model = Remembering()
    trainer = toys.trained([watch], toys.data(22), num_epochs, model=model, cls=Trainer, **options)
    return [trainer.result.updates, watch.seen, toys.weights(model).tolist(), trainer.result.metrics]


def whole_and_in_two_parts() -> list:
    return [fit("whole", 2), fit("parts", 1), fit("parts", 2)]


def test_a_run_of_two_processes_saves_once_and_continues_with_the_same_bits(tmp_path, monkeypatch, capsys):
    first, second = launch(whole_and_in_two_parts, tmp_path, timeout_seconds=90)
    assert first == second
    whole, _, resumed = first
    assert whole[0] == resumed[0] == 6
    assert whole[2:] == resumed[2:]
    assert f"step-{6:010d}" in whole[1]
    assert [path.name for path in (tmp_path / "whole").glob(".*")] == [".lock"]
    monkeypatch.chdir(tmp_path)
    fit("parts", 3)  # on one process, which cannot have the memory of two
    said = capsys.readouterr().out
    assert "Resuming without the state of model.memory:" in said and "guarantee T2" in said
