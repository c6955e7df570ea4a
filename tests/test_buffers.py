"""Buffers go back to what they were when an update began, however a module moves them."""

import pytest
import torch
from torch import nn

import toys
from loopwright.engine.buffers import BufferShadow


class Buffered(nn.Module):
    """A module with buffers that a forward pass moves in its own way."""

    def __init__(self, forward, **buffers):
        super().__init__()
        self.move = forward
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x):
        self.move(self, x)
        return x


def reassigns():
    return Buffered(lambda self, x: setattr(self, "total", self.total + x.sum()), total=torch.zeros(3))


def grows():
    seen = torch.zeros(1, dtype=torch.int64)
    return Buffered(lambda self, x: setattr(self, "seen", torch.cat([self.seen.double(), torch.ones(1)])), seen=seen)


def large_table():
    return Buffered(lambda self, x: self.table[7].add_(x.sum()), table=torch.zeros(100_000))


def own_batch_norm():
    """Calls torch's kernel itself; that does not count as a change of the buffers."""
    statistics = {"mean": torch.zeros(4), "variance": torch.ones(4)}
    return Buffered(lambda self, x: nn.functional.batch_norm(x, self.mean, self.variance, training=True), **statistics)


MODULES = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "two batch norms": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "batch norm without a module": own_batch_norm,
    "reassigned": reassigns,
    "another shape": grows,
    "large": large_table,
    "half precision": lambda: nn.BatchNorm1d(4).to(torch.bfloat16),
}


def values(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_same(module, expected):
    assert expected
    toys.assert_same(dict(module.named_buffers()), expected)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("num_forwards", [1, 2, 3])
def test_buffers_go_back_to_where_the_update_began_at_every_update(kind, num_forwards):
    module = MODULES[kind]()
    dtype = torch.bfloat16 if kind == "half precision" else torch.float32
    shadow = BufferShadow(module)
    for update in range(4):
        shadow.keep()
        before = values(module)
        for _ in range(num_forwards):
            module(torch.rand(5, 4).to(dtype))
        moved = values(module)
        assert any(not torch.equal(moved[name], before[name]) for name in moved)
        if update % 2 == 0:
            shadow.restore()
            assert_same(module, before)
            shadow.restore()  # a second time changes nothing
            assert_same(module, before)


def test_the_tensors_themselves_stay_where_others_hold_them_and_nothing_kept_means_nothing_put_back():
    module = nn.BatchNorm1d(4)
    held, shadow = module.running_mean, BufferShadow(module)
    module(torch.rand(5, 4))
    moved = values(module)
    shadow.restore()
    assert_same(module, moved)
    shadow.keep()
    module(torch.rand(5, 4))
    shadow.restore()
    assert module.running_mean is held and torch.equal(held, moved["running_mean"])


def test_a_loss_function_and_a_model_are_kept_together_and_anything_else_is_left_alone():
    model, loss = nn.BatchNorm1d(4), reassigns()
    shadow = BufferShadow(model, loss, None, len, nn.MSELoss())
    shadow.keep()
    before = values(model), values(loss)
    loss(model(torch.rand(5, 4)))
    shadow.restore()
    assert_same(model, before[0])
    assert_same(loss, before[1])


def test_a_large_buffer_that_did_not_change_is_not_copied_again():
    module = large_table()
    shadow = BufferShadow(module)
    shadow.keep()
    shadow._kept[0].copy.fill_(5.0)  # would be overwritten by another copy
    shadow.keep()
    assert torch.equal(shadow._kept[0].copy, torch.full((100_000,), 5.0))
    module(torch.ones(1))
    shadow.keep()
    assert torch.equal(shadow._kept[0].copy, module.table)


def test_buffers_that_are_none_or_taken_away_are_left_alone():
    module = nn.BatchNorm1d(4, track_running_stats=False)
    shadow = BufferShadow(module)
    shadow.keep()
    shadow.restore()
    assert dict(module.named_buffers()) == {}
    module = nn.BatchNorm1d(4)
    shadow = BufferShadow(module)
    shadow.keep()
    module.running_mean = None
    shadow.restore()
    assert module.running_mean is None
