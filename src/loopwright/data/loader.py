"""Loaders that can start anywhere: from a position in an epoch to windows of micro-batches.

`adopt` takes any DataLoader (the default one, one with a sampler or batch_sampler of the user's, a
ready-made one) or any other iterable of batches, and returns a `Loader` that yields the same
samples as windows, one per update:

* `OrderedLoader` for map-style datasets. The order is computed, not drawn; fetching is seeded by
  position; resume costs nothing (an own sampler's ids are drawn again, but nothing is fetched).
* `ReplayLoader` for everything else. Resume reads the skipped batches again and drops them.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from loopwright.data.collate import collate
from loopwright.data.order import MicroBatch, Plan, Sequential, Share, Shuffled, plan_batches
from loopwright.engine.nested import num_rows, to_device
from loopwright.engine.seeding import (
    generator_states,
    preserved_generators,
    restore_generator_states,
    seed_generators,
)
from loopwright.keys import KeyStream, key

_STREAM_CHUNK = 1024
_END = object()


class Piece(NamedTuple):
    """One micro-batch as this process runs it.

    Attributes:
        batch: what the dataset and collate function made, on the host.
        key: what it was fetched under; follows from its position in the epoch.
        rows: samples that count; 0 for a pad, which a process runs to keep step with the others.
    """

    batch: Any
    key: int
    rows: int


class Window(NamedTuple):
    """What one update consumes here, and how many samples it consumes over all processes."""

    pieces: list[Piece]
    samples: int


@dataclass(frozen=True)
class Guarantee:
    """What an input allows: how its order comes about and what a resume costs."""

    order: str
    resume: str


RANDOM_ACCESS = Guarantee("a function of (seed, epoch, position)", "computed; nothing is read twice")
OWN_SAMPLER = Guarantee("your sampler's, drawn under (seed, epoch)", "ids are drawn again; no sample is read twice")
REPLAYED = Guarantee("your loader's, started under (seed, epoch)", "skipped batches are read again and dropped")


class Loader(ABC):
    """The micro-batches of an epoch that this process runs, in windows, from any position on.

    Attributes:
        device: where iterating it directly puts the batches.
        guarantee: what can be promised about order and resume.
    """

    guarantee: Guarantee

    def __init__(self, seed: int, share: Share, device: torch.device, even_tail: bool, limit: int | None) -> None:
        self.seed = seed
        self.share = share
        self.device = device
        self.limit = limit
        self._even_tail = even_tail
        self._direct_epoch = 0
        self._purpose = "eval-fetch" if even_tail else "fetch"

    @abstractmethod
    def windows(self, epoch: int = 0, position: int = 0) -> Iterator[Window]:
        """Yield the windows of an epoch after `position` samples of it (over all processes)."""

    @abstractmethod
    def _num_global_batches(self) -> int | None:
        """Return the micro-batches of an epoch over all processes before any limit, if that is known."""

    @property
    def num_batches(self) -> int | None:
        """Micro-batches that this process runs per epoch, if that is known."""
        total = self._num_global_batches()
        if total is None:
            return None
        limit = self._global_limit()
        return self.share.num_local_batches(total if limit is None else min(total, limit))

    @property
    def num_updates(self) -> int | None:
        """Updates per epoch, if that is known."""
        return None if self.num_batches is None else -(-self.num_batches // self.share.accumulation)

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError(f"the length of {type(self).__name__} is not known: its source has none")
        return self.num_batches

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch iterating it directly yields; `windows` is told each time."""
        self._direct_epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch on the device."""
        for window in self.windows(self._direct_epoch):
            for piece in window.pieces:
                yield to_device(piece.batch, self.device)

    def close(self) -> None:  # noqa: B027 - most loaders have nothing to end
        """End the workers; the next epoch starts new ones."""

    def _global_limit(self) -> int | None:
        return None if self.limit is None else self.limit * self.share.processes


class OrderedLoader(Loader):
    """A loader over a map-style dataset whose order is computed (a plan) or drawn ahead (a sampler)."""

    def __init__(
        self,
        source: DataLoader[Any],
        seed: int,
        share: Share,
        device: torch.device,
        even_tail: bool,
        limit: int | None,
    ) -> None:
        super().__init__(seed, share, device, even_tail, limit)
        self.source = source
        self.dataset = source.dataset
        self.sampler = source.sampler
        self.batch_sampler: Any = source.batch_sampler
        self.batch_size = source.batch_size  # None: the batch sampler is the user's own
        self.drop_last = source.drop_last
        self.num_workers = source.num_workers
        self.guarantee = RANDOM_ACCESS if self._find_plan() is not None else OWN_SAMPLER
        self._fetches_here = source.num_workers == 0 and not source.pin_memory
        self._feed = _Feed()
        self._loader: DataLoader[Any] = DataLoader(
            SeededDataset(source.dataset),  # type: ignore[arg-type]
            batch_sampler=self._feed,
            collate_fn=source.collate_fn,
            num_workers=source.num_workers,
            pin_memory=source.pin_memory,
            timeout=source.timeout,
            worker_init_fn=source.worker_init_fn,
            multiprocessing_context=source.multiprocessing_context,
            prefetch_factor=source.prefetch_factor,
            persistent_workers=source.persistent_workers,
            # Of its own, so that starting an epoch draws nothing from the global generator.
            generator=torch.Generator(),
        )

    def windows(self, epoch: int = 0, position: int = 0) -> Iterator[Window]:
        """Yield the windows of an epoch after `position` samples; nothing before them is fetched."""
        fetched: deque[_Fetched] = deque()
        micro_batches = self._local_micro_batches(epoch, position, fetched)
        batches = self._fetched_here(micro_batches) if self._fetches_here else self._fetched_by_loader(micro_batches)
        for batch in batches:
            first = fetched.popleft()
            pieces = [Piece(batch, first.key, first.rows)]
            while len(pieces) < first.pieces:
                batch = next(batches)  # before its note is read: fetching it may be what writes the note
                other = fetched.popleft()
                pieces.append(Piece(batch, other.key, other.rows))
            yield Window(pieces, first.samples)

    def _fetched_here(self, micro_batches: Iterator[MicroBatch]) -> Iterator[Any]:
        # What DataLoader does without workers, less its bookkeeping (about 10 us per batch).
        fetch = self._loader.dataset.__getitems__  # type: ignore[attr-defined]
        given = self._loader.collate_fn
        make_batch = collate if given is default_collate else given
        return (make_batch(fetch(micro_batch)) for micro_batch in micro_batches)

    def _fetched_by_loader(self, micro_batches: Iterator[MicroBatch]) -> Iterator[Any]:
        self._feed.micro_batches = micro_batches
        return iter(self._loader)

    def close(self) -> None:
        """End the workers; the next epoch starts new ones."""
        workers = self._loader._iterator
        self._loader._iterator = None
        if workers is not None:
            workers._shutdown_workers()  # type: ignore[attr-defined]

    def _find_plan(self) -> Plan | None:
        sampler = self.sampler
        if self.batch_size is None:
            return None
        if type(sampler) is SequentialSampler:
            return Sequential(len(sampler))
        if type(sampler) is RandomSampler and not sampler.replacement:
            size = len(sampler.data_source)
            if sampler.num_samples == size:
                return Shuffled(size, self.seed if sampler.generator is None else sampler.generator.initial_seed())
        return None

    def _num_global_batches(self) -> int | None:
        if self.batch_size is None:
            return len(self.batch_sampler) if isinstance(self.batch_sampler, Sized) else None
        if not isinstance(self.sampler, Sized):
            return None
        full, rest = divmod(len(self.sampler), self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def _global_micro_batches(self, epoch: int, position: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (position, ids) of every micro-batch of the epoch from a position on, within the limit."""
        limit = self._global_limit()
        if self.batch_size is None:
            start = 0
            stream = _keyed_stream(self.batch_sampler, self.seed, epoch, self.device)
            for ids in itertools.islice(stream, limit):
                if start >= position:
                    yield start, list(ids)
                start += len(ids)
            return
        plan = self._find_plan()  # not kept: a resumed run sets the seed that it was begun with
        if plan is not None:
            batches = plan_batches(plan, epoch, position, self.batch_size)
        else:
            ids_from = itertools.islice(_keyed_stream(self.sampler, self.seed, epoch, self.device), position, None)
            batches = iter(lambda: list(itertools.islice(ids_from, self.batch_size)), [])
        if limit is not None:
            batches = itertools.islice(batches, max(limit - position // self.batch_size, 0))
        for ids in batches:
            if self.drop_last and len(ids) < self.batch_size:
                return
            yield position, ids
            position += len(ids)

    def _local_micro_batches(self, epoch: int, position: int, fetched: deque[_Fetched]) -> Iterator[MicroBatch]:
        """Yield what this process fetches, and note in `fetched` what each is part of."""
        share = self.share
        keys = KeyStream(self.seed, epoch, purpose=self._purpose)
        micro_batches = self._global_micro_batches(epoch, position)
        while window := list(itertools.islice(micro_batches, share.window)):
            samples = sum([len(ids) for _, ids in window])
            mine, is_pad = (window, False) if share.processes == 1 else self._part_of(window)
            for start, ids in mine:
                fetch_key = keys.at(start)
                fetched.append(_Fetched(fetch_key, 0 if is_pad else len(ids), len(mine), samples))
                yield MicroBatch(ids, fetch_key)

    def _part_of(self, window: list[tuple[int, list[int]]]) -> tuple[list[tuple[int, list[int]]], bool]:
        """Return this process's micro-batches of a window, and whether they are only a pad: it has none of its own."""
        share = self.share
        if self._even_tail and len(window) < share.processes:
            window = _split_evenly(window, share.processes)
        first = share.rank * share.accumulation
        mine = [item for item in window[first : first + share.accumulation] if item[1]]
        return (mine, False) if mine else (window[:1], True)


class ReplayLoader(Loader):
    """A loader over any iterable of batches, each counted as it comes."""

    guarantee = REPLAYED

    def __init__(
        self, source: Any, seed: int, share: Share, device: torch.device, even_tail: bool, limit: int | None
    ) -> None:
        super().__init__(seed, share, device, even_tail, limit)
        self.source = source
        self.dataset = getattr(source, "dataset", source)
        self.batch_size: int | None = getattr(source, "batch_size", None)

    def windows(self, epoch: int = 0, position: int = 0) -> Iterator[Window]:
        """Yield the windows of an epoch after `position` samples, reading and dropping those before."""
        share = self.share
        limited = itertools.islice(self._batches(epoch), self._global_limit())
        batches = (item for item in limited if item[0] >= position)
        while window := list(itertools.islice(batches, share.window)):
            samples = sum(rows for _, rows, _ in window)
            first = share.rank * share.accumulation
            keys = KeyStream(self.seed, epoch, purpose=self._purpose)
            mine = [
                Piece(batch, keys.at(start), rows) for start, rows, batch in window[first : first + share.accumulation]
            ]
            if not mine:
                start, _, batch = window[0]
                mine = [Piece(batch, keys.at(start), 0)]
            yield Window(mine, samples)

    def _batches(self, epoch: int) -> Iterator[tuple[int, int, Any]]:
        _set_epoch(epoch, self.dataset, *_parts(self.source))
        own = _OwnGenerators(self.source, epoch)
        seed_generators(key(self.seed, "loader", epoch))
        with own.in_use():
            batches = iter(self.source)
        start = 0
        while True:
            # A source that draws in this process draws as a function of the position.
            seed_generators(key(self.seed, self._purpose, epoch, start))
            with own.in_use():
                batch = next(batches, _END)
            if batch is _END:
                return
            rows = num_rows(batch)
            yield start, rows, batch
            start += rows

    def close(self) -> None:
        """End the source's workers, if it keeps any between epochs."""
        workers = self.source._iterator if isinstance(self.source, DataLoader) else None
        if workers is not None:
            self.source._iterator = None
            workers._shutdown_workers()  # type: ignore[attr-defined]

    def _num_global_batches(self) -> int | None:
        try:
            return len(self.source)
        except TypeError:
            return None


class SeededDataset:
    """A dataset whose micro-batches are fetched under generators seeded by their position.

    Everything else is the wrapped dataset's own: a `worker_init_fn` finds and sets its attributes through this.
    """

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "_wrapped", dataset)

    def __getitems__(self, micro_batch: MicroBatch) -> list[Any]:
        """Seed this process's generators, then fetch the samples (by the dataset's `__getitems__` if it has one)."""
        seed_generators(micro_batch.key)
        dataset = self._wrapped
        fetch: Callable[[list[int]], list[Any]] | None = getattr(dataset, "__getitems__", None)
        if fetch is not None:
            return fetch(list(micro_batch))
        return [dataset[index] for index in micro_batch]

    def __getitem__(self, index: Any) -> Any:
        return self._wrapped[index]

    def __len__(self) -> int:
        return len(self._wrapped)

    def __getattr__(self, name: str) -> Any:
        # Not yet there while it is unpickled; and how to pickle this is no business of the dataset's.
        if name == "_wrapped" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped, name, value)


def adopt(
    source: Any,
    *,
    seed: int,
    share: Share,
    device: torch.device,
    evaluation: bool = False,
    limit: int | None = None,
) -> Loader:
    """Return a Loader that yields what this DataLoader, or other iterable of batches, would.

    Args:
        source: as `create_train_dataloader` or `create_eval_dataloader` returned it.
        seed: of the run.
        share: this process's part.
        device: where batches are used.
        evaluation: no accumulation; the last window is split evenly over the processes.
        limit: micro-batches per process and epoch: so many times the processes in all. If the accumulation
            does not divide it, the first processes run more of the last window than the others.
    """
    if evaluation:
        share = Share(share.rank, share.processes, 1)
    if isinstance(source, (OrderedLoader, ReplayLoader)):
        source = source.source
    if isinstance(getattr(source, "dl", None), Loader):
        share = Share(0, 1, share.accumulation)  # a slice of a loader of ours holds this process's part already
    ordered = (
        type(source) is DataLoader
        and not isinstance(source.dataset, IterableDataset)
        and source.batch_sampler is not None
    )
    kind: type[OrderedLoader] | type[ReplayLoader] = OrderedLoader if ordered else ReplayLoader
    return kind(source, seed, share, device, evaluation, limit)


class _Fetched(NamedTuple):
    """What the process that reads a micro-batch has to know of it: its own key and rows, and its window's
    number of pieces here and of samples everywhere."""

    key: int
    rows: int
    pieces: int
    samples: int


class _Feed:
    """The batch sampler handed to DataLoader: yields whatever the current epoch's iterator yields."""

    def __init__(self) -> None:
        self.micro_batches: Iterator[MicroBatch] = iter(())

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.micro_batches


def _keyed_stream(source: Any, seed: int, epoch: int, device: torch.device) -> Iterator[Any]:
    """Iterate a sampler under generators of its own, seeded by the epoch, whatever else is drawn meanwhile."""
    _set_epoch(epoch, *_parts(source))
    own = _OwnGenerators(source, epoch)
    states: dict[str, Any] | None = None
    items: Iterator[Any] | None = None
    while True:
        with preserved_generators(device), own.in_use():
            if items is None or states is None:
                seed_generators(key(seed, "sampler", epoch), device)
                items = iter(source)
            else:
                restore_generator_states(states, device)
            chunk = list(itertools.islice(items, _STREAM_CHUNK))
            states = generator_states(device)
        yield from chunk
        if len(chunk) < _STREAM_CHUNK:
            return


class _OwnGenerators:
    """The torch generators that a sampler or loader was given: they give a sequence of their own for every epoch,
    by their seed, and are left as they were."""

    def __init__(self, source: Any, epoch: int) -> None:
        found = [getattr(part, "generator", None) for part in _parts(source)]
        self._generators = list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
        self._epoch = epoch
        self._states: list[torch.Tensor] | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Run a block that draws from them, each time from where the last one ended."""
        outside = [generator.get_state() for generator in self._generators]
        for index, generator in enumerate(self._generators):
            if self._states is None:
                generator.manual_seed(key(generator.initial_seed(), "sampler", self._epoch))
            else:
                generator.set_state(self._states[index])
        try:
            yield
        finally:
            self._states = [generator.get_state() for generator in self._generators]
            for generator, state in zip(self._generators, outside, strict=True):
                generator.set_state(state)


def _parts(source: Any) -> list[Any]:
    """Return a sampler or loader and the samplers that it iterates."""
    batch_sampler = getattr(source, "batch_sampler", None)
    return [source, getattr(source, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]


def _set_epoch(epoch: int, *parts: Any) -> None:
    for part in {id(part): part for part in parts}.values():
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def _split_evenly(window: list[tuple[int, list[int]]], parts: int) -> list[tuple[int, list[int]]]:
    """Split a window's samples into contiguous parts whose sizes differ by at most one."""
    start = window[0][0]
    ids = list(itertools.chain.from_iterable(ids for _, ids in window))
    size, extra = divmod(len(ids), parts)
    split, offset = [], 0
    for part in range(parts):
        count = size + (1 if part < extra else 0)
        split.append((start + offset, ids[offset : offset + count]))
        offset += count
    return split
