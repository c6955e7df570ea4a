"""Keys, and the generators that are seeded with them: pinned for ever, apart from each other, put back when asked."""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopwright.engine import seeding
from loopwright.keys import KeyStream, forward_key, key

INTEGERS = st.integers(-(2**70), 2**70)
PURPOSES = st.sampled_from(["order", "fetch", "eval-fetch", "sampler", "loader", "round"])


# Keys


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ((0, "order"), 0x25F4B8EAC811BD70),
        ((0, "order", 0), 0xA8F333A7EAB50EBD),
        ((0, "order", 1), 0xAAB5EF753D864147),
        ((1, "order", 0), 0x50495FB2201E990E),
        ((0, "fetch", 0, 0), 0x7AF84DAB34086FCA),
        ((0, "fetch", 0, 1), 0x435E20030513BBFC),
        ((42, "eval-fetch", 3, 1000), 0xB7FD669E761E15B9),
        ((-1, "sampler", 7), 0x63BCF73848AA0384),
        ((2**63, "round", 5), 0x046BFE4ABFDEF717),
        ((7, "x" * 16, 1, 2, 3), 0x9D232C2D3318A7B0),
    ],
)
def test_keys_have_the_values_they_always_had(arguments, value):
    assert key(*arguments) == value


def test_forward_keys_have_the_values_they_always_had():
    assert forward_key(0) == 0x9E3779B97F4A7C15
    assert forward_key(key(0, "fetch", 0, 0)) == 0xE4CF34124B4213DF


@given(INTEGERS, PURPOSES, INTEGERS, st.lists(INTEGERS, max_size=3))
def test_a_key_is_an_unsigned_64_bit_integer_and_seeds_and_parts_count_modulo_2_to_the_64(seed, purpose, part, parts):
    assert 0 <= key(seed, purpose, *parts) < 2**64
    assert key(seed, purpose, part) == key(seed + 2**64, purpose, part) == key(seed, purpose, part - 2**64)


@given(INTEGERS, PURPOSES, INTEGERS, st.lists(INTEGERS, min_size=1, max_size=5))
def test_a_stream_gives_the_keys_that_differ_in_the_last_part(seed, purpose, epoch, indices):
    stream = KeyStream(seed, epoch, purpose=purpose)
    assert [stream.at(index) for index in indices] == [key(seed, purpose, epoch, index) for index in indices]


def test_seeds_purposes_epochs_and_positions_never_share_a_key():
    parts = [(), *((epoch,) for epoch in range(4)), *itertools.product(range(4), range(50))]
    purposes = ("order", "fetch", "eval-fetch")
    arguments = [(seed, purpose, *each) for seed in range(4) for purpose in purposes for each in parts]
    keys = {key(*each) for each in arguments}
    forward_keys = {forward_key(each) for each in keys}
    assert len(keys) == len(forward_keys) == len(arguments)
    assert not keys & forward_keys


def test_a_purpose_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="at most 16 bytes"):
        key(0, "x" * 17)


@given(st.integers(0, 2**64 - 1))
def test_a_forward_key_is_a_64_bit_integer_of_its_own_for_every_fetch_key(fetch_key):
    assert 0 <= forward_key(fetch_key) < 2**64
    assert forward_key(fetch_key) != fetch_key
    assert forward_key(forward_key(fetch_key)) == fetch_key


# Generators


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


@given(st.integers(0, 2**64 - 1))
def test_the_same_key_gives_the_same_draws_whatever_was_drawn_before(value):
    seeding.seed_generators(value)
    first = draws()
    draws()
    seeding.seed_generators(value)
    assert draws() == first


def test_a_key_gives_the_draws_it_always_gave_and_others_give_others():
    # torch does not promise its numbers from one release to the next; the two others do.
    seeding.seed_generators(key(0, "fetch", 0, 0))
    assert draws()[:2] == (0.9985793106067163, 0.6885012587672726)
    seen = set()
    for position in range(100):
        seeding.seed_generators(key(0, "fetch", 0, position))
        seen.update(draws())
    assert len(seen) == 300


def test_seeding_torch_alone_leaves_python_and_numpy_where_they_were():
    seeding.seed_generators(1)
    expected = draws()
    seeding.seed_generators(1)
    seeding.seed_torch(99)
    python, numpy, torchs = draws()
    assert (python, numpy) == expected[:2]
    assert torchs != expected[2]


def test_restored_generators_continue_where_they_were_saved():
    seeding.seed_generators(5)
    random.gauss(0, 1), np.random.randn()  # both keep half of a pair for later
    states = seeding.generator_states()
    after = [*draws(), random.gauss(0, 1), np.random.randn()]
    seeding.seed_generators(6)
    draws()
    seeding.restore_generator_states(states)
    assert [*draws(), random.gauss(0, 1), np.random.randn()] == after


def test_a_block_may_seed_and_draw_and_leaves_no_trace_even_if_it_raises():
    seeding.seed_generators(5)
    expected = draws()
    seeding.seed_generators(5)
    with seeding.preserved_generators():
        seeding.seed_generators(6)
        draws()
    with pytest.raises(KeyError), seeding.preserved_generators():
        seeding.seed_generators(7)
        raise KeyError
    assert draws() == expected


def test_the_python_generator_is_seeded_as_by_its_own_function():
    for number in (0, 7, 2**63 + 5):
        random.gauss(0, 1)  # keeps a second number
        random.seed(number)
        expected = random.getstate()
        random.gauss(0, 1)
        seeding.seed_generators(number)
        assert random.getstate() == expected
