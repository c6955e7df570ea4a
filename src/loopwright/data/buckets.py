"""Batches of samples of similar length, padded to a few lengths.

Two features that work well together, and alone:

* an order: `Bucketed` sorts a shuffled order by length within small windows, so that batches need little padding. It
is a pure function of (seed, epoch, position) like any other order, and yields every sample once per epoch.
* bucket lengths: a collator with `bucket_lengths` pads every batch to the next of a small set of lengths, so that few
  shapes occur. Each shape is one CUDA graph (docs/concepts/step_modes.md).
"""

from __future__ import annotations

import copy
import functools
import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler
from tqdm.auto import tqdm

from loopwright.data.order import Ids, Permutation, Shuffled
from loopwright.errors import ConfigError, DataError
from loopwright.keys import key
from loopwright.run_folder.files import DamagedFileError, read_bytes, write_atomically

# Batches sorted together: more make lengths more alike, fewer keep the order more random.
_WINDOW_BATCHES = 50
_FEWEST_WINDOWS = 4  # of a small dataset: otherwise its batches would repeat in every epoch
_FINE_UP_TO = 128  # tokens: dense lengths up to here, since most samples are that short
_NUM_BUCKETS = 12  # each is a graph to record and keep
_LONGEST_BUCKET = 1024  # beyond it the device is busy without graphs, and padding costs more than it saves
_STORED = np.dtype("<i8")  # dtype of a lengths file
_MOST_BYTES = 1 << 35  # of a lengths file
_CHECKED = 16  # samples measured again to validate a lengths file


@dataclass(frozen=True, eq=False)
class Bucketed:
    """A shuffled order, sorted by length within windows of batches; the batches of a window are shuffled again.

    Batches of `batch_size` at multiples of it have samples of similar length. A short last batch is not sorted. Finding
    a position costs one window. The very first batch of a run has the longest sample, so that a lack of memory shows at
    once.
    """

    order: Shuffled
    lengths: npt.NDArray[np.int64]  # of every sample, by id
    batch_size: int

    @property
    def size(self) -> int:
        return self.order.size

    def ids(self, epoch: int, start: int, count: int) -> Ids:
        stop = min(start + count, self.size)
        if start >= stop:
            return np.empty(0, np.int64)
        num_batches = self.size // self.batch_size
        window = self.batch_size * max(1, min(_WINDOW_BATCHES, num_batches // _FEWEST_WINDOWS))
        first = start - start % window
        parts = [self._window_ids(epoch, begin, window) for begin in range(first, stop, window)]
        return np.concatenate(parts)[start - first : stop - first]

    def _window_ids(self, epoch: int, first: int, window: int) -> Ids:
        ids = self.order.ids(epoch, first, window)
        num_batches = max(min(first + window, self.size - self.size % self.batch_size) - first, 0) // self.batch_size
        if epoch == 0 and self.size >= self.batch_size:
            self._bring_longest(ids, first)
        if num_batches == 0:
            return ids
        num_sorted = num_batches * self.batch_size
        full, rest = ids[:num_sorted], ids[num_sorted:]
        batches = full[np.argsort(self.lengths[full], kind="stable")].reshape(num_batches, self.batch_size)
        order = Permutation(key(self.order.seed, "buckets", epoch, first), num_batches)(np.arange(num_batches))
        if epoch == 0 and first == 0:
            place = int(np.flatnonzero(order == num_batches - 1)[0])
            order[0], order[place] = order[place], order[0]
        return np.concatenate([batches[order].ravel(), rest])

    def _bring_longest(self, ids: Ids, first: int) -> None:
        """Swap the first sample of the first epoch with the longest one, within the given ids."""
        longest, place = self._longest
        if first <= place < first + len(ids):
            ids[place - first] = self.order.ids(0, 0, 1)[0]
        if first == 0:
            ids[0] = longest

    @functools.cached_property
    def _longest(self) -> tuple[int, int]:
        longest = int(np.argmax(self.lengths))
        return longest, int(self.order.permutation(0).positions_of(longest))


class LengthGroupedSampler(Sampler[int]):
    """Shuffled ids with similar lengths within a batch, for a `DataLoader(sampler=...)`.

    loopwright's loaders use its order as a plan: resumable anywhere at no cost. Otherwise it yields the epoch of
    `set_epoch`. Without a seed the order uses the run's.
    """

    def __init__(self, lengths: npt.ArrayLike, batch_size: int, seed: int | None = None) -> None:
        self.lengths = np.asarray(lengths, np.int64)
        self.batch_size = batch_size
        self.seed = seed
        self._epoch = 0

    def plan(self, seed: int, batch_size: int) -> Bucketed:
        """Return the order; called by a loader with the seed of the run and its own batch size."""
        return Bucketed(Shuffled(len(self.lengths), seed if self.seed is None else self.seed), self.lengths, batch_size)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(self.plan(0, self.batch_size).ids(self._epoch, 0, len(self)).tolist())


def sample_lengths(
    dataset: Any,
    column: str = "length",
    main_input: str = "input_ids",
    *,
    function: Callable[[Any], int] | None = None,
    cache: Path | None = None,  # a file in an existing folder
    watch: Callable[[Iterable[int]], Iterable[int]] | None = None,  # shows progress; None is a bar on a terminal
) -> npt.NDArray[np.int64]:
    """Return the length of every sample of a dataset, in order.

    It comes from the function, the length column, or the length of the main input. Samples are read at most once. The
    cache is valid if it has one length per sample and ends with their sha256, and some samples read again match.
    """
    size = len(dataset)
    names = getattr(dataset, "column_names", None) or ()
    if function is None and column in names:
        return np.fromiter(dataset[column], np.int64, size)
    if size == 0:
        return np.empty(0, np.int64)
    measure = _measure(dataset[0], column, main_input) if function is None else function
    known = None if cache is None else _read_lengths(cache, dataset, measure)
    if known is not None:
        return known
    if function is None and main_input in names:
        values: Iterable[int] = map(len, dataset[main_input])  # the other columns need not be read
    else:
        values = (measure(dataset[index]) for index in range(size))
    if watch is None:
        values = tqdm(values, total=size, desc="lengths", delay=2, leave=False, disable=None)
    else:
        values = watch(values)
    lengths = np.fromiter(values, np.int64, size)
    if cache is not None:
        content = lengths.astype(_STORED).tobytes()
        write_atomically(cache, content + hashlib.sha256(content).digest())
    return lengths


def _measure(sample: Any, column: str, main_input: str) -> Callable[[Any], int]:
    has_names = isinstance(sample, Mapping)
    if has_names and column in sample:
        return lambda each: int(each[column])
    if has_names and main_input in sample:
        return lambda each: len(each[main_input])
    held = ", ".join(map(str, sample)) if has_names else type(sample).__name__
    raise DataError(
        f"grouping samples by length needs their lengths: a sample must have a column {column} or {main_input}, and "
        f"has {held}. Set length_column_name to the column of the lengths."
    )


def _read_lengths(cache: Path, dataset: Any, measure: Callable[[Any], int]) -> npt.NDArray[np.int64] | None:
    size = len(dataset)
    try:
        whole = read_bytes(cache, _MOST_BYTES)
    except (OSError, DamagedFileError):
        return None
    content = whole[: size * _STORED.itemsize]
    if hashlib.sha256(content).digest() != whole[len(content) :]:
        return None
    lengths = np.frombuffer(content, _STORED).astype(np.int64)
    places = np.unique(np.linspace(0, size - 1, min(size, _CHECKED)).astype(np.int64)).tolist()
    return lengths if all(measure(dataset[place]) == lengths[place] for place in places) else None


def default_lengths(longest: int, most: int = _NUM_BUCKETS) -> tuple[int, ...]:
    """Return up to `most` lengths to pad to: dense up to 128 tokens, sparser up to the longest or 1024."""
    longest = min(longest, _LONGEST_BUCKET)
    step = 16
    while (fine := _multiples(step, 0, min(longest, _FINE_UP_TO))) and len(fine) > max(most * 2 // 3, 1):
        step *= 2
    step = 32
    while len(coarse := _multiples(step, max(fine), longest)) > max(most - len(fine), 1):
        step *= 2
    return (*fine, *coarse)


def _multiples(step: int, above: int, up_to: int) -> list[int]:
    inner = [value for value in range(step, up_to, step) if value > above]
    return [*inner, up_to] if up_to > above else inner


def bucket_length(length: int, lengths: Sequence[int]) -> int:
    """Return the next of some ascending lengths; a length beyond all of them is unchanged."""
    place = bisect_left(lengths, length)
    return lengths[place] if place < len(lengths) else length


def chosen_lengths(
    setting: str | Sequence[Any], longest: int | None, *, may_graph: bool, most: int = _NUM_BUCKETS
) -> tuple[int, ...] | None:
    """Return the bucket lengths of the setting `length_buckets`; None pads to the longest sample of each batch.

    The setting is "auto", "off", or the lengths. "auto" has up to `most` lengths, if the longest sample is known and
    updates may be CUDA graphs.
    """
    if setting == "off":
        return None
    if setting == "auto":
        return default_lengths(longest, most) if may_graph and longest else None
    try:
        lengths = tuple(sorted({int(value) for value in setting}))
    except (TypeError, ValueError):
        lengths = ()
    if not lengths or lengths[0] < 1:
        raise ConfigError(f'length_buckets must be "auto", "off" or lengths such as 32 64 128, got {setting!r}')
    return lengths


def may_be_graphs(training: Any, device: Any, num_processes: int) -> bool:
    """Whether the updates of a run with these `TrainingArguments` may be CUDA graphs."""
    is_allowed = training.step_mode != "eager" and not training.fp16
    return is_allowed and device.type == "cuda" and num_processes == 1


def loop_padding(padding: str) -> str:
    """Return the `padding` of `Trainer.train`, which gets batches as the collator pads them."""
    return "keep" if padding in ("bucket", "longest") else padding


def with_buckets(collate: Any, lengths: tuple[int, ...] | None) -> Any:
    """Return a copy of a collator that pads to these lengths; one without that attribute, or with its own, as it is."""
    if lengths is None or not hasattr(collate, "bucket_lengths") or collate.bucket_lengths:
        return collate
    padded = copy.copy(collate)
    padded.bucket_lengths = lengths
    return padded
