"""WSDLrScheduler: where it decays and how, its state, continuations, and the checkpoint steps."""

import json
import math
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.errors import ConfigError
from loopwright.schedulers import TrainerPlaceholderValues
from loopwright.schedulers.wsd_scheduler import WSDLrScheduler, estimate_checkpoint_steps
from toys import lrs, stepped, two_groups

BASES = [1.0, 0.2]


def wsd(total_steps=1000, **kwargs):
    return WSDLrScheduler(two_groups(*BASES), total_steps=total_steps, **kwargs)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((100_000, 1), [100_000]),
        ((100_000, 2), [50_000, 100_000]),
        ((1000, 3), [250, 500, 1000]),
        ((1000,), [250, 500, 1000]),
        ((200_000, 4), [25_000, 50_000, 100_000, 200_000]),
        ((1001, 3), [250, 500, 1001]),
        ((7, 3), [1, 3, 7]),
        ((4, 3), [1, 2, 4]),
    ],
)
def test_checkpoints_double_up_to_the_total(arguments, expected):
    assert estimate_checkpoint_steps(*arguments) == expected


@given(st.integers(1, 10**9), st.integers(1, 20))
def test_n_checkpoints_are_n_rising_steps_that_end_with_the_total(total, num_checkpoints):
    if total < 2 ** (num_checkpoints - 1):
        with pytest.raises(ConfigError, match="fewer checkpoints"):
            estimate_checkpoint_steps(total, num_checkpoints)
        return
    steps = estimate_checkpoint_steps(total, num_checkpoints)
    assert len(steps) == num_checkpoints
    assert steps[0] >= 1 and steps[-1] == total
    assert all(2 * earlier <= later <= 2 * earlier + 1 for earlier, later in pairwise(steps))


def test_the_decay_info_describes_each_period_and_the_phase_is_the_first_that_ends_there_or_later():
    scheduler = wsd(1000, num_checkpoints=3)
    assert scheduler.get_checkpoint_steps() == [250, 500, 1000]
    assert scheduler.get_decay_info() == [
        {"period_start": 0, "period_end": 250, "decay_steps": 25, "pre_decay_step": 225},
        {"period_start": 250, "period_end": 500, "decay_steps": 25, "pre_decay_step": 475},
        {"period_start": 500, "period_end": 1000, "decay_steps": 50, "pre_decay_step": 950},
    ]
    ends = {0: 250, 249: 250, 250: 250, 251: 500, 500: 500, 1000: 1000, 5000: 1000}
    assert {count: scheduler.get_phase_info(count)["period_end"] for count in ends} == ends
    for num_steps, end in ((0, 250), (300, 500)):
        stepped(scheduler, num_steps)
        assert scheduler.get_current_step() == num_steps - 1
        assert scheduler.get_current_phase_info()["period_end"] == end


def test_two_checkpoints_train_at_the_full_lr_between_their_decays():
    scheduler = wsd(1000, num_checkpoints=2, lr_min=0.1)
    curve = [lr for lr, _ in stepped(scheduler, 1001)]
    assert curve[:451] == [1.0] * 451
    assert curve[451:500] == sorted(curve[451:500], reverse=True)
    assert curve[500:951] == [1.0] * 451
    assert curve[1000] == 0.1


@pytest.mark.parametrize("use_inverse_sqrt_decay", [True, False])
def test_the_decay_follows_its_formula(use_inverse_sqrt_decay):
    scheduler = wsd(1000, lr_min=0.1, use_inverse_sqrt_decay=use_inverse_sqrt_decay)
    for update in range(900, 1000):
        t = (update - 900) / 100
        factor = 0.1 + 0.9 * (1 - math.sqrt(t)) if use_inverse_sqrt_decay else 1 / (t / 0.1 + 1 - t)
        assert scheduler.get_updated_values(update) == pytest.approx([base * factor for base in BASES])


ARGUMENTS = st.fixed_dictionaries(
    {
        "num_checkpoints": st.integers(1, 4),
        "decay_phase_ratio": st.floats(0, 1 / 3),
        "lr_min": st.just(0) | st.floats(1e-12, 1),
        "num_warmup_steps": st.none() | st.integers(0, 100),
        "use_inverse_sqrt_decay": st.booleans(),
        "is_continuation_from_checkpoint": st.booleans(),
    }
)


@given(st.integers(8, 150), ARGUMENTS)
def test_the_lr_is_always_between_its_bounds(total, arguments):
    scheduler, lr_min = wsd(total, warmup_starting_lr=0.0, **arguments), arguments["lr_min"]
    warmup_end = 0 if arguments["is_continuation_from_checkpoint"] else scheduler.num_warmup_steps
    for update in range(total + 3):
        lr = scheduler.get_updated_values(update)[0]
        if update < warmup_end:
            assert lr == update / warmup_end
        else:
            assert lr_min * (1 - 1e-12) <= lr <= 1 + 1e-12
    for period in scheduler.get_decay_info():
        first = max(period["period_start"], warmup_end)
        stable = [scheduler.get_updated_values(update) for update in range(first, period["pre_decay_step"])]
        assert all(values == BASES for values in stable)
        decay = [
            scheduler.get_updated_values(update)[0]
            for update in range(max(period["pre_decay_step"], warmup_end), period["period_end"])
        ]
        assert decay == sorted(decay, reverse=True)
        assert period["period_start"] <= period["pre_decay_step"] <= period["period_end"]


def test_from_the_last_checkpoint_on_the_lr_is_the_minimum_to_which_the_inverse_form_falls_in_a_line():
    scheduler = wsd(1000, lr_min=0.25)
    for update in (1000, 1001, 5000):
        assert scheduler.get_updated_values(update) == [base * 0.25 for base in BASES]
    scheduler = wsd(100, decay_phase_ratio=0.5, lr_min=0, use_inverse_sqrt_decay=False)
    curve = [lr for lr, _ in stepped(scheduler, 102)]
    assert [curve[50], curve[75], *curve[100:]] == [1.0, 0.5, 0.0, 0.0]


def test_warmup_rises_in_a_line_the_groups_start_with_it_and_none_is_one_percent():
    scheduler = wsd(1000, num_warmup_steps=100, warmup_starting_lr=0.1)
    assert lrs(scheduler) == [0.1, 0.1]
    curve = stepped(scheduler, 101)
    assert curve[0] == [0.1, 0.1] and curve[100] == BASES
    assert curve[50] == pytest.approx([0.55, 0.15])
    warmups = [wsd(1000, num_warmup_steps=None), wsd(99, num_warmup_steps=None), wsd(1000)]
    assert [scheduler.num_warmup_steps for scheduler in warmups] == [10, 0, 0]
    assert wsd(None, num_epochs=4, num_update_steps_per_epoch=25).total_steps == 100


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"total_steps": 0}, AssertionError, "at least one update"),
        ({"decay_phase_ratio": 1.5}, AssertionError, "decay_phase_ratio"),
        ({"decay_phase_ratio": -0.1}, AssertionError, "decay_phase_ratio"),
        ({"lr_min": -0.1}, AssertionError, "lr_min"),
        ({"num_checkpoints": 0}, AssertionError, "num_checkpoints"),
        ({"num_epochs": 1, "num_update_steps_per_epoch": 2}, ValueError, "given twice"),
        ({"total_steps": None}, ValueError, "missing"),
        ({"total_steps": None, "num_epochs": 3}, ValueError, "missing"),
        ({"warmup_starting_lr": 1.5}, ValueError, "warmup_starting_lr"),
        ({"num_checkpoints": 2, "decay_phase_ratio": 0.4}, ValueError, "decay_phase_ratio"),
        ({"total_steps": 3, "num_checkpoints": 3}, ValueError, "fewer checkpoints"),
    ],
    ids=str,
)
def test_impossible_arguments_are_refused(arguments, error, text):
    with pytest.raises(error, match=text) as caught:
        wsd(**{"total_steps": 1000, **arguments})
    assert isinstance(caught.value, ConfigError)


def test_the_state_has_the_documented_keys_is_plain_json_and_notes_the_last_update_before_a_decay():
    scheduler = wsd(100, num_checkpoints=2)
    state = scheduler.state_dict()
    documented = """
        base_lr_values checkpoint_decay_info checkpoint_steps decay_phase_ratio is_continuation_from_checkpoint lr_min
        num_checkpoints num_updates num_warmup_steps param_group_field previous_checkpoint_step total_steps
        use_inverse_sqrt_decay warmup_starting_lr
    """
    assert set(state) == set(documented.split())
    assert json.loads(json.dumps(state)) == state
    for num_steps, noted in ((45, 44), (50, 94)):
        stepped(scheduler, num_steps)
        assert scheduler.previous_checkpoint_step == noted


@pytest.mark.parametrize("num_steps", [0, 1, 10, 45, 46, 49, 50, 51, 97, 100, 105])
@pytest.mark.parametrize("is_continuation", [False, True])
def test_a_resumed_state_continues_exactly(num_steps, is_continuation):
    arguments = {"num_checkpoints": 2, "num_warmup_steps": 20, "lr_min": 0.1, "use_inverse_sqrt_decay": False}
    scheduler = wsd(100, is_continuation_from_checkpoint=is_continuation, **arguments)
    stepped(scheduler, num_steps)
    state = json.loads(json.dumps(scheduler.state_dict()))
    resumed = wsd(77, is_continuation_from_checkpoint=is_continuation)
    if is_continuation:
        resumed.resume_state_dict(state)
    else:
        resumed.load_state_dict(state)
    assert lrs(resumed) == lrs(scheduler)
    assert stepped(resumed, 110) == stepped(scheduler, 110)
    assert resumed.state_dict() == scheduler.state_dict()


@pytest.mark.parametrize("num_steps", [90, 100])
def test_a_continuation_is_a_fresh_stable_phase_of_the_new_length_without_warmup(num_steps):
    earlier = wsd(100, num_warmup_steps=30, decay_phase_ratio=0.1, lr_min=0.1)
    stepped(earlier, num_steps)
    continued = wsd(50, decay_phase_ratio=0.3, is_continuation_from_checkpoint=True)
    for group, lr in zip(continued.optimizer.param_groups, lrs(earlier), strict=True):
        group["lr"] = lr
    continued.load_state_dict(earlier.state_dict())
    assert continued.is_continuation_from_checkpoint is True
    assert continued.total_steps == 50
    assert continued.decay_phase_ratio == 0.1
    assert continued.previous_checkpoint_step is None
    assert continued.get_current_step() == -1
    assert continued.get_checkpoint_steps() == [50]
    assert lrs(continued) == BASES
    curve = stepped(continued, 51)
    assert curve[:46] == [BASES] * 46
    assert curve[48][0] == pytest.approx(0.1 + 0.9 * (1 - math.sqrt(3 / 5)))
    assert curve[50] == [base * 0.1 for base in BASES]


def test_a_continuation_stays_primed_starts_over_after_another_and_needs_no_state():
    ordinary, first = wsd(100), wsd(100, is_continuation_from_checkpoint=True)
    second, primed = (wsd(100, is_continuation_from_checkpoint=True) for _ in range(2))
    primed.step()
    for continued, earlier in ((primed, ordinary), (second, first)):
        stepped(earlier, 90)
        continued.load_state_dict(earlier.state_dict())
    assert primed.get_current_step() == 0
    assert stepped(second, 100) == stepped(wsd(100), 100)
    scheduler = wsd(100, num_warmup_steps=20, is_continuation_from_checkpoint=True)
    assert scheduler.get_updated_values(0) == scheduler.base_lr_values


@pytest.mark.parametrize("is_continuation", [False, True])
def test_a_state_with_missing_keys_leaves_the_rest_as_it_was(is_continuation):
    scheduler = wsd(100, lr_min=0.5, is_continuation_from_checkpoint=is_continuation)
    scheduler.load_state_dict({"decay_phase_ratio": 0.2})
    assert scheduler.get_decay_info()[0]["pre_decay_step"] == 80
    assert scheduler.lr_min == 0.5
    scheduler.load_state_dict({})
    assert scheduler.decay_phase_ratio == 0.2


def test_create_scheduler_fn_leaves_the_counts_to_the_trainer_and_needs_none_with_numbers():
    create = WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=2)
    per_epoch = TrainerPlaceholderValues.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH
    assert isinstance(create, partial)
    assert create.keywords["num_epochs"] is TrainerPlaceholderValues.NUM_EPOCHS
    assert create.keywords["num_update_steps_per_epoch"] is per_epoch
    assert create.keywords["num_warmup_steps"] == per_epoch * 2
    assert WSDLrScheduler.create_scheduler_fn().keywords["num_warmup_steps"] is None
    scheduler = WSDLrScheduler.create_scheduler_fn(4, 25, num_warmup_epochs=1, lr_min=0.1)(two_groups(*BASES))
    assert scheduler.state_dict() == wsd(100, num_warmup_steps=25, lr_min=0.1).state_dict()
