"""Read the samples of a micro-batch, and handle unreadable ones.

`Reader` seeds the generators of its process, fetches the samples and collates them. A sample that raises becomes an
error that names it. `SkippingReader` skips such samples instead, and reports them.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sized
from typing import Any, NamedTuple, NoReturn

from loopwright.data.order import BatchIds
from loopwright.engine.seeding import seed_generators
from loopwright.errors import DataError, LoopwrightError, StopTrainingError

Skipped = dict[int, tuple[int, str]]  # id: the epoch in which it was first skipped, and why

_logger = logging.getLogger("loopwright")

_PASSED_ON = (LoopwrightError, StopTrainingError)  # these are already clear
_NEVER_SKIPPED = (*_PASSED_ON, MemoryError)
_MOST_STAND_INS = 10
_MOST_NAMED = 20
_LEAST_BUDGET = 10


class Reader:
    """Reads micro-batches of a dataset, each under generators seeded by its position.

    A dataset is read by its `__getitems__` if it has one, else sample by sample.
    """

    def __init__(self, dataset: Any, make_batch: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.make_batch = make_batch

    def __call__(self, micro_batch: BatchIds) -> Any:
        """Return the batch of these samples; raise a DataError that names those that cannot be read or collated."""
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

    def _batch_of(self, samples: list[Any], micro_batch: BatchIds) -> Any:
        try:
            return self.make_batch(samples)
        except _PASSED_ON:
            raise
        except Exception as error:
            raise DataError(
                f"{_described(micro_batch)} could not be collated: {type(error).__name__}: {error}. Compare their "
                "shapes and types, or pass a collate_fn that can handle them."
            ) from error

    def _raise_for_culprit(
        self, fetch: Callable[[list[int]], list[Any]], micro_batch: BatchIds, error: Exception
    ) -> NoReturn:
        """Raise the error of a failed bulk fetch: for the first sample that fails alone, or else for all of them."""
        seed_generators(micro_batch.key)
        for offset, index in enumerate(micro_batch):
            try:
                fetch([index])
            except Exception as own_error:
                raise _unreadable(micro_batch, offset, own_error) from own_error
        raise DataError(
            f"{_described(micro_batch)} could be read one by one, but not together: {type(error).__name__}: {error}"
        ) from error


class Readable(NamedTuple):
    """The readable part of a micro-batch."""

    batch: Any  # of the readable samples, or of a stand-in
    rows: int  # the number of readable samples
    errors: list[tuple[int, str]]  # id and error of each unreadable sample


class SkippingReader(Reader):
    """A reader that skips unreadable samples."""

    def __call__(self, micro_batch: BatchIds) -> Readable:
        """Return the batch of the readable samples, and the errors of the others."""
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
            except Exception:  # noqa: BLE001 - whatever it is: below each sample that raises is reported
                seed_generators(fetch_key)
        samples: list[Any] = []
        errors: list[tuple[int, str]] = []
        for index in ids:
            try:
                samples.append(self.dataset[index] if fetch is None else fetch([index])[0])
            except _NEVER_SKIPPED:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is: it is reported, and the sample skipped
                errors.append((plain_id(index), f"{type(error).__name__}: {error}"))
        return samples, errors

    def _stand_in_for(self, micro_batch: BatchIds) -> Any:
        """Return one of the following samples of the dataset, to run without counting it."""
        last, errors = plain_id(micro_batch[-1]), "its ids are not integers"
        if isinstance(last, int):
            for index in range(last + 1, last + 1 + _MOST_STAND_INS):
                place = index % len(self.dataset) if isinstance(self.dataset, Sized) else index
                samples, failed = self._read_many([place], micro_batch.key)
                if samples:
                    return samples[0]
                errors = failed[0][1]
        raise DataError(
            f"none of {_described(micro_batch)} could be read, nor any of the {_MOST_STAND_INS} that follow in the "
            f"dataset: {errors}"
        )


class SeededDataset:
    """A dataset as DataLoader's workers see it: a reader reads whole batches from it.

    Everything else is delegated: a `worker_init_fn` can get and set the dataset's attributes.
    """

    def __init__(self, reader: Reader) -> None:
        object.__setattr__(self, "_loopwright_reader", reader)

    def __getitems__(self, micro_batch: BatchIds) -> Any:
        """Return the batch of a micro-batch; DataLoader's own collate function is a no-op."""
        return self._loopwright_reader(micro_batch)

    def __getitem__(self, index: Any) -> Any:
        return self._loopwright_reader.dataset[index]

    def __len__(self) -> int:
        return len(self._loopwright_reader.dataset)

    def __getattr__(self, name: str) -> Any:
        # Missing while it is unpickled; and pickling is not delegated to the dataset.
        if name == "_loopwright_reader" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loopwright_reader.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loopwright_reader.dataset, name, value)


def note_skipped(skipped: Skipped, errors: list[tuple[int, str]], epoch: int) -> None:
    """Record the errors of a micro-batch about to be used, and report each id once."""
    for index, text in errors:
        if index not in skipped:
            skipped[index] = (epoch, text)
            _logger.warning("sample %s could not be read in epoch %s and is skipped: %s", index, epoch, text)


def check_budget(skipped: Skipped, dataset: Any) -> None:
    """Raise a DataError, with the first few errors, if more than 1 % of a dataset (10 of a small one) was skipped."""
    budget = max(_LEAST_BUDGET, len(dataset) // 100 if isinstance(dataset, Sized) else 0)
    if len(skipped) > budget:
        first = "; ".join(f"{index}: {text}" for index, (_, text) in list(skipped.items())[:3])
        raise DataError(
            f"{len(skipped)} samples could not be read, more than the {budget} that may be skipped (1 % of the "
            f"dataset, at least {_LEAST_BUDGET}). The first are {first}. Repair them, or remove them from the dataset."
        )


def unchanged(batch: Any) -> Any:
    """Return a batch unchanged: the collate function of a DataLoader over a `SeededDataset`."""
    return batch


def plain_id(index: Any) -> int:
    """Return a numpy or torch integer as a plain one, so that it can be looked up."""
    try:
        return operator.index(index)
    except TypeError:
        return index  # type: ignore[no-any-return] # a key of the user's own, which is what it is


def _unreadable(micro_batch: BatchIds, offset: int, error: Exception) -> DataError:
    return DataError(
        f"sample {micro_batch[offset]} (position {micro_batch.position + offset} of epoch {micro_batch.epoch}) could "
        f"not be read: {type(error).__name__}: {error}. "
        "Repair it, remove it from the dataset, or skip unreadable samples with bad_samples='skip'."
    )


def _described(micro_batch: BatchIds) -> str:
    ids = ", ".join(str(index) for index in micro_batch[:_MOST_NAMED])
    more = f", ... ({len(micro_batch)} in all)" if len(micro_batch) > _MOST_NAMED else ""
    return f"the samples {ids}{more} (from position {micro_batch.position} of epoch {micro_batch.epoch})"
