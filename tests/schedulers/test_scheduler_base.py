"""The two base classes: what they keep, what they write, what they save."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from loopwright.errors import ConfigError
from loopwright.schedulers import SchedulerBase, StatefulSchedulerBase
from toys import lrs, stepped, two_groups


class Returning(SchedulerBase):
    def __init__(self, optimizer, answer):
        super().__init__(optimizer)
        self.answer = answer

    def get_updated_values(self, num_updates):
        return self.answer


class UpdateNumber(StatefulSchedulerBase):
    def get_updated_values(self, num_updates):
        return num_updates


class Milestones(StatefulSchedulerBase):
    """Multiplies what is in the groups, as users write it: state lives in the optimizer."""

    def __init__(self, optimizer, factor=0.5, milestones=(2, 4)):
        super().__init__(optimizer, param_group_field="lr")
        self.factor = factor
        self.milestones = list(milestones)

    def get_updated_values(self, num_updates):
        if num_updates in self.milestones:
            return [group["lr"] * self.factor for group in self.optimizer.param_groups]
        return None


def test_the_initial_value_of_each_group_is_kept_in_group_and_scheduler_and_written_back_by_a_second_one():
    optimizer = two_groups()
    assert Returning(optimizer, None).base_lr_values == [0.01, 0.002]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.01, 0.002]
    for group in optimizer.param_groups:
        group["lr"] = 5.0
    assert Returning(optimizer, None).base_lr_values == [0.01, 0.002]
    assert lrs(optimizer) == [0.01, 0.002]


def test_any_field_of_the_groups_can_be_scheduled_also_one_of_tuples():
    class WeightDecay(StatefulSchedulerBase):
        def get_updated_values(self, num_updates):
            return [base + num_updates for base in self.base_lr_values]

    class Betas(StatefulSchedulerBase):
        def get_updated_values(self, num_updates):
            return [(0.5, 0.6)]

    optimizer = two_groups(weight_decay=0.5)
    stepped(WeightDecay(optimizer, param_group_field="weight_decay"), 2)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1.5, 1.5]
    assert optimizer.param_groups[0]["initial_weight_decay"] == 0.5
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    scheduler = Betas(optimizer, param_group_field="betas")
    assert scheduler.base_lr_values == [(0.9, 0.999)]
    scheduler.step()
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    with pytest.raises(KeyError, match=r"beta missing from param_groups\[0\]"):
        UpdateNumber(two_groups(), param_group_field="beta")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, [0.01, 0.002]),
        (3, [3, 3]),
        *((half, [0.5, 0.5]) for half in (0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5))),
        *((kind([1.0, 2.0]), [1.0, 2.0]) for kind in (list, tuple, iter, np.array, torch.tensor)),
        ([torch.tensor(1.0), 2], [1.0, 2]),
        ({"a": 1, "b": 2}.values(), [1, 2]),
    ],
)
def test_updated_values_may_be_none_a_number_a_tensor_or_any_iterable_of_the_right_length(answer, expected):
    optimizer = two_groups()
    Returning(optimizer, answer).step_update(7)
    assert lrs(optimizer) == expected
    assert all(type(lr) in (int, float) for lr in lrs(optimizer))
    with pytest.raises(ConfigError, match="gave 3 values for 2 parameter groups"):
        Returning(two_groups(), [1, 2, 3]).step_update(0)


def test_a_group_that_is_added_later_is_scheduled_from_the_value_it_was_added_with():
    class Halving(StatefulSchedulerBase):
        def get_updated_values(self, num_updates):
            return [base * 0.5**num_updates for base in self.base_lr_values]

    scheduler = Halving(two_groups(0.5, 0.25))
    stepped(scheduler, 2)
    scheduler.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1.0})
    assert stepped(scheduler, 1) == [[0.125, 0.0625, 0.25]]
    assert scheduler.base_lr_values == [0.5, 0.25, 1.0]
    assert stepped(scheduler, 1) == [[0.0625, 0.03125, 0.125]]


def test_a_tensor_lr_is_written_in_place_its_start_is_kept_and_groups_that_share_one_get_their_own():
    lr = torch.tensor(0.5)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = UpdateNumber(optimizer)
    stepped(scheduler, 2)
    assert optimizer.param_groups[0]["lr"] is lr and lr.item() == 1.0
    assert scheduler.base_lr_values == [0.5] and optimizer.param_groups[0]["initial_lr"] == 0.5
    Returning(optimizer, torch.tensor(0.25)).step_update(0)
    assert optimizer.param_groups[0]["lr"] is lr and lr.item() == 0.25
    first, second = torch.nn.Linear(2, 1).parameters()
    optimizer = torch.optim.Adam([{"params": [first]}, {"params": [second]}], lr=torch.tensor(0.5))
    Returning(optimizer, [1.0, 2.0]).step_update(0)
    assert [lr.item() for lr in lrs(optimizer)] == [1.0, 2.0]


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["plain", "wrapped by accelerate"])
def test_the_first_step_gives_the_value_of_update_zero(is_wrapped):
    optimizer = two_groups()
    scheduler = UpdateNumber(Accelerator(cpu=True).prepare(optimizer) if is_wrapped else optimizer)
    assert lrs(optimizer) == [0.01, 0.002]
    assert [scheduler.step() or lrs(optimizer) for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]


def test_the_stateless_state_is_every_attribute_but_the_optimizer():
    scheduler = Returning(two_groups(), [1, 2])
    state = scheduler.state_dict()
    assert state == {"param_group_field": "lr", "base_lr_values": [0.01, 0.002], "answer": [1, 2]}
    other = Returning(two_groups(), None)
    optimizer = other.optimizer
    other.load_state_dict({**state, "optimizer": "not one"})
    assert other.answer == [1, 2]
    assert other.optimizer is optimizer


@pytest.mark.parametrize("num_steps", range(7))
def test_a_stateful_scheduler_without_state_methods_of_its_own_continues_exactly(num_steps):
    optimizer = two_groups()
    scheduler = Milestones(optimizer)
    stepped(scheduler, num_steps)
    state, optimizer_state = scheduler.state_dict(), optimizer.state_dict()
    assert state["num_updates"] == num_steps - 1

    resumed_optimizer = two_groups()
    resumed = Milestones(resumed_optimizer, factor=9.0, milestones=())
    resumed_optimizer.load_state_dict(optimizer_state)
    resumed.load_state_dict(state)
    assert stepped(resumed, 7) == stepped(scheduler, 7)
    assert resumed.state_dict() == scheduler.state_dict()
