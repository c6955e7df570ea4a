"""A loss is a sum and a count: batch size, accumulation and short tails never change a mean or its gradient.

Models and data are in double precision here, so that "the same" can mean twelve digits.
"""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, TensorDataset

import toys
from loopwright import Trainer
from loopwright.callbacks import DEFAULT_CALLBACKS, TerminateOnNaNCallback
from loopwright.schedulers import CosineLrScheduler

TIGHT = {"rtol": 1e-10, "atol": 1e-14}
SHAPES = [(8, 1), (4, 2), (2, 4), (1, 8)]  # batch size x accumulation: 8 samples per update each time
IGNORED = -100


def data(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(num_samples, 1, generator=generator, dtype=torch.float64))


def network() -> nn.Module:
    return toys.seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double(), seed=1)


class Watching(Trainer):
    def __init__(self, *args, **kwargs):
        self.gradients = []
        super().__init__(*args, **kwargs)
        self.watch = toys.watch(on_log=lambda trainer, logs, **kwargs: logs)
        self.callback_handler.add_callback(self.watch)

    def optimizer_step(self):
        self.gradients.append(toys.row(parameter.grad for parameter in self.model.parameters()))
        super().optimizer_step()


def watched(cls=Watching, model=None, loss_func=None, lr: float = 0.0, callbacks=()):
    loss_func = nn.MSELoss() if loss_func is None else loss_func
    return toys.trainer_of(callbacks, network() if model is None else model, lr, 0.0, cls, loss_func=loss_func)


def train(trainer, dataset, batch_size, accumulation=1, **kwargs):
    """Train one epoch in the order of the dataset; return the trainer, with its result."""
    kwargs = {"gradient_accumulation_steps": accumulation, "train_dataloader_kwargs": {"shuffle": False}, **kwargs}
    trainer.result = toys.fit(trainer, dataset, per_device_batch_size=batch_size, **kwargs)
    return trainer


def assert_gradients(trainer, expected) -> None:
    for got, wanted in zip(trainer.gradients, expected, strict=True):
        torch.testing.assert_close(got, wanted, **TIGHT)


def gradient_of(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    return toys.row(torch.autograd.grad(loss, list(model.parameters())))


def true_mean(loss_func, model, inputs, targets) -> float:
    with torch.no_grad():
        return loss_func(model(inputs), targets).item()


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "accumulation"),
    [(16, *shape) for shape in SHAPES] + [(9, 2, 2), (9, 2, 4), (10, 2, 4), (13, 2, 2), (15, 2, 3), (3, 2, 8)],
)
def test_a_mean_loss_has_the_same_gradients_however_its_update_is_cut(num_samples, batch_size, accumulation):
    """A short tail is divided by what it holds."""
    model = network()
    parts = [tensor.split(batch_size * accumulation) for tensor in data(num_samples).tensors]
    expected = [gradient_of(model, nn.functional.mse_loss(model(x), y)) for x, y in zip(*parts, strict=True)]
    assert len(expected) == math.ceil(num_samples / (batch_size * accumulation))
    assert_gradients(train(watched(), data(num_samples), batch_size, accumulation), expected)


class Tokens(Dataset):
    """Sequences of 12 tokens, of which a different number has a label in each."""

    def __init__(self, num_samples: int):
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randint(7, (num_samples, 12), generator=generator)
        self.labels = torch.randint(7, (num_samples, 12), generator=generator)
        lengths = torch.randint(1, 13, (num_samples,), generator=generator)
        self.labels[torch.arange(12)[None] >= lengths[:, None]] = IGNORED

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return {"tokens": self.inputs[index], "labels": self.labels[index]}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7)
        self.double()

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


class KeywordTagger(Tagger):
    """Takes anything by keyword, as wrapped and configurable models do."""

    def forward(self, **kwargs):
        return super().forward(kwargs["tokens"])


def tagger(cls=Tagger) -> nn.Module:
    return toys.seeded(cls, seed=4)


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class CountingOnTheHost(Watching):
    """The way to say that a loss is per token: override one method."""

    def count_batch_items(self, batch):
        return (batch["labels"] != IGNORED).sum().item()


class ReturningACount(Watching):
    """pytorch-accelerated's way: a further key of the batch-loss dict, as a tensor on the device."""

    def _with_count(self, output, batch):
        return {**output, "num_items_in_batch": (batch["labels"] != IGNORED).sum()}

    def calculate_train_batch_loss(self, batch):
        return self._with_count(super().calculate_train_batch_loss(batch), batch)

    def calculate_eval_batch_loss(self, batch):
        return self._with_count(super().calculate_eval_batch_loss(batch), batch)


class ReturningANumber(ReturningACount):
    def _with_count(self, output, batch):
        return {**output, "num_items_in_batch": int((batch["labels"] != IGNORED).sum())}


COUNTING = [CountingOnTheHost, ReturningACount, ReturningANumber]


@pytest.mark.parametrize("model_class", [Tagger, KeywordTagger])
@pytest.mark.parametrize("cls", COUNTING)
def test_a_loss_per_token_has_the_same_gradients_however_its_update_is_cut(cls, model_class):
    tokens = Tokens(20)  # two full updates of 8 and a short one of 4
    model = tagger(model_class)
    expected = [
        gradient_of(model, token_loss(model(tokens=tokens.inputs[part]), tokens.labels[part]))
        for part in (slice(0, 8), slice(8, 16), slice(16, 20))
    ]
    for batch_size, accumulation in SHAPES:
        trainer = train(watched(cls, tagger(model_class), token_loss), tokens, batch_size, accumulation)
        assert_gradients(trainer, expected)


def test_without_a_count_a_loss_per_token_depends_on_how_its_update_is_cut():
    """What the counts are for: the mean of means is another number."""
    one, other = (train(watched(Watching, tagger(), token_loss), Tokens(8), *shape) for shape in ((8, 1), (1, 8)))
    assert not torch.allclose(*one.gradients, *other.gradients, rtol=1e-3)


@pytest.mark.parametrize("cls", COUNTING)
def test_the_recorded_and_logged_training_loss_is_the_true_mean_per_token(cls):
    tokens = Tokens(20)
    expected = pytest.approx(true_mean(token_loss, tagger(), tokens.inputs, tokens.labels), rel=1e-12)
    for shape in ((20, 1), (8, 1), (3, 2), (1, 8)):
        trainer = train(watched(cls, tagger(), token_loss), tokens, *shape)
        assert trainer.result.metrics["train_loss_epoch"] == expected
        assert [log["loss"] for log in trainer.watch.seen] == [expected]


@pytest.mark.parametrize("batch_size", [1, 4, 8, 33])
@pytest.mark.parametrize("cls", COUNTING)
def test_an_evaluation_loss_per_token_is_the_same_number_for_every_batch_size(cls, batch_size):
    tokens = Tokens(33)
    expected = true_mean(token_loss, tagger(), tokens.inputs, tokens.labels)
    result = watched(cls, tagger(), token_loss).evaluate(tokens, batch_size, dataloader_kwargs=toys.NO_WORKERS)
    assert result.metrics["evaluation_loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("batch_size", [1, 4, 8, 33])
def test_an_evaluation_loss_is_the_same_number_for_every_batch_size(batch_size):
    expected = pytest.approx(true_mean(nn.MSELoss(), network(), *data(33).tensors), rel=1e-12)
    trainer = watched()
    assert trainer.evaluate(data(33), per_device_batch_size=batch_size).metrics["evaluation_loss"] == expected
    # The same inside a training run (the learning rate is 0).
    result = trainer.train(data(8), 1, data(33), per_device_batch_size=batch_size)
    assert result.metrics["eval_loss_epoch"] == expected


@pytest.mark.parametrize(("batch_size", "accumulation"), [(33, 1), (8, 1), (8, 4), (4, 3), (1, 8)])
def test_the_recorded_training_loss_is_the_true_mean_and_not_divided_by_the_accumulation(batch_size, accumulation):
    trainer = train(watched(), data(33), batch_size, accumulation, num_epochs=2)
    recorded = trainer.run_history.get_metric_values("train_loss_epoch")
    assert recorded == [pytest.approx(true_mean(nn.MSELoss(), network(), *data(33).tensors), rel=1e-12)] * 2
    assert trainer.result.metrics["train_loss_epoch"] == recorded[-1]


def test_a_log_holds_the_mean_since_the_last_one():
    logs = train(watched(), data(22), 2, 2, log_every=2).watch.seen
    # Updates of 4 samples, a log every 8; the last update has 2.
    assert [log["update"] for log in logs] == [2, 4, 6]
    squares = squared_errors(data(22))
    means = [squares[part].mean().item() for part in (slice(0, 8), slice(8, 16), slice(16, 22))]
    assert [log["loss"] for log in logs] == [pytest.approx(mean, rel=1e-10) for mean in means]


def squared_errors(dataset) -> torch.Tensor:
    x, y = dataset.tensors
    with torch.no_grad():
        return nn.functional.mse_loss(network()(x), y, reduction="none").flatten()


def test_a_count_of_none_means_samples():
    class Undecided(Watching):
        def count_batch_items(self, batch):
            return None

    plain, undecided = watched(lr=0.1), watched(Undecided, lr=0.1)
    losses = [
        trainer.train(data(10), 2, data(5), per_device_batch_size=4, gradient_accumulation_steps=2, seed=1).metrics
        for trainer in (plain, undecided)
    ]
    assert losses[0] == losses[1]
    for one, other in zip(plain.gradients, undecided.gradients, strict=True):
        assert torch.equal(one, other)


def safe_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """0 where there is no token to learn from, as losses for masked tokens are written."""
    options = {"ignore_index": IGNORED, "reduction": "sum"}
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)
    return total / (labels != IGNORED).sum().clamp(min=1)


@pytest.mark.parametrize("loss_func", [safe_token_loss, token_loss], ids=["loss of 0", "loss of nan"])
@pytest.mark.parametrize("cls", COUNTING)
def test_micro_batches_without_items_add_nothing_and_an_update_without_any_does_not_fail(cls, loss_func):
    tokens = Tokens(8)
    tokens.labels[2:4] = IGNORED  # the second half of the first window
    tokens.labels[4:8] = IGNORED  # the whole second window
    model = tagger()
    expected = gradient_of(model, token_loss(model(tokens.inputs[:2]), tokens.labels[:2]))
    mean = true_mean(token_loss, model, tokens.inputs[:2], tokens.labels[:2])
    trainer = train(watched(cls, tagger(), loss_func, callbacks=[TerminateOnNaNCallback()]), tokens, 2, 2)
    first, second = trainer.gradients
    torch.testing.assert_close(first, expected, **TIGHT)
    assert torch.equal(second, torch.zeros_like(second))
    assert trainer.result.metrics["train_loss_epoch"] == pytest.approx(mean, rel=1e-12)
    assert trainer.result.stop_reason is None


@pytest.mark.parametrize("cls", COUNTING)
def test_evaluation_batches_without_items_add_nothing(cls):
    tokens = Tokens(9)
    tokens.labels[4] = IGNORED  # alone in its batch, its mean loss is nan
    expected = true_mean(token_loss, tagger(), tokens.inputs, tokens.labels)
    for batch_size in (1, 2, 9):
        trainer = watched(cls, tagger(), token_loss, callbacks=[TerminateOnNaNCallback()])
        result = trainer.evaluate(tokens, batch_size, dataloader_kwargs=toys.NO_WORKERS)
        assert result.stop_reason is None
        assert result.metrics["evaluation_loss"] == pytest.approx(expected, rel=1e-12)


def test_callbacks_see_each_micro_batch_s_own_loss_whatever_the_accumulation():
    watch = toys.watch(on_train_step_end=lambda trainer, batch_output, **kwargs: batch_output["loss"].item())
    train(watched(callbacks=[watch]), data(8), 2, 4)
    means = [pair.mean().item() for pair in squared_errors(data(8)).split(2)]
    assert watch.seen == pytest.approx(means, rel=1e-12)


def test_backward_gets_a_lone_micro_batch_s_loss_itself_and_a_weighted_one_otherwise():
    passed = []

    class Backward(Watching):
        def calculate_train_batch_loss(self, batch):
            self.output = super().calculate_train_batch_loss(batch)
            return self.output

        def backward_step(self, loss):
            passed.append((loss is self.output["loss"], (loss / self.output["loss"]).item()))
            super().backward_step(loss)

    train(watched(Backward), data(8), 4)
    assert [is_itself for is_itself, _ in passed] == [True, True]
    passed.clear()
    train(watched(Backward), data(7), 4, 2)
    assert [share for _, share in passed] == [pytest.approx(4 / 7), pytest.approx(3 / 7)]


class HostReads(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [
        pytest.param(Trainer, {}, id="plain"),
        pytest.param(Trainer, {"gradient_accumulation_steps": 2}, id="accumulation"),
        pytest.param(Trainer, {"gradient_clip_norm": 1.0, "gradient_clip_value": 0.5}, id="clipping"),
        pytest.param(Trainer, {"create_scheduler_fn": CosineLrScheduler.create_scheduler_fn()}, id="scheduler"),
        pytest.param(ReturningACount, {"gradient_accumulation_steps": 2}, id="items counted on the device"),
    ],
)
def test_the_host_waits_for_nothing_between_two_logs(cls, kwargs):
    reads = HostReads()
    watch = toys.watch(on_update_end=lambda trainer, **kwargs: reads.count)
    per_update = 2 * kwargs.get("gradient_accumulation_steps", 1)
    trainer = toys.trainer_of([*DEFAULT_CALLBACKS, watch], tagger(), 0.01, cls=cls, loss_func=token_loss)
    with reads:
        train(trainer, Tokens(52 * per_update), 2, log_every=50, **kwargs)
    after_update = watch.seen
    assert len(after_update) == 52
    assert after_update[49] - after_update[0] == 0, "reads during updates 2 to 50"
    assert after_update[51] - after_update[50] == 0, "reads during update 52, after the log of update 50"
    assert after_update[0] == 0, "reads before the first update was over"


def test_the_counter_of_host_reads_counts():
    reads = HostReads()
    with reads:
        value = torch.ones(()) * 2
        assert float(value) == 2.0
        assert bool(value > 1)
    assert reads.count == 2
