"""Samples that cannot be read: an error that names them, or a run that goes on without them and says so."""

import logging
import os
import random
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import toys
from data import loaders
from data.loaders import Noisy, seen
from distributed.launcher import Results, run
from loopwright import Trainer
from loopwright.errors import CheckpointError, ConfigError, DataError, StopTrainingError
from loopwright.training.run import run_of

SEED = 7


class Unreliable(Noisy):
    """Samples with an augmentation; some raise, after they have drawn from the generators."""

    def __init__(self, size, bad=(), transient=()):
        super().__init__(size)
        self.bad = set(bad)
        self.transient = set(transient)  # raise only the first time that they are read
        self.tried = []

    def __getitem__(self, index):
        index = int(index)
        self.tried.append(index)
        sample = super().__getitem__(index)
        if index in self.bad or index in self.transient:
            self.transient.discard(index)
            raise ValueError(f"no picture in {index}")
        return sample


class Given(Noisy):
    def __init__(self, size, make):
        super().__init__(size)
        self.make = make

    def __getitem__(self, index):
        return self.make(index)


class ManyAtOnce(Unreliable):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


LOADER_NAMES = ("rank", "processes", "accumulation", "evaluation")


def adopted(dataset, batch_size=4, bad_samples="skip", **kwargs):
    share = {name: kwargs.pop(name) for name in LOADER_NAMES if name in kwargs}
    return loaders.adopted(DataLoader(dataset, batch_size, **kwargs), seed=SEED, bad_samples=bad_samples, **share)


def ids_of(window) -> list[list[int]]:
    return [piece.batch[: piece.rows, 0].long().tolist() for piece in window.pieces]


@pytest.fixture(autouse=True)
def warnings_of_loopwright(caplog):
    caplog.set_level(logging.WARNING, logger="loopwright")
    return caplog


# An error that names the sample


@pytest.mark.parametrize("kind", [Unreliable, ManyAtOnce])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_raises_is_named_with_its_position(num_workers, kind):
    source = adopted(kind(20, bad=(17,)), bad_samples="raise", shuffle=True, num_workers=num_workers)
    position = [index for _, ids in map(lambda w: source.samples_of(2, w)[0], range(5)) for index in ids].index(17)
    expected = rf"sample 17 \(position {position} of epoch 2\) could not be read: ValueError: no picture in 17\. Repair"
    with pytest.raises(DataError, match=expected) as raised:
        list(source.windows(2))
    assert str(raised.value).startswith("sample 17") and "Traceback" not in str(raised.value)
    assert type(raised.value.__cause__) is (DataError if num_workers else ValueError)


def test_the_culprit_among_many_is_looked_for_under_the_same_seeds():
    class Unlucky(Unreliable):
        def __getitems__(self, indices):
            for index in indices:
                self.tried.append(index)
                if random.random() > 0.9:
                    raise ValueError(f"unlucky {index}")
            return indices

    dataset = Unlucky(60)
    with pytest.raises(DataError, match="could not be read: ValueError: unlucky") as raised:
        list(adopted(dataset, batch_size=60, bad_samples="raise").windows())
    first_time = dataset.tried[: len(dataset.tried) // 2]
    assert dataset.tried == first_time * 2
    assert str(raised.value).startswith(f"sample {first_time[-1]} (position {first_time[-1]} of epoch 0)")


def test_samples_that_raise_only_together_are_named_together():
    class NotTogether(Unreliable):
        def __getitems__(self, indices):
            if len(indices) > 1:
                raise ValueError("too many")
            return indices

    expected = (
        r"the samples 0, 1, 2, 3 \(from position 0 of epoch 0\) could be read one by one, but not together: Value"
    )
    with pytest.raises(DataError, match=expected):
        list(adopted(NotTogether(8), bad_samples="raise").windows())


@pytest.mark.parametrize("bad_samples", ["raise", "skip"])
@pytest.mark.parametrize("error", [CheckpointError("mine"), StopTrainingError("enough")], ids=["ours", "a stop"])
def test_errors_that_speak_for_themselves_pass_unchanged(bad_samples, error):
    def fail(given):
        raise error

    for dataset, kwargs in [(Given(4, fail), {}), (Unreliable(4), {"collate_fn": fail})]:
        with pytest.raises(type(error)) as raised:
            list(adopted(dataset, bad_samples=bad_samples, **kwargs).windows())
        assert raised.value is error


@pytest.mark.parametrize("bad_samples", ["raise", "skip"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_do_not_form_a_batch_are_named(num_workers, bad_samples):
    expected = (
        r"the samples 4, 5, 6, 7 \(from position 4 of epoch 0\) could not be collated: RuntimeError: (?s:.)*collate_fn"
    )
    ragged = Given(12, lambda index: torch.zeros(index // 5 + 1))
    with pytest.raises(DataError, match=expected):
        list(adopted(ragged, num_workers=num_workers, bad_samples=bad_samples).windows())


def test_of_a_large_batch_only_the_first_ids_are_named():
    def fail(samples):
        raise TypeError("no")

    with pytest.raises(DataError, match=r"the samples 0, 1, .*, 18, 19, ... \(64 in all\) \(from position 0"):
        list(adopted(Unreliable(64), batch_size=64, bad_samples="raise", collate_fn=fail).windows())


def stream():
    yield from range(10)
    raise ValueError("the file ends here")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_of_a_stream_the_batch_is_named(num_workers):
    loader = adopted(toys.Stream(stream()), bad_samples="raise", num_workers=num_workers)
    with pytest.raises(DataError, match=r"batch 2 of epoch 1 could not be read: ValueError: (?s:.)*the file ends here"):
        list(loader.windows(1))


def test_samples_of_a_stream_cannot_be_skipped_and_other_words_are_refused():
    with pytest.raises(ConfigError, match="bad_samples='skip' needs the id of every sample"):
        adopted(toys.Stream([]))
    with pytest.raises(ConfigError, match="bad_samples must be 'raise' or 'skip', got 'ignore'"):
        adopted(Unreliable(4), bad_samples="ignore")


# A run that goes on without them


@pytest.mark.parametrize("kind", [Unreliable, ManyAtOnce])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_samples_are_left_out_and_the_rest_counts_what_is_there(num_workers, kind, caplog):
    loader = adopted(kind(16, bad=(1, 2, 9)), accumulation=2, num_workers=num_workers)
    windows = list(loader.windows())
    assert [ids_of(window) for window in windows] == [[[0, 3], [4, 5, 6, 7]], [[8, 10, 11], [12, 13, 14, 15]]]
    assert [[piece.rows for piece in window.pieces] for window in windows] == [[2, 4], [3, 4]]
    assert [(window.samples, window.is_counted) for window in windows] == [(8, True), (8, True)]
    assert loader.skipped == {index: (0, f"ValueError: no picture in {index}") for index in (1, 2, 9)}
    assert [record.getMessage() for record in caplog.records] == [
        f"sample {index} could not be read in epoch 0 and is skipped: ValueError: no picture in {index}"
        for index in (1, 2, 9)
    ]


def test_without_bad_samples_the_batches_are_the_same_and_are_not_counted_unless_asked():
    skipping, raising = (adopted(Unreliable(16), shuffle=True, bad_samples=each) for each in ("skip", "raise"))
    assert seen(skipping.windows()) == seen(raising.windows())
    assert not any(window.is_counted for window in raising.windows())
    assert skipping.skipped == {}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_micro_batch_without_a_readable_sample_becomes_a_pad(num_workers):
    loader = adopted(Unreliable(12, bad=(4, 5, 6, 7, 8)), num_workers=num_workers)
    first, second, third = loader.windows()
    (pad,) = second.pieces
    assert (pad.rows, pad.batch[:, 0].tolist(), second.samples) == (0, [9], 4)
    assert ids_of(third) == [[9, 10, 11]]
    assert sorted(loader.skipped) == [4, 5, 6, 7, 8]
    *_, last = adopted(Unreliable(8, bad=(4, 5, 6, 7, 0)), num_workers=num_workers).windows()
    assert last.pieces[0].batch[:, 0].tolist() == [1], "what stands in is looked for from the beginning again"


def test_it_is_an_error_if_nothing_stands_in():
    dataset = Unreliable(100, bad=tuple(range(4, 18)))
    with pytest.raises(DataError, match="none of the samples 4, 5, 6, 7 .* nor any of the 10 that follow.*picture in"):
        list(adopted(dataset).windows())
    assert dataset.tried[-10:] == list(range(8, 18))
    by_name = DataLoader({"a": 1}, sampler=["b"], batch_size=1)
    with pytest.raises(DataError, match="none of the samples b .*: its ids are not integers"):
        list(loaders.adopted(by_name, seed=SEED, bad_samples="skip").windows())


def test_bad_samples_of_an_evaluation_are_left_out_on_any_number_of_processes():
    counted = []
    for processes in (1, 3):
        parts = [
            adopted(Unreliable(17, bad=(3, 16)), evaluation=True, rank=rank, processes=processes)
            for rank in range(processes)
        ]
        windows = zip(*(loader.windows() for loader in parts), strict=True)
        counted.append([index for each in windows for window in each for ids in ids_of(window) for index in ids])
        assert {index for loader in parts for index in loader.skipped} == {3, 16}
    assert counted == [[index for index in range(17) if index not in (3, 16)]] * 2


def test_memory_that_has_run_out_is_not_blamed_on_the_sample():
    with pytest.raises(MemoryError):
        list(adopted(Given(4, Mock(side_effect=MemoryError))).windows())


# What is tried again


def test_a_sample_that_was_skipped_in_an_earlier_epoch_is_not_tried_again(caplog):
    dataset = Unreliable(16, bad=(5,), transient=(9,))
    loader = adopted(dataset, shuffle=True)
    first = [ids_of(window)[0] for window in loader.windows(0)]
    assert sorted(index for ids in first for index in ids) == [index for index in range(16) if index not in (5, 9)]
    for epoch in (1, 2):
        dataset.tried.clear()
        list(loader.windows(epoch))
        assert sorted(dataset.tried) == [index for index in range(16) if index not in (5, 9)]
    assert {index: epoch for index, (epoch, _) in loader.skipped.items()} == {5: 0, 9: 0}
    assert len(caplog.records) == 2


def test_one_that_was_skipped_in_this_epoch_is_tried_again_if_it_comes_again():
    dataset = Unreliable(16, bad=(5,), transient=(9,))
    loader = adopted(dataset, batch_size=2, sampler=torch.tensor([5, 9, 9, 5, 1, 2]))
    assert [ids_of(window)[0] for window in loader.windows(0)] == [[], [9], [1, 2]]
    dataset.tried.clear()
    assert [ids_of(window)[0] for window in loader.windows(1)] == [[], [], [1, 2]]
    assert {index: epoch for index, (epoch, _) in loader.skipped.items()} == {5: 0, 9: 0}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Unreliable, ManyAtOnce])
def test_a_run_that_is_resumed_after_any_update_sees_what_an_uninterrupted_one_sees(num_workers, kind):
    def started(skipped):
        # Those of many at once are read again one by one, so that there is nothing to remember of a transient error.
        dataset = kind(24, bad=(3, 20), transient=(7, 11, 12) if kind is Unreliable else ())
        loader = adopted(dataset, accumulation=2, shuffle=True, num_workers=num_workers)
        loader.skipped = dict(skipped)
        return loader

    def go_on(loader, epoch, position):
        """Yield what is seen of each update from here to the end of epoch 2, and where a run stands after it."""
        while epoch < 3:
            for window in loader.windows(epoch, position):
                position += window.samples
                yield seen([window]), (epoch, position), dict(loader.skipped)
            epoch, position = epoch + 1, 0

    whole = list(go_on(started({}), 0, 0))
    assert len(whole) == 9
    assert len(whole[-1][2]) == (5 if kind is Unreliable else 2)
    for index, (_, (epoch, position), skipped) in enumerate(whole):
        assert list(go_on(started(skipped), epoch, position)) == whole[index + 1 :]


# How many may be skipped


def test_more_than_ten_skipped_samples_of_a_small_dataset_are_an_error():
    dataset = Unreliable(900, bad=tuple(range(10)))
    assert len(list(adopted(dataset, batch_size=30).windows())) == 30
    dataset.bad.add(700)
    message = (
        "11 samples could not be read, more than the 10 .*The first are 0: ValueError: no picture in 0; 1: .*Repair"
    )
    with pytest.raises(DataError, match=message):
        list(adopted(dataset, batch_size=30).windows())


def test_one_in_a_hundred_of_a_large_dataset_may_be_skipped():
    dataset = Unreliable(1200, bad=tuple(range(0, 1200, 100)))
    loader = adopted(dataset, batch_size=50)
    assert len(list(loader.windows())) == 24
    assert len(loader.skipped) == 12
    loader.skipped[1] = (0, "ValueError: of an earlier run")
    with pytest.raises(DataError, match="13 samples could not be read, more than the 12"):
        next(loader.windows(1))


# The loss


class Pairs(Unreliable):
    def __getitem__(self, index):
        sample = super().__getitem__(index).float()
        return sample / self.size, sample[:1].sin()


class SkippingTrainer(Trainer):
    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        accumulation = run_of(self).settings.gradient_accumulation_steps
        return adopted(self.train_dataset, batch_size, accumulation=accumulation, shuffle=True)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_loss_is_the_mean_over_the_samples_that_could_be_read(accumulation):
    dataset = partial(Pairs, 30, bad=(2, 3, 11, 12, 13, 14, 26))
    model, expected, pads = toys.network(), [], 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = adopted(dataset(), batch_size=2, accumulation=accumulation, shuffle=True)
    for window in loader.windows():
        samples = [piece.batch for piece in window.pieces if piece.rows]
        pads += len(window.pieces) - len(samples)
        total = sum(len(x) for x, _ in samples)
        if samples:
            loss = sum(nn.functional.mse_loss(model(x), y, reduction="sum") for x, y in samples) / total
            expected.append(loss.item())
        else:
            loss = 0 * model.weight.sum() + 0 * model.bias.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert pads >= 1

    watch = toys.watch(on_log=lambda trainer, logs, **kwargs: logs["loss"])
    options = {"per_device_batch_size": 2, "gradient_accumulation_steps": accumulation, "log_every": 1, "seed": SEED}
    trainer = toys.trained([watch], dataset(), cls=SkippingTrainer, lr=0.1, momentum=0.0, **options)
    assert watch.seen == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(trainer.model.weight.cpu(), model.weight, rtol=1e-5)
    assert len(trainer.train_loader.skipped) == 7
    assert trainer.result.updates == -(-15 // accumulation)


# Two processes


def read_two_epochs(results: Results) -> None:
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    dataset = Unreliable(24, bad=(1, 2, 3, 4, 5))
    loader = adopted(dataset, shuffle=True, rank=rank, processes=2)
    for epoch in range(2):
        dataset.tried.clear()
        list(loader.windows(epoch))
        results[f"tried in {epoch}"] = sorted(set(dataset.tried) & dataset.bad)
    results["skipped"] = sorted(loader.agree_on_skipped())


@pytest.mark.distributed
def test_what_one_process_skipped_no_process_tries_again(tmp_path):
    first, second = run(read_two_epochs, tmp_path)
    tried = [rank["tried in 0"] for rank in (first, second)]
    assert all(tried) and sorted(tried[0] + tried[1]) == [1, 2, 3, 4, 5]
    for rank in (first, second):
        assert rank["tried in 1"] == [] and rank["skipped"] == [1, 2, 3, 4, 5]
