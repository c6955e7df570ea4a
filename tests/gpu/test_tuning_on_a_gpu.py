"""Finding a learning rate and profiling on a real device: nothing is left behind, and graphs are one share."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import toys
from loopwright import Trainer
from loopwright.callbacks import ProfileCallback

pytestmark = pytest.mark.gpu


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 32, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def trainer_of(*callbacks: object) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks)


def state_of(trainer: Trainer) -> list:
    return [toys.state_of(trainer), trainer.optimizer.state_dict(), torch.cuda.get_rng_state()]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_finding_a_rate_leaves_no_trace_between_two_runs(precision):
    found, plain = trainer_of(), trainer_of()
    for trainer in (found, plain):
        trainer.train(samples(), num_epochs=1, per_device_batch_size=16, seed=1, mixed_precision=precision)
    before = copy.deepcopy(state_of(found))

    curve = found.find_lr(samples(), 16, num_updates=30, seed=1, mixed_precision=precision)

    toys.assert_same(state_of(found), before)
    assert len(curve.losses) > 5
    for trainer in (found, plain):
        trainer.train(samples(), num_epochs=1, per_device_batch_size=16, seed=2, mixed_precision=precision)
    toys.assert_same_weights(found, plain)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_profile_has_the_shares_of_its_mode_and_changes_no_number(tmp_path, mode):
    options = {"num_epochs": 2, "per_device_batch_size": 16, "seed": 1, "step_mode": mode}
    profiled, plain = trainer_of(ProfileCallback(4, tmp_path)), trainer_of()
    results = [trainer.train(samples(), **options) for trainer in (profiled, plain)]

    found = json.loads((tmp_path / "summary.json").read_text())
    names = ["data", "forward", "backward", "optimizer", "other"]
    assert list(found["shares"]) == (names if mode == "eager" else ["data", "update (graph)", "other"])
    assert sum(found["shares"].values()) == pytest.approx(1) and found["operators"]
    assert all(share >= 0 for share in found["shares"].values())
    limits = found["limits"]
    assert limits["launch_seconds"] >= 0 and 0 < limits["share"] < 1
    assert limits["flops_per_second"] > 1e12 and limits["bytes_per_second"] > 1e11
    if mode == "graph":  # operators are not run from the host there
        assert not any(each["name"].startswith("aten::") for each in found["operators"])
    assert results[0] == results[1]
    toys.assert_same_weights(profiled, plain)
