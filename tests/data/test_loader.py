"""Loaders: the same samples, batches and random numbers for any workers, processes and starting points."""

import dataclasses
import itertools
import pickle
import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from data.loaders import Indices, LazySampler, Noisy, NoisyStream, OwnLoader, adopted, seen
from loopwright.data import OrderedLoader, ReplayLoader, Shuffled
from loopwright.data.collate import collate
from loopwright.data.defaults import DataLoaderSlice
from loopwright.data.samples import Reader, SeededDataset
from loopwright.errors import DataError
from loopwright.keys import key
from toys import plain


def noisy_collate(samples):
    return torch.stack(samples), random.random(), float(np.random.rand()), torch.rand(2)


class BatchesOfAnySize(Sampler):
    """Batches of 1, 2, 3, 1, 2, 3, ... samples in a drawn order."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        ids = torch.randperm(self.size).tolist()
        for count in itertools.cycle((1, 2, 3)):
            if not ids:
                return
            yield [ids.pop() for _ in range(min(count, len(ids)))]


class ListedBatches:
    """Ready batches, each changed by what is drawn when it is read."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return -(-self.size // 4)

    def __iter__(self):
        for ids in torch.arange(self.size).split(4):
            yield ids.double() + random.random()


def batches_of(loader, epoch=0) -> list:
    return [piece.batch for window in loader.windows(epoch) for piece in window.pieces]


def ids_of(loader, epoch=0) -> list[int]:
    return torch.cat(batches_of(loader, epoch)).tolist()


def scramble_generators(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


# Processes and accumulation


@pytest.mark.parametrize(("window", "all_processes"), [(24, [1, 2, 3, 4, 6, 8]), (35, [1, 5, 7])])
def test_an_update_sees_the_same_samples_in_the_same_order_on_any_number_of_processes(window, all_processes):
    size, batch_size, epoch = 1003, 3, 2
    order = Shuffled(size, 7).ids(epoch, 0, size).tolist()
    expected = [order[start : start + window * batch_size] for start in range(0, size, window * batch_size)]
    for processes in all_processes:
        updates = [[] for _ in expected]
        for rank in range(processes):
            source = DataLoader(Indices(size), batch_size=batch_size, shuffle=True)
            loader = adopted(source, rank=rank, processes=processes, accumulation=window // processes)
            windows = list(loader.windows(epoch))
            assert len(windows) == len(expected) == loader.num_updates
            assert sum(len(each.pieces) for each in windows) == loader.num_batches == len(loader)
            assert [each.samples for each in windows] == [len(update) for update in expected]
            for update, each in zip(updates, windows, strict=True):
                assert each.pieces
                for piece in each.pieces:
                    update.extend(piece.batch[: piece.rows].tolist())
        assert updates == expected


SIZES = st.integers(1, 120)
BATCH_SIZES = st.integers(1, 9)
PROCESSES = st.integers(1, 5)


@given(SIZES, BATCH_SIZES, PROCESSES, st.integers(1, 4), st.booleans(), st.booleans())
def test_no_sample_of_an_epoch_is_lost_or_doubled(size, batch_size, processes, accumulation, drop_last, shuffle):
    order = Shuffled(size, 7).ids(1, 0, size).tolist() if shuffle else list(range(size))
    kept = size - size % batch_size if drop_last else size
    trained, samples = [], set()
    for rank in range(processes):
        source = DataLoader(Indices(size), batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
        loader = adopted(source, rank=rank, processes=processes, accumulation=accumulation)
        windows = list(loader.windows(1))
        assert len(windows) == loader.num_updates
        assert sum(len(window.pieces) for window in windows) == len(loader)
        samples.add(tuple(window.samples for window in windows))
        for index, window in enumerate(windows):
            assert all(piece.rows == len(piece.batch) or len(window.pieces) == 1 for piece in window.pieces)
            trained.extend((index, rank, piece.batch[: piece.rows].tolist()) for piece in window.pieces)
    in_order = [each for _, _, ids in sorted(trained, key=lambda item: item[:2]) for each in ids]
    assert in_order == order[:kept]
    assert len(samples) == 1
    assert sum(samples.pop()) == kept


def test_the_micro_batches_of_a_window_are_fetched_under_the_same_keys_on_any_number_of_processes():
    def pieces_of(processes):
        loaders = [
            adopted(DataLoader(Noisy(50), batch_size=2, shuffle=True), rank=rank, processes=processes, accumulation=acc)
            for acc in [8 // processes]
            for rank in range(processes)
        ]
        return [
            [(plain(piece.batch), piece.key) for window in windows for piece in window.pieces if piece.rows]
            for windows in zip(*(loader.windows(3) for loader in loaders), strict=True)
        ]

    assert pieces_of(1) == pieces_of(2) == pieces_of(4) == pieces_of(8)


@pytest.mark.parametrize("kind", ["shuffle", "weighted sampler", "batch sampler", "iterable dataset", "own batches"])
def test_every_micro_batch_has_the_key_of_its_position_and_draws_numbers_of_its_own(kind):
    for evaluation, purpose in ((False, "fetch"), (True, "eval-fetch")):
        position = 0
        for window in adopted(SOURCES[kind](), accumulation=2, evaluation=evaluation).windows(3):
            for piece in window.pieces:
                assert piece.key == key(7, purpose, 3, position)
                position += piece.rows
    noise = batches_of(adopted(DataLoader(Noisy(100), batch_size=1)))
    assert len({value for batch in noise for value in batch[0, 1:].tolist()}) == 300


def test_a_process_without_a_micro_batch_of_its_own_runs_one_that_counts_nothing():
    loader = adopted(DataLoader(Indices(10), batch_size=5), rank=2, processes=3)
    (window,) = loader.windows()
    (pad,) = window.pieces
    assert (pad.rows, pad.batch.tolist(), window.samples) == (0, [0, 1, 2, 3, 4], 10)


# Evaluation


@given(st.integers(1, 80), BATCH_SIZES, st.integers(1, 8))
def test_evaluation_counts_every_sample_once_in_the_order_of_the_dataset(size, batch_size, processes):
    loaders = [
        adopted(DataLoader(Indices(size), batch_size=batch_size), rank=rank, processes=processes, evaluation=True)
        for rank in range(processes)
    ]
    counted = []
    for windows in zip(*(loader.windows() for loader in loaders), strict=True):
        rows = [window.pieces[0].rows for window in windows]
        assert all(len(window.pieces) == 1 for window in windows)
        assert {window.samples for window in windows} == {sum(rows)}
        for window in windows:
            (piece,) = window.pieces
            counted.extend(piece.batch[: piece.rows].tolist())
            assert len(piece.batch) == (piece.rows or 1)  # a pad is one sample that counts nothing
    assert counted == list(range(size))
    assert {len(loader) for loader in loaders} == {loaders[0].num_updates}
    assert loaders[0].num_updates == len(list(loaders[0].windows()))


def test_the_last_evaluation_batches_are_split_evenly():
    rows = [
        [window.pieces[0].rows for window in adopted(source, rank=rank, processes=4, evaluation=True).windows()]
        for rank in range(4)
        for source in [DataLoader(Indices(51), batch_size=10)]
    ]
    assert rows == [[10, 3], [10, 3], [10, 3], [10, 2]]


def test_evaluation_does_not_accumulate_and_draws_other_numbers_than_training():
    source = DataLoader(Noisy(8), batch_size=4)
    training, evaluation = adopted(source, accumulation=2), adopted(source, accumulation=2, evaluation=True)
    assert [len(window.pieces) for window in training.windows()] == [2]
    assert [len(window.pieces) for window in evaluation.windows()] == [1, 1]
    assert not torch.equal(batches_of(training)[0], batches_of(evaluation)[0])


@given(st.integers(1, 40), st.integers(1, 6))
@settings(max_examples=30)
def test_evaluation_of_any_iterable_of_batches_counts_every_sample_once(size, processes):
    shares = [
        adopted(ListedBatches(size), rank=rank, processes=processes, evaluation=True) for rank in range(processes)
    ]
    counted = []
    for window in itertools.chain(*zip(*(loader.windows() for loader in shares), strict=True)):
        (piece,) = window.pieces
        counted.extend(piece.batch[: piece.rows].long().tolist())
    assert counted == list(range(size))


# Starting anywhere

SOURCES = {
    "shuffle": lambda: DataLoader(Noisy(31), batch_size=4, shuffle=True, collate_fn=noisy_collate),
    "sequential": lambda: DataLoader(Noisy(31), batch_size=4),
    "drop_last": lambda: DataLoader(Noisy(31), batch_size=4, shuffle=True, drop_last=True),
    "weighted sampler": lambda: DataLoader(
        Noisy(31), batch_size=4, sampler=WeightedRandomSampler(torch.arange(1.0, 32.0), 45)
    ),
    "sampler with a generator": lambda: DataLoader(
        Noisy(31), batch_size=4, sampler=RandomSampler(range(31), True, 45, generator=torch.Generator().manual_seed(3))
    ),
    "lazy sampler": lambda: DataLoader(Noisy(31), batch_size=4, sampler=LazySampler(31, 45)),
    "distributed sampler": lambda: DataLoader(
        Noisy(31), batch_size=4, sampler=DistributedSampler(range(31), num_replicas=1, rank=0)
    ),
    "batch sampler": lambda: DataLoader(Noisy(31), batch_sampler=BatchesOfAnySize(31)),
    "batch sampler of torch": lambda: DataLoader(
        Noisy(31), batch_sampler=BatchSampler(RandomSampler(range(31), generator=torch.Generator()), 4, drop_last=False)
    ),
    "iterable dataset": lambda: DataLoader(NoisyStream(31), batch_size=4),
    "loader subclass": lambda: OwnLoader(Noisy(31), batch_size=4, shuffle=True),
    "loader subclass with a generator": lambda: OwnLoader(
        Noisy(31), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "own batches": lambda: ListedBatches(31),
    "list of batches": lambda: list(torch.arange(31.0).split(4)),
    "samples that are batches": lambda: DataLoader(list(torch.arange(31.0).split(4)), batch_size=None, shuffle=True),
}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", SOURCES)
def test_an_epoch_can_be_started_at_any_update_without_changing_the_rest(kind, accumulation):
    whole = seen(adopted(SOURCES[kind](), accumulation=accumulation).windows(1))
    boundaries = [0, *itertools.accumulate(samples for _, samples in whole)]
    assert len(boundaries) > 3
    again = adopted(SOURCES[kind](), accumulation=accumulation)
    for done, position in enumerate(boundaries):
        scramble_generators(position)
        assert seen(again.windows(1, position)) == whole[done:]


@pytest.mark.parametrize("kind", SOURCES)
def test_an_epoch_does_not_depend_on_the_epochs_before_it_nor_on_the_state_of_the_generators(kind):
    loader = adopted(SOURCES[kind](), accumulation=2)
    whole = [seen(loader.windows(epoch)) for epoch in range(3)]
    scramble_generators(99)
    next(adopted(SOURCES[kind]()).windows(0))
    assert seen(adopted(SOURCES[kind](), accumulation=2).windows(2)) == whole[2]
    assert seen(loader.windows(1)) == whole[1]


@pytest.mark.parametrize("kind", sorted(SOURCES.keys() - {"sequential", "list of batches"}))
def test_every_epoch_and_every_seed_is_another(kind):
    first = plain(batches_of(adopted(SOURCES[kind]()), 0))
    assert plain(batches_of(adopted(SOURCES[kind]()), 1)) != first
    assert plain(batches_of(adopted(SOURCES[kind](), seed=8), 0)) != first


@pytest.mark.parametrize("kind", ["shuffle", "weighted sampler", "batch sampler"])
def test_starting_later_fetches_nothing_of_what_lies_before(kind):
    class Recorded(Noisy):
        fetched: list[int] = []

        def __getitem__(self, index):
            self.fetched.append(index)
            return super().__getitem__(index)

    source = SOURCES[kind]()
    samples = [window.samples for window in adopted(source).windows()]
    how = {"batch_sampler": source.batch_sampler} if kind == "batch sampler" else {"sampler": source.sampler}
    source = DataLoader(Recorded(31), 1 if "batch_sampler" in how else 4, collate_fn=source.collate_fn, **how)
    assert len(list(adopted(source).windows(0, sum(samples[:3])))) == len(samples) - 3
    assert len(Recorded.fetched) == sum(samples[3:])


def test_a_sampler_draws_from_generators_of_its_own_and_leaves_all_others_alone():
    own = torch.Generator().manual_seed(3)
    sampler = WeightedRandomSampler(torch.ones(31), 45, generator=own)
    before = own.get_state(), torch.get_rng_state(), random.getstate()
    loader = adopted(DataLoader(Indices(31), batch_size=4, sampler=sampler, num_workers=1))
    ids = [ids_of(loader, epoch) for epoch in (0, 1)]
    assert ids[0] != ids[1]
    assert torch.equal(own.get_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]


def test_a_sampler_that_never_ends_is_read_only_as_far_as_needed():
    class Endless(Sampler):
        def __iter__(self):
            while True:
                yield random.randrange(5)

    loader = adopted(DataLoader(Indices(5), sampler=Endless(), batch_size=3), limit=4)
    assert [len(batch) for batch in batches_of(loader)] == [3, 3, 3, 3]
    assert loader.num_batches is None
    with pytest.raises(TypeError, match="length of OrderedLoader is not known"):
        len(loader)


def test_a_long_sampler_is_drawn_in_parts_without_a_seam():
    sampler = LazySampler(10**9, 2500)  # drawn 1024 at a time

    class Echo(Indices):
        def __getitem__(self, index):
            random.random()  # draws in between must not reach the sampler
            return index

    ids = ids_of(adopted(DataLoader(Echo(10**9), sampler=sampler, batch_size=7)))
    random.seed(key(7, "sampler", 0))
    assert ids == list(sampler)


# Workers


def with_workers(num_workers, persistent=False, **kwargs):
    kwargs = {"collate_fn": noisy_collate, "num_workers": num_workers, "persistent_workers": persistent, **kwargs}
    return adopted(DataLoader(Noisy(26), batch_size=4, **kwargs), accumulation=2)


@pytest.mark.parametrize(("num_workers", "persistent"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_the_sequence_with_its_augmentation_is_the_same_for_any_workers(num_workers, persistent):
    expected = [seen(with_workers(0, shuffle=True).windows(epoch)) for epoch in range(2)]
    scramble_generators(num_workers)
    loader = with_workers(num_workers, persistent, shuffle=True)
    assert [seen(loader.windows(epoch)) for epoch in range(2)] == expected
    position = expected[1][0][1]
    assert seen(loader.windows(1, position)) == expected[1][1:]
    loader.close()


def test_an_own_sampler_gives_the_same_sequence_for_any_workers():
    expected = seen(with_workers(0, sampler=LazySampler(26, 40)).windows(1))
    assert seen(with_workers(2, sampler=LazySampler(26, 40)).windows(1)) == expected


def test_an_epoch_that_was_left_halfway_leaves_no_batch_behind_in_living_workers():
    expected = seen(with_workers(0, shuffle=True).windows(1))
    loader = with_workers(2, persistent=True, shuffle=True)
    for _ in zip(range(2), loader.windows(0), strict=False):
        pass
    assert seen(loader.windows(1)) == expected
    loader.close()


def test_living_workers_end_when_the_loader_is_closed_and_start_again_when_needed():
    loader = with_workers(1, persistent=True, shuffle=True)
    first = seen(loader.windows())
    workers = loader._loader._iterator._workers
    assert all(worker.is_alive() for worker in workers)
    loader.close()
    assert not any(worker.is_alive() for worker in workers)
    assert seen(loader.windows()) == first
    loader.close()
    loader.close()


class OpensInWorker(Indices):
    factor = 0
    offset = 0

    def open(self) -> None:
        self.factor = 10

    def __getitem__(self, index):
        return index * self.factor + self.offset


def open_dataset(worker_id: int) -> None:
    dataset = get_worker_info().dataset
    dataset.open()
    dataset.offset = len(dataset) + dataset.size


def test_a_worker_init_fn_reaches_the_dataset_as_if_it_were_not_wrapped():
    source = DataLoader(OpensInWorker(6), batch_size=3, num_workers=1, worker_init_fn=open_dataset)
    assert ids_of(adopted(source)) == torch.cat(list(source)).tolist() == [12, 22, 32, 42, 52, 62]


def test_the_wrapped_dataset_can_be_sent_to_a_worker_that_is_not_forked():
    sent = pickle.loads(pickle.dumps(SeededDataset(Reader(Subset(OpensInWorker(6), [1, 2]), list))))
    assert (len(sent), sent.dataset.size, sent[1]) == (2, 6, 0)


def test_starting_a_loader_draws_nothing_from_the_generators_of_the_process():
    expected = torch.get_rng_state(), random.getstate()
    loader = with_workers(1, shuffle=True)
    list(loader.windows())
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert random.getstate() == expected[1]


# Datasets and batches

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    names: list[str]


def batch_of(samples) -> Batch:
    return Batch(torch.stack([x for x, _ in samples]), [f"sample {y}" for _, y in samples])


class Samples(Indices):
    def __init__(self, make, size=10):
        super().__init__(size)
        self.make = make

    def __getitem__(self, index):
        return self.make(index)


MAKERS = {
    "number": lambda i: i,
    "tensor": lambda i: torch.full((2,), float(i)),
    "tuple of tensors": lambda i: (torch.full((2,), float(i)), torch.tensor(i)),
    "list": lambda i: [torch.full((2,), float(i)), i],
    "mixed tuple": lambda i: (torch.full((2,), float(i)), i, f"sample {i}"),
    "named tuple": lambda i: Pair(torch.full((2,), float(i)), torch.tensor(i)),
    "dict": lambda i: {"x": torch.full((2,), float(i)), "nested": {"y": i, "name": str(i)}},
    "array": lambda i: np.full((2,), i),
}


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
def test_batches_are_those_that_the_data_loader_itself_makes(kind, pin_memory):
    source = DataLoader(Samples(MAKERS[kind]), batch_size=4, pin_memory=pin_memory)
    assert plain(batches_of(adopted(source))) == plain(list(adopted(source))) == plain(list(source))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_function_may_return_a_dataclass(num_workers):
    source = DataLoader(Samples(MAKERS["tuple of tensors"]), batch_size=4, collate_fn=batch_of, num_workers=num_workers)
    batches = batches_of(adopted(source))
    assert all(type(batch) is Batch for batch in batches)
    assert [plain(batch) for batch in batches] == [plain(batch) for batch in source]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_fetches_many_at_once_is_asked_once_per_micro_batch(num_workers):
    class ManyAtOnce(Indices):
        def __getitems__(self, indices):
            assert type(indices) is list
            return [(index, len(indices)) for index in indices]

    batches = batches_of(adopted(DataLoader(ManyAtOnce(10), batch_size=4, num_workers=num_workers)))
    assert [batch[0].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [batch[1].tolist() for batch in batches] == [[4] * 4, [4] * 4, [2] * 2]


def test_subsets_and_tensor_datasets_are_fetched_like_any_other():
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    source = DataLoader(Subset(data, [7, 3, 5]), batch_size=2)
    assert [plain(batch) for batch in batches_of(adopted(source))] == [plain(batch) for batch in source]


def test_a_dataset_without_a_length_needs_only_a_sampler():
    class NoLength:
        def __getitem__(self, index):
            return index * 10

    assert ids_of(adopted(DataLoader(NoLength(), sampler=[3, 1, 2], batch_size=2))) == [30, 10, 20]


def test_ids_may_be_whatever_the_dataset_understands():
    source = DataLoader({"a": 1, "b": 2, "c": 3}, sampler=["c", "a"], batch_size=2)
    assert ids_of(adopted(source)) == [3, 1]


PAIR = (torch.ones(2), torch.ones(1))


@given(st.integers(1, 3), st.integers(1, 5), st.lists(st.integers(1, 3), max_size=2))
def test_collating_tuples_of_tensors_gives_what_torch_gives(num_columns, num_samples, shape):
    samples = [tuple(torch.rand(shape) for _ in range(num_columns)) for _ in range(num_samples)]
    assert plain(collate(samples)) == plain(default_collate(samples))


@pytest.mark.parametrize(
    "samples",
    [
        [PAIR, list(PAIR)],
        [(torch.ones(2), 1), (torch.ones(2), 2)],
        [(torch.ones(2), "a"), (torch.ones(2), "b")],
        [Pair(torch.ones(2), 1), Pair(torch.ones(2), 2)],
        [{"x": torch.ones(2)}, {"x": torch.ones(2)}],
        [(), ()],
        [torch.ones(2), torch.ones(2)],
        [1.5, 2.5],
    ],
)
def test_collating_anything_else_gives_what_torch_gives(samples):
    assert plain(collate(samples)) == plain(default_collate(samples))


@pytest.mark.parametrize(
    "samples",
    [
        [PAIR, (torch.ones(3), torch.ones(1))],
        [PAIR, PAIR[:1]],
        [PAIR[:1], PAIR],
        [PAIR[:1], (1,)],
        [PAIR[:1], 1],
        [PAIR[:1], None],
        [(object(),), (object(),)],
    ],
)
def test_samples_that_do_not_fit_raise_what_torch_raises(samples):
    with pytest.raises(Exception) as expected:
        default_collate(samples)
    with pytest.raises(expected.type) as raised:
        collate(samples)
    assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_dataset_reaches_the_caller_with_the_sample_that_it_is_about(num_workers):
    def fail(index):
        raise LookupError(f"no sample {index}")

    source = DataLoader(Samples(fail), batch_size=2, num_workers=num_workers, persistent_workers=num_workers > 0)
    loader = adopted(source)
    expected = r"sample 0 \(position 0 of epoch 3\) could not be read: LookupError: no sample 0"
    with pytest.raises(DataError, match=expected) as raised:
        list(loader.windows(3))
    assert num_workers or isinstance(raised.value.__cause__, LookupError)
    loader.close()


# What a DataLoader says is kept


def test_a_ready_data_loader_keeps_its_parts():
    sampler = WeightedRandomSampler(torch.ones(10), 10)
    workers = {"num_workers": 2, "timeout": 9, "prefetch_factor": 5, "persistent_workers": True}
    options = {**workers, "worker_init_fn": open_dataset, "collate_fn": noisy_collate}
    source = DataLoader(Indices(10), batch_size=3, sampler=sampler, drop_last=True, **options)
    loader = adopted(source)
    assert isinstance(loader, OrderedLoader)
    assert (loader.dataset, loader.sampler, loader.source) == (source.dataset, sampler, source)
    assert (loader.batch_size, loader.num_workers, loader.drop_last) == (3, 2, True)
    for name in (*workers, "worker_init_fn"):
        assert getattr(loader._loader, name) == getattr(source, name)
    assert loader._reader.make_batch is noisy_collate


@pytest.mark.parametrize(
    "how", [{"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {"batch_sampler": [[3, 1], [2]]}]
)
def test_batches_in_a_given_order_are_those_of_the_data_loader(how):
    source = DataLoader(Indices(10), **how)
    loader = adopted(source)
    assert plain(batches_of(loader)) == plain(list(source))
    assert (len(loader), loader.batch_size) == (len(source), how.get("batch_size"))


def test_a_sampler_over_less_than_the_dataset_gives_what_it_says():
    source = DataLoader(Indices(10), sampler=SequentialSampler(range(5)), batch_size=2)
    assert ids_of(adopted(source)) == torch.cat(list(source)).tolist() == [0, 1, 2, 3, 4]
    source = DataLoader(Indices(10), sampler=RandomSampler(range(5)), batch_size=2)
    assert sorted(ids_of(adopted(source))) == [0, 1, 2, 3, 4]
    source = DataLoader(Indices(10), sampler=RandomSampler(range(5), num_samples=12), batch_size=2)
    assert len(ids_of(adopted(source))) == 12


def test_a_generator_given_to_the_data_loader_decides_the_order_instead_of_the_seed():
    def shuffled(seed, generator_seed):
        generator = None if generator_seed is None else torch.Generator().manual_seed(generator_seed)
        return ids_of(adopted(DataLoader(Indices(50), batch_size=4, shuffle=True, generator=generator), seed=seed))

    assert shuffled(1, None) == shuffled(99, 1) != shuffled(1, 2)
    assert shuffled(1, 2) == shuffled(2, 2) == Shuffled(50, 2).ids(0, 0, 50).tolist()


def test_samplers_learn_of_the_epoch():
    class Told(Sampler):
        epochs: list[int] = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

        def __iter__(self):
            return iter(range(4))

    list(adopted(DataLoader(Indices(4), sampler=Told(), batch_size=2)).windows(5))
    list(adopted(DataLoader(Indices(4), batch_sampler=BatchSampler(Told(), 2, False))).windows(6))
    list(adopted(OwnLoader(Noisy(4), sampler=Told(), batch_size=2)).windows(7))
    assert Told.epochs == [5, 6, 7]


def test_the_seed_of_a_loader_can_be_changed_after_it_was_made():
    loader = adopted(DataLoader(Noisy(20), batch_size=4, shuffle=True), seed=1)
    loader.seed = 2
    assert seen(loader.windows()) == seen(adopted(DataLoader(Noisy(20), batch_size=4, shuffle=True), seed=2).windows())


@pytest.mark.parametrize("kind", ["shuffle", "weighted sampler", "loader subclass"])
def test_a_loader_can_be_adopted_again_with_another_share(kind):
    first = adopted(SOURCES[kind](), seed=1, processes=2, rank=1)
    again = adopted(first, seed=7, accumulation=2)
    assert type(again) is type(first)
    assert seen(again.windows(1)) == seen(adopted(SOURCES[kind](), accumulation=2).windows(1))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("shuffle", OrderedLoader), ("batch sampler", OrderedLoader), ("loader subclass", ReplayLoader)],
)
def test_what_can_be_taken_apart_is_ordered_and_the_rest_is_replayed(kind, expected):
    assert type(adopted(SOURCES[kind]())) is expected


def test_iterating_a_loader_gives_the_batches_of_epoch_0_or_the_one_it_was_told():
    loader = adopted(DataLoader(Indices(10), batch_size=4, shuffle=True), accumulation=2)
    assert plain(list(loader)) == plain(batches_of(loader, 0))
    loader.set_epoch(3)
    assert plain(list(loader)) == plain(batches_of(loader, 3))
    assert plain(batches_of(loader)) == plain(batches_of(loader, 0))


def test_a_slice_of_a_loader_is_not_shared_out_a_second_time():
    share = {"rank": 1, "processes": 2}
    whole = adopted(DataLoader(Indices(24), batch_size=2, shuffle=True), **share)
    part = adopted(DataLoaderSlice(whole, 4), **share)
    assert plain(batches_of(part, 1)) == plain(batches_of(whole, 1)[:4])


# Which samples an update had


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("kind", sorted(SOURCES.keys() - {"iterable dataset", "own batches", "list of batches"}))
def test_the_samples_of_an_update_are_known_without_reading_any(kind, limit):
    loader = adopted(SOURCES[kind](), accumulation=2, limit=limit)
    windows = list(loader.windows(2))
    if isinstance(loader, ReplayLoader):
        assert loader.samples_of(2, 0) is None
        return
    again = adopted(SOURCES[kind](), accumulation=2, limit=limit)
    scramble_generators(5)
    for index, window in enumerate(windows):
        told = again.samples_of(2, index)
        assert [piece.key for piece in window.pieces] == [key(7, "fetch", 2, position) for position, _ in told]
        batches = [piece.batch[0] if isinstance(piece.batch, tuple) else piece.batch for piece in window.pieces]
        assert [ids for _, ids in told] == [batch[:, 0].tolist() for batch in batches]
    assert again.samples_of(2, len(windows)) == []


def test_the_samples_of_an_update_are_those_of_all_processes_and_cost_nothing_to_find():
    loaders = [
        adopted(DataLoader(Indices(10**9), batch_size=5, shuffle=True), rank=rank, processes=2, accumulation=3)
        for rank in range(2)
    ]
    last = -(-(10**9) // 30) - 1
    told = [loader.samples_of(4, last - 1) for loader in loaders]
    assert told[0] == told[1]
    assert [position for position, _ in told[0]] == [(last - 1) * 30 + 5 * index for index in range(6)]
    order = Shuffled(10**9, 7).ids(4, (last - 1) * 30, 30).tolist()
    assert [index for _, ids in told[0] for index in ids] == order
    assert sum(len(ids) for _, ids in loaders[0].samples_of(4, last)) == 10**9 - last * 30


def test_the_samples_of_an_evaluation_are_known_as_they_are_split():
    loader = adopted(DataLoader(Indices(51), batch_size=10), rank=1, processes=4, evaluation=True)
    assert [(position, len(ids)) for position, ids in loader.samples_of(0, 1)] == [(40, 3), (43, 3), (46, 3), (49, 2)]


# Limits


@given(SIZES, BATCH_SIZES, PROCESSES, st.integers(1, 4), st.integers(1, 12), st.booleans())
def test_a_limit_holds_for_every_process_and_the_length_knows_it(
    size, batch_size, processes, accumulation, limit, evaluation
):
    total = -(-size // batch_size)
    counted = 0
    for rank in range(processes):
        share = {"rank": rank, "processes": processes, "accumulation": accumulation, "evaluation": evaluation}
        loader = adopted(DataLoader(Indices(size), batch_size=batch_size), limit=limit, **share)
        windows = list(loader.windows())
        assert sum(len(window.pieces) for window in windows) == len(loader)
        assert len(windows) == loader.num_updates
        if processes == 1 or evaluation or limit % accumulation == 0:
            assert len(loader) <= limit
        counted += sum(piece.rows for window in windows for piece in window.pieces)
    assert counted == min(size, min(limit * processes, total) * batch_size)


@pytest.mark.parametrize("kind", ["shuffle", "weighted sampler", "batch sampler", "iterable dataset", "own batches"])
def test_a_limited_epoch_is_the_beginning_of_the_whole_one_from_any_position(kind):
    whole = seen(adopted(SOURCES[kind]()).windows(1))
    loader = adopted(SOURCES[kind](), limit=3)
    assert seen(loader.windows(1)) == whole[:3]
    assert seen(loader.windows(1, whole[0][1])) == whole[1:3]
    assert seen(loader.windows(1, sum(samples for _, samples in whole[:3]))) == []
    loader.limit = None
    assert seen(loader.windows(1)) == whole


# Replayed loaders


def test_a_replayed_loader_counts_the_rows_of_each_batch_as_it_comes():
    batches = [torch.zeros(3, 2), {"x": torch.zeros(2, 2)}, (torch.zeros(5), torch.zeros(5)), torch.zeros(1, 2)]
    loader = adopted(batches, accumulation=3)
    assert [[piece.rows for piece in window.pieces] for window in loader.windows()] == [[3, 2, 5], [1]]
    assert [window.samples for window in loader.windows()] == [10, 1]
    assert (loader.num_batches, loader.num_updates) == (4, 2)


def test_a_replayed_loader_shares_batches_among_processes():
    batches = list(torch.arange(20).split(2))
    loaders = [adopted(batches, rank=rank, processes=3, accumulation=2) for rank in range(3)]
    pieces = [
        [[piece.batch[: piece.rows].tolist() for piece in window.pieces] for window in loader.windows()]
        for loader in loaders
    ]
    assert pieces == [
        [[[0, 1], [2, 3]], [[12, 13], [14, 15]]],
        [[[4, 5], [6, 7]], [[16, 17], [18, 19]]],
        [[[8, 9], [10, 11]], [[]]],  # a pad
    ]
    assert [len(loader) for loader in loaders] == [4, 4, 3]


def test_closing_a_replayed_loader_ends_workers_that_live_on_and_touches_nothing_else():
    class KeepsAnIterator(ListedBatches):
        _iterator = "not ours"

    source = OwnLoader(Noisy(8), batch_size=4, num_workers=1, persistent_workers=True)
    loader = adopted(source)
    first = seen(loader.windows())
    workers = source._iterator._workers
    loader.close()
    assert not any(worker.is_alive() for worker in workers)
    assert seen(loader.windows()) == first
    loader.close()
    other = adopted(KeepsAnIterator(8))
    other.close()
    assert other.source._iterator == "not ours"
    assert len(list(other.windows())) == 2


def test_the_length_of_a_stream_is_unknown_until_it_ends():
    loader = adopted(DataLoader(NoisyStream(9), batch_size=4))
    assert (loader.num_batches, loader.num_updates) == (None, None)
    with pytest.raises(TypeError, match="length of ReplayLoader is not known"):
        len(loader)
    assert [window.samples for window in loader.windows()] == [4, 4, 1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_is_told_the_epoch_and_gives_the_same_again(num_workers):
    def stream():
        return adopted(DataLoader(NoisyStream(9), batch_size=4, num_workers=num_workers))

    scramble_generators(1)
    first = [seen(stream().windows(epoch)) for epoch in (0, 1)]
    scramble_generators(2)
    assert [seen(stream().windows(epoch)) for epoch in (0, 1)] == first
    assert first[0] != first[1]
    assert seen(stream().windows(1, 4)) == first[1][1:]
