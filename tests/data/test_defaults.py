"""Loader defaults: how many workers, which arguments go together, and the tools that cut an epoch short."""

import os
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

import toys
from data.loaders import Indices
from loopwright.callbacks import LimitBatchesCallback
from loopwright.data import defaults
from loopwright.errors import ConfigError

TENSORS = TensorDataset(torch.arange(20.0))


class Read(Indices):
    def __init__(self):
        super().__init__(20)


STREAM = toys.Stream(range(20))


def use_cpus(monkeypatch, cpus: int, processes: int | None = None) -> None:
    """Pretend that the process may use so many CPUs, beside so many processes on this machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if processes is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))


# Workers


@pytest.mark.parametrize(
    ("cpus", "processes", "workers"),
    [(1, None, 1), (2, None, 2), (6, None, 6), (64, None, 8), (16, 4, 4), (6, 4, 1), (2, 8, 1), (64, 2, 8)],
)
def test_workers_are_the_cpus_of_this_process_shared_among_the_processes_of_the_node(
    monkeypatch, cpus, processes, workers
):
    use_cpus(monkeypatch, cpus, processes)
    assert defaults.default_num_workers(Read()) == workers


def test_all_cpus_count_where_there_is_no_affinity(monkeypatch):
    use_cpus(monkeypatch, 2)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert defaults.default_num_workers(Read()) == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert defaults.default_num_workers(Read()) == 1


@pytest.mark.parametrize(
    ("dataset", "workers"),
    [
        *[
            (each, 0)
            for each in (TENSORS, Subset(TENSORS, [1]), Subset(Subset(TENSORS, [1]), [0]), [1], (1, 2), STREAM)
        ],
        *[(each, 4) for each in (Read(), Subset(Read(), [1]), ConcatDataset([Read(), Read()]))],
    ],
)
def test_data_that_has_to_be_read_gets_workers_and_data_in_memory_and_streams_none(monkeypatch, dataset, workers):
    use_cpus(monkeypatch, 4)
    assert defaults.default_num_workers(dataset) == workers


def test_the_default_arguments_are_the_documented_ones(monkeypatch):
    use_cpus(monkeypatch, 4)
    assert defaults.default_loader_kwargs(Read(), 16, shuffle=True) == {
        "shuffle": True,
        "pin_memory": torch.cuda.is_available(),
        "batch_size": 16,
        "num_workers": 4,
        "worker_init_fn": defaults.worker_init_fn,
        "persistent_workers": True,
    }
    in_memory = defaults.default_loader_kwargs(TENSORS, 16, shuffle=False)
    assert (in_memory["num_workers"], in_memory["persistent_workers"], in_memory["shuffle"]) == (0, False, False)


def test_a_worker_seeds_python_and_numpy_from_its_torch_seed():
    drawn = []
    for seed in (2**40 + 1, 2**40 + 1, 2**40 + 2):
        torch.manual_seed(seed)
        defaults.worker_init_fn(0)
        drawn.append((random.random(), np.random.rand()))
    assert drawn[0] == drawn[1] != drawn[2]


# Arguments that go together


@pytest.fixture
def train_defaults(monkeypatch):
    """What a trainer passes as defaults for a dataset that gets 2 workers."""
    use_cpus(monkeypatch, 2)
    return defaults.default_loader_kwargs(Read(), 8, shuffle=True)


@pytest.mark.parametrize("given", [None, {"sampler": None}, {"batch_sampler": None}])
def test_a_dataset_alone_or_with_a_sampler_of_none_gets_the_defaults(train_defaults, given):
    loader = defaults.create_loader(Read(), train_defaults, given, None)
    assert type(loader) is DataLoader
    assert isinstance(loader.sampler, RandomSampler)
    assert (loader.batch_size, loader.num_workers, loader.persistent_workers) == (8, 2, True)
    assert loader.worker_init_fn is defaults.worker_init_fn


def test_given_arguments_win_over_the_defaults_and_over_the_collate_function_of_the_trainer(train_defaults):
    given = {"shuffle": False, "batch_size": 3, "num_workers": 0, "drop_last": True, "collate_fn": list}
    before = dict(given)
    loader = defaults.create_loader(Read(), train_defaults, given, tuple)
    assert isinstance(loader.sampler, SequentialSampler)
    assert (loader.batch_size, loader.num_workers, loader.drop_last, loader.collate_fn) == (3, 0, True, list)
    assert given == before
    assert defaults.create_loader(Read(), train_defaults, {}, tuple).collate_fn is tuple
    ready = DataLoader(Read(), batch_size=2)
    assert defaults.create_loader(ready, train_defaults, {"batch_size": 5}, tuple) is ready


def test_without_workers_what_torch_refuses_beside_them_is_left_out(train_defaults):
    loader = defaults.create_loader(Read(), {**train_defaults, "prefetch_factor": 4}, {"num_workers": 0}, None)
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (0, False, None)


@pytest.mark.parametrize(
    ("name", "sampler", "batch_size"),
    [
        ("sampler", SequentialSampler(Read()), 8),
        ("batch_sampler", BatchSampler(SequentialSampler(Read()), 5, drop_last=False), None),
    ],
)
def test_a_sampler_takes_the_place_of_shuffling_and_that_of_batches_of_the_batch_size(
    train_defaults, name, sampler, batch_size
):
    loader = defaults.create_loader(Read(), train_defaults, {name: sampler}, None)
    assert getattr(loader, name) is sampler
    assert loader.batch_size == batch_size


@pytest.mark.parametrize(
    "given",
    [
        {"sampler": SequentialSampler(Read()), "shuffle": True},
        {"batch_sampler": BatchSampler(SequentialSampler(Read()), 5, False), "batch_size": 4},
    ],
)
def test_what_the_caller_himself_gives_together_is_left_for_torch_to_refuse(train_defaults, given):
    with pytest.raises(ValueError, match="mutually exclusive"):
        defaults.create_loader(Read(), train_defaults, given, None)


def test_a_stream_is_not_shuffled_and_its_workers_do_not_live_on(train_defaults):
    loader = defaults.create_loader(STREAM, train_defaults, None, None)
    assert (loader.batch_size, loader.num_workers, loader.persistent_workers) == (8, 2, False)
    assert defaults.create_loader(STREAM, train_defaults, {"persistent_workers": True}, None).persistent_workers


# Cutting an epoch short


def test_a_slice_is_the_beginning_of_a_loader_and_reads_no_further():
    read = []

    def batches():
        for index in range(10):
            read.append(index)
            yield index

    assert list(defaults.DataLoaderSlice(batches(), 3)) == [0, 1, 2]
    assert read == [0, 1, 2]
    assert list(defaults.DataLoaderSlice([1, 2], 3)) == [1, 2]
    assert list(defaults.DataLoaderSlice([1, 2], 0)) == []


def test_the_length_of_a_slice_is_what_iterating_it_gives():
    for size in (0, 2, 3, 5):
        part = defaults.DataLoaderSlice(list(range(size)), 3)
        assert len(part) == len(list(part))
    for unknown in (iter([]), DataLoader(STREAM, batch_size=2)):
        assert len(defaults.DataLoaderSlice(unknown, 3)) == 3, "the most it can be"


def test_a_slice_can_be_read_again_and_has_the_attributes_of_its_loader():
    part = defaults.DataLoaderSlice(DataLoader(Read(), batch_size=2), 2)
    assert [batch.tolist() for batch in part] == [batch.tolist() for batch in part] == [[0, 1], [2, 3]]
    assert (part.batch_size, part.slice_size, type(part.dataset)) == (2, 2, Read)
    with pytest.raises(AttributeError):
        _ = part.no_such_name


trainer = toys.trainer_of


def limit_of(trainer):
    return trainer.callback_handler.batch_limit(trainer, training=True)


def test_trainers_made_inside_the_block_are_limited_for_their_life_and_no_others(monkeypatch):
    monkeypatch.delenv(defaults.LIMIT_BATCHES_ENV_VAR, raising=False)
    with pytest.raises(KeyError), defaults.LimitBatches(3) as block:
        inside = trainer()
        assert block.num_batches == 3
        raise KeyError
    assert limit_of(inside) == 3
    assert isinstance(inside.callback_handler.callbacks[0], LimitBatchesCallback)
    assert limit_of(trainer()) is None
    assert defaults.LIMIT_BATCHES_ENV_VAR not in os.environ


@pytest.mark.parametrize("value", ["", " ", "none", "None"])
def test_an_environment_without_a_number_limits_nothing(monkeypatch, value):
    monkeypatch.setenv(defaults.LIMIT_BATCHES_ENV_VAR, value)
    assert limit_of(trainer()) is None


@pytest.mark.parametrize("value", ["two", "1.5", "0", "-1"])
def test_an_environment_that_cannot_be_is_refused_with_what_it_holds(monkeypatch, value):
    monkeypatch.setenv(defaults.LIMIT_BATCHES_ENV_VAR, value)
    with pytest.raises(ConfigError, match=rf"must be a whole number of .*got '?{value}"):
        trainer()


def test_blocks_nest_and_the_innermost_counts(monkeypatch):
    monkeypatch.setenv(defaults.LIMIT_BATCHES_ENV_VAR, "9")
    with defaults.LimitBatches(3) as outer:
        with defaults.LimitBatches(2):
            assert limit_of(trainer()) == 2
            with outer:
                assert limit_of(trainer()) == 3
            assert limit_of(trainer()) == 2
        assert limit_of(trainer()) == 3
    assert os.environ[defaults.LIMIT_BATCHES_ENV_VAR] == "9"
