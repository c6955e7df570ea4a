"""Schedules by name: the values by hand, their bounds, and the torch scheduler around them."""

import json
import math
import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ReduceLROnPlateau

import toys
from loopwright.errors import ConfigError
from loopwright.schedulers import SCHEDULES, get_scheduler, named

# Ten updates with a warmup of two: the setting in which these schedules are usually listed.
LENGTHS = {"num_warmup_steps": 2, "num_training_steps": 10}
OWN_ARGUMENTS = {
    "warmup_stable_decay": {"num_decay_steps": 3},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
}


def an_optimizer(lr=0.1):
    return torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=lr)


def factors(schedule, num_updates=10, **arguments):
    return [schedule(update, **arguments) for update in range(num_updates)]


def trained(scheduler, num_updates):
    used = []
    for _ in range(num_updates):
        used += toys.lrs(scheduler)
        scheduler.optimizer.step()
        scheduler.step()
    return used


def test_constant_is_one_rises_in_its_warmup_and_linear_falls_to_zero():
    assert factors(named.constant) == [1.0] * 10
    assert factors(named.constant_with_warmup, num_warmup_steps=4) == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]
    expected = [0.0, 0.5, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
    assert factors(named.linear, 12, **LENGTHS) == expected


def test_cosine_is_half_a_wave_and_starts_again_at_one_with_restarts():
    expected = [0.0, 0.5, 1.0, 0.961, 0.853, 0.691, 0.5, 0.308, 0.146, 0.038]
    assert factors(named.cosine, **LENGTHS) == pytest.approx(expected, abs=1e-3)
    assert named.cosine(10, **LENGTHS) == named.cosine(6, num_cycles=1, **LENGTHS) == 0.0
    expected = [0.0, 0.5, 1.0, 0.853, 0.5, 0.146, 1.0, 0.853, 0.5, 0.146, 0.0]
    assert factors(named.cosine_with_restarts, 11, num_cycles=2, **LENGTHS) == pytest.approx(expected, abs=1e-3)
    assert factors(named.cosine_with_restarts, **LENGTHS) == pytest.approx(factors(named.cosine, **LENGTHS))


def test_polynomial_falls_to_its_end_and_stays():
    expected = [0.0, 5.0, 10.0, 7.656, 5.625, 3.906, 2.5, 1.406, 0.625, 0.156]
    values = factors(named.polynomial, power=2.0, lr_init=10.0, lr_end=1e-7, **LENGTHS)
    assert [10 * value for value in values] == pytest.approx(expected, abs=1e-3)
    for update in (10, 11, 50):
        assert named.polynomial(update, lr_init=0.1, lr_end=0.01, **LENGTHS) == pytest.approx(0.1)
    assert factors(named.polynomial, lr_init=10.0, **LENGTHS) == pytest.approx(
        factors(named.linear, **LENGTHS), abs=1e-7
    )
    assert named.polynomial(10, lr_init=1.0, lr_end=0.5, num_warmup_steps=10, num_training_steps=10) == 0.5


def test_inverse_sqrt_falls_with_the_root_of_the_update():
    expected = [0.0, 0.5, 1.0, 0.816, 0.707, 0.632, 0.577, 0.534, 0.5, 0.471]
    assert factors(named.inverse_sqrt, num_warmup_steps=2) == pytest.approx(expected, abs=1e-3)
    assert named.inverse_sqrt(10_000) == pytest.approx(math.sqrt(0.5))
    assert named.inverse_sqrt(102, num_warmup_steps=2, timescale=100) == pytest.approx(math.sqrt(0.5))


def test_warmup_stable_decay_has_three_phases():
    arguments = {"num_warmup_steps": 2, "num_decay_steps": 3, "min_lr_ratio": 0.1}
    expected = [0.1, 0.55, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.775, 0.325, 0.1, 0.1]
    assert factors(named.warmup_stable_decay, 12, num_training_steps=10, **arguments) == pytest.approx(expected)
    assert factors(named.warmup_stable_decay, 12, num_stable_steps=5, **arguments) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shape", "rise", "fall"),
    [
        ("linear", [0, 0.25, 0.5, 0.75], [1, 0.75, 0.5, 0.25]),
        ("cosine", [0, 0.146, 0.5, 0.853], [1, 0.853, 0.5, 0.146]),
        ("1-sqrt", [0, 1 - math.sqrt(0.75), 1 - math.sqrt(0.5), 0.5], [1, 0.5, 1 - math.sqrt(0.5), 0.134]),
    ],
)
def test_the_shapes_of_warmup_and_decay(shape, rise, fall):
    arguments = {"num_warmup_steps": 4, "num_decay_steps": 4, "num_training_steps": 10}
    values = factors(named.warmup_stable_decay, 11, warmup_type=shape, decay_type=shape, **arguments)
    assert values == pytest.approx([*rise, 1, 1, *fall, 0], abs=1e-3)


def test_cosine_with_a_minimum_ends_at_it_and_with_its_own_warmup_is_one_update_ahead():
    values = factors(named.cosine_with_min_lr, 11, lr_init=0.1, min_lr=0.01, **LENGTHS)
    assert values == pytest.approx([0, 0.5, *(0.1 + 0.9 * each for each in factors(named.cosine, 11, **LENGTHS)[2:])])
    assert factors(named.cosine_with_min_lr, 11, lr_init=0.1, min_lr_rate=0.1, **LENGTHS) == pytest.approx(values)
    values = factors(named.cosine_warmup_with_min_lr, lr_init=0.1, min_lr_rate=0.0, **LENGTHS)
    assert values == pytest.approx([0.5, 1.0, *(named.cosine(update, **LENGTHS) for update in range(3, 11))])
    values = factors(named.cosine_warmup_with_min_lr, lr_init=0.1, min_lr_rate=0.0, warmup_lr_rate=0.2, **LENGTHS)
    assert values[:2] == pytest.approx([0.2, 1.0])


@pytest.mark.parametrize("name", [*SCHEDULES])
@given(update=st.integers(0, 500), warmup=st.integers(0, 100), length=st.integers(1, 300))
def test_every_factor_is_from_zero_to_one(name, update, warmup, length):
    scheduler = get_scheduler(name, an_optimizer(), warmup, length, OWN_ARGUMENTS.get(name))
    assert 0 <= scheduler.lr_lambdas[0](update) <= 1 + 1e-12


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "constant_with_warmup", "inverse_sqrt"])
@given(warmup=st.integers(1, 50), length=st.integers(1, 200))
def test_the_factor_rises_to_one_and_then_falls_without_a_jump(name, warmup, length):
    scheduler = get_scheduler(name, an_optimizer(), warmup, warmup + length)
    curve = [scheduler.lr_lambdas[0](update) for update in range(warmup + length + 2)]
    assert (curve[0], curve[warmup]) == (0, 1)
    assert curve[: warmup + 1] == sorted(curve[: warmup + 1])
    assert curve[warmup:] == sorted(curve[warmup:], reverse=True)
    largest = max(1 / warmup, math.pi / 2 / length) + 1e-6
    assert all(abs(later - earlier) <= largest for earlier, later in pairwise(curve))


@pytest.mark.parametrize("name", [*SCHEDULES])
def test_the_first_update_uses_the_first_value(name):
    scheduler = get_scheduler(name, an_optimizer(0.1), 2, 10, OWN_ARGUMENTS.get(name))
    schedule = scheduler.lr_lambdas[0]
    assert trained(scheduler, 12) == [0.1 * schedule(update) for update in range(12)]


@pytest.mark.parametrize("name", [*SCHEDULES])
@pytest.mark.parametrize("num_updates", [0, 1, 5, 9])
def test_a_loaded_state_continues_exactly(name, num_updates):
    scheduler = get_scheduler(name, an_optimizer(), 2, 10, OWN_ARGUMENTS.get(name))
    trained(scheduler, num_updates)
    state = json.loads(json.dumps(scheduler.state_dict()))
    assert pickle.loads(pickle.dumps(scheduler.state_dict())) == scheduler.state_dict()

    resumed = get_scheduler(name, an_optimizer(), 2, 10, OWN_ARGUMENTS.get(name))
    resumed.load_state_dict(state)
    resumed.optimizer.load_state_dict(scheduler.optimizer.state_dict())
    assert trained(resumed, 12 - num_updates) == trained(scheduler, 12 - num_updates)


def test_own_arguments_reach_the_schedule_which_has_no_warmup_by_default_and_can_be_pickled():
    scheduler = get_scheduler("cosine_with_restarts", an_optimizer(), 2, 10, {"num_cycles": 2})
    assert scheduler.lr_lambdas[0](6) == 1.0
    scheduler = get_scheduler("polynomial", an_optimizer(0.1), 0, 10, {"lr_end": 0.01, "power": 2.0})
    assert scheduler.lr_lambdas[0](10) == pytest.approx(0.1)
    assert get_scheduler("linear", an_optimizer(), num_training_steps=10).lr_lambdas[0](0) == 1.0
    scheduler = get_scheduler("cosine", an_optimizer(), 2, 10)
    assert pickle.loads(pickle.dumps(scheduler.lr_lambdas[0]))(5) == scheduler.lr_lambdas[0](5)


def test_each_group_keeps_its_own_base():
    optimizer = toys.two_groups(0.1, 0.02)
    scheduler = get_scheduler("linear", optimizer, num_training_steps=4)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.075, 0.015])


@pytest.mark.parametrize("name", ["reduce_on_plateau", "reduce_lr_on_plateau"])
def test_reduce_on_plateau_is_the_scheduler_of_torch(name):
    scheduler = get_scheduler(name, an_optimizer(), scheduler_specific_kwargs={"patience": 0, "factor": 0.5})
    scheduler.step(1.0)
    scheduler.step(1.0)
    assert isinstance(scheduler, ReduceLROnPlateau) and scheduler.get_last_lr() == [0.05]


def test_an_unknown_name_is_answered_with_the_nearest_and_the_list():
    with pytest.raises(ConfigError, match="no schedule 'cosin': did you mean 'cosine'") as caught:
        get_scheduler("cosin", an_optimizer(), 0, 10)
    assert all(name in str(caught.value) for name in [*SCHEDULES, "reduce_on_plateau"])
    with pytest.raises(ConfigError, match="no schedule 'zzz': The schedules are"):
        get_scheduler("zzz", an_optimizer(), 0, 10)


WSD = "warmup_stable_decay"
NEED_A_LENGTH = ("linear", "cosine", "cosine_with_restarts", "polynomial")


@pytest.mark.parametrize(
    ("name", "steps", "own", "text"),
    [
        *((name, None, {}, f"{name}' needs num_training_steps") for name in NEED_A_LENGTH),
        (WSD, 10, {}, "needs num_decay_steps"),
        (WSD, None, {"num_decay_steps": 2}, "num_training_steps, or"),
        (WSD, 9, {"num_decay_steps": 2, "decay_type": "x"}, "decay_type='x'"),
        ("linear", -1, {}, "num_training_steps must not be negative"),
        ("linear", 9, {"power": 2}, "has no argument power"),
        ("constant", None, {"power": 2}, "it takes none"),
        ("polynomial", 9, {"lr_end": 1.0}, "lr_end=1.0"),
        ("cosine_with_min_lr", 9, {}, "one of min_lr and min_lr_rate"),
        ("reduce_on_plateau", None, {"patients": 2}, "has no argument patients"),
    ],
)
def test_what_cannot_work_is_refused_before_training(name, steps, own, text):
    with pytest.raises(ConfigError, match=text):
        get_scheduler(name, an_optimizer(), 2, steps, own)


def test_a_missing_warmup_is_named_and_a_lowest_lr_needs_one_to_start_from():
    with pytest.raises(ConfigError, match="needs num_warmup_steps"):
        get_scheduler("constant_with_warmup", an_optimizer())
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    for name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        with pytest.raises(ConfigError, match="min_lr=0.1 needs an lr above 0 to start from, .* optimizer's is 0.0"):
            get_scheduler(name, optimizer, num_training_steps=9, scheduler_specific_kwargs={"min_lr": 0.1})
