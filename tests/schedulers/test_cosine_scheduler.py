"""CosineLrScheduler: the exact points, the shape between them, and its state."""

import math
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.errors import ConfigError
from loopwright.schedulers import CosineLrScheduler, TrainerPlaceholderValues
from toys import lrs, stepped, two_groups

BASES = [0.01, 0.002]


def cosine(total_num_epochs=10, num_update_steps_per_epoch=10, bases=BASES, **kwargs):
    return CosineLrScheduler(two_groups(*bases), total_num_epochs, num_update_steps_per_epoch, **kwargs)


positive_lr = st.floats(1e-6, 10.0)
schedules = st.fixed_dictionaries(
    {
        "total_num_epochs": st.integers(1, 30),
        "num_update_steps_per_epoch": st.integers(1, 20),
        "k_decay": st.floats(0.25, 4.0),
        "lr_min": st.floats(0, 1e-3),
        "min_lr_ratio": st.none() | st.floats(0, 1),
        "num_warmup_epochs": st.integers(0, 10),
        "warmup_starting_lr": st.floats(0, 1e-3),
        "warmup_starting_lr_ratio": st.none() | st.floats(0, 1),
        "num_cooldown_epochs": st.integers(0, 10),
        "bases": st.tuples(positive_lr, positive_lr),
    }
).filter(lambda drawn: drawn["total_num_epochs"] > drawn["num_warmup_epochs"] + drawn["num_cooldown_epochs"])


def bounds(scheduler, base):
    floor = scheduler.lr_min if scheduler.lr_min_ratio is None else scheduler.lr_min_ratio * base
    start = scheduler.warmup_lr_init if scheduler.warmup_lr_ratio is None else scheduler.warmup_lr_ratio * base
    return floor, start


@given(schedules)
def test_the_promised_points_are_exact_and_the_lr_falls_after_the_warmup_within_its_bounds(arguments):
    scheduler = cosine(**arguments)
    steps = arguments["num_update_steps_per_epoch"]
    warmup, total = arguments["num_warmup_epochs"] * steps, arguments["total_num_epochs"] * steps
    cooldown_start = total - arguments["num_cooldown_epochs"] * steps
    assert (scheduler.warmup_iterations, scheduler.total_iterations) == (warmup, total)
    values = [scheduler.get_updated_values(update) for update in range(total + 2)]
    for index, base in enumerate(arguments["bases"]):
        floor, start = bounds(scheduler, base)
        curve = [value[index] for value in values]
        assert curve[warmup] == base and (not warmup or curve[0] == start)
        for update in (cooldown_start, (cooldown_start + total) // 2, total, total + 1, 10 * total):
            assert scheduler.get_updated_values(update)[index] == floor
        assert all(min(base, start) <= lr <= max(base, start) * (1 + 1e-12) for lr in curve[:warmup])
        assert all(min(base, floor) <= lr <= max(base, floor) for lr in curve[warmup:])
        sign = 1 if base >= floor else -1
        assert all(sign * later <= sign * earlier + 1e-12 for earlier, later in pairwise(curve[warmup:]))


@given(schedules)
def test_the_cosine_has_no_jump_anywhere(arguments):
    scheduler = cosine(**{**arguments, "k_decay": 1.0})
    num_cosine = scheduler.total_iterations - scheduler.warmup_iterations - scheduler.num_cooldown_iterations
    values = [scheduler.get_updated_values(update) for update in range(scheduler.total_iterations + 1)]
    for index, base in enumerate(arguments["bases"]):
        floor, start = bounds(scheduler, base)
        in_warmup = abs(base - start) / scheduler.warmup_iterations if scheduler.warmup_iterations else 0.0
        largest = max(abs(base - floor) * math.pi / 2 / num_cosine, in_warmup)
        assert all(abs(later[index] - earlier[index]) <= largest + 1e-9 for earlier, later in pairwise(values))


def test_the_groups_hold_the_start_of_the_warmup_and_steps_yield_the_values_of_update_zero_onwards():
    assert lrs(cosine(num_warmup_epochs=1, warmup_starting_lr=1e-5)) == [1e-5, 1e-5]
    assert lrs(cosine()) == BASES
    scheduler = cosine(num_warmup_epochs=1, num_cooldown_epochs=1)
    assert stepped(scheduler, 105) == [scheduler.get_updated_values(update) for update in range(105)]


def test_k_decay_keeps_the_lr_high_for_longer():
    for update in range(1, 100):
        slow, plain = cosine(k_decay=2.0), cosine()
        assert slow.get_updated_values(update)[0] > plain.get_updated_values(update)[0]


def test_the_state_has_the_documented_keys():
    scheduler = cosine(num_warmup_epochs=1, min_lr_ratio=0.5)
    state = {"total_iterations": 100, "warmup_iterations": 10, "num_cooldown_iterations": 0, "num_updates": -1}
    state |= {"lr_min": 1e-6, "lr_min_ratio": 0.5, "warmup_lr_init": 1e-6, "warmup_lr_ratio": None, "k_decay": 1.0}
    assert scheduler.state_dict() == state
    stepped(scheduler, 50)
    assert scheduler.state_dict()["num_updates"] == 49


@pytest.mark.parametrize("num_steps", [0, 1, 5, 20, 57, 95, 100, 110])
def test_a_loaded_state_continues_exactly(num_steps):
    arguments = {"num_warmup_epochs": 2, "num_cooldown_epochs": 1, "k_decay": 1.5, "min_lr_ratio": 0.01}
    scheduler = cosine(**arguments)
    stepped(scheduler, num_steps)
    resumed = cosine(total_num_epochs=3, lr_min=0.001)
    resumed.load_state_dict(scheduler.state_dict())
    assert lrs(resumed) == lrs(scheduler)
    assert stepped(resumed, 120) == stepped(scheduler, 120)
    assert resumed.state_dict() == scheduler.state_dict()


@pytest.mark.parametrize(
    "arguments", [{"total_num_epochs": 0}, {"num_update_steps_per_epoch": 0}, {"lr_min": -1e-9}], ids=str
)
def test_impossible_arguments_and_a_state_of_something_else_are_refused_by_name(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))) as caught:
        cosine(**arguments)
    assert isinstance(caught.value, AssertionError)
    with pytest.raises(ConfigError, match="lacks total_iterations"):
        cosine().load_state_dict({"last_epoch": 3})


def test_create_scheduler_fn_leaves_the_counts_to_the_trainer_and_makes_its_own_class():
    class Mine(CosineLrScheduler):
        pass

    create = Mine.create_scheduler_fn(num_warmup_epochs=1, k_decay=2.0)
    assert isinstance(create, partial)
    assert create.keywords["total_num_epochs"] is TrainerPlaceholderValues.NUM_EPOCHS
    assert create.keywords["num_update_steps_per_epoch"] is TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
    scheduler = partial(create, total_num_epochs=10, num_update_steps_per_epoch=10)(two_groups())
    assert scheduler.state_dict() == cosine(num_warmup_epochs=1, k_decay=2.0).state_dict()
    for kind in (Mine, CosineLrScheduler):
        assert type(kind.create_scheduler_fn(3, 4)(two_groups())) is kind
