"""The order of samples, as a pure function of (seed, epoch, position).

It is independent of torch, workers, processes and the clock, so one integer is enough to resume a run from any
position, on any number of workers and processes.

`Permutation` is a keyed Feistel network with cycle walking: it finds the sample at a position without building the
whole permutation (no memory, no start-up cost, at any size). Its outputs are pinned by golden vectors: they never
change between versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loopwright.keys import key

Ids = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

# splitmix64's two multipliers (Steele, Lea, Flood 2014), here as the Feistel round function's mixer.
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_ROUNDS = 8  # even, so that the halves end up with their own widths
_SMALLEST_BITS = 6  # tiny domains have too few Feistel networks to look random
_CHUNK = 16_384  # positions computed at once, to amortise numpy's cost per call


class Permutation:
    """A keyed bijection of range(size), with random access."""

    def __init__(self, permutation_key: int, size: int) -> None:
        self.size = size
        bits = max((max(size, 2) - 1).bit_length(), _SMALLEST_BITS)
        self._left_bits, self._right_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
        self._round_keys = [np.uint64(key(permutation_key, "round", index)) for index in range(_ROUNDS)]

    def __call__(self, positions: npt.ArrayLike) -> Ids:
        """Return the ids at these positions, in the same shape, each in range(size)."""
        return self._walked(positions, self._network)

    def positions_of(self, ids: npt.ArrayLike) -> Ids:
        """Return the positions of these ids, in the same shape: the inverse."""
        return self._walked(ids, self._inverse_network)

    def _walked(self, values: npt.ArrayLike, network: Callable[[_Words], _Words]) -> Ids:
        given = np.asarray(values)
        if given.size and (given.min() < 0 or given.max() >= self.size):
            raise IndexError(f"positions {given.min()} to {given.max()} are not all in a permutation of {self.size}")
        found = network(given.astype(np.uint64).ravel())
        # Cycle walking: values outside range(size) go through again until they fall inside.
        outside = np.flatnonzero(found >= np.uint64(self.size))
        while outside.size:
            found[outside] = network(found[outside])
            outside = outside[found[outside] >= np.uint64(self.size)]
        return found.astype(np.int64).reshape(given.shape)

    def _network(self, values: _Words) -> _Words:
        left_bits, right_bits = self._left_bits, self._right_bits
        left = values >> right_bits
        right = values & ((np.uint64(1) << right_bits) - np.uint64(1))
        for round_key in self._round_keys:
            left, right = right, left ^ _mixed(right, round_key, left_bits)
            left_bits, right_bits = right_bits, left_bits
        return (left << right_bits) | right

    def _inverse_network(self, values: _Words) -> _Words:
        left_bits, right_bits = self._left_bits, self._right_bits
        left = values >> right_bits
        right = values & ((np.uint64(1) << right_bits) - np.uint64(1))
        for round_key in reversed(self._round_keys):
            left_bits, right_bits = right_bits, left_bits
            left, right = right ^ _mixed(left, round_key, left_bits), left
        return (left << right_bits) | right


def _mixed(half: _Words, round_key: np.uint64, bits: np.uint64) -> _Words:
    mixed = (half + round_key) * _MIX_1
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MIX_2
    return mixed >> (np.uint64(64) - bits)


class Plan(Protocol):
    """An order of samples: the id at each position of an epoch."""

    @property
    def size(self) -> int:
        """Samples of an epoch."""

    def ids(self, epoch: int, start: int, count: int) -> Ids:
        """Return the ids at positions start .. start+count-1 of an epoch (fewer at its end)."""


@dataclass(frozen=True)
class Sequential:
    """Positions are ids."""

    size: int

    def ids(self, epoch: int, start: int, count: int) -> Ids:
        return np.arange(start, min(start + count, self.size), dtype=np.int64)


@dataclass(frozen=True)
class Shuffled:
    """A new keyed permutation for every epoch."""

    size: int
    seed: int

    def ids(self, epoch: int, start: int, count: int) -> Ids:
        return self.permutation(epoch)(np.arange(start, min(start + count, self.size), dtype=np.uint64))

    def permutation(self, epoch: int) -> Permutation:
        """Return the permutation of an epoch, from positions to ids."""
        return Permutation(key(self.seed, "order", epoch), self.size)


class BatchIds(list[int]):
    """The ids of one micro-batch, with everything needed to fetch it the same way anywhere.

    A list, so that torch's DataLoader can pass it to a dataset's `__getitems__`. The key seeds the generators of the
    process that fetches it, and follows from the position of its first sample in the epoch.
    """

    __slots__ = ("epoch", "key", "left_out", "position")

    def __init__(
        self, ids: list[int], fetch_key: int, epoch: int, position: int, left_out: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(ids)
        self.key = fetch_key
        self.epoch = epoch
        self.position = position
        self.left_out = left_out

    def __reduce__(self) -> tuple[type[BatchIds], tuple[list[int], int, int, int, frozenset[int]]]:
        return BatchIds, (list(self), self.key, self.epoch, self.position, self.left_out)


def plan_batches(plan: Plan, epoch: int, start: int, batch_size: int) -> Iterator[list[int]]:
    """Yield the ids of an epoch from a position, a batch at a time; the last may be short."""
    chunk = max(_CHUNK // batch_size, 1) * batch_size
    for chunk_start in range(start, plan.size, chunk):
        ids = plan.ids(epoch, chunk_start, chunk).tolist()
        for offset in range(0, len(ids), batch_size):
            yield ids[offset : offset + batch_size]


@dataclass(frozen=True)
class Share:
    """Which micro-batches of the global sequence one process runs.

    The micro-batches of an epoch are numbered 0 .. M-1 over all processes. An update takes a window of `processes *
    accumulation` of them; a process runs a contiguous part of each window. None of this changes the samples of an
    update. In a short window a process may have fewer than others, or none; then it runs one uncounted pad, or with
    `is_even` enough pads to run no fewer.
    """

    rank: int = 0
    processes: int = 1
    accumulation: int = 1
    is_even: bool = False

    @property
    def window(self) -> int:
        """Micro-batches of one full update, over all processes."""
        return self.processes * self.accumulation

    def owner(self, index: int) -> int:
        """Return the rank that runs this micro-batch."""
        return (index % self.window) // self.accumulation

    def num_updates(self, num_batches: int) -> int:
        """Return the updates of an epoch of this many micro-batches; its last window may be short."""
        return -(-num_batches // self.window)

    def num_local_batches(self, num_batches: int) -> int:
        """Return the number of micro-batches of this process, pads included."""
        full, rest = divmod(num_batches, self.window)
        mine = min(max(rest - self.rank * self.accumulation, 0), self.accumulation)
        return full * self.accumulation + mine + self.num_pads(mine, rest)

    def num_pads(self, num_own: int, num_in_window: int) -> int:
        """Return the number of pads that this process runs in a window to stay in step."""
        wanted = min(num_in_window, self.accumulation if self.is_even else 1)
        return max(wanted - num_own, 0)
