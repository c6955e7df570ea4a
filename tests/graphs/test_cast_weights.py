"""Copies of linear weights in bfloat16: the bits of autocast, without its casts."""

import contextlib
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import toys
from graphs.recorder import EagerTrainer, FakeCapturer, GraphedTrainer
from loopwright.stepping import cast_weights
from loopwright.stepping.cast_weights import CastWeights


class Words(nn.Module):
    """Tied embeddings, a layer that is used twice, a frozen one, and a part that is not under autocast."""

    def __init__(self, checkpoints=False):
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.words.weight
        self.twice, self.frozen, self.exact = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.checkpoints = checkpoints

    def body(self, hidden):
        return self.frozen(torch.relu(self.twice(torch.relu(self.twice(hidden)))))

    def forward(self, ids):
        hidden = self.words(ids)
        hidden = hidden + (
            checkpoint(self.body, hidden, use_reentrant=False) if self.checkpoints else self.body(hidden)
        )
        with torch.autocast("cpu", enabled=False):
            hidden = self.exact(hidden.float())
        return nn.functional.linear(weight=self.head.weight, input=hidden).mean(1)


class Casts(TorchDispatchMode):
    """Counts the casts of matrices from float32 to bfloat16."""

    def __init__(self):
        super().__init__()
        self.shapes = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            self.shapes[tuple(result.shape)] += 1
        return result


IDS = torch.arange(12).reshape(3, 4)


def gradients(num_forwards=1, copies=False, **options):
    """The loss and all gradients of a forward and a backward pass, and the casts in it."""
    model = toys.seeded(lambda: Words(**options), seed=1)
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    casts, counted = CastWeights(model), Casts()
    casts.refresh()
    with casts.substituted() if copies else contextlib.nullcontext():
        with counted:
            losses = [model(IDS).float().square().sum() for _ in range(num_forwards)]
        sum(losses).backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"losses": torch.stack(losses).detach(), **found}, counted.shapes


@pytest.mark.parametrize(
    "options", [{}, {"num_forwards": 2}, {"checkpoints": True}], ids=["once", "twice", "checkpoint"]
)
def test_losses_and_gradients_have_the_bits_of_autocast_and_no_weight_is_cast(options):
    expected, casts = gradients(**options)
    found, fewer = gradients(copies=True, **options)
    toys.assert_same(found, expected)
    assert {"words.weight", "twice.weight", "twice.bias", "exact.weight"} < set(found)
    weights = {(8, 8), (20, 8), (8,)}
    assert weights <= set(casts) and not weights & set(fewer)


@pytest.mark.parametrize("group", [1, 3, 100])
def test_gradients_of_copies_are_cast_in_groups_while_the_backward_pass_goes_on(group, monkeypatch):
    layers = toys.seeded(lambda: nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(10))), seed=1)
    layers.forward = torch.autocast("cpu", torch.bfloat16)(layers.forward)
    monkeypatch.setattr(cast_weights, "_GROUP_BYTES", group * 8 * 8 * 2)
    casts, done = CastWeights(layers), []
    casts.refresh()
    rows = torch.ones(2, 8, requires_grad=True)
    rows.register_hook(lambda _: done.extend(each.weight.grad is not None for each in layers))  # the last in backward
    with casts.substituted():
        layers(rows).float().sum().backward()
    assert sum(done) == {1: 10, 3: 9, 100: 0}[group]
    assert all(each.weight.grad.dtype == torch.float32 for each in layers)


def test_weights_outside_the_forward_pass_or_in_another_context_are_left_to_autocast():
    model = nn.Linear(8, 8)
    casts = CastWeights(model)
    casts.refresh()
    with casts.substituted():
        with torch.autocast("cpu", torch.bfloat16):
            assert casts.of(model.weight) is model.weight  # not in the forward pass
        model.register_forward_pre_hook(lambda *_: seen.append(casts.of(model.weight).dtype))
        seen = []
        model(torch.ones(8))
        for options in ({}, {"cache_enabled": False}, {"dtype": torch.float16}, {"enabled": False}):
            with torch.autocast("cpu", **{"dtype": torch.bfloat16, **options}):
                model(torch.ones(8))
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(8))
    assert seen == [torch.float32, torch.bfloat16] + [torch.float32] * 4


def test_a_model_with_a_compiled_part_is_left_to_autocast():
    class Compiled(Words):
        def __init__(self):
            super().__init__()
            self.twice.compile(backend="eager")

    graphed = trained(GraphedTrainer, model=Compiled)
    assert graphed.capturer.num_replays > 0
    toys.assert_same_weights(graphed, trained(EagerTrainer, model=Compiled, step_mode="eager"))


def trained(kind, callbacks=(), model=Words, **options):
    model = toys.seeded(model, seed=1)
    data = [
        (ids, int(ids.sum()) % 20) for ids in torch.randint(20, (26, 4), generator=torch.Generator().manual_seed(1))
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    trainer = kind(model, nn.CrossEntropyLoss(), optimizer, callbacks=callbacks)
    settings = {"num_epochs": 2, "per_device_batch_size": 4, "seed": 3, "mixed_precision": "bf16"}
    trainer.train(data, **{**settings, "gradient_clip_norm": 0.5, **options})
    return trainer


def decay(trainer, **kwargs):
    """Change weights behind autograd's back."""
    for each in trainer.model.parameters():
        each.data.mul_(0.99)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_updates_with_copies_have_the_bits_of_autocast_whoever_changes_the_weights(accumulation, tmp_path):
    options = {"gradient_accumulation_steps": accumulation, "callbacks": [toys.callback(on_update_end=decay)]}
    graphed = trained(GraphedTrainer, checkpoints=toys.saving(tmp_path), **options)
    assert graphed.capturer.num_replays > 0
    toys.assert_same_weights(graphed, trained(EagerTrainer, step_mode="eager", **options))
    assert {each.dtype for each in toys.state_of(graphed).values()} == {torch.float32}
    resumed = trained(GraphedTrainer, resume_from=toys.step(tmp_path, 3), **options)
    toys.assert_same_weights(resumed, graphed)


def test_graphs_cast_no_weight_and_eager_updates_do():
    seen = {True: Counter(), False: Counter()}

    class Counted(Words):
        def forward(self, ids):
            with Casts() as counted:
                outputs = super().forward(ids)
            seen[FakeCapturer.is_active] += counted.shapes
            return outputs

    trained(GraphedTrainer, model=Counted)
    casts = seen[True]
    assert seen[False][8, 8] and casts[4, 4, 8] and not casts[8, 8] + casts[20, 8] + casts[(8,)]
