"""Compiled updates on a real device: in graphs, close to eager ones, and resumed bit by bit without torch's caches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import toys
from loopwright import Trainer
from loopwright.training.run import run_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def without_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run may be on another machine of this kind, with nothing compiled yet."""
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)


class Layer(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 256), nn.Linear(256, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        return hidden + self.dropout(self.down(nn.functional.gelu(self.up(hidden))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(200, 64), nn.Linear(64, 3)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.words(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean(1))


def pad(samples: list[Any]) -> Any:
    words, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(words), batch_first=True), torch.tensor(labels)


def sequences(lengths: list[int]) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randint(200, (length,), generator=generator), index % 3) for index, length in enumerate(lengths)]


LENGTHS = [7 + 5 * (index * 7 % 11) for index in range(30)]
SAME = [24] * 30


def trained(lengths: list[int], step_mode: str = "compile", **options: Any) -> Trainer:
    torch._dynamo.reset()
    model = toys.seeded(Encoder, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = toys.watch(on_log=lambda trainer, logs, **kwargs: logs["loss"])
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[losses])
    settings = {"num_epochs": 2, "per_device_batch_size": 4, "collate_fn": pad, "seed": 5, "log_every": 1}
    trainer.train(sequences(lengths), step_mode=step_mode, mixed_precision="bf16", **{**settings, **options})
    trainer.losses = losses.seen
    return trainer


@pytest.mark.parametrize("lengths", [LENGTHS, SAME], ids=["lengths", "same"])
def test_compiled_updates_are_graphs_and_resume_bit_by_bit(lengths: list[int], tmp_path: Path) -> None:
    whole = trained(lengths, checkpoints=toys.saving(tmp_path))
    recordings = run_of(whole).recordings
    assert whole.num_graphed_updates == whole.progress.update - 1 and recordings.not_compiled is None
    assert recordings.is_dynamic == (lengths is LENGTHS)
    plain = trained(lengths, "graph")
    torch.testing.assert_close(whole.losses[:5], plain.losses[:5], rtol=0.1, atol=0.1)
    for update in (3,) if lengths is SAME else (9,):
        toys.assert_same_weights(trained(lengths, resume_from=toys.step(tmp_path, update)), whole)


def test_a_step_hook_of_ones_own_is_compiled_without_graphs(tmp_path: Path) -> None:
    class Own(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            return super().calculate_train_batch_loss(batch)

    model = toys.seeded(Encoder, seed=1)
    trainer = Own(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-3), callbacks=[])
    trainer.train(sequences(LENGTHS), 1, per_device_batch_size=4, collate_fn=pad, seed=5, step_mode="compile")
    assert trainer.num_graphed_updates == 0 and run_of(trainer).recordings.not_compiled is None
