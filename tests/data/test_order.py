"""The order of samples: a pinned bijection with random access, and which process runs which part of it."""

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwright.data import Permutation, Sequential, Share, Shuffled
from loopwright.data.order import BatchIds, plan_batches
from loopwright.keys import key

KEYS = st.integers(0, 2**64 - 1)


def permuted_slowly(permutation_key: int, size: int, position: int) -> int:
    """The permutation in plain Python integers, written from its description alone."""
    bits = max((max(size, 2) - 1).bit_length(), 6)
    right_bits = bits - bits // 2
    value = position
    while True:
        widths = [bits - right_bits, right_bits]
        left, right = value >> right_bits, value % 2**right_bits
        for index in range(8):
            mixed = (right + key(permutation_key, "round", index)) * 0xBF58476D1CE4E5B9 % 2**64
            mixed = (mixed ^ mixed >> 32) * 0x94D049BB133111EB % 2**64
            left, right = right, left ^ mixed >> 64 - widths[0]
            widths.reverse()
        value = (left << right_bits) | right
        if value < size:
            return value


# The permutation


@pytest.mark.parametrize(
    ("permutation_key", "size", "ids"),
    [
        (0, 1, [0]),
        (0, 2, [1, 0]),
        (0xA8F333A7EAB50EBD, 2, [0, 1]),
        (1, 3, [1, 2, 0]),
        (0, 10, [4, 7, 2, 0, 5, 6, 1, 3, 8, 9]),
        (1, 10, [7, 6, 3, 0, 8, 2, 5, 4, 9, 1]),
        (0xA8F333A7EAB50EBD, 10, [7, 9, 3, 2, 0, 8, 4, 5, 6, 1]),
        (0, 64, [57, 33, 63, 62, 49, 42, 27, 40, 39, 9]),
        (0, 65, [11, 45, 28, 31, 49, 5, 25, 17, 27, 4]),
        (0, 1000, [233, 568, 217, 908, 3, 800, 51, 146, 942, 817]),
    ],
)
def test_small_permutations_begin_as_they_always_did(permutation_key, size, ids):
    assert Permutation(permutation_key, size)(np.arange(len(ids))).tolist() == ids


LARGE = {
    1000: {995: 727, 996: 995, 997: 672, 998: 871, 999: 448},
    10**9: {
        **{0: 628763972, 1: 874312303, 2: 319648729, 999: 145162064},
        **{123456789: 264681564, 500_000_000: 388370222, 999_999_999: 248585440},
    },
    2**40 + 1: {0: 964962340324, 1: 625504111170, 999: 151272919417, 2**39: 815188492713, 2**40: 357875348423},
}


@pytest.mark.parametrize("size", LARGE)
def test_large_permutations_have_the_ids_they_always_had_at_any_position(size):
    assert Permutation(0, size)(list(LARGE[size])).tolist() == list(LARGE[size].values())


@given(KEYS, st.integers(1, 5000), st.data())
def test_a_permutation_gives_every_id_once_and_random_access_what_reading_in_order_gives(permutation_key, size, data):
    permutation = Permutation(permutation_key, size)
    ids = permutation(np.arange(size))
    assert ids.dtype == np.int64
    assert sorted(ids.tolist()) == list(range(size))
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=10))
    expected = ids[positions].tolist()
    assert permutation(positions).tolist() == expected
    assert [int(permutation(position)) for position in positions] == expected


@given(KEYS, st.integers(1, 2**60), st.data())
@settings(max_examples=50)
def test_a_permutation_is_what_its_description_says(permutation_key, size, data):
    position = data.draw(st.integers(0, size - 1))
    assert int(Permutation(permutation_key, size)(position)) == permuted_slowly(permutation_key, size, position)


def test_positions_may_have_any_shape():
    permutation = Permutation(3, 10)
    flat = permutation(np.arange(10))
    assert np.array_equal(permutation(np.arange(10).reshape(2, 5)), flat.reshape(2, 5))
    assert permutation([]).shape == (0,)
    assert permutation(4).shape == ()


@given(KEYS, KEYS, st.integers(50, 5000))
def test_different_keys_give_different_orders(first, second, size):
    orders = [Permutation(each, size)(np.arange(size)).tolist() for each in (first, second)]
    assert (orders[0] == orders[1]) == (first == second)


@given(st.integers(0, 5000), st.lists(st.integers(0, 10), max_size=3), st.integers(1, 2**40))
def test_a_position_outside_is_an_index_error(size, inside, distance):
    permutation = Permutation(0, size)
    inside = [position for position in inside if position < size]
    for outside in (size, size - 1 + distance, -distance):
        with pytest.raises(IndexError, match=f"permutation of {size}"):
            permutation([*inside, outside])


def assert_uniform(counts, cells):
    """The mean of chi-square is the degrees of freedom, and 4 standard deviations above it is far out."""
    expected = sum(counts) / cells
    chi_square = sum((count - expected) ** 2 for count in counts) / expected + (cells - len(counts)) * expected
    assert chi_square < (cells - 1) + 4 * (2 * (cells - 1)) ** 0.5


@pytest.mark.parametrize(("size", "num_keys"), [(3, 600), (4, 960)])
def test_every_order_of_a_few_samples_is_about_as_frequent(size, num_keys):
    positions = np.arange(size)
    counts = Counter(tuple(Permutation(key(0, "order", each), size)(positions)) for each in range(num_keys))
    assert_uniform(list(counts.values()), cells={3: 6, 4: 24}[size])


@pytest.mark.parametrize("position", [0, 1, 24, 47])
def test_every_id_is_about_as_frequent_at_a_position(position):
    ids = [int(Permutation(key(1, "order", each), 48)(position)) for each in range(2000)]
    assert_uniform(np.bincount(ids, minlength=48), cells=48)


def test_neighbours_in_the_order_are_not_neighbours_in_the_dataset():
    ids = Permutation(0, 100_000)(np.arange(100_000))
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.01
    assert np.mean(np.abs(np.diff(ids)) < 1000) < 0.03  # by chance: about 2 %


# Plans


@pytest.mark.parametrize(
    ("seed", "epoch", "ids"),
    [
        (0, 0, [73, 6, 99, 37, 62, 5, 67, 46, 7, 74]),
        (0, 1, [6, 81, 74, 72, 55, 93, 18, 33, 64, 62]),
        (1, 0, [97, 16, 95, 75, 76, 85, 15, 2, 13, 35]),
        (1, 1, [41, 15, 7, 89, 75, 90, 95, 33, 93, 84]),
    ],
)
def test_shuffled_epochs_begin_as_they_always_did(seed, epoch, ids):
    assert Shuffled(100, seed).ids(epoch, 0, 10).tolist() == ids


def test_a_plan_gives_fewer_ids_at_its_end_and_none_beyond():
    assert Shuffled(100, 0).ids(0, 95, 10).tolist() == [35, 11, 8, 86, 44]
    assert Sequential(100).ids(7, 95, 10).tolist() == [95, 96, 97, 98, 99]
    for plan in (Shuffled(100, 0), Sequential(100)):
        assert plan.ids(0, 100, 10).tolist() == []


@given(st.integers(0, 2000), st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_every_epoch_of_a_plan_holds_every_id_once(size, seed, epoch):
    assert sorted(Shuffled(size, seed).ids(epoch, 0, size).tolist()) == list(range(size))
    assert Sequential(size).ids(epoch, 0, size).tolist() == list(range(size))


@given(st.integers(1, 60_000), st.integers(1, 20_000), st.integers(0, 60_000))
@settings(max_examples=50)
def test_batches_of_a_plan_are_its_ids_from_a_position_on(size, batch_size, start):
    plan = Shuffled(size, 3)
    batches = list(plan_batches(plan, 2, start, batch_size))
    assert [each for batch in batches for each in batch] == plan.ids(2, start, size).tolist()
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert all(0 < len(batch) <= batch_size for batch in batches)


def test_a_micro_batch_keeps_what_is_known_of_it_when_it_is_sent_to_a_worker():
    sent = pickle.loads(pickle.dumps(BatchIds([4, 2], 99, 1, 6, frozenset([2]))))
    assert isinstance(sent, BatchIds)
    assert (list(sent), sent.key, sent.epoch, sent.position, sent.left_out) == ([4, 2], 99, 1, 6, {2})


# Shares

SHARES = st.builds(Share, processes=st.integers(1, 8), accumulation=st.integers(1, 8))


@given(SHARES, st.integers(0, 300))
def test_every_micro_batch_has_one_owner_and_every_process_a_contiguous_part_of_a_window(share, num_batches):
    for first in range(0, num_batches, share.window):
        owners = [share.owner(index) for index in range(first, min(first + share.window, num_batches))]
        assert owners == sorted(owners)
        assert all(0 <= owner < share.processes for owner in owners)
        assert all(owners.count(owner) <= share.accumulation for owner in owners)


@given(SHARES, st.integers(0, 300))
def test_local_batches_are_those_owned_and_one_pad_for_each_window_sat_out(share, num_batches):
    window = share.processes * share.accumulation
    assert share.window == window
    assert share.num_updates(num_batches) == len(range(0, num_batches, window))
    for rank in range(share.processes):
        mine = Share(rank, share.processes, share.accumulation)
        per_window = [
            sum(mine.owner(index) == rank for index in range(first, min(first + window, num_batches)))
            for first in range(0, num_batches, window)
        ]
        assert mine.num_local_batches(num_batches) == sum(max(count, 1) for count in per_window)
