"""The rehearsal leaves no trace, tells what it found, and finds what would fail later."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from loopwright.data.images import ImageDataset
from loopwright.engine.sharding import whole_state
from loopwright.errors import CheckpointError
from loopwright.run_folder import RunFolder
from loopwright.runs import trial
from loopwright.runs.auto.learning_rate import Search, find_rate
from loopwright.runs.console.screen import Screen
from loopwright.runs.job import RunJob
from loopwright.runs.settings import settle
from loopwright.tasks import get_task
from loopwright.tasks.base import Origin
from loopwright.tasks.data import RunData
from tasks.conftest import FLAGS


def ready_run(folder, flags):
    task = get_task("text-classification")
    settings = settle(task, {name: value for name, value in flags.items() if name != "quiet"})
    data = RunData(task.preflight(settings.args))
    run = RunJob(task, settings, data, Screen(is_quiet=True), RunFolder(folder))
    run.build(Origin(None))
    run.measure()
    return run


@pytest.fixture
def run(reviews, tmp_path):
    return ready_run(tmp_path, {**FLAGS, "data": reviews})


@pytest.fixture
def job(run):
    return run.job


def test_weights_generators_and_modes_are_put_back_bit_by_bit(run, job, tmp_path):
    before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    torch.rand(3)
    generator = torch.get_rng_state()
    job.model.eval()
    found = trial.rehearse(run)
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(module.training for module in job.model.modules())
    assert all(parameter.grad is None for parameter in job.model.parameters())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reviews.csv"]
    assert found.checkpoint_bytes > 4 * 3 * sum(parameter.numel() for parameter in job.model.parameters())
    assert found.loss > 0 and found.memory > 0 and found.free_bytes > 0
    assert found.update_seconds > 0 and found.evaluation_seconds > 0


@pytest.mark.parametrize("is_check", [False, True])
def test_a_large_model_is_rehearsed_with_few_rows_on_the_cpu_and_with_all_by_check(run, job, is_check):
    rows: list[int] = []
    collate = job.collate_fn
    job.model.spare = torch.nn.Parameter(torch.zeros(1_000_001), requires_grad=False)
    job.collate_fn = lambda samples: [rows.append(len(samples)), collate(samples)][1]
    found = trial.rehearse(run, is_check=is_check)
    assert rows[:3] == ([16, 16, len(job.eval_dataset)] if is_check else [2, 2, 4])
    assert found.update_seconds > 0


def test_the_way_workers_are_started_does_not_matter_to_a_rehearsal_without_any(run, job):
    job.training.dataloader_num_workers, job.training.dataloader_multiprocessing_context = 1, "spawn"
    assert trial.rehearse(run).loss > 0


@pytest.mark.parametrize("given", [None, True, False])
def test_workers_of_the_training_data_live_on_unless_that_is_switched_off(reviews, tmp_path, given):
    name = "dataloader_persistent_workers"
    flags = {**FLAGS, "data": reviews, "dataloader_num_workers": 2, **({} if given is None else {name: given})}
    run = ready_run(tmp_path, flags)
    run.settings.write(run.folder)
    resumed = settle(run.task, config=run.folder.config)
    for settings in (run.settings, resumed):
        run.settings = settings
        arguments = run.loop_arguments()
        assert arguments["train_dataloader_kwargs"]["persistent_workers"] is (given is not False)
        assert arguments["eval_dataloader_kwargs"]["persistent_workers"] is bool(given)


def test_a_checkpoint_that_reads_back_differently_is_found(run, monkeypatch):
    genuine = trial.read

    def damaged(path):
        checkpoint = genuine(path)
        next(iter(checkpoint.model.values())).add_(1)
        return checkpoint

    monkeypatch.setattr(trial, "read", damaged)
    with pytest.raises(CheckpointError, match="loaded something else"):
        trial.rehearse(run)


def test_the_longest_rows_are_rehearsed(job):
    chosen = trial.longest_rows(job.train_dataset, 4)
    lengths = [len(job.train_dataset[index]["input_ids"]) for index in range(len(job.train_dataset))]
    assert sorted((lengths[index] for index in chosen), reverse=True) == sorted(lengths, reverse=True)[:4]


def test_as_many_rows_are_rehearsed_as_are_asked_for_and_no_image_is_decoded_to_choose():
    dataset = [{"input_ids": [1] * (index % 7 + 1)} for index in range(700)]
    assert len(set(trial.longest_rows(dataset, 600))) == 600
    assert len(trial.longest_rows(dataset, 701)) == 700
    assert trial.longest_rows(dataset, 2) == [6, 13]

    def refuse(row):
        raise AssertionError(f"{row} was decoded")

    images = ImageDataset(range(1000), refuse, None, lambda scene, row: {})
    assert trial.longest_rows(images, 3) == [0, 1, 2]
    assert trial.longest_rows(images, 1001) == list(range(1000))


@pytest.mark.parametrize("is_broken", [False, True], ids=["whole", "broken off"])
def test_there_is_one_way_to_put_a_job_back_and_it_puts_back_everything(job, is_broken):
    job.model.register_buffer("steps", torch.zeros(2), persistent=False)
    job.model.count, kind = 3, job.model.config.problem_type
    before = {name: tensor.clone() for name, tensor in whole_state(job.model).items()}
    frozen = next(iter(job.model.children())).eval()
    modes = [module.training for module in job.model.modules()]
    generator = torch.get_rng_state()
    with pytest.raises(KeyError) if is_broken else nullcontext(), trial.put_back(job, torch.device("cpu")):
        torch.rand(3)
        job.model.train()
        job.model.steps, job.model.count, job.model.config.problem_type = torch.ones(3), 4, "regression"
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.add_(1)
                parameter.grad = torch.ones_like(parameter)
        if is_broken:
            raise KeyError("broken off")
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole_state(job.model).items())
    assert job.model.count == 3 and job.model.config.problem_type == kind
    assert [module.training for module in job.model.modules()] == modes and not frozen.training
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in job.model.parameters())


def test_finding_a_learning_rate_does_not_evaluate_the_training_data(run, job, monkeypatch):
    kind, seen = type(job.task), []
    whole = kind.compute_loss

    def compute_loss(self, job, model, batch):
        seen.append(torch.is_grad_enabled())
        return whole(self, job, model, batch)

    monkeypatch.setattr(kind, "compute_loss", compute_loss)
    job.args.eval_on_train = True
    num_updates = 2 * len(job.train_dataset) // job.training.train_batch_size
    search = Search(start=1e-6, end=1e-5, num_updates=num_updates)
    curve = find_rate(run, search)
    assert len(curve.rates) == num_updates
    assert seen == [True] * num_updates


class Stateful(torch.nn.Linear):
    def forward(self, x):
        self.seen.append(1)
        self.shift, self.new = x.mean(0), 3
        return super().forward(x - self.shift)

    def get_extra_state(self):
        return {"seen": 1}

    def set_extra_state(self, state):
        assert state == {"seen": 1}


def test_a_trial_puts_back_every_kind_of_state():
    model = Stateful(2, 1)
    model.seen = []
    model.register_buffer("shift", None, persistent=False)
    with trial.put_back(SimpleNamespace(model=model), torch.device("cpu")):
        model(torch.ones(3, 2))
        model.weight.requires_grad_(False)
    assert model.seen == [] and model.shift is None and not hasattr(model, "new") and model.weight.requires_grad
