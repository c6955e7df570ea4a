"""Reading the samples of a micro-batch, and what is done about those that cannot be read.

`Reader` seeds the generators of the process it runs in, fetches the samples and makes a batch of them. A sample
that raises is an error that says which one it was. `SkippingReader` leaves such samples out instead, and tells.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sized
from typing import Any, NamedTuple, NoReturn

from loopwright.data.order import MicroBatch
from loopwright.engine.seeding import seed_generators
from loopwright.errors import DataError, LoopwrightError, StopTrainingError

Skipped = dict[int, tuple[int, str]]  # id: the epoch in which it was first skipped, and why

_logger = logging.getLogger("loopwright")

_PASSED_ON = (LoopwrightError, StopTrainingError)  # these say themselves what they mean
_NEVER_SKIPPED = (*_PASSED_ON, MemoryError)
_MOST_STAND_INS = 10
_MOST_NAMED = 20
_LEAST_BUDGET = 10


class Reader:
    """Reads micro-batches of a dataset, each under generators seeded by its position.

    Attributes:
        dataset: what is read: by its `__getitems__` if it has one, else sample by sample.
        make_batch: makes a batch of a list of samples.
    """

    def __init__(self, dataset: Any, make_batch: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.make_batch = make_batch

    def __call__(self, micro_batch: MicroBatch) -> Any:
        """Return the batch of these samples.

        Raises:
            DataError: it says which sample could not be read, or which ones are no batch together.
        """
        seed_generators(micro_batch.key)
        dataset = self.dataset
        fetch: Callable[[list[int]], list[Any]] | None = getattr(dataset, "__getitems__", None)
        ids = iter(micro_batch)
        try:
            samples = [dataset[index] for index in ids] if fetch is None else fetch(list(micro_batch))
        except _PASSED_ON:
            raise
        except Exception as error:
            if fetch is None:
                # The iterator has just passed the culprit.
                raise _unreadable(micro_batch, len(micro_batch) - operator.length_hint(ids) - 1, error) from error
            self._raise_for_culprit(fetch, micro_batch, error)
        return self._batch_of(samples, micro_batch)

    def _batch_of(self, samples: list[Any], micro_batch: MicroBatch) -> Any:
        try:
            return self.make_batch(samples)
        except _PASSED_ON:
            raise
        except Exception as error:
            raise DataError(
                f"{_described(micro_batch)} could not be made into a batch: {type(error).__name__}: {error}. "
                "Compare their shapes and types, or pass a collate_fn that can handle them."
            ) from error

    def _raise_for_culprit(
        self, fetch: Callable[[list[int]], list[Any]], micro_batch: MicroBatch, error: Exception
    ) -> NoReturn:
        """Raise what was wrong with a fetch of many: the first sample that raises alone, or else all of them."""
        seed_generators(micro_batch.key)
        for offset, index in enumerate(micro_batch):
            try:
                fetch([index])
            except Exception as own_error:
                raise _unreadable(micro_batch, offset, own_error) from own_error
        raise DataError(
            f"{_described(micro_batch)} could not be read together, but each alone: {type(error).__name__}: {error}"
        ) from error


class Readable(NamedTuple):
    """What could be read of a micro-batch.

    Attributes:
        batch: of the samples that could be read; of a stand-in if none could.
        rows: how many could be read.
        errors: id and error of each that could not.
    """

    batch: Any
    rows: int
    errors: list[tuple[int, str]]


class SkippingReader(Reader):
    """A reader that leaves out samples that cannot be read."""

    def __call__(self, micro_batch: MicroBatch) -> Readable:
        """Return the batch of those samples that can be read, and what was wrong with the others."""
        seed_generators(micro_batch.key)
        wanted = [index for index in micro_batch if plain_id(index) not in micro_batch.left_out]
        samples, errors = self._read_many(wanted, micro_batch.key)
        rows = len(samples)
        if micro_batch and not samples:
            samples = [self._stand_in_for(micro_batch)]
        return Readable(self._batch_of(samples, micro_batch), rows, errors)

    def _read_many(self, ids: list[int], fetch_key: int) -> tuple[list[Any], list[tuple[int, str]]]:
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch is not None and ids:
            try:
                return fetch(list(ids)), []
            except _NEVER_SKIPPED:
                raise
            except Exception:  # noqa: BLE001 - whatever it is: below each sample that raises is told
                seed_generators(fetch_key)
        samples: list[Any] = []
        errors: list[tuple[int, str]] = []
        for index in ids:
            try:
                samples.append(self._read_one(index))
            except _NEVER_SKIPPED:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is: it is told, and the sample left out
                errors.append((plain_id(index), f"{type(error).__name__}: {error}"))
        return samples, errors

    def _read_one(self, index: int) -> Any:
        fetch = getattr(self.dataset, "__getitems__", None)
        return self.dataset[index] if fetch is None else fetch([index])[0]

    def _stand_in_for(self, micro_batch: MicroBatch) -> Any:
        """Return one of the samples that follow in the dataset: something to run that counts nothing."""
        last, errors = plain_id(micro_batch[-1]), "its ids are no integers"
        if isinstance(last, int):
            for index in range(last + 1, last + 1 + _MOST_STAND_INS):
                samples, failed = self._read_many([self._within(index)], micro_batch.key)
                if samples:
                    return samples[0]
                errors = failed[0][1]
        raise DataError(
            f"none of {_described(micro_batch)} could be read, nor any of the {_MOST_STAND_INS} that follow in the "
            f"dataset to stand in for them: {errors}"
        )

    def _within(self, index: int) -> int:
        return index % len(self.dataset) if isinstance(self.dataset, Sized) else index


class SeededDataset:
    """A dataset as DataLoader's workers see it: whole batches are read from it, by a reader.

    Everything else is the dataset's own: a `worker_init_fn` finds and sets its attributes through this.
    """

    def __init__(self, reader: Reader) -> None:
        object.__setattr__(self, "_loopwright_reader", reader)

    def __getitems__(self, micro_batch: MicroBatch) -> Any:
        """Return the batch of a micro-batch; DataLoader's own collate function has nothing left to do."""
        return self._loopwright_reader(micro_batch)

    def __getitem__(self, index: Any) -> Any:
        return self._loopwright_reader.dataset[index]

    def __len__(self) -> int:
        return len(self._loopwright_reader.dataset)

    def __getattr__(self, name: str) -> Any:
        # Not yet there while it is unpickled; and how to pickle this is no business of the dataset's.
        if name == "_loopwright_reader" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loopwright_reader.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loopwright_reader.dataset, name, value)


def note_skipped(skipped: Skipped, errors: list[tuple[int, str]], epoch: int) -> None:
    """Take up the errors of a micro-batch that is about to be used, and tell of each id once."""
    for index, text in errors:
        if index not in skipped:
            skipped[index] = (epoch, text)
            _logger.warning("sample %s could not be read in epoch %s and is skipped: %s", index, epoch, text)


def check_budget(skipped: Skipped, dataset: Any) -> None:
    """Refuse to go on without more than 1 % of a dataset's samples (10 of a small one).

    Raises:
        DataError: it tells the first few, and why they could not be read.
    """
    budget = max(_LEAST_BUDGET, len(dataset) // 100 if isinstance(dataset, Sized) else 0)
    if len(skipped) > budget:
        first = "; ".join(f"{index}: {text}" for index, (_, text) in list(skipped.items())[:3])
        raise DataError(
            f"{len(skipped)} samples could not be read, more than the {budget} that may be skipped (1 % of the "
            f"dataset, at least {_LEAST_BUDGET}). The first are {first}. Mend them or take them out of the dataset."
        )


def unchanged(batch: Any) -> Any:
    """Return a batch as it is: the collate function of a DataLoader over a `SeededDataset`."""
    return batch


def plain_id(index: Any) -> int:
    """Return an id as a plain integer where it is one (a numpy or torch number), so that it can be looked up."""
    try:
        return operator.index(index)
    except TypeError:
        return index  # type: ignore[no-any-return] # a key of the user's own, which is what it is


def _unreadable(micro_batch: MicroBatch, offset: int, error: Exception) -> DataError:
    return DataError(
        f"sample {micro_batch[offset]} (position {micro_batch.position + offset} of epoch {micro_batch.epoch}) could "
        f"not be read: {type(error).__name__}: {error}. "
        "Mend it or take it out of the dataset, or leave out what cannot be read with bad_samples='skip'."
    )


def _described(micro_batch: MicroBatch) -> str:
    ids = ", ".join(str(index) for index in micro_batch[:_MOST_NAMED])
    more = f", ... ({len(micro_batch)} in all)" if len(micro_batch) > _MOST_NAMED else ""
    return f"the samples {ids}{more} (from position {micro_batch.position} of epoch {micro_batch.epoch})"
