"""Updates of `hf.Trainer` as graphs, with a stand-in for CUDA."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import toys
from graphs.recorder import FakeCapturer
from hf.tiny import arguments, losses
from loopwright import hf
from loopwright.engine.graphs import single_precision_rates
from loopwright.hf.core import Core


class Tagger(nn.Module):
    """A class for each of five positions; positions with the label -100 do not count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer = nn.Linear(3, 4)
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layer(self.dropout(inputs))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def rows(count: int = 42) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    samples = []
    for number in range(count):
        labels = torch.randint(4, (5,), generator=generator)
        labels[5 - number % 4 :] = -100
        samples.append({"inputs": torch.randn(5, 3, generator=generator), "labels": labels})
    return samples


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[FakeCapturer]:
    made: list[FakeCapturer] = []

    def create(core: Any) -> FakeCapturer:
        made.append(FakeCapturer(core.model, core.optimizer))
        return made[-1]

    monkeypatch.setattr(Core, "create_capturer", create, raising=False)
    return made


def trained(folder: Path, kind: type[hf.Trainer] = hf.Trainer, callbacks: Any = (), **options: Any) -> hf.Trainer:
    settings = {"per_device_train_batch_size": 8, "num_train_epochs": 3, "optim": "adamw_torch_fused", **options}
    args = arguments(folder, report_to="none", use_cpu=True, **settings)
    trainer = kind(Tagger(), args, train_dataset=rows(), callbacks=list(callbacks))
    trainer.train()
    return trainer


@pytest.mark.parametrize("accumulation", [1, 2])
def test_graphed_steps_have_the_losses_and_weights_of_eager_ones(
    accumulation: int, tmp_path: Path, graphs: list[FakeCapturer], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed = trained(tmp_path / "graphed", gradient_accumulation_steps=accumulation)
    assert graphs[0].num_replays > 0
    plain = Core.optimizer_step

    def step(core: Any) -> None:
        with single_precision_rates(core.optimizer):
            plain(core)

    monkeypatch.setattr(Core, "optimizer_step", step)
    eager = trained(tmp_path / "eager", step_mode="eager", gradient_accumulation_steps=accumulation)
    assert losses(eager) == losses(graphed)
    toys.assert_same_weights(eager, graphed)


class OwnLoss(hf.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


class SafeLoss(OwnLoss):
    graph_safe = True


def test_an_own_loss_means_eager_unless_it_is_declared_safe(
    tmp_path: Path, graphs: list[FakeCapturer], capsys: Any
) -> None:
    trained(tmp_path / "own", OwnLoss)
    assert graphs == []
    assert "compute_loss must see every step" in capsys.readouterr().out
    trained(tmp_path / "safe", SafeLoss)
    assert graphs[0].num_replays > 0


def test_a_callback_that_looks_at_gradients_means_eager_and_others_do_not(
    tmp_path: Path, graphs: list[FakeCapturer]
) -> None:
    class Looks(hf.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pass

    class Counts(hf.TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append("begin")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append("end")

    trained(tmp_path / "looks", callbacks=[Looks()])
    assert graphs == []
    counts = Counts()
    trainer = trained(tmp_path / "counts", callbacks=[counts])
    assert graphs[0].num_replays > 0
    assert counts.seen == ["begin", "end"] * trainer.state.global_step
