"""Workers that live on read the first batches of the next epoch before this one is over; nobody can tell by them."""

import dataclasses
import itertools
import multiprocessing
import os
import signal
import time

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset

import toys
from data.loaders import LazySampler, Noisy, adopted, seen
from hf import tiny
from loopwright.data import buckets, workers
from loopwright.errors import DataError
from loopwright.training.run import run_of

SIZE, BATCH = 26, 4  # the last batch of an epoch is short


class Noted(Noisy):
    """Counts its reads, over all processes; every epoch reads every sample once."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self.counter = multiprocessing.Value("i", 0)

    def __getitem__(self, index):
        with self.counter:
            self.counter.value += 1
        return super().__getitem__(index)

    def reads(self, at_least: int = 0) -> int:
        """The reads so far, after waiting for as many as are expected, and a moment for more."""
        deadline = time.monotonic() + 10
        while self.counter.value < at_least and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        return self.counter.value


class LearnsEpoch(Noted):
    def set_epoch(self, epoch: int) -> None: ...


def create(dataset=None, num_workers=2, num_epochs=3, accumulation=2, rank=0, processes=1, seed=7, **kwargs):
    kwargs = {"batch_size": BATCH, "shuffle": True, **kwargs}
    adoption = {"bad_samples": kwargs.pop("bad_samples", "raise"), "limit": kwargs.pop("limit", None)}
    if num_workers:
        kwargs = {"persistent_workers": True, **kwargs}
    source = DataLoader(Noisy(SIZE) if dataset is None else dataset, num_workers=num_workers, **kwargs)
    loader = adopted(source, seed, rank, processes, accumulation, **adoption)
    loader.num_epochs = num_epochs
    return loader


def expected(*places, **kwargs) -> list:
    """The windows from these (epoch, position), of a loader without workers."""
    return [seen(create(num_workers=0, **kwargs).windows(*place)) for place in places]


def pids() -> list[int]:
    return sorted(process.pid for process in multiprocessing.active_children())


@pytest.fixture(autouse=True)
def polled_often(monkeypatch, no_worker_is_left_behind):
    monkeypatch.setattr(workers, "_POLL_SECONDS", 0.1)


# What is read, and when


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"accumulation": 3, "rank": 1, "processes": 2},
        {"limit": 3, "prefetch_factor": 1},
        {"shuffle": False, "prefetch_factor": 20},  # several epochs at once
        {"shuffle": None, "sampler": buckets.LengthGroupedSampler(range(SIZE), BATCH)},
    ],
)
def test_the_batches_of_three_epochs_are_those_of_a_loader_that_reads_none_ahead(kwargs, drop_last):
    plain = {name: value for name, value in kwargs.items() if name != "prefetch_factor"}
    loader = create(drop_last=drop_last, **kwargs)
    found = []
    for epoch in range(3):
        found.append(seen(loader.windows(epoch)))
        assert (loader._ahead is not None) is (epoch < 2)
    loader.close()
    assert found == expected((0,), (1,), (2,), drop_last=drop_last, **plain)


def test_the_next_epoch_is_begun_before_it_is_asked_for_and_nothing_is_read_after_the_last_one():
    dataset = Noted()
    loader = create(dataset, num_epochs=2)
    seen(loader.windows(0))
    assert dataset.reads(SIZE + 4 * BATCH) == SIZE + 4 * BATCH  # two workers, two batches each
    started = pids()
    seen(loader.windows(1))
    assert dataset.reads() == 2 * SIZE and pids() == started
    loader.close()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"persistent_workers": False},
        {"bad_samples": "skip"},
        {"dataset": LearnsEpoch()},
        {"dataset": Subset(Subset(LearnsEpoch(), range(SIZE)), range(SIZE))},
        {"shuffle": None, "sampler": LazySampler(SIZE, SIZE)},
        {"shuffle": False, "batch_size": 1, "batch_sampler": BatchSampler(RandomSampler(range(SIZE)), BATCH, False)},
        {"num_epochs": 0},
        {"num_epochs": 1},
    ],
)
def test_nothing_is_read_ahead_where_it_could_change_a_batch_or_is_not_asked_for(kwargs):
    loader = create(**kwargs)
    for epoch in range(2):
        seen(loader.windows(epoch))
        assert loader._ahead is None and not loader._newest.feed.undelivered
    loader.close()


# From where


def test_what_was_read_ahead_is_dropped_where_the_next_windows_are_other_ones():
    loader = create()
    places = [(0,), (2,), (0,), (1, 2 * BATCH), (1,), (1,), (0, 6 * BATCH), (1,), (2,)]
    found = [seen(loader.windows(*place)) for place in places]
    loader.close()
    assert found == expected(*places)


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_that_is_broken_off_is_begun_again(epoch):
    loader = create()
    for before in range(epoch):
        seen(loader.windows(before))
    windows = loader.windows(epoch)
    next(windows)
    windows.close()
    assert [seen(loader.windows(each)) for each in range(3)] == expected((0,), (1,), (2,))
    loader.close()


def test_an_epoch_with_nothing_left_yields_nothing_of_the_next_one():
    loader = create()
    assert seen(loader.windows(0, SIZE)) == []
    assert seen(loader.windows(1)) == expected((1,))[0]
    loader.close()


@pytest.mark.parametrize(("name", "value"), [("seed", 8), ("limit", 4), ("drop_last", True)])
def test_what_was_read_ahead_is_dropped_once_the_loader_is_changed(name, value):
    loader = create()
    seen(loader.windows(0))
    setattr(loader, name, value)
    found = seen(loader.windows(1))
    loader.close()
    assert [found] == expected((1,), **{name: value})


def test_a_seed_that_is_changed_in_the_middle_of_an_epoch_holds_from_the_next_one_on():
    loader = create(prefetch_factor=1)

    def reseed() -> None:
        loader.seed = 8

    assert seen(loader.windows(0), reseed)[:2] == expected((0,))[0][:2]
    assert loader._ahead is None
    assert [seen(loader.windows(1))] == expected((1,), seed=8)
    loader.close()


def test_a_loader_that_is_closed_leaves_no_worker_and_begins_anew():
    loader = create()
    seen(loader.windows(0))
    loader.close()
    assert pids() == []
    assert seen(loader.windows(1)) == expected((1,))[0]
    loader.close()


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("place", [(0, 1), (0, 3), (0, 4), (1, 1), (2, 4)])  # an epoch has four windows
def test_a_look_at_the_loader_in_an_epoch_changes_no_batch(place, persistent, is_whole):
    def looking(epoch, windows):
        for number in range(5):
            if (epoch, number) == place:
                looked.extend(itertools.islice(loader, None if is_whole else 1))
            yield from itertools.islice(windows, 1)

    loader, looked = create(persistent_workers=persistent), []
    assert [seen(looking(epoch, loader.windows(epoch))) for epoch in range(3)] == expected((0,), (1,), (2,))
    assert len(looked) == (7 if is_whole else 1)
    loader.close()


# Workers that die


@pytest.mark.parametrize("is_first_only", [True, False])
@pytest.mark.parametrize("place", [(0, 1), (0, 3), (0, 4), (1, 0), (1, 1)])  # an epoch has four windows
def test_workers_that_are_killed_around_the_end_of_an_epoch_lose_nothing(caplog, place, is_first_only):
    def killing(epoch, windows):
        for number in range(5):
            if (epoch, number) == place:
                for pid in pids()[: 1 if is_first_only else None]:
                    os.kill(pid, signal.SIGKILL)
            yield from itertools.islice(windows, 1)

    loader = create(prefetch_factor=3)
    found = [seen(killing(epoch, loader.windows(epoch))) for epoch in range(3)]
    loader.close()
    assert found == expected((0,), (1,), (2,))
    assert caplog.text.count("are replaced") == 1


class EndsItsWorker(Noisy):
    """Ends the worker that reads a sample with this noise, which it has in one epoch alone."""

    def __init__(self, fatal: torch.Tensor) -> None:
        super().__init__(SIZE)
        self.fatal = fatal

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return os._exit(3) if torch.equal(sample, self.fatal) else sample


@pytest.mark.parametrize("batch", [0, 1])
def test_a_batch_that_ends_its_worker_whenever_it_is_read_ends_no_epoch_before_its_own(batch):
    first = next(create(num_workers=0).windows(1))
    loader = create(EndsItsWorker(first.pieces[batch].batch[1]))
    assert [seen(loader.windows(0))] == expected((0,))
    with pytest.raises(DataError, match="were lost 4 times"):
        seen(loader.windows(1))
    loader.close()


# In a run: 26 samples are 7 micro-batches, or 4 updates


class Samples(Noted):
    def __getitem__(self, index):
        noise = super().__getitem__(index)[1:].float()
        return torch.cat([noise, noise[:1]]), noise.sum().view(1), index


def trained(dataset, num_epochs=3, callbacks=(), num_workers=2, persistent=True, **kwargs):
    workers_of = {"num_workers": num_workers, "persistent_workers": persistent} if num_workers else {"num_workers": 0}
    options = {"train_dataloader_kwargs": workers_of, "gradient_accumulation_steps": 2, "per_device_batch_size": BATCH}
    return toys.trained(callbacks, dataset, num_epochs, **{**options, **kwargs})


def noting_reads(dataset, at_least):
    """Keeps the number of reads after the last update of every epoch, once there are as many as expected."""

    def look(trainer, **kwargs):
        if trainer.progress.update % 4 == 0:
            notes.seen.append(dataset.reads(at_least.pop(0)))

    notes = toys.callback(on_update_end=look)
    notes.seen = []
    return notes


def test_a_run_reads_ahead_into_every_epoch_but_the_one_after_the_last():
    dataset, ahead = Samples(), 4 * BATCH
    counts = [SIZE + ahead, 2 * SIZE + ahead, 3 * SIZE]
    notes = noting_reads(dataset, list(counts))
    trainer = trained(dataset, callbacks=[notes])
    assert notes.seen == counts
    toys.assert_same_weights(trainer, trained(Samples(), num_workers=0))


def nothing(trainer, **kwargs): ...


def given_to_one(event):
    callback = toys.callback()
    setattr(callback, event, nothing)
    return callback


@pytest.mark.parametrize("made", [lambda event: toys.callback(**{event: nothing}), given_to_one])
@pytest.mark.parametrize(
    "event", ["on_training_run_epoch_end", "on_train_epoch_start", "on_eval_epoch_start", "on_eval_step_end"]
)
def test_nothing_is_read_ahead_of_code_that_runs_between_epochs(event, made):
    dataset = Samples()
    notes = noting_reads(dataset, [SIZE, 2 * SIZE, 3 * SIZE])
    trained(dataset, callbacks=[notes, made(event)])
    assert notes.seen == [SIZE, 2 * SIZE, 3 * SIZE]


@pytest.mark.parametrize("name", ["_run_train_epoch", "_run_eval_epoch"])
def test_nothing_is_read_ahead_of_a_trainer_that_runs_its_own_code_around_an_epoch(name):
    def around(self, *args, **kwargs):
        return getattr(super(kind, self), name)(*args, **kwargs)

    kind = type("Own", (toys.Trainer,), {name: around})
    assert num_epochs_of(kind) == 0 and num_epochs_of(toys.Trainer) == 3


def num_epochs_of(kind) -> int:
    trainer = toys.seeded(kind, toys.network(), toys.nn.MSELoss(), None)
    run = run_of(trainer)
    run.settings = dataclasses.replace(run.settings, num_epochs=3)
    return run.boundary.num_epochs(4)


@pytest.mark.parametrize("event", [None, "step_end", "epoch_begin", "epoch_end", "evaluate"])
def test_nothing_is_read_ahead_of_a_callback_of_transformers_that_is_called_between_epochs(tmp_path, event):
    workers_of = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    callbacks = [] if event is None else [tiny.on(**{event: lambda args, state, control, **kwargs: None})]
    trainer = tiny.fit(tmp_path, *callbacks, num_train_epochs=2, **workers_of)
    assert trainer.core.train_loader.num_epochs == (2 if event in (None, "step_end") else 0)


@pytest.mark.parametrize(("limit", "num_epochs", "at_end"), [(4, 3, SIZE), (8, 9, 2 * SIZE), (7, 2, 2 * SIZE)])
def test_a_run_with_a_limit_does_not_read_beyond_the_epoch_that_reaches_it(limit, num_epochs, at_end):
    dataset = Samples()
    trainer = trained(dataset, num_epochs, max_num_train_steps=limit)
    assert trainer.progress.update == limit and dataset.reads() <= at_end
    toys.assert_same_weights(trainer, trained(Samples(), num_epochs, num_workers=0, max_num_train_steps=limit))


@pytest.mark.parametrize("update", [3, 4, 5, 8])
def test_a_run_that_is_stopped_and_resumed_around_the_end_of_an_epoch_ends_like_a_whole_one(tmp_path, update):
    trained(Samples(), callbacks=[toys.stop_at(update)], checkpoints=toys.saving(tmp_path))
    assert pids() == []
    resumed = trained(Samples(), resume_from=toys.step(tmp_path, update), checkpoints=toys.saving(tmp_path))
    toys.assert_same_weights(resumed, trained(Samples(), num_workers=0))


def test_an_evaluation_and_a_look_at_the_loader_between_two_epochs_change_nothing():
    def look(trainer, **kwargs):
        next(iter(run_of(trainer).train_loader))

    options = {"eval_dataset": Samples(8), "callbacks": [toys.callback(on_training_run_epoch_end=look)]}
    trainer = trained(Samples(), **options)
    toys.assert_same_weights(trainer, trained(Samples(), num_workers=0))
    assert pids() == []
