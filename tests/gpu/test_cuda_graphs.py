"""Updates as CUDA graphs, on a real device: the bits and losses of eager updates, resume, and what cannot be done."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import toys
from graphs.recorder import EagerTrainer
from loopwright import Trainer
from loopwright.callbacks import TrainerCallback
from loopwright.checkpoint import Checkpointing
from loopwright.schedulers import CosineLrScheduler
from loopwright.stepping.cast_weights import CastWeights
from loopwright.training.run import run_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


class Encoder(nn.Module):
    def __init__(self, vocabulary: int = 200, width: int = 64, classes: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.words(inputs))
        return self.head(hidden.mean(1))


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[float] = []
        self.graphed = 0

    def on_log(self, trainer: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append(logs["loss"])
        self.graphed += logs.get("graphed_updates", 0)


def a_dataset(rows: int = 800, length: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, 200, (rows, length), generator=generator)
    return TensorDataset(words, (words < 60).sum(1).remainder(3))


def trained(kind: type[Trainer], callbacks: Any = (), updates: int = 200, **options: Any) -> tuple[Any, Losses]:
    torch.manual_seed(7)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = Losses()
    trainer = kind(model, nn.CrossEntropyLoss(), optimizer, callbacks=[losses, *callbacks])
    schedule = CosineLrScheduler.create_scheduler_fn(4, 50, num_warmup_epochs=1)
    settings: dict[str, Any] = {"num_epochs": 100, "max_num_train_steps": updates, "per_device_batch_size": 8}
    settings |= {"gradient_accumulation_steps": 2, "gradient_clip_norm": 1.0, "create_scheduler_fn": schedule}
    trainer.train(a_dataset(), **{**settings, "seed": 11, "log_every": 1, **options})
    return trainer, losses


@pytest.mark.parametrize("accumulation", [1, 2])
def test_graphs_have_the_bits_of_eager_updates_in_float32(accumulation: int) -> None:
    eager, eager_losses = trained(EagerTrainer, step_mode="eager", gradient_accumulation_steps=accumulation)
    graphed, losses = trained(Trainer, step_mode="graph", gradient_accumulation_steps=accumulation)
    assert losses.graphed >= 0.95 * 200
    assert losses.seen == eager_losses.seen
    toys.assert_same_weights(eager, graphed)


def test_graphs_have_the_losses_of_eager_updates_in_bf16() -> None:
    _, eager = trained(EagerTrainer, step_mode="eager", mixed_precision="bf16")
    _, graphed = trained(Trainer, step_mode="graph", mixed_precision="bf16")
    assert graphed.graphed >= 0.95 * 200
    assert torch.allclose(torch.tensor(eager.seen), torch.tensor(graphed.seen), atol=0.02)


def test_auto_takes_graphs_and_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    whole, losses = trained(Trainer, updates=60)
    assert losses.graphed >= 55
    options = {"checkpoints": Checkpointing(tmp_path / "run", every_updates=20), "resume_from": "auto", "updates": 60}
    trained(Trainer, [toys.stop_at(33)], **options)
    resumed, losses = trained(Trainer, **options)
    assert losses.graphed >= 25
    toys.assert_same_weights(whole, resumed)


def test_a_forward_pass_that_waits_for_the_device_is_run_eagerly(capsys: Any) -> None:
    class Waiting(Encoder):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) * (1.0 if inputs.sum().item() > 0 else 2.0)

    torch.manual_seed(7)
    model = Waiting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[])
    trainer.train(a_dataset(), num_epochs=1, seed=1, max_num_train_steps=10)
    assert "Running updates eagerly, not as CUDA graphs" in capsys.readouterr().out
    assert trainer.progress.update == 10


def test_the_loss_scaler_means_eager(capsys: Any) -> None:
    trained(Trainer, updates=5, mixed_precision="fp16")
    assert "the loss scaler of fp16 decides on the host" in capsys.readouterr().out


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "RMSprop", "NAdam", "Adagrad"])
def test_torchs_optimizers_are_recorded_or_run_eagerly(optimizer: str) -> None:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    inputs = torch.randn(64, 4)
    losses = Losses()
    trainer = Trainer(
        model, nn.MSELoss(), getattr(torch.optim, optimizer)(model.parameters(), lr=0.01), callbacks=[losses]
    )
    trainer.train(TensorDataset(inputs, inputs.sum(1, keepdim=True)), num_epochs=10, seed=1, log_every=8)
    print(optimizer, "graphed", losses.graphed, "of", trainer.progress.update)
    assert losses.seen[-1] < losses.seen[0]


def test_an_earlier_trainer_of_the_same_model_does_not_keep_updates_from_being_recorded() -> None:
    torch.manual_seed(7)
    model = Encoder()
    losses = Losses()
    for _ in range(2):  # a trainer is part of reference cycles: the first is not collected at once
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[losses])
        trainer.train(a_dataset(80), num_epochs=1, per_device_batch_size=8, seed=1, log_every=1)
    assert losses.graphed == 2 * 9


def test_graphs_go_together_with_saves_in_the_background(tmp_path: Path) -> None:
    plain, losses = trained(Trainer, updates=60)
    policy = Checkpointing(tmp_path / "run", every_updates=3, asynchronous=True)
    saved, saved_losses = trained(Trainer, updates=60, checkpoints=policy)
    assert saved_losses.graphed == losses.graphed >= 55
    toys.assert_same_weights(plain, saved)


def sequences(rows: int = 402) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(5, 30, (rows,), generator=generator).tolist()
    return [(torch.randint(1, 200, (length,), generator=generator), length % 3) for length in lengths]


def pad(samples: list[Any]) -> Any:
    """A user's own collate function."""
    words, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(words), batch_first=True), torch.tensor(labels)


class Modes(TrainerCallback):
    """A letter for each update: g for a graph, e for an eager one; and its seconds."""

    def __init__(self) -> None:
        self.seen, self.seconds = "", [time.perf_counter()]
        self._count = 0

    def on_update_end(self, trainer: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter())
        self.seen += "eg"[trainer.num_graphed_updates - self._count]
        self._count = trainer.num_graphed_updates


def padded(kind: type[Trainer] = Trainer, callbacks: Any = (), model: Any = Encoder, **options: Any) -> Any:
    """Train with batches of many shapes: about 20 lengths, and a short batch at the end of each epoch."""
    torch.manual_seed(7)
    network, modes = model(), Modes()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    trainer = kind(network, nn.CrossEntropyLoss(), optimizer, callbacks=[modes, *callbacks])
    settings = {"num_epochs": 2, "per_device_batch_size": 8, "collate_fn": pad, "seed": 11, **options}
    trainer.train(sequences(), train_dataloader_kwargs={"num_workers": 0}, **settings)
    return trainer, modes


@pytest.mark.parametrize("accumulation", [1, 3])
def test_an_own_collate_function_gets_graphs_with_the_bits_of_eager_updates(accumulation: int) -> None:
    options = {"gradient_accumulation_steps": accumulation, "gradient_clip_norm": 1.0}
    eager, _ = padded(EagerTrainer, step_mode="eager", **options)
    graphed, modes = padded(step_mode="graph", **options)
    assert modes.seen == "e" + "g" * (len(modes.seen) - 1)
    toys.assert_same_weights(eager, graphed)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_run_of_many_shapes_resumes_with_the_same_graphs_and_bits(tmp_path: Path, precision: str) -> None:
    whole, modes = padded(mixed_precision=precision)
    policy = Checkpointing(tmp_path / "run", every_updates=1, keep_last=200, keep_best=None)
    saved, _ = padded(checkpoints=policy, mixed_precision=precision)
    toys.assert_same_weights(whole, saved)
    for update in (1, 2, 7, 30, 51, 80):
        start = toys.step(tmp_path / "run", update)
        resumed, resumed_modes = padded(resume_from=start, mixed_precision=precision)
        assert resumed_modes.seen == modes.seen[update:]
        toys.assert_same_weights(whole, resumed)
        assert run_of(resumed).recordings == run_of(whole).recordings


class Odd(Encoder):
    """Cannot be recorded for one length."""

    length = 27
    error: Exception | None = None  # or it waits for the device

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.shape[1] == self.length and torch.cuda.is_current_stream_capturing():
            if self.error is not None:
                raise self.error
            inputs.sum().item()
        return super().forward(inputs)


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("CUDA out of memory")], ids=["a wait", "memory"])
def test_a_shape_that_cannot_be_recorded_leaves_the_others_as_graphs_with_the_same_bits(error: Any) -> None:
    odd = type("OddOne", (Odd,), {"error": error})
    eager, _ = padded(EagerTrainer, model=odd, step_mode="eager")
    graphed, modes = padded(model=odd)
    assert 1 < modes.seen.count("e") < 40 and modes.seen.count("g") > 40
    assert len(run_of(graphed).recordings.failed) == 1
    toys.assert_same_weights(eager, graphed)  # with dropout: graphs draw from the generator as it is now


def test_recording_a_shape_is_not_much_slower_than_some_eager_updates() -> None:
    _, eager = padded(step_mode="eager")
    _, graphed = padded()
    spent = [now - before for before, now in zip(graphed.seconds, graphed.seconds[1:], strict=False)]
    usual = sorted(now - before for before, now in zip(eager.seconds, eager.seconds[1:], strict=False))
    slowest, eager_median = sorted(spent[2:])[-1], usual[len(usual) // 2]
    print("slowest recording", slowest, "median of eager updates", eager_median)
    assert slowest < 20 * eager_median + 0.1


def test_copies_of_weights_give_the_losses_and_gradients_of_autocast() -> None:
    found = []
    for copies in (False, True):
        torch.manual_seed(7)
        model = Encoder().cuda()
        model.forward = torch.autocast("cuda", torch.bfloat16)(model.forward)  # type: ignore[method-assign]
        casts = CastWeights(model)
        casts.refresh()
        with casts.substituted() if copies else contextlib.nullcontext():
            loss = model(torch.arange(192, device="cuda").reshape(8, 24)).float().square().sum()
            loss.backward()
        found.append({"loss": loss.detach(), **{name: each.grad for name, each in model.named_parameters()}})
    toys.assert_same(found[1], found[0])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_graphs_with_copies_of_weights_have_the_bits_of_graphs_that_cast(monkeypatch: Any, accumulation: int) -> None:
    options = {"step_mode": "graph", "mixed_precision": "bf16", "gradient_accumulation_steps": accumulation}
    copied, copied_losses = trained(Trainer, **options)
    monkeypatch.setattr(CastWeights, "substituted", lambda casts: contextlib.nullcontext())
    cast, cast_losses = trained(Trainer, **options)
    assert copied_losses.seen == cast_losses.seen and copied_losses.graphed >= 0.95 * 200
    toys.assert_same_weights(copied, cast)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_graphs_are_recorded_again_for_changed_settings(accumulation: int) -> None:
    def change(trainer: Any, **kwargs: Any) -> None:
        trainer.optimizer.param_groups[0]["weight_decay"] = 0.1 * (trainer.progress.update // 20)

    options = {"updates": 60, "gradient_accumulation_steps": accumulation, "gradient_clip_norm": 0.1}
    eager, _ = trained(EagerTrainer, [toys.callback(on_update_end=change)], step_mode="eager", **options)
    graphed, losses = trained(Trainer, [toys.callback(on_update_end=change)], **options)
    assert losses.graphed == 59
    toys.assert_same_weights(eager, graphed)
