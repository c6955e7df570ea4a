"""Two processes look for a learning rate together: one curve, that of one process, and nothing is left behind."""

import pytest
import torch

import toys
from distributed.launcher import run
from loopwright import Trainer

pytestmark = pytest.mark.distributed


def whole(tensors):
    return [getattr(tensor, "full_tensor", tensor.clone)().detach() for tensor in tensors]


def found(batch_size, **sharding):
    model, dataset = toys.network(), toys.pairs(32)
    trainer = toys.trainer_of((), model, 0.1, cls=Trainer)
    trainer.train(dataset, num_epochs=1, per_device_batch_size=batch_size, seed=1, **sharding)
    before = whole(model.parameters())
    state = whole(value["momentum_buffer"] for value in trainer.optimizer.state.values())
    curve = trainer.find_lr(dataset, batch_size, start=1e-4, end=1e4, num_updates=30, seed=2, **sharding)
    after = whole(value["momentum_buffer"] for value in trainer.optimizer.state.values())
    is_same = all(map(torch.equal, [*before, *state], [*whole(model.parameters()), *after]))
    return curve, is_same, trainer.progress.update


def measure(results):
    curve, results["is_same"], results["updates"] = found(2)
    results["rates"], results["losses"] = list(curve.rates), list(curve.losses)
    results["reason"] = curve.stop_reason
    curve, results["is_same_in_shards"], _ = found(2, sharding="full_shard")
    results["losses_in_shards"] = list(curve.losses)


def test_two_processes_find_one_curve_and_put_everything_back(tmp_path):
    alone, _, _ = found(4)

    first, second = run(measure, tmp_path)

    assert first.exit_code == second.exit_code == 0
    assert first["is_same"] and second["is_same"]
    assert first["is_same_in_shards"] and second["is_same_in_shards"]
    assert first["losses_in_shards"] == second["losses_in_shards"] == pytest.approx(first["losses"], rel=1e-4)
    assert first["updates"] == second["updates"] == 8
    assert first["rates"] == second["rates"] and first["losses"] == second["losses"]
    assert first["reason"] == second["reason"] == "the loss is 4 times its best"
    assert first["losses"][: len(alone.losses)] == pytest.approx(list(alone.losses), rel=1e-4)
