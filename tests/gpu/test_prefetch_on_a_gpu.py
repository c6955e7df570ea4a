"""Batches on their way to a CUDA device: large ones ahead, on a stream of their own; small ones when they are used."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import toys
from loopwright import Trainer
from loopwright.data import MicroBatch, Window, adopt
from loopwright.data.order import Share
from loopwright.data.prefetch import CudaCopier, prefetched

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def windows(rows: int, count: int = 3):
    for index in range(count):
        batch = {"x": torch.full((rows, 64), float(index)), "nested": [{"y": torch.full((rows,), index)}], "text": "a"}
        yield Window([MicroBatch(batch, key=index, rows=rows)], rows)


def test_large_batches_are_on_the_device_before_they_are_asked_for():
    for index, window in enumerate(prefetched(windows(4096), DEVICE)):
        (piece,) = window.pieces
        assert piece.moved["x"].is_cuda and piece.moved["nested"][0]["y"].is_cuda and not piece.batch["x"].is_cuda
        assert piece.moved["x"].unique().tolist() == [index] and piece.moved["nested"][0]["y"][0].item() == index


def test_small_batches_are_copied_when_they_are_used():
    for index, window in enumerate(prefetched(windows(8), DEVICE)):
        (piece,) = window.pieces
        assert piece.moved is None
        assert piece.on(DEVICE)["x"].is_cuda and piece.on(DEVICE)["nested"][0]["y"][0].item() == index


@pytest.mark.parametrize(("width", "num_workers"), [(8192, 0), (8192, 1), (1, 0)])
def test_a_loader_pins_what_it_reads_except_a_small_batch_that_is_read_here(width, num_workers):
    rows = torch.arange(8.0).unsqueeze(1).expand(8, width).contiguous()  # a batch is 128 KiB, or 16 bytes
    source = DataLoader(TensorDataset(rows), 4, pin_memory=True, num_workers=num_workers)
    loader = adopt(source, seed=0, share=Share(0, 1, 1), device=DEVICE)
    found = [window.pieces[0].batch[0] for window in loader.windows()]
    assert [tensor.is_pinned() for tensor in found] == [width > 1] * 2
    assert torch.cat(found)[:, 0].tolist() == list(range(8))


@pytest.mark.parametrize("step_mode", ["eager", "graph"])
def test_copying_ahead_changes_no_number(step_mode, monkeypatch):
    def train() -> torch.Tensor:
        model = toys.seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
        trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), 0.01), callbacks=())
        trainer.train(toys.labelled(64, 8, seed=1), 2, per_device_batch_size=8, seed=3, step_mode=step_mode)
        return toys.weights(trainer)

    when_used = train()
    monkeypatch.setattr(CudaCopier.__init__, "__defaults__", (0,))
    assert torch.equal(train(), when_used)
