"""Training images augmented on a GPU: the pixels of the CPU but for rounding, finished ahead, resumable."""

import pytest
import torch

from data.images.test_device_augmentation import TRANSFORMS, batch_of, dataset_of, differences_of_levels, rows_of
from loopwright import api
from loopwright.data import MicroBatch, Window
from loopwright.data.images import classification_train
from loopwright.data.prefetch import prefetched
from loopwright.engine.nested import map_tensors, to_device
from tasks.reviews import read_lines
from tasks.runs import assert_same_files
from tasks.squares import write_squares

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
TASK = "image-classification"
FLAGS = {"lr": 3e-3, "batch": 8, "augmentation": "strong", "quiet": True, "rehearsal": False}


@pytest.fixture
def squares(tmp_path):
    return write_squares(tmp_path / "squares")


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_the_pixels_are_those_of_the_cpu_but_for_rounding(transform):
    rows = rows_of()
    positions = list(range(len(rows))) * 2
    expected, _ = batch_of(dataset_of(rows, transform, on_device=False), positions)
    batch, _ = batch_of(dataset_of(rows, transform), positions)
    found = to_device(batch, DEVICE)["pixel_values"]
    assert found.is_cuda
    differing = differences_of_levels(found.cpu(), expected["pixel_values"])
    assert differing.mean() < 0.05 and (differing > 1).float().mean() < 0.005
    assert torch.equal(to_device(batch, DEVICE)["pixel_values"], found)


def test_a_batch_is_finished_ahead_without_waiting_for_the_device():
    dataset = dataset_of(rows_of(), classification_train(24, "strong"))
    batches = [batch_of(dataset, [*range(number, 8), *range(number)])[0] for number in range(4)]
    expected = [to_device(batch, DEVICE)["pixel_values"] for batch in batches]
    batches = [map_tensors(batch, torch.Tensor.pin_memory) for batch in batches]
    on_device = map_tensors(batches[0], torch.Tensor.cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_device.finish()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    windows = (Window([MicroBatch(batch, number, 8)], 8) for number, batch in enumerate(batches))
    for window, wanted in zip(prefetched(windows, DEVICE), expected, strict=True):
        (piece,) = window.pieces
        assert piece.moved["pixel_values"].is_cuda, "even though it is small"
        assert torch.equal(piece.on(DEVICE)["pixel_values"], wanted)
        assert torch.equal(piece.for_graph(DEVICE)["pixel_values"], wanted)


def test_a_gpu_augments_unless_told_otherwise_and_graphs_have_one_size(squares, tmp_path):
    auto, plain = (
        api.train(TASK, data=squares, epochs=2, output_dir=tmp_path / name, **flags, **FLAGS)
        for name, flags in (("auto", {}), ("plain", {"augment_on": "cpu"}))
    )
    text = "training images are augmented in batches on the device"
    assert [text in (run.path / "log.txt").read_text() for run in (auto, plain)] == [True, False]
    assert auto.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=0.1)
    graphed = sum(each.get("graphed_updates", 0) for each in read_lines(auto.path / "metrics.jsonl"))
    assert graphed >= auto.result["updates"] - 3  # the first, and the short batches of two epochs


@pytest.mark.parametrize("step_mode", ["auto", "eager"])
def test_a_resumed_run_has_the_same_bits(squares, tmp_path, step_mode):
    flags = {"data": squares, "full_determinism": True, "step_mode": step_mode, "workers": 2, **FLAGS}
    flags |= {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant", "logging_steps": 1}
    part = api.train(TASK, output_dir=tmp_path / "part", max_steps=4, **flags)
    whole = api.train(TASK, output_dir=tmp_path / "whole", max_steps=9, **flags)
    resumed = api.resume(part.path, max_steps=9, quiet=True)
    assert_same_files(resumed.path, whole.path, "model/model.safetensors")
    losses = [
        [each["loss"] for each in read_lines(run.path / "metrics.jsonl") if "loss" in each] for run in (resumed, whole)
    ]
    assert losses[0] == losses[1]
    tiers = [each["tier"] for each in read_lines(resumed.path / "metrics.jsonl") if each["event"] == "start"]
    assert tiers == ["T0", "T0"]
