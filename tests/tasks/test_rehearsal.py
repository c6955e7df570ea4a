"""The rehearsal leaves no trace, tells what it found, and finds what would fail later."""

from __future__ import annotations

import pytest
import torch

from loopwright.data.images import ImageDataset
from loopwright.errors import CheckpointError
from loopwright.run_folder import RunFolder
from loopwright.tasks import get_task, rehearsal
from loopwright.tasks.base import Origin
from loopwright.tasks.data import RunData
from loopwright.tasks.job import build_job, load_data, make_optimizer
from loopwright.tasks.screen import Screen
from loopwright.tasks.settings import settle, words_of
from tasks.conftest import FLAGS


@pytest.fixture
def job(reviews):
    """Return a job that is ready to train."""
    task = get_task("text-classification")
    flags = {name: value for name, value in FLAGS.items() if name != "quiet"}
    settings = settle(task, words_of({**flags, "data": reviews}))
    made = build_job(task, RunData(task.preflight(settings.args)), settings, Origin(None))
    load_data(made)
    return made


def test_weights_generators_and_modes_are_put_back_bit_by_bit(job, tmp_path):
    before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    torch.rand(3)
    generator = torch.get_rng_state()
    job.model.eval()
    found = rehearsal.rehearse(job, make_optimizer, RunFolder(tmp_path), Screen(is_quiet=True), 3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(module.training for module in job.model.modules())
    assert all(parameter.grad is None for parameter in job.model.parameters())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reviews.csv"]
    assert found.checkpoint_bytes > 4 * 3 * sum(parameter.numel() for parameter in job.model.parameters())
    assert found.loss > 0 and found.memory > 0 and found.free_bytes > 0
    assert found.update_seconds > 0 and found.evaluation_seconds > 0


def test_a_checkpoint_that_reads_back_differently_is_found(job, tmp_path, monkeypatch):
    genuine = rehearsal.read

    def damaged(path):
        checkpoint = genuine(path)
        next(iter(checkpoint.model.values())).add_(1)
        return checkpoint

    monkeypatch.setattr(rehearsal, "read", damaged)
    with pytest.raises(CheckpointError, match="loaded something else"):
        rehearsal.rehearse(job, make_optimizer, RunFolder(tmp_path), Screen(is_quiet=True), 3)


def test_the_longest_rows_are_rehearsed(job):
    chosen = rehearsal.longest_rows(job.train_dataset, 4)
    lengths = [len(job.train_dataset[index]["input_ids"]) for index in range(len(job.train_dataset))]
    assert sorted((lengths[index] for index in chosen), reverse=True) == sorted(lengths, reverse=True)[:4]


def test_no_image_is_decoded_to_choose_what_is_rehearsed():
    def refuse(row):
        raise AssertionError(f"{row} was decoded")

    dataset = ImageDataset(range(1000), refuse, None, lambda scene, row: {})
    assert rehearsal.longest_rows(dataset, 3) == [0, 1, 2]
    assert rehearsal.longest_rows(dataset, 1001) == list(range(1000))
