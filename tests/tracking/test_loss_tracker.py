"""The loss tracker: exact sums, the same bits whenever it is read, and no host sync in an update."""

import json
import math
import struct
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from loopwright.tracking import LossTracker


class CountHostReads(TorchDispatchMode):
    """Counts the operator behind `.item()`, `float(tensor)` and `bool(tensor)`."""

    num_host_reads = 0
    num_operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operators += 1
        if func is torch.ops.aten._local_scalar_dense.default:
            self.num_host_reads += 1
        return func(*args, **(kwargs or {}))


def bits(number):
    # A nan's sign means nothing, and JSON does not keep it.
    return "nan" if math.isnan(number) else struct.pack("<d", number)


def tracked(*updates):
    tracker = LossTracker()
    for arguments in updates:
        tracker.update(*arguments)
    return tracker


def test_a_new_tracker_has_an_average_of_zero():
    tracker = LossTracker()
    assert (tracker.average, tracker.loss_value, tracker.total_loss, tracker.running_count) == (0, 0, 0, 0)
    assert tracker.first_nonfinite() is None
    assert tracker.device_totals("cpu").tolist() == [0.0, 0.0]


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 512)), min_size=1, max_size=200))
def test_floats_are_summed_in_plain_python_arithmetic(updates):
    tracker = LossTracker()
    total, count = 0, 0
    for loss, size in updates:
        tracker.update(loss, size)
        total += loss * size
        count += size
        assert tracker.average == tracker.total_loss / tracker.running_count
    assert tracker.total_loss == total
    assert tracker.running_count == count
    assert tracker.average == total / count
    assert tracker.loss_value == updates[-1][0]


@pytest.mark.parametrize(
    ("updates", "count", "total"),
    [
        pytest.param([(3.0,), (torch.tensor(5.0),)], 2, 8.0, id="one item unless given"),
        pytest.param([(2.0, torch.tensor(3)), (torch.tensor(6.0), 1)], 4, 12.0, id="integer tensor"),
        pytest.param([(2.0, torch.tensor(3.0)), (torch.tensor(6.0), 1)], 4, 12.0, id="float tensor"),
        pytest.param([(2.0, torch.tensor([3])), (torch.tensor(6.0), 1)], 4, 12.0, id="tensor of one"),
        pytest.param([(2.0, torch.tensor([1, 2])), (torch.tensor(6.0), 1)], 4, 12.0, id="tensor of two"),
        pytest.param(
            [(torch.tensor(1.0), torch.tensor(2**24 + 1)), (torch.tensor(1.0), torch.tensor(0.5))],
            2**24 + 1.5,
            2**24 + 1.5,
            id="more than float32 counts",
        ),
        pytest.param([(np.float32(1e8),), (np.float32(1.0),)], 2, 100_000_001.0, id="numpy keeps 64 bits"),
        pytest.param([(1.0, 0)], 0, 0.0, id="no item"),
    ],
)
def test_losses_are_weighted_by_the_number_of_items(updates, count, total):
    tracker = tracked(*updates)
    assert (tracker.running_count, tracker.total_loss) == (count, total)
    assert tracker.average == total / count if count else math.isnan(tracker.average)


def test_tensors_give_the_same_bits_as_their_values_as_floats():
    losses = torch.randn(200, generator=torch.Generator().manual_seed(0))
    on_device = tracked(*((loss, index % 7 + 1) for index, loss in enumerate(losses)))
    on_host = tracked(*((loss.item(), index % 7 + 1) for index, loss in enumerate(losses)))
    for name in ("total_loss", "average", "loss_value"):
        assert bits(getattr(on_device, name)) == bits(getattr(on_host, name)), name
    assert on_device.running_count == on_host.running_count


def test_what_is_read_is_a_python_number():
    tracker = tracked((torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(4)))
    numbers = tracker.average, tracker.total_loss, tracker.loss_value, tracker.running_count
    assert [type(number) for number in numbers] == [float, float, float, int]


def test_low_precision_losses_are_summed_in_64_bits():
    loss = torch.tensor(0.1, dtype=torch.float16)
    assert tracked(*[(loss,)] * 10_000).average == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 2), (1, 1, 1)])
def test_a_loss_with_dimensions_counts_as_its_mean(shape):
    loss = torch.arange(float(math.prod(shape))).reshape(shape)
    tracker = tracked((loss, 10))
    assert (tracker.loss_value, tracker.total_loss) == (loss.mean().item(), loss.mean().item() * 10)


def test_losses_of_several_types_may_follow_each_other():
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    losses = [loss for i in range(150) for loss in (torch.tensor(i / 7, dtype=dtypes[i % 3]), i / 3)]
    assert tracked(*((loss,) for loss in losses)).total_loss == reduce(add, map(float, losses))


def test_no_graph_is_kept_alive():
    weight = torch.ones((), requires_grad=True)
    tracker = tracked((weight * 2, weight * 3))
    assert not any(tensor.requires_grad for entry in tracker._pending for tensor in entry)
    assert tracker.total_loss == 6.0


def test_writing_to_a_loss_after_the_update_changes_nothing():
    loss, count, tracker = torch.zeros(()), torch.zeros((), dtype=torch.int64), LossTracker()
    for value in (1.0, 2.0, 6.0):
        tracker.update(loss.fill_(value), count.fill_(2))
    assert tracker.average == 3.0


def test_updates_never_wait_for_the_device():
    losses = [torch.ones((), requires_grad=True), torch.ones(3)]
    counts = [2, torch.tensor(2), torch.tensor([2.0])]
    with CountHostReads() as counter:
        tracker = tracked(*((losses[index % 2], counts[index % 3]) for index in range(500)))
    assert counter.num_operators > 500
    assert counter.num_host_reads == 0
    assert tracker.running_count == 1000
    with CountHostReads() as counter:
        torch.ones(()).item()
    assert counter.num_host_reads == 1, "the counter sees a read"


def test_few_small_tensors_are_held_however_long_nothing_is_read():
    tracker = tracked(*[(torch.ones(()), torch.ones(()))] * 6400)
    assert len(tracker._pending) < 64
    assert len(tracker._folded) == 100
    assert tracker.average == 1.0
    assert tracker._folded == []


NUMBERS = st.floats(width=32, allow_nan=False)
UPDATES = st.lists(
    st.tuples(
        NUMBERS,
        st.integers(0, 1000),
        st.sampled_from(["float", "tensor", "double", "tensor count"]),
        st.sampled_from(["go on", "go on", "go on", "read", "read twice", "save and restore"]),
    ),
    max_size=40,
).map(lambda updates: updates * 5)


@settings(max_examples=100, deadline=None)
@given(UPDATES)
def test_reading_saving_and_restoring_anywhere_never_changes_a_bit(updates):
    undisturbed, disturbed = LossTracker(), LossTracker()
    for loss, count, kind, event in updates:
        value = {"float": loss, "double": torch.tensor(loss, dtype=torch.float64)}.get(kind, torch.tensor(loss))
        size = torch.tensor(count) if kind == "tensor count" else count
        undisturbed.update(value, size)
        disturbed.update(value, size)
        if event.startswith("read"):
            assert disturbed.running_count >= 0
        if event == "read twice":
            assert bits(disturbed.average) == bits(disturbed.average)
        if event == "save and restore":
            state = json.loads(json.dumps(disturbed.state_dict()))
            disturbed = LossTracker()
            disturbed.update(99.0)
            disturbed.load_state_dict(state)
    assert bits(undisturbed.average) == bits(disturbed.average)
    assert bits(undisturbed.total_loss) == bits(disturbed.total_loss)
    assert undisturbed.first_nonfinite() == disturbed.first_nonfinite()
    assert repr(undisturbed.state_dict()) == repr(disturbed.state_dict())


def test_an_incomplete_state_is_refused_before_anything_is_lost():
    tracker = tracked((torch.tensor(2.0),))
    with pytest.raises(KeyError, match="total_loss"):
        tracker.load_state_dict({"loss_value": 1.0})
    assert tracker.average == 2.0


def test_restoring_and_resetting_drop_what_was_put_aside():
    restored, reset = (tracked(*[(torch.tensor(loss),)] * 100) for loss in (2.0, math.nan))
    restored.load_state_dict(LossTracker().state_dict())
    assert restored.running_count == 0
    reset.reset()
    assert reset.state_dict() == LossTracker().state_dict()
    assert reset.average == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wrap", [float, torch.tensor])
@pytest.mark.parametrize("index", [0, 5, 63, 64, 130])
def test_the_first_non_finite_loss_is_found_by_its_index(bad, wrap, index):
    tracker = LossTracker()
    for position, loss in enumerate([1.0] * index + [bad, 1.0, math.nan]):
        tracker.update(wrap(loss), 4)
        if position == 3 < index:
            assert tracker.first_nonfinite() is None
    assert tracker.first_nonfinite() == index
    assert not math.isfinite(tracker.average)


def test_the_index_of_the_first_non_finite_loss_counts_on_after_a_restore():
    restored = LossTracker()
    restored.load_state_dict(tracked(*[(torch.tensor(1.0),)] * 3).state_dict())
    restored.update(torch.tensor(math.inf))
    assert restored.first_nonfinite() == 3


def test_the_totals_can_be_summed_over_processes():
    first, second = tracked((torch.tensor(1.0), 1)), tracked((torch.tensor(5.0), 3))
    totals = first.device_totals(torch.device("cpu")) + second.device_totals("cpu")
    assert totals.dtype == torch.float64
    assert totals.tolist() == [16.0, 4.0]


@pytest.mark.gpu
def test_updates_never_wait_for_a_cuda_device():
    loss, count = torch.tensor(0.5, device="cuda"), torch.tensor(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        tracker = tracked(*[(loss, count)] * 500)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tracker.average == 0.5
    assert tracker.running_count == 1500
    assert tracker.device_totals("cuda").tolist() == [750.0, 1500.0]
