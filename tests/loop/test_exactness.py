"""The trainer gives the very bits of a hand-written PyTorch loop that is fed the same order.

`written_by_hand` is that loop. It shares nothing with the trainer but the order of the samples and the key
that seeds each forward pass, both of which are public functions of (seed, epoch, position).
"""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils.data import Dataset

import toys
from loopwright import Trainer, TrainerPlaceholderValues
from loopwright.callbacks import DEFAULT_CALLBACKS, ModelEmaCallback
from loopwright.checkpoint import Checkpointing
from loopwright.data.order import Shuffled
from loopwright.keys import forward_key, key
from loopwright.schedulers import CosineLrScheduler

SEED = 11
NUM_EPOCHS = 3
BATCH_SIZE = 4
NUM_SAMPLES = 22  # micro-batches of 4, 4, 4, 4, 4, 2


def data(num_samples: int = NUM_SAMPLES):
    return toys.labelled(num_samples, features=6, seed=5)


def network(dropout: float = 0.0, batch_norm: bool = False) -> nn.Module:
    def layers():
        middle = nn.BatchNorm1d(16) if batch_norm else nn.Tanh()
        return nn.Sequential(nn.Linear(6, 16), middle, nn.Dropout(dropout), nn.Linear(16, 3))

    return toys.seeded(layers, seed=3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def written_by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accumulation: int = 1,
    clip: Callable[[list[nn.Parameter]], object] = lambda parameters: None,
    scheduler=None,
    after_update: Callable[[], object] = lambda: None,
    batch_size: int = BATCH_SIZE,
) -> list[float]:
    """Train as anybody would; return the learning rate that each update used."""
    x, y = data().tensors
    loss_func = nn.CrossEntropyLoss()
    lrs = []
    model.train()
    for epoch in range(NUM_EPOCHS):
        ids = torch.from_numpy(Shuffled(NUM_SAMPLES, SEED).ids(epoch, 0, NUM_SAMPLES))
        positions = list(range(0, NUM_SAMPLES, batch_size))
        for start in range(0, len(positions), accumulation):
            window = positions[start : start + accumulation]
            batches = [ids[position : position + batch_size] for position in window]
            num_in_window = sum(len(batch) for batch in batches)
            for position, batch in zip(window, batches, strict=True):
                torch.default_generator.manual_seed(forward_key(key(SEED, "fetch", epoch, position)))
                loss = loss_func(model(x[batch]), y[batch])
                if len(window) > 1:
                    loss = loss * (len(batch) / num_in_window)
                loss.backward()
            clip(list(model.parameters()))
            lrs.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            after_update()
    return lrs


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, callbacks=(), dataset=None, **kwargs) -> list[float]:
    """Train with the Trainer; return the learning rate that each update used."""
    watch = toys.watch(on_before_optimizer_step=lambda trainer, **kwargs: trainer.optimizer.param_groups[0]["lr"])
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[*callbacks, watch])
    kwargs = {"per_device_batch_size": BATCH_SIZE, "seed": SEED, **kwargs}
    assert trainer.train(dataset or data(), NUM_EPOCHS, **kwargs).updates == len(watch.seen)
    return watch.seen


def assert_same_bits(ours: nn.Module, by_hand: nn.Module) -> None:
    toys.assert_same_weights(ours, by_hand)
    untrained = network(batch_norm=isinstance(ours[1], nn.BatchNorm1d))
    assert not torch.equal(toys.weights(untrained), toys.weights(by_hand)), "nothing was trained"


def by_value(value: float):
    return lambda parameters: nn.utils.clip_grad_value_(parameters, value)


def by_norm(norm: float):
    return lambda parameters: nn.utils.clip_grad_norm_(parameters, norm)


def by_value_then_norm(parameters):
    nn.utils.clip_grad_value_(parameters, 0.05)
    nn.utils.clip_grad_norm_(parameters, 0.1)


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize(
    ("kwargs", "by_hand"),
    [
        pytest.param({}, {}, id="plain"),
        pytest.param({"gradient_accumulation_steps": 2}, {"accumulation": 2}, id="accumulation of uneven batches"),
        pytest.param({"gradient_accumulation_steps": 4}, {"accumulation": 4}, id="accumulation with a short tail"),
        pytest.param({"gradient_accumulation_steps": 5}, {"accumulation": 5}, id="accumulation with a lone tail"),
        pytest.param({"gradient_accumulation_steps": 99}, {"accumulation": 99}, id="one update per epoch"),
        pytest.param({"gradient_clip_value": 0.05}, {"clip": by_value(0.05)}, id="clipping by value"),
        pytest.param({"gradient_clip_norm": 0.1}, {"clip": by_norm(0.1)}, id="clipping by norm"),
        pytest.param(
            {"gradient_clip_value": 0.05, "gradient_clip_norm": 0.1},
            {"clip": by_value_then_norm},
            id="clipping by value, then by norm",
        ),
        pytest.param(
            {"gradient_accumulation_steps": 4, "gradient_clip_norm": 0.1},
            {"accumulation": 4, "clip": by_norm(0.1)},
            id="accumulation and clipping",
        ),
        pytest.param({"per_device_batch_size": 1}, {"batch_size": 1}, id="batches of one"),
        pytest.param({"per_device_batch_size": 64}, {"batch_size": 64}, id="one batch holds all"),
    ],
)
def test_weights_and_optimizer_are_those_of_a_hand_written_loop(make_optimizer, kwargs, by_hand):
    ours, theirs = network(), network()
    our_optimizer, their_optimizer = make_optimizer(ours), make_optimizer(theirs)
    trained(ours, our_optimizer, **kwargs)
    written_by_hand(theirs, their_optimizer, **by_hand)
    assert_same_bits(ours, theirs)
    assert their_optimizer.state
    toys.assert_same(our_optimizer.state_dict(), their_optimizer.state_dict())


def test_dropout_and_batch_norm_are_those_of_a_hand_written_loop_under_the_same_keys():
    ours, theirs = network(dropout=0.5, batch_norm=True), network(dropout=0.5, batch_norm=True)
    trained(ours, sgd(ours), gradient_accumulation_steps=2)
    written_by_hand(theirs, sgd(theirs), accumulation=2)
    assert_same_bits(ours, theirs)
    without = network(batch_norm=True)
    trained(without, sgd(without), gradient_accumulation_steps=2)
    assert not torch.equal(without[0].weight, ours[0].weight), "dropout was not on"


UPDATES_PER_EPOCH = 3  # 6 micro-batches, two per update


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_one_cycle_with_placeholders_steps_once_per_update(make_optimizer):
    ours, theirs = network(), network()
    placeholders = TrainerPlaceholderValues
    epochs, steps = placeholders.NUM_EPOCHS, placeholders.NUM_UPDATE_STEPS_PER_EPOCH
    schedule = partial(OneCycleLR, max_lr=0.2, epochs=epochs, steps_per_epoch=steps)
    our_lrs = trained(ours, make_optimizer(ours), gradient_accumulation_steps=2, create_scheduler_fn=schedule)
    optimizer = make_optimizer(theirs)
    scheduler = OneCycleLR(optimizer, max_lr=0.2, epochs=NUM_EPOCHS, steps_per_epoch=UPDATES_PER_EPOCH)
    their_lrs = written_by_hand(theirs, optimizer, accumulation=2, scheduler=scheduler)
    assert our_lrs == their_lrs
    assert len(set(our_lrs)) == NUM_EPOCHS * UPDATES_PER_EPOCH
    assert_same_bits(ours, theirs)


def test_a_scheduler_that_counts_itself_is_primed_so_that_update_1_uses_its_value_0():
    ours, theirs = network(), network()
    warmup = {"num_warmup_epochs": 1, "warmup_starting_lr": 0.02}
    schedule = CosineLrScheduler.create_scheduler_fn(**warmup)
    our_lrs = trained(ours, sgd(ours), gradient_accumulation_steps=2, create_scheduler_fn=schedule)
    optimizer = sgd(theirs)
    scheduler = CosineLrScheduler(optimizer, NUM_EPOCHS, UPDATES_PER_EPOCH, **warmup)
    scheduler.step()
    assert our_lrs == written_by_hand(theirs, optimizer, accumulation=2, scheduler=scheduler)
    assert (our_lrs[0], our_lrs[UPDATES_PER_EPOCH]) == (0.02, 0.1)
    assert_same_bits(ours, theirs)


def test_a_torch_scheduler_is_not_primed():
    ours, theirs = network(), network()
    our_lrs = trained(ours, sgd(ours), create_scheduler_fn=partial(CosineAnnealingLR, T_max=18))
    optimizer = sgd(theirs)
    assert our_lrs == written_by_hand(theirs, optimizer, scheduler=CosineAnnealingLR(optimizer, T_max=18))
    assert our_lrs[0] == 0.1
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("update_every", [1, 2])
def test_the_moving_average_is_that_of_a_hand_written_loop(tmp_path, update_every):
    ours, theirs = network(batch_norm=True), network(batch_norm=True)
    path = tmp_path / "ema.pt"
    ema = ModelEmaCallback(0.9, evaluate_during_training=False, save_path=path, update_every=update_every)
    trained(ours, sgd(ours), [ema], gradient_accumulation_steps=2)

    average = copy.deepcopy(theirs)
    updates = 0

    @torch.no_grad()
    def step_average():
        nonlocal updates
        updates += 1
        if updates % update_every:
            return
        for mean, new in zip(average.state_dict().values(), theirs.state_dict().values(), strict=True):
            if mean.is_floating_point():
                mean.mul_(0.9).add_(new, alpha=1 - 0.9)
            else:
                mean.copy_(new)

    written_by_hand(theirs, sgd(theirs), accumulation=2, after_update=step_average)
    assert updates == NUM_EPOCHS * UPDATES_PER_EPOCH
    assert_same_bits(ours, theirs)
    assert_same_bits(ema.ema_model.module, average)
    saved = torch.load(path, weights_only=True)["model_state_dict"]
    toys.assert_same(dict(saved), toys.state_of(average))


def test_everything_at_once_is_still_a_hand_written_loop():
    ours, theirs = network(dropout=0.3, batch_norm=True), network(dropout=0.3, batch_norm=True)
    schedule = partial(OneCycleLR, max_lr=0.05, total_steps=NUM_EPOCHS * UPDATES_PER_EPOCH)
    options = {"gradient_accumulation_steps": 2, "gradient_clip_norm": 0.5, "create_scheduler_fn": schedule}
    our_lrs = trained(ours, adamw(ours), DEFAULT_CALLBACKS, **options)
    optimizer = adamw(theirs)
    their_lrs = written_by_hand(theirs, optimizer, 2, by_norm(0.5), schedule(optimizer))
    assert our_lrs == their_lrs
    assert_same_bits(ours, theirs)


def test_looking_at_a_run_does_not_change_it(tmp_path):
    """Logs, evaluations, saves and random numbers drawn by callbacks leave every bit as it is."""
    plain, watched = network(dropout=0.5, batch_norm=True), network(dropout=0.5, batch_norm=True)
    trained(plain, adamw(plain))
    ema = ModelEmaCallback(save_path=tmp_path / "ema.pt")
    draws = toys.callback(
        on_update_end=lambda trainer, **kwargs: torch.randn(3),
        on_eval_step_end=lambda trainer, **kwargs: torch.randn(5),
    )
    checkpoints = Checkpointing(tmp_path / "states", every_updates=3)
    options = {"eval_dataset": data(9), "log_every": 1, "evaluate_every": 2, "checkpoints": checkpoints}
    trained(watched, adamw(watched), [*DEFAULT_CALLBACKS, draws, ema], **options)
    assert_same_bits(watched, plain)


class Samples(Dataset):
    """The same samples, one at a time, as any dataset of a user's."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return data()[index]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_dataset_and_any_number_of_workers_give_the_same_bits(num_workers):
    ours, theirs = network(dropout=0.5), network(dropout=0.5)
    trained(ours, sgd(ours), dataset=Samples(), train_dataloader_kwargs={"num_workers": num_workers})
    written_by_hand(theirs, sgd(theirs))
    assert_same_bits(ours, theirs)


def test_the_seed_alone_decides_and_torchs_own_is_taken_where_none_is_given():
    def weights(torch_seed: int, **kwargs) -> tuple[torch.Tensor, int]:
        model = network(dropout=0.5)
        trainer = Trainer(model, nn.CrossEntropyLoss(), sgd(model), callbacks=[])
        torch.manual_seed(torch_seed)
        result = trainer.train(data(), 1, per_device_batch_size=4, **kwargs)
        assert trainer.seed == result.seed
        return toys.weights(model), result.seed

    explicit, seed = weights(1, seed=7)
    assert seed == 7
    assert torch.equal(explicit, weights(2, seed=7)[0])
    assert not torch.equal(explicit, weights(1, seed=8)[0])
    implicit, seed = weights(7)
    assert seed == 7
    assert torch.equal(implicit, explicit)


def test_gradients_left_over_from_before_do_not_enter_the_first_update():
    ours, theirs = network(), network()
    for parameter in ours.parameters():
        parameter.grad = torch.full_like(parameter, 1e3)
    trained(ours, sgd(ours))
    written_by_hand(theirs, sgd(theirs))
    assert_same_bits(ours, theirs)
