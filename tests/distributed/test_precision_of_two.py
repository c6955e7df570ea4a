"""Two processes in lower precision and with gradient checkpointing train as one process does, and go on exactly."""

import os

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import toys
from distributed.launcher import Results, run
from loopwright import Checkpointing, Trainer

pytestmark = pytest.mark.distributed

# How far two processes may be from one after four updates: the sum of rounded gradients is rounded differently.
TOLERANCES = {"no": 1e-6, "bf16": 2e-2, "fp16": 2e-3}


class Recomputed(nn.Module):
    """A network whose middle is computed again in the backward pass, dropout included."""

    def __init__(self, is_recomputed: bool):
        super().__init__()
        self.is_recomputed = is_recomputed
        self.first = nn.Linear(4, 16)
        self.middle = nn.Sequential(nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 16), nn.Tanh())
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        hidden = self.first(x)
        hidden = checkpoint(self.middle, hidden, use_reentrant=False) if self.is_recomputed else self.middle(hidden)
        return self.last(hidden)


def fit(precision: str, is_recomputed: bool = False, reduction: str = "fast", epochs: int = 2, **kwargs) -> dict:
    model = toys.seeded(Recomputed, is_recomputed)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    options = {"mixed_precision": precision, "reduction": reduction, "gradient_clip_norm": 1.0, "seed": 3, **kwargs}
    options["gradient_accumulation_steps"] = 2 // int(os.environ.get("WORLD_SIZE", "1"))
    result = toys.trained((), toys.data(14), epochs, model=model, optimizer=optimizer, cls=Trainer, **options).result
    weights = toys.weights(model)
    assert weights.dtype == torch.float32 and bool(weights.isfinite().all())
    return {"weights": weights.tolist(), "updates": result.updates, "loss": result.metrics["train_loss_epoch"]}


def measure(results: Results) -> None:
    for precision in TOLERANCES:
        for is_recomputed in (False, True):
            results[f"{precision} {is_recomputed}"] = fit(precision, is_recomputed)
        results[f"{precision} exact"] = fit(precision, reduction="exact")
    folder = results.path.parent / "fp16"
    fit("fp16", epochs=1, checkpoints=Checkpointing(folder), resume_from="auto")
    results["resumed"] = fit("fp16", checkpoints=Checkpointing(folder), resume_from="auto")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return run(measure, tmp_path_factory.mktemp("precision"))


@pytest.mark.parametrize("precision", TOLERANCES)
def test_two_processes_train_as_one_in_any_precision_and_with_the_same_bits_by_an_exact_sum(precision, measured):
    alone = fit(precision)
    first, second = (rank[f"{precision} False"] for rank in measured)
    assert first == second and first["updates"] == alone["updates"] == 4
    assert first["weights"] == pytest.approx(alone["weights"], abs=TOLERANCES[precision])
    assert first["loss"] == pytest.approx(alone["loss"], rel=TOLERANCES[precision])
    exact = fit(precision, reduction="exact")
    for rank in measured:
        assert rank[f"{precision} True"] == rank[f"{precision} False"], "gradient checkpointing changes a bit"
        assert rank[f"{precision} exact"]["weights"] == exact["weights"]


def test_a_run_with_a_loss_scaler_continues_with_the_same_bits(measured):
    for rank in measured:
        assert rank["resumed"]["weights"] == rank["fp16 False"]["weights"]
