"""`trainer.find_lr`: what it finds, and that it leaves no trace."""

import copy
import math
import os
import random
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import toys
from loopwright import Trainer
from loopwright.callbacks import StopTrainingError
from loopwright.errors import ConfigError, DataError
from loopwright.lr_finder import _KeptOptimizer, create_curve, rising_rates
from toys import assert_same


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, inputs):
        self.seen += 1
        return self.last(self.drop(torch.relu(self.norm(self.first(inputs)))))


def samples(count=64):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def trainer_of(optimizer_class=torch.optim.AdamW, callbacks=(), cls=Trainer, lr=0.01, **options):
    model = toys.seeded(Net)
    return cls(model, nn.CrossEntropyLoss(), optimizer_class(model.parameters(), lr=lr, **options), callbacks)


def state_of(trainer):
    return copy.deepcopy(
        {
            "weights": trainer.model.state_dict(),
            "seen": trainer.model.seen,
            "modes": [module.training for module in trainer.model.modules()],
            "optimizer": trainer.optimizer.state_dict(),
            "history": trainer.run_history.state_dict(),
            "progress": trainer.progress,
            "generators": [torch.get_rng_state(), random.getstate(), np.random.get_state()],
            "gradients": [parameter.grad for parameter in trainer.model.parameters()],
            "attributes": sorted(vars(trainer)),
            "callbacks": trainer.callback_handler.callback_list,
            "seed": trainer.seed,
        }
    )


@pytest.mark.parametrize("is_trained", [False, True], ids=["before training", "after training"])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_everything_is_as_it_was_before(is_trained, optimizer_class):
    trainer = trainer_of(optimizer_class, **({"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}))
    if is_trained:
        trainer.train(samples(), num_epochs=2, per_device_batch_size=8, seed=3)
    trainer.model.drop.eval()
    before = state_of(trainer)

    curve = trainer.find_lr(samples(), per_device_batch_size=8, num_updates=20, end=1.0)

    assert len(curve.rates) == len(curve.losses) == 20
    assert_same(before, state_of(trainer))


def test_a_run_after_it_is_the_run_without_it_and_nothing_is_printed_and_no_callback_called(capsys):
    watch = toys.watch(on_training_run_start=lambda trainer, **kwargs: "started")
    with_it, without = trainer_of(callbacks=[watch]), trainer_of()
    with_it.find_lr(samples(), num_updates=12, end=1.0, seed=3)
    assert watch.seen == []
    assert capsys.readouterr().out == ""
    results = [trainer.train(samples(), num_epochs=2, seed=3) for trainer in (with_it, without)]
    assert results[0] == results[1]
    toys.assert_same_weights(with_it, without)


def test_its_first_losses_are_those_of_the_run_in_the_same_order():
    losses = toys.watch(on_log=lambda trainer, logs, **kwargs: logs["loss"])
    curve = trainer_of().find_lr(samples(), 8, start=0.01, end=0.02, num_updates=4, seed=5)
    trainer_of(callbacks=[losses]).train(samples(), 1, per_device_batch_size=8, seed=5, log_every=1)

    assert curve.losses[:2] == tuple(losses.seen[:2])  # the first step is at the rate of the optimizer
    assert curve.losses[2] != losses.seen[2]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, signal.SIGINT])
def test_it_leaves_no_trace_when_it_is_broken_off(error):
    class Breaking(Trainer):
        breaks_at = None
        num_batches = 0

        def calculate_train_batch_loss(self, batch):
            self.num_batches += 1
            if self.num_batches == self.breaks_at:
                if error is signal.SIGINT:
                    os.kill(os.getpid(), signal.SIGINT)
                else:
                    raise error("enough")
            return super().calculate_train_batch_loss(batch)

    trainer = trainer_of(cls=Breaking)
    trainer.train(samples(16), num_epochs=1, seed=3)
    trainer.num_batches, trainer.breaks_at = 0, 5
    before = state_of(trainer)
    # Ctrl-C means what it means in a terminal, however the tests were started.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt if error is signal.SIGINT else error):
            trainer.find_lr(samples(), num_updates=20)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert_same(before, state_of(trainer))


def test_groups_keep_their_ratio_and_rates_rise_by_one_factor():
    class Rates(Trainer):
        def optimizer_step(self):
            seen.append(toys.lrs(self))
            super().optimizer_step()

    seen, model = [], Net()
    groups = [{"params": model.first.parameters(), "lr": 0.1}, {"params": model.last.parameters(), "lr": 0.02}]
    trainer = Rates(model, nn.CrossEntropyLoss(), torch.optim.SGD(groups), ())
    curve = trainer.find_lr(samples(), start=1e-4, end=1e-1, num_updates=4)
    assert [rates[0] for rates in seen] == list(curve.rates) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])
    assert [rates[1] / rates[0] for rates in seen] == pytest.approx([0.2] * 4)
    assert toys.lrs(trainer) == [0.1, 0.02]


def test_it_ends_when_the_loss_goes_up_and_suggests_a_rate_below():
    class Together(Trainer):
        """Ends as several processes do: one update after it was asked for, which is not part of the curve."""

        def call_event(self, event, **kwargs):
            try:
                super().call_event(event, **kwargs)
            except StopTrainingError as error:
                self.request_stop(str(error))

    curve, together = (
        trainer_of(torch.optim.SGD, cls=cls).find_lr(samples(), start=1e-4, end=1e5, num_updates=60, seed=0)
        for cls in (Trainer, Together)
    )
    assert together == curve
    assert len(curve.losses) < 60 and curve.stop_reason == "the loss is 4 times its best"
    assert curve.suggestion is not None
    assert curve.suggestion == min(curve.steepest, curve.lowest / 10)
    assert curve.suggestion < curve.rates[-1] / 10


def test_a_loss_that_is_not_finite_ends_it():
    class Exploding(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            is_high = self.optimizer.param_groups[0]["lr"] > 1e-3
            return {**output, "loss": output["loss"] * (math.nan if is_high else 1.0)}

    trainer = trainer_of(torch.optim.SGD, cls=Exploding)
    before = state_of(trainer)

    curve = trainer.find_lr(samples(), start=1e-4, end=1.0, num_updates=20)

    assert curve.rates[-2] < 1e-3 < curve.rates[-1]
    assert curve.stop_reason == "the loss is not finite"
    assert math.isnan(curve.losses[-1])
    assert curve.lowest < 1e-3
    assert_same(before, state_of(trainer))


def test_the_steepest_place_of_a_curve_that_was_drawn_by_hand_is_found():
    rates = rising_rates(1e-5, 1.0, 101)
    # It falls from 2 to 1 between 1e-3 and 1e-2, and rises above 0.1.
    points = [1e-5, 1e-3, 1e-2, 1e-1, 1.0]
    losses = np.interp(np.log10(rates), np.log10(points), [2.0, 2.0, 1.0, 1.0, 3.0])

    curve = create_curve(rates, losses.tolist())

    assert 2e-3 < curve.steepest < 2e-2
    assert 1e-2 < curve.lowest < 0.2
    assert curve.suggestion == min(curve.steepest, curve.lowest / 10)
    assert create_curve(rates, np.linspace(1.0, 2.0, 101).tolist()).suggestion is None
    assert create_curve(rates[:2], [math.nan, math.nan]).suggestion is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"start": 1.0, "end": 0.1}, "must rise from start to end, got start=1.0 and end=0.1"),
        ({"start": 1.0, "end": 1.0}, "must rise from start to end"),
        ({"start": 0.0}, "start must be a learning rate above 0, got 0.0"),
        ({"start": -1.0}, "start must be a learning rate above 0, got -1.0"),
        ({"end": math.inf}, "end must be a learning rate above 0, got inf"),
        ({"end": "auto"}, "end must be a learning rate above 0, got 'auto'"),
        ({"num_updates": 1}, "num_updates must be a whole number of at least 2, got 1"),
        ({"num_updates": 2.5}, "num_updates must be a whole number of at least 2, got 2.5"),
        ({"per_device_batch_size": 0}, "per_device_batch_size must be a whole number of at least 1"),
        ({"train_dataset": samples(0)}, "train_dataset is empty"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_touched(options, told):
    trainer = trainer_of()
    before = state_of(trainer)
    with pytest.raises(DataError if "train_dataset" in options else ConfigError, match=told):
        trainer.find_lr(**{"train_dataset": samples(), **options})
    assert_same(before, state_of(trainer))


def test_it_is_refused_inside_a_run_and_for_an_optimizer_without_a_rate():
    inside = toys.callback(on_update_end=lambda trainer, **kwargs: trainer.find_lr(samples()))
    with pytest.raises(ConfigError, match="in the middle of a training run"):
        trainer_of(callbacks=[inside]).train(samples(), num_epochs=1)
    with pytest.raises(ConfigError, match="create the optimizer with lr > 0"):
        trainer_of(torch.optim.SGD, lr=0.0).find_lr(samples())


def test_a_loss_belongs_to_the_rate_of_its_update_also_after_updates_that_logged_none():
    class Masked(Trainer):
        def count_batch_items(self, batch):
            return float((batch[1] >= 0).sum())

        def calculate_train_batch_loss(self, batch):
            output = self.model(batch[0])
            loss = nn.functional.cross_entropy(output, batch[1], ignore_index=-1, reduction="sum")
            rates.append((self.optimizer.param_groups[0]["lr"], bool(batch[1] >= 0), float(loss.detach())))
            return {"loss": loss, "model_outputs": output, "batch_size": 1}

    rates = []
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    inputs, labels = samples(24).tensors
    data = TensorDataset(inputs, torch.where(torch.arange(24) % 3 == 0, -1, labels))
    trainer = Masked(model, None, torch.optim.SGD(model.parameters(), lr=0.1), ())

    curve = trainer.find_lr(data, per_device_batch_size=1, start=1e-4, end=1e-2, num_updates=20, seed=2)

    expected = [(rate, loss) for rate, has_items, loss in rates if has_items]
    assert 10 < len(expected) < 20
    assert list(zip(curve.rates, curve.losses, strict=True)) == expected


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU: a copy of it there would need memory of the GPU."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.device.__get__:
            return torch.device("cuda", 0)
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function is torch.Tensor.to and "cpu" in map(str, args):
            return result.as_subclass(torch.Tensor)
        return result


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors_in(each)]
    return tensors_in(vars(value)) if hasattr(value, "__dict__") else []


def test_the_state_of_the_optimizer_is_kept_in_the_memory_of_the_host():
    trainer = trainer_of()
    trainer.train(samples(), num_epochs=1, per_device_batch_size=8, seed=3)
    for state in trainer.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].as_subclass(OnDevice)

    kept = tensors_in(_KeptOptimizer(trainer.optimizer))

    assert len(kept) == 3 * len(list(trainer.model.parameters()))
    assert not any(isinstance(tensor, OnDevice) for tensor in kept)


@pytest.mark.gpu
def test_keeping_the_state_of_an_optimizer_needs_no_memory_of_the_gpu():
    model = nn.Linear(512, 512, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(1, 512, device="cuda")).sum().backward()
    optimizer.step()
    expected = copy.deepcopy(optimizer.state_dict())
    before = torch.cuda.memory_allocated()

    kept = _KeptOptimizer(optimizer)

    assert torch.cuda.memory_allocated() == before
    optimizer.step()
    kept.put_back(optimizer)
    assert_same(expected, optimizer.state_dict())
    assert all(state["exp_avg"].is_cuda for state in optimizer.state.values())
