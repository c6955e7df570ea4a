"""Parameters that a loss does not depend on: told by name on several processes, with what helps, which then does."""

import pytest
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn

import toys
from distributed.launcher import launch
from loopwright import Trainer
from loopwright.errors import ConfigError

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def partly_used():
    return toys.net(lambda self, inputs: self.used(inputs), used=nn.Linear(4, 1), unused=nn.Linear(3, 3))


class LooksForUnused(Trainer):
    def _create_accelerator(self):
        handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        return Accelerator(cpu=True, kwargs_handlers=[handler])


class OwnLoss(Trainer):
    def calculate_train_batch_loss(self, batch):
        outputs = self.model(batch[0])
        return {"loss": self.loss_func(outputs, batch[1]), "model_outputs": outputs, "batch_size": len(batch[1])}


def trained(cls, freezes: bool = False) -> list[float]:
    model = toys.seeded(partly_used)
    model.unused.requires_grad_(not freezes)
    toys.trained(model=model, cls=cls, per_device_batch_size=2, seed=1)
    return toys.weights(model.used).tolist()


def train_in_all_ways():
    weights = [trained(LooksForUnused), trained(Trainer, freezes=True)]
    told = []
    for cls in (Trainer, OwnLoss):
        with pytest.raises(ConfigError) as raised:
            trained(cls)
        told.append(str(raised.value))
    return [weights, told]


def test_parameters_that_the_loss_does_not_use_are_reported_by_name_with_fixes_that_work(tmp_path):
    first, second = launch(train_in_all_ways, tmp_path, timeout_seconds=60)
    assert first == second
    (looked_for, frozen), told = first
    assert looked_for == frozen
    assert told == 2 * [
        "the loss does not depend on some of the trained parameters: unused.weight, unused.bias. With several "
        "processes, override _create_accelerator to return Accelerator(kwargs_handlers="
        "[DistributedDataParallelKwargs(find_unused_parameters=True)]); or freeze them, which is faster: "
        "parameter.requires_grad_(False)"
    ]
