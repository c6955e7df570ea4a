"""Loaders that can start anywhere in an epoch, and yield windows of micro-batches.

`adopt` takes any DataLoader (default, with the user's sampler or batch_sampler, or ready-made) or other iterable of
batches, and returns a `Loader` that yields the same samples as windows, one per update:

* `OrderedLoader` for map-style datasets. The order is computed, not drawn; fetching is seeded by
  position; resume costs nothing (an own sampler's ids are drawn again, but nothing is fetched).
* `ReplayLoader` for everything else. Resume reads the skipped batches again and drops them.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate
from torch.utils.data._utils.pin_memory import pin_memory  # what DataLoader pins with: containers and custom types too

from loopwright.data import samples as reading
from loopwright.data.buckets import LengthGroupedSampler
from loopwright.data.collate import collate
from loopwright.data.order import BatchIds, Plan, Sequential, Share, Shuffled, plan_batches
from loopwright.data.streams import OwnGenerators, keyed_stream, parts_of, set_epoch_of, whole_of
from loopwright.data.workers import WorkerWatch
from loopwright.engine.nested import UnfinishedBatch, iter_tensors, num_rows, to_device
from loopwright.engine.processes import gather_objects
from loopwright.engine.seeding import seed_generators
from loopwright.errors import ConfigError, DataError, LoopwrightError, StopTrainingError
from loopwright.keys import KeyStream, key

_END = object()
_NOT_PINNED_BYTES = 64 * 1024
_BURST = 64  # micro-batches planned at once: code that runs once per update is slow, as its caches are cold


class MicroBatch(NamedTuple):
    """One micro-batch as this process runs it.

    Attributes:
        key: the key of its fetch; follows from its position in the epoch.
        rows: samples that count; 0 for a pad, which a process runs to stay in step with the others.
        moved: the batch with its tensors on the device, if they were prefetched (`data.prefetch`).
    """

    batch: Any
    key: int
    rows: int
    moved: Any = None

    def on(self, device: torch.device) -> Any:
        """Return the batch on the device; it is copied now unless it was prefetched."""
        return to_device(self.batch if self.moved is None else self.moved, device)

    def for_graph(self, device: torch.device) -> Any:
        """Return the finished batch, on any device: a graph copies it into its own buffers."""
        if self.moved is None and not isinstance(self.batch, UnfinishedBatch):
            return self.batch
        return self.on(device)


class Window(NamedTuple):
    """The micro-batches of one update.

    Attributes:
        samples: samples of the epoch that it consumes, over all processes.
        is_counted: samples may have been skipped, so the real count is the sum of all pieces' rows.
        whole: the micro-batches before they were cut into parts (`data.batch_parts`); None if not cut.
        numbers: for each piece the index of its micro-batch; None if not cut.
    """

    pieces: list[MicroBatch]
    samples: int
    is_counted: bool = False
    whole: list[MicroBatch] | None = None
    numbers: list[int] | None = None

    @property
    def num_batches(self) -> int:
        """The number of micro-batches, however many parts each has."""
        return len(self.pieces if self.whole is None else self.whole)

    def number_of(self, index: int) -> int:
        """Return the micro-batch of the piece at this index."""
        return index if self.numbers is None else self.numbers[index]


@dataclass(frozen=True)
class Guarantee:
    """The guarantees of an input: how its order is determined and the cost of a resume."""

    order: str
    resume: str


RANDOM_ACCESS = Guarantee("a function of (seed, epoch, position)", "computed; nothing is read twice")
OWN_SAMPLER = Guarantee("your sampler's, drawn under (seed, epoch)", "ids are drawn again; no sample is read twice")
REPLAYED = Guarantee("your loader's, started under (seed, epoch)", "skipped batches are read again and dropped")


class LoaderOptions(NamedTuple):
    """The options of a loader; see `adopt`."""

    seed: int
    share: Share
    device: torch.device
    evaluation: bool
    limit: int | None
    bad_samples: str


class Loader(ABC):
    """This process's micro-batches of an epoch, in windows, from any position.

    Attributes:
        skipped: the ids skipped so far, each with the epoch of the first time and the error. It is state of the run: a
            resumed one sets it before it reads windows. Ids of earlier epochs are not retried.
        own_samplers: samplers that keep their own order from epoch to epoch, by class: their state is state of the run.
        num_epochs: epochs of the run, 0 if unknown. Persistent workers may read ahead up to the last one.
    """

    guarantee: Guarantee
    dataset: Any
    _workers: WorkerWatch

    def __init__(self, source: Any, options: LoaderOptions) -> None:
        self.source = source
        self.seed, self.share, self.device, self._even_tail, self.limit, self.bad_samples = options
        self.skipped: reading.Skipped = {}
        self.own_samplers: dict[str, Any] = {}
        self.num_epochs = 0
        self._direct_epoch = 0
        self._purpose = "eval-fetch" if self._even_tail else "fetch"

    @abstractmethod
    def windows(self, epoch: int = 0, position: int = 0) -> Iterator[Window]:
        """Yield the windows of an epoch after `position` samples (over all processes)."""

    @abstractmethod
    def _num_global_batches(self) -> int | None:
        """Return the micro-batches per epoch over all processes before any limit, if known."""

    @property
    def num_batches(self) -> int | None:
        """Micro-batches per epoch of this process, if known."""
        total = self._num_global_batches()
        if total is None:
            return None
        limit = self._global_limit()
        return self.share.num_local_batches(total if limit is None else min(total, limit))

    @property
    def num_updates(self) -> int | None:
        """Updates per epoch, if known."""
        return None if self.num_batches is None else -(-self.num_batches // self.share.accumulation)

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError(f"the length of {type(self).__name__} is not known: its source has none")
        return self.num_batches

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for direct iteration; `windows` takes its own."""
        self._direct_epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for window in self.windows(self._direct_epoch):
            for piece in window.pieces:
                yield to_device(piece.batch, self.device)

    def samples_of(self, epoch: int, window_index: int) -> list[tuple[int, list[int]]] | None:
        """Return (position, ids) of every micro-batch of a window, over all processes; None if ids are unknown.

        Nothing is read. `window_index` counts from 0; after the end of the epoch the list is empty.
        """
        return None

    @property
    def collate_fn(self) -> Callable[..., Any] | None:
        """The function that collates samples, if the source has one."""
        collate_fn: Callable[..., Any] | None = getattr(self.source, "collate_fn", None)
        return collate_fn

    def agree_on_skipped(self) -> reading.Skipped:
        """Merge the skipped ids of all processes; every process must call it, at the start of an epoch and to save."""
        for others in gather_objects(self.skipped):
            for index, (epoch, text) in others.items():
                if index not in self.skipped or epoch < self.skipped[index][0]:
                    self.skipped[index] = (epoch, text)
        reading.check_budget(self.skipped, self.dataset)
        return self.skipped

    def close(self) -> None:
        """Stop the workers; the next epoch starts new ones."""
        self._workers.close()

    def _global_limit(self) -> int | None:
        return None if self.limit is None else self.limit * self.share.processes


class OrderedLoader(Loader):
    """A loader over a map-style dataset with a computed order (a plan) or one drawn ahead (a sampler)."""

    def __init__(self, source: DataLoader[Any], options: LoaderOptions) -> None:
        super().__init__(source, options)
        self.dataset = source.dataset
        self.sampler = source.sampler
        self.batch_sampler: Any = source.batch_sampler
        self.batch_size = source.batch_size  # None: the batch sampler is the user's own
        self.drop_last = source.drop_last
        self.num_workers = source.num_workers
        self.guarantee = RANDOM_ACCESS if self._find_plan() is not None else OWN_SAMPLER
        self._drawn = self.batch_sampler if self.batch_size is None else self.sampler
        classes = [type(part) for part in parts_of(self._drawn) if part is not None]
        is_of_torch = all(kind.__module__.partition(".")[0] == "torch" for kind in classes)
        if self.guarantee is OWN_SAMPLER and not self._even_tail and not is_of_torch:
            self.own_samplers[classes[0].__name__] = self._drawn
        self._fetches_here = source.num_workers == 0
        # Skipped ids are agreed on between epochs, and a dataset may learn of its epoch in this process.
        learns_epoch = any(hasattr(each, "set_epoch") for each in (whole_of(self.dataset), source.collate_fn))
        self._may_read_ahead = source.persistent_workers and self.bad_samples != "skip" and not learns_epoch
        # Of workers that continue: the epoch, position and `_basis` they are at, the batches, their notes and feed.
        self._ahead: tuple[Any, Iterator[Any], deque[_Fetched], _Feed] | None = None
        self._pins = source.pin_memory and torch.cuda.is_available()
        has_quick_collate = self._fetches_here and source.collate_fn is default_collate
        kind = reading.SkippingReader if self.bad_samples == "skip" else reading.Reader
        self._reader = kind(source.dataset, collate if has_quick_collate else source.collate_fn)
        self._newest = _NewestFeed()
        self._loader: DataLoader[Any] = DataLoader(
            reading.SeededDataset(self._reader),  # type: ignore[arg-type]
            batch_sampler=self._newest,
            collate_fn=reading.unchanged,
            num_workers=source.num_workers,
            pin_memory=source.pin_memory,
            timeout=source.timeout,
            worker_init_fn=source.worker_init_fn,
            multiprocessing_context=source.multiprocessing_context,
            prefetch_factor=source.prefetch_factor,
            persistent_workers=source.persistent_workers,
            # Its own, so that starting an epoch draws nothing from the global generator.
            generator=torch.Generator(),
        )
        self._workers = WorkerWatch(self._loader)

    def windows(self, epoch: int = 0, position: int = 0) -> Iterator[Window]:
        """Yield the windows of an epoch after `position` samples; nothing before them is fetched."""
        piece: Callable[[Any, int, int], MicroBatch] = MicroBatch
        is_counted = self.bad_samples == "skip"
        if is_counted:
            self.agree_on_skipped()
            piece = partial(self._counted_piece, epoch)
        basis = self._basis()
        fetched: deque[_Fetched] = deque()
        feed = _Feed(self._epochs_from(epoch, position, fetched, basis))
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] != (epoch, position, basis):
            ahead = None  # ends that iteration
        if ahead is not None:
            _, batches, fetched, feed = ahead
        elif self._fetches_here:
            micro_batches = self._local_micro_batches(epoch, position, fetched)
            if self._find_plan() is not None:  # no sampler of the user's is asked ahead of its turn
                micro_batches = _in_bursts(micro_batches)
            batches = map(self._reader, micro_batches)
            batches = map(_pinned, batches) if self._pins else batches
        else:
            batches = self._workers.persevere(lambda done: self._fetched_by_loader(feed))
        for batch in batches:
            first = fetched.popleft()
            pieces = [piece(batch, first.key, first.rows)]
            while len(pieces) < first.pieces:
                batch = next(batches)  # before its note is read: fetching it may write the note
                other = fetched.popleft()
                pieces.append(piece(batch, other.key, other.rows))
            yield Window(pieces, first.samples, is_counted)
            coming = feed.undelivered
            if basis is not None and coming and coming[0].epoch != epoch:
                self._ahead = (epoch + 1, 0, basis), batches, fetched, feed
                return

    def close(self) -> None:
        """Stop the workers, and drop what they have read ahead; the next epoch starts new ones."""
        self._ahead = None
        super().close()

    def samples_of(self, epoch: int, window_index: int) -> list[tuple[int, list[int]]]:
        """Return (position, ids) of every micro-batch of a window, over all processes; nothing is read."""
        size, first = self.share.window, window_index * self.share.window
        if self.batch_size is None:
            window = list(itertools.islice(self._global_micro_batches(epoch, 0), first, first + size))
        else:
            window = list(itertools.islice(self._global_micro_batches(epoch, first * self.batch_size), size))
        return self._shared_out(window)

    def _fetched_by_loader(self, feed: _Feed) -> Iterator[Any]:
        """Yield the batches of a feed; after a loss of workers, from the first undelivered one.

        Persistent workers serve one iteration at a time. If another one took them, this one continues from there too.
        """
        is_taken = True
        while is_taken:
            self._newest.feed, is_taken = feed, False
            with self._workers.reading():
                batches = iter(self._loader)
            try:
                for batch in batches:
                    feed.undelivered.popleft()
                    yield batch
                    is_taken = self._loader.persistent_workers and self._newest.feed is not feed
                    if is_taken:
                        break
            finally:
                self._workers.leave(batches)

    def _basis(self) -> tuple[Any, ...] | None:
        """Return the settings that determine the batches of every epoch; None if the next epoch is not read ahead."""
        plan = self._find_plan() if self._may_read_ahead else None
        if plan is None:
            return None
        order = getattr(plan, "order", plan)  # of a `Bucketed`, which cannot be compared
        return self.sampler, order, self.seed, self.share, self.limit, self.batch_size, self.drop_last

    def _epochs_from(
        self, epoch: int, position: int, fetched: deque[_Fetched], basis: tuple[Any, ...] | None
    ) -> Iterator[BatchIds]:
        """Yield the micro-batches of an epoch, and of the following epochs as far as they may be read ahead."""
        has_next = True
        while has_next:
            is_empty = True
            for micro_batch in self._local_micro_batches(epoch, position, fetched):
                is_empty = False
                yield micro_batch
            epoch, position = epoch + 1, 0
            may_continue = basis is not None and epoch < self.num_epochs and basis == self._basis()
            has_next = may_continue and not is_empty

    def _counted_piece(self, epoch: int, read: reading.Readable, fetch_key: int, rows: int) -> MicroBatch:
        if rows and read.errors:  # errors of a pad are reported by the process that counts it
            reading.note_skipped(self.skipped, read.errors, epoch)
            reading.check_budget(self.skipped, self.dataset)
        return MicroBatch(read.batch, fetch_key, read.rows if rows else 0)

    def _find_plan(self) -> Plan | None:
        sampler = self.sampler
        if self.batch_size is None:
            return None
        if type(sampler) is SequentialSampler:
            return Sequential(len(sampler))
        if type(sampler) is LengthGroupedSampler:
            return sampler.plan(self.seed, self.batch_size)
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
        """Yield (position, ids) of every micro-batch of the epoch from a position, within the limit."""
        limit = self._global_limit()
        stream = keyed_stream(self._drawn, self.seed, epoch, self.device, keeps_own=bool(self.own_samplers))
        if self.batch_size is None:
            start = 0
            for ids in itertools.islice(stream, limit):
                if start >= position:
                    yield start, list(ids)
                start += len(ids)
            return
        plan = self._find_plan()  # not cached: a resumed run sets its original seed
        if plan is not None:
            batches = plan_batches(plan, epoch, position, self.batch_size)
        else:
            ids_from = itertools.islice(stream, position, None)
            batches = iter(lambda: list(itertools.islice(ids_from, self.batch_size)), [])
        if limit is not None:
            batches = itertools.islice(batches, max(limit - position // self.batch_size, 0))
        for ids in batches:
            if self.drop_last and len(ids) < self.batch_size:
                return
            yield position, ids
            position += len(ids)

    def _local_micro_batches(self, epoch: int, position: int, fetched: deque[_Fetched]) -> Iterator[BatchIds]:
        """Yield the micro-batches that this process fetches, and record their windows in `fetched`."""
        share = self.share
        keys = KeyStream(self.seed, epoch, purpose=self._purpose)
        given_up = frozenset(index for index, (first, _) in self.skipped.items() if first < epoch)
        micro_batches = self._global_micro_batches(epoch, position)
        while window := list(itertools.islice(micro_batches, share.window)):
            samples = sum([len(ids) for _, ids in window])
            mine, num_own = (window, len(window)) if share.processes == 1 else self._part_of(window)
            for number, (start, ids) in enumerate(mine):
                fetch_key = keys.at(start)
                fetched.append(_Fetched(fetch_key, len(ids) if number < num_own else 0, len(mine), samples))
                left_out = given_up.intersection(map(reading.plain_id, ids)) if given_up else given_up
                yield BatchIds(ids, fetch_key, epoch, start, left_out)

    def _part_of(self, window: list[tuple[int, list[int]]]) -> tuple[list[tuple[int, list[int]]], int]:
        """Return this process's micro-batches of a window, and how many are its own; the rest are pads."""
        share = self.share
        window = self._shared_out(window)
        first = share.rank * share.accumulation
        mine = [item for item in window[first : first + share.accumulation] if item[1]]
        return mine + window[:1] * share.num_pads(len(mine), len(window)), len(mine)

    def _shared_out(self, window: list[tuple[int, list[int]]]) -> list[tuple[int, list[int]]]:
        """Return a window as the processes run it: short ones of an evaluation are split evenly."""
        is_split = self._even_tail and 0 < len(window) < self.share.processes
        return _split_evenly(window, self.share.processes) if is_split else window


def _in_bursts(micro_batches: Iterator[BatchIds]) -> Iterator[BatchIds]:
    return itertools.chain.from_iterable(iter(lambda: list(itertools.islice(micro_batches, _BURST)), []))


def _pinned(batch: Any) -> Any:
    """Pin a batch, unless it is small: the driver copies up to 64 KiB without waiting, for less than pinning costs."""
    is_small = sum(tensor.nbytes for tensor in iter_tensors(batch)) <= _NOT_PINNED_BYTES
    return batch if is_small else pin_memory(batch)


class ReplayLoader(Loader):
    """A loader over any iterable of batches, in the given order."""

    guarantee = REPLAYED

    def __init__(self, source: Any, options: LoaderOptions) -> None:
        if options.bad_samples == "skip":
            raise ConfigError(
                f"bad_samples='skip' needs the id of every sample, and a {type(source).__name__} that yields batches "
                "in its own order has none. Pass a map-style dataset or a plain DataLoader over one, or leave out bad "
                "samples where the batches are collated."
            )
        super().__init__(source, options)
        self.dataset = getattr(source, "dataset", source)
        self.batch_size: int | None = getattr(source, "batch_size", None)
        self._workers = WorkerWatch(source)

    def windows(self, epoch: int = 0, position: int = 0) -> Iterator[Window]:
        """Yield the windows of an epoch after `position` samples, reading and dropping those before."""
        share = self.share
        limited = itertools.islice(self._batches(epoch), self._global_limit())
        batches = (item for item in limited if item[0] >= position)
        while window := list(itertools.islice(batches, share.window)):
            samples = sum(rows for _, rows, _ in window)
            first = share.rank * share.accumulation
            keys = KeyStream(self.seed, epoch, purpose=self._purpose)
            own = window[first : first + share.accumulation]
            mine = [MicroBatch(batch, keys.at(start), rows) for start, rows, batch in own]
            start, _, batch = window[0]
            mine += [MicroBatch(batch, keys.at(start), 0)] * share.num_pads(len(mine), len(window))
            yield Window(mine, samples)

    def _batches(self, epoch: int) -> Iterator[tuple[int, int, Any]]:
        """Yield (position, rows, batch) of every batch of an epoch, even if workers are lost."""
        return self._workers.persevere(lambda done: itertools.islice(self._read(epoch), done, None))

    def _read(self, epoch: int) -> Iterator[tuple[int, int, Any]]:
        set_epoch_of(epoch, self.dataset, *parts_of(self.source))
        own = OwnGenerators(self.source, epoch)
        seed_generators(key(self.seed, "loader", epoch))
        with own.in_use(), self._workers.reading():
            batches = iter(self.source)
        start = 0
        try:
            for number in itertools.count():
                # A source that draws in this process draws as a function of the position.
                seed_generators(key(self.seed, self._purpose, epoch, self._own_place(start)))
                try:
                    with own.in_use(), self._workers.reading():
                        batch = next(batches, _END)
                except (LoopwrightError, StopTrainingError):
                    raise
                except Exception as error:
                    text = f"batch {number} of epoch {epoch} could not be read: {type(error).__name__}: {error}"
                    raise DataError(text) from error
                if batch is _END:
                    return
                rows = num_rows(batch)
                yield start, rows, batch
                start += rows
        finally:
            self._workers.leave(batches)

    def _own_place(self, start: int) -> int:
        return start

    def _num_global_batches(self) -> int | None:
        try:
            return len(self.source)
        except TypeError:
            return None


def adopt(
    source: Any,
    *,
    seed: int,
    share: Share,
    device: torch.device,
    evaluation: bool = False,
    limit: int | None = None,
    bad_samples: str = "raise",
) -> Loader:
    """Return a Loader with the batches of this DataLoader, or other iterable of batches.

    Args:
        source: the result of `create_train_dataloader` or `create_eval_dataloader`.
        evaluation: no accumulation; the last window is split evenly over the processes.
        limit: micro-batches per process and epoch. If the accumulation does not divide it, the first processes run more
            of the last window than the others.
        bad_samples: "raise" turns an unreadable sample into a DataError that names it; "skip" drops it from its
            micro-batch (see `Loader.skipped`), and needs known sample ids for training.
    """
    if bad_samples not in ("raise", "skip"):
        raise ConfigError(f"bad_samples must be 'raise' or 'skip', got {bad_samples!r}")
    if evaluation:
        share = Share(share.rank, share.processes, 1)
    if isinstance(source, (OrderedLoader, ReplayLoader)):
        source = source.source
    if isinstance(getattr(source, "dl", None), Loader):
        share = Share(0, 1, share.accumulation)  # a slice of our loader already has this process's part only
    options = LoaderOptions(seed, share, device, evaluation, limit, bad_samples)
    is_ordered = type(source) is DataLoader and not isinstance(source.dataset, IterableDataset)
    if is_ordered and source.batch_sampler is not None:
        return OrderedLoader(source, options)
    from loopwright.data.split_streams import SplitLoader, is_split  # imports this module

    kind = SplitLoader if is_split(source, share) else ReplayLoader
    # Only training needs to know which samples were skipped.
    return kind(source, options._replace(bad_samples="raise") if evaluation else options)


class _Fetched(NamedTuple):
    """A micro-batch being read: its key and rows, and its window's number of pieces here and of samples everywhere."""

    key: int
    rows: int
    pieces: int
    samples: int


class _Feed:
    """The micro-batches of an iteration; iterated again, it restarts with those taken but not delivered.

    It ends with their epoch then: what lost the workers may be a batch of the next one, which has to wait its turn.
    """

    def __init__(self, micro_batches: Iterator[BatchIds]) -> None:
        self._rest = micro_batches
        self.undelivered: deque[BatchIds] = deque()

    def __iter__(self) -> Iterator[BatchIds]:
        again, self.undelivered = self.undelivered, deque()
        self._rest = itertools.chain(again, self._rest)
        for micro_batch in self._rest:
            if again and micro_batch.epoch != again[0].epoch:
                return
            self.undelivered.append(micro_batch)
            yield micro_batch


class _NewestFeed:
    """The batch sampler handed to DataLoader: the feed of the newest iteration."""

    feed: _Feed

    def __iter__(self) -> Iterator[BatchIds]:
        return iter(self.feed)


def _split_evenly(window: list[tuple[int, list[int]]], parts: int) -> list[tuple[int, list[int]]]:
    start = window[0][0]
    ids = list(itertools.chain.from_iterable(ids for _, ids in window))
    size, extra = divmod(len(ids), parts)
    bounds = [part * size + min(part, extra) for part in range(parts + 1)]
    return [(start + first, ids[first:last]) for first, last in itertools.pairwise(bounds)]
