"""DataLoaders from a dataset and the arguments, and the order that groups samples of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from loopwright.data.order import Permutation
from loopwright.errors import ConfigError, DataError
from loopwright.hf.columns import DataCollator
from loopwright.keys import key

# Batches that are sorted together: more make lengths more alike, fewer keep the order more random.
_GROUPED_BATCHES = 50


class LengthGroupedSampler(Sampler[int]):
    """A shuffled order in which neighbours have similar lengths; a function of the seed and the epoch.

    The longest sample comes first, so that memory runs out at once if it does.

    Args:
        lengths: of every sample.
        batch_size: samples of a batch.
        seed: of the order.
    """

    def __init__(self, lengths: list[int], batch_size: int, seed: int) -> None:
        self._lengths = np.asarray(lengths)
        self._group = batch_size * _GROUPED_BATCHES
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch's order iterating yields."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        size = len(self._lengths)
        ids = Permutation(key(self._seed, "length-groups", self._epoch), size)(np.arange(size))
        groups = [ids[start : start + self._group] for start in range(0, size, self._group)]
        groups = [group[np.argsort(-self._lengths[group], kind="stable")] for group in groups]
        longest = max(range(len(groups)), key=lambda index: int(self._lengths[groups[index][0]]))
        groups[0][0], groups[longest][0] = groups[longest][0], groups[0][0]
        yield from np.concatenate(groups).tolist()


def sample_lengths(dataset: Any, column: str, main_input: str) -> list[int]:
    """Return the length of every sample: its length column, or how long its main input is.

    Raises:
        DataError: samples have neither.
    """
    if column in (getattr(dataset, "column_names", None) or ()):
        return [int(length) for length in dataset[column]]
    sample = dataset[0]
    if not isinstance(sample, Mapping) or not (column in sample or main_input in sample):
        held = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
        raise DataError(
            f'train_sampling_strategy="group_by_length" needs a column {column} or {main_input}; a sample has {held}. '
            "Set length_column_name to the column that holds the lengths."
        )
    samples = (dataset[index] for index in range(len(dataset)))
    return [int(each[column]) if column in each else len(each[main_input]) for each in samples]


def train_sampler(dataset: Any, args: Any, main_input: str) -> Sampler[int] | None:
    """Return the order of a training dataset as the arguments want it; None for data without random access."""
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        return None
    if isinstance(dataset, Mapping) or len(dataset) == 0:
        return None  # refused when its loader is made
    if args.train_sampling_strategy == "sequential":
        return SequentialSampler(dataset)
    if args.train_sampling_strategy == "group_by_length":
        lengths = sample_lengths(dataset, args.length_column_name, main_input)
        seed = args.seed if args.data_seed is None else args.data_seed
        return LengthGroupedSampler(lengths, args.train_batch_size, seed)
    generator = None
    if args.data_seed is not None:
        generator = torch.Generator()
        generator.manual_seed(args.data_seed)
    return RandomSampler(dataset, generator=generator)


def create_dataloader(
    dataset: Any, args: Any, batch_size: int, collate: DataCollator, sampler: Sampler[int] | None
) -> Any:
    """Return the DataLoader of a dataset; one that is a DataLoader already is returned as it is.

    Raises:
        ConfigError: the dataset is no dataset.
    """
    if isinstance(dataset, DataLoader):
        return dataset
    if isinstance(dataset, Mapping):
        names = list(map(str, dataset)) or ["train"]
        raise ConfigError(
            f"a dict of datasets ({', '.join(names)}) is not a dataset: pass one of them, as in datasets[{names[0]!r}]"
        )
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
        raise ConfigError(f"a dataset must have __getitem__ and __len__, or __iter__; got a {type(dataset).__name__}")
    workers = args.dataloader_num_workers
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "collate_fn": collate,
        "num_workers": workers,
        "pin_memory": args.dataloader_pin_memory and torch.accelerator.is_available(),
        "persistent_workers": args.dataloader_persistent_workers and not isinstance(dataset, IterableDataset),
    }
    if workers:
        options["prefetch_factor"] = args.dataloader_prefetch_factor
        options["multiprocessing_context"] = args.dataloader_multiprocessing_context
    if not isinstance(dataset, IterableDataset):
        options["sampler"] = SequentialSampler(dataset) if sampler is None else sampler
        options["drop_last"] = args.dataloader_drop_last
    return DataLoader(dataset, **options)
