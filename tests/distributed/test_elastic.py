"""Another number of processes: the same samples in the same updates always, the same bits with an exact sum."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import toys
from distributed.launcher import Results, launch, run
from loopwright import Checkpointing, Trainer
from loopwright.data import Share, adopt
from loopwright.errors import ConfigError

SAMPLES, BATCH_SIZE, WINDOW = 1003, 3, 24
CPU = torch.device("cpu")


class Numbers(Dataset):
    """Samples (x, y, id); x has noise that is drawn when it is read."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        x = torch.sin(torch.arange(4) * (index + 1.0)) + 0.1 * torch.rand(4) + 0.1 * float(np.random.rand())
        return x, x.sum().unsqueeze(0), torch.tensor(index)


def updates_of(rank: int, num_processes: int) -> list[list[int]]:
    """The ids that one process has in each update of two epochs."""
    dataset = list(range(SAMPLES))
    share = Share(rank, num_processes, WINDOW // num_processes)
    loader = adopt(DataLoader(dataset, BATCH_SIZE, shuffle=True), seed=5, share=share, device=CPU)
    return [
        [int(index) for piece in window.pieces if piece.rows for index in piece.batch]
        for epoch in range(2)
        for window in loader.windows(epoch)
    ]


def test_an_update_has_the_same_samples_on_1_2_3_4_and_8_processes():
    hashes = {}
    for num_processes in (1, 2, 3, 4, 8):
        parts = [updates_of(rank, num_processes) for rank in range(num_processes)]
        updates = [sum(of_update, []) for of_update in zip(*parts, strict=True)]
        assert len(updates) == 2 * -(-SAMPLES // (BATCH_SIZE * WINDOW))
        assert sorted(sum(updates, [])) == sorted(2 * list(range(SAMPLES)))
        hashes[num_processes] = hashlib.sha256(json.dumps(updates).encode()).hexdigest()
    assert len(set(hashes.values())) == 1, hashes


# The same bits


class Halves(nn.Module):
    """Two layers with dropout; a third one is used for some micro-batches only."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.sometimes = nn.Linear(4, 1)
        self.never = nn.Linear(4, 1)

    def forward(self, x):
        outputs = self.layers(x)
        return outputs + self.sometimes(x) if float(x[0, 0].detach()) > 0.3 else outputs


class PerItem(Trainer):
    """Items that are known only after the forward pass."""

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        return {**output, "num_items_in_batch": (batch[2] % 3 + 1).sum()}


def fit(accumulation: int, *, cls=Trainer, reduction: str = "exact", limit: int | None = None, **kwargs) -> dict:
    """Two epochs of 11 micro-batches: two full updates of four and a short one."""
    torch.manual_seed(int(os.environ.get("RANK", "0")))  # the first process's weights count
    model = Halves()
    ends = toys.watch(on_update_end=lambda trainer, **kwargs: trainer.progress.update)
    logs = toys.watch(on_log=lambda trainer, logs, **kwargs: logs["update"])
    trainer = cls(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), 0.02), callbacks=[ends, logs])
    options = {"per_device_batch_size": 3, "gradient_accumulation_steps": accumulation, "max_num_train_steps": limit}
    options |= {"gradient_clip_norm": 0.5, "reduction": reduction, "log_every": 2, "seed": 4, **kwargs}
    result = toys.fit(trainer, Numbers(31), 2, torch_seed=None, **options)
    tensors = [*model.parameters()]
    for parameter in model.parameters():
        state = trainer.optimizer.state.get(parameter, {})
        tensors += [state[name] for name in sorted(state)]
    digest = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()
    return {
        "updates": result.updates,
        "bits": digest,
        "weights": toys.weights(model).tolist(),
        "counted": len(ends.seen),
        "logs": logs.seen,
        "accumulation": trainer.run_config.gradient_accumulation_steps,
        "has_unused": model.never.weight.grad is None and not trainer.optimizer.state.get(model.never.weight),
        "batches": [trainer.progress.epoch, trainer.progress.total_batches],
    }


def exact(results: Results) -> None:
    accumulation = 4 // int(os.environ["WORLD_SIZE"])
    results["plain"] = fit(accumulation)
    results["per item"] = fit(accumulation, cls=PerItem)
    # From here on the runs go on in one folder, each on another number of processes.
    limit = {"4": 1, "2": 3}.get(os.environ["WORLD_SIZE"])
    checkpoints = Checkpointing(results.path.parent / "elastic", every_updates=1)
    results["elastic"] = fit(1, limit=limit, checkpoints=checkpoints, resume_from="auto")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.fixture(scope="module")
def on_four(folder):
    return run(exact, folder, 4)


@pytest.fixture(scope="module")
def on_two(folder, on_four):
    return run(exact, folder, 2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    return {"plain": fit(4), "per item": fit(4, cls=PerItem)}


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["plain", "per item"])
def test_an_exact_sum_gives_the_same_bits_on_1_2_and_4_processes(kind, alone, on_two, on_four):
    bits = [rank[kind]["bits"] for rank in (*on_two, *on_four)]
    assert set(bits) == {alone[kind]["bits"]}
    assert alone[kind]["has_unused"] and all(rank[kind]["has_unused"] for rank in (*on_two, *on_four))


@pytest.mark.distributed
def test_an_exact_sum_is_that_of_the_fast_way_up_to_rounding_and_all_count_updates_alike(alone, on_two, on_four):
    fast = fit(4, reduction="fast")
    assert fast["weights"] == pytest.approx(alone["plain"]["weights"], rel=1e-4, abs=1e-6)
    for outcome in (alone["plain"], *(rank["plain"] for rank in (*on_two, *on_four))):
        assert outcome["updates"] == outcome["counted"] == 6
        assert outcome["logs"] == alone["plain"]["logs"]


@pytest.mark.distributed
def test_a_run_continues_on_four_two_and_one_processes_with_the_bits_of_one(folder, alone, on_two, on_four):
    assert [(rank["elastic"]["updates"], rank["elastic"]["accumulation"]) for rank in on_four] == [(1, 1)] * 4
    assert [(rank["elastic"]["updates"], rank["elastic"]["accumulation"]) for rank in on_two] == [(3, 2)] * 2
    last = fit(7, checkpoints=Checkpointing(folder / "elastic"), resume_from="auto")
    assert last["updates"] == 6 and last["accumulation"] == 4, "the stored number of micro-batches wins"
    assert last["bits"] == alone["plain"]["bits"]
    assert last["batches"] == [2, 22]


@pytest.mark.distributed
def test_processes_that_cannot_share_an_update_evenly_are_refused_with_those_that_can(folder, on_two, tmp_path):
    state = sorted((folder / "elastic").glob("step-*"))[-1]
    (tmp_path / "state").write_text(str(state))
    for text in launch(resume_on_three, tmp_path, 3):
        assert "4 micro-batches" in text and "3 processes" in text and "1, 2, 4" in text


def resume_on_three(results: Results) -> str:
    with pytest.raises(ConfigError) as refused:
        fit(1, reduction="fast", resume_from=(results.path.parent / "state").read_text())
    return str(refused.value)


# What is refused before anything begins


def test_an_exact_sum_needs_a_power_of_two_of_micro_batches_on_each_process(tmp_path):
    for text in launch(start_with_three_each, tmp_path):
        assert "6 micro-batches" in text and ": 1, 3, 6." in text


def start_with_three_each() -> str:
    with pytest.raises(ConfigError) as refused:
        fit(3)
    return str(refused.value)


def test_an_exact_sum_is_refused_for_batch_norm_and_unknown_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    trainer = toys.trainer_of((), model, cls=Trainer)
    with pytest.raises(ConfigError, match=r"batch norm.*GroupNorm"):
        trainer.train(Numbers(4), 1, reduction="exact")
    with pytest.raises(ConfigError, match='reduction must be "fast" or "exact", got "slow"|got \'slow\''):
        trainer.train(Numbers(4), 1, reduction="slow")
