"""Noisy datasets and samplers for the tests of loaders, and what a training loop gets to see of a loader."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from loopwright.data import Share, adopt
from toys import plain

CPU = torch.device("cpu")


class Indices:
    def __init__(self, size: int = 48) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Indices):
    """Samples with an augmentation from each of the three libraries."""

    def __getitem__(self, index):
        noise = [random.random(), float(np.random.rand()), torch.rand(()).item()]
        return torch.tensor([index, *noise], dtype=torch.float64)


class NoisyStream(IterableDataset):
    """The same as a stream, divided among the workers, with another order in every epoch."""

    def __init__(self, size: int = 48) -> None:
        self.samples = Noisy(size)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(first, len(self.samples), step):
            yield self.samples[(index + self.epoch) % len(self.samples)]


class OwnLoader(DataLoader):
    """A DataLoader that starts its workers when its first batch is asked for, and changes every batch."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch + torch.rand(())


class LazySampler(Sampler):
    """Draws every id when it is asked for it, from python's generator."""

    def __init__(self, size: int, num_samples: int) -> None:
        self.size, self.num_samples = size, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self):
        for _ in range(self.num_samples):
            yield random.randrange(self.size)


def adopted(source, seed=7, rank=0, processes=1, accumulation=1, **kwargs):
    return adopt(source, seed=seed, share=Share(rank, processes, accumulation), device=CPU, **kwargs)


def seen(windows, disturb=None) -> list:
    """Everything that a training loop gets to see of these windows; `disturb` is called after the second."""
    found = []
    for index, window in enumerate(windows):
        pieces = [(plain(piece.batch), piece.key, piece.rows) for piece in window.pieces]
        found.append((pieces, window.samples))
        if disturb is not None and index == 1:
            disturb()
    return found
